"""The head `tilt` and what it asks of the loop: terms, teacher, views, memory, capture, and learning from majorities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import training_cases
from head_cases import setup
from headcount.bags import Bags, Pool, Segments
from headcount.errors import HeadcountError
from headcount.experiments import run as runs
from headcount.experiments.sanity_checks import run_sanity_check
from headcount.majority import transition
from headcount.majority.ragged_votes import election_log_probs
from headcount.models.heads import Batch, Output, build_head, tilt_state
from headcount.models.network import Model, ModelConfig, build_model
from headcount.models.predictions import predict, predict_instances
from headcount.training import augment as views, config as training_config, loop
from headcount.training.loader import BagLoader
from headcount.training.trainer import Trainer
from training_cases import check_resuming, model_and_bags, train_recipe

C, D = 4, 5
TINY = training_cases.TINY.replace(head="tilt", views="noise", epochs=4)


def head_of(**options):
    torch.manual_seed(0)
    head = build_head("tilt", D, C, options)
    setup(head, [10] * 6)
    return head


def batch_of(views=1, done=0.9, over="bags", known=None, weight=None):
    s = Segments.from_sizes([10] * 6) if over == "bags" else Segments.from_sizes([1] * 60)
    s = s if weight is None else s.with_weight(weight)
    target = torch.eye(C)[torch.arange(6) % C]
    bag = torch.arange(6)
    if over == "instances":
        bag = bag.repeat_interleave(10)
        target = target[bag]
    return Batch(
        segments=s.repeat(views),
        target=target.repeat(views, 1),
        bag=bag.repeat(views),
        position=torch.arange(60).repeat(views),
        known=None if known is None else known.repeat(views),
        epoch=torch.zeros((), dtype=torch.int64),
        fraction_done=torch.tensor(done),
        over=over,
        views=views,
    )


def logits(views=1, seed=0, scale=2.0):
    return scale * torch.randn(60 * views, C, generator=torch.Generator().manual_seed(seed))


def said(z):
    return Output(z, torch.zeros(6, C), {})


# -- the terms --------------------------------------------------------------------------------------------------------------


def test_validation_is_the_forward_loss_and_the_election():
    head, z, batch = head_of().eval(), logits(), batch_of()
    labels = torch.full((C,), 0.25)
    votes = election_log_probs(z, batch.segments).log_softmax(1)
    bags = -0.3 * (batch.target * votes).sum(1).mean().float()
    found = head_of(tempered=True).eval().loss(said(z), batch)
    assert len(found) == 4
    assert float(head.loss(said(z), batch)) == float(found[0])
    for t, one in zip((1.0, 0.7, 1.5, 2.5), found.tolist(), strict=True):
        want = transition.forward_loss(
            (z / t).log_softmax(1), batch.segments.broadcast(batch.target), head.estimate.mix.float(), labels
        )
        assert one == pytest.approx(float(want + bags), rel=1e-5)


def test_an_overconfident_epoch_is_validated_at_a_higher_temperature():
    """Its loss is the best of the readings, over all validation bags at once, not batch by batch."""
    recipe = TINY.replace(options=(("bag", 0.0), ("teach", 0.0), ("tempered", True)), batch_bags=3, selection="mean")
    model, train, valid = model_and_bags(recipe)
    with torch.no_grad():
        model.head.classifier.weight.mul_(40)
    state = Trainer(model, train, valid, recipe.train_config)
    state.eval_model.eval()
    parts = torch.stack([state.valid_step(which) for which in state.valid_loader.in_order()]).double()
    sizes = torch.tensor([len(which) for which in state.valid_loader.in_order()]).double()
    each = (parts * sizes[:, None]).sum(0) / sizes.sum()
    assert each.argmin() == 3, "the coolest reading"
    assert each[3] < each[0]
    assert float(state.valid_loss()) == pytest.approx(float(each[3]), rel=1e-6)


@torch.no_grad()
def test_two_networks_give_each_other_targets_and_are_averaged():
    torch.manual_seed(1)
    head = build_head("tilt", 2 * D, C, {"networks": 2, "bag": 0.0, "adapt": False, "threshold": 0.5, "align": 0.0})
    setup(head, [10] * 6)
    h, batch = torch.randn(120, 2 * D), batch_of(views=2)
    output = head.train()(h, batch.segments)
    one, two = output.parts["networks"]
    torch.testing.assert_close(one, head.classifier[0](h[:, :D]))
    torch.testing.assert_close(output.instance.exp(), (one.softmax(1) + two.softmax(1)) / 2)
    sure, doubtful = 9 * torch.eye(C)[torch.zeros(120, dtype=torch.int64)], torch.zeros(120, C)
    teacher = Output(sure, torch.zeros(12, C), {"networks": torch.stack([sure, doubtful])})
    alone = build_head("tilt", D, C, {"bag": 0.0, "adapt": False, "threshold": 0.5, "align": 0.0}).train()
    setup(alone, [10] * 6)
    untaught = alone.loss(Output(one, torch.zeros(12, C), {}), batch, Output(doubtful, torch.zeros(12, C), {}))
    taught = alone.loss(Output(two, torch.zeros(12, C), {}), batch, Output(sure, torch.zeros(12, C), {}))
    assert float(taught) != pytest.approx(float(alone.loss(Output(two, torch.zeros(12, C), {}), batch)), rel=1e-3)
    assert float(head.loss(output, batch, teacher)) == pytest.approx(float(taught + untaught), rel=1e-5)
    together, plain_batch = output.instance[:60], batch_of()
    labels = transition.label_prior_from_counts(head.estimate.label_counts)
    rows = plain_batch.segments.broadcast(plain_batch.target)
    judged = head.eval().loss(Output(together, torch.zeros(6, C), {}), plain_batch)
    assert float(judged) == pytest.approx(
        float(transition.forward_loss(together, rows, head.estimate.mix.float(), labels)), rel=1e-5
    )
    with pytest.raises(HeadcountError, match="networks is a whole number that divides the 5 features, got 2"):
        build_head("tilt", D, C, {"networks": 2})


def test_two_networks_learn(tmp_path):
    options = {"networks": 2, "bag": 0.0}
    recipe = TINY.replace(options=options, backbone_options={"hidden": 32, "networks": 2}, epochs=12, lr=5e-3)
    record = runs.run(recipe, tmp_path)
    assert record.scores["instance_accuracy"] > 0.5


@pytest.mark.parametrize("over", ["bags", "instances"])
def test_bag_shares_are_not_part_of_the_model(over, tmp_path):
    record = runs.run(TINY.replace(options={"own": 0.5, "start": 0.1, "over": over}, epochs=3), tmp_path)
    assert np.isfinite(record.scores["instance_accuracy"])
    assert not any("bag_shares" in name for name in build_head("tilt", D, C, {"own": 0.5}).state_dict())


def test_each_term_can_be_left_out():
    batch, z = batch_of(views=2), logits(2)
    teacher = said(3 * logits(2, seed=1))

    def loss(**options):
        return float(head_of(**options).train().loss(said(z), batch, teacher))

    off = {"instance": 0, "bag": 0, "teach": 0}
    assert float(head_of(**off).train().loss(said(z[:60]), batch_of())) == 0
    alone = [loss(**{**off, "bag": 1.0, "teach": 1.0}), loss(**{**off, "instance": 1.0, "teach": 1.0})]
    teach = loss(**{**off, "teach": 1.0})
    both = loss(instance=1.0, bag=1.0, teach=1.0)
    assert teach > 0
    assert both == pytest.approx(alone[0] + alone[1] - teach, rel=1e-5)
    assert head_of(teach=0).views == 1
    assert head_of().views == 2


def test_the_teacher_starts_and_the_instance_term_fades():
    z, teacher = logits(2), said(3 * logits(2, seed=1))

    def loss(done, **options):
        return float(head_of(bag=0, **options).train().loss(said(z), batch_of(2, done), teacher))

    assert loss(0.29, start=0.3) == loss(0.0, start=0.3) != loss(0.31, start=0.3)
    instance = loss(0.0, start=0.3)
    taught = loss(0.9, start=0.3, instance=0)
    assert loss(1.0, start=0.3, fade=0.25) == pytest.approx(0.25 * instance + taught, rel=1e-5)
    assert loss(0.65, start=0.3, fade=0.2) == pytest.approx(0.6 * instance + taught, rel=1e-5)


def test_pseudo_labels_against_a_loop():
    """The teacher's mean over its views, the lopsidedness divided out, the bag's label in the posterior, a bar per class."""
    head = head_of(instance=0, bag=0, align=0.7, threshold=0.6, start=0.0).train()
    head.pseudo_labels.mean_prediction.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    head.pseudo_labels.class_confidence.copy_(torch.tensor([0.9, 0.8, 0.7, 0.6]))
    head.pseudo_labels.n_batches.fill_(500)
    z, taught, batch = logits(2), logits(2, seed=1), batch_of(2)
    loss = float(head.loss(said(z), batch, said(taught)))
    mix = head.estimate.mix.numpy()
    prior = transition.label_prior_from_counts(head.estimate.label_counts).numpy() @ mix
    p = taught.softmax(1).numpy().reshape(2, 60, C).mean(0)
    weight = np.ones(60)
    bar = 0.99 * np.array([0.9, 0.8, 0.7, 0.6])
    choice, top = np.zeros(60, int), np.zeros(60)
    for i in range(60):
        label = (i // 10) % C
        q = [p[i, k] / ([0.4, 0.3, 0.2, 0.1][k] / prior[k]) ** 0.7 * mix[label, k] / prior[k] for k in range(C)]
        choice[i], top[i] = int(np.argmax(q)), max(q) / sum(q)
    for k in range(C):
        bar[k] += 0.01 * (top[choice == k].mean() if (choice == k).any() else bar[k] / 0.99)
    bar = 0.6 * bar / bar.max()
    ce = -z[60:].log_softmax(1).numpy()[np.arange(60), choice]
    trusted = top >= bar[choice]
    assert 5 < trusted.sum() < 60
    assert loss == pytest.approx((weight * trusted * ce).sum() / 60, rel=1e-4)
    np.testing.assert_allclose(
        head.pseudo_labels.mean_prediction, 0.99 * np.array([0.4, 0.3, 0.2, 0.1]) + 0.01 * p.mean(0), rtol=1e-5
    )


def test_running_means_start_with_the_first_batch():
    """What the teacher said before any lesson was a guess of ours: it is forgotten with the first, then lessons weigh alike."""
    head = head_of(instance=0, bag=0, start=0.0).train()
    seen = []
    for seed in range(3):
        taught = logits(2, seed=seed)
        head.loss(said(logits(2)), batch_of(2), said(taught))
        seen.append(taught.softmax(1).mean(0))
        torch.testing.assert_close(head.pseudo_labels.mean_prediction, torch.stack(seen).mean(0))
    assert (head.pseudo_labels.class_confidence < 1).all()


def test_ragged_bags_with_views_and_removal():
    """Before teaching begins only the first view counts, whatever stands in the second."""
    sizes, gone = [3, 12, 1, 20, 7, 17], torch.arange(60) % 7 == 2
    s = Segments.from_sizes(sizes).without(gone)
    one = Batch(s, torch.eye(C)[torch.arange(6) % C], torch.arange(6), torch.arange(60), fraction_done=torch.tensor(0.0))
    two = Batch(
        s.repeat(2),
        one.target.repeat(2, 1),
        one.bag.repeat(2),
        one.position.repeat(2),
        fraction_done=one.fraction_done,
        views=2,
    )
    z = logits(2)
    losses = [
        float(head_of(bag=1.0).train().loss(said(z[: 60 * v]), batch, said(logits(v, seed=1))))
        for v, batch in ((1, one), (2, two))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_known_labels_supervise():
    known = torch.full((60,), -1)
    known[[3, 30]] = torch.tensor([1, 2])
    z = logits()
    without, told = (float(head_of(teach=0).train().loss(said(z), batch_of(known=k))) for k in (None, known))
    ce = -z.log_softmax(1)[[3, 30], [1, 2]].mean()
    assert told == pytest.approx(without + float(ce), rel=1e-5)


def test_passes_follow_from_the_options():
    def shape(**o):
        return [(p.over, p.uses_teacher) for p in head_of(**o).passes]

    assert shape() == [("bags", True)]
    assert shape(teach=0) == [("bags", False)]
    assert shape(over="instances") == [("instances", True), ("bags", False)]
    assert shape(over="instances", bag=0) == [("instances", True)]
    head, z = head_of(over="instances", bag=1.0, teach=0).train(), logits()
    loose, whole = (float(head.loss(said(z), batch_of(over=over))) for over in ("instances", "bags"))
    both = head_of(bag=1.0, teach=0).train()
    assert loose + whole == pytest.approx(float(both.loss(said(z), batch_of())), rel=1e-5)


def test_weight_two_counts_twice():
    twice = torch.ones(60)
    twice[:7] = 2
    rows = torch.arange(60).repeat_interleave(twice.long())
    z = logits()
    a = head_of(bag=0, teach=0).train().loss(said(z), batch_of(weight=twice))
    sizes = torch.tensor([17, 10, 10, 10, 10, 10])
    twin = Batch(Segments.from_sizes(sizes), torch.eye(C)[torch.arange(6) % C], torch.arange(6), torch.arange(67))
    b = head_of(bag=0, teach=0).train().loss(said(z[rows]), twin)
    assert float(a) == pytest.approx(float(b), rel=1e-5)


@pytest.mark.parametrize("weight", [0.1, 1e-6])
def test_weights_that_are_alike_change_no_frequencies(weight):
    """Every label had been given one instance beforehand: as many as a million of these."""
    z, rare = logits(), torch.eye(C)[torch.tensor([0, 0, 0, 0, 1, 2])]
    found = []
    for given in (None, torch.full((60,), weight)):
        head, batch = head_of(bag=0, teach=0), batch_of(weight=given)
        batch = Batch(batch.segments, rare, batch.bag, batch.position, fraction_done=batch.fraction_done)
        losses = [float(head.train(mode).loss(said(z), batch)) for mode in (True, False, True)]
        found.append((torch.tensor(losses), head.transition.label_prior, head.transition.mix))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_bag_weight_follows_the_shares():
    head, found = head_of(), []
    head.estimate.trust.fill_(1)
    for share in (0.28, 0.4, 0.6, 0.9):
        head.estimate.mix.copy_(transition.mix_from_shares(torch.tensor(share, dtype=torch.float64), C))
        found.append(float(head.bag_weight()))
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(0.2)
    assert found[-1] < 0.02
    assert head_of(bag=0.7).bag_weight() == 0.7


def settled_trust(z, batch, parts=1, **options):
    """The trust in elections after validation on this batch, taken in so many parts, and one training batch."""
    head = head_of(**options).eval()
    for bags in torch.arange(6).tensor_split(parts):
        rows = torch.cat([torch.arange(60).reshape(6, 10)[b] for b in bags])
        part = Segments.from_sizes([10] * len(bags)).without(batch.segments.removed[rows])
        head.loss(said(z[rows]), Batch(part, batch.target[bags], bags, rows))
    before = float(head.estimate.trust)
    head.train().loss(said(z), batch_of(done=0.0))
    assert before == 0, "validation moves nothing"
    assert not head.estimate.election_loss.any()
    return head


def often(doubt=0.0):
    """What is left open of the six labels 0, 1, 2, ... to who knows how frequent they are."""
    count = np.bincount(np.arange(6) % C, minlength=C) + 1e-3 * 6 / C
    return -np.log((count[np.arange(6) % C] / count.sum() + doubt) / (1 + doubt))


def test_the_trust_is_the_explained_fraction():
    """The trust against a loop: the part of the labels' surprise that elections take away on validation bags."""
    batch = batch_of()
    own = batch.segments.broadcast(batch.target)
    assert float(head_of().bag_weight()) == 0, "before any validation nothing is known"
    for scale in (0.0, -3.0):  # who knows nothing, and who knows it all wrong
        head = settled_trust(scale * own, batch)
        assert float(head.bag_weight()) == pytest.approx(0, abs=1e-6)
    assert float(settled_trust(9 * own, batch).estimate.trust) > 0.99
    z = 0.3 * own + logits(scale=0.3)
    for doubt in (0.0, 0.2):
        p = election_log_probs(z, batch.segments).softmax(1)
        surprise = [-math.log((float(p[b, b % C]) + doubt) / (1 + doubt)) for b in range(6)]
        head = settled_trust(z, batch, doubt=doubt)
        assert 0.2 < float(head.estimate.trust) < 0.9
        assert float(head.estimate.trust) == pytest.approx(1 - np.mean(surprise) / np.mean(often(doubt)), rel=1e-5)
        full = float(head.estimate.trust) * min(0.2, 0.1 * (1 / float(transition.signal_strength(head.estimate.mix)) - 1))
        assert float(head.bag_weight()) == pytest.approx(full, rel=1e-5)
        assert float(settled_trust(z, batch, parts=4, doubt=doubt).estimate.trust) == pytest.approx(
            float(head.estimate.trust), rel=1e-6
        )
    head.loss(said(z), batch)
    head.eval().loss(said(z), Batch(batch.segments, torch.zeros(6, C), batch.bag, batch.position))
    kept = float(head.estimate.trust)
    head.train().loss(said(z), batch)
    assert float(head.estimate.trust) == kept > 0, "validation bags without labels say nothing of it"
    alone = settled_trust(0 * z, batch, instance=0.0)
    assert float(alone.bag_weight()) > 0.1, "with no other term to begin with, it begins by itself"


