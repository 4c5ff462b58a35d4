"""headcount check: verdicts before training, from bags and labels alone."""

from __future__ import annotations

import json
import re
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
from headcount.majority import transition
from headcount.readers import read
from headcount.readers.columns import ColumnRoles
from headcount.selection import advice, check as module, learnability
from headcount.selection.check import check, subsample

NAMES = ("ant", "bee", "cow", "dog")


def make_table(bags=36, size=10, share=0.7, classes=3, distance=4.0, seed=0, never=None, random_labels=False):
    """A table of instances: in each bag this share is of the label's class, the others are spread over the other classes."""
    g = np.random.default_rng(seed)
    centres = distance * g.permutation(np.eye(classes, 4))
    rows = {"bag": [], "label": [], "truth": []} | {f"f{i}": [] for i in range(4)}
    winners = [c for c in range(classes) if c != never]
    for b in range(bags):
        majority = winners[b % len(winners)]
        votes = max(round(share * size), 1)
        rest = [c for c in range(classes) if c != majority]
        y = [majority] * votes + [rest[i % len(rest)] for i in g.permutation(size - votes)]
        label = int(g.integers(classes)) if random_labels else majority
        for k in y:
            x = centres[k] + g.normal(size=4)
            rows["bag"].append(f"b{b}")
            rows["label"].append(NAMES[label])
            rows["truth"].append(NAMES[k])
            for i in range(4):
                rows[f"f{i}"].append(float(x[i]))
    return rows


def check_table(table, truth=False, seed=0, limits=None, **options):
    table = {k: v for k, v in table.items() if truth or k != "truth"}
    return check(read(table, **options), seed, **(limits or {}))


def write_csv(folder: Path, table) -> Path:
    pa.csv.write_csv(pa.table(table), folder / "d.csv")
    return folder / "d.csv"


def without_seconds(result):
    """The JSON without the time it took."""
    return {k: v for k, v in result.to_json().items() if k != "seconds"}


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_separable_bags_can_be_learned_and_shares_are_estimated_well():
    table = make_table()
    result = check_table(table)
    assert result.verdict == "yes"
    assert result.learnability is not None
    assert result.learnability.share == pytest.approx([0.7] * 3, abs=0.06)
    assert np.all((result.learnability.share_low <= 0.7) & (result.learnability.share_high >= 0.7))
    assert result.accuracy[0] > 0.67
    assert result.accuracy[1] > 0.97
    assert result.conditioning.condition == pytest.approx(1 / (0.7 - 0.15), rel=0.25)
    first, second, *others = str(result).splitlines()
    assert first.startswith("can this work? yes: the features predict the labels of held-out bags")
    assert re.fullmatch(
        r"expected accuracy .*: about 0\.[89]\d, in four cases of five 0\.\d\d to [01]\.\d\d \(guessing: 0.33\)", second
    )
    kinds = [line.split(":")[0] if line.startswith(("advice", "details")) else line[:2] for line in others]
    assert kinds == sorted(kinds, key=["advice", "details", "  "].index)  # the answer, what would help, then the numbers


def test_class_names_that_are_numbers_are_distinguished_from_counts():
    table = make_table(bags=12)
    result = str(check_table(table | {"label": [str(NAMES.index(c) + 1) for c in table["label"]]}))
    assert "bags won: 1: 4, 2: 4, 3: 4" in result
    assert re.search(r"hardest to separate by labels: '\d' and '\d'", result)
    assert "intervals: 1: 0." in result


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_labels_cannot_be_learned(seed):
    result = check_table(make_table(bags=40, random_labels=True, seed=seed))
    assert result.verdict == "no"
    assert result.accuracy[0] < 0.5
    assert result.learnability is not None
    assert result.learnability.share_low[0] <= 1 / 3  # nothing is known about the shares
    assert result.learnability.share_high[0] == 1
    assert any("each label belongs to its bag" in line for line in result.advice)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_slight_majorities_cannot_be_learned(seed):
    result = check_table(make_table(bags=30, size=50, share=0.34, distance=1.5, seed=seed))  # 17 of 50, the others 16 or 17
    assert result.verdict == "no"


def test_features_without_signal_cannot_be_learned():
    assert check_table(make_table(bags=40, distance=0.0, seed=1)).verdict == "no"


