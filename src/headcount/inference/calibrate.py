"""Intervals of a fitted model's shares that hold for bags like some whose shares are known: counted votes, or every instance's class."""

import numpy as np
import torch

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.inference.evaluate import has_votes
from headcount.inference.predict import predict_dataset
from headcount.majority.proportions import Proportions
from headcount.majority.share_intervals import calibrate_shares
from headcount.models.fitted import FittedModel
from headcount.readers.dataset import BagDataset

LEVEL = 0.9


def known_shares(bags: Bags) -> np.ndarray:
    """(B, C) the shares of bags by their votes, or else by the truth where it is known of every instance; NaN where unknown."""
    if has_votes(bags):
        return np.where(bags.labelled.numpy()[:, None], bags.target.numpy(), np.nan)
    if bags.truth is None:
        raise HeadcountError("no bag's shares are known; give --votes with counts, or --truth with the class of every instance")
    segments, classes = bags.segments(), len(bags.classes)
    complete = segments.mean((bags.truth >= 0).double())[:, None] > 1 - 1e-9
    shares = segments.mean(torch.nn.functional.one_hot(bags.truth.clamp_min(0), classes).double())
    return torch.where(complete, shares, torch.nan).numpy()


def calibrate_model(model: FittedModel, dataset: BagDataset) -> FittedModel:
    """The model with shares corrected and intervals scaled by the bags of known shares in ``dataset``, which must be a random
    sample of the bags that are to be predicted (majority/share_intervals.py)."""
    known, model = known_shares(dataset.bags), model.replace(share_calibration=None)
    used = np.isfinite(known[:, 0])
    predictions = predict_dataset(model, dataset)
    estimate = (torch.from_numpy(a[used]) for a in (predictions.shares, predictions.shares_low, predictions.shares_high))
    groups = None if dataset.bags.group is None else np.array(dataset.bags.group)[used]
    calibration = calibrate_shares(Proportions(*estimate), torch.from_numpy(known[used]).float(), groups)
    factor, unit = calibration.factor(LEVEL), "bags" if groups is None else "groups of bags"
    if factor == np.inf:
        needed = int(np.ceil(1 / (1 - LEVEL) - 1 - 1e-9))
        problem = (
            f"the shares of {len(calibration.scores)} {unit} are known, and a {LEVEL:.0%} interval needs at least {needed}"
        )
        raise HeadcountError(f"{problem}; label the instances of more bags, drawn at random")
    facts = {"bags": int(used.sum()), "trained_on": int(predictions.seen_in_training[used].sum())}
    return model.replace(share_calibration=calibration, metadata={**model.metadata, "share_calibration": facts})


def describe_calibration(model: FittedModel) -> str:
    """What the intervals of shares of a model that was just calibrated rest on."""
    calibration, facts = model.share_calibration, model.metadata["share_calibration"]
    assert calibration is not None
    trained = f" The model was trained on {facts['trained_on']} of them: other bags may differ." if facts["trained_on"] else ""
    return (
        f"In expectation {LEVEL:.0%} of true shares are in their {LEVEL:.0%} intervals, for bags drawn at random like the {facts['bags']} "
        f"whose shares are known. The errors of {len(calibration.scores)} bags, or groups of bags, set the width: "
        f"{calibration.factor(LEVEL):.2f} times that of an uncalibrated model.{trained}"
    )
