"""A census: the class shares of single bags, and how sure they are, from the probabilities of their instances.

Bags differ in their shares. An instance in a bag full of cats is more likely a cat than the same picture alone, and what the
others in its bag are thought to be tells how much. Each bag has shares theta, drawn around what its label lets expect:

    theta ~ Dirichlet(alike * centre),   y | theta ~ theta,   P(y = k | x, theta) ~ p_k theta_k / prior_k

    p       (N, C)  P(y | x) of an instance alone, under the classes' overall frequencies ``prior`` (C,)
    centre  (B, C)  the row of the mix for a bag's label, the prior for a bag without one (majority/transition.py)
    alike   how alike bags are: large means that all have the shares of their centre

With a label c, c is the largest class; shares that say otherwise are not believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError
from headcount.majority.transition import Transition

CONCENTRATIONS = tuple(2.0**e for e in range(11))  # the candidates
_MAX_PRODUCTS = 1 << 21  # numbers of products kept at once


@dataclass(frozen=True)
class Proportions:
    """What is known of each bag's shares."""

    share: Tensor  # (B, C) the mean
    low: Tensor  # (B, C) the interval
    high: Tensor  # (B, C)


def prior_means(transition: Transition, target: Tensor) -> Tensor:
    """(B, C) what bags with these target rows hold on average."""
    labelled = target.sum(1, keepdim=True) > 0
    return torch.where(labelled, target @ transition.mix.to(target.dtype), transition.prior.to(target.dtype))


def log_posterior_given_share(log_p: Tensor, segments: Segments, share: Tensor, prior: Tensor) -> Tensor:
    """(N, C) log P(y | x, theta): an instance under its bag's shares (B, C).

    >>> s = Segments.from_sizes([1])
    >>> in_context(torch.tensor([[0.5, 0.5]]).log(), s, torch.tensor([[0.8, 0.2]]), torch.tensor([0.5, 0.5])).exp()
    tensor([[0.8000, 0.2000]])
    """
    log_ratio = segments.broadcast((share / prior).clamp_min(1e-30).log())  # the removed lean nowhere
    return (log_p + log_ratio).log_softmax(1)


def fit_shares(
    log_p: Tensor, segments: Segments, prior_mean: Tensor, prior: Tensor, concentration: float, iterations: int = 20
) -> Tensor:
    """(B, C) each bag's shares, by EM from what its instances say, drawn towards its centre as by ``alike`` more of them.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.9, 0.1]])
    >>> half = torch.tensor([0.5, 0.5])
    >>> shares_of(p.log(), Segments.from_sizes([4]), half[None], half, alike=2.0)
    tensor([[0.7980, 0.2020]])
    """
    share, size = prior_mean, segments.total_weight()[:, None]
    for _ in range(iterations):
        expected_counts = segments.sum(log_posterior_given_share(log_p, segments, share, prior).exp())
        share = (expected_counts + concentration * prior_mean) / (size + concentration)
    return share


def posterior_in_context(log_p: Tensor, segments: Segments, prior: Tensor, concentration: float) -> Tensor:
    """(N, C) log P(y | x, the others in its bag), for bags without a label. Nobody is a witness for himself: an instance that
    is alone in its bag is answered as it would be without one.

    >>> half = torch.tensor([0.5, 0.5])
    >>> heard(torch.tensor([[0.9, 0.1]]).log(), Segments.from_sizes([1]), half, alike=1.0).exp()
    tensor([[0.9000, 0.1000]])
    """
    segments = _normalize_weights(segments)
    prior_mean = prior.expand(segments.n_bags, -1)
    share = fit_shares(log_p, segments, prior_mean, prior, concentration)
    posterior = log_posterior_given_share(log_p, segments, share, prior).exp()
    weight = 1.0 if segments.weight is None else segments.weight.to(posterior.dtype)[:, None]
    others = segments.broadcast(segments.sum(posterior) + concentration * prior) - weight * posterior
    others_weight = segments.broadcast(segments.total_weight()[:, None].to(posterior.dtype) + concentration) - weight
    log_ratio = (others / (others_weight * prior)).clamp_min(1e-30).log()
    return torch.where(segments.removed[:, None], log_p, (log_p + log_ratio).log_softmax(1))


