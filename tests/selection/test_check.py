"""headcount check: verdicts before training, from bags and labels alone."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

from headcount.bags import Bags
from headcount.cli import main
from headcount.majority import transition
from headcount.readers import read
from headcount.readers.columns import ColumnRoles
from headcount.selection.check import advice, learnability, linear_baseline
from headcount.selection.check import check as checking
from headcount.selection.check.check import check

NAMES = ("ant", "bee", "cow", "dog")


def made(bags=36, size=10, share=0.7, classes=3, apart=4.0, seed=0, never=None, labels_by_lot=False, text=False):
    """A table of instances: in each bag so large a share is of the label's class, the others by lot among the rest."""
    g = np.random.default_rng(seed)
    centre = apart * g.permutation(np.eye(classes, 4))
    rows = {"bag": [], "label": [], "truth": []} | {f"f{i}": [] for i in range(4)}
    winners = [c for c in range(classes) if c != never]
    for b in range(bags):
        own = winners[b % len(winners)]
        first = max(round(share * size), 1)
        rest = [c for c in range(classes) if c != own]
        y = [own] * first + [rest[i % len(rest)] for i in g.permutation(size - first)]
        said = int(g.integers(classes)) if labels_by_lot else own
        for k in y:
            x = centre[k] + g.normal(size=4)
            rows["bag"].append(f"b{b}")
            rows["label"].append(NAMES[said])
            rows["truth"].append(NAMES[k])
            for i in range(4):
                rows[f"f{i}"].append(float(x[i]))
    return rows


def checked(table, truth=False, **how):
    table = {k: v for k, v in table.items() if truth or k != "truth"}
    return check(read(table, **how))


def run(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr)"""
    monkeypatch.setattr(sys, "argv", ["headcount", *map(str, words)])
    with pytest.raises(SystemExit) as e:
        main.main()
    said = capsys.readouterr()
    return e.value.code, said.out, said.err


def written(folder: Path, table) -> Path:
    pa.csv.write_csv(pa.table(table), folder / "d.csv")
    return folder / "d.csv"


def plain(said):
    """JSON without the clock."""
    return {k: v for k, v in said.to_json().items() if k != "seconds"}


# -- verdicts ---------------------------------------------------------------------------------------------------------------


def test_clear_bags_are_good_and_the_estimates_are_near():
    table = made()
    said = checked(table)
    assert said.verdict == "good"
    assert said.learnability is not None
    assert said.learnability.share == pytest.approx([0.7] * 3, abs=0.06)
    assert np.all((said.learnability.share_low <= 0.7) & (said.learnability.share_high >= 0.7))
    assert said.accuracy[0] > 0.67
    assert said.accuracy[1] > 0.97
    assert said.learnability.conditioning.condition == pytest.approx(1 / (0.7 - 0.15), rel=0.25)
    assert str(said).splitlines()[-1].startswith("verdict: good: ")


def test_classes_called_by_numbers_are_told_from_the_numbers_beside_them():
    table = made(bags=12)
    said = str(checked(table | {"label": [str(NAMES.index(c) + 1) for c in table["label"]]}))
    assert "bags won: 1: 4, 2: 4, 3: 4" in said
    assert re.search(r"hardest to tell apart by labels: '\d' and '\d'", said)
    assert "intervals: 1: 0." in said


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_labels_that_say_nothing_are_hopeless(seed):
    by_lot = checked(made(bags=40, labels_by_lot=True, seed=seed))
    assert by_lot.verdict == "hopeless"
    assert by_lot.accuracy[0] < 0.5
    assert by_lot.learnability is not None
    assert by_lot.learnability.share_low[0] <= 1 / 3  # nothing is known of the shares, and nothing is claimed
    assert by_lot.learnability.share_high[0] == 1
    assert any("labels belong to these bags" in line for line in by_lot.advice)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_majorities_that_lead_by_nothing_are_hopeless(seed):
    level = checked(made(bags=30, size=50, share=0.34, apart=1.5, seed=seed))  # 17 of 50, the others 16 or 17
    assert level.verdict == "hopeless"


def test_features_that_show_nothing_are_hopeless():
    assert checked(made(bags=40, apart=0.0, seed=1)).verdict == "hopeless"


def test_a_class_that_never_wins_is_named():
    said = checked(made(never=2), classes=NAMES[:3])
    assert said.coverage.never_win == ("cow",)
    assert said.verdict == "hard"
    assert "cow" in said.reason
    text = str(said)
    assert "never the majority: cow" in text
    assert "cannot be inverted" in text
    assert said.to_json()["tilt"]["condition"] is None
    assert said.to_json()["tilt"]["condition_of_winners"] > 1
    assert said.to_json()["shares"]["classes"]["cow"]["share"] is None
    assert said.more_bags["cow"] > 0
    whole = checked(made(), classes=NAMES[:3])
    assert said.accuracy[0] < whole.accuracy[0]  # its instances are lost, whoever else is told well


def test_one_class_only():
    table = made()
    table["label"] = ["ant"] * len(table["label"])
    said = checked(table, classes=NAMES[:3])
    assert said.verdict == "hopeless"
    assert said.learnability is None
    assert said.accuracy == (pytest.approx(1 / 3), 1.0)
    assert said.to_json()["tilt"] is None


def test_tiny_data_are_not_judged():
    for bags in (2, 3):
        said = checked(made(bags=bags, classes=2))
        assert said.verdict == "hard"
        assert said.accuracy[1] - said.accuracy[0] > 0.3
    assert "too few" in checked(made(bags=2, classes=2)).reason
    for seed in range(4):  # noise in many columns, which any fit finds something in
        g = np.random.default_rng(seed)
        assert check(read(list(g.random((6, 3, 100))), labels=list("ababab"))).verdict == "hard"


@pytest.mark.parametrize("labels", ["ab", "abc", "abcabc"])
def test_of_a_few_bags_no_range_is_expected(labels):
    """Of two instances each is the other's opposite, and a line through one is right of the other: 0.94 to 1 was expected."""
    for seed in range(3):
        g = np.random.default_rng(seed)
        low, high = check(read(list(g.normal(size=(len(labels), 1, 3))), labels=list(labels))).accuracy
        assert low <= 1 / len(set(labels))
        assert high == 1


