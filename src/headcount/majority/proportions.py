"""The class shares of single bags with intervals, and instances in the context of their bag, from instance probabilities.

An instance in a bag full of cats is more likely a cat than the same image by itself, and the predictions for the other instances
tell how much more. Each bag has shares theta around those that its label suggests:

    theta ~ Dirichlet(concentration * prior_mean),   y | theta ~ theta,   P(y = k | x, theta) ~ p_k theta_k / prior_k

    p              (N, C)  P(y | x) of an instance by itself, under the overall class frequencies ``prior`` (C,)
    prior_mean     (B, C)  the row of the mix for a bag's label, the prior for an unlabelled bag (transition.py)
    concentration          how similar bags are: if it is large, all have the shares of their prior mean

If a bag is labelled c, c is its largest class; shares that contradict this are rejected.
"""

from functools import partial
from typing import NamedTuple

import torch
from scipy.special import betaincinv
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError
from headcount.majority.transition import Transition

CONCENTRATIONS = tuple(2.0**e for e in range(11))  # candidates
DRAWS, DISCARDED_DRAWS = 300, 50
MAX_PRODUCTS = 1 << 21  # numbers held in memory at once for the curvature


class Proportions(NamedTuple):
    """The class shares of bags, with the ends of their intervals."""

    share: Tensor  # (B, C)
    low: Tensor  # (B, C)
    high: Tensor  # (B, C)


def prior_means(transition: Transition, target: Tensor) -> Tensor:
    """(B, C) the mean shares of bags with these target rows."""
    labelled = target.sum(1, keepdim=True) > 0
    return torch.where(labelled, target @ transition.mix.to(target.dtype), transition.prior.to(target.dtype))


def log_posterior_given_share(log_p: Tensor, segments: Segments, share: Tensor, prior: Tensor) -> Tensor:
    """(N, C) log P(y | x, theta): instances given the shares (B, C) of their bags."""
    log_ratio = segments.broadcast((share / prior).clamp_min(1e-30).log())  # zero for removed instances
    return (log_p + log_ratio).log_softmax(1)


def fit_shares(log_p: Tensor, segments: Segments, prior_mean: Tensor, prior: Tensor, concentration: float) -> Tensor:
    """(B, C) the shares of each bag by EM; the prior mean counts as ``concentration`` further instances."""
    share, size = prior_mean, segments.total_weight()[:, None]
    for _ in range(20):
        expected_counts = segments.sum(log_posterior_given_share(log_p, segments, share, prior).exp())
        share = (expected_counts + concentration * prior_mean) / (size + concentration)
    return share


def posterior_in_context(log_p: Tensor, segments: Segments, prior: Tensor, concentration: float) -> Tensor:
    """(N, C) log P(y | x, the other instances of its bag), for unlabelled bags. Leave-one-out: an instance's own prediction is
    excluded, so the only instance of a bag is predicted as by itself."""
    segments = _normalize_weights(segments)
    share = fit_shares(log_p, segments, prior.expand(segments.n_bags, -1), prior, concentration)
    posterior = log_posterior_given_share(log_p, segments, share, prior).exp()
    weight = 1.0 if segments.weight is None else segments.weight.to(posterior.dtype)[:, None]
    others = segments.broadcast(segments.sum(posterior) + concentration * prior) - weight * posterior
    others_weight = segments.broadcast(segments.total_weight()[:, None].to(posterior.dtype) + concentration) - weight
    log_ratio = (others / (others_weight * prior)).clamp_min(1e-30).log()
    return torch.where(segments.removed[:, None], log_p, (log_p + log_ratio).log_softmax(1))