def test_a_class_that_never_wins_is_named():
    result = check_table(make_table(never=2), classes=NAMES[:3])
    assert result.coverage.never_win == ("cow",)
    assert result.verdict == "perhaps"
    assert "cow" in result.reason
    text = str(result)
    assert "never the majority: cow" in text
    assert "cannot be inverted" in text
    assert result.to_json()["transition"]["condition"] is None
    assert result.to_json()["transition"]["condition_of_winners"] > 1
    assert result.to_json()["shares"]["classes"]["cow"]["share"] is None
    assert result.more_bags["cow"] > 0
    whole = check_table(make_table(), classes=NAMES[:3])
    assert result.accuracy[0] < whole.accuracy[0]  # its instances are lost


def test_one_class_only():
    table = make_table()
    table["label"] = ["ant"] * len(table["label"])
    result = check_table(table, classes=NAMES[:3])
    assert result.verdict == "no"
    assert result.learnability is None
    assert result.accuracy == (pytest.approx(1 / 3), 1.0)
    assert result.to_json()["transition"] is None


def test_very_few_bags_are_hard_with_any_features():
    for bags in (2, 3):
        result = check_table(make_table(bags=bags, classes=2))
        assert result.verdict == "perhaps"
        assert result.accuracy[1] - result.accuracy[0] > 0.3
    assert "too few" in check_table(make_table(bags=2, classes=2)).reason
    for seed in range(4):  # noise in many columns, which any fit finds something in
        g = np.random.default_rng(seed)
        assert check(read(list(g.random((6, 3, 100))), labels=list("ababab"))).verdict == "perhaps"


@pytest.mark.parametrize("labels", ["ab", "abc", "abcabc"])
def test_a_few_bags_give_the_full_range_of_accuracies(labels):
    """With two instances any line separates them, and the expected range was once 0.94 to 1."""
    for seed in range(3):
        g = np.random.default_rng(seed)
        low, high = check(read(list(g.normal(size=(len(labels), 1, 3))), labels=list(labels))).accuracy
        assert low <= 1 / len(set(labels))
        assert high == 1


def test_six_separable_bags_are_not_good():
    result = check_table({k: v[:60] for k, v in make_table(bags=9).items()})
    assert result.verdict == "perhaps"
    assert "6 labelled bags" in result.reason


def test_bags_of_one_instance_are_supervision():
    result = check_table(make_table(bags=60, size=1, share=1.0))
    assert result.verdict == "yes"
    assert any("ordinary supervision" in line for line in result.advice)
    assert result.learnability is not None
    assert result.learnability.share.min() > 0.98


def test_unlabelled_and_tied_bags_are_counted_and_groups():
    table = make_table()
    label = np.array(table["label"], dtype=object).reshape(36, 10)
    label[:6] = None
    label[6] = "ant|bee"
    table["label"] = label.ravel().tolist()
    table["site"] = np.repeat([f"s{b % 9}" for b in range(36)], 10).tolist()
    result = check(read({k: v for k, v in table.items() if k != "truth"}, ColumnRoles(group="site")))
    coverage = result.to_json()["coverage"]
    assert (coverage["unlabelled"], coverage["tied"], coverage["groups"], coverage["votes"]) == (6, 1, 9, False)
    assert result.examined[0] == 30
    assert "6 of 36 bags are without a label" in str(result)


def test_advice_about_a_class_in_one_group():
    table = make_table()
    place = [int(b[1:]) % 2 for b in table["bag"]]
    table["site"] = ["north" if c == "ant" else ("east", "west")[k] for c, k in zip(table["label"], place, strict=True)]
    result = check(read({k: v for k, v in table.items() if k != "truth"}, ColumnRoles(group="site")))
    assert result.coverage.single_group == ("ant",)
    assert any("may be the group" in line for line in result.advice)


def test_votes_in_correlated_bags_do_not_raise_the_expected_accuracy():
    """Voters of a precinct are alike, so known shares are best explained by overconfident predictions. The range may not start
    above the accuracy of a regression that knows every single vote."""
    rng = np.random.default_rng(1)
    share = rng.dirichlet([3, 3, 3], 100)
    vote = np.stack([rng.choice(3, 40, p=s) for s in share])
    x = 2 * share[:, None] + 0.7 * np.eye(3)[vote] + 0.6 * rng.normal(size=(100, 40, 3)) + 0.2 * rng.normal(size=(100, 1, 3))
    supervised = LogisticRegression().fit(x.reshape(-1, 3), vote.ravel()).score(x.reshape(-1, 3), vote.ravel())
    table = {f"f{i}": x[..., i].ravel().tolist() for i in range(3)} | {"bag": np.repeat(np.arange(100), 40).tolist()}
    votes = {f"votes {c}": np.repeat((vote == c).sum(1), 40).tolist() for c in range(3)}
    result = check(read(table | votes, ColumnRoles(votes=tuple(votes))))
    assert result.accuracy[0] < supervised
    assert result.verdict == "perhaps"


