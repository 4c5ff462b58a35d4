"""The likelihood of a majority label for bags of any size: each bag gets the form of the count that it can afford.

The formulas for bags of one size are those of vote_likelihood.py; measured errors and costs: docs/explanation/election.md.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError
from headcount.majority import vote_likelihood

ELECTION_FORMS = ("auto", "exact", "independent", "conditioned", "normal")
MAX_AUTO_OUTCOMES = 1024  # outcomes that ``auto`` enumerates: 16 votes for 3 classes, 10 for 4, 4 for 10
MAX_EXACT_OUTCOMES = 1 << 17  # outcomes that ``exact`` enumerates
MAX_COUNTED_VOTES = 128  # above it a bag is counted by its means and variances (unless exactly)


def election_log_probs(z: Tensor, segments: Segments, form: str = "auto", counted: Tensor | None = None) -> Tensor:
    """(N, C) logits -> (B, C) log-probabilities of winning, in float64, up to a constant of each bag. ``form="auto"``: exact
    for the smallest bags, conditioned up to 128 votes, normal above; a bag with fractional weights gets the normal form. Where
    all bags have one size nothing depends on the values of a tensor."""
    log_p, log_q = vote_likelihood.log_p_and_complement(z)
    if form == "normal":
        return _normal(log_p, log_q, segments, counted)
    if segments.size is None or (segments.weight is not None and form == "exact"):
        return _ragged(log_p, log_q, segments, form, counted)
    if segments.weight is not None:
        return _equal_sizes_weighted(log_p, log_q, segments, form, counted)
    form = choose_form(form, segments.size, z.shape[1])
    return _by_form(form, log_p, log_q, segments, segments.size, counted)


def choose_form(form: str, slots: int, classes: int) -> str:
    """The form for a bag of this many votes."""
    outcomes = math.comb(slots + classes, classes)  # of at most this many votes
    if form == "exact" and outcomes > MAX_EXACT_OUTCOMES:
        size = f"{outcomes} outcomes for {slots} votes and {classes} classes"
        raise HeadcountError(f"form exact would write down {size}; use form auto or conditioned")
    if form == "exact" or (form == "auto" and outcomes <= MAX_AUTO_OUTCOMES):
        return "exact" if classes > 2 else "conditioned"  # for two classes conditioned is exact, and faster
    if slots > MAX_COUNTED_VOTES:
        return "normal"
    return "conditioned" if form == "auto" else form


def _by_form(form: str, log_p: Tensor, log_q: Tensor, segments: Segments, slots: int, counted: Tensor | None) -> Tensor:
    if form == "normal":
        return _normal(log_p, log_q, segments, counted)
    p, q, n = dense_votes(log_p, log_q, segments, slots)
    if form == "exact":
        return vote_likelihood.exact(p, counted)
    if form == "independent":
        return vote_likelihood.independent(p, q, counted)
    return vote_likelihood.conditioned(p, q, n, counted)


def _normal(log_p: Tensor, log_q: Tensor, segments: Segments, counted: Tensor | None) -> Tensor:
    return vote_likelihood.normal(segments.sum(log_p.exp()), segments.sum((log_p + log_q).exp()), counted)


def dense_votes(log_p: Tensor, log_q: Tensor, segments: Segments, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, C) twice and the votes cast (B,). An instance of weight 2 takes two slots."""
    p, q = segments.to_dense(log_p, vote_likelihood.LOG_ZERO)[0], segments.to_dense(log_q)[0]
    if not p.shape[1]:  # all bags are empty
        p, q = F.pad(p, (0, 0, 0, 1), value=vote_likelihood.LOG_ZERO), F.pad(q, (0, 0, 0, 1))
    if segments.weight is not None:
        ends = segments.to_dense(segments.weight)[0].round().cumsum(1)  # (B, L)
        slot = torch.arange(slots, device=ends.device) + 0.5
        voter = torch.searchsorted(ends, slot.expand(len(ends), slots).contiguous())  # L: the slot stays empty
        voter = voter[..., None].expand(-1, -1, p.shape[2])
        p = F.pad(p, (0, 0, 0, 1), value=vote_likelihood.LOG_ZERO).gather(1, voter)
        q = F.pad(q, (0, 0, 0, 1)).gather(1, voter)
    return p, q, segments.total_weight().double()


def has_whole_weights(segments: Segments) -> Tensor:
    """(B,) true where every weight of the bag is a whole number."""
    weight = torch.ones_like(segments.index) if segments.weight is None else segments.weight
    return segments.with_weight(None).sum(weight != weight.round()) == 0


def _equal_sizes_weighted(log_p: Tensor, log_q: Tensor, segments: Segments, form: str, counted: Tensor | None) -> Tensor:
    """Bags of one size with weights: the numbers of votes are known on the device only, so every form is computed."""
    classes, slots = log_p.shape[1], min(MAX_COUNTED_VOTES, max(64, 2 * (segments.size or 1)))
    votes, whole = segments.total_weight(), has_whole_weights(segments)
    out = _normal(log_p, log_q, segments, counted)
    by_counts = _by_form("conditioned" if form == "auto" else form, log_p, log_q, segments, slots, counted)
    out = torch.where((whole & (votes <= slots))[:, None], by_counts, out)
    exact_sizes = [n for n in range(1, slots) if choose_form(form, n, classes) == "exact"]
    if exact_sizes:
        exact = _by_form("exact", log_p, log_q, segments, exact_sizes[-1], counted)
        out = torch.where((whole & (votes <= exact_sizes[-1]))[:, None], exact, out)
    return out


def _ragged(log_p: Tensor, log_q: Tensor, segments: Segments, form: str, counted: Tensor | None) -> Tensor:
    """Bags of many sizes: those of similar size together, each by the form of its own size, whichever bags are beside it."""
    groups: dict[tuple[str, int], list[int]] = {}
    votes, whole = segments.total_weight().round().long().tolist(), has_whole_weights(segments).tolist()
    for bag in range(segments.n_bags):
        bag_form = choose_form(form, votes[bag], log_p.shape[1]) if whole[bag] else "normal"
        similar_size = 0 if bag_form in ("exact", "normal") else votes[bag].bit_length()
        groups.setdefault((bag_form, similar_size), []).append(bag)
    out = log_p.new_zeros(segments.n_bags, log_p.shape[1])
    for (bag_form, _), bags in groups.items():
        rows = torch.tensor(bags, device=log_p.device)
        number = torch.full((segments.n_bags + 1,), len(bags), device=log_p.device)
        number[rows] = torch.arange(len(bags), device=log_p.device)
        group = Segments(number[segments.index], len(bags), None, segments.weight)
        slots = max(1, int(group.total_weight().max()))
        out = out.index_copy(0, rows, _by_form(bag_form, log_p, log_q, group, slots, counted))
    return out