def project_to_majority(share: Tensor, target: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) the nearest shares in which the label's class is the largest: whoever exceeds it is levelled with it. A class that
    is not ``counted`` (C,) is nobody's rival, and may. Of a tie the larger of the winners is crowned.

    >>> crowned(torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.3500, 0.3500, 0.3000]])
    >>> crowned(torch.tensor([[0.3, 0.5, 0.2]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.4000, 0.4000, 0.2000]])
    """
    label = share.masked_fill(target < target.amax(1, keepdim=True), -1.0).argmax(1, keepdim=True)
    label_share = share.gather(1, label)
    rivals = share if counted is None else share.masked_fill(~counted, -1.0)
    ranked = rivals.scatter(1, label, -1.0).sort(1, descending=True).values[:, :-1]  # the others
    members = torch.arange(2, share.shape[1] + 1, device=share.device)
    level = torch.maximum(((label_share + ranked.cumsum(1)) / members).amax(1, keepdim=True), label_share)
    projected = torch.minimum(share, level)
    projected = (projected if counted is None else torch.where(counted, projected, share)).scatter(1, label, level)
    return torch.where(target.sum(1, keepdim=True) > 0, projected, share)


def split_half_gain(
    log_p: Tensor, segments: Segments, prior_mean: Tensor, prior: Tensor, concentration: float
) -> Tensor:
    """(B,) does one half of a bag tell something of the other? The gain in log P(x) of each bag's instances, when its shares
    are estimated from the other half, over the shares of its centre. Needs no label at all."""
    segments, position = _normalize_weights(segments), torch.zeros_like(segments.index)
    order = segments.index.argsort(stable=True)
    position[order] = torch.arange(len(order), device=order.device)
    odd = (position % 2).bool()
    gain = torch.zeros(segments.n_bags, dtype=log_p.dtype, device=log_p.device)
    for half in (odd, ~odd):
        share = fit_shares(log_p, segments.without(~half), prior_mean, prior, concentration)
        other = segments.without(half)
        with_it, without = (torch.logsumexp(log_p + other.broadcast((s / prior).log()), 1) for s in (share, prior_mean))
        gain = gain + other.sum(with_it - without)
    return gain


def fit_concentration(log_p: Tensor, segments: Segments, prior_mean: Tensor, prior: Tensor) -> tuple[float, Tensor]:
    """The likeness of bags under which halves tell most of each other, and each bag's gain (B,) under it."""
    gains = {a: split_half_gain(log_p, segments, prior_mean, prior, a) for a in CONCENTRATIONS}
    best = max(gains, key=lambda a: float(gains[a].sum()))
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
    draws: int = 300,
    burn: int = 50,
) -> Proportions:
    """Shares of each bag's own instances with intervals at this level, by Gibbs sampling: classes given shares, shares given
    classes, ``draws`` times; ``alike`` is one for all bags or (B, 1). Draws in which a labelled bag's class is not the largest
    are left out; a bag of which none is left gets its mean levelled (:func:`crowned`) and the interval of all its draws.
    Classes that are not ``counted`` (C,) may be larger than the label's; of a tie any winner may be the largest.
    """
    if not 0 < level < 1:
        raise HeadcountError(f"the level of an interval lies between 0 and 1, got {level}")
    segments = _normalize_weights(segments)
    log_p, prior_mean = log_p.double(), prior_means(transition, target.double())
    prior, size = transition.prior.double(), segments.total_weight().double().clamp_min(1e-12)[:, None]
    share, won = prior_mean, target >= target.amax(1, keepdim=True)  # without a label, everybody
    kept, accepted = [], []
    for step in range(burn + draws):
        q = log_posterior_given_share(log_p, segments, share, prior)
        uniform = torch.rand(len(q), 1, generator=generator, dtype=torch.float64)
        drawn = (q.exp().cumsum(1) <= uniform).sum(1).clamp_max(q.shape[1] - 1)
        votes = segments.sum(torch.nn.functional.one_hot(drawn, q.shape[1]).double())
        weight = torch._standard_gamma(votes + concentration * prior_mean + 1e-9, generator=generator).clamp_min(1e-300)
        share = weight / weight.sum(1, keepdim=True)
        if step >= burn:
            rivals = votes if counted is None else votes.masked_fill(~(counted | won), -1)
            kept.append(votes / size)
            accepted.append(votes.masked_fill(~won, -1).amax(1) >= rivals.amax(1))
    rows, fit = torch.stack(kept), torch.stack(accepted)  # (draws, B, C), (draws, B)
    hopeless = ~fit.any(0)
    fit = fit | hopeless
    rows = rows.masked_fill(~fit[..., None], torch.nan)
    low, high = (rows.nanquantile(end, 0) for end in ((1 - level) / 2, (1 + level) / 2))
    mean = rows.nanmean(0)
    mean = torch.where(hopeless[:, None], project_to_majority(mean, target.double(), counted), mean)
    return Proportions(mean.float(), torch.minimum(low, mean).float(), torch.maximum(high, mean).float())


