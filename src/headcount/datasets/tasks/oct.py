"""Retinal scans by patient: the finding of each scan, if only the commonest one of the patient is known."""

from pathlib import Path

import numpy as np

from headcount.datasets.tasks import Task, TaskData
from headcount.loading import open_npz

MIN_SCANS = 8
CLASSES = ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal")
CELL, ORIENTATIONS = 7, 4  # a scan of 28 x 28 pixels has 16 cells


def describe(images: np.ndarray) -> np.ndarray:
    """(n, 80) of images (n, 28, 28): the mean of every cell, and how strong its gradients are in four orientations."""
    x = images.astype(np.float32) / 255
    rows, columns = np.gradient(x, axis=(1, 2))
    strength, orientation = np.hypot(rows, columns), np.arctan2(rows, columns) % np.pi
    bins = np.minimum((orientation / np.pi * ORIENTATIONS).astype(int), ORIENTATIONS - 1)
    maps = [x, *(strength * (bins == k) for k in range(ORIENTATIONS))]
    cells = [m.reshape(len(x), 28 // CELL, CELL, 28 // CELL, CELL).mean((2, 4)).reshape(len(x), -1) for m in maps]
    return np.concatenate(cells, 1)


def load(file: Path) -> TaskData:
    """Grey images (n, 28, 28), labels and group, the patient."""
    with open_npz(file, "images, labels and group of the scans") as arrays:
        images, labels, patient = arrays["images"], arrays["labels"], arrays["group"]
    _, number, count = np.unique(patient, return_inverse=True, return_counts=True)
    used = count[number] >= MIN_SCANS
    return TaskData(describe(images[used]), patient[used], np.array(CLASSES)[labels[used]])


TASK = Task(
    "OCT scans by patient",
    load,
    CLASSES,
    ("oct.npz",),
    "28 x 28 pixels of 46,453 scans of the Kermany collection OCT2017 (CC BY 4.0), an .npz with images, labels and group; patients with "
    "eight scans or more; 80 features: means and gradients of 16 cells",
)
