"""The contract every head keeps, held over the table of heads: a new head is examined before its author writes a test.

The table is in head_cases.py.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import assume, strategies as st
from torch import Tensor

from head_cases import CASES, C, D, expect_error, features, near, network_and_bags, over_heads, setup, small_head
from headcount.bags import Bags, Pool, Segments
from headcount.models.heads import HEADS, Batch, Output, build_head, find_head, head_options
from headcount.models.network import Model
from headcount.models.predictions import predict, predict_instances
from oracles import Ragged, examine, ragged

WRONG_VALUES = {
    "count": ({"t1": 0.0}, {"t2": -1.0}, {"t1": math.nan}, {"t1": "warm"}, {"mode": "cuont"}, {"reduction": "mean"}),
    "output_mean": ({"form": "nlll"}, {"form": None}),
    "election": ({"form": "nlll"}, {"form": None}),
    "tilt": ({"form": "half"}, {"over": "pixels"}, {"bag": "much"}, {"bag": -1}, {"threshold": 2}, {"share": "a lot"}),
}


def segments_of(bags, removed=False, weight=False, even=True):
    s = Segments.from_sizes(bags.sizes)
    s = Segments(s.index, s.n_bags, s.size if even else None)
    s = s.with_weight(torch.tensor(bags.weight, dtype=torch.float32)) if weight else s
    return s.without(torch.tensor(bags.removed)) if removed else s


def labels(bags, classes=C):
    return torch.eye(C)[torch.from_numpy(bags.rng(6).integers(0, classes, len(bags.sizes)))]


def loss_of(head, h, s, target, output=None):
    batch = Batch(s, target, torch.arange(s.n_bags), torch.arange(len(h)), epoch=torch.zeros((), dtype=torch.int64))
    return head.loss(head(h, s) if output is None else output, batch)


def alike(a: Output, b: Output, instances=slice(None), bags=slice(None)):
    """b says of these instances and bags of a what a says."""
    near(a.instance[instances], b.instance)
    near(a.bag[bags].exp(), b.bag.exp())
    near(a.bag[bags].clamp_min(-60), b.bag.clamp_min(-60), 2e-4)


# -- what is said ------------------------------------------------------------------------------------------------------


@over_heads
def test_title_citation_and_docstring(name, options):
    head = small_head(name, options)
    assert head.title
    assert head.cites
    about = (type(head).__doc__ or "").splitlines()[0]  # what `headcount heads` shows
    assert about.endswith(".")
    assert not about.startswith("``"), "a head says what it is before it says its options"
    assert head.display_name(options).startswith(head.title)
    assert head.views >= 1
    assert head.passes
    assert head_options(name).keys() >= options.keys()


@over_heads
def test_bag_probabilities_add_to_one(name, options):
    def law(bags, weight):
        output = small_head(name, options)(features(bags, 3.0), segments_of(bags, removed=True, weight=weight))
        assert output.instance.shape == (bags.n, C)
        assert output.bag.shape == (len(bags.sizes), C)
        assert output.instance.dtype is output.bag.dtype is torch.float32
        assert not output.bag.isnan().any()
        near(output.bag.logsumexp(1), torch.zeros(len(bags.sizes)))
        assert all(isinstance(part, Tensor) for part in output.parts.values())

    examine(law, CASES, bags=ragged(), weight=st.booleans())


@over_heads
def test_order_of_instances_is_irrelevant(name, options):
    def law(bags):
        head, h, s = small_head(name, options), features(bags), segments_of(bags, removed=True)
        ends = np.cumsum([0, *bags.sizes])
        rng = bags.rng(2)
        order = torch.from_numpy(np.concatenate([a + rng.permutation(b - a) for a, b in pairwise(ends)]))
        alike(head(h, s), head(h[order], Segments(s.index[order], s.n_bags, s.size)), instances=order)

    examine(law, CASES, bags=ragged())


@over_heads
def test_order_of_bags_is_irrelevant(name, options):
    def law(bags):
        head, h = small_head(name, options), features(bags)
        order = bags.rng(2).permutation(len(bags.sizes))
        blocks = torch.arange(bags.n).split(bags.sizes)
        rows = torch.cat([blocks[b] for b in order])
        other = Segments.from_sizes([bags.sizes[b] for b in order])
        alike(head(h, Segments.from_sizes(bags.sizes)), head(h[rows], other), instances=rows, bags=order)

    examine(law, CASES, bags=ragged())


@over_heads
def test_bags_are_independent(name, options):
    def law(bags, which):
        which %= len(bags.sizes)
        head, h, s = small_head(name, options), features(bags), segments_of(bags, removed=True)
        mine = torch.tensor(bags.index) == which
        changed = torch.where(mine[:, None], h * 50 + 7, h)
        others = torch.arange(len(bags.sizes)) != which
        a, b = head(h, s), head(changed, s)
        near(a.bag[others].exp(), b.bag[others].exp())
        near(a.instance[~mine], b.instance[~mine])

    examine(law, CASES, bags=ragged(), which=st.integers(0, 9))


@over_heads
def test_removed_instances_do_not_matter(name, options):
    """As if the removed had never been in the bag, whatever their features, and no gradient reaches them."""

    def law(bags):
        head, h, gone = small_head(name, options), features(bags), torch.tensor(bags.removed)
        s, sits = segments_of(bags, removed=True), np.bincount(bags.index, ~np.array(bags.removed)).astype(int)
        forgotten = head(h[~gone], Segments.from_sizes(sits))
        alike(head(h, s), forgotten, instances=~gone)
        loud = torch.where(gone[:, None], 1e3 * h, h).requires_grad_()
        output = head(loud, s)
        alike(output, forgotten, instances=~gone)
        loss_of(head, loud, s, labels(bags), output).backward()
        assert loud.grad.isfinite().all()
        assert not loud.grad[gone].any()

    examine(law, CASES, bags=ragged())


@over_heads
def test_weight_two_is_a_duplicate(name, options):
    def law(bags):
        head, h = small_head(name, options), features(bags)
        rows = torch.arange(bags.n).repeat_interleave(torch.tensor(bags.weight))
        sizes = np.bincount(bags.index, bags.weight).astype(int)
        first = torch.tensor([rows.tolist().index(j) for j in range(bags.n)])
        twins, weighed = head(h[rows], Segments.from_sizes(sizes)), head(h, segments_of(bags, weight=True))
        alike(twins, weighed, instances=first)

    examine(law, CASES, bags=ragged())


@over_heads
def test_weight_zero_is_removal(name, options):
    def law(bags):
        head, h, gone = small_head(name, options), features(bags), torch.tensor(bags.removed)
        weightless = segments_of(bags).with_weight((~gone).float())
        a, b = head(h, weightless), head(h, segments_of(bags, removed=True))
        near(a.bag.exp(), b.bag.exp())
        near(a.instance[~gone], b.instance[~gone])

    examine(law, CASES, bags=ragged())


@over_heads
def test_even_path_equals_ragged_path(name, options):
    def law(bags, weight):
        head, h = small_head(name, options), features(bags)
        even, loose = (segments_of(bags, removed=True, weight=weight, even=k) for k in (True, False))
        assert (even.size, loose.size) == (bags.sizes[0], None)
        alike(head(h, even), head(h, loose))

    examine(law, CASES, bags=ragged(even=True), weight=st.booleans())


@over_heads
def test_bag_of_one(name, options):
    """A bag of one is a bag, and the same bag in whatever company."""
    head, h = small_head(name, options), torch.randn(6, D, generator=torch.Generator().manual_seed(1))
    together = head(h, Segments.from_sizes([1] * 6))
    company = head(h, Segments.from_sizes([1, 5]))
    near(together.bag.logsumexp(1), torch.zeros(6))
    near(together.bag[:1].exp(), company.bag[:1].exp())
    alike(together, head(h[3:4], Segments.from_sizes([1])), instances=[3], bags=[3])


@over_heads
def test_an_emptied_bag_does_not_affect_others(name, options):
    def law(bags, which):
        which %= len(bags.sizes)
        mine = torch.tensor(bags.index) == which
        h, s = features(bags).requires_grad_(), segments_of(bags)
        head, target = small_head(name, options), labels(bags)
        target[which] = 0
        output = head(h, s.without(mine))
        assert not output.bag.isnan().any()
        others = torch.arange(len(bags.sizes)) != which
        near(output.bag[others].exp(), head(h, s).bag[others].exp())
        loss_of(head, h, s.without(mine), target, output).backward()
        assert h.grad.isfinite().all()

    examine(law, CASES, bags=ragged(), which=st.integers(0, 9))


@over_heads
def test_predictions_are_repeatable(name, options):
    bags = Ragged([3, 1, 4], [False] * 8, [1] * 8, 1)
    head, h, s = small_head(name, options), features(bags), segments_of(bags)
    before = h.clone()
    a, b = head(h, s), head(h, s)
    assert torch.equal(a.bag, b.bag)
    assert torch.equal(a.instance, b.instance)
    assert torch.equal(h, before)


# -- precision and extremes --------------------------------------------------------------------------------------------


@over_heads
@pytest.mark.parametrize("scale", [1e3, 1e4, 1e-6])
def test_gradients_stay_finite(name, options, scale):
    def law(bags):
        head, h, s = small_head(name, options), features(bags, scale).requires_grad_(), segments_of(bags, removed=True)
        output = head(h, s)
        near(output.bag.exp().sum(1), torch.ones(len(bags.sizes)))
        loss = loss_of(head, h, s, labels(bags), output)
        assert loss.isfinite()
        loss.backward()
        for p in (h, *head.parameters()):
            assert p.grad is None or p.grad.isfinite().all()

    examine(law, CASES, bags=ragged())


@over_heads
def test_votes_are_counted_in_float32(name, options):
    """Under autocast, 1500 copies against 500 are three to one: counted in bfloat16 both would stop at 256."""
    head, h = small_head(name, options), torch.randn(2, D, generator=torch.Generator().manual_seed(3))
    copies, s = h.repeat_interleave(torch.tensor([1500, 500]), 0).bfloat16(), Segments.from_sizes([2000])
    with torch.autocast("cpu", torch.bfloat16):
        many = head(copies, s)
        two = head(h.bfloat16(), Segments.from_sizes([2]).with_weight(torch.tensor([1500.0, 500.0])))
        loss = loss_of(head, copies, s, torch.eye(C)[:1], many)
    assert many.instance.dtype is many.bag.dtype is loss.dtype is torch.float32
    near(many.bag.exp(), two.bag.exp(), 2e-3)
    near(many.instance[[0, -1]], two.instance, 2e-3)


@over_heads
def test_half_precision_in_float32_out(name, options):
    """Everything in bfloat16 up to the instance's logits; from there on nothing is."""
    bags = Ragged([40, 24], [False] * 64, [1] * 64, 1)
    h, s = features(bags).bfloat16(), segments_of(bags)
    half = small_head(name, options).bfloat16()
    got, want = half(h, s), small_head(name, options).bfloat16().float()(h.float(), s)
    assert got.instance.dtype is got.bag.dtype is torch.float32
    near(got.bag.logsumexp(1), torch.zeros(2))
    near(got.instance, want.instance, 2e-2)


