"""Invented records: bags of a source, a pretended accuracy, and all that the record contract promises."""

from __future__ import annotations

import hashlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from headcount.datasets.protocol import Protocol, majority_bags
from headcount.datasets.registry import Source
from headcount.experiments import records
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.majority import metrics
from headcount.reporting.render import read_resource

REMOVALS = tuple(round(0.1 * k, 1) for k in range(1, 11))
SKILL = {"count": 0.86, "output_mean": 0.74, "tilt": 0.9}


HOSTILE = ("<img src=x onerror=alert(1)>", '"><script>alert(2)</script>', "$5 & up", "日本 🎈", "{{ 7 * 7 }}")


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[str]:
        return [attrs[name] for _, attrs in self.tags if name in attrs]


def assert_own_script_only(page: Any) -> None:
    """In a browser: the script of every page is the only one, and no other can run."""
    assert page.evaluate("[...document.scripts].map(s => s.textContent)") == [read_resource("page.js")]
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert page.evaluate("window.ran") is None
    page.evaluate("document.body.lastChild.remove()")


def pictures(classes: tuple[str, ...], count: int = 1000, seed: int = 0) -> Source:
    """Small coloured noise, a hue a class."""
    rng = np.random.default_rng(seed)
    truth = np.arange(count) % len(classes)
    hue = rng.integers(40, 220, (len(classes), 1, 1, 3))
    data = np.clip(hue[truth] + rng.integers(-30, 30, (count, 12, 12, 3)), 0, 255).astype(np.uint8)
    return Source("noise", data, truth, classes, checksum="0f" * 16, note="made up for a test")


def features(classes: tuple[str, ...], count: int = 1000) -> Source:
    data = np.random.default_rng(1).normal(size=(count, 5)).astype(np.float32)
    return Source("table", data, np.arange(count) % len(classes), classes, checksum="1e" * 16)


def make_record(folder: Path, source: Source, recipe: Recipe, arrays: bool = True) -> Record:
    """The record a run of this recipe might have left."""
    text = str(sorted(recipe.values.items()))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    rng = np.random.default_rng(int(key, 16))
    said = _said(source, recipe, rng)
    body = _body(source, recipe, key, rng, said)
    kept = {k: v for k, v in said.items() if k != "bag"}
    if recipe.head == "count" and not recipe.removal:
        body["sweep"], shares = _sweep(rng, recipe.train_bags)
        kept |= shares
    if recipe.removal:
        body["mpem"] = {"removed": 80, "purity": 0.9, "agreement": 1.0, "agreement_random": 0.9}
    record = records.write_record(folder, body, kept)
    if not arrays:
        record.path.with_suffix(".npz").unlink()
    return record


def make_study(folder: Path, source: Source, folds: int = 3, **fields: Any) -> list[Record]:
    """Two methods and MPEM at every r, on some folds."""
    small = {"bag_size": 24, "train_bags": 60, "valid_bags": 10, "test_bags": 10, "epochs": 120, "backbone": "mlp"}
    base = Recipe(**{"source": source.name, **small, **fields})
    made = []
    for fold in range(folds):
        for recipe in (base, base.replace(head="output_mean"), *(base.replace(removal=r) for r in REMOVALS)):
            made.append(make_record(folder, source, recipe.replace(fold=fold)))
    return made


def _said(source: Source, recipe: Recipe, rng: np.random.Generator) -> dict[str, np.ndarray]:
    protocol = Protocol(recipe.scenario, recipe.bag_size, 10, 10, recipe.test_bags)
    bags = majority_bags(source, recipe.fold, protocol)["test"]
    truth = source.truth[bags.index]
    sizes = np.diff(np.asarray(bags.offsets))
    bag = np.repeat(np.arange(len(sizes)), sizes)
    label = np.asarray(bags.target.argmax(1))
    skill = np.clip(SKILL[recipe.head] + 0.05 * np.sin(3 * recipe.removal) + rng.normal(0, 0.12, len(sizes)), 0.1, 1)
    slip = rng.random(len(bag)) > skill[bag]
    other = np.where(rng.random(len(bag)) < 0.6, label[bag], rng.integers(0, len(source.classes), len(bag)))
    said = np.where(slip, other, truth)
    bag_said = metrics.count_votes(said, bag, len(label), len(source.classes)).argmax(1)
    sure = np.where(said == truth, rng.beta(9, 1, len(bag)), rng.beta(4, 3, len(bag)))
    return {
        "bag": bag, "test_index": np.asarray(bags.index), "test_offsets": np.asarray(bags.offsets), "test_label": label,
        "test_bag_said": bag_said, "test_truth": truth, "test_said": said.astype(np.int16),
        "test_confidence": sure.astype(np.float32),
    }  # fmt: skip