def test_a_handful_of_clear_bags_is_not_called_good():
    said = checked({k: v[:60] for k, v in made(bags=9).items()})
    assert said.verdict == "hard"
    assert "6 labelled bags" in said.reason


def test_bags_of_one_instance_are_supervision():
    said = checked(made(bags=60, size=1, share=1.0))
    assert said.verdict == "good"
    assert any("ordinary supervision" in line for line in said.advice)
    assert said.learnability is not None
    assert said.learnability.share.min() > 0.98


def test_unlabelled_and_tied_bags_are_counted_and_groups():
    table = made()
    label = np.array(table["label"], dtype=object).reshape(36, 10)
    label[:6] = None
    label[6] = "ant|bee"
    table["label"] = label.ravel().tolist()
    table["site"] = np.repeat([f"s{b % 9}" for b in range(36)], 10).tolist()
    said = check(read({k: v for k, v in table.items() if k != "truth"}, ColumnRoles(group="site")))
    cover = said.to_json()["coverage"]
    assert (cover["unlabelled"], cover["tied"], cover["groups"], cover["votes"]) == (6, 1, 9, False)
    assert said.examined[0] == 30
    assert "6 of 36 bags are without a label" in str(said)


def test_a_class_of_one_group_is_warned_of():
    table = made()
    place = [int(b[1:]) % 2 for b in table["bag"]]
    table["site"] = ["north" if c == "ant" else ("east", "west")[k] for c, k in zip(table["label"], place, strict=True)]
    said = check(read({k: v for k, v in table.items() if k != "truth"}, ColumnRoles(group="site")))
    assert said.coverage.single_group == ("ant",)
    assert any("may be the group" in line for line in said.advice)