# -- the loss ----------------------------------------------------------------------------------------------------------


@over_heads
def test_soft_label_is_a_mixture(name, options):
    """The loss of a mixture of labels is the mixture of their losses."""

    def law(bags, part):
        head, h, s = small_head(name, options), features(bags), segments_of(bags)
        one, other = labels(bags), torch.from_numpy(bags.rng(4).dirichlet(np.ones(C), len(bags.sizes))).float()
        losses = [loss_of(head, h, s, target) for target in (one, other, part * one + (1 - part) * other)]
        near(losses[2], part * losses[0] + (1 - part) * losses[1], 1e-4)

    examine(law, CASES, bags=ragged(most=4), part=st.sampled_from([0.25, 0.5, 0.9]))


@over_heads
def test_unlabelled_bags_do_not_matter(name, options):
    def law(bags, part):
        head, h, s = small_head(name, options), features(bags).requires_grad_(), segments_of(bags)
        dumb = torch.from_numpy(bags.rng(5).random(len(bags.sizes)) < part)
        target = labels(bags).masked_fill(dumb[:, None], 0)
        mute = dumb[torch.tensor(bags.index)]
        loss = loss_of(head, h, s, target)
        if dumb.all():
            assert float(loss.detach()) == 0
        else:
            kept = torch.tensor(bags.sizes)[~dumb]
            near(loss, loss_of(head, h[~mute], Segments.from_sizes(kept), target[~dumb]))
        loss.backward()
        assert h.grad.isfinite().all()
        assert not h.grad[mute].any()

    examine(law, CASES, bags=ragged(), part=st.sampled_from([0.3, 1.0]))