def test_with_votes_the_shares_are_counted():
    table = make_table(bags=24, share=0.6)
    truth = np.array(table["truth"]).reshape(24, 10)
    votes = {f"votes {c}": np.repeat((truth == c).sum(1), 10).tolist() for c in NAMES[:3]}
    table = {k: v for k, v in table.items() if k not in ("truth", "label")} | votes
    result = check(read(table, ColumnRoles(votes=tuple(votes))))
    assert result.coverage.votes
    assert result.learnability is not None
    assert result.learnability.share == pytest.approx([0.6] * 3, abs=1e-6)
    assert result.verdict == "yes"
    assert "counted from the votes" in str(result)
    share = np.stack([(truth == c).mean(1) for c in NAMES[:3]], 1)
    joint = share.T @ share
    assert result.learnability.transition.matrix.numpy() == pytest.approx(joint / joint.sum(1, keepdims=True), abs=1e-5)


# -- the part that is examined -----------------------------------------------------------------------------------------


def test_truth_does_not_change_the_result():
    table = make_table()
    table["truth"] = list(np.random.default_rng(1).permutation(table["truth"]))
    assert without_seconds(check_table(table, truth=True)) == without_seconds(check_table(table))


def test_truth_is_removed_first(monkeypatch):
    seen = []
    functions = ((module.Coverage, "from_bags"), (module, "fit_linear_baseline"), (module, "assess_learnability"))
    for owner, name in functions:
        real = getattr(owner, name)

        def spy(*args, real=real):
            seen.extend(bags.truth for bags in args if isinstance(bags, Bags))
            return real(*args)

        monkeypatch.setattr(owner, name, spy)
    check_table(make_table(bags=9), truth=True)
    assert seen == [None] * 3


def test_the_result_depends_on_the_seed_only():
    table, limits = make_table(), {"max_instances": 150}
    first, again = check_table(table, limits=limits), check_table(table, limits=limits)
    assert without_seconds(first) == without_seconds(again)
    assert str(first) == str(again)
    other = check_table(table, seed=1, limits=limits)
    assert without_seconds(other) != without_seconds(first)


def test_large_data_are_subsampled_and_bag_sizes_are_kept():
    table = make_table(bags=60, size=40, share=0.6)
    dataset = read({k: v for k, v in table.items() if k != "truth"})
    sample, all_instances = subsample(dataset.bags.blind(), 0, max_bags=30, max_instances=600)
    assert (len(sample), len(sample.index), all_instances) == (30, 600, 1200)
    assert sample.segments().total_weight().tolist() == pytest.approx([40.0] * 30)
    assert torch.bincount(sample.label).tolist() == [10, 10, 10]
    result = check(dataset, max_bags=30, max_instances=600)
    assert result.learnability is not None
    assert result.learnability.share == pytest.approx([0.6] * 3, abs=0.07)
    assert result.examined == (30, 600)
    assert result.n_label_issues is None
    assert result.coverage.bags == 60