def test_with_votes_neighbours_that_resemble_each_other_promise_nothing():
    """People of a precinct are alike whatever they vote: known shares are best explained by answers far too sure of
    themselves. The range may not begin above what a regression told every single vote reaches."""
    rng = np.random.default_rng(1)
    share = rng.dirichlet([3, 3, 3], 100)
    vote = np.stack([rng.choice(3, 40, p=s) for s in share])
    x = (
        2 * share[:, None]
        + 0.7 * np.eye(3)[vote]
        + 0.6 * rng.normal(size=(100, 40, 3))
        + 0.2 * rng.normal(size=(100, 1, 3))
    )
    told = LogisticRegression().fit(x.reshape(-1, 3), vote.ravel()).score(x.reshape(-1, 3), vote.ravel())
    table = {f"f{i}": x[..., i].ravel().tolist() for i in range(3)} | {"bag": np.repeat(np.arange(100), 40).tolist()}
    votes = {f"votes {c}": np.repeat((vote == c).sum(1), 40).tolist() for c in range(3)}
    said = check(read(table | votes, ColumnRoles(votes=tuple(votes))))
    assert said.accuracy[0] < told
    assert said.verdict == "hard"


def test_with_votes_the_shares_are_counted():
    table = made(bags=24, share=0.6)
    truth = np.array(table["truth"]).reshape(24, 10)
    votes = {f"votes {c}": np.repeat((truth == c).sum(1), 10).tolist() for c in NAMES[:3]}
    table = {k: v for k, v in table.items() if k not in ("truth", "label")} | votes
    said = check(read(table, ColumnRoles(votes=tuple(votes))))
    assert said.coverage.votes
    assert said.learnability is not None
    assert said.learnability.share == pytest.approx([0.6] * 3, abs=1e-6)
    assert said.verdict == "good"
    assert "counted from the votes" in str(said)
    share = np.stack([(truth == c).mean(1) for c in NAMES[:3]], 1)
    joint = share.T @ share
    assert said.learnability.transition.matrix.numpy() == pytest.approx(joint / joint.sum(1, keepdims=True), abs=1e-5)


# -- what is looked at ------------------------------------------------------------------------------------------------------


def test_truth_is_never_looked_at():
    table = made()
    table["truth"] = list(np.random.default_rng(1).permutation(table["truth"]))
    assert plain(checked(table, truth=True)) == plain(checked(table))


def test_truth_is_taken_away_before_anything_else(monkeypatch):
    seen = []
    for where, name in ((checking.Coverage, "of"), (checking, "look"), (checking, "prospect")):
        real = getattr(where, name)

        def spy(*given, real=real):
            seen.extend(bags.truth for bags in given if isinstance(bags, Bags))
            return real(*given)

        monkeypatch.setattr(where, name, spy)
    checked(made(bags=9), truth=True)
    assert seen == [None] * 3


def test_the_same_seed_gives_the_same_answer(monkeypatch):
    monkeypatch.setattr(checking, "MAX_INSTANCES", 150)
    table = made()
    first, again = checked(table), checked(table)
    assert plain(first) == plain(again)
    assert str(first) == str(again)
    other = check(read({k: v for k, v in table.items() if k != "truth"}), seed=1)
    assert plain(other) != plain(first)


def test_large_data_are_thinned_and_sizes_stay_what_they_are(monkeypatch):
    monkeypatch.setattr(checking, "MAX_BAGS", 30)
    monkeypatch.setattr(checking, "MAX_INSTANCES", 600)
    table = made(bags=60, size=40, share=0.6)
    reading = read({k: v for k, v in table.items() if k != "truth"})
    some, whole = checking._subsample(reading, 0)
    assert (len(some), len(some.index), whole) == (30, 600, 1200)
    assert some.segments().total_weight().tolist() == pytest.approx([40.0] * 30)
    assert torch.bincount(some.label).tolist() == [10, 10, 10]
    said = check(reading)
    assert said.learnability is not None
    assert said.learnability.share == pytest.approx([0.6] * 3, abs=0.07)
    assert said.examined == (30, 600)
    assert said.n_label_issues is None
    assert said.coverage.bags == 60


