"""The transition from classes to majority labels: what the label of a bag says about a single instance drawn from it.

Class c is the largest in every bag labelled c, so the class shares of these bags lean towards c ("tilt"), and the label is a noisy
label of every instance (forward correction: Patrini et al., Making deep neural networks robust to label noise, CVPR 2017):

    P(label = c | x)  =  sum_k  T[k, c] P(y = k | x),      T[k, c] = P(label = c | y = k)

    mix          (C, C)  mix[c, k] = P(y = k | label = c): a row per label; the diagonal is the expected majority share
    label_prior  (C,)    P(label = c) of an instance drawn at random
    prior        (C,)    P(y = k) = label_prior @ mix
    p            (N, C)  P(y = k | x), predicted, for N instances and C classes

T follows from the mix and the label prior. The mix is estimated by EM from predictions and bag labels, without any instance's true
class: ``expected_counts`` (C, C) has in row c the expected number of instances of each class in bags labelled c. Training sums
them batch by batch and takes one M step when all bags have been seen. Neither these steps nor the forward correction need the value
of a tensor on the host, so all can be part of a CUDA graph. What is identifiable: docs/explanation/theory.md; why the estimate
starts low: docs/explanation/tilt.md.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.majority.label_noise import report, winner_counts, winner_prior

UNSEEN_SHARE = 1e-3  # the share of all labels that never occurred, together
TRANSITION_FORMS = ("one", "class", "full")
SHRINKAGE_BAGS = 10.0  # as many bags of a label weigh as much as the simpler form
MIN_PROBABILITY = 1e-3  # the smallest share of a class in a mix


def mix_from_shares(share: Tensor | float, classes: int, rest: Tensor | None = None) -> Tensor:
    """(C, C) the mix with these majority shares, one for all labels or one for each; the other classes share the remainder
    evenly, or in proportion to ``rest`` (C,)."""
    share = torch.as_tensor(share)
    others = torch.ones(classes, classes, dtype=share.dtype, device=share.device).fill_diagonal_(0)
    others = others if rest is None else others * rest
    others = others / others.sum(1, keepdim=True)
    return torch.diag(share.expand(classes)) + (1 - share.expand(classes))[:, None] * others


@dataclass(frozen=True)
class Transition:
    """A transition."""

    mix: Tensor  # (C, C)
    label_prior: Tensor  # (C,)

    @property
    def share(self) -> Tensor:
        """(C,) the expected share of class c in a bag labelled c."""
        return self.mix.diagonal()

    @property
    def prior(self) -> Tensor:
        """(C,) P(y = k)."""
        return (self.label_prior[:, None] * self.mix).sum(0)

    @property
    def matrix(self) -> Tensor:
        """(C, C) T[k, c] = P(label = c | y = k). The rows add up to one."""
        return (self.label_prior[:, None] * self.mix / self.prior.clamp_min(1e-30)).T

    @property
    def condition_number(self) -> float:
        """The condition number of T, by which errors may grow from label to class probabilities; infinite if a label never occurs."""
        occurring = self.matrix[:, self.label_prior > UNSEEN_SHARE / len(self.label_prior)].double()
        values = torch.linalg.svdvals(occurring)
        return math.inf if occurring.shape[1] < len(self.mix) or values[-1] <= 0 else float(values[0] / values[-1])


def signal_strength(mix: Tensor) -> Tensor:
    """() from 0 (a label says nothing about an instance) to 1 (it is its class): the mean of (share - 1/C) / (1 - 1/C)."""
    at_random = 1 / len(mix)
    return ((mix.diagonal().mean() - at_random) / (1 - at_random)).clamp(0, 1)


def forward_correct(log_p: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(N, C) log P(label = c | x) from log P(y | x): the forward correction."""
    return matmul_full_precision(log_p.exp(), Transition(mix, label_prior).matrix).clamp_min(1e-30).log()


