"""Calibration on held-out bags and their labels, without any instance's true class; and the criterion that compares methods.

Temperatures (Guo et al., On calibration of modern neural networks, ICML 2017) scale the logits so that they explain the bags'
labels. The rest of a bag is used as context only if the halves of bags inform each other significantly, and labels are explained
no worse with it: errors that the instances of a bag share look like shares of classes. The criterion is the log-likelihood of the
labels of held-out bags (docs/how-to/fit.md). N instances, B bags, C classes; b the bags that have a label.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.bags.seeds import make_generator
from headcount.errors import HeadcountError
from headcount.majority import proportions
from headcount.majority.label_noise import report_log_probs
from headcount.majority.proportions import Proportions
from headcount.majority.ragged_votes import election_log_probs
from headcount.majority.transition import Transition, estimate_transition, instance_label_losses

TEMPERATURES = tuple(2 ** (e / 4) for e in range(-4, 9))  # candidates, 1/2 to 4
MIN_STANDARD_ERRORS = 2.0  # a difference of this many standard errors is significant
INSTANCE_TEMPERATURES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)  # of the criterion
SIGNIFICANCE = 0.977  # one-sided: two standard errors for many bags, more for few
BAG_TEMPERATURES = tuple(np.exp(np.linspace(math.log(0.02), math.log(50), 81)).tolist())


def apply_temperature(p: Tensor, temperature: float) -> Tensor:
    """(N, C) the same probabilities, sharper below a temperature of one and flatter above."""
    return p if temperature == 1 else (p.clamp_min(1e-30).log() / temperature).softmax(1)


def fit_temperature(
    losses: Callable[[float], Tensor], candidates: Sequence[float], *, tolerance: Callable[[Tensor], float] | None = None
) -> float:
    """The temperature with the least mean of its losses (n,): the first of the best candidates. With a ``tolerance``, candidates
    whose mean excess over the least loss is at most that of their excess losses (n,) count as equally good, and the one nearest
    to 1 is taken."""
    tried = {t: losses(t) for t in candidates}
    best = min(tried, key=lambda t: float(tried[t].mean()))
    if tolerance is None:
        return best
    excess = {t: loss - tried[best] for t, loss in tried.items()}
    return min((t for t in tried if float(excess[t].mean()) <= tolerance(excess[t])), key=lambda t: abs(math.log(t)))


def fit_bag_temperature(log_p: Tensor, target: Tensor, noise: float = 0.0, counted: Tensor | None = None) -> float:
    """The temperature of bag log-probabilities (B, C) under which the labels ``target`` (B, C) are likeliest."""
    return fit_temperature(lambda t: bag_losses((log_p.double() / t).log_softmax(1), target, noise, counted), BAG_TEMPERATURES)


def bag_losses(log_p: Tensor, target: Tensor, noise: float = 0.0, counted: Tensor | None = None) -> Tensor:
    """(b,) -log P(label) of the labelled bags, from log P(winner) (B, C); no label counts as impossible. ``noise`` and ``counted``
    as in label_noise.py."""
    log_p = report_log_probs(log_p.double(), noise, counted).clamp_min(math.log(1e-12))
    return -(target.double() * log_p).sum(1)[target.sum(1) > 0]


def log_mean_shares(p: Tensor, segments: Segments, counted: Tensor | None = None) -> Tensor:
    """(B, C) log of each bag's mean probabilities among the counted classes: the share, taken as the chance to win."""
    shares = segments.mean(p).clamp_min(1e-30).log()
    return (shares if counted is None else shares.masked_fill(~counted, -torch.inf)).log_softmax(1)


def standard_error(x: np.ndarray | Tensor) -> float:
    """The standard error of the mean; infinite for a single value."""
    if len(x) < 2:
        return math.inf
    return float((x.std() if isinstance(x, Tensor) else x.std(ddof=1)) / math.sqrt(len(x)))


@dataclass(frozen=True)
class ContextAssessment:
    """What instances tell about the others in their bag."""

    concentration: float  # how similar bags of unknown label are
    gain: float  # nats per bag that the halves of a bag tell about each other
    gain_error: float  # its standard error
    bag_loss: float  # -log P(the label wins), with the votes of instances by themselves
    bag_loss_in_context: float
    bag_loss_error: float  # the standard error of their difference

    @property
    def helps(self) -> bool:
        """Whether to use the context."""
        worse = self.bag_loss_in_context - self.bag_loss > MIN_STANDARD_ERRORS * self.bag_loss_error
        return self.gain > MIN_STANDARD_ERRORS * self.gain_error and not worse


