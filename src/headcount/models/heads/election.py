"""The election computed rather than sharpened: every instance casts one vote by lot, and the bag's class is who wins.

The mathematics is in majority/vote_likelihood.py and majority/ragged_votes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import check_choice
from headcount.majority import vote_likelihood
from headcount.majority.ragged_votes import ELECTION_FORMS, MAX_COUNTED_VOTES, election_log_probs
from headcount.models.heads.base import BagStats, Head, Output


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
