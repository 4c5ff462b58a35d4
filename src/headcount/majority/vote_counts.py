"""The likelihood of vote counts: how many instances of a bag are of each class, where more than the winner is known.

Instance i votes for class k with probability p[i, k], independently; v[k] votes for class k were counted. ``votes`` (B, C) has a row
of zeros for a bag without counts. A bag takes one of four forms:

    exact         all instances voted, in at most 1,024 ways: P(v), one vote after the other
    binomial      all voted, at most 128 votes: sum_k (1 - b_k) log P(N_k = v_k), where N_k is Poisson-binomial, and b as in
                  vote_likelihood.conditioned; exact for two classes
    saddlepoint   all voted, more votes or fractional weights, or all for one class: -sum_i KL(q[i] || p[i]), where q[i] is p[i] with
                  each class multiplied by one factor for the bag, so that the expected counts are v (bounds.match_shares), with
                  the constant that is right where all p[i] are equal (Daniels, Saddlepoint approximations in statistics, 1954).
                  The gradient is that of cross-entropy with q
    multinomial   others voted too, or some of the instances only: v of the mean of p; divided by the number of votes this is
                  the loss of learning from label proportions (models/heads/proportion.py)
"""

import math

import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.majority.bounds import match_shares
from headcount.majority.ragged_votes import MAX_AUTO_OUTCOMES, MAX_COUNTED_VOTES, dense_votes, has_whole_weights
from headcount.majority.transition import Transition, label_likelihood_ratio
from headcount.majority.vote_likelihood import LOG_ZERO, count_log_pmfs, exact_counts, log_p_and_complement, variance_shares

MATCH_STEPS = 30
MIN_PROBABILITY = 1e-12


def votes_cover_bag(segments: Segments, votes: Tensor) -> Tensor:
    """(B,) true where there are as many votes as instances (or as their weights add up to)."""
    return (votes.sum(1) > 0) & ((votes.sum(1) - segments.total_weight()).abs() < 0.5)


def count_log_likelihood(z: Tensor, segments: Segments, votes: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B,) log P(votes) in float64 from logits (N, C); 0 for a bag without counts."""
    log_p, log_q = log_p_and_complement(z)
    votes, size, classes = votes.double(), segments.total_weight().double(), z.shape[1]
    n, covered = votes.sum(1), votes_cover_bag(segments, votes)
    out = torch.where(covered, _saddlepoint(log_p, segments, votes), _multinomial(log_p, segments, votes, counted))
    undecided = covered & has_whole_weights(segments) & (votes.amax(1) < n)
    exact_votes = max_exact_votes(classes)
    forms = ((_binomial, MAX_COUNTED_VOTES), (_exact, exact_votes if classes > 2 else 0))
    for form, most in forms:
        chosen = undecided & (size <= most)
        # the sizes of ragged bags are on the host anyway
        if (bool(chosen.any()) if segments.size is None else segments.weight is not None or segments.size <= most) and most:
            slots, part = most, segments.without(~segments.broadcast(chosen))
            out = torch.where(chosen, form(*dense_votes(log_p, log_q, part, slots)[:2], votes), out)
    return out


def max_exact_votes(classes: int) -> int:
    """The largest bag whose outcomes are enumerated."""
    return next(n for n in range(MAX_AUTO_OUTCOMES) if math.comb(n + 1 + classes, classes) > MAX_AUTO_OUTCOMES)


def _exact(p: Tensor, q: Tensor, votes: Tensor) -> Tensor:
    outcomes, log_joint = exact_counts(p)
    same = (outcomes == votes.long()[:, None]).all(2)
    return log_joint.masked_fill(~same, LOG_ZERO).logsumexp(1)


def _binomial(p: Tensor, q: Tensor, votes: Tensor) -> Tensor:
    log_pmf = count_log_pmfs(p, q)
    v = votes.long().clamp_max(log_pmf.shape[2] - 1)[..., None]
    return ((1 - variance_shares((p + q).exp().sum(1))) * log_pmf.gather(2, v)[..., 0]).sum(1)


def _saddlepoint(log_p: Tensor, segments: Segments, votes: Tensor) -> Tensor:
    n = votes.sum(1)
    q = match_shares(log_p.detach().exp(), segments, votes / n.clamp_min(1)[:, None], steps=MATCH_STEPS, tolerance=0)
    divergence = segments.sum((torch.special.xlogy(q, q) - q * log_p).sum(1))
    return _log_orders(votes) - divergence + torch.special.xlogy(votes, votes).sum(1) - torch.special.xlogy(n, n)


def _multinomial(log_p: Tensor, segments: Segments, votes: Tensor, counted: Tensor | None) -> Tensor:
    """Votes of more people than there are instances weigh as much as one vote per instance."""
    votes = votes * (segments.total_weight() / votes.sum(1).clamp_min(1)).clamp_max(1)[:, None]
    mean = segments.mean(log_p.exp())
    mean = mean if counted is None else mean * counted
    share = mean / mean.sum(1, keepdim=True).clamp_min(MIN_PROBABILITY)
    return _log_orders(votes) + (votes * share.clamp_min(MIN_PROBABILITY).log()).sum(1)


def _log_orders(votes: Tensor) -> Tensor:
    """(B,) log of the number of orders in which these votes can be cast."""
    return torch.lgamma(votes.sum(1) + 1) - torch.lgamma(votes + 1).sum(1)


def posterior_given_votes(p: Tensor, segments: Segments, votes: Tensor, counted: Tensor | None = None) -> Tensor:
    """(N, C) the class probabilities of instances once the votes of their bags are known, from probabilities ``p`` (N, C): those of
    a bag add up to the expected counts. Zeros where a bag has no counts."""
    counts = expected_class_counts(votes.double(), segments.sum(p.double()), counted)
    shares = counts / counts.sum(1, keepdim=True).clamp_min(MIN_PROBABILITY)
    return match_shares(p, segments, shares, steps=MATCH_STEPS, tolerance=0).to(p.dtype)


def expected_class_counts(votes: Tensor, predicted: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) how many instances of each class a bag has, from its votes and the ``predicted`` counts (B, C): the votes themselves if
    all voted; of the instances without a vote, the shares of the votes and one predicted instance; where others voted too, the
    shares of the votes. Classes that are not counted cast no votes, and keep what is predicted."""
    inside = predicted if counted is None else predicted * counted
    size, n = inside.sum(1, keepdim=True), votes.sum(1, keepdim=True)
    shares = (votes + inside / size.clamp_min(MIN_PROBABILITY)) / (n + 1)
    counts = votes * (size / n.clamp_min(1)).clamp_max(1) + (size - n).clamp_min(0) * shares + predicted - inside
    return torch.where(n > 0, counts, 0.0)


def vote_likelihood_ratio(
    votes: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor, counted: Tensor | None = None
) -> Tensor:
    """(B, C) P(y = k | votes) / P(y = k) of an instance in bags with these votes and one more, drawn from ``label_prior`` (C,); zeros
    without votes. How many instances are of the classes that are not counted follows from the label (``target``, ``mix``)."""
    n = votes.sum(1, keepdim=True)
    ratio = (votes / label_prior.clamp_min(1e-30) + 1) / (n + 1)
    if counted is not None:
        by_label = label_likelihood_ratio(target.to(mix.dtype), mix, label_prior)
        prior = Transition(mix, label_prior).prior * counted
        ratio = torch.where(counted, ratio * (by_label * prior).sum(1, keepdim=True) / prior.sum(), by_label)
    return torch.where(n > 0, ratio, 0.0)