def project_to_majority(share: Tensor, target: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) the nearest shares in which the label's class is the largest: larger classes and it become equal. A class that is
    not ``counted`` (C,) may stay larger. Of a tie, the larger of the winners must be the largest."""
    label = share.masked_fill(target < target.amax(1, keepdim=True), -1.0).argmax(1, keepdim=True)
    label_share = share.gather(1, label)
    rivals = share if counted is None else share.masked_fill(~counted, -1.0)
    ranked = rivals.scatter(1, label, -1.0).sort(1, descending=True).values[:, :-1]  # without the label's
    members = torch.arange(2, share.shape[1] + 1, device=share.device)
    level = torch.maximum(((label_share + ranked.cumsum(1)) / members).amax(1, keepdim=True), label_share)
    projected = torch.minimum(share, level)
    projected = (projected if counted is None else torch.where(counted, projected, share)).scatter(1, label, level)
    return torch.where(target.sum(1, keepdim=True) > 0, projected, share)


def split_half_gain(log_p: Tensor, segments: Segments, prior_mean: Tensor, prior: Tensor, concentration: float) -> Tensor:
    """(B,) how much one half of a bag tells about the other: the gain in log P(x) of each bag's instances if its shares are
    estimated from the other half, compared with the prior mean. Needs no labels."""
    segments, position = _normalize_weights(segments), torch.zeros_like(segments.index)
    order = segments.index.argsort(stable=True)
    position[order] = torch.arange(len(order), device=order.device)
    odd = (position % 2).bool()
    gain = torch.zeros(segments.n_bags, dtype=log_p.dtype, device=log_p.device)
    for half in (odd, ~odd):
        share = fit_shares(log_p, segments.without(~half), prior_mean, prior, concentration)
        other = segments.without(half)
        fitted, prior_only = (torch.logsumexp(log_p + other.broadcast((s / prior).log()), 1) for s in (share, prior_mean))
        gain = gain + other.sum(fitted - prior_only)
    return gain


def fit_concentration(log_p: Tensor, segments: Segments, prior_mean: Tensor, prior: Tensor) -> tuple[float, Tensor]:
    """The concentration under which the halves of bags tell most about each other, and the gain (B,) of each bag."""
    gains = {c: split_half_gain(log_p, segments, prior_mean, prior, c) for c in CONCENTRATIONS}
    best = max(gains, key=lambda c: float(gains[c].sum()))
    return best, gains[best]


@torch.no_grad()
def estimate_proportions(
    log_p: Tensor,
    segments: Segments,
    target: Tensor,
    transition: Transition,
    concentration: float | Tensor,
    generator: torch.Generator,
    *,
    counted: Tensor | None = None,
    level: float = 0.9,
) -> Proportions:
    """The class shares of each bag's own instances, with intervals, by Gibbs sampling.

    Classes given shares and shares given classes are drawn in turn, 300 times after 50 discarded ones. Draws in
    which the class of a labelled bag is not the largest are rejected; a bag without accepted draws gets their projected mean
    (:func:`project_to_majority`) and the interval of all of them. Classes that are not ``counted`` (C,) may be larger than the
    label's; of a tie, either winner may be the largest. ``concentration`` is one for all bags or (B, 1).
    """
    ends = _interval_ends(level)
    segments = _normalize_weights(segments)
    log_p, prior_mean = log_p.double(), prior_means(transition, target.double())
    prior, size = transition.prior.double(), segments.total_weight().double().clamp_min(1e-12)[:, None]
    share, won = prior_mean, target >= target.amax(1, keepdim=True)  # all classes, without a label
    shares, accepted = [], []
    for step in range(DISCARDED_DRAWS + DRAWS):
        q = log_posterior_given_share(log_p, segments, share, prior)
        uniform = torch.rand(len(q), 1, generator=generator, dtype=torch.float64)
        classes = (q.exp().cumsum(1) <= uniform).sum(1).clamp_max(q.shape[1] - 1)
        votes = segments.sum(torch.nn.functional.one_hot(classes, q.shape[1]).double())
        weight = torch._standard_gamma(votes + concentration * prior_mean + 1e-9, generator=generator).clamp_min(1e-300)
        share = weight / weight.sum(1, keepdim=True)
        if step >= DISCARDED_DRAWS:
            rivals = votes if counted is None else votes.masked_fill(~(counted | won), -1)
            shares.append(votes / size)
            accepted.append(votes.masked_fill(~won, -1).amax(1) >= rivals.amax(1))
    samples, valid = torch.stack(shares), torch.stack(accepted)  # (draws, B, C), (draws, B)
    none_valid = ~valid.any(0)
    samples = samples.masked_fill(~(valid | none_valid)[..., None], torch.nan)
    low, high = (samples.nanquantile(end, 0) for end in ends)
    mean = samples.nanmean(0)
    mean = torch.where(none_valid[:, None], project_to_majority(mean, target.double(), counted), mean)
    return Proportions(mean.float(), torch.minimum(low, mean).float(), torch.maximum(high, mean).float())


@torch.no_grad()
def laplace_proportions(
    log_p: Tensor, segments: Segments, prior: Tensor, concentration: float, level: float = 0.9, max_products: int = MAX_PRODUCTS
) -> Proportions:
    """The class shares of bags of any size, with intervals, without using labels: the interval of a beta distribution with the
    moments of :func:`laplace_moments`. It agrees with :func:`estimate_proportions`, and is twenty times faster."""
    moments = laplace_moments(log_p, segments, prior, concentration, max_products)
    return interval_from_moments(*moments, log_p, segments, level)


def interval_from_moments(share: Tensor, variance: Tensor, log_p: Tensor, segments: Segments, level: float) -> Proportions:
    """Intervals of shares (B, C) with these variances, in whole instances. The shares of a single instance are its
    probabilities: it is of class k with probability p_k, and nothing is to be inferred."""
    share, low, high = beta_interval(share, variance, level)
    size = _normalize_weights(segments).total_weight().clamp_min(1e-12)[:, None]
    if segments.weight is None:  # shares of n instances are multiples of 1 / n
        low, high = (low * size).round() / size, (high * size).round() / size
    else:
        low, high = (low - 0.5 / size).clamp_min(0), (high + 0.5 / size).clamp_max(1)
    inferred = Proportions(share, torch.minimum(low, share), torch.maximum(high, share))
    single = segments.n_instances()[:, None] == 1
    return Proportions(*map(partial(torch.where, single), mean_proportions(log_p.exp(), segments, level), inferred))


@torch.no_grad()
def laplace_moments(
    log_p: Tensor, segments: Segments, prior: Tensor, concentration: float, max_products: int = MAX_PRODUCTS
) -> tuple[Tensor, Tensor]:
    """(B, C) the class shares of bags and their variance, by a Laplace approximation of the sampling.
    Uncertain are the class of each instance given theta, and theta itself. The log-likelihood of theta, sum_i log r_i theta
    with r_ik = p_ik / prior_k, up to its norm, has the curvature S = sum_i r_i r_i'; the prior adds concentration prior /
    theta². The inverse on shares that add up to one is the variance of theta, and the mean of the instances' posteriors changes
    with theta by diag(mean q / theta) - diag(theta) S / n. The variance is the sum of the two."""
    log_p, prior, segments = log_p.double(), prior.double(), _normalize_weights(segments)
    theta = fit_shares(log_p, segments, prior.expand(segments.n_bags, -1), prior, concentration)
    q = log_posterior_given_share(log_p, segments, theta, prior).exp()
    weight, n = segments.instance_weights().double(), segments.total_weight().double().clamp_min(1e-12)[:, None]
    share = segments.mean(q)
    variance = segments.sum(weight[:, None] * q * (1 - q)) / n**2
    r = q / segments.broadcast(theta).clamp_min(1e-12)  # removed instances are in no sum
    theta_variance, step = torch.zeros_like(share), max(1, max_products // len(prior) ** 2)
    for bags in torch.arange(segments.n_bags).split(step):
        s, t = r.new_zeros(len(bags), len(prior), len(prior)), theta[bags]  # the sum of r r' over the instances of these bags
        for rows in ((segments.index >= bags[0]) & (segments.index <= bags[-1])).nonzero()[:, 0].split(step):
            products = (weight[rows, None] * r[rows])[:, :, None] * r[rows, None, :]
            s.index_add_(0, segments.index[rows] - bags[0], products)
        inverse = torch.linalg.inv(s + torch.diag_embed(concentration * prior / t**2))
        row_sums = inverse.sum(2, keepdim=True)
        covariance = inverse - row_sums @ row_sums.mT / row_sums.sum(1, keepdim=True)
        jacobian = torch.diag_embed(share[bags] / t) - t[:, :, None] * s / n[bags][:, :, None]
        theta_variance[bags] = (jacobian @ covariance * jacobian).sum(2).clamp_min(0)
    return share, variance + theta_variance


def mean_proportions(p: Tensor, segments: Segments, level: float = 0.9) -> Proportions:
    """The mean of ``p`` (N, C) in each bag, with intervals, where it is unknown how bags differ. Instances are taken to be of
    class k with probability p_k, independently: the count of k has the variance sum p (1 - p), and the interval is that of a
    beta distribution with this mean and variance. It ignores errors of the probabilities, and the mean is biased towards the
    overall class frequencies."""
    return beta_interval(*mean_moments(p, segments), level)


def mean_moments(p: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """(B, C) the mean of ``p`` (N, C) in each bag, and the variance of the share of independent instances around it."""
    p, total = p.double(), segments.total_weight().double().clamp_min(1e-12)[:, None]
    # segments.sum multiplies by the weight once; the variance needs its square
    return segments.mean(p), segments.sum(segments.instance_weights().double()[:, None] * p * (1 - p)) / total**2


def beta_interval(share: Tensor, variance: Tensor, level: float) -> Proportions:
    """The interval of the beta distribution with this mean and variance."""
    precision, (tail, rest) = (share * (1 - share) / variance.clamp_min(1e-12) - 1).clamp_min(1e-9), _interval_ends(level)
    a, b = (share * precision).clamp_min(1e-9).numpy(), ((1 - share) * precision).clamp_min(1e-9).numpy()
    low, high = (torch.from_numpy(betaincinv(a, b, q)).nan_to_num() for q in (tail, rest))
    single = precision < 1e-6  # a single instance is of the class or not: an end is 0 or 1, whichever is likely enough
    low, high = torch.where(single, (share > rest).double(), low), torch.where(single, (share >= tail).double(), high)
    low, high = (torch.where(variance < 1e-12, share, end) for end in (low, high))  # nothing is uncertain
    return Proportions(share.float(), torch.minimum(low, share).float(), torch.maximum(high, share).float())


def _interval_ends(level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise HeadcountError(f"the level of an interval lies between 0 and 1, got {level}")
    return (1 - level) / 2, (1 + level) / 2


def _normalize_weights(segments: Segments) -> Segments:
    """The same with each bag's weights scaled to a mean of one: the evidence is that of its instances, not of its votes."""
    if segments.weight is None:
        return segments
    scale = segments.broadcast((segments.total_weight() / segments.n_instances().clamp_min(1)).clamp_min(1e-30))
    return segments.with_weight(segments.weight / torch.where(scale > 0, scale, 1.0))
