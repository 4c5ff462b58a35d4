"""A method of one's own: one file of under thirty lines in a study and a report; and a head inside somebody else's loop."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone

from headcount.bags import Bags, Pool, Segments
from headcount.cli import main
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.experiments import records
from headcount.experiments.recipe import Recipe
from headcount.experiments.run import run
from headcount.models.fitted import FittedModel
from headcount.models.heads import HEADS, Batch, build_head, find_head, head_options
from headcount.models.heads.base import SumHead
from headcount.readers import read
from headcount.selection.fit import fit
from headcount.training import config as training_config
from headcount.training.loader import BagLoader

OWN = '''"""Median: a class is as strong as its median vote."""
from headcount.models.heads import Head, Output
from torch import nn


class Median(Head):
    """The bag's class has the largest median probability."""

    title = "Median vote"
    cites = "nobody yet"

    def __init__(self, dim, classes, counted=None, *, sharpness=5.0):
        super().__init__(dim, classes, counted)
        self.classifier, self.sharpness = nn.Linear(dim, classes), sharpness

    def forward(self, h, segments):
        z = self.classifier(h).float()
        votes, _ = segments.to_dense(z.softmax(1))
        return Output(z, self.masked_log_softmax(self.sharpness * votes.median(1).values), {})
'''
SMALL = ["--source", "digits", "--bag-size", "8", "--epochs", "4", "--device", "cpu"]
SMALL += [w for s in ("backbone=mlp", "train_bags=20", "valid_bags=10", "test_bags=10") for w in ("--set", s)]


def headcount(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["headcount", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 0


def test_a_custom_head_in_a_study_and_a_report(tmp_path, monkeypatch):
    assert len(OWN.splitlines()) < 30
    file, out = tmp_path / "median.py", tmp_path / "study"
    file.write_text(OWN)
    heads = f"count,{file}:Median"
    headcount(monkeypatch, "study", "--out", out, *SMALL, "--fold", "0,1", "--head", heads, "--removal", "0,0.5")
    bodies = [json.loads(p.read_text()) for p in out.glob("*.json")]
    assert sorted({b["label"] for b in bodies}) == [
        "Counting Network",
        "Counting Network + MPEM",
        "Median vote",
        "Median vote + MPEM",
    ]
    assert len(bodies) == 8
    headcount(monkeypatch, "report", out)
    page = (out / "report.html").read_text()
    assert "Median vote" in page
    assert "Median vote + MPEM" in page


TINY = Recipe(source="digits", bag_size=8, train_bags=10, valid_bags=5, test_bags=5, backbone="mlp", epochs=1)


def test_an_edited_head_is_loaded_again(tmp_path):
    """In one process, and within the second that Python's own cache goes by."""
    file, source = tmp_path / "one.py", OWN.replace("class Median", "class One")
    titles = []
    for title in ("Median vote", "Middle vote"):
        file.write_text(source.replace("Median vote", title))
        record = run(TINY.replace(head=f"{file}:One"), tmp_path / "out", device="cpu")
        titles.append((record.label, record.path.stem == record.key, find_head(f"{file}:One").title))
    assert titles == [("Median vote", True, "Median vote"), ("Middle vote", True, "Middle vote")]
    assert len({r.fingerprint["code"] for r in records.load_records(tmp_path / "out")}) == 2


def test_two_folders_two_heads(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(OWN.replace("Median vote", name))
    titles = []
    for name in ("a", "b"):
        monkeypatch.chdir(tmp_path / name)
        titles.append(find_head("own.py:Median").title)
    assert titles == ["a", "b"]


WRONG = {
    "Output(z, self.masked_log_softmax(votes.mean(1)[:, :3]), {})": r"head Median: bag of its Output has shape \(2, 3\), not \(2, 10\)",
    "Output(z[:3], self.masked_log_softmax(votes.mean(1)), {})": r"head Median: instance of its Output has shape \(3, 10\), not \(16, 10\)",
    "Output(z, votes.mean(1), {})": "head Median: bag of its Output holds no log-probabilities .*return self.masked_log_softmax",
    "(z, votes.mean(1), {})": r"head Median returns tuple; return Output\(instance, bag, parts\)",
}


@pytest.mark.parametrize("said", WRONG)
def test_the_output_of_a_custom_head_is_checked(tmp_path, said):
    right = "Output(z, self.masked_log_softmax(self.sharpness * votes.median(1).values), {})"
    assert right in OWN
    (tmp_path / "own.py").write_text(OWN.replace(right, said))
    with pytest.raises(HeadcountError, match=WRONG[said]):
        run(TINY.replace(head=f"{tmp_path / 'own.py'}:Median"), tmp_path / "out", device="cpu")


@pytest.mark.parametrize("name", HEADS)
def test_all_heads_pass_that_check(name, monkeypatch):
    sizes = {"width": 16, "heads": 2, "layers": 2, "landmarks": 4, "student_width": 8}
    options = {k: v for k, v in sizes.items() if k in head_options(name)}
    head = build_head(name, dim=8, classes=3, options=options)
    bags = Bags.of(Pool(np.zeros((9, 8), np.float32)), sizes=[4, 2, 3], labels=[0, 1, 2], classes=3, known=[0] * 9)
    head.setup(bags.segments(), bags.target)
    monkeypatch.setattr(training_config, "HEADS", {})
    training_config.check_head_output(head, BagLoader(bags, 2))


def test_fit_refuses_custom_heads():
    reading = read([np.ones((2, 3)), np.zeros((2, 3))], labels=["a", "b"])
    for how in ({"head": "vote.py:Vote"}, {"method": "tilt,vote.py:Vote"}):
        with pytest.raises(HeadcountError, match=r"vote.py:Vote is a custom head.*never runs code"):
            fit(reading, **how)


def test_heads_as_json(monkeypatch, capsys):
    headcount(monkeypatch, "heads", "--json")
    listed = json.loads(capsys.readouterr().out)
    assert [h["name"] for h in listed] == list(HEADS)
    assert all(h["title"] and h["cites"] and isinstance(h["options"], dict) for h in listed)


@pytest.mark.parametrize("name", ["count", "attention", "election", "feature_lse"])
def test_a_head_in_another_training_loop(name):
    """Their encoder, their optimizer, their padded batches with a mask; and the same batch flat, with offsets."""
    torch.manual_seed(0)
    head = build_head(name, dim=8, classes=3, options={})
    encoder = torch.nn.Linear(5, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 0.02)
    sizes, labels = torch.tensor([4, 7, 2, 6]), torch.tensor([0, 1, 2, 1])
    mask = torch.arange(7) < sizes[:, None]
    x = torch.randn(4, 7, 5) + 2 * torch.nn.functional.one_hot(labels, 5)[:, None]
    x = torch.where(mask[..., None], x, torch.full_like(x, 1e3))  # what stands in the padding must not matter
    losses = []
    for _ in range(60):
        said = head(encoder(x).flatten(0, 1), Segments.from_padded(mask))
        loss = torch.nn.functional.nll_loss(said.bag, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    padded = head(encoder(x).flatten(0, 1), Segments.from_padded(mask))
    flat = head(encoder(x[mask]), Segments.from_sizes(sizes))
    torch.testing.assert_close(padded.bag, flat.bag, rtol=1e-4, atol=1e-5)
    batch = Batch(Segments.from_sizes(sizes), torch.eye(3)[labels], torch.arange(4), torch.arange(len(x[mask])))
    assert torch.isfinite(head.loss(flat, batch))


# -- fitted models with a custom head: the class is given, and code in a folder is never run ----------------------------------


class MeanVote(SumHead):
    title, cites = "Mean vote", "this test"

    def __init__(self, dim, classes, counted=None, *, sharpness=1.0):
        super().__init__(dim, classes, counted)
        self.sharpness = sharpness

    def instance_terms(self, h):
        z = self.sharpness * self.classifier(h).float()
        return z, z.softmax(1)

    def readout_sums(self, sums, total):
        return self.masked_log_softmax((sums / total[:, None]).clamp_min(1e-30).log())


def two_blobs(bags=24, size=5):
    g = np.random.default_rng(0)
    truth = (g.random((bags, size)) < np.where(np.arange(bags) % 2, 0.8, 0.2)[:, None]).astype(int)
    x = g.normal(size=(bags, size, 3)) + 3.0 * truth[..., None]
    return list(x.astype(np.float32)), (2 * truth.sum(1) > size).astype(int)


def test_fit_with_a_head_given_as_a_class(tmp_path):
    dataset = read(two_blobs()[0], labels=[str(v) for v in two_blobs()[1]])
    model = fit(dataset, head=MeanVote, options={"sharpness": 2.0}, epochs=3, folds=2)
    assert isinstance(model.estimator.head, MeanVote)
    assert model.estimator.head.sharpness == 2.0
    assert model.metadata["method"]["name"] == f"{__name__}:MeanVote"
    folder = model.save(tmp_path / "model")
    again = FittedModel.load(folder, head=MeanVote)
    want, got = (m.predict(dataset).instance_probabilities for m in (model, again))
    assert np.array_equal(want, got)


def in_new_process(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


LOAD = "import headcount as hc\ntry: hc.FittedModel.load('model')\nexcept hc.HeadcountError as e: print(e)"


def test_a_saved_model_asks_for_the_class_and_runs_no_code(tmp_path, monkeypatch):
    """Of a module that may be trusted: it is imported where ``trusted`` says so, and never because a folder names it."""
    lines = Path(__file__).read_text()
    source = lines[lines.index("class MeanVote") : lines.index("def two_blobs")]
    module = "from pathlib import Path\nfrom headcount import SumHead\nPath('it ran').touch()\n\n\n" + source
    (tmp_path / "votes.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    dataset, ran = read(two_blobs()[0], labels=[str(v) for v in two_blobs()[1]]), tmp_path / "it ran"
    for head in ("votes:MeanVote", "votes.py:MeanVote"):
        with pytest.raises(HeadcountError, match=r"is a custom head.*never runs code.*head=Class, or trusted=True"):
            fit(dataset, head=head, epochs=2, folds=2)
        assert not ran.exists()
        model = fit(dataset, head=head, trusted=True, epochs=2, folds=2)
        assert ran.exists()
        ran.unlink()
        model.save(tmp_path / "model", overwrite=(tmp_path / "model").exists())
        result = in_new_process(LOAD, tmp_path)
        assert f"names a custom head ({head}); loading runs no code: give its class" in result.stdout, result.stderr
        assert not ran.exists()
        result = in_new_process(
            LOAD.replace("'model'", "'model', head=votes.MeanVote").replace("hc\n", "hc, votes\n", 1), tmp_path
        )
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
        ran.unlink()


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("no_such_module:Head", "no head no_such_module:Head .*give module:Class or path/to/file.py:Class"),
        ("collections:OrderedDict", "collections has no class 'OrderedDict' derived from headcount's Head"),
        ("collections:Nothing", "collections has no class 'Nothing'"),
    ],
)
def test_what_is_no_head_is_refused_in_one_line(head, message):
    dataset = read([np.ones((2, 3)), np.zeros((2, 3))], labels=["a", "b"])
    with pytest.raises(HeadcountError, match=message):
        fit(dataset, head=head, trusted=True)


def test_the_estimator_takes_the_class_of_a_head(tmp_path):
    x, y = two_blobs()
    model = MajorityClassifier(MeanVote, epochs=20, options={"sharpness": 2.0}).fit(x, y)
    assert model.score(x, y) > 0.8
    assert clone(model).estimator is MeanVote
    model.fitted_.save(tmp_path / "model")
    again = FittedModel.load(tmp_path / "model", head=MeanVote)
    bags = Bags.of(Pool(np.concatenate(x)), sizes=[5] * 24, labels=[-1] * 24, classes=2)
    assert np.array_equal(again.predict(bags).instance_probabilities, model.fitted_.predict(bags).instance_probabilities)
    unpickled = pickle.loads(pickle.dumps(model))
    assert np.array_equal(np.concatenate(unpickled.predict(x)), np.concatenate(model.predict(x)))


def test_tilt_in_another_training_loop():
    """The example of the documentation, and what it says of its result."""
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "own-head.md").read_text()
    block = page[page.index("## Tilt in a training loop") :].split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(block, names)
    predicted, truth, share = names["predicted"], names["truth"], names["head"].transition.share
    assert (truth == names["target"].argmax(1)[:, None]).float().mean() < 0.6, "the labels themselves are poor"
    assert (predicted == truth).float().mean() > 0.94
    assert ((share > 0.5) & (share < 0.7)).all()