@pytest.mark.parametrize("doubt", [0.0, 0.1, 0.5])
def test_an_uninformed_network_is_not_trusted(doubt):
    """Neither where the bags of one label are larger, nor with a doubt."""
    sizes, label = [20] * 8 + [2] * 8, torch.arange(16) // 8
    n = sum(sizes)
    batch = Batch(Segments.from_sizes(sizes), torch.eye(2)[label], torch.arange(16), torch.arange(n))
    head = build_head("tilt", D, 2, {"doubt": doubt})
    setup(head, sizes)
    for train in (True, False):
        head.train(train).loss(said(torch.zeros(n, 2)), batch)
    assert float(head.estimate.explained_fraction()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("size", "options"), [(1, {}), (4, {"share": 1.0})])
def test_certain_labels_and_a_class_that_cannot_win(size, options):
    """Where a label is surely an instance's class, and a class has no label, nothing is divided by zero."""
    counted = torch.tensor([True, True, False])
    head = build_head("tilt", D, 3, options, counted)
    setup(head, [size] * 12)
    target = torch.eye(3)[torch.arange(12) % 2]
    batch = Batch(Segments.from_sizes([size] * 12), target, torch.arange(12), torch.arange(12 * size))
    z = torch.randn(12 * size, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for train in (False, True, False, True):
        loss = head.train(train).loss(said(z), batch)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(torch.autograd.grad(loss, z)[0]).all()
    assert torch.isfinite(head.estimate.mix).all()


def test_the_trust_ignores_unlabelled_bags_and_removed_instances():
    batch = batch_of()
    z = 0.3 * batch.segments.broadcast(batch.target) + logits(scale=0.3)
    few = Batch(batch.segments, batch.target * (torch.arange(6) < 4)[:, None], batch.bag, batch.position)
    loud = torch.where(torch.arange(60)[:, None] < 40, z, 9 * logits(seed=3))
    assert float(settled_trust(loud, few).estimate.trust) == pytest.approx(
        float(settled_trust(z, few).estimate.trust), rel=1e-6
    )
    assert float(settled_trust(z, few).estimate.trust) != pytest.approx(float(settled_trust(z, batch).estimate.trust), rel=1e-3)
    gone = torch.arange(60) % 10 == 3
    less = Batch(batch.segments.without(gone), batch.target, batch.bag, batch.position)
    loud = torch.where(gone[:, None], 9 * logits(seed=3), z)
    assert float(settled_trust(loud, less).estimate.trust) == pytest.approx(
        float(settled_trust(z, less).estimate.trust), rel=1e-6
    )


def test_two_networks_are_trusted_together():
    torch.manual_seed(0)
    head = build_head("tilt", 2 * D, C, {"networks": 2, "teach": 0, "instance": 0.0})
    setup(head, [10] * 6)
    batch = batch_of()
    each = torch.stack([batch.segments.broadcast(batch.target) * scale for scale in (1.0, 3.0)])
    both = Output(each.softmax(2).mean(0).log(), torch.zeros(6, C), {"networks": each})
    head.eval().loss(both, batch)
    missed = float(head.estimate.election_loss)
    head.instance = 1.0
    head.train().loss(both, batch)
    assert float(head.estimate.trust) == pytest.approx(1 - missed / often().sum(), rel=1e-6)
    assert 0 < float(head.estimate.trust) < 1


def test_the_trust_is_checkpointed_but_not_part_of_the_model():
    """Models saved before there was any still load; a training that is taken up again goes on with the same."""
    recipe = TINY.replace(epochs=6, lr=5e-3, bag_size=16)
    model, train, valid = model_and_bags(recipe)
    memory = {"head.estimate.election_loss", "head.estimate.trust"}
    assert not memory & model.state_dict().keys()
    state = Trainer(model, train, valid, recipe.train_config)
    assert memory <= state.model.state_dict().keys()
    assert memory <= state.teacher.state_dict().keys()
    for epoch in range(6):
        state.train_epoch(epoch)
        state.valid_loss()
    assert torch.equal(state.head.estimate.election_loss, state.teacher.head.estimate.election_loss)
    assert float(state.head.estimate.election_loss) > 0
    assert 0 < float(state.head.estimate.trust) <= 1


# -- the estimate -------------------------------------------------------------------------------------------------------------


def test_unlabelled_single_instances_do_not_raise_the_minimal_share():
    pool = Pool(np.random.default_rng(0).normal(size=(116, 4)).astype(np.float32))
    bags = Bags.of(pool, sizes=[16] * 4 + [1] * 52, labels=[0, 1, 2, 0] + [-1] * 52, classes=3)
    design = ModelConfig((4,), bags.classes, "linear", head="tilt")
    state = Trainer(Model(design), bags, bags, TINY.replace(backbone="linear").train_config)
    assert float(state.head.estimate.min_share) == transition.random_majority_share(16, 3)
    assert float(state.head.estimate.mix[0, 0]) == pytest.approx(transition.initial_share(16, 3))


def test_the_m_step_is_made_when_training_continues():
    """Validation fills the heap and moves nothing; the next training batch lets the mix settle, once."""
    head, z, batch = head_of(teach=0), logits(scale=4.0), batch_of()
    before = head.estimate.mix.clone()
    head.eval().loss(said(z), batch)
    head.loss(said(z), batch)
    assert torch.equal(head.estimate.mix, before)
    assert float(head.estimate.bag_label_counts.sum()) == 12
    want = transition.m_step(head.estimate.expected_counts, head.estimate.bag_label_counts, "full", head.estimate.min_share)
    torch.testing.assert_close(head.transition.mix, want.float())
    head.train().loss(said(z), batch)
    torch.testing.assert_close(head.estimate.mix, want)
    assert not head.estimate.expected_counts.any()
    head.loss(said(z), batch)
    torch.testing.assert_close(head.estimate.mix, want)


def test_a_label_that_never_occurs():
    """Every label had been given one instance before any was seen: the condition was 2,022."""
    head, batch = head_of(teach=0), batch_of()
    three = Batch(
        batch.segments, torch.eye(C)[torch.arange(6) % 3], batch.bag, batch.position, fraction_done=batch.fraction_done
    )
    for mode in (True, False, True):
        head.train(mode).loss(said(logits()), three)
    assert head.transition.condition_number == math.inf
    head.loss(said(logits()), batch)
    assert head.transition.condition_number < math.inf


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"election": "exakt"}, "no election 'exakt'; there are auto, exact"),
        ({"adapt": "no"}, "adapt is true or false, got 'no'"),
        ({"tempered": 1}, "tempered is true or false, got 1"),
        ({"share": 0.25}, "share is that of a majority, so above 1/4 for 4 classes, got 0.25"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(HeadcountError, match=words):
        build_head("tilt", D, C, options)


def test_with_a_background_the_share_may_be_small():
    counted = torch.tensor([True, True, True, False])
    assert float(build_head("tilt", D, C, {"share": 0.2}, counted).estimate.mix[0, 0]) == pytest.approx(0.2)


def test_a_given_share_stays():
    head = head_of(share=0.55, teach=0)
    for mode in (False, True, True):
        head.train(mode).loss(said(logits(scale=4.0)), batch_of())
    torch.testing.assert_close(head.transition.share, torch.full((C,), 0.55))


@pytest.mark.parametrize(("scenario", "least"), [("various", 0.85), ("small", 0.7), ("large", 0.9)])
def test_it_learns_instances_and_shares(scenario, least):
    """From majority labels alone, digits: instances, and the expected majority share (truth is looked at afterwards)."""
    recipe = TINY.replace(scenario=scenario, bag_size=24, train_bags=120, valid_bags=50, test_bags=30, epochs=25, lr=3e-3)
    recipe = recipe.replace(batch_bags=16, options={} if scenario == "small" else {"bag": 0})
    bags = runs.make_bags(recipe)
    fitted = train_recipe(recipe)
    assert (predict(fitted.model, bags["test"]).instance.argmax(1) == bags["test"].truth).float().mean() > least
    true = (bags["train"].truth == bags["train"].label[bags["train"].bag]).float().mean()
    assert abs(float(fitted.model.head.transition.share.mean()) - float(true)) < 0.06


def test_probes():
    """A class always second, and one that never wins: the traps of experiments/sanity_checks.py."""
    for name, least in (("present", 0.95), ("never", 0.93)):
        assert run_sanity_check(name, "tilt", {"start": 0.5, "bag": 0}, epochs=30, seeds=1).instance_accuracy > least


def test_two_classes_and_ragged_bags_with_everything():
    """Weights, removal, unlabelled bags, background, known labels: nothing breaks, and the loss falls."""
    rng = np.random.default_rng(0)
    pool = Pool(rng.normal(size=(80, 4)).astype(np.float32))
    sizes, labels = [5, 9, 2, 14, 1, 29, 20], [0, 1, 0, 0, -1, 1, 1]
    known = np.full(80, -1)
    known[:3] = 2
    bags = Bags.of(pool, sizes=sizes, labels=labels, classes=3, weight=rng.integers(1, 3, 80), known=known)
    bags = bags.without(np.arange(80) % 11 == 3)
    for counted in (None, [True, True, False]):
        made = Bags(**{**vars(bags), "counted": None if counted is None else torch.tensor(counted)})
        for over in ("bags", "instances"):
            options = {"over": over, "start": 0.2, "threshold": 0.5}
            recipe = TINY.replace(backbone="linear", epochs=12, lr=0.02, batch_bags=4, options=options)
            design = ModelConfig((4,), made.classes, "linear", head="tilt", options=recipe.options)
            design = design if counted is None else ModelConfig(**{**vars(design), "counted": tuple(counted)})
            curve = loop.train(Model(design), made, made.take([0, 1, 4]), recipe.train_config).progress.curve
            assert np.isfinite(curve).all()
            assert curve[-1][1] < curve[0][1]


# -- the loop -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"options": {"over": "instances", "bag": 0.5}, "batch_instances": 50, "views": "digit"}],
    ids=["bags", "instances"],
)
def test_resumes_bit_for_bit(changes, tmp_path):
    recipe = TINY.replace(optimizer="sgd", lr=0.05, schedule="cosine", warmup=0.1, weight_decay=1e-3, decay="weights")
    check_resuming(recipe.replace(epochs=5, **changes), tmp_path)