@dataclass(frozen=True)
class ContextModel:
    """What validation bags tell about predicting with context."""

    transition: Transition
    temperature: float
    concentration_labelled: float  # how similar bags of one label are
    assessment: ContextAssessment


def fit_context(logits: Tensor, valid: Bags) -> ContextModel:
    """Fit on a model's logits (N, C) for validation bags, and their labels."""
    n, classes = len(valid.index), len(valid.classes)
    if logits.shape != (n, classes):
        raise HeadcountError(f"{n} instances of {classes} classes need as many logits, got {tuple(logits.shape)}")
    z, device = logits.double(), logits.device
    segments, target = valid.segments().to(device), valid.target.double().to(device)
    counted = None if valid.counted is None else valid.counted.to(device)
    temperature = fit_instance_temperature(z, segments, target, counted=counted, noise=valid.label_noise)
    log_p = (z / temperature).log_softmax(1)
    transition = estimate_transition(log_p.exp(), segments, target, counted=counted, noise=valid.label_noise)
    prior = transition.prior.double()
    labelled, _ = proportions.fit_concentration(log_p, segments, proportions.prior_means(transition, target), prior)
    assessment = assess_context(log_p, segments, target, prior, counted, valid.label_noise)
    return ContextModel(transition, temperature, labelled, assessment)


def assess_context(
    log_p: Tensor, segments: Segments, target: Tensor, prior: Tensor, counted: Tensor | None, noise: float = 0.0
) -> ContextAssessment:
    """Assess from log P(y | x) (N, C) of instances by themselves, in bags that the model was not trained on."""
    concentration, gain = proportions.fit_concentration(log_p, segments, prior.expand(segments.n_bags, -1), prior)
    in_context = proportions.posterior_in_context(log_p, segments, prior, concentration)
    losses = []
    for votes in (log_p, in_context):  # -log P(the label wins) if every instance votes at random by its probabilities
        won = election_log_probs(votes, segments, "auto", counted)
        won = won if counted is None else won.masked_fill(~counted, -torch.inf)
        log_label = report_log_probs(won.log_softmax(1), noise, counted)
        losses.append(-torch.where(target > 0, target * log_label, 0.0).sum(1)[target.sum(1) > 0])
    loss, loss_in_context = losses
    return ContextAssessment(
        concentration=concentration, gain=float(gain.mean()), gain_error=standard_error(gain), bag_loss=float(loss.mean()),
        bag_loss_in_context=float(loss_in_context.mean()), bag_loss_error=standard_error(loss_in_context - loss),
    )  # fmt: skip


def fit_instance_temperature(
    logits: Tensor, segments: Segments, target: Tensor, *, counted: Tensor | None = None, noise: float = 0.0
) -> float:
    """The temperature of logits (N, C) by the forward-corrected loss, the transition re-estimated for each candidate.
    Of those within one standard error (over bags) of the best, the one nearest to 1: where classes hardly overlap, labels tell
    little about it."""

    def losses(temperature: float) -> Tensor:
        log_p = (logits.double() / temperature).log_softmax(1)
        transition = estimate_transition(log_p.exp(), segments, target, counted=counted, noise=noise, max_iterations=50)
        return instance_label_losses(log_p, segments, target, transition, noise, counted)

    return fit_temperature(losses, TEMPERATURES, tolerance=standard_error)


def calibrated_probabilities(model: ContextModel, logits: Tensor, bags: Bags, *, use_context: bool | None = None) -> Tensor:
    """(N, C) calibrated probabilities, without bag labels. ``use_context``: by default what the validation bags decided."""
    log_p = (logits.double() / model.temperature).log_softmax(1)
    if model.assessment.helps if use_context is None else use_context:
        segments, prior = bags.segments().to(logits.device), model.transition.prior.double()
        log_p = proportions.posterior_in_context(log_p, segments, prior, model.assessment.concentration)
    return log_p.exp().float()


