"""Election: the probability that a class wins the vote (majority/vote_likelihood.py, majority/ragged_votes.py), computed instead of
approximated by a sharpened softmax."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import check_choice
from headcount.majority import vote_likelihood
from headcount.majority.ragged_votes import ELECTION_FORMS, MAX_COUNTED_VOTES, election_log_probs
from headcount.models.heads.base import BagStats, ChunkedHead, Output


class Election(ChunkedHead):
    """The probability that each class gets the most votes, if instance i votes for a class drawn from softmax(z_i).

    ``form="auto"`` is exact for the smallest bags, conditioned up to 128 votes, and normal above. It depends on the number of
    slots for votes alone, so that bags of one size are treated alike without waiting for the device.

    An instance of weight 2 casts two independent votes. A bag with fractional weights gets the normal form; so does, where all
    bags have one size, a bag of more than 64 votes and more than two votes per slot.
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

    def forward(self, h: Tensor, segments: Segments) -> Output:
        z = self.classifier(h).float()
        return Output(z, self.masked_log_softmax(election_log_probs(z, segments, self.form, self.counted)).float(), {})

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:  # for the normal form
        z = self.classifier(h).float()
        log_p, log_q = vote_likelihood.log_p_and_complement(z)
        return z, {"mean": segments.sum(log_p.exp()), "variance": segments.sum((log_p + log_q).exp())}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_p = vote_likelihood.normal(stats["mean"], stats["variance"], self.counted)
        return self.masked_log_softmax(log_p).float(), {}

    def why_whole_bags(self, segments: Segments) -> str:
        all_large = bool((segments.total_weight() > MAX_COUNTED_VOTES).all())
        if self.form == "normal" or (self.form != "exact" and all_large):
            return ""
        return f"it counts the votes of bags of up to {MAX_COUNTED_VOTES} votes (and of all, in form exact) as a whole"
