"""A census: the class shares of single bags, and how sure they are, from the probabilities of their instances.

Bags differ in their shares. An instance in a bag full of cats is more likely a cat than the same picture alone, and what the
others in its bag are thought to be tells how much. Each bag has shares theta, drawn around what its label lets expect:

    theta ~ Dirichlet(alike * centre),   y | theta ~ theta,   P(y = k | x, theta) ~ p_k theta_k / prior_k

    p       (N, C)  P(y | x) of an instance alone, under the classes' overall frequencies ``prior`` (C,)
    centre  (B, C)  the row of the mix for a bag's label, the prior for a bag without one (bags/tilt.py)
    alike   how alike bags are: large means that all have the shares of their centre

With a label c, c is the largest class; shares that say otherwise are not believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.bags.tilt import Tilt
from headcount.errors import HeadcountError

ALIKE = tuple(2.0**e for e in range(11))  # the candidates


@dataclass(frozen=True)
class Census:
    """What is known of each bag's shares, and of each instance once they are."""

    share: Tensor  # (B, C) the mean
    low: Tensor  # (B, C) the interval
    high: Tensor  # (B, C)
    posterior: Tensor  # (N, C) P(y | x, its bag)


def centres(tilt: Tilt, target: Tensor) -> Tensor:
    """(B, C) what bags with these target rows hold on average."""
    told = target.sum(1, keepdim=True) > 0
    return torch.where(told, target @ tilt.mix.to(target.dtype), tilt.prior.to(target.dtype))


def in_context(log_p: Tensor, segments: Segments, share: Tensor, prior: Tensor) -> Tensor:
    """(N, C) log P(y | x, theta): an instance under its bag's shares (B, C).

    >>> s = Segments.from_sizes([1])
    >>> in_context(torch.tensor([[0.5, 0.5]]).log(), s, torch.tensor([[0.8, 0.2]]), torch.tensor([0.5, 0.5])).exp()
    tensor([[0.8000, 0.2000]])
    """
    lean = segments.spread((share / prior).clamp_min(1e-30).log())  # the removed lean nowhere
    return (log_p + lean).log_softmax(1)


def shares_of(
    log_p: Tensor, segments: Segments, centre: Tensor, prior: Tensor, alike: float, rounds: int = 20
) -> Tensor:
    """(B, C) each bag's shares, by EM from what its instances say, drawn towards its centre as by ``alike`` more of them.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.9, 0.1]])
    >>> half = torch.tensor([0.5, 0.5])
    >>> shares_of(p.log(), Segments.from_sizes([4]), half[None], half, alike=2.0)
    tensor([[0.7980, 0.2020]])
    """
    share, size = centre, segments.total()[:, None]
    for _ in range(rounds):
        found = segments.sum(in_context(log_p, segments, share, prior).exp())
        share = (found + alike * centre) / (size + alike)
    return share


def crowned(share: Tensor, target: Tensor) -> Tensor:
    """(B, C) the nearest shares in which the label's class is the largest: whoever exceeds it is levelled with it.

    >>> crowned(torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.3500, 0.3500, 0.3000]])
    >>> crowned(torch.tensor([[0.3, 0.5, 0.2]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.4000, 0.4000, 0.2000]])
    """
    label = target.argmax(1, keepdim=True)
    own = share.gather(1, label)
    ranked = share.scatter(1, label, -1.0).sort(1, descending=True).values[:, :-1]  # the others
    members = torch.arange(2, share.shape[1] + 1, device=share.device)
    level = torch.maximum(((own + ranked.cumsum(1)) / members).amax(1, keepdim=True), own)
    found = torch.minimum(share, level).scatter(1, label, level)
    return torch.where(target.sum(1, keepdim=True) > 0, found, share)


