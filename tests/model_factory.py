"""Fitted models made by hand, and data for them, of every kind the commands take: a table, pictures, slides, texts."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression

import read_factory as make
from headcount.majority import transition
from headcount.models.fitted import FittedModel
from headcount.models.network import Model, ModelConfig
from headcount.models.trees import from_sklearn
from headcount.readers import BagDataset, read

KINDS = ("table", "images", "slides", "text")


def even(classes: int) -> transition.Transition:
    return transition.Transition(transition.mix_from_shares(0.6, classes), torch.full((classes,), 1 / classes))


def people(bags: int = 8, size: int = 6, seed: int = 0, share: float = 0.75, shuffle: bool = True, **more: Any) -> dict:
    """A table whose classes can be told from `height`; rows of different bags are mixed, ids and truth are there."""
    g = np.random.default_rng(seed)
    n = bags * size
    bag = np.repeat(np.arange(bags), size)
    label = bag % 2
    truth = np.where(g.random(n) < share, label, 1 - label)
    height = g.normal(160 + 20 * truth, 4).round(2)
    order = g.permutation(n) if shuffle else np.arange(n)
    table = {
        "id": [f"{i:03d}" for i in range(n)],
        "precinct": [f"p{b}" for b in bag[order]],
        "label": [("no", "yes")[k] for k in label[order]],
        "truth": [("no", "yes")[k] for k in truth[order]],
        "height": height[order].tolist(),
        "colour": g.choice(["red", "green"], n).tolist(),
    }
    return {**table, **more}


def fitted(reading: BagDataset, body: str = "forest", head: str = "tilt", **more: Any) -> FittedModel:
    """A model of this body on the bags' labels (a network is left as it is born)."""
    learned, classes = reading.fit_preprocessor(), reading.bags.classes
    bags = reading.to_bags(learned)
    if body == "network":
        torch.manual_seed(0)
        backbone = ("resnet18", (("stem", "small"), ("width", 4))) if reading.kind == "images" else ("mlp", (("hidden", 8),))
        made: Any = Model(ModelConfig(learned.shape, classes, *backbone, head)).eval()
    else:
        x, y = bags.pool.take(bags.index).numpy(), bags.label[bags.bag].numpy()
        kinds = {
            "forest": RandomForestClassifier(20, random_state=0, min_samples_leaf=8),
            "boosting": HistGradientBoostingClassifier(max_iter=8, max_leaf_nodes=3), "linear": LogisticRegression(),
        }  # fmt: skip
        made = from_sklearn(kinds[body].fit(x, y), len(classes))
    return FittedModel(made, classes, learned, even(len(classes)), **more)


def case(root: Path, kind: str) -> tuple[Path, Path]:
    """(model folder, data) of a kind, on disk."""
    root.mkdir(parents=True, exist_ok=True)
    if kind == "table":
        data = make.write_csv(root / "people.csv", people())
    elif kind == "text":
        data = make.write_csv(root / "texts.csv", make.texts())
    else:
        data = {"images": make.folder, "slides": make.slides}[kind](root / kind)
    body = {"table": "forest", "text": "linear"}.get(kind, "network")
    return fitted(read(data), body, temperature=0.5).save(root / "model"), data


def read_rows(path: Path, separator: str = ",") -> list[dict[str, str]]:
    """The rows of a text table."""
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8")), delimiter=separator))


def file_names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}
