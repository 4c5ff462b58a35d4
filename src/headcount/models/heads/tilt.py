"""Tilt: every instance carries the label of its bag as a noisy label, and the noise is estimated from the bags.

The loss has three terms. *Instance*: -log P(bag label | x) under the transition matrix (majority/transition.py). *Bag*: the
likelihood of the election (majority/vote_likelihood.py), which carries the information of close elections, where the label says
little about single instances. Where the votes of a bag were counted, its shares take the place of the label in the first term, and
the likelihood of the counts that of the election (majority/vote_counts.py). *Teacher*: pseudo-labels for strongly augmented views.

The transition is estimated (tilt_state.py) on validation bags, which the network has not memorised: one step of EM per
validation, from a low initial share. No instance label is used.
"""

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_bool, check_choice, check_number
from headcount.majority import label_noise, transition
from headcount.majority.ragged_votes import ELECTION_FORMS, election_log_probs
from headcount.majority.transition import Transition
from headcount.majority.vote_counts import count_log_likelihood, posterior_given_votes, vote_likelihood_ratio
from headcount.models.heads.base import Batch, Head, Output, Pass, Teacher, instance_cross_entropy, nll
from headcount.models.heads.tilt_state import PseudoLabels, TransitionEstimate

MAX_WEIGHT = 1_000_000  # of a term; larger values are slips
VALIDATION_BAG_WEIGHT = 0.3  # weight of the bag term in validation
TEMPERATURES = (1.0, 0.7, 1.5, 2.5)  # at which an epoch is validated, if at any but the first