def _body(source: Source, recipe: Recipe, key: str, rng: np.random.Generator, said: dict[str, np.ndarray]) -> dict:
    truth, guess, label = said["test_truth"], said["test_said"].astype(int), said["test_label"]
    counts = metrics.confusion_matrix(truth, guess, len(source.classes))
    gaps = metrics.share_difference(truth, guess, label, said["bag"])
    epoch = np.linspace(1, recipe.epochs, 60).round().astype(int)
    noise = rng.normal(0, 0.02, (2, 60)).cumsum(1) * 0.3
    train = 2.2 * np.exp(-epoch / 18) + 0.08 + np.abs(noise[0]) * 0.2
    valid = 2.1 * np.exp(-epoch / 22) + 0.35 + 0.25 * (epoch / recipe.epochs) ** 2 + noise[1]
    valid += 0.05 * (recipe.removal - 0.5) ** 2
    best = int(valid.argmin())
    return {
        "key": key, "format": 1, "recipe": recipe.values, "label": recipe.label, "text": str(recipe), "needs": [],
        "data": {
            "source": source.name, "checksum": source.checksum, "note": source.note, "classes": list(source.classes),
            "shape": list(source.data.shape[1:]), "train_bags": recipe.train_bags, "valid_bags": recipe.valid_bags,
            "test_bags": recipe.test_bags, "bag_size": recipe.bag_size,
        },
        "fit": {
            "best_epoch": int(epoch[best]), "valid_loss": float(valid[best]), "epochs": recipe.epochs,
            "stopped": recipe.epochs, "curve": {"epoch": epoch.tolist(), "train": train.tolist(), "valid": valid.tolist()},
        },
        "scores": {
            "instance_accuracy": metrics.instance_accuracy(truth, guess),
            "bag_accuracy": metrics.bag_accuracy(label, said["test_bag_said"]),
            "consistency_rate": None if recipe.head == "output_mean" and recipe.fold == 0 else 0.97,
            "miou": metrics.mean_iou(counts), "miou_usual": metrics.mean_iou(counts, balanced=False),
            "share_difference": float(gaps.mean()),
        },
        "confusion": counts.tolist(), "share_difference": gaps.tolist(),
        "provenance": {
            "commit": "0123abc", "versions": {"headcount": "0.1.0", "torch": "2.6.0"}, "device": "cpu", "host": "secret-host",
            "started": f"2025-01-0{1 + recipe.fold}T10:00:00+00:00", "seconds": 12.5,
        },
    }  # fmt: skip


def _sweep(rng: np.random.Generator, bags: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    r = np.array(REMOVALS)
    sweep = {
        "removal": list(REMOVALS), "removed": (80 * r).round().astype(int).tolist(),
        "purity": [None, *(0.97 - 0.1 * r[1:] + rng.normal(0, 0.01, 9)).tolist()],
        "agreement": np.minimum(1, 1 - 0.01 * r + rng.normal(0, 0.003, 10)).tolist(),
        "agreement_random": (0.98 - 0.3 * r**2 + rng.normal(0, 0.01, 10)).tolist(), "share_after": (0.5 + 0.3 * r).tolist(),
    }  # fmt: skip
    before = rng.uniform(0.15, 0.97, bags)
    after = {f"train_share_after_{q}": before / (before + (1 - before) * (1 - 0.85 * q)) for q in (0.3, 0.5, 0.8, 1.0)}
    return sweep, {"train_share_before": before, **after}
