"""Sanity checks: small synthetic data sets that show whether a method really learns from majorities.

The score is the instance accuracy on test bags; for ``never`` over the classes that can be the majority.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from headcount.bags import Bags, Pool
from headcount.experiments.run import hide_truth
from headcount.majority import metrics
from headcount.models.network import ModelConfig, build_model
from headcount.models.predictions import predict
from headcount.training import loop
from headcount.training.config import TrainConfig

CLASSES = 4
BAG_SIZE = 15
N_BAGS = {"train": 160, "valid": 60, "test": 60}


class CheckScore(NamedTuple):
    """The scores of one head in one sanity check: means over seeds."""

    instance_accuracy: float
    bag_accuracy: float
    deviation: float  # of the instance accuracy over seeds


def present(c: int, rng: np.random.Generator) -> list[int]:
    """Eight of c, always four of the next class, and three of the other classes."""
    return [c] * 8 + [(c + 1) % CLASSES] * 4 + list((c + rng.integers(2, CLASSES, 3)) % CLASSES)


def loud(c: int, rng: np.random.Generator) -> list[int]:
    """Nine of c and six others, the last of them far out: in training in a direction that depends on the label, else in any."""
    return [c] * 9 + list((c + rng.integers(1, CLASSES, 6)) % CLASSES)


def one_vote(c: int, rng: np.random.Generator) -> list[int]:
    """Six of c, five of another class, two of each of the rest."""
    return [c] * 6 + list(((c + 1 + rng.permutation(CLASSES - 1)) % CLASSES).repeat([5, 2, 2]))


def never(c: int, rng: np.random.Generator) -> list[int]:
    """Seven of c; the last class is in every bag and never the majority."""
    return [c] * 7 + [CLASSES - 1] * 4 + list(rng.integers(0, CLASSES - 1, 4))


# name -> the classes of a bag whose majority is c
SANITY_CHECKS = {check.__name__: check for check in (present, loud, one_vote, never)}


def sanity_check_bags(check: str, seed: int = 0) -> dict[str, Bags]:
    """Training, validation and test bags of a sanity check, in random order within each bag, with truth."""
    bags = {}
    for i, (split, count) in enumerate(N_BAGS.items()):
        rng = np.random.default_rng([seed, i, *check.encode()])
        labels = rng.integers(0, CLASSES - (check == "never"), count)
        truth = np.array([SANITY_CHECKS[check](c, rng) for c in labels]).ravel()
        # classes lie on a circle, far enough apart for an instance accuracy of 0.98 with full supervision
        angle = 2 * np.pi * truth / CLASSES
        x = np.stack([np.cos(angle), np.sin(angle)], 1) * 1.6 + rng.normal(0, 0.45, (len(truth), 2))
        if check == "loud":
            x = np.concatenate([x, rng.normal(0, 0.1, (len(truth), CLASSES))], 1)
            directions = labels if split == "train" else rng.integers(0, CLASSES, count)
            x[np.arange(1, count + 1) * BAG_SIZE - 1, 2 + directions] += 8
        order = np.concatenate([b * BAG_SIZE + rng.permutation(BAG_SIZE) for b in range(count)])
        pool = Pool(x[order].astype(np.float32))
        bags[split] = Bags.of(pool, sizes=[BAG_SIZE] * count, labels=labels, classes=CLASSES, truth=truth[order])
    return bags


def run_sanity_check(
    check: str, head: str, options: Mapping[str, Any] | None = None, *, epochs: int = 60, seeds: int = 3
) -> CheckScore:
    """Train a head on the majority labels of a sanity check with a small network, and score it on the test instances."""
    network = {"backbone": "mlp", "backbone_options": (("hidden", 32), ("layers", 1)), "head": head}
    instance, bag = [], []
    for seed in range(seeds):
        bags = sanity_check_bags(check, seed)
        train, valid = (hide_truth(bags[split], head) for split in ("train", "valid"))
        model = build_model(ModelConfig.for_bags(train, **network, options=tuple((options or {}).items())), train, seed=seed)
        result = loop.train(model, train, valid, TrainConfig(epochs=epochs, batch_bags=32, lr=3e-3, seed=seed))
        predictions, test = predict(result.model, bags["test"]), bags["test"]
        assert test.truth is not None
        truth, predicted = test.truth.numpy(), predictions.instance.argmax(1).numpy()
        scored = truth < CLASSES - 1 if check == "never" else truth >= 0
        instance.append(metrics.instance_accuracy(truth[scored], predicted[scored]))
        bag.append(metrics.bag_accuracy(test.label.numpy(), predictions.bag.argmax(1).numpy()))
    return CheckScore(float(np.mean(instance)), float(np.mean(bag)), float(np.std(instance)))