@over_heads
def test_learns(name, options):
    """A few small steps down the slope lower the loss."""
    bags = Ragged([5, 3, 6, 2], [False] * 16, [1] * 16, 3)
    head, h, s, target = small_head(name, options), features(bags), segments_of(bags), torch.eye(C)
    losses = []
    for _ in range(20):
        head.zero_grad()
        loss = loss_of(head, h, s, target)
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p in head.parameters():
                p -= 0 if p.grad is None else 1e-2 * p.grad
    assert losses[-1] < losses[0]


def training(head, bags, target, sweep, done=0.0):
    """A batch of a pass, as the loop deals it: whole bags, or loose instances; with all its views, and a teacher if asked.
    Without labels of bags there are none of instances either."""
    rows, s, over = torch.tensor(bags.index), segments_of(bags, removed=True), sweep.over
    known = torch.from_numpy(bags.rng(8).integers(0, C, bags.n)) if target.any() else torch.full((bags.n,), -1)
    if over == "instances":
        loose = torch.where(torch.tensor(bags.removed), bags.n, torch.arange(bags.n))
        s, target, bag = Segments(loose, bags.n, 1), target[rows], rows
    else:
        bag = torch.arange(len(bags.sizes))
    v = head.views if sweep.uses_teacher else 1
    batch = Batch(
        segments=s.repeat(v),
        target=target.repeat(v, 1),
        bag=bag.repeat(v),
        position=torch.arange(bags.n).repeat(v),
        known=known.repeat(v),
        epoch=torch.zeros((), dtype=torch.int64),
        fraction_done=torch.tensor(done),
        over=over,
        views=v,
    )
    h = features(bags).repeat(v, 1).requires_grad_()
    teacher = None if head.teacher is None or not sweep.uses_teacher else head.eval()(h.detach(), batch.segments)
    return h, batch, teacher