def test_images_are_reduced_and_the_upper_end_is_open(tmp_path, run_cli):
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
    code, out, _ = run_cli("check", tmp_path, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["verdict"] == "yes"
    assert result["accuracy"]["high"] == 1.0
    assert result["shares"]["classes"]["ant"]["share"] == pytest.approx(0.8, abs=0.06)


def test_the_upper_end_is_open_for_large_images_only():
    g = np.random.default_rng(0)
    bags, labels = [], []
    for b in range(30):
        y = np.array([b % 2] * 4 + [1 - b % 2])
        light = (90 + 12 * y + 25 * g.normal(size=5).clip(-2, 2))[:, None, None, None]
        bags.append((g.random((5, 24, 24, 1)) * 60 + light).astype(np.uint8))
        labels.append(NAMES[b % 2])
    result = check(read(bags, labels=labels))
    assert result.learnability is not None
    assert result.learnability.accuracy[1] < 0.99
    assert result.accuracy == (result.learnability.accuracy[0], 1.0)
    small = check(read([x[:, :8, :8] for x in bags], labels=labels))
    assert small.learnability is not None
    assert small.accuracy == small.learnability.accuracy


def test_reduced_images_are_never_hopeless():
    """A low expected accuracy means no for a table, and perhaps for images, whose detail a network can use."""
    result = check_table(make_table())
    assert result.learnability is not None
    low = replace(result.learnability, accuracy=(0.3, 0.45))
    assert advice.verdict(result.coverage, low, downscaled=False)[0] == "no"
    assert advice.verdict(result.coverage, low, downscaled=True)[0] == "perhaps"


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
    result = check(read({"bag": bag, "label": label, "review": text}, ColumnRoles(text="review")))
    assert result.verdict == "yes"


# -- estimates change in the right direction ---------------------------------------------------------------------------


def test_fewer_bags_and_smaller_majorities_need_more_bags():
    few, many = check_table(make_table(bags=18, share=0.5)), check_table(make_table(bags=72, share=0.5))
    assert sum(few.more_bags.values()) > sum(many.more_bags.values())
    slight, large = (check_table(make_table(bags=36, share=s)) for s in (0.4, 0.8))
    assert sum(slight.more_bags.values()) > sum(large.more_bags.values())
    assert any("larger majorities would help" in line for line in slight.advice)
    assert not any("larger majorities" in line for line in large.advice)
    assert few.accuracy[0] < many.accuracy[0]
    assert slight.accuracy[0] < large.accuracy[0]


def test_additional_bags_by_hand():
    assert advice.additional_bags(1.0, 0, 5) == advice.SUFFICIENT_BAGS
    half = 1 / 5 + 0.5 * 4 / 5  # half the signal: four times the bags
    assert advice.additional_bags(half, 0, 5) == 4 * advice.SUFFICIENT_BAGS
    assert advice.additional_bags(half, 10, 5) == 4 * advice.SUFFICIENT_BAGS - 10
    assert advice.additional_bags(half, 1000, 5) == 0


def test_a_rare_class_needs_the_most_bags():
    table = make_table(bags=48, share=0.6)
    keep = [b for b in range(48) if b % 3 != 2 or b < 9]
    mine = np.isin(table["bag"], [f"b{b}" for b in keep])
    rare = {k: [v for v, m in zip(values, mine, strict=True) if m] for k, values in table.items()}
    result = check_table(rare)
    assert result.more_bags["cow"] > max(result.more_bags["ant"], result.more_bags["bee"])


def test_random_bags_are_advised_to_be_smaller():
    g = np.random.default_rng(3)
    y = g.integers(2, size=(60, 31))
    table = {"bag": np.repeat(np.arange(60), 31), "label": np.repeat((y.mean(1) > 0.5).astype(int), 31)}
    table["f"] = (5 * y + g.normal(size=y.shape)).ravel()
    result = check(read({k: v.tolist() for k, v in table.items()}))
    assert any("smaller bags would help" in line for line in result.advice)
    table["weight"] = np.full(60 * 31, 1 / 31)  # shares of a bag: none is smaller for it
    result = check(read({k: v.tolist() for k, v in table.items()}))
    assert any("smaller bags would help" in line and "and bags of 7" in line for line in result.advice)


def test_wrong_labels_are_flagged():
    clean, table = make_table(bags=45), make_table(bags=45)
    label = np.array(table["label"]).reshape(45, 10)
    label[[4, 20]] = [["cow"], ["ant"]]  # bag 4 is bee's, bag 20 is cow's
    table["label"] = label.ravel().tolist()
    assert check_table(clean).n_label_issues == 0
    result = check_table(table)
    assert result.n_label_issues in (1, 2)
    assert any("headcount issues" in line for line in result.advice)


def test_flags_of_the_baseline_and_of_headcount_issues_are_named_differently(tmp_path, run_cli):
    """Their counts differ, so the check must not use the words of headcount issues."""
    table = {k: v for k, v in make_table(bags=60, distance=2.0, seed=1).items() if k != "truth"}
    label = np.array(table["label"]).reshape(60, 10)
    label[::8] = np.roll(label, 1, 0)[::8]
    data = write_csv(tmp_path, table | {"label": label.ravel().tolist()})
    checked = run_cli("check", data)[1]
    found = json.loads(run_cli("check", data, "--json")[1])["label_issues_by_linear_baseline"]
    marked = int(re.search(r"(\d+) of 60 labelled bags look wrong", run_cli("issues", data)[1])[1])
    assert 0 < found != marked > 0
    assert f"a linear model flags {found} of the 60 labels examined: headcount issues uses forests" in checked
    assert "wrong" not in checked


def test_the_hardest_pair():
    mix = torch.tensor([[0.6, 0.35, 0.05], [0.35, 0.6, 0.05], [0.1, 0.1, 0.8]])
    result = module.conditioning(transition.Transition(mix, torch.ones(3) / 3), np.ones(3, bool))
    assert result.hardest_pair == (0, 1)
    matrix = transition.Transition(mix, torch.ones(3) / 3).matrix.double().numpy()
    assert result.condition == pytest.approx(np.linalg.cond(matrix), rel=1e-5)
    assert result.smallest == pytest.approx(np.linalg.svd(matrix)[1][-1], rel=1e-5)
    assert result.amplification == pytest.approx(np.linalg.norm(np.linalg.inv(matrix.T), 1), rel=1e-5)
    assert result.distance == pytest.approx(0.5 * np.abs(matrix[0] - matrix[1]).sum(), rel=1e-5)
    p = torch.tensor([[0.5, 0.0, 0.5], [0.4, 0.0, 0.6], [0.0, 1.0, 0.0]])
    assert learnability.most_confused_pair(p)[0] == (0, 2)


def test_the_gradient_of_the_linear_baseline():
    g = np.random.default_rng(0)
    x, label = g.normal(size=(40, 3)), g.integers(3, size=40)
    mix, labels = (
        transition.mix_from_shares(torch.tensor([0.5, 0.6, 0.8]).double(), 3),
        torch.tensor([0.5, 0.3, 0.2]).double(),
    )
    rows = np.eye(3)[label]
    w = learnability._fit_softmax(np.zeros((3, 3)), x, rows, transition.Transition(mix, labels).matrix.numpy(), 0.05)
    v = torch.from_numpy(w).double().requires_grad_()
    log_p = (torch.from_numpy(x) @ v).log_softmax(1)
    loss = transition.forward_loss(log_p, torch.from_numpy(rows), mix, labels) + 0.05 * (v * v).sum()
    loss.backward()
    assert v.grad is not None
    assert float(v.grad.abs().max()) < 3e-3
    assert float(v.detach().abs().max()) > 0.01


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_describes_the_data_and_prints_a_verdict(tmp_path, run_cli):
    file = write_csv(tmp_path, make_table())
    code, out, err = run_cli("check", file)
    assert code == 0
    assert "36 bags of 10 instances" in out
    assert any(line.startswith("can this work? yes: ") for line in out.splitlines())
    assert "examined 360 instances of 36 bags" in err
    assert list(tmp_path.iterdir()) == [file]  # nothing is written


def test_json_is_strict_and_alone_on_stdout(tmp_path, run_cli):
    table = make_table(never=2, bags=8)
    code, out, err = run_cli("check", write_csv(tmp_path, table), "--json", "--classes", "ant,bee,cow", "--truth", "truth")
    result = json.loads(out, parse_constant=lambda word: pytest.fail(word))
    assert code == 0
    assert result["coverage"]["never_win"] == ["cow"]
    assert set(result["more_bags"]) == {"ant", "bee", "cow"}
    assert "8 bags" in err


def test_hopeless_exits_with_zero(tmp_path, run_cli):
    code, out, _ = run_cli("check", write_csv(tmp_path, make_table(random_labels=True)))
    assert code == 0
    assert "can this work? no: " in out


def test_check_reads_data_with_the_options_of_fit():
    import inspect

    from headcount.cli import own_data

    fit = set(inspect.signature(own_data.fit).parameters)
    own = {"out", "overwrite", "method", "minutes", "folds", "head", "option", "backbone", "views", "epochs", "device"}
    own |= {"frozen", "weights", "size", "private"}
    assert set(inspect.signature(own_data.check).parameters) == (fit - own) | {"as_json"}


@pytest.mark.parametrize("command", ["check", "issues"])
def test_lists_may_have_spaces_and_a_trailing_comma(command, tmp_path, run_cli):
    code, _, err = run_cli(command, write_csv(tmp_path, make_table()), "--features", "f0, f1,")
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
def test_mistakes_are_one_line(tmp_path, run_cli, change, words):
    code, out, err = run_cli("check", write_csv(tmp_path, make_table() | change), *words)
    assert code == 2, out
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("headcount: ")


def test_a_missing_file(run_cli):
    code, _, err = run_cli("check", "nothing.csv")
    assert code == 2
    assert "no file or folder nothing.csv" in err


def test_arrays_that_are_not_numbers_are_refused(tmp_path, run_cli):
    x = np.zeros((8, 2), np.float32)
    x[3, 1] = np.nan
    np.savez(tmp_path / "d.npz", features=x, sizes=np.array([4, 4]), labels=np.array(["a", "b"]))
    code, _, err = run_cli("check", tmp_path / "d.npz")
    assert code == 2
    assert "row 4" in err


def test_the_check_uses_one_thread_and_restores_the_number(monkeypatch):
    """On a busy machine, thousands of small products shared among threads once turned seconds into minutes."""
    threads, real = [], module.fit_linear_baseline
    monkeypatch.setattr(module, "fit_linear_baseline", lambda *a, **k: threads.append(torch.get_num_threads()) or real(*a, **k))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_table(make_table(bags=12))
        assert threads == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
