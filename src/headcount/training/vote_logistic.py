"""Logistic regression by the likelihood of the vote: for few bags with many features, such as embeddings of texts.

    maximise  Σ_bags log P(the label wins the vote | softmax(x W + b))  -  λ |W|² / 2

The columns of x are standardised, and λ is their number: W then has the prior under which the logits of an instance vary by 1.
A network has more freedom than a few hundred labels can guide; the prior leaves to each direction as much as the labels support.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags
from headcount.majority.calibration import bag_losses
from headcount.majority.ragged_votes import election_log_probs
from headcount.models.trees import LinearModel
from headcount.readers.transforms import StandardScaler
from headcount.training.em import features

MAX_STEPS = 40


class VoteLogistic:
    """The model, deterministic and without parameters of its own."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {}

    def fit_bags(self, bags: Bags) -> LinearModel:
        """Fit to the labelled bags and the known instance classes of blind bags."""
        bags, n_classes = bags.blind(), len(bags.classes)
        raw, segments, target = features(bags), bags.segments(), bags.target.double()
        scaler = StandardScaler.fit(raw, min_deviation=1e-9)
        x = torch.from_numpy(scaler.transform(raw, np.float64))
        known = torch.full((len(x),), -1) if bags.known is None else bags.known
        parameters = torch.zeros(x.shape[1] + 1, n_classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([parameters], max_iter=MAX_STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-5)

        def negative_log_posterior() -> Tensor:
            optimizer.zero_grad()
            weight, bias = parameters[:-1], parameters[-1]
            log_p = (x @ weight + bias).log_softmax(1)
            won = election_log_probs(log_p, segments, "auto", bags.counted)
            won = won if bags.counted is None else won.masked_fill(~bags.counted, -torch.inf)
            loss = bag_losses(won.log_softmax(1), target, bags.label_noise, bags.counted).sum()
            loss = loss - log_p[known >= 0].gather(1, known[known >= 0, None]).sum() + x.shape[1] / 2 * weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(negative_log_posterior)
        fitted = parameters.detach().numpy()
        return LinearModel(np.ascontiguousarray(fitted[:-1].T), fitted[-1].copy()).fold_in_scaler(scaler.mean_, scaler.scale_)
