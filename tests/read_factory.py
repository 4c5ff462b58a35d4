"""Small data of every kind the readers take, written as people write them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

WORDS = {"good": "great lovely fine wonderful", "bad": "awful broken poor terrible"}


def rows(bags: int = 6, size: int = 5, seed: int = 0, **more: Any) -> dict[str, list]:
    """A table of one row per instance: numbers, a category, missing values; labels follow the bag's number."""
    g = np.random.default_rng(seed)
    n = bags * size
    bag = np.repeat(np.arange(bags), size)
    age = g.normal(50, 10, n).round(2).tolist()
    age[3] = None
    colour = g.choice(["red", "green", "blue"], n).tolist()
    table: dict[str, list] = {
        "bag": [f"b{b}" for b in bag],
        "label": [("no", "yes")[b % 2] for b in bag],
        "id": [f"{i:03d}" for i in range(n)],
        "age": age,
        "height": g.normal(170, 9, n).round(2).tolist(),
        "colour": colour,
    }
    return {**table, **more}


def write_csv(path: Path, table: dict[str, list], delimiter: str = ",", newline: str = "\n", encoding: str = "utf-8") -> Path:
    with open(path, "w", newline="", encoding=encoding) as f:
        out = csv.writer(f, delimiter=delimiter, lineterminator=newline)
        out.writerow(table)
        out.writerows(zip(*table.values(), strict=True))
    return path


def picture(path: Path, size: tuple[int, int] = (6, 5), mode: str = "RGB", seed: int = 0) -> Path:
    """(height, width) pixels of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = size if mode == "L" else (*size, len(mode))
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode).save(path)
    return path


def folder(root: Path, bags: int = 4, size: int = 3, mode: str = "RGB") -> Path:
    """One sub-folder per bag, and labels.csv."""
    for b in range(bags):
        for i in range(size):
            picture(root / f"bag{b}" / f"{i}.png", mode=mode, seed=10 * b + i)
    write_csv(root / "labels.csv", {"bag": [f"bag{b}" for b in range(bags)], "label": ["cat", "dog"] * (bags // 2)})
    return root


def by_label(root: Path, bags: int = 2, size: int = 3) -> Path:
    """bags/<label>/<bag>/*, the same bag names under each label."""
    for k, label in enumerate(("cat", "dog")):
        for b in range(bags):
            for i in range(size):
                picture(root / "bags" / label / f"{b}" / f"{i}.png", seed=100 * k + 10 * b + i)
    return root


def texts(bags: int = 6, size: int = 8, seed: int = 0) -> dict[str, list]:
    g = np.random.default_rng(seed)
    labels = [("bad", "good")[b % 2] for b in range(bags)]
    said = [" ".join(g.choice(WORDS[label].split(), 4)) + " thing" for label in labels for _ in range(size)]
    every = [(b, label) for b, label in enumerate(labels) for _ in range(size)]
    return {"product": [f"p{b}" for b, _ in every], "label": [label for _, label in every], "text": said}


def slide(path: Path, rows: int = 7, width: int = 4, seed: int = 0, layout: str = "trident", tile: int = 512) -> Path:
    """A feature file as TRIDENT or CLAM writes it."""
    import h5py

    g = np.random.default_rng(seed)
    x = g.normal(size=(rows, width)).astype(np.float32)
    coords = g.integers(0, 100, (rows, 2)) * tile
    path.parent.mkdir(parents=True, exist_ok=True)
    if layout == "pt":
        torch.save(torch.from_numpy(x), path)
        return path
    with h5py.File(path, "w") as f:
        f.create_dataset("features", data=x[None] if layout == "batched" else x, chunks=True, maxshape=None)
        d = f.create_dataset("coords", data=coords)
        if layout in ("trident", "batched"):
            said = {"patch_size": 256, "patch_size_level0": tile, "level0_magnification": 40, "overlap": 0, "name": path.stem}
            d.attrs.update(said)
        if layout == "clam":
            d.attrs.update({"patch_size": 256, "patch_level": 1, "downsample": (tile / 256, tile / 256)})
    return path


def slides(root: Path, layout: str = "trident", count: int = 4) -> Path:
    """Slides of two cases each, of several sizes, and their table."""
    for i in range(count):
        slide(root / f"TCGA.{i}.h5", rows=4 + i, seed=i, layout=layout, tile=(512, 256)[i % 2])
    label_table(root / "labels.csv", count)
    return root


def label_table(path: Path, count: int = 4) -> Path:
    return write_csv(
        path,
        {
            "case_id": [f"case{i // 2}" for i in range(count)],
            "slide_id": [f"TCGA.{i}.svs" for i in range(count)],
            "label": [("tumour", "normal")[i // 2 % 2] for i in range(count)],
        },
    )