@torch.no_grad()
def laplace_proportions(
    log_p: Tensor, segments: Segments, prior: Tensor, concentration: float, *, level: float = 0.9
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, C) shares of bags of any size, their labels not looked at, with intervals: the census without lots.

    What is open is which class each instance is, given theta, and theta itself. Of the log-likelihood of theta,
    sum_i log r_i theta with r_ik = p_ik / prior_k, up to its norm, the curvature is S = sum_i r_i r_i'; the prior adds
    alike centre / theta². Its inverse on shares that add up to one is the variance of theta, and the mean of the instances'
    posteriors moves with theta by diag(mean q / theta) - diag(theta) S / n. The interval is that of the beta law with the
    mean and the sum of the two variances, in whole instances. It agrees with :func:`census`, and is twenty times faster.

    >>> p, half = torch.tensor([[0.9, 0.1]] * 30 + [[0.1, 0.9]] * 10), torch.tensor([0.5, 0.5])
    >>> share, low, high = estimated(p.log(), Segments.from_sizes([40]), half, alike=2.0)
    >>> share, low, high  # the mean of p is 0.7
    (tensor([[0.8005, 0.1995]]), tensor([[0.7000, 0.1250]]), tensor([[0.8750, 0.3000]]))
    """
    log_p, prior, normalized = log_p.double(), prior.double(), _normalize_weights(segments)
    theta = fit_shares(log_p, normalized, prior.expand(normalized.n_bags, -1), prior, concentration)
    q = log_posterior_given_share(log_p, normalized, theta, prior).exp()
    weight, n = _instance_weights(normalized).double(), normalized.total_weight().double().clamp_min(1e-12)[:, None]
    share = normalized.mean(q)
    within_variance = normalized.sum(weight[:, None] * q * (1 - q)) / n**2
    r = q / normalized.broadcast(theta).clamp_min(1e-12)  # the removed are in no sum
    share_variance, step = torch.zeros_like(share), max(1, _MAX_PRODUCTS // len(prior) ** 2)
    for bags in torch.arange(normalized.n_bags).split(step):
        s = _curvature(r, weight, normalized, int(bags[0]), len(bags), step)
        t, n_part = theta[bags], n[bags]
        inverse = torch.linalg.inv(s + torch.diag_embed(concentration * prior / t**2))
        flat = inverse.sum(2, keepdim=True)
        variance = inverse - flat @ flat.mT / flat.sum(1, keepdim=True)
        moves = torch.diag_embed(share[bags] / t) - t[:, :, None] * s / n_part[:, :, None]
        share_variance[bags] = (moves @ variance * moves).sum(2).clamp_min(0)
    share, low, high = _beta_interval(share, within_variance + share_variance, level)
    n_part = n.float()
    if segments.weight is None:  # shares of n instances come in steps of 1 / n
        low, high = (low * n_part).round() / n_part, (high * n_part).round() / n_part
    else:
        low, high = (low - 0.5 / n_part).clamp_min(0), (high + 0.5 / n_part).clamp_max(1)
    return share, torch.minimum(low, share), torch.maximum(high, share)


def _curvature(r: Tensor, weight: Tensor, segments: Segments, first: int, bags: int, step: int) -> Tensor:
    """(bags, C, C) sum of r r' over the instances of these bags, so many at a time."""
    curvature = r.new_zeros(bags, r.shape[1], r.shape[1])
    here = ((segments.index >= first) & (segments.index < first + bags)).nonzero()[:, 0]
    for rows in here.split(step):
        curvature.index_add_(
            0, segments.index[rows] - first, (weight[rows, None] * r[rows])[:, :, None] * r[rows, None, :]
        )
    return curvature


def mean_proportions(p: Tensor, segments: Segments, level: float = 0.9) -> tuple[Tensor, Tensor, Tensor]:
    """(B, C) shares with an interval where nothing is known of how bags differ: the mean of ``p`` (N, C).

    Every instance is taken to be of class k with its own probability, by itself, so that the count of k has variance
    sum p (1 - p); the interval is that of the beta law with this mean and variance. It does not know how wrong the
    probabilities may be, and the mean leans towards how frequent classes are overall.

    >>> share, low, high = plainly(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), Segments.from_sizes([2]))
    >>> share
    tensor([[0.8000, 0.2000]])
    """
    p, total = p.double(), segments.total_weight().double().clamp_min(1e-12)[:, None]
    # a weight is already in every sum; the square of it is wanted here
    variance = segments.sum(_instance_weights(segments).double()[:, None] * p * (1 - p)) / total**2
    return _beta_interval(segments.mean(p), variance, level)


def _beta_interval(share: Tensor, variance: Tensor, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """The interval of the beta law with this mean and variance."""
    from scipy.special import betaincinv  # a fifth of a second to import: only who wants intervals waits

    if not 0 < level < 1:
        raise HeadcountError(f"the level of an interval lies between 0 and 1, got {level}")
    precision = (share * (1 - share) / variance.clamp_min(1e-12) - 1).clamp_min(1e-9)
    a, b = (share * precision).clamp_min(1e-9).numpy(), ((1 - share) * precision).clamp_min(1e-9).numpy()
    low, high = (torch.from_numpy(betaincinv(a, b, q)).nan_to_num() for q in ((1 - level) / 2, (1 + level) / 2))
    low, high = (torch.where(variance < 1e-12, share, end) for end in (low, high))  # nothing is open
    return share.float(), torch.minimum(low, share).float(), torch.maximum(high, share).float()


def _instance_weights(segments: Segments) -> Tensor:
    return torch.ones(len(segments.index)) if segments.weight is None else segments.weight


def _normalize_weights(segments: Segments) -> Segments:
    """The same, each bag's weights scaled to a mean of one: what is heard of a bag is worth its instances, not its votes."""
    if segments.weight is None:
        return segments
    mean = (segments.total_weight() / segments.n_instances().clamp_min(1)).clamp_min(1e-30)
    scale = segments.broadcast(mean)
    return segments.with_weight(segments.weight / torch.where(scale > 0, scale, 1.0))
