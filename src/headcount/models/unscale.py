"""The same body for other units: asked about x, it answers what it answered about (x - centre) / scale.

So a model that learned from standardised columns can be asked about plain ones, and the other way round.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headcount.models.fitted import FittedModel
from headcount.models.network import Model
from headcount.models.trees import LinearModel, SklearnModel, Trees
from headcount.readers.columns import ColumnRoles
from headcount.readers.preprocessing import Preprocessor, number_fields
from headcount.readers.standard_scaler import StandardScaler

ScalableEstimator = Model | Trees | LinearModel


def fold_in_scaler(body: ScalableEstimator, centre: np.ndarray, scale: np.ndarray) -> ScalableEstimator:
    """``centre`` and ``scale`` are (D,) float64."""
    if isinstance(body, LinearModel):
        return LinearModel(body.weight / scale, body.bias - body.weight @ (centre / scale))
    if isinstance(body, Trees):
        asks = np.maximum(body.feature, 0)  # leaves ask nothing
        threshold = np.where(body.feature >= 0, body.threshold * scale[asks] + centre[asks], 0.0)
        return Trees(body.roots, body.feature, threshold, body.left, body.right, body.value)
    made = copy.deepcopy(body)
    mean, std = made.normalize.mean.double().numpy(), made.normalize.std.double().numpy()
    made.normalize.mean.copy_(torch.from_numpy(mean * scale + centre))
    made.normalize.std.copy_(torch.from_numpy(std * scale))
    return made


def without_float32_rounding(body: ScalableEstimator) -> ScalableEstimator:
    """The same trees for numbers that are not rounded to float32 before they are compared, as scikit-learn rounds them.

    A time stamp (1.7e9) is rounded by up to a minute: what lies below a threshold is what is rounded to a number below it, and
    that ends halfway between two numbers of float32. Halfway itself goes to the even one, so it is put a little aside.
    """
    if not isinstance(body, Trees):
        return body
    below = body.threshold.astype(np.float32)
    below = np.where(below > body.threshold, np.nextafter(below, np.float32(-np.inf)), below)
    above = np.nextafter(below, np.float32(np.inf))
    even = below.view(np.int32) % 2 == 0
    gap = above.astype(np.float64) - below
    threshold = below + gap * np.where(even, 0.5 + _ASIDE, 0.5 - _ASIDE)
    return replace(body, threshold=np.where(body.feature >= 0, threshold, 0.0))


_ASIDE = 2**-8  # of the gap: half a second of a time stamp


def export_unscaled(
    model: FittedModel, x: np.ndarray, scaler: StandardScaler | None, names: Any, bag: str | None
) -> FittedModel:
    """A model in memory for the world outside, which brings plain numbers: a table with these columns where they have
    ``names``, else features. ``standard``: how its instances (x as given) are prepared for it in memory, if they are."""
    body = model.estimator
    if isinstance(body, SklearnModel):  # what scikit-learn keeps to itself cannot leave the process
        return model
    if names is None or len(set(names)) < len(names):
        return model if scaler is None else model.replace(estimator=fold_in_scaler(body, scaler.mean_, scaler.scale_))
    if scaler is None:
        scaler = StandardScaler.fit(x)
        body = fold_in_scaler(without_float32_rounding(body), -scaler.mean_ / scaler.scale_, 1 / scaler.scale_)
    preprocessor = Preprocessor(
        "table", number_fields(x, [str(n) for n in names]), (x.shape[1],), roles=ColumnRoles(bag=bag).to_json()
    )
    return model.replace(preprocessor=preprocessor, estimator=body)
