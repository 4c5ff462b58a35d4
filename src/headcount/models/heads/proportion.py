"""Learning from label proportions: the shares of the classes in a bag are known, and the mean prediction is fitted to them."""

from torch import Tensor

from headcount.errors import check_choice
from headcount.majority.vote_counts import count_log_likelihood
from headcount.models.heads.base import Batch, Output, nll
from headcount.models.heads.output import MeanProbability


class Proportion(MeanProbability):
    """Cross-entropy of the mean prediction of a bag with its shares: -sum_k share[k] log mean_i p[i, k].

    Of a bag whose votes were counted, ``likelihood="count"`` takes -log P(votes) per vote (majority/vote_counts.py); with
    ``"proportion"`` it has the loss above too. Both are equal where the votes are a sample of the bag, up to a constant, and for
    bags in chunks. A plain label is a share of one.
    """

    title = "Label proportions"
    cites = "Ardehaly and Culotta, Co-training for demographic classification using deep learning from label proportions, ICDMW 2017"

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, likelihood: str = "count") -> None:
        super().__init__(dim, classes, counted)
        self.likelihood = check_choice("likelihood", likelihood, ("count", "proportion"))

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.votes is None or output.instance is None or self.likelihood == "proportion":
            return super().loss(output, batch)
        log_p = count_log_likelihood(output.instance, batch.segments, batch.votes, self.counted)
        return nll(output.bag, batch.target, log_p_votes=log_p / batch.votes.sum(1).clamp_min(1), votes=batch.votes)