@pytest.mark.parametrize("extras", ["plain", "removed", "weighted", "counted"])
@pytest.mark.parametrize("options", [{}, {"over": "instances", "own": 0.5}, {"share": 0.4, "form": "one", "adapt": False}])
def test_a_step_reads_nothing_from_the_device(options, extras):
    """Tensors without numbers in them refuse every question but their shape: so a step can be captured."""
    counted = torch.tensor([True, False, True, True]) if extras == "counted" else None
    head = build_head("tilt", D, C, {"election": "conditioned", **options}, counted)
    setup(head, [1] * 42)
    with FakeTensorMode() as mode:
        for module in head.modules():
            module._parameters.update({k: nn.Parameter(mode.from_tensor(p)) for k, p in module._parameters.items()})
            module._buffers.update({k: b if b is None else mode.from_tensor(b) for k, b in module._buffers.items()})
        for one in head.passes:
            b, size = (3, 7) if one.over == "bags" else (21, 1)
            s = Segments(torch.arange(21) // size, b, size).with_weight(torch.rand(21) if extras == "weighted" else None)
            s = s.without(torch.rand(21) < 0.3) if extras == "removed" else s
            v = head.views if one.uses_teacher else 1
            batch = Batch(
                *(s.repeat(v), torch.rand(b * v, C), torch.arange(b * v), torch.arange(21 * v), torch.arange(21 * v) % C),
                *(torch.zeros((), dtype=torch.int64), torch.rand(()), one.over, v),
            )
            output = head(torch.randn(21 * v, D, requires_grad=True), batch.segments)
            head.train().loss(output, batch, output if one.uses_teacher else None).backward()
            head.eval().loss(head(torch.randn(21, D), s), Batch(s, torch.rand(b, C), batch.bag[:b], batch.position[:21]))


@pytest.mark.parametrize("kind", views.VIEWS)
def test_views_read_nothing_from_the_device(kind):
    with FakeTensorMode():
        x = torch.randn(6, 10) if kind in ("noise", "feature") else torch.randn(6, 3, 16, 16)
        assert views.apply_views(x, kind, 3).shape == (18, *x.shape[1:])


def test_only_weights_decay():
    recipe = TINY.replace(optimizer="sgd", lr=0.1, weight_decay=0.1, backbone="resnet18", backbone_options={"width": 4})
    model, train, valid = model_and_bags(recipe.replace(backbone="mlp", backbone_options={}))
    for decay, kinds in (("all", {0.1}), ("weights", {0.1, 0.0})):
        state = Trainer(model, train, valid, recipe.replace(decay=decay, backbone="mlp", backbone_options={}).train_config)
        groups = state.optimizers[""].param_groups
        assert {g["weight_decay"] for g in groups} == kinds
        assert sum(len(g["params"]) for g in groups) == len(list(state.model.parameters()))
        for g in groups:
            if len(groups) > 1:
                assert all((p.ndim > 1) == (g["weight_decay"] > 0) for p in g["params"])


def test_batches_of_instances():
    _, train, _ = model_and_bags(TINY)
    feed = BagLoader(train, 8, batch_instances=50)
    assert feed.n_steps("instances") == 5
    assert [len(w) for w in feed.shuffled("instances", 0, 0)] == [50, 50, 50, 50, 40]
    assert feed.n_steps("bags") == BagLoader(train, 8).n_steps("bags") == 4
    assert BagLoader(train, 8).batch_instances == 64


def test_the_fraction_done():
    state = Trainer(*model_and_bags(TINY), TINY.train_config)
    heard = []
    inner = state.head.loss
    state.head.loss = lambda output, batch, teacher: (heard.append(float(batch.fraction_done)), inner(output, batch, teacher))[
        1
    ]
    for epoch in range(TINY.epochs):
        state.train_epoch(epoch)
    np.testing.assert_allclose(heard, np.arange(16) / 16)


@pytest.mark.parametrize(("steps", "rate"), [(0.0, 0.9), (90.0, 0.09), (5000.0, 0.01)])
def test_the_rate_of_the_teacher(steps, rate):
    teacher, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with torch.no_grad():
        teacher.weight.fill_(0)
        model.weight.fill_(1)
    training_config.MovingAverage(teacher, model, 0.99).update(torch.tensor(steps))
    assert teacher.weight.item() == pytest.approx(rate)


def test_the_teachers_batch_norm_moves_with_its_weights():
    """Statistics of today's pupil under weights of yesterday's would be nobody's; counters are simply the pupil's."""
    teacher, pupil = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        pupil.weight.fill_(3)
        pupil.running_mean.fill_(10)
        pupil.running_var.fill_(5)
        pupil.num_batches_tracked.fill_(7)
    training_config.MovingAverage(teacher, pupil, 0.99).update(torch.tensor(26.0))  # 9 / 36: a quarter of the way
    assert teacher.weight.tolist() == [1.5, 1.5]
    assert teacher.running_mean.tolist() == [2.5, 2.5]
    assert teacher.running_var.tolist() == [2.0, 2.0]
    assert int(teacher.num_batches_tracked) == 7
    assert pupil.running_mean.tolist() == [10.0, 10.0]


def test_the_bag_term_starts_late():
    head = head_of(bag=0.5, instance=0.0, teach=0.0, vote=0.4).train()
    z = logits()
    early, late = (head.loss(Output(z, z, {}), batch_of(done=d)) for d in (0.39, 0.4))
    assert float(early) == 0
    assert float(late) > 0
    by_pass = head_of(over="instances", vote=0.4, start=0.2)
    recipe = TINY.replace(epochs=10, options=(("over", "instances"), ("vote", 0.4), ("start", 0.2)))
    state = Trainer(*model_and_bags(recipe), recipe.train_config)
    assert by_pass.passes[1].start == 0.4
    seen = [tuple((one.over, one.uses_teacher) for one in state.passes(epoch)) for epoch in range(10)]
    assert seen[:2] == [(("instances", False),)] * 2
    assert seen[2:4] == [(("instances", True),)] * 2
    assert seen[4:] == [(("instances", True), ("bags", False))] * 6


def test_the_fraction_done_with_epochs_of_different_length():
    recipe = TINY.replace(epochs=4, options=(("over", "instances"), ("vote", 0.5), ("start", 0.0)))
    state = Trainer(*model_and_bags(recipe), recipe.train_config)
    heard = []
    for one, step in list(state.train_steps.items()):
        state.train_steps[one] = lambda which, step=step: (heard.append(float(state.train_loader.fraction_done)), step(which))[
            1
        ]
    for epoch in range(4):
        before = len(heard)
        state.train_epoch(epoch)
        steps = len(heard) - before
        np.testing.assert_allclose(heard[before:], (epoch + np.arange(steps) / steps) / 4, rtol=1e-6)


def test_lost_elections_have_smaller_gradients_with_doubt():
    def slope(scale, doubt):
        z = (scale * torch.eye(C)[torch.ones(60, dtype=torch.int64)]).requires_grad_()  # all for class 1
        head_of(bag=1.0, instance=0.0, teach=0.0, doubt=doubt).train().loss(Output(z, z, {}), batch_of()).backward()
        return float(z.grad.abs().sum())

    assert slope(30.0, 0.0) > slope(1.0, 0.0), "the more it is lost, the harder it pulls"
    assert slope(30.0, 0.01) < 1e-3 * slope(1.0, 0.01)


def test_the_teacher_gets_weak_views_and_both_share_the_counts():
    recipe = TINY.replace(views="feature")
    state = Trainer(*model_and_bags(recipe.replace(views="none")), recipe.train_config)
    asked = []
    inner = state.encode
    state.encode = lambda *given: (asked.append(given[3:]), inner(*given))[1]
    state.train_epoch(0)
    assert asked
    assert set(asked) == {("feature", 1, False)}, "before it is taught one view is enough"
    state.train_epoch(3)
    assert ("feature", 2, False) in asked
    assert ("feature", 2, True) in asked
    assert not state.head.estimate.expected_counts.any()
    state.valid_loss()
    assert state.teacher.head.estimate.expected_counts.any()
    assert torch.equal(state.head.estimate.expected_counts, state.teacher.head.estimate.expected_counts)


# -- views ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "digit", "tissue"])
def test_strong_views_differ_from_weak_ones_and_stay_images(kind):
    torch.manual_seed(0)
    x = torch.randn(64, 3, 16, 16)
    weak, strong = views.apply_views(x, kind, 2).chunk(2)
    for seen in (weak, strong):
        assert seen.isfinite().all()
        assert seen.shape == x.shape
        assert seen.abs().max() < 3 * x.abs().max()
    assert (strong == 0).flatten(1).float().mean() > 0.05, "cut out"
    twice = views.apply_views(x, kind, 2, weak=True)
    assert not (twice == 0).any()


def test_no_flips_for_digits_and_all_rotations_for_tissue():
    torch.manual_seed(0)
    ramp = torch.linspace(-1, 1, 16).expand(400, 1, 16, 16)  # brighter to the right
    sides = {k: views.VIEWS[k][0](ramp).diff(dim=3).mean((1, 2, 3)) for k in ("image", "digit", "tissue")}
    assert (sides["digit"] > 0).all()
    assert 0.4 < float((sides["image"] < 0).float().mean()) < 0.6
    assert 0.15 < float((sides["tissue"] < -0.05).float().mean()) < 0.35
    turned = views.dihedral(ramp)
    assert {tuple(t.flatten().tolist()) for t in turned} == {
        tuple(m.rot90(r, (1, 2)).flatten().tolist()) for m in (ramp[0],) for r in range(4)
    }
    assert (views.strong(ramp).diff(dim=3).mean((1, 2, 3)) > -0.02).float().mean() > 0.9, "turned a little, never over"


def test_affine_and_colour_keep_the_middle():
    torch.manual_seed(0)
    even = torch.full((50, 3, 12, 12), 0.7)
    torch.testing.assert_close(views.affine(even), even, rtol=1e-4, atol=1e-4)
    shifts = views.colour(even) - 0.7
    assert shifts.flatten(1).std(1).max() < 1e-5, "an even image stays even"
    assert 0.15 < float(shifts.mean((1, 2, 3)).std()) < 0.3
    cut = (views.cutout(even) == 0).float().mean((1, 2, 3))
    assert 0.05 < float(cut.min()) <= float(cut.max()) <= 0.26


def test_features_are_masked_and_blended():
    torch.manual_seed(0)
    x = torch.ones(200, 30)
    assert abs(float((views.mask(x) == 0).float().mean()) - 0.2) < 0.02
    x = torch.eye(40) * 10
    part = views.mixup(x)
    torch.testing.assert_close(part.sum(1), torch.full((40,), 10.0))
    assert (part.diagonal() >= 8).all()
    assert (part.argmax(1) == torch.arange(40)).all()


# -- mirror --------------------------------------------------------------------------------------------------------------------


def test_predictions_are_averaged_over_the_mirror_image(tmp_path):
    rng = np.random.default_rng(0)
    pool = Pool(rng.integers(0, 255, (12, 8, 8, 3)).astype(np.uint8))
    flipped = Pool(pool.take(torch.arange(12)).flip(2).numpy().copy())
    bags, other = (Bags.of(p, sizes=[5, 7], labels=[0, 1], classes=2) for p in (pool, flipped))
    torch.manual_seed(0)
    design = ModelConfig((8, 8, 3), ("a", "b"), "mlp", head="tilt", mirror=True)
    model, single = Model(design), Model(ModelConfig(**{**vars(design), "mirror": False}))
    single.load_state_dict(model.state_dict())
    both = predict(model, bags)
    a, b = predict(single, bags), predict(single, other)
    torch.testing.assert_close(both.instance.softmax(1), (a.instance.softmax(1) + b.instance.softmax(1)) / 2)
    torch.testing.assert_close(both.bag.exp(), (a.bag.exp() + b.bag.exp()) / 2)
    torch.testing.assert_close(predict(model, other).instance, both.instance)
    torch.testing.assert_close(predict_instances(model, pool.take(torch.arange(12))), both.instance)
    model.save(tmp_path)
    assert Model.load(tmp_path).config.mirror
    torch.testing.assert_close(predict(Model.load(tmp_path), bags).instance, both.instance)
    with pytest.raises(HeadcountError, match="mirror is for images"):
        ModelConfig((8,), ("a", "b"), "mlp", mirror=True)
    assert build_model(TINY.replace(mirror=True).model_config(bags), bags).config.mirror
    assert math.isclose(float(both.bag.exp().sum(1).mean()), 1, rel_tol=1e-5)


# -- the record ----------------------------------------------------------------------------------------------------------------


def test_the_record_has_the_estimate_and_the_truth(tmp_path):
    body = runs.run(TINY.replace(epochs=2), tmp_path, device="cpu").data["tilt"]
    bags = runs.make_bags(TINY)["train"]
    own = [(bags.truth == bags.label[bags.bag])[bags.label[bags.bag] == c].float().mean() for c in range(10)]
    np.testing.assert_allclose(body["true_share"], np.nan_to_num(own), atol=1e-4)
    assert len(body["share"]) == 10
    assert 0 <= body["shares_inside_unlabelled"] <= 1
    assert 0 <= body["shares_inside"] <= 1
    assert body["shares_error_in_context"] <= body["shares_error_unlabelled"] + 0.01
    assert 0 < body["context_instance_accuracy"] <= 1
    assert isinstance(body["context_helps"], bool)


def test_a_loaded_model_has_the_estimate(tmp_path):
    recipe = TINY.replace(bag_size=16, epochs=3)
    model = train_recipe(recipe).model
    model.save(tmp_path)
    again = Model.load(tmp_path)
    assert torch.equal(again.head.transition.mix, model.head.transition.mix)
    assert float(again.head.estimate.min_share) == pytest.approx(transition.random_majority_share(16, 10))


def posterior(head, log_p, rows, weight, labels, bag):
    return head.pseudo_labels.posterior(log_p, rows, weight, head.estimate.mix, labels, bag)


def test_bag_shares_enter_the_posterior():
    """A bag of half its label and half one other class: lessons find the other, and the posterior listens to that."""
    torch.manual_seed(0)
    plain, own = head_of(own=0.0, start=0.0, align=0.0).train(), head_of(own=0.8, start=0.0, align=0.0).train()
    batch = batch_of(2)
    labels = transition.label_prior_from_counts(own.estimate.label_counts)
    log_p = torch.full((60, C), 1 / C).log()
    rows = Segments.from_sizes([10] * 6).broadcast(batch.target[:6])
    bag = torch.arange(6).repeat_interleave(10)
    weight = torch.ones(60)
    same = posterior(own, log_p, rows, weight, labels, bag)
    torch.testing.assert_close(same, posterior(plain, log_p, rows, weight, labels, bag))
    told = torch.zeros(60, C)
    told[:, 3] = 4.0
    told[bag != 0] = 0.0
    for _ in range(60):
        posterior(own, (log_p + told).log_softmax(1), rows, weight, labels, bag)
    assert own.pseudo_labels.bag_shares[0, 3] > own.pseudo_labels.bag_shares[1, 3] + 0.1
    assert own.pseudo_labels.bag_shares[0].argmax() == rows[0].argmax() or torch.isclose(
        own.pseudo_labels.bag_shares[0].max(), own.pseudo_labels.bag_shares[0, 3], atol=1e-3
    )
    heard = posterior(own, log_p, rows, weight, labels, bag)
    assert heard[0, 3] > same[0, 3] + 0.05
    torch.testing.assert_close(own.pseudo_labels.bag_shares.sum(1), torch.ones(6), atol=1e-4, rtol=0)
    gone = own.pseudo_labels.bag_shares.clone()
    posterior(own, log_p + told, rows, torch.zeros(60), labels, bag)
    torch.testing.assert_close(own.pseudo_labels.bag_shares, gone)  # who does not count teaches nothing


def test_bag_shares_respect_weights():
    """A lesson of weight two is two lessons of one."""
    torch.manual_seed(0)
    twice, heavy = (head_of(own=0.8, start=0.0, align=0.0).train() for _ in range(2))
    log_p, labels = torch.randn(6, C).log_softmax(1), transition.label_prior_from_counts(twice.estimate.label_counts)
    rows, bag = torch.eye(C)[[0] * 6], torch.zeros(6, dtype=torch.long)
    again = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5])
    posterior(twice, log_p[again], rows[again], torch.ones(8), labels, bag[again])
    posterior(heavy, log_p, rows, torch.tensor([1.0, 1, 1, 1, 1, 3]), labels, bag)
    usual = twice.estimate.mix[0].float()
    moved = [
        (h.pseudo_labels.bag_shares[0] - usual) / (1 - (1 - h.pseudo_labels.ema_rate) ** n) for h, n in ((twice, 8), (heavy, 6))
    ]
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=1e-4)


