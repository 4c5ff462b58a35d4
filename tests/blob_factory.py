"""Overlapping classes in bags, as Bags and as a dataset."""

from __future__ import annotations

import numpy as np

from headcount.bags import Bags, Pool
from headcount.readers import read


def blobs(bags=60, size=9, classes=3, share=0.5, seed=0, spread=0.6, **more):
    """Classes on a circle; the label's class has the share, and is strictly the largest."""
    g = np.random.default_rng(seed)
    label = np.arange(bags) % classes
    truth = []
    for c in label:
        while True:
            y = np.where(g.random(size) < share, c, g.integers(0, classes, size))
            count = np.bincount(y, minlength=classes)
            if count.argmax() == c and (count == count.max()).sum() == 1:
                break
        truth.append(y)
    y = np.concatenate(truth)
    angle = 2 * np.pi * y / classes
    x = np.stack([np.cos(angle), np.sin(angle)], 1) + spread * g.normal(size=(len(y), 2))
    sizes = [size] * bags
    return Bags.of(Pool(x.astype(np.float32)), sizes=sizes, labels=label, classes=classes, truth=y, **more)


def blob_dataset(bags, names="abcdefgh", **options):
    """A dataset read from a table of these bags, with truth, groups and weights where they have them."""
    classes = np.array(list(names))
    x = bags.pool.data.numpy()[bags.index.numpy()]
    columns = {f"f{i}": x[:, i].astype(float).tolist() for i in range(x.shape[1])}
    label = [None if v < 0 else str(classes[v]) for v in bags.label[bags.bag].tolist()]
    table = {"bag": [f"b{b}" for b in bags.bag.tolist()], "label": label, **columns}
    if bags.truth is not None:
        table["truth"] = classes[bags.truth.numpy()].tolist()
    if bags.group is not None:
        table["group"] = [bags.group[b] for b in bags.bag.tolist()]
    if bags.weight is not None:
        table["weight"] = bags.weight.tolist()
    return read(table, **options)