def forward_loss(
    log_p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor, weight: Tensor | None = None,
    *, vote_ratio: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """() the forward-corrected loss: -log P(label | x), averaged over the instances whose bag has a label. ``target`` (N, C) is
    the row of each instance's bag: one-hot, soft, or zeros; ``weight`` (N,) is a multiplicity. Where the votes of the bag are
    known, it is its own label: -log sum_k p_k r_k, with its row r of ``vote_ratio`` (N, C) (majority/vote_counts.py)."""
    losses = -(target * forward_correct(log_p, mix, label_prior)).sum(1)
    if vote_ratio is not None:
        by_votes = -(log_p.exp() * vote_ratio).sum(1).clamp_min(1e-30).log()
        losses = torch.where(vote_ratio.sum(1) > 0, by_votes, losses)
    labelled = (target.sum(1) > 0).to(losses.dtype)
    labelled = labelled if weight is None else labelled * weight
    return (labelled * losses).sum() / labelled.sum().clamp_min(1e-12)


def instance_label_losses(
    log_p: Tensor, segments: Segments, target: Tensor, transition: Transition, noise: float = 0.0, counted: Tensor | None = None
) -> Tensor:
    """(b,) -log P(label | x) from log P(y | x) (N, C), averaged over the instances of each of the b labelled bags; ``noise`` and
    ``counted`` as in label_noise.py."""
    log_p_label = forward_correct(log_p, *report(transition.mix.double(), transition.label_prior.double(), noise, counted))
    losses = -(segments.broadcast(target.double()) * log_p_label).sum(1)
    return segments.mean(losses)[target.sum(1) > 0]


def label_likelihood_ratio(target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(..., C) P(y = k | label) / P(y = k) for bags with these target rows; one for a bag without a label."""
    ratio = matmul_full_precision(target, mix / Transition(mix, label_prior).prior.clamp_min(1e-30))
    return torch.where(target.sum(-1, keepdim=True) > 0, ratio, 1.0)


def posterior(log_p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(N, C) P(y = k | x, label): the class probabilities of an instance given the label of its bag."""
    return (log_p + label_likelihood_ratio(target, mix, label_prior).clamp_min(1e-30).log()).softmax(1)


def matmul_full_precision(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product without autocast, which would round every probability to three digits."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.to(a.dtype)


@lru_cache(maxsize=64)
def random_majority_share(size: int, classes: int) -> float:
    """The expected majority share of bags filled at random from equally frequent classes: the lowest to expect."""
    if size > 128:  # the excess over 1/C falls as the root of the size; at first a little faster
        return 1 / classes + (random_majority_share(128, classes) - 1 / classes) * math.sqrt(128 / size)
    mean = size / classes  # a random bag: independent Poisson counts that add up to the size
    pmf = np.array([math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(size + 1)])
    p_size = math.exp(size * math.log(size) - size - math.lgamma(size + 1))
    expected = 0.0
    for most in range(size):
        sums = np.ones(1)
        for _ in range(classes):
            sums = np.convolve(sums, pmf[: most + 1])[: size + 1]
        expected += 1 - (sums[size] / p_size if len(sums) > size else 0.0)  # P(a count exceeds it)
    return float(expected / size)


def effective_bag_size(segments: Segments, target: Tensor) -> float:
    """The common size of random bags with the majority share that random bags of the labelled bags' sizes have: a winner's excess
    over 1/C falls as the root of the size. The mean size would make a few large bags among many small ones look further from
    random than they are. An instance of weight two is two; weights below one, such as shares of a bag, do not make it smaller."""
    size, labelled = torch.maximum(segments.total_weight(), segments.n_instances()).double(), target.sum(1) > 0
    size = size[labelled] if bool(labelled.any()) else size
    return float((size.sum() / size.sqrt().sum().clamp_min(1e-12)) ** 2)


def min_majority_share(size: float, classes: int, counted: Tensor | None = None) -> float:
    """The lower bound of estimates: the share in bags filled at random. Bags may be more even by design, but so look, more often, the
    predictions of a weak classifier. Where some class cannot win there is no bound."""
    return 0.0 if counted is not None else random_majority_share(max(1, round(size)), classes)


def initial_share(size: float, classes: int) -> float:
    """The majority share at which EM starts: a tenth of the way from that of random bags to one. From below, the estimate climbs as
    far as the classifier's confidence supports; from above it would stay wherever its doubt explains it."""
    lowest = min_majority_share(size, classes)
    return min(lowest + 0.1 * (1 - lowest), 1 - MIN_PROBABILITY)


def label_prior_from_counts(counts: Tensor, counted: Tensor | None = None) -> Tensor:
    """(C,) label frequencies from counts; a label that never occurred gets a small probability, unless it cannot win."""
    total = counts.sum()  # the counts may be tiny weights; 1 only replaces zero
    counts = counts + UNSEEN_SHARE * torch.where(total > 0, total, 1.0) / len(counts)
    counts = counts if counted is None else counts * counted
    return counts / counts.sum()


def e_step(
    p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor, noise: float = 0.0, counted: Tensor | None = None
) -> Tensor:
    """(C, C) the expected counts of these instances: row c, the number of each class in bags that c won, by posterior. ``target``
    (N, C) may be scaled by an instance's weight; a row of zeros adds nothing. ``noise`` and ``counted`` as in label_noise.py."""
    label_mix, _ = report(mix, label_prior, noise, counted)
    ratio = (label_mix / Transition(mix, label_prior).prior.clamp_min(1e-30)).to(p.dtype)  # (c, k)
    label_ratio = matmul_full_precision(p, ratio.T).clamp_min(1e-30)  # (N, c), P(label = c | x) / P(label = c)
    counts = ratio * matmul_full_precision((target / label_ratio).T, p)
    return winner_counts(counts, mix, label_prior, noise, counted)


def m_step(
    expected_counts: Tensor, n_bags: Tensor, form: str = "full", min_share: float | Tensor = 0.0, counted: Tensor | None = None
) -> Tensor:
    """(C, C) the mix that follows from expected counts. ``n_bags`` (C,): how many bags had each label.

        one    one majority share for all labels; the remainder evenly
        class  a share for each label; the remainder by one profile over the classes
        full   every row separately

    Bags, not instances, were drawn independently, so each form is shrunk to the simpler one by their number n:
    estimate x n / (n + 10) + simpler x 10 / (n + 10). With few bags the result is the simple form, with many the full one.
    By definition the label's class is the largest: no other counted class may exceed it in its row, nor may its share fall
    below ``min_share``. No entry is zero.
    """
    check_choice("form of the transition", form, TRANSITION_FORMS)
    classes = len(expected_counts)
    total = expected_counts.sum(1)
    rows = expected_counts / total.clamp_min(1e-12)[:, None]
    share = _clamp_share(expected_counts.diagonal().sum() / total.sum().clamp_min(1e-12), min_share)
    share = share.clamp_min(1 / classes + MIN_PROBABILITY)
    mix = mix_from_shares(share, classes)
    if form == "one":
        return mix
    trust = (n_bags / (n_bags + SHRINKAGE_BAGS)).to(expected_counts.dtype)
    total_bags = n_bags.sum()
    off_diagonal = expected_counts * torch.ones_like(expected_counts).fill_diagonal_(0)
    minority = total - expected_counts.diagonal()
    opportunities = minority.sum() - minority  # of class k to be in the minority of another label
    rest = off_diagonal.sum(0) / opportunities.clamp_min(1e-12)
    rest = rest / rest.sum().clamp_min(1e-12)
    rest = (total_bags * rest + SHRINKAGE_BAGS / classes) / (total_bags + SHRINKAGE_BAGS)
    diagonal = trust * rows.diagonal() + (1 - trust) * share
    mix = mix_from_shares(diagonal, classes, rest)
    if form == "full":
        mix = trust[:, None] * rows + (1 - trust)[:, None] * mix
    return _make_valid(mix, min_share, counted)


def _clamp_share(share: Tensor, min_share: float | Tensor) -> Tensor:
    return share.clamp(min=min_share).clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def _make_valid(mix: Tensor, min_share: float | Tensor, counted: Tensor | None) -> Tensor:
    """No entry zero, and the label's class the largest of its row and at least ``min_share``."""
    mix = mix.clamp_min(MIN_PROBABILITY / len(mix))
    mix = mix / mix.sum(1, keepdim=True)
    diagonal = _clamp_share(mix.diagonal(), min_share)
    others = mix * torch.ones_like(mix).fill_diagonal_(0)
    others = others * ((1 - diagonal) / others.sum(1).clamp_min(1e-12))[:, None]
    capped = torch.minimum(others, 0.98 * diagonal[:, None])  # 0.98: without any lead T could not be inverted
    others = capped if counted is None else torch.where(counted, capped, others)
    mix = others + torch.diag(diagonal)
    return mix / mix.sum(1, keepdim=True)


def instance_targets(segments: Segments, target: Tensor) -> Tensor:
    """(N, C) float64: the target of each instance's bag times its weight; zeros where there is none, or it was removed."""
    return segments.broadcast(target.double()) * segments.instance_weights().double()[:, None]


def estimate_transition(
    p: Tensor,
    segments: Segments,
    target: Tensor,
    *,
    form: str = "full",
    counted: Tensor | None = None,
    noise: float = 0.0,
    max_iterations: int = 200,
) -> Transition:
    """Estimate the transition by EM from probabilities ``p`` (N, C) and the labels ``target`` (B, C) of the bags. ``p`` should
    be for instances that the classifier was not trained on (validation bags, or out-of-fold): a classifier remembers the labels
    of its training bags, and the transition becomes too steep. Rows of zeros in ``target`` are ignored.
    ``noise``: of the labels; the transition is that of the winners (label_noise.py)."""
    if p.ndim != 2 or p.shape[1] != target.shape[1] or len(p) != len(segments.index) or len(target) != segments.n_bags:
        shapes = f"shapes {tuple(p.shape)} and {tuple(target.shape)} for {segments!r}"
        raise HeadcountError(f"a transition takes probabilities (instances, classes) and targets (bags, classes), got {shapes}")
    classes = p.shape[1]
    n_bags = target.double().sum(0)
    if not float(n_bags.sum()) > 0:
        raise HeadcountError("no bag has a label, so no transition can be estimated; give at least one labelled bag")
    rows = instance_targets(segments, target)
    size = effective_bag_size(segments, target)
    min_share = min_majority_share(size, classes, counted)
    label_prior = winner_prior(label_prior_from_counts(rows.sum(0), counted), noise, counted)
    mix = mix_from_shares(torch.tensor(initial_share(size, classes), dtype=torch.float64), classes)
    p = p.double().masked_fill(segments.removed[:, None], 1 / classes)
    for _ in range(max_iterations):
        counts = e_step(p, rows, mix, label_prior, noise, counted)
        previous, mix = mix, m_step(counts, n_bags, form, min_share, counted)
        if float((mix - previous).abs().max()) < 1e-7:
            break
    return Transition(mix.float(), label_prior.float())
