"""What the tilt head keeps from batch to batch: the estimated transition, and the state of its pseudo-labels.

p       (n, C)  the teacher's class probabilities        target  (n, C)  the label of each instance's bag
mix     (C, C)  P(class | bag label)                     weight  (n,)    multiplicities
"""

import math

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.majority import label_noise, transition
from headcount.majority.proportions import project_to_majority

RUNNING_MEAN_DECAY = 0.99  # of the running means over batches
MAX_DENSE_PAIRS = 1 << 24  # instances times bags up to which sums over bags are matrix products


class TransitionEstimate(nn.Module):
    """P(class | bag label), estimated by EM: expected counts from validation bags (E), and the next mix from them (M)."""

    counted: Tensor | None
    min_share: Tensor
    mix: Tensor
    label_counts: Tensor
    expected_counts: Tensor
    bag_label_counts: Tensor
    election_loss: Tensor
    trust: Tensor

    def __init__(
        self, classes: int, counted: Tensor | None, *, form: str, share: float | None, doubt: float, piece: float
    ) -> None:
        super().__init__()
        self.classes, self.form, self.share, self.doubt, self.piece = classes, form, share, doubt, piece
        self.label_noise = 0.0  # see Head
        self.register_buffer("counted", counted, persistent=False)
        # label_counts are of training instances, expected_counts of validation instances, bag_label_counts of validation bags
        shapes = {"min_share": (), "mix": (classes, classes), "label_counts": (classes,)}
        shapes |= {"expected_counts": (classes, classes), "bag_label_counts": (classes,)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.reset(32, persistent=False)

    def reset(self, bag_size: float, persistent: bool) -> None:
        """The initial mix for bags of this size. ``persistent``: whether the summed loss of validation elections, and the fraction of
        the entropy of the labels that they explain, are part of a checkpoint."""
        for name in ("election_loss", "trust"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64), persistent)
        self.min_share.fill_(transition.min_majority_share(bag_size, self.classes, self.counted))
        initial = transition.initial_share(bag_size, self.classes)
        share = initial if self.share is None else min(self.share, 1 - transition.MIN_PROBABILITY)
        self.mix.copy_(transition.mix_from_shares(torch.tensor(share, dtype=torch.float64), self.classes))

    @property
    def winner_prior(self) -> Tensor:
        """(C,) the frequencies of the winners of training instances' bags: those of the labels, unless these are noised."""
        label_prior = transition.label_prior_from_counts(self.label_counts, self.counted)
        return label_noise.winner_prior(label_prior, self.label_noise, self.counted)

    @torch.no_grad()
    def update(self, z: Tensor, rows: Tensor, target: Tensor) -> None:
        """The E-step on validation bags; the first training batch after them makes the M-step and resets the counts. ``z`` (n,
        C) logits, ``rows`` (n, C) the weighted label of each instance's bag, ``target`` (B, C)."""
        if not self.training:
            winners = self.mix, self.winner_prior
            counts = transition.e_step(z.double().softmax(1), rows.double(), *winners, self.label_noise, self.counted)
            self.expected_counts.add_(counts)
            self.bag_label_counts.add_(self.piece * target.double().sum(0))
        else:
            self.mix.copy_(self.current_mix())
            self.trust.copy_(self.explained_fraction())
            for counts in (self.election_loss, self.expected_counts, self.bag_label_counts):
                counts.zero_()
            self.label_counts.add_(rows.double().sum(0))

    def current_mix(self) -> Tensor:
        """(C, C) P(class | bag label), from all counts so far."""
        if self.share is not None:
            return self.mix
        mix = transition.m_step(self.expected_counts, self.bag_label_counts, self.form, self.min_share, self.counted)
        return torch.where(self.expected_counts.sum() > 0, mix, self.mix)

    def explained_fraction(self) -> Tensor:
        """() the fraction of the entropy of the validation labels that the elections explain, from 0 (no better than the label
        frequencies, with the same doubt) to 1. Without labelled bags it stays as it was."""
        label_prior = transition.label_prior_from_counts(self.bag_label_counts, self.counted)
        counted = self.classes if self.counted is None else self.counted.sum()
        lowest = label_noise.label_entropy(self.label_noise, counted) if self.label_noise else -math.log1p(self.doubt)
        perfect = -self.bag_label_counts.sum() * lowest  # minus the loss of certain and correct elections
        entropy = perfect - (self.bag_label_counts * (label_prior + self.doubt).clamp_min(1e-30).log()).sum()
        explained = (1 - (self.election_loss + perfect) / entropy.clamp_min(1e-12)).clamp(0, 1)
        return torch.where(self.bag_label_counts.sum() > 0, explained, self.trust)