def test_pictures_are_looked_at_in_small_and_the_upper_end_stays_open(tmp_path, monkeypatch, capsys):
    g = np.random.default_rng(0)
    lines = ["bag,label"]
    for b in range(30):
        (tmp_path / f"b{b}").mkdir()
        lines.append(f"b{b},{NAMES[b % 2]}")
        for i in range(5):
            y = b % 2 if i < 4 else 1 - b % 2
            pixels = (g.random((16, 16, 3)) * 90 + 100 * y).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"b{b}" / f"{i}.png")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    code, out, _ = run(monkeypatch, capsys, "check", tmp_path, "--json")
    said = json.loads(out)
    assert code == 0
    assert said["verdict"] == "good"
    assert said["accuracy"]["high"] == 1.0
    assert said["shares"]["classes"]["ant"]["share"] == pytest.approx(0.8, abs=0.06)


def test_the_upper_end_stays_open_for_large_pictures_only():
    g = np.random.default_rng(0)
    bags, labels = [], []
    for b in range(30):
        y = np.array([b % 2] * 4 + [1 - b % 2])
        light = (90 + 12 * y + 25 * g.normal(size=5).clip(-2, 2))[:, None, None, None]
        bags.append((g.random((5, 24, 24, 1)) * 60 + light).astype(np.uint8))
        labels.append(NAMES[b % 2])
    said = check(read(bags, labels=labels))
    assert said.learnability is not None
    assert said.learnability.accuracy[1] < 0.99
    assert said.accuracy == (said.learnability.accuracy[0], 1.0)
    small = check(read([x[:, :8, :8] for x in bags], labels=labels))
    assert small.learnability is not None
    assert small.accuracy == small.learnability.accuracy


def test_an_open_upper_end_is_not_called_near_chance():
    """What small pictures promise little of is hopeless in a table, and hard where a network would see more."""
    said = checked(made())
    assert said.learnability is not None
    dim = replace(said.learnability, accuracy=(0.3, 0.45))
    assert advice.verdict(said.coverage, dim, downscaled=False)[0] == "hopeless"
    assert advice.verdict(said.coverage, dim, downscaled=True)[0] == "hard"


def test_texts():
    g = np.random.default_rng(0)
    words = {"ant": "small red busy crawling", "bee": "yellow loud buzzing honey"}
    bag, label, text = [], [], []
    for b in range(40):
        for i in range(6):
            y = NAMES[b % 2] if i < 5 else NAMES[1 - b % 2]
            bag.append(b)
            label.append(NAMES[b % 2])
            text.append(" ".join(g.choice([*words[y].split(), "the", "it", "was"], 6)))
    said = check(read({"bag": bag, "label": label, "review": text}, ColumnRoles(text="review")))
    assert said.verdict == "good"


# -- numbers move the right way -----------------------------------------------------------------------------------------------


def test_fewer_bags_and_smaller_majorities_want_more():
    few, many = checked(made(bags=18, share=0.5)), checked(made(bags=72, share=0.5))
    assert sum(few.more_bags.values()) > sum(many.more_bags.values())
    slight, large = (checked(made(bags=36, share=s)) for s in (0.4, 0.8))
    assert sum(slight.more_bags.values()) > sum(large.more_bags.values())
    assert any("larger majorities would help" in line for line in slight.advice)
    assert not any("larger majorities" in line for line in large.advice)
    assert few.accuracy[0] < many.accuracy[0]
    assert slight.accuracy[0] < large.accuracy[0]


def test_more_bags_by_hand():
    assert learnability.additional_bags(1.0, 0, 5) == learnability.SUFFICIENT_BAGS
    half = 1 / 5 + 0.5 * 4 / 5  # half the pull: four times the bags
    assert learnability.additional_bags(half, 0, 5) == 4 * learnability.SUFFICIENT_BAGS
    assert learnability.additional_bags(half, 10, 5) == 4 * learnability.SUFFICIENT_BAGS - 10
    assert learnability.additional_bags(half, 1000, 5) == 0


def test_a_rare_class_is_asked_for():
    table = made(bags=48, share=0.6)
    keep = [b for b in range(48) if b % 3 != 2 or b < 9]
    mine = np.isin(table["bag"], [f"b{b}" for b in keep])
    rare = {k: [v for v, m in zip(values, mine, strict=True) if m] for k, values in table.items()}
    said = checked(rare)
    assert said.more_bags["cow"] > max(said.more_bags["ant"], said.more_bags["bee"])


