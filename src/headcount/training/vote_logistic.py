"""Logistic regression by the likelihood of the vote: for few bags with many features, such as embeddings of texts.

    maximise  Σ_bags log P(the label wins the vote | softmax(x W + b))  -  λ |W|² / 2

The columns of x are centred and divided by their deviations, or all by one number, which keeps the order of principal components:
validation bags decide. λ is the number of columns: W then has the prior under which the logits of an instance vary by 1. A network
has more freedom than a few hundred labels can guide; the prior leaves to each direction as much as the labels support.
"""

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
        """Fit to the labels and the known instance classes of blind bags; the model and its validation loss."""
        train, valid, fitted = train.blind(), valid.blind(), list[tuple[float, LinearModel]]()
        raw, valid_x = features(train), features(valid)
        scaler = StandardScaler.fit(raw, min_deviation=1e-9)
        for scale in (scaler.scale_, np.full_like(scaler.scale_, np.sqrt((scaler.scale_**2).mean()))):
            x = StandardScaler(scaler.mean_, scale).transform(raw, np.float64)
            parameters = maximize_posterior(torch.from_numpy(x), train).numpy()
            model = LinearModel(np.ascontiguousarray(parameters[:-1].T), parameters[-1].copy()).fold_in_scaler(
                scaler.mean_, scale
            )
            p = torch.from_numpy(model.predict_proba(valid_x))
            loss = float((fit_transition_loss(p, valid)[0] + fit_vote_loss(p, valid)[0]).mean())
            fitted.append((loss, model))
        loss, model = min(fitted, key=lambda pair: pair[0])
        return model, loss


def maximize_posterior(x: Tensor, bags: Bags) -> Tensor:
    """(D + 1, C) the weights of the columns of x (N, D), and the bias, in float64."""
    segments, target, known = bags.segments(), bags.target.double(), bags.known
    known = torch.full((len(x),), -1) if known is None else known
    parameters = torch.zeros(x.shape[1] + 1, len(bags.classes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=MAX_STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-5)

    def negative_log_posterior() -> Tensor:
        optimizer.zero_grad()
        log_p = (x @ parameters[:-1] + parameters[-1]).log_softmax(1)
        won = election_log_probs(log_p, segments, "auto", bags.counted)
        won = won if bags.counted is None else won.masked_fill(~bags.counted, -torch.inf)
        loss = bag_losses(won.log_softmax(1), target, bags.label_noise, bags.counted).sum()
        loss = (
            loss - log_p[known >= 0].gather(1, known[known >= 0, None]).sum() + x.shape[1] / 2 * parameters[:-1].square().sum()
        )
        loss.backward()
        return loss

    optimizer.step(negative_log_posterior)
    return parameters.detach()
