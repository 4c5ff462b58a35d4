"""The election computed rather than sharpened: every instance casts one vote by lot, and the bag's class is who wins.

The mathematics is in majority/vote_likelihood.py; here each bag is given the form it can afford.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.majority import vote_likelihood
from headcount.models.heads.base import BagStats, Head, Output

ELECTION_FORMS = ("auto", "exact", "independent", "conditioned", "normal")
MAX_AUTO_OUTCOMES = (
    1024  # outcomes up to which ``auto`` writes all of them down: 16 votes for 3 classes, 10 for 4, 4 for 10
)
MAX_EXACT_OUTCOMES = 1 << 17  # outcomes up to which ``exact`` does
MAX_COUNTED_VOTES = 128  # votes above which a bag is always counted by its means and variances (unless exactly)


class Election(Head):
    """P(bag) = the probability that each class gets the most votes, if instance i votes by softmax(z_i). No temperature.

    ``form="auto"``: exact for the smallest bags, conditioned up to 128 votes, normal above. The places of a bag decide,
    so bags of one size are all treated alike, and nothing is asked of the device.

    A weight of 2 is two voters of the same mind, each with a lot of its own. A bag with fractional weights gets the normal
    form; so does, where all bags have one size, a bag of more than 64 votes and more than two for each place.
    """

    title = "Election"
    cites = (
        "Poisson-multinomial vote; counts: Hong, On computing the distribution function for the Poisson binomial "
        "distribution, CSDA 2013"
    )

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, form: str = "auto") -> None:
        super().__init__(dim, classes, counted)
        self.form = check_choice("form", form, ELECTION_FORMS)
        self.classifier = nn.Linear(dim, classes)

    @classmethod
    def display_name(cls, options: Mapping[str, Any]) -> str:
        form = options.get("form", "auto")
        return cls.title if form == "auto" else f"{cls.title} ({form})"

    def why_not_chunkable(self, segments: Segments) -> str:
        if self.form == "normal" or (
            self.form != "exact" and bool((segments.total_weight() > MAX_COUNTED_VOTES).all())
        ):
            return ""
        return f"it counts bags of up to {MAX_COUNTED_VOTES} votes (and all, in form exact) as a whole"

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        z = self.classifier(h).float()
        log_p, log_q = vote_likelihood.log_p_and_complement(z)
        return z, {"mean": segments.sum(log_p.exp()), "variance": segments.sum((log_p + log_q).exp())}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.masked_log_softmax(
            vote_likelihood.normal(stats["mean"], stats["variance"], self.counted)
        ).float(), {}

    def forward(self, h: Tensor, segments: Segments) -> Output:
        z = self.classifier(h).float()
        return Output(z, self.masked_log_softmax(election_log_probs(z, segments, self.form, self.counted)).float(), {})


def election_log_probs(z: Tensor, segments: Segments, form: str = "auto", counted: Tensor | None = None) -> Tensor:
    """(N, C) logits -> (B, C) log-probabilities of winning, in float64, each bag's less a constant of its own."""
    log_ps = vote_likelihood.log_p_and_complement(z)
    if form == "normal":
        return _normal(*log_ps, segments, counted)
    if segments.size is None or (segments.weight is not None and form == "exact"):
        return _ragged(*log_ps, segments, form, counted)
    if segments.weight is not None:
        return _weighted(*log_ps, segments, form, counted)
    form = choose_form(form, segments.size, z.shape[1])
    return _counted_by(form, *log_ps, segments, segments.size, counted)


def choose_form(form: str, slots: int, classes: int) -> str:
    """The form a bag of so many places gets.

    >>> form_of("auto", 4, 10), form_of("auto", 64, 10), form_of("auto", 5000, 10)
    ('exact', 'conditioned', 'normal')
    """
    outcomes = vote_likelihood.n_outcomes(slots, classes)
    if form == "exact" and outcomes > MAX_EXACT_OUTCOMES:
        raise HeadcountError(
            f"form exact would write down {outcomes} outcomes for {slots} votes and {classes} classes; "
            "use form auto or conditioned"
        )
    if form == "exact" or (form == "auto" and outcomes <= MAX_AUTO_OUTCOMES):
        return "exact" if classes > 2 else "conditioned"  # which for two classes is exact, and faster
    if slots > MAX_COUNTED_VOTES:
        return "normal"
    return "conditioned" if form == "auto" else form