def test_bags_filled_by_lot_are_told_of_smaller_ones():
    g = np.random.default_rng(3)
    y = g.integers(2, size=(60, 31))
    table = {"bag": np.repeat(np.arange(60), 31), "label": np.repeat((y.mean(1) > 0.5).astype(int), 31)}
    table["f"] = (5 * y + g.normal(size=y.shape)).ravel()
    said = check(read({k: v.tolist() for k, v in table.items()}))
    assert any("smaller bags lean more" in line for line in said.advice)
    table["weight"] = np.full(60 * 31, 1 / 31)  # shares of a bag: none is smaller for it
    said = check(read({k: v.tolist() for k, v in table.items()}))
    assert any("smaller bags lean more, in bags of 7" in line for line in said.advice)


def test_wrong_labels_are_pointed_at():
    clean, table = made(bags=45), made(bags=45)
    label = np.array(table["label"]).reshape(45, 10)
    label[[4, 20]] = [["cow"], ["ant"]]  # bag 4 is bee's, bag 20 is cow's
    table["label"] = label.ravel().tolist()
    assert checked(clean).n_label_issues == 0
    said = checked(table)
    assert said.n_label_issues in (1, 2)
    assert any("headcount issues" in line for line in said.advice)


def test_what_a_quick_look_doubts_is_not_called_what_issues_marks(tmp_path, monkeypatch, capsys):
    """Two judges of the same labels, whose counts differ: neither takes the other's words."""
    table = {k: v for k, v in made(bags=60, apart=2.0, seed=1).items() if k != "truth"}
    label = np.array(table["label"]).reshape(60, 10)
    label[::8] = np.roll(label, 1, 0)[::8]
    data = written(tmp_path, table | {"label": label.ravel().tolist()})
    checked = run(monkeypatch, capsys, "check", data)[1]
    found = json.loads(run(monkeypatch, capsys, "check", data, "--json")[1])["labels_doubted_at_a_quick_look"]
    marked = int(re.search(r"(\d+) of 60 labelled bags look wrong", run(monkeypatch, capsys, "issues", data)[1])[1])
    assert 0 < found != marked > 0
    assert f"a quick look doubts {found} of the 60 labels it saw: headcount issues asks forests instead" in checked
    assert "wrong" not in checked


def test_the_hardest_pair():
    mix = torch.tensor([[0.6, 0.35, 0.05], [0.35, 0.6, 0.05], [0.1, 0.1, 0.8]])
    said = learnability.conditioning(transition.Transition(mix, torch.ones(3) / 3), np.ones(3, bool))
    assert said.hardest_pair == (0, 1)
    matrix = transition.transition_matrix(mix, torch.ones(3) / 3).double().numpy()
    assert said.condition == pytest.approx(np.linalg.cond(matrix), rel=1e-5)
    assert said.smallest == pytest.approx(np.linalg.svd(matrix)[1][-1], rel=1e-5)
    assert said.amplification == pytest.approx(np.linalg.norm(np.linalg.inv(matrix.T), 1), rel=1e-5)
    assert said.distance == pytest.approx(0.5 * np.abs(matrix[0] - matrix[1]).sum(), rel=1e-5)
    p = torch.tensor([[0.5, 0.0, 0.5], [0.4, 0.0, 0.6], [0.0, 1.0, 0.0]])
    assert learnability.most_confused_pair(p)[0] == (0, 2)


def test_the_slope_of_the_quick_look_is_that_of_the_loss():
    g = np.random.default_rng(0)
    x, label = g.normal(size=(40, 3)), g.integers(3, size=40)
    mix, labels = (
        transition.mix_from_shares(torch.tensor([0.5, 0.6, 0.8]).double(), 3),
        torch.tensor([0.5, 0.3, 0.2]).double(),
    )
    rows = np.eye(3)[label]
    w = linear_baseline._fit_softmax(np.zeros((3, 3)), x, rows, transition.transition_matrix(mix, labels).numpy(), 0.05)
    v = torch.from_numpy(w).double().requires_grad_()
    log_p = (torch.from_numpy(x) @ v).log_softmax(1)
    loss = transition.forward_loss(log_p, torch.from_numpy(rows), mix, labels) + 0.05 * (v * v).sum()
    loss.backward()
    assert v.grad is not None
    assert float(v.grad.abs().max()) < 3e-3
    assert float(v.detach().abs().max()) > 0.01