@over_heads
def test_a_step_of_training(name, options):
    """In every pass the loss is finite, and its slope reaches what the pass trains."""

    def law(bags):
        assume(bags.n > 1)  # batch-norm cannot learn from one instance
        head = small_head(name, options)
        setup(head, bags.sizes)
        for sweep, done in product(head.passes, (0.0, 0.9)):
            h, batch, teacher = training(head, bags, labels(bags), sweep, done)
            head.train().zero_grad()
            loss = head.loss(head(h, batch.segments), batch, teacher)
            assert loss.isfinite()
            loss.backward()
            slopes = {f"head.{n}": p.grad for n, p in head.named_parameters() if p.grad is not None}
            assert all(g.isfinite().all() for g in (h.grad, *slopes.values()))
            own = [g for n, g in slopes.items() if any(n.startswith(part) for part in sweep.trains)]
            assert any(g.any() for g in own)

    examine(law, CASES, bags=ragged(most=5))


@over_heads
def test_a_step_reads_no_value_from_the_device(name, options, monkeypatch):
    """On the meta device tensors have no numbers: whoever looks at one fails here, and would make a GPU wait, or break the
    capture of the step. Bags of one size, as captured steps have."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it knows no meta device
    head = small_head(name, options)
    setup(head, [4, 4, 4])
    for sweep in head.passes:
        views = head.views if sweep.uses_teacher else 1
        n, b = (12, 12) if sweep.over == "instances" else (12, 3)
        with torch.device("meta"):
            batch = Batch(
                segments=Segments(torch.zeros(n, dtype=torch.int64), b, n // b).repeat(views),
                target=torch.zeros(b * views, C), bag=torch.zeros(b * views, dtype=torch.int64),
                position=torch.zeros(n * views, dtype=torch.int64), known=torch.zeros(n * views, dtype=torch.int64),
                epoch=torch.zeros((), dtype=torch.int64), fraction_done=torch.zeros(()), over=sweep.over, views=views,
            )  # fmt: skip
            h = torch.zeros(n * views, D, requires_grad=True)
        far = copy.deepcopy(head).to("meta")
        teacher = None if head.teacher is None or not sweep.uses_teacher else far.eval()(h.detach(), batch.segments)
        far.train().loss(far(h, batch.segments), batch, teacher).backward()
        far.eval().loss(far(h, batch.segments), batch, None)


@over_heads
def test_a_batch_without_labels_has_no_gradient(name, options):
    bags = Ragged([3, 1, 4], [False, True, False, False, True, False, False, False], [1] * 8, 1)
    head = small_head(name, options)
    if head.uses_instance_labels:
        pytest.skip("it is told the instances' own labels")
    setup(head, bags.sizes)
    for sweep in head.passes:
        h, batch, teacher = training(head, bags, torch.zeros(3, C), sweep)
        loss = head.train().loss(head(h, batch.segments), batch, teacher)
        assert float(loss.detach()) == 0
        loss.backward()
        assert not h.grad.any()


@over_heads
def test_classes_that_do_not_count_cannot_win(name, options):
    def law(bags):
        counted = torch.tensor([True, False, True, True])
        h, s = features(bags).requires_grad_(), segments_of(bags, removed=True)
        head, free = small_head(name, options, counted), small_head(name, options)
        if isinstance(getattr(head, "classifier", None), torch.nn.Linear):  # all vote for the class that cannot win
            with torch.no_grad():
                head.classifier.bias[1] += 5
        output = head(h, s)
        assert (output.bag[:, 1] == -math.inf).all()
        assert (output.bag.argmax(1) != 1).all()
        near(output.bag.exp().sum(1), torch.ones(len(bags.sizes)))
        target = torch.where(counted, torch.from_numpy(bags.rng(4).random((len(bags.sizes), C))), 0.0).float()
        target[0] = 0
        loss = loss_of(head, h, s, target, output)
        assert loss.isfinite()
        loss.backward()
        assert h.grad.isfinite().all()
        everybody = small_head(name, options, torch.ones(C, dtype=torch.bool))
        alike(everybody(h, s), free(h, s))

    examine(law, CASES, bags=ragged())


def test_a_label_that_cannot_win_is_refused():
    counted = [True, False, True, True]
    expect_error(lambda: Bags.of(Pool(np.eye(2)), sizes=[1, 1], labels=[0, 1], classes=C, counted=counted), "counted")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_unknown_option_is_refused(name):
    expect_error(lambda: build_head(name, D, C, {"colour": 1}), name, "'colour'", *head_options(name))


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, all_ in WRONG_VALUES.items() for o in all_])
def test_wrong_value_is_refused(name, options):
    expect_error(lambda: build_head(name, D, C, options), *options)


@pytest.mark.parametrize("name", ["cuont", "", "no/such.py:Head", "tests:"])
def test_unknown_head_is_refused(name):
    expect_error(lambda: find_head(name), name)
    expect_error(lambda: find_head("cuont"), "count", "output_mean", "did you mean")


def test_ties_go_to_the_lowest_class():
    """Two votes for each of two classes: the count is a tie, and the lower class has it."""
    for a, b in [(0, 1), (1, 3), (2, 3)]:
        head = build_head("count", C, C, {})
        with torch.no_grad():
            head.classifier.weight.copy_(torch.eye(C))
            head.classifier.bias.zero_()
        h = 100 * torch.eye(C)[[b, a, a, b]]
        assert head(h, Segments.from_sizes([4])).bag.argmax(1).tolist() == [a]
        votes = (torch.eye(C)[a] + torch.eye(C)[b])[None]
        tied = Bags.of(Pool(np.eye(4, dtype=np.float32)), sizes=[4], labels=votes.numpy(), classes=C)
        assert tied.label.tolist() == [a]


# -- in a network ----------------------------------------------------------------------------------------------------


@over_heads
def test_state_dict_round_trip(name, options):
    first, second = small_head(name, options, seed=1), small_head(name, options, seed=2)
    h, s = torch.ones(3, D), Segments.from_sizes([1, 2])
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(h, s).bag, second(h, s).bag)
    assert torch.equal(first(h, s).instance, second(h, s).instance)


@over_heads
@pytest.mark.parametrize("counted", [None, (True, True, False, True)])
def test_a_loaded_model_predicts_the_same(name, options, counted, tmp_path):
    model, bags = network_and_bags(name, options, counted)
    model.save(tmp_path / "m")
    again = Model.load(tmp_path / "m")
    assert again.config == model.config
    assert not again.training
    a, b = predict(model, bags), predict(again, bags)
    assert torch.equal(a.instance, b.instance)
    assert torch.equal(a.bag, b.bag)


@over_heads
def test_single_instances_are_predicted_or_refused(name, options):
    """Alone is as in a bag, if the head hears each instance alone; a head that does not, says so."""
    model, bags = network_and_bags(name, options)
    x = bags.pool.take(bags.index)
    if model.head.depends_on_bag or model.head.depends_on_order:
        expect_error(lambda: predict_instances(model, x), name, "whole bags")
    else:
        said = predict_instances(model, x, batch_instances=7)
        kept = ~bags.removed
        near(said[kept], predict(model, bags).instance[kept])


@over_heads
def test_predictions_in_parts_are_the_same(name, options):
    model, bags = network_and_bags(name, options)
    model.train()
    whole, parts = predict(model, bags, keep=("features",)), predict(model, bags, keep=("features",), batch_instances=1)
    assert model.training
    alike(whole, parts)
    near(whole.parts["features"], parts.parts["features"])
    assert len(whole.instance) == 20
    assert not whole.bag.requires_grad


@over_heads
def test_predictions_respect_removal(name, options):
    model, bags = network_and_bags(name, options)
    alike(predict(model, bags), predict(model, bags.drop_removed()), instances=~bags.removed)
