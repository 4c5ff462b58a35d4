"""Corruption: wrong labels, unequal and missing classes in training and validation bags, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool
from headcount.cli.options import RECIPE_OPTIONS
from headcount.cli.running import build_recipes
from headcount.datasets.protocol import corrupt
from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.experiments.run import make_bags, run


def bags(n=200, classes=4):
    pool = Pool(np.zeros((n * 2, 1), np.float32))
    return {
        split: Bags.of(pool, sizes=[2] * n, labels=np.arange(n) % classes, classes=classes)
        for split in ("train", "valid", "test")
    }


def test_the_given_fraction_of_labels_is_wrong():
    before, after = bags(), corrupt(bags(), {"wrong": 0.3}, 0)
    for split in ("train", "valid"):
        changed = after[split].label != before[split].label
        assert int(changed.sum()) == 60
        assert len(set(after[split].label[changed].tolist())) == 4
        assert torch.equal(after[split].index, before[split].index)
    assert torch.equal(after["test"].label, before["test"].label)
    again = corrupt(bags(), {"wrong": 0.3}, 0)
    assert torch.equal(again["train"].label, after["train"].label)
    assert not torch.equal(corrupt(bags(), {"wrong": 0.3}, 1)["train"].label, after["train"].label)
    assert not torch.equal(after["train"].label, after["valid"].label), "other lots for other bags"


def test_rarer_and_missing_labels():
    after = corrupt(bags(400), {"unequal": 8}, 0)
    assert np.bincount(after["train"].label).tolist() == [100, 50, 25, round(100 / 8)]
    assert np.bincount(after["test"].label).tolist() == [100] * 4
    after = corrupt(bags(), {"never": 2, "wrong": 0.0}, 0)
    assert np.bincount(after["valid"].label, minlength=4).tolist() == [50, 50, 0, 50]
    with pytest.raises(HeadcountError, match="a class from 0 to 3, got 4"):
        corrupt(bags(), {"never": 4}, 0)


def test_merged_bags_keep_their_label_and_their_instances():
    pool = Pool(np.arange(46)[:, None].astype(np.float32))
    sizes, labels = [2, 3] * 9 + [1], [0, 1] * 9 + [1]
    held = Bags.of(pool, sizes=sizes, labels=labels, classes=2, truth=np.repeat(labels, sizes))
    after = corrupt({"train": held, "valid": held, "test": held}, {"merge": 4}, 0)
    train = after["train"]
    assert train.label.tolist() == [0, 0, 1, 1]
    assert train.sizes.tolist()[:2] == [8, 8]
    assert torch.equal(train.truth, train.label.repeat_interleave(train.sizes))
    assert len(set(train.index.tolist())) == len(train.index)
    assert after["valid"] is held
    with pytest.raises(HeadcountError, match="no label has 11 training bags"):
        corrupt(after | {"train": held}, {"merge": 11}, 0)


def test_a_recipe_with_corruption(tmp_path):
    plain = Recipe(source="digits", bag_size=8, train_bags=20, valid_bags=10, test_bags=10, backbone="mlp", epochs=1)
    recipe = plain.replace(trouble={"wrong": 0.5})
    assert recipe.key != plain.key
    assert plain.replace(trouble={}).key == plain.key
    changed = make_bags(recipe)["train"].label != make_bags(plain)["train"].label
    assert int(changed.sum()) == 10
    record = run(recipe, tmp_path)
    assert Recipe.from_dict(record.data["recipe"]) == recipe


def test_nested_fields_on_the_command_line():
    words = ["trouble.wrong=0.1,0.2", "backbone.stem=small", "backbone.width=32"]
    made = build_recipes({name: option.default for name, option in RECIPE_OPTIONS.items()} | {"head": "tilt", "set": words})
    assert [dict(r.trouble) for r in made] == [{"wrong": 0.1}, {"wrong": 0.2}]
    assert {r.backbone_options for r in made} == {(("stem", "small"), ("width", 32))}