def calibrated_proportions(
    model: ContextModel, logits: Tensor, bags: Bags, *, use_labels: bool = True, level: float = 0.9
) -> Proportions:
    """The class shares of each bag with intervals, sampled on the CPU; a bag's label, if used, makes them narrower."""
    bags = bags.to("cpu")
    log_p = (logits.cpu().double() / model.temperature).log_softmax(1)
    target = bags.target if use_labels else torch.zeros_like(bags.target)
    labelled = target.sum(1) > 0
    concentration = torch.where(labelled, model.concentration_labelled, model.assessment.concentration)[:, None]
    fit = (log_p, bags.segments(), target, model.transition, concentration)
    return proportions.estimate_proportions(*fit, make_generator(0, "census"), counted=bags.counted, level=level)


@dataclass(frozen=True)
class CriterionResult:
    """The loss, its parts by bag, and what was fitted."""

    loss: float
    loss_per_bag: np.ndarray = field(repr=False)  # (b,)
    instance_loss_per_bag: np.ndarray = field(repr=False)  # (b,) its first part
    prior_loss_per_bag: np.ndarray = field(repr=False)  # (b,) the loss of predicting the label frequencies
    instance_temperature: float
    transition: Transition  # under that temperature: without one, underconfident predictions make it too steep
    bag_temperature: float


def evaluate_criterion(p: Tensor, bags: Bags, sample: tuple[Tensor, Bags] | None = None) -> CriterionResult:
    """Evaluate instance probabilities ``p`` (N, C) on bags that their method was not trained on. ``sample`` limits the instance
    loss where instances are many: some of the N rows, and the bags of these rows alone (``sample_rows`` and
    ``subsample_instances`` of bags/splits.py). The vote loss always takes whole bags."""
    p = p.double().clamp_min(1e-12)
    rows, sampled_bags = (slice(None), bags) if sample is None else sample
    fits = {t: fit_transition_loss(apply_temperature(p[rows], t), sampled_bags) for t in INSTANCE_TEMPERATURES}
    temperature = fit_temperature(lambda t: fits[t][0], INSTANCE_TEMPERATURES, tolerance=lambda excess: 5e-10)
    instance_loss, transition = fits[temperature]
    vote_loss, bag_temperature = fit_vote_loss(p, bags)
    loss = (instance_loss + vote_loss).numpy()
    return CriterionResult(
        loss=float(loss.mean()), loss_per_bag=loss, instance_loss_per_bag=instance_loss.numpy(),
        prior_loss_per_bag=prior_loss(bags.target).numpy(),
        instance_temperature=temperature, transition=transition, bag_temperature=bag_temperature,
    )  # fmt: skip


def fit_vote_loss(p: Tensor, bags: Bags) -> tuple[Tensor, float]:
    """The vote losses (b,) of ``p`` (N, C) under the temperature that suits them best, and that temperature."""
    log_p = log_mean_shares(p.double().clamp_min(1e-12), bags.segments(), bags.counted)
    labels = bags.target, bags.label_noise, bags.counted
    temperature = fit_bag_temperature(log_p, *labels)
    return bag_losses((log_p / temperature).log_softmax(1), *labels), temperature


def fit_transition_loss(p: Tensor, bags: Bags, form: str = "full") -> tuple[Tensor, Transition]:
    """The instance losses (b,) of ``p`` (N, C) under the transition that suits it best, and that transition."""
    noise = bags.label_noise
    transition = estimate_transition(p, bags.segments(), bags.target, form=form, counted=bags.counted, noise=noise)
    return instance_losses(p, bags, transition), transition


def instance_losses(p: Tensor, bags: Bags, transition: Transition) -> Tensor:
    """(b,) the mean loss of each labelled bag's instances, from P(y | x) (N, C)."""
    log_p = p.double().clamp_min(1e-30).log()
    return instance_label_losses(log_p, bags.segments(), bags.target, transition, bags.label_noise, bags.counted)


def prior_loss(target: Tensor) -> Tensor:
    """(b,) the loss, both parts, of predicting how frequent each label is."""
    labelled = target.double()[target.sum(1) > 0]
    return 2 * bag_losses(labelled.mean(0).clamp_min(1e-12).log().expand_as(labelled), labelled)


def gain_over_prior(result: CriterionResult) -> tuple[float, float]:
    """By how many nats a bag held-out labels are explained better than by their frequencies, and its standard error."""
    gains = result.prior_loss_per_bag - result.loss_per_bag
    return float(gains.mean()), standard_error(gains)


def is_significant(result: CriterionResult) -> bool:
    """Whether held-out labels are explained significantly better than by their frequencies."""
    gain, error = gain_over_prior(result)
    return gain >= float(stats.t.ppf(SIGNIFICANCE, max(1, len(result.loss_per_bag) - 1))) * error