def halves_gain(log_p: Tensor, segments: Segments, centre: Tensor, prior: Tensor, alike: float) -> Tensor:
    """(B,) does one half of a bag tell something of the other? The gain in log P(x) of each bag's instances, when its shares
    are estimated from the other half, over the shares of its centre. Needs no label at all."""
    place = torch.zeros_like(segments.index)
    order = segments.index.argsort(stable=True)
    place[order] = torch.arange(len(order), device=order.device)
    odd = (place % 2).bool()
    gain = torch.zeros(segments.bags, dtype=log_p.dtype, device=log_p.device)
    for half in (odd, ~odd):
        share = shares_of(log_p, segments.without(~half), centre, prior, alike)
        other = segments.without(half)
        with_it, without = (torch.logsumexp(log_p + other.spread((s / prior).log()), 1) for s in (share, centre))
        gain = gain + other.sum(with_it - without)
    return gain


def how_alike(log_p: Tensor, segments: Segments, centre: Tensor, prior: Tensor) -> tuple[float, Tensor]:
    """The likeness of bags under which halves tell most of each other, and each bag's gain (B,) under it."""
    gains = {a: halves_gain(log_p, segments, centre, prior, a) for a in ALIKE}
    best = max(gains, key=lambda a: float(gains[a].sum()))
    return best, gains[best]


@torch.no_grad()
def census(
    log_p: Tensor,
    segments: Segments,
    target: Tensor,
    tilt: Tilt,
    alike: float | Tensor,
    generator: torch.Generator,
    *,
    level: float = 0.9,
    draws: int = 300,
    burn: int = 50,
) -> Census:
    """Shares of each bag's own instances with intervals at this level, by Gibbs sampling: classes given shares, shares given
    classes, ``draws`` times; ``alike`` is one for all bags or (B, 1). Draws in which a labelled bag's class is not the largest
    are left out; a bag of which none is
    left gets its mean levelled (:func:`crowned`) and the interval of all its draws.
    """
    if not 0 < level < 1:
        raise HeadcountError(f"the level of an interval lies between 0 and 1, got {level}")
    log_p, centre = log_p.double(), centres(tilt, target.double())
    prior, size = tilt.prior.double(), segments.total().double().clamp_min(1e-12)[:, None]
    share, label, told = centre, target.argmax(1, keepdim=True), target.sum(1) > 0
    kept, fits = [], []
    posterior = torch.zeros_like(log_p)
    times = torch.zeros(segments.bags, dtype=torch.float64)
    for step in range(burn + draws):
        q = in_context(log_p, segments, share, prior)
        noise = torch.rand(q.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
        drawn = torch.nn.functional.one_hot((q - (-noise.log()).log()).argmax(1), q.shape[1]).double()
        votes = segments.sum(drawn)
        weight = torch._standard_gamma(votes + alike * centre + 1e-9, generator=generator).clamp_min(1e-300)
        share = weight / weight.sum(1, keepdim=True)
        if step >= burn:
            fit = (votes.gather(1, label)[:, 0] >= votes.amax(1)) | ~told
            kept.append(votes / size)
            fits.append(fit)
            posterior += segments.spread(fit.double())[:, None] * q.exp()
            times += fit
    rows, fit = torch.stack(kept), torch.stack(fits)  # (draws, B, C), (draws, B)
    hopeless = ~fit.any(0)
    fit = fit | hopeless
    rows = rows.masked_fill(~fit[..., None], torch.nan)
    low, high = (rows.nanquantile(end, 0) for end in ((1 - level) / 2, (1 + level) / 2))
    mean = rows.nanmean(0)
    mean = torch.where(hopeless[:, None], crowned(mean, target.double()), mean)
    own = posterior / segments.spread(times.clamp_min(1))[:, None].clamp_min(1)
    alone = in_context(log_p, segments, mean.clamp_min(1e-12), prior).exp()
    own = torch.where((segments.spread(times) > 0)[:, None], own, alone)
    return Census(mean.float(), torch.minimum(low, mean).float(), torch.maximum(high, mean).float(), own.float())
