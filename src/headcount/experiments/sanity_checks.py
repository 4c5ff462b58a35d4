"""Probes: small synthetic sets that tell whether a method really learns from majorities.

Each is features in two dimensions or a few more, easy for a network that is told every class, with one trap:

present   another class is *present* in every bag of a label, always as a minority: presence predicts the label just as well
loud      one instance a bag, much larger than the others, betrays the label in training and lies at the test
one_vote  every majority is by one vote
never     one class is never in majority: nobody can learn it from the labels, and it should not spoil the others

The figure of merit is instance accuracy on test bags; for ``never`` over the classes that can win.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headcount.bags import Bags, Pool
from headcount.experiments.recipe import Recipe
from headcount.experiments.run import hide_truth
from headcount.majority import metrics
from headcount.models.network import build_model, predict
from headcount.training import loop

CLASSES = 4
BAG_SIZE = 15
N_BAGS = {"train": 160, "valid": 60, "test": 60}


@dataclass(frozen=True)
class CheckScore:
    """What one head did on one probe, averaged over seeds."""

    check: str
    instance_accuracy: float
    bag_accuracy: float
    deviation: float  # of the instance accuracy over seeds


def features(truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Classes sit on a circle, far enough apart that a told network gets 98 of 100 right."""
    angle = 2 * np.pi * truth / CLASSES
    return np.stack([np.cos(angle), np.sin(angle)], 1) * 1.6 + rng.normal(0, 0.45, (len(truth), 2))


def present(bags: int, rng: np.random.Generator, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A bag labelled c holds eight of c, and always four of the next class; the rest is anybody."""
    labels = rng.integers(0, CLASSES, bags)
    rows = [[c] * 8 + [(c + 1) % CLASSES] * 4 + list((c + rng.integers(2, CLASSES, 3)) % CLASSES) for c in labels]
    truth = np.array(rows).ravel()
    return features(truth, rng), truth, labels


def loud(bags: int, rng: np.random.Generator, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nine of c and six others, one of whom shouts: in training in a direction that goes with the label, else anywhere."""
    labels = rng.integers(0, CLASSES, bags)
    truth = np.array([[c] * 9 + list((c + rng.integers(1, CLASSES, 6)) % CLASSES) for c in labels])
    x = np.concatenate([features(truth.ravel(), rng), rng.normal(0, 0.1, (bags * BAG_SIZE, CLASSES))], 1)
    shouts = labels if split == "train" else rng.integers(0, CLASSES, bags)
    x[np.arange(bags) * BAG_SIZE + BAG_SIZE - 1, 2 + shouts] += 8
    return x, truth.ravel(), labels


def one_vote(bags: int, rng: np.random.Generator, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Six of c, five of a rival, two of each of the others."""
    labels = rng.integers(0, CLASSES, bags)
    rows = []
    for c in labels:
        rival, *rest = (c + 1 + rng.permutation(CLASSES - 1)) % CLASSES
        rows.append([c] * 6 + [rival] * 5 + [rest[0]] * 2 + [rest[1]] * 2)
    truth = np.array(rows).ravel()
    return features(truth, rng), truth, labels


def never(bags: int, rng: np.random.Generator, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The last class is in every bag and never wins."""
    labels = rng.integers(0, CLASSES - 1, bags)
    truth = np.array([[c] * 7 + [CLASSES - 1] * 4 + list(rng.integers(0, CLASSES - 1, 4)) for c in labels])
    labels = np.array([np.bincount(row, minlength=CLASSES).argmax() for row in truth])
    return features(truth.ravel(), rng), truth.ravel(), labels


SANITY_CHECKS: dict[str, Callable[[int, np.random.Generator, str], tuple[np.ndarray, np.ndarray, np.ndarray]]] = {
    "present": present,
    "loud": loud,
    "one_vote": one_vote,
    "never": never,
}


def sanity_check_bags(name: str, seed: int = 0) -> dict[str, Bags]:
    """Training, validation and test bags of a probe, shuffled inside, with truth."""
    made = {}
    for i, (split, count) in enumerate(N_BAGS.items()):
        rng = np.random.default_rng([seed, i, *name.encode()])
        x, truth, labels = SANITY_CHECKS[name](count, rng, split)
        order = np.concatenate([b * BAG_SIZE + rng.permutation(BAG_SIZE) for b in range(count)])
        pool = Pool(x[order].astype(np.float32))
        made[split] = Bags.of(pool, sizes=[BAG_SIZE] * count, labels=labels, classes=CLASSES, truth=truth[order])
    return made


def run_sanity_check(recipe: Recipe, name: str, seeds: int = 3) -> CheckScore:
    """Train the recipe's head on a probe's majority labels, and score it on the probe's instances."""
    scores = [_once(recipe.replace(seed=seed), sanity_check_bags(name, seed), name) for seed in range(seeds)]
    instance, bag = np.array(scores).T
    return CheckScore(name, float(instance.mean()), float(bag.mean()), float(instance.std()))


def _once(recipe: Recipe, bags: dict[str, Bags], name: str) -> tuple[float, float]:
    train, valid = (hide_truth(bags[split], recipe) for split in ("train", "valid"))
    model = build_model(recipe.model_config(train), train, seed=recipe.seed)
    said = predict(loop.train(model, train, valid, recipe.train_config).model, bags["test"])
    assert bags["test"].truth is not None
    truth, answer = bags["test"].truth.numpy(), said.instance.argmax(1).numpy()
    judged = truth < CLASSES - 1 if name == "never" else truth >= 0
    right = metrics.instance_accuracy(truth[judged], answer[judged])
    return right, metrics.bag_accuracy(bags["test"].label.numpy(), said.bag.argmax(1).numpy())


def recipe_for(head: str, options: dict | None = None, epochs: int = 60) -> Recipe:
    """A small network and a short training, the same for every head."""
    return Recipe(
        source="digits",  # never loaded: a probe brings its own bags
        head=head,
        options=tuple((options or {}).items()),
        backbone="mlp",
        backbone_options=(("hidden", 32), ("layers", 1)),
        epochs=epochs,
        batch_bags=32,
        lr=3e-3,
    )
