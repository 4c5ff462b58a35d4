"""Tilt: every instance carries its bag's label as a noisy label, and how noisy is estimated from the bags.

Three terms. *Instance*: -log P(bag label | x) under the tilt matrix (majority/transition.py). *Bag*: the likelihood of the election's
outcome (majority/vote_likelihood.py), which carries close elections, where the tilt is slight. *Teaching*: a teacher's posterior, given
the bag's label, is the target of a strongly changed view (Sohn et al., FixMatch, NeurIPS 2020; thresholds per class: Wang et
al., FreeMatch, ICLR 2023).

The tilt is noted on validation bags, which the network has not learned by heart: one step of EM each time they are judged.
It begins low, and is told neither truth nor anything else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_bool, check_choice, check_number
from headcount.majority import transition, transition_em
from headcount.majority.proportions import project_to_majority
from headcount.majority.ragged_votes import ELECTION_FORMS, election_log_probs
from headcount.models.heads.base import Batch, Head, Output, Pass, instance_cross_entropy, instance_weights, nll

RUNNING_MEAN_DECAY = 0.99  # of the running means of what the teacher says
MAX_WEIGHT = 1_000_000  # times any other term: a slip, no weight
VALIDATION_BAG_WEIGHT = 0.3  # the bag term's weight in validation
MAX_DENSE_PAIRS = 1 << 24  # of an instance and a bag that are looked at one by one
TEMPERATURES = (1.0, 0.7, 1.5, 2.5)  # under which an epoch is judged, if any but the first


class TiltHead(Head):
    """P(label | x) = sum over classes of T[class, label] P(class | x), T estimated; with an election and a teacher.

    ``form`` of the tilt: "one", "class" or "full" (the fewer bags, the nearer to the simpler). ``share``: a majority share
    that is given instead of estimated. ``over``: "bags" (one pass for all terms) or "instances" (loose instances, and a pass
    over bags for the bag term).

    ``instance``, ``bag``, ``teach``: the terms' weights; bag "auto" follows from the estimated shares and from how well
    elections are foretold in validation. Teaching begins when the share ``start`` of the training is done; from then on the
    instance term fades to the share ``fade`` of its weight. The bag term counts from the share ``vote`` on, and with ``doubt``
    it is -log(P + doubt): a deep network at a high rate must know something before it votes, and an election it gets wrong
    beyond doubt must not drown all others. ``tempered``: an epoch is judged under the temperature that suits it best, so that
    one that grew too sure, but knows more, is not passed over.
    ``networks``: the features are those of so many networks side by side (the backbone's option of that name); each learns
    for itself and is taught by the next one's teacher, and all answer together.
    ``threshold``: how sure the teacher must be, with ``adapt`` less so of classes it is seldom sure of. ``align``: how much
    of the pseudo-labels' lopsidedness is divided out. ``decay``: of the teacher's moving average. ``piece``: which share of
    a bag each of these is, where large bags were cut up: what is known of a label is worth its bags, not their pieces.
    ``own``: how much a lesson believes in the shares that lessons found in this bag, beside those of all bags of its label.
    """

    title = "Tilt"
    cites = "forward correction: Patrini et al., CVPR 2017; sets with tilted priors: Lu et al., ICML 2021"
    requires_full_batch = "its terms are means over different things, and it estimates the tilt over all bags"
    weak_teacher = True
    mean_of_instances = True
    least: Tensor
    mix: Tensor
    seen: Tensor
    heap: Tensor
    bags: Tensor
    said: Tensor
    sure: Tensor
    lessons: Tensor
    found: Tensor
    missed: Tensor
    trust: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        counted: Tensor | None = None,
        *,
        form: str = "full",
        share: float | None = None,
        over: str = "bags",
        instance: float = 1.0,
        bag: float | str = "auto",
        teach: float = 1.0,
        start: float = 0.3,
        fade: float = 1.0,
        threshold: float = 0.9,
        adapt: bool = True,
        align: float = 0.5,
        decay: float = 0.99,
        election: str = "auto",
        piece: float = 1.0,
        own: float = 0.0,
        vote: float = 0.0,
        doubt: float = 0.0,
        tempered: bool = False,
        networks: int = 1,
    ) -> None:
        super().__init__(dim, classes, counted)
        self.form = check_choice("form of the tilt", form, transition_em.TRANSITION_FORMS)
        self.over = check_choice("over", over, ("bags", "instances"))
        self.election = check_choice("election", election, ELECTION_FORMS)
        parts = {"start": start, "fade": fade, "threshold": threshold, "align": align, "decay": decay, "piece": piece}
        parts |= {"own": own, "vote": vote, "doubt": doubt, "share": 0.5 if share is None else share}
        for name, value in parts.items():
            check_number(name, value, 0, 1, integer=False)
        bag = bag if bag == "auto" else check_number("bag", bag, 0, MAX_WEIGHT, integer=False)
        for name, value in (("instance", instance), ("teach", teach)):
            check_number(name, value, 0, MAX_WEIGHT, integer=False)
        if share is not None and counted is None and share * classes <= 1:
            raise HeadcountError(
                f"share is that of a majority, so above 1/{classes} for {classes} classes, got {share!r}"
            )
        for name, value in (("adapt", adapt), ("tempered", tempered)):
            check_bool(name, value)
        self.share, self.instance, self.bag, self.teach, self.start = share, instance, bag, teach, start
        self.fade, self.threshold, self.adapt, self.align = fade, threshold, adapt, align
        self.piece, self.own, self.vote, self.doubt = piece, own, vote, doubt
        if isinstance(networks, bool) or not isinstance(networks, int) or networks < 1 or dim % networks:
            raise HeadcountError(f"networks is a whole number that divides the {dim} features, got {networks!r}")
        self.networks = networks
        linear = [nn.Linear(dim // networks, classes) for _ in range(networks)]
        self.classifier = linear[0] if networks == 1 else nn.ModuleList(linear)
        self.temperatures = TEMPERATURES if tempered else (1.0,)
        self.n_temperatures = len(self.temperatures)
        self.views, self.teacher, self.teacher_start = 2 if teach else 1, decay, start
        bags = (Pass("bags", uses_teacher=False, start=vote),) if bag else ()
        self.passes = (
            (Pass("bags", uses_teacher=bool(teach)),)
            if over == "bags"
            else (Pass("instances", uses_teacher=bool(teach)), *bags)
        )
        self.register_buffer("least", torch.zeros((), dtype=torch.float64))  # no majority share is smaller
        self.register_buffer("mix", torch.empty(classes, classes, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.float64))  # labels of training instances
        self.register_buffer("heap", torch.zeros(classes, classes, dtype=torch.float64))  # of validation instances
        self.register_buffer("bags", torch.zeros(classes, dtype=torch.float64))  # labels of validation bags
        self.register_buffer("said", torch.full((classes,), 1 / classes))  # mean of what the teacher says
        self.register_buffer("sure", torch.ones(classes))  # how sure it is of each class when it says it
        self.register_buffer("lessons", torch.zeros(()))
        self._trust_nobody(persistent=False)  # of a finished model nothing depends on it
        self._begin(32)

    def setup_memory(self, bags: int, instances: int) -> None:
        self._begin(instances / bags)
        self._trust_nobody(persistent=True)  # a training that is taken up again goes on with it
        if self.own:
            # two sweeps over a bag are remembered, by every network's lessons
            self.ema_rate = min(0.5, bags / max(1.0, 2 * instances * self.networks))
            self.register_buffer("found", torch.zeros(bags, self.classes))  # shares of each training bag

    def setup_bag_size(self, size: float) -> None:
        self._begin(size)

    def _begin(self, size: float) -> None:
        """What is believed of bags of this size before anything is seen."""
        self.least.fill_(transition_em.min_majority_share(size, self.classes, self.counted))
        guess = (
            transition_em.initial_share(size, self.classes)
            if self.share is None
            else min(self.share, 1 - transition_em.MIN_PROBABILITY)
        )
        self.mix.copy_(transition.mix_from_shares(torch.tensor(guess, dtype=torch.float64), self.classes))

    def _trust_nobody(self, persistent: bool) -> None:
        for name in ("missed", "trust"):  # what elections did not foretell of validation labels; 0 to 1, what they did
            self.register_buffer(name, torch.zeros((), dtype=torch.float64), persistent)

    @property
    def estimate(self) -> transition.Transition:
        """What was estimated: shares, matrix, condition."""
        return transition.Transition(
            self.current_mix().float(), transition_em.label_prior_from_counts(self.seen, self.counted).float()
        )

    def current_mix(self) -> Tensor:
        """(C, C) the mix, with what has been noted since it last settled."""
        if self.share is not None:
            return self.mix
        found = transition_em.m_step(self.heap, self.bags, self.form, self.least, self.counted)
        return torch.where(self.heap.sum() > 0, found, self.mix)

    def forward(self, h: Tensor, segments: Segments) -> Output:
        parts: dict[str, Tensor] = {}
        if isinstance(self.classifier, nn.ModuleList):
            pairs = zip(self.classifier, h.chunk(self.networks, 1), strict=True)
            parts["each"] = torch.stack([one(own).float() for one, own in pairs])  # (networks, N, C)
            z = parts["each"].softmax(2).mean(0).clamp_min(1e-30).log()
        else:
            z = self.classifier(h).float()
        return Output(z, self.masked_log_softmax(segments.mean(z.softmax(1)).clamp_min(1e-30).log()), parts)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if self.networks == 1 or not self.training:
            return self.network_loss(output, batch, teacher)
        others = [None] * self.networks if teacher is None else [*teacher.parts["each"].roll(-1, 0)]
        losses = [
            self.network_loss(
                Output(z, output.bag, {}),
                batch,
                None if teacher_logits is None else Output(teacher_logits, output.bag, {}),
            )
            for z, teacher_logits in zip(output.parts["each"], others, strict=True)
        ]
        return torch.stack(losses).sum()  # as if each had an optimizer of its own

    def network_loss(self, output: Output, batch: Batch, teacher: Output | None) -> Tensor:
        """The three terms for one network's answers, or in validation for what all say together."""
        z, s, target, known = _first(output.instance, batch)
        rows = s.broadcast(target)  # (n, C)
        weight = instance_weights(s)
        self.update_estimate(z.detach(), rows * weight[:, None], target)
        labels = transition_em.label_prior_from_counts(self.seen, self.counted)
        done = (
            torch.zeros((), device=z.device)
            if batch.fraction_done is None or not self.training
            else batch.fraction_done
        )
        whole = batch.over == "instances" or self.over == "bags" or not self.training
        loss = z.new_zeros(())
        if whole and self.instance:
            late = ((done - self.start) / max(1e-6, 1 - self.start)).clamp(0, 1)
            fading = 1 - (1 - self.fade) * late if self.teach and self.training else 1.0
            read = [
                transition.forward_loss((z / t).log_softmax(1), rows, self.mix, labels, weight)
                for t in ((1.0,) if self.training else self.temperatures)
            ]
            loss = loss + self.instance * fading * (read[0] if len(read) == 1 else torch.stack(read))
        if batch.over == "bags" and self.bag:
            heard = self.masked_log_softmax(election_log_probs(z, s, self.election, self.counted)).float()
            missed = nll(heard, target, self.doubt)
            if not self.training:
                self.missed.add_(self.piece * (target.sum(1) > 0).sum() * missed.detach())
            # in validation always the same, so that epochs are judged by one measure
            weighed = self.bag_weight() * (done >= self.vote) if self.training else VALIDATION_BAG_WEIGHT
            loss = loss + weighed * missed
        if whole and known is not None:
            loss = loss + instance_cross_entropy(z, known, weight)
        if teacher is not None and self.training and self.teach and whole:
            strong = output.instance[-len(z) :]
            loss = loss + self.teach * (done >= self.start) * self.pseudo_label_loss(
                strong, teacher, rows, weight, labels, batch.bag[: s.n_bags][s.index.clamp_max(s.n_bags - 1)]
            )
        return loss

    def bag_weight(self) -> Tensor | float:
        """Close elections high, landslides low: a tenth of the odds that a label says nothing of an instance; a fifth at most.
        Measured in docs/explanation/tilt.md: more hurts where classes overlap. Times the trust: a network that cannot foretell elections is
        not driven by them, unless there is nothing else to begin with."""
        if isinstance(self.bag, int | float):
            return self.bag
        pull = transition.signal_strength(self.mix).clamp_min(1e-3)
        weight = (0.1 * (1 - pull) / pull).clamp_max(0.2)
        return (weight * self.trust if self.instance else weight).float()

    def explained_fraction(self) -> Tensor:
        """() how much of what labels leave open the elections foretell of the validation bags: 0, no more than who knows but
        how frequent labels are among them, and doubts as much; 1, all of it. Where no bag had a label, as before."""
        labels = transition_em.label_prior_from_counts(self.bags, self.counted)
        sure = self.bags.sum() * math.log1p(self.doubt)  # who is sure and right has missed nothing
        open_ = sure - (self.bags * (labels + self.doubt).clamp_min(1e-30).log()).sum()
        found = (1 - (self.missed + sure) / open_.clamp_min(1e-12)).clamp(0, 1)
        return torch.where(self.bags.sum() > 0, found, self.trust)

    @torch.no_grad()
    def update_estimate(self, z: Tensor, rows: Tensor, target: Tensor) -> None:
        """Validation bags add to the heap; the first training batch after them lets mix and trust settle, and begins anew."""
        if not self.training:
            labels = transition_em.label_prior_from_counts(self.seen, self.counted)
            self.heap.add_(transition_em.e_step(z.double().softmax(1), rows.double(), self.mix, labels))
            self.bags.add_(self.piece * target.double().sum(0))
        else:
            self.mix.copy_(self.current_mix())
            self.trust.copy_(self.explained_fraction())
            self.missed.zero_()
            self.heap.zero_()
            self.bags.zero_()
            self.seen.add_(rows.double().sum(0))

    def pseudo_label_loss(
        self, z: Tensor, teacher: Output, rows: Tensor, weight: Tensor, labels: Tensor, bag: Tensor
    ) -> Tensor:
        """Cross-entropy of strongly changed views with what the teacher makes of weak ones and of the bag's label."""
        with torch.no_grad():
            p = teacher.instance.softmax(1).unflatten(0, (-1, len(z))).mean(0)  # (n, C), the mean over weak views
            lopsided = self.said / transition.class_prior(self.mix, labels).float()
            log_p = p.clamp_min(1e-30).log() - self.align * lopsided.clamp_min(1e-6).log()
            q = self._posterior(log_p.log_softmax(1), rows, weight, labels, bag)
            top, choice = q.max(1)
            self._remember(p, top, choice, weight)
            bar = self.threshold * (self.sure / self.sure.max() if self.adapt else torch.ones_like(self.sure))
            trusted = weight * (top >= bar[choice])
        each = -z.log_softmax(1).gather(1, choice[:, None])[:, 0]
        return (trusted * each).sum() / weight.sum().clamp_min(1e-12)

    def _posterior(self, log_p: Tensor, rows: Tensor, weight: Tensor, labels: Tensor, bag: Tensor) -> Tensor:
        """(n, C) what is known of an instance once its bag's label is, and what lessons found in this bag."""
        if not self.own:
            return transition.posterior(log_p, rows, self.mix, labels)
        prior = transition.class_prior(self.mix, labels).float().clamp_min(1e-30)
        lean = transition.label_likelihood_ratio(rows, self.mix, labels) * prior  # the shares of all bags of this label
        mine = self.found[bag]
        mine = torch.where(mine.sum(1, keepdim=True) > 0.5, project_to_majority(mine, rows, self.counted), lean)
        q = (log_p + (((1 - self.own) * lean + self.own * mine) / prior).clamp_min(1e-30).log()).softmax(1)
        heavy = weight[:, None]
        sums = _by_bag(torch.cat([(heavy > 0).to(q.dtype), heavy, heavy * q, heavy * lean], 1), bag, len(self.found))
        many, whole, said, usual = sums.split([1, 1, self.classes, self.classes], 1)
        said, usual = (x / whole.clamp_min(1e-12) for x in (said, usual))
        before = torch.where(self.found.sum(1, keepdim=True) > 0.5, self.found, usual)
        step = 1 - (1 - self.ema_rate) ** many  # as if each instance of the bag had taken its own
        self.found.copy_(torch.where(many > 0, before.lerp(said, step), self.found))
        return q

    def _remember(self, p: Tensor, top: Tensor, choice: Tensor, weight: Tensor) -> None:
        """Running means: of all lessons at first, then of about the last hundred."""
        pace = (1 / (1 + self.lessons)).clamp_min(1 - RUNNING_MEAN_DECAY)
        self.lessons.add_(1)
        whole = weight.sum()
        mean = (weight[:, None] * p).sum(0) / whole.clamp_min(1e-12)
        self.said.lerp_(torch.where(whole > 0, mean, self.said), pace)
        votes = weight[:, None] * (choice[:, None] == torch.arange(self.classes, device=choice.device))
        sure = (votes * top[:, None]).sum(0) / votes.sum(0).clamp_min(1e-12)  # no scatter: the same bits every time
        self.sure.lerp_(torch.where(votes.sum(0) > 0, sure, self.sure), pace)


def _first(z: Tensor, batch: Batch) -> tuple[Tensor, Segments, Tensor, Tensor | None]:
    """The first view alone: logits, segments, targets, known labels."""
    s = batch.segments.first_copy(batch.views)
    n = len(s.index)
    return z[:n], s, batch.target[: s.n_bags], None if batch.known is None else batch.known[:n]


def _by_bag(x: Tensor, bag: Tensor, bags: int) -> Tensor:
    """(bags, ...) sums over the loose instances of each bag. A product has the same bits every time, scattering on a card has
    not: it is for batches too large to say of each instance and each bag whether they belong together."""
    if len(bag) * bags > MAX_DENSE_PAIRS:
        return Segments(bag, bags).sum(x)
    return transition.matmul_full_precision((bag == torch.arange(bags, device=bag.device)[:, None]).to(x.dtype), x)