def test_sums_by_bag_are_the_same_both_ways():
    x, bag = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) * 3 % 7
    product = tilt_state.sum_by_bag(x, bag, 8)
    torch.testing.assert_close(product, tilt_state.sum_by_bag(x, bag, 8, max_pairs=100))
    torch.testing.assert_close(product[2], x[bag == 2].sum(0))
    assert not product[7].any()


def bag_shares_after(sizes, removed=(), rounds=1, enrolled=None):
    """What lessons found in bags of these sizes."""
    head = build_head("tilt", 4, 3, {"own": 0.5, "start": 0.0, "threshold": 0.0, "bag": 0.0}).train()
    count, n = len(sizes), sum(sizes)
    setup(head, enrolled or sizes)
    gone = torch.zeros(n, dtype=torch.bool)
    gone[list(removed)] = True
    segments = Segments.from_sizes(sizes).without(gone)
    x, target = (torch.randn(400, 4, generator=torch.Generator().manual_seed(1))[:n], torch.eye(3)[torch.arange(count) % 3])
    both = Batch(
        *(segments.repeat(2), target.repeat(2, 1), torch.arange(count).repeat(2), torch.arange(n).repeat(2)),
        **{"fraction_done": torch.tensor(0.5), "views": 2},
    )
    for _ in range(rounds):
        said = head(torch.cat([x, x]), both.segments)
        head.loss(said, both, said)
    return head.pseudo_labels.bag_shares


def test_bag_shares_sum_to_one():
    """Whatever the sizes of the bags, and whoever was removed."""
    for found in (bag_shares_after([2] * 19 + [200], rounds=6), bag_shares_after([4, 4], removed=[7], rounds=3)):
        torch.testing.assert_close(found.sum(1), torch.ones(len(found)))
        assert (found >= 0).all()


def test_bag_shares_ignore_removed_instances():
    torch.manual_seed(0)
    removed = bag_shares_after([4, 4], removed=[7])
    torch.manual_seed(0)
    torch.testing.assert_close(removed, bag_shares_after([4, 3], enrolled=[4, 4]))