class PseudoLabels(nn.Module):
    """Targets for strongly augmented views: the teacher's posterior given the label of the bag, where it is certain enough.

    Sohn et al., FixMatch, NeurIPS 2020; thresholds per class: Wang et al., FreeMatch, ICLR 2023. ::

        threshold   the least posterior probability of a target; with ``adapt`` lower for classes of which the teacher is seldom
                    certain
        align       from 0 to 1: how far the posterior is corrected for classes that the teacher predicts too often
        own         from 0 to 1: the weight of the shares estimated in the very bag, beside those of all bags of its label
    """

    counted: Tensor | None
    mean_prediction: Tensor
    class_confidence: Tensor
    n_batches: Tensor
    bag_shares: Tensor

    def __init__(
        self, classes: int, counted: Tensor | None, *, threshold: float, adapt: bool, align: float, own: float
    ) -> None:
        super().__init__()
        self.classes = classes
        self.threshold, self.adapt, self.align, self.own = threshold, adapt, align, own
        self.register_buffer("counted", counted, persistent=False)
        self.register_buffer("mean_prediction", torch.full((classes,), 1 / classes))
        self.register_buffer("class_confidence", torch.ones(classes))  # mean posterior of the instances put into a class
        self.register_buffer("n_batches", torch.zeros(()))

    def setup(self, n_bags: int, n_updates: int) -> None:
        """Before training with this many bags, and this many updates of their instances in an epoch."""
        if self.own:
            self.ema_rate = min(0.5, n_bags / max(1.0, 2 * n_updates))  # an average over two epochs
            self.register_buffer("bag_shares", torch.zeros(n_bags, self.classes))  # estimated shares of each training bag

    @torch.no_grad()
    def forward(
        self,
        p: Tensor,
        target: Tensor,
        weight: Tensor,
        mix: Tensor,
        label_prior: Tensor,
        bag: Tensor,
        by_votes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(n,) the pseudo-label of each instance, and its weight: 0 where the teacher is not certain enough."""
        excess = self.mean_prediction / transition.Transition(mix, label_prior).prior.float()
        log_p = p.clamp_min(1e-30).log() - self.align * excess.clamp_min(1e-6).log()
        posterior = self.posterior(log_p.log_softmax(1), target, weight, mix, label_prior, bag)
        if by_votes is not None:  # where the votes of the bag are known, zeros elsewhere; up to a factor
            total = by_votes.sum(1, keepdim=True)
            posterior = torch.where(total > 0, by_votes / total.clamp_min(1e-30), posterior)
        confidence, label = posterior.max(1)
        self.update_means(p, confidence, label, weight)
        relative = self.class_confidence / self.class_confidence.max()
        threshold = self.threshold * (relative if self.adapt else torch.ones_like(relative))
        return label, weight * (confidence >= threshold[label])

    def posterior(self, log_p: Tensor, target: Tensor, weight: Tensor, mix: Tensor, label_prior: Tensor, bag: Tensor) -> Tensor:
        """(n, C) P(class | x, bag): the prior of an instance is a mixture of the shares of all bags with this label and, with
        weight ``own``, of the shares estimated in its bag, which are updated here."""
        if not self.own:
            return transition.posterior(log_p, target, mix, label_prior)
        prior = transition.Transition(mix, label_prior).prior.float().clamp_min(1e-30)
        label_shares = transition.label_likelihood_ratio(target, mix, label_prior) * prior
        own_shares = self.bag_shares[bag]
        known = own_shares.sum(1, keepdim=True) > 0.5
        own_shares = torch.where(known, project_to_majority(own_shares, target, self.counted), label_shares)
        shares = (1 - self.own) * label_shares + self.own * own_shares
        posterior = (log_p + (shares / prior).clamp_min(1e-30).log()).softmax(1)
        weight = weight[:, None]
        columns = torch.cat([(weight > 0).to(posterior.dtype), weight, weight * posterior, weight * label_shares], 1)
        sums = sum_by_bag(columns, bag, len(self.bag_shares))
        count, total, shares, initial = sums.split([1, 1, self.classes, self.classes], 1)
        shares, initial = (x / total.clamp_min(1e-12) for x in (shares, initial))
        before = torch.where(self.bag_shares.sum(1, keepdim=True) > 0.5, self.bag_shares, initial)
        rate = 1 - (1 - self.ema_rate) ** count  # as if the instances of the bag came one by one
        self.bag_shares.copy_(torch.where(count > 0, before.lerp(shares, rate), self.bag_shares))
        return posterior

    def update_means(self, p: Tensor, confidence: Tensor, label: Tensor, weight: Tensor) -> None:
        """Running means: of all batches at first, then of about the last hundred."""
        rate = (1 / (1 + self.n_batches)).clamp_min(1 - RUNNING_MEAN_DECAY)
        self.n_batches.add_(1)
        total = weight.sum()
        mean = (weight[:, None] * p).sum(0) / total.clamp_min(1e-12)
        self.mean_prediction.lerp_(torch.where(total > 0, mean, self.mean_prediction), rate)
        # a comparison and no scatter: the same bits every time
        votes = weight[:, None] * (label[:, None] == torch.arange(self.classes, device=label.device))
        mean = (votes * confidence[:, None]).sum(0) / votes.sum(0).clamp_min(1e-12)
        self.class_confidence.lerp_(torch.where(votes.sum(0) > 0, mean, self.class_confidence), rate)


def sum_by_bag(x: Tensor, bag: Tensor, n_bags: int, max_pairs: int = MAX_DENSE_PAIRS) -> Tensor:
    """(n_bags, ...) sums over instances in any order. A matrix product has the same bits every time, while scattering on a GPU
    has not: it is for batches too large to compare each instance with each bag."""
    if len(bag) * n_bags > max_pairs:
        return Segments(bag, n_bags).sum(x)
    return transition.matmul_full_precision((bag == torch.arange(n_bags, device=bag.device)[:, None]).to(x.dtype), x)