def _counted_by(
    form: str, log_p: Tensor, log_q: Tensor, segments: Segments, places: int, counted: Tensor | None
) -> Tensor:
    if form == "normal":
        return _normal(log_p, log_q, segments, counted)
    p, q, n = _sheet(log_p, log_q, segments, places)
    if form == "exact":
        return vote_likelihood.exact(p, counted)
    return (
        vote_likelihood.independent(p, q, counted)
        if form == "independent"
        else vote_likelihood.conditioned(p, q, n, counted)
    )


def _normal(log_p: Tensor, log_q: Tensor, segments: Segments, counted: Tensor | None) -> Tensor:
    return vote_likelihood.normal(segments.sum(log_p.exp()), segments.sum((log_p + log_q).exp()), counted)


def _sheet(log_p: Tensor, log_q: Tensor, segments: Segments, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, C) twice and the votes cast (B,). An instance of weight 2 stands at two places."""
    p, q = segments.to_dense(log_p, vote_likelihood.LOG_ZERO)[0], segments.to_dense(log_q)[0]
    if not p.shape[1]:  # only emptied bags
        p, q = F.pad(p, (0, 0, 0, 1), value=vote_likelihood.LOG_ZERO), F.pad(q, (0, 0, 0, 1))
    if segments.weight is not None:
        ends = segments.to_dense(segments.weight)[0].round().cumsum(1)  # (B, L)
        place = torch.arange(places, device=ends.device) + 0.5
        who = torch.searchsorted(ends, place.expand(len(ends), places).contiguous())  # L where nobody is left
        who = who[..., None].expand(-1, -1, p.shape[2])
        p = F.pad(p, (0, 0, 0, 1), value=vote_likelihood.LOG_ZERO).gather(1, who)
        q = F.pad(q, (0, 0, 0, 1)).gather(1, who)
    return p, q, segments.total_weight().double()


def _whole(segments: Segments) -> Tensor:
    """(B,) true where every weight of the bag is a whole number."""
    weight = torch.ones_like(segments.index) if segments.weight is None else segments.weight
    return segments.with_weight(None).sum(weight != weight.round()) == 0


def _weighted(log_p: Tensor, log_q: Tensor, segments: Segments, form: str, counted: Tensor | None) -> Tensor:
    """Bags of one size with weights: how many votes each has is known only on the device, so every form is tried."""
    classes, places = log_p.shape[1], min(MAX_COUNTED_VOTES, max(64, 2 * (segments.size or 1)))
    votes, whole = segments.total_weight(), _whole(segments)
    usual = "conditioned" if form == "auto" else form
    out = _normal(log_p, log_q, segments, counted)
    found = _counted_by(usual, log_p, log_q, segments, places, counted)
    out = torch.where((whole & (votes <= places))[:, None], found, out)
    few = [n for n in range(1, places) if choose_form(form, n, classes) == "exact"]
    if few:
        found = _counted_by("exact", log_p, log_q, segments, few[-1], counted)
        out = torch.where((whole & (votes <= few[-1]))[:, None], found, out)
    return out


def _ragged(log_p: Tensor, log_q: Tensor, segments: Segments, form: str, counted: Tensor | None) -> Tensor:
    """Bags of many sizes: those of a similar size together, each by the form of its own size, whatever its company."""
    groups: dict[tuple[str, int], list[int]] = {}
    for bag, (votes, whole) in enumerate(zip(segments.total_weight().tolist(), _whole(segments).tolist(), strict=True)):
        own = choose_form(form, round(votes), log_p.shape[1]) if whole else "normal"
        similar = 0 if own in ("exact", "normal") else round(votes).bit_length()
        groups.setdefault((own, similar), []).append(bag)
    out = log_p.new_zeros(segments.n_bags, log_p.shape[1])
    for (own, _), bags in groups.items():
        rows = torch.tensor(bags, device=log_p.device)
        number = torch.full((segments.n_bags + 1,), len(bags), device=log_p.device)
        number[rows] = torch.arange(len(bags), device=log_p.device)
        part = Segments(number[segments.index], len(bags), None, segments.weight)
        places = max(1, int(part.total_weight().max()))
        out = out.index_copy(0, rows, _counted_by(own, log_p, log_q, part, places, counted))
    return out
