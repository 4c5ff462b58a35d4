"""A small training on digits, shared by the tests of the loop and of the tilt head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headcount.experiments import run as runs
from headcount.experiments.recipe import Recipe
from headcount.training import loop

CUSTOM_HEAD = f"{Path(__file__).parent / 'toy_head.py'}:Toy"
TINY = Recipe(source="digits", bag_size=8, train_bags=30, valid_bags=10, test_bags=10, backbone="mlp", epochs=6, batch_bags=8)


def model_and_bags(recipe):
    """What train and Trainer take, but for the configuration."""
    bags = runs.make_bags(recipe)
    return runs.initial_model(recipe, bags["train"].blind()), bags["train"].blind(), bags["valid"].blind()


def train_recipe(recipe, **options):
    return loop.train(*model_and_bags(recipe), recipe.train_config, **options)


def have_equal_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class Interrupted(Exception):
    pass


def train_until(recipe, work_dir, epoch):
    """Interrupt a training after this many epochs; a checkpoint is written after each."""

    def interrupt(progress):
        if progress.epoch == epoch:
            raise Interrupted

    with pytest.raises(Interrupted):
        train_recipe(recipe, work_dir=work_dir, on_progress=interrupt, checkpoint_seconds=0)


def check_resuming(recipe, folder):
    """A training that is interrupted twice ends with the same bits as one that is not."""
    whole = train_recipe(recipe, work_dir=folder / "whole")
    for epoch in (1, 3):
        train_until(recipe, folder / "interrupted", epoch)
    resumed = train_recipe(recipe, work_dir=folder / "interrupted")
    assert have_equal_weights(whole.model, resumed.model)
    assert whole.progress.curve == resumed.progress.curve
    assert whole.progress.best_epoch == resumed.progress.best_epoch
    lines = [json.loads(line) for line in (folder / "interrupted" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, whole.progress.epoch + 1))
