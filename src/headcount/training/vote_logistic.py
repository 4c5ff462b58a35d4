"""Logistic regression by the likelihood of the vote: for few bags with many features, such as embeddings of texts.

    maximise  Σ_bags log P(the label wins the vote | softmax(x W + b))  -  λ |W|² / 2

The columns of x are centred and divided by their deviations, or all by one number, which keeps the order of principal components:
validation bags decide. λ is the number of columns: W then has the prior under which the logits of an instance vary by 1. A network
has more freedom than a few hundred labels can guide; the prior leaves to each direction as much as the labels support.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags
from headcount.majority.calibration import bag_losses, fit_transition_loss, fit_vote_loss
from headcount.majority.ragged_votes import election_log_probs
from headcount.models.trees import LinearModel
from headcount.readers.transforms import StandardScaler
from headcount.training.em import features

MAX_STEPS = 40


class VoteLogistic:
    """The model, deterministic and without parameters of its own."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {}

    def fit_bags(self, train: Bags, valid: Bags) -> tuple[LinearModel, float]:
        """Fit to the labels and the known instance classes of blind bags. Validation bags choose the scale of the columns, and are
        then training bags too. Returns the model and the validation loss before that."""
        train, valid, losses = train.blind(), valid.blind(), list[float]()
        raw, valid_raw = features(train), features(valid)
        scaler = StandardScaler.fit(raw, min_deviation=1e-9)
        scales = (scaler.scale_, np.full_like(scaler.scale_, np.sqrt((scaler.scale_**2).mean())))
        for scale in scales:
            p = torch.from_numpy(_fit([(raw, train)], scaler.mean_, scale).predict_proba(valid_raw))
            losses.append(float((fit_transition_loss(p, valid)[0] + fit_vote_loss(p, valid)[0]).mean()))
        is_same = torch.equal(train.index, valid.index)  # few bags: there is no validation part
        parts = [(raw, train), *([] if is_same else [(valid_raw, valid)])]
        return _fit(parts, scaler.mean_, scales[int(np.argmin(losses))]), min(losses)


def _fit(parts: Sequence[tuple[np.ndarray, Bags]], mean: np.ndarray, scale: np.ndarray) -> LinearModel:
    scaler = StandardScaler(mean, scale)
    scaled = [(torch.from_numpy(scaler.transform(raw, np.float64)), bags) for raw, bags in parts]
    parameters = maximize_posterior(scaled).numpy()
    return LinearModel(np.ascontiguousarray(parameters[:-1].T), parameters[-1].copy()).fold_in_scaler(mean, scale)


def maximize_posterior(parts: Sequence[tuple[Tensor, Bags]]) -> Tensor:
    """(D + 1, C) the weights of the columns, and the bias, in float64. Each part: the numbers x (N, D) of the instances of bags."""
    width = parts[0][0].shape[1]
    parameters = torch.zeros(width + 1, len(parts[0][1].classes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=MAX_STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-5)

    def negative_log_posterior() -> Tensor:
        optimizer.zero_grad()
        loss = width / 2 * parameters[:-1].square().sum()
        for x, bags in parts:
            log_p = (x @ parameters[:-1] + parameters[-1]).log_softmax(1)
            won = election_log_probs(log_p, bags.segments(), "auto", bags.counted)
            won = won if bags.counted is None else won.masked_fill(~bags.counted, -torch.inf)
            loss = loss + bag_losses(won.log_softmax(1), bags.target, bags.label_noise, bags.counted).sum()
            if bags.known is not None and bool((rows := bags.known >= 0).any()):
                loss = loss - log_p[rows].gather(1, bags.known[rows, None]).sum()
        loss.backward()
        return loss

    optimizer.step(negative_log_posterior)
    return parameters.detach()
