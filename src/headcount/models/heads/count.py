"""Every instance casts one vote. The Counting Network (also ICASSP 2024, pp. 7025-7029) counts sharpened votes; the election computes the
probability that a class wins (majority/vote_likelihood.py, majority/ragged_votes.py), instead of approximating it so."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.majority import vote_likelihood
from headcount.majority.ragged_votes import ELECTION_FORMS, MAX_COUNTED_VOTES, election_log_probs
from headcount.majority.vote_counts import count_log_likelihood
from headcount.models.heads.base import BagStats, Batch, ChunkedHead, Output, SumHead, nll


class Count(SumHead):
    """Counting Network: sharpened votes, their share in the bag, and a second softmax.

    ::

        vote_i = softmax(z_i / t1)        share = mean of vote_i over the bag        bag = softmax(share / t2)

    ``t1=1`` is the ablation "without Count". ``mode="count"`` puts the sum of the votes, not their mean, into the second
    softmax, as the paper's formula has it; the released code uses the mean. ``reduction="official"`` divides the loss by the
    number of classes and adds 1e-8 inside the logarithm; ``"paper"`` does neither.
    """

    title = "Counting Network"
    cites = "Learning from Majority Label, Pattern Recognition 2025, doi 10.1016/j.patcog.2025.112425"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        t1: float = 0.1, t2: float = 0.1, mode: str = "proportion", reduction: str = "official",
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        for name, t in (("t1", t1), ("t2", t2)):
            if not t > 0:
                raise HeadcountError(f"temperature {name} must be above 0, got {t}")
        self.t1, self.t2 = t1, t2
        self.mode = check_choice("mode", mode, ("proportion", "count"))
        self.reduction = check_choice("reduction", reduction, ("official", "paper"))

    @classmethod
    def display_name(cls, options: Mapping[str, Any]) -> str:
        return "Counting Network w/o Count" if dict(options) == {"t1": 1.0} else super().display_name(options)

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z = self.classifier(h).float()
        return z, (z / self.t1).softmax(1)

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        share = sums / total[:, None]
        return self.masked_log_softmax((share if self.mode == "proportion" else sums) / self.t2)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if self.reduction == "official":
            return nll(output.bag, batch.target, eps=1e-8) / self.classes
        return super().loss(output, batch)


class Election(ChunkedHead):
    """The probability that each class gets the most votes, if instance i votes for a class drawn from softmax(z_i).

    ``form="auto"`` is exact for the smallest bags, conditioned up to 128 votes, and normal above. It depends on the number of
    slots for votes alone, so that bags of one size are treated alike without waiting for the device.

    An instance of weight 2 casts two independent votes. A bag with fractional weights gets the normal form; so does, where all
    bags have one size, a bag of more than 64 votes and more than two votes per slot.

    Of a bag whose votes were counted, the likelihood of the counts is taken (majority/vote_counts.py).
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

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.votes is None:
            return super().loss(output, batch)
        log_p = count_log_likelihood(output.instance, batch.segments, batch.votes, self.counted)
        return nll(output.bag, batch.target, log_p_votes=log_p, votes=batch.votes)

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
