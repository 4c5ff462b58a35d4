"""The same body for other units: asked about x, it answers what it answered about (x - centre) / scale.

So a model that learned from standardised columns can be asked about plain ones, and the other way round.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headcount.data.standard import Standard
from headcount.models.fitted import Fitted
from headcount.models.forest import Forest, Held, Linear
from headcount.models.model import Model

Body = Model | Forest | Linear


def rebased(body: Body, centre: np.ndarray, scale: np.ndarray) -> Body:
    """``centre`` and ``scale`` are (D,) float64."""
    if isinstance(body, Linear):
        return Linear(body.weight / scale, body.bias - body.weight @ (centre / scale))
    if isinstance(body, Forest):
        asks = np.maximum(body.feature, 0)  # leaves ask nothing
        threshold = np.where(body.feature >= 0, body.threshold * scale[asks] + centre[asks], 0.0)
        return Forest(body.roots, body.feature, threshold, body.left, body.right, body.value)
    made = copy.deepcopy(body)
    mean, std = made.prepare.mean.double().numpy(), made.prepare.std.double().numpy()
    made.prepare.mean.copy_(torch.from_numpy(mean * scale + centre))
    made.prepare.std.copy_(torch.from_numpy(std * scale))
    return made


def unrounded(body: Body) -> Body:
    """The same trees for numbers that are not rounded to float32 before they are compared, as scikit-learn rounds them.

    A time stamp (1.7e9) is rounded by up to a minute: what lies below a threshold is what is rounded to a number below it, and
    that ends halfway between two numbers of float32. Halfway itself goes to the even one, so it is put a little aside.
    """
    if not isinstance(body, Forest):
        return body
    below = body.threshold.astype(np.float32)
    below = np.where(below > body.threshold, np.nextafter(below, np.float32(-np.inf)), below)
    above = np.nextafter(below, np.float32(np.inf))
    even = below.view(np.int32) % 2 == 0
    gap = above.astype(np.float64) - below
    threshold = below + gap * np.where(even, 0.5 + _ASIDE, 0.5 - _ASIDE)
    return replace(body, threshold=np.where(body.feature >= 0, threshold, 0.0))


_ASIDE = 2**-8  # of the gap: half a second of a time stamp


def outward(inner: Fitted, x: np.ndarray, standard: Standard | None, names: Any, bag: str | None) -> Fitted:
    """A model in memory for the world outside, which brings plain numbers: a table with these columns where they have
    ``names``, else features. ``standard``: how its instances (x as given) are prepared for it in memory, if they are."""
    body = inner.body
    if isinstance(body, Held):  # what scikit-learn keeps to itself cannot leave the process
        return inner
    if names is None or len(set(names)) < len(names):
        return inner if standard is None else inner.but(body=rebased(body, standard.centre, standard.scale))
    if standard is None:
        standard = Standard.of(x)
        body = rebased(unrounded(body), -standard.centre / standard.scale, 1 / standard.scale)
    return inner.but(learned=standard.named(names, bag), body=body)