# -- the command ------------------------------------------------------------------------------------------------------------


def test_the_command_says_what_was_understood_and_a_verdict(tmp_path, monkeypatch, capsys):
    file = written(tmp_path, made())
    code, out, err = run(monkeypatch, capsys, "check", file)
    assert code == 0
    assert "36 bags of 10 to 10 instances" in out
    assert out.splitlines()[-1].startswith("verdict: good")
    assert "examined 360 instances of 36 bags" in err
    assert list(tmp_path.iterdir()) == [file]  # nothing is written


def test_json_is_strict_and_alone_on_stdout(tmp_path, monkeypatch, capsys):
    table = made(never=2, bags=8)
    code, out, err = run(
        monkeypatch, capsys, "check", written(tmp_path, table), "--json", "--classes", "ant,bee,cow", "--truth", "truth"
    )
    said = json.loads(out, parse_constant=lambda word: pytest.fail(word))
    assert code == 0
    assert said["coverage"]["never_win"] == ["cow"]
    assert set(said["more_bags"]) == {"ant", "bee", "cow"}
    assert "8 bags" in err


def test_hopeless_is_no_error(tmp_path, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "check", written(tmp_path, made(labels_by_lot=True)))
    assert code == 0
    assert "verdict: hopeless" in out


def test_it_reads_with_the_options_of_fit():
    import inspect

    from headcount.cli import own_data

    fit = set(inspect.signature(own_data.fit).parameters)
    own = {"out", "overwrite", "method", "minutes", "folds", "head", "option", "backbone", "views", "epochs", "device"}
    own |= {"frozen", "weights", "size"}
    assert set(inspect.signature(own_data.check).parameters) == (fit - own) | {"as_json"}


@pytest.mark.parametrize("command", ["check", "issues"])
def test_lists_are_read_as_fit_reads_them(command, tmp_path, monkeypatch, capsys):
    """A space or a comma too many is no column."""
    code, _, err = run(monkeypatch, capsys, command, written(tmp_path, made()), "--features", "f0, f1,")
    assert code == 0, err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"f0": [None, "inf", *["1"] * 358]}, ()),
        ({"label": ["ant"] * 360}, ()),
        ({"label": [None] * 360}, ()),
        ({}, ("--label", "lable")),
        ({}, ("--votes", "f0,nothing")),
        ({}, ("--classes", "ant,bee")),
        ({}, ("--ties", "sometimes")),
        ({}, ("--seed", "-1")),
        ({"bag": [*["b0"] * 300, *["b1"] * 60]}, ()),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, change, words):
    code, out, err = run(monkeypatch, capsys, "check", written(tmp_path, made() | change), *words)
    assert code == 2, out
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("headcount: ")


def test_a_file_that_is_not_there(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "check", "nothing.csv")
    assert code == 2
    assert "no file or folder nothing.csv" in err


def test_arrays_that_are_not_numbers_are_refused(tmp_path, monkeypatch, capsys):
    x = np.zeros((8, 2), np.float32)
    x[3, 1] = np.nan
    np.savez(tmp_path / "d.npz", features=x, sizes=np.array([4, 4]), labels=np.array(["a", "b"]))
    code, _, err = run(monkeypatch, capsys, "check", tmp_path / "d.npz")
    assert code == 2
    assert "row 4" in err


def test_a_look_takes_one_thread_and_gives_the_others_back(monkeypatch):
    """Where others work on the same cores, thousands of small products shared among threads made minutes of seconds."""
    threads, look = [], checking.fit_linear_baseline
    monkeypatch.setattr(
        checking, "fit_linear_baseline", lambda *a, **k: threads.append(torch.get_num_threads()) or look(*a, **k)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        checked(made(bags=12))
        assert threads == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
