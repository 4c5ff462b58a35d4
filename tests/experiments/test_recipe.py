"""Recipe: a frozen value whose key identifies a run permanently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.errors import HeadcountError
from headcount.experiments import recipe as module
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import load_records
from headcount.experiments.study import grid

DIGITS = Recipe(source="digits")
RESULTS = Path(__file__).parents[2] / "results"


def test_pinned_keys():
    """Defaults do not change once records exist; if this fails, records no longer match their recipes."""
    assert DIGITS.key == "9de59d92e8a95cfe"
    assert DIGITS.replace(removal=0.5).key == "3e1f22ebccf8f8a3"
    assert DIGITS.replace(fold=1).key == "f3731b23c7604b0b"
    assert DIGITS.replace(fold=1, removal=0.5).key == "d3ee455108e7de69"


def test_pinned_keys_of_the_committed_records(monkeypatch):
    checksum = "679a0a54bc26fa5422e7f7f6ea2ae1a0b1bb4a0ee2a8ef4bb5f8b5ae77d4a9ee"
    monkeypatch.setattr(module.registry, "source_checksum", lambda source: checksum)
    assert Recipe().key == Recipe(source="cifar10").key != Recipe(fold=1).key


def test_keys_of_the_committed_records(monkeypatch):
    """Every record in results/ is found again by its recipe; the data are identified by the recorded checksum."""
    found = [r for folder in ("paper", "plain", "seeds", "tilt", "tuning") for r in load_records(RESULTS / folder)]
    for record in found:
        monkeypatch.setattr(module.registry, "source_checksum", lambda source, r=record: r.fingerprint["data"])
        assert record.recipe.key == record.key == record.path.stem
    assert len(found) > 300


def test_a_field_that_keeps_its_default_is_not_in_the_key():
    assert DIGITS.replace(lr=3e-4).key == DIGITS.key
    assert DIGITS.replace(options={}).key == DIGITS.key
    assert Recipe.from_dict({"source": "digits"}).key == DIGITS.key, "a record written before a field existed keeps its key"


def test_everything_that_decides_a_number_is_in_the_key():
    changes = {
        "scenario": "small",
        "fold": 1,
        "bag_size": 32,
        "train_bags": 10,
        "valid_bags": 10,
        "test_bags": 10,
        "data_seed": 1,
        "sampler": "official",
        "tie": "random",
        "rounding": "largest_remainder",
        "overlap": False,
        "backbone": "mlp",
        "head": "output_mean",
        "options": {"t1": 1.0},
        "epochs": 3,
        "batch_bags": 2,
        "optimizer": "sgd",
        "lr": 1.0,
        "weight_decay": 1.0,
        "schedule": "cosine",
        "warmup": 0.5,
        "views": "crop",
        "selection": "mean",
        "patience": 4,
        "seed": 9,
        "precision": "bf16",
        "removal": 0.5,
        "distance": "mahalanobis",
        "prototype_bags": "all",
        "drop_before_forward": True,
        "chunk_instances": 1000,
        "trouble": {"wrong": 0.1},
        "backbone_options": {"stem": "small"},
        "batch_instances": 512,
        "decay": "weights",
        "mirror": True,
    }
    keys = {DIGITS.replace(**{name: value}).key for name, value in changes.items()}
    assert len(keys | {DIGITS.key}) == len(changes) + 1
    assert set(changes) | {"source"} == set(DIGITS.values)


def test_round_trip():
    recipe = DIGITS.replace(options={"t1": 1.0, "t2": 0.5}, fold=2)
    assert Recipe.from_dict(recipe.values) == recipe
    assert Recipe.from_dict(recipe.values).key == recipe.key
    assert hash(recipe) == hash(Recipe.from_dict(recipe.values))


def test_the_key_depends_on_the_code_of_a_custom_head(tmp_path):
    file = tmp_path / "mine.py"
    source = "from headcount.models.heads.count import Count\n\n\nclass Mine(Count):\n    title = 'Mine'\n"
    file.write_text(source)
    recipe = DIGITS.replace(head=f"{file}:Mine")
    first = recipe.key
    file.write_text(source + "# a change\n")
    assert recipe.key != first


def test_needs_and_labels():
    assert DIGITS.needs == ()
    assert DIGITS.replace(removal=0.3, distance="mahalanobis").needs == (DIGITS,)
    assert DIGITS.label == "Counting Network"
    assert DIGITS.replace(options={"t1": 1.0}).label == "Counting Network w/o Count"
    assert DIGITS.replace(removal=0.3).label == "Counting Network + MPEM"
    assert DIGITS.replace(head="output_mean", options={"form": "nll"}).label == "Output+Mean (nll)"
    assert str(DIGITS.replace(epochs=600)) == "Counting Network, digits various fold 0 (epochs=600)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "caf\udce9.npz"}, "in UTF-8, got"),
        ({"head": "cuont"}, r"no head 'cuont'; there are .* \(did you mean 'count'\?\)"),
        ({"scenario": "huge"}, "no scenario 'huge'; there are various, small, large"),
        ({"removal": 1.5}, "removal is a number from 0.0 to 1.0, got 1.5"),
        ({"fold": 9}, "fold is a whole number from 0 to 4, got 9"),
        ({"fold": 1.5}, "fold is a whole number"),
        ({"fold": True}, "fold is a whole number"),
        ({"bag_size": 0}, "bag_size is a whole number from 1"),
        ({"epochs": "many"}, "epochs is a whole number"),
        ({"lr": float("nan")}, "lr is a number"),
        ({"options": {"t3": 1}}, "no option of head count 't3'; there are t1, t2, mode, reduction"),
        ({"options": {"t1": float("nan")}}, "option t1 is a finite number, true, false, a word or a list of these, got nan"),
        ({"options": {"t1": {"a": 1}}}, "option t1 is a finite number"),
        ({"options": {"t1": np.arange(2)}}, "option t1 is a finite number"),
        ({"fold": np.float64(1.5)}, "fold is a whole number from 0 to 4, got"),
        ({"mirror": 1}, "mirror is true or false, got 1"),
        ({"lrr": 1}, r"no recipe field 'lrr'.*did you mean 'lr'"),
    ],
)
def test_invalid_fields(changes, message):
    with pytest.raises(HeadcountError, match=message):
        DIGITS.replace(**changes)


def test_numpy_and_torch_numbers():
    given = DIGITS.replace(fold=np.int64(1), lr=np.float32(0.5), mirror=np.True_, options={"t1": torch.tensor(2.0)})
    plain = DIGITS.replace(fold=1, lr=0.5, mirror=True, options={"t1": 2.0})
    assert given == plain
    assert given.key == plain.key
    assert [type(v) for v in (given.fold, given.lr, given.mirror, dict(given.options)["t1"])] == [int, float, bool, float]
    assert [r.fold for r in grid(DIGITS, fold=np.arange(2))] == [0, 1]


def test_reading_a_recipe_executes_no_code(tmp_path):
    (tmp_path / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for file in (tmp_path / "custom.py", tmp_path / "gone.py"):
        assert Recipe.from_dict({"head": f"{file}:X", "removal": 0.5}).needs
    assert not (tmp_path / "ran").exists()
    with pytest.raises(HeadcountError, match=r"no file .*gone\.py"):
        _ = DIGITS.replace(head=f"{tmp_path / 'gone.py'}:X").key