class TiltHead(Head):
    """P(label | x) = sum over classes k of T[k, label] P(k | x), with T estimated; plus an election and a teacher.

    ::

        form        of the transition: "one", "class" or "full" (the fewer the bags, the closer to the simpler form)
        share       a majority share to use instead of an estimated one
        over        "bags" (one pass for all terms) or "instances" (single instances, and a pass over bags for the bag term)
        instance, bag, teach
                    weights of the terms; bag "auto" follows from the estimated shares and from the fraction of the validation
                    labels' entropy that elections explain
        start       the fraction of the training after which the teacher gives targets; from then on the instance term fades to the
                    fraction ``fade`` of its weight
        vote        the fraction of the training after which the bag term counts: at a high learning rate a deep network must know
                    something before it votes
        doubt       the bag term is -log(P + doubt), so that single lost elections do not dominate it
        tempered    an epoch is validated at the temperature that suits it best, so that overconfidence does not hide progress
        networks    the features are those of this many networks side by side (the option of that name of the backbone); each is
                    trained separately, with targets from the next one's teacher, and their predictions are averaged
        threshold, adapt, align, own
                    of the pseudo-labels: see PseudoLabels
        decay       of the teacher's moving average
        piece       the fraction of a bag that each of these is, where large bags were split
        election    the form of the bag term: see Election
    """

    title = "Tilt"
    cites = "forward correction: Patrini et al., CVPR 2017; sets with tilted priors: Lu et al., ICML 2021"
    mean_of_instances = True

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        form: str = "full", share: float | None = None, over: str = "bags",
        instance: float = 1.0, bag: float | str = "auto", teach: float = 1.0,
        start: float = 0.3, fade: float = 1.0, threshold: float = 0.9, adapt: bool = True, align: float = 0.5, decay: float = 0.99,
        election: str = "auto", piece: float = 1.0, own: float = 0.0, vote: float = 0.0, doubt: float = 0.0,
        tempered: bool = False, networks: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        check_choice("form of the tilt", form, transition.TRANSITION_FORMS)
        self.over = check_choice("over", over, ("bags", "instances"))
        self.election = check_choice("election", election, ELECTION_FORMS)
        fractions = {"start": start, "fade": fade, "threshold": threshold, "align": align, "decay": decay, "piece": piece}
        fractions |= {"own": own, "vote": vote, "doubt": doubt, "share": 0.5 if share is None else share}
        for name, value in fractions.items():
            check_number(name, value, 0, 1, integer=False)
        for name, value in {"instance": instance, "teach": teach, "bag": 0 if bag == "auto" else bag}.items():
            check_number(name, value, 0, MAX_WEIGHT, integer=False)
        for name, value in {"adapt": adapt, "tempered": tempered}.items():
            check_bool(name, value)
        if share is not None and counted is None and share * classes <= 1:
            raise HeadcountError(f"share is that of a majority, so above 1/{classes} for {classes} classes, got {share!r}")
        if isinstance(networks, bool) or not isinstance(networks, int) or networks < 1 or dim % networks:
            raise HeadcountError(f"networks is a whole number that divides the {dim} features, got {networks!r}")
        self.instance, self.teach, self.start, self.fade = instance, teach, start, fade
        self.bag = bag if bag == "auto" else float(bag)
        self.vote, self.doubt, self.networks = vote, doubt, networks
        self.temperatures = TEMPERATURES if tempered else (1.0,)
        self.views, self.teacher = 2 if teach else 1, Teacher(decay, start, weak_views=True)
        self.passes = (Pass(over, uses_teacher=bool(teach)),)
        if over == "instances" and bag:
            self.passes += (Pass("bags", uses_teacher=False, start=vote),)
        linear = [nn.Linear(dim // networks, classes) for _ in range(networks)]
        self.classifier = linear[0] if networks == 1 else nn.ModuleList(linear)
        self.estimate = TransitionEstimate(classes, counted, form=form, share=share, doubt=doubt, piece=piece)
        self.pseudo_labels = PseudoLabels(classes, counted, threshold=threshold, adapt=adapt, align=align, own=own)

    def setup(self, segments: Segments, target: Tensor) -> None:
        self.estimate.label_noise = self.label_noise
        self.estimate.reset(transition.effective_bag_size(segments, target), persistent=True)
        self.pseudo_labels.setup(segments.n_bags, len(segments.index) * self.networks)

    def forward(self, h: Tensor, segments: Segments) -> Output:
        parts: dict[str, Tensor] = {}
        if isinstance(self.classifier, nn.ModuleList):
            pairs = zip(self.classifier, h.chunk(self.networks, 1), strict=True)
            parts["networks"] = torch.stack([classifier(part).float() for classifier, part in pairs])  # (networks, N, C)
            z = parts["networks"].softmax(2).mean(0).clamp_min(1e-30).log()
        else:
            z = self.classifier(h).float()
        return Output(z, self.masked_log_softmax(segments.mean(z.softmax(1)).clamp_min(1e-30).log()), parts)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        """() or, in validation with ``tempered``, one loss per temperature."""
        if self.networks == 1 or not self.training:
            return self.network_loss(output.instance, batch, None if teacher is None else teacher.instance)
        teachers = [None] * self.networks if teacher is None else [*teacher.parts["networks"].roll(-1, 0)]
        pairs = zip(output.parts["networks"], teachers, strict=True)
        return torch.stack([self.network_loss(z, batch, teacher_z) for z, teacher_z in pairs]).sum()

    def loss_weight(self, batch: Batch) -> Tensor:
        raise NotImplementedError("its terms are means over different things, and it estimates the transition over all bags")

    def network_loss(self, logits: Tensor, batch: Batch, teacher_logits: Tensor | None) -> Tensor:
        """The three terms for the logits (V n, C) of one network, or in validation for those of all together."""
        s = batch.segments.first_copy(batch.views)  # the first view alone
        z, target = logits[: len(s.index)], batch.target[: s.n_bags]
        known = None if batch.known is None else batch.known[: len(z)]
        rows, weight = s.broadcast(target), s.instance_weights()  # (n, C), (n,)
        self.estimate.update(z.detach(), rows * weight[:, None], target)
        mix, label_prior = label_noise.report(self.estimate.mix, self.estimate.winner_prior, self.label_noise, self.counted)
        votes, vote_ratio, log_p_votes, by_votes = batch.votes, None, None, None
        if votes is not None:
            votes = votes[: s.n_bags]
            vote_ratio = s.broadcast(vote_likelihood_ratio(votes, target, mix, label_prior, self.counted).to(z.dtype))
        done = batch.fraction_done if batch.fraction_done is not None and self.training else z.new_zeros(())
        instance_terms = batch.over == "instances" or self.over == "bags" or not self.training
        loss = z.new_zeros(())
        if instance_terms and self.instance:
            progress = ((done - self.start) / max(1e-6, 1 - self.start)).clamp(0, 1)
            fading = 1 - (1 - self.fade) * progress if self.teach and self.training else 1.0
            log_p = [(z / t).log_softmax(1) for t in ((1.0,) if self.training else self.temperatures)]
            losses = [transition.forward_loss(p, rows, mix, label_prior, weight, vote_ratio=vote_ratio) for p in log_p]
            loss = loss + self.instance * fading * (losses[0] if len(losses) == 1 else torch.stack(losses))
        if batch.over == "bags" and self.bag:
            election = self.masked_log_softmax(election_log_probs(z, s, self.election, self.counted)).float()
            election = label_noise.report_log_probs(election, self.label_noise, self.counted)
            if votes is not None:  # a vote tells as much as an instance, and a bag of many no more than one of few
                log_p_votes = count_log_likelihood(z, s, votes, self.counted) / votes.sum(1).clamp_min(1)
            election_loss = nll(election, target, self.doubt, log_p_votes=log_p_votes, votes=votes)
            if not self.training:
                self.estimate.election_loss.add_(self.estimate.piece * (target.sum(1) > 0).sum() * election_loss.detach())
            # constant in validation, so that all epochs are compared by the same loss
            bag_weight = self.bag_weight() * (done >= self.vote) if self.training else VALIDATION_BAG_WEIGHT
            loss = loss + bag_weight * election_loss
        if instance_terms and known is not None:
            loss = loss + instance_cross_entropy(z, known, weight)
        if teacher_logits is not None and self.training and self.teach and instance_terms:
            p = teacher_logits.softmax(1).unflatten(0, (-1, len(z))).mean(0)  # (n, C), the mean over weak views
            bag = batch.bag[: s.n_bags][s.index.clamp_max(s.n_bags - 1)]
            if votes is not None and vote_ratio is not None:
                whole = batch.over == "bags"
                by_votes = posterior_given_votes(p, s, votes, self.counted) if whole else p * vote_ratio
            label, trusted = self.pseudo_labels(p, rows, weight, mix, label_prior, bag, by_votes)
            losses = -logits[-len(z) :].log_softmax(1).gather(1, label[:, None])[:, 0]  # of the strong view
            loss = loss + self.teach * (done >= self.start) * ((trusted * losses).sum() / weight.sum().clamp_min(1e-12))
        return loss

    def bag_weight(self) -> Tensor | float:
        """High for close elections: a tenth of the odds that a label says nothing about an instance, a fifth at most (measured
        in docs/explanation/tilt.md: more hurts where classes overlap). Times the trust: a network that cannot predict elections
        is not driven by them, unless there is no other term."""
        if isinstance(self.bag, float):
            return self.bag
        signal = transition.signal_strength(self.estimate.mix).clamp_min(1e-3)
        weight = (0.1 * (1 - signal) / signal).clamp_max(0.2)
        return (weight * self.estimate.trust if self.instance else weight).float()

    @property
    def transition(self) -> Transition:
        return Transition(self.estimate.current_mix().float(), self.estimate.winner_prior.float())
