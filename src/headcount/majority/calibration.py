"""Temperatures, fitted on held-out labels (Guo et al., On calibration of modern neural networks, ICML 2017).

Letters: N instances, B bags, C classes; b the bags that have a label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from headcount.bags.segments import Segments

Losses = TypeVar("Losses", Tensor, np.ndarray)

BAG_TEMPERATURES = tuple(np.exp(np.linspace(math.log(0.02), math.log(50), 81)).tolist())


def apply_temperature(p: Tensor, temperature: float) -> Tensor:
    """(N, C) the same probabilities, sharper below a temperature of one and flatter above."""
    return p if temperature == 1 else (p.clamp_min(1e-30).log() / temperature).softmax(1)


def fit_temperature(
    losses: Callable[[float], Losses],
    candidates: Sequence[float] | None = None,
    *,
    tolerance: Callable[[Losses], float] | None = None,
) -> float:
    """The temperature with the least mean loss.

    Parameters
    ----------
    losses
        The losses (n,) of held-out bags or instances under a temperature.
    candidates
        The temperatures to try, of which the first of the best is taken; by default a continuous search from exp(-4) to
        exp(2).
    tolerance
        How large a mean excess over the least loss still counts as equally good, computed from the excess losses (n,). Of
        equally good candidates the one nearest to 1 is taken.

    Examples
    --------
    >>> fit_temperature(lambda t: torch.tensor([(t - 1.9) ** 2]), (0.5, 1.0, 2.0))
    2.0
    >>> fit_temperature(lambda t: torch.tensor([(t - 1.9) ** 2]), (0.5, 1.0, 2.0), tolerance=lambda excess: 1.0)
    1.0
    """
    if candidates is None:
        found = minimize_scalar(
            lambda log_t: float(losses(float(np.exp(log_t))).mean()), bounds=(-4, 2), method="bounded"
        )
        return float(np.exp(found.x))
    tried = {t: losses(t) for t in candidates}
    best = min(tried, key=lambda t: float(tried[t].mean()))
    if tolerance is None:
        return best
    excess = {t: cast(Losses, loss - tried[best]) for t, loss in tried.items()}
    return min((t for t in tried if float(excess[t].mean()) <= tolerance(excess[t])), key=lambda t: abs(math.log(t)))


def fit_bag_temperature(log_p: Tensor, target: Tensor) -> float:
    """The temperature of bag log-probabilities (B, C) under which the labels ``target`` (B, C) are likeliest."""
    return fit_temperature(lambda t: bag_losses((log_p.double() / t).log_softmax(1), target), BAG_TEMPERATURES)


def bag_losses(log_p: Tensor, target: Tensor) -> Tensor:
    """(b,) -log P(label) of the labelled bags; no label counts as impossible."""
    log_p = log_p.double().clamp_min(math.log(1e-12))
    return -(target.double() * log_p).sum(1)[target.sum(1) > 0]


def log_mean_shares(p: Tensor, segments: Segments, counted: Tensor | None = None) -> Tensor:
    """(B, C) log of each bag's mean probabilities among the counted classes: the share, taken as the chance to win."""
    shares = segments.mean(p).clamp_min(1e-30).log()
    return (shares if counted is None else shares.masked_fill(~counted, -torch.inf)).log_softmax(1)


def standard_error(x: np.ndarray | Tensor) -> float:
    """The standard error of the mean; infinite for a single value."""
    deviation = x.std() if isinstance(x, Tensor) else x.std(ddof=1)
    return float(deviation / math.sqrt(len(x))) if len(x) > 1 else math.inf
