"""Per-bag arithmetic over random ragged bags: removal, weights, the equal-size path, padding, views, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import oracles
from headcount.bags import Segments
from headcount.errors import HeadcountError
from oracles import examine, ragged

REDUCTIONS = {
    "sum": oracles.bag_sum,
    "mean": oracles.bag_mean,
    "max": oracles.bag_max,
    "logsumexp": oracles.bag_logsumexp,
    "softmax": oracles.bag_softmax,
}
WEIGHTED = ("sum", "mean", "logsumexp", "softmax")
MAX_NAN = ("max", math.nan)  # see test_a_removed_nan_does_not_affect_the_gradient_of_max
CASES = 60


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def same(got, want, tolerance=1e-9):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    want = want.detach().numpy() if isinstance(want, torch.Tensor) else np.asarray(want, dtype=float)
    assert got.shape == want.shape, f"{got.shape} is not {want.shape}"
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def segments_of(bags, removed=True, weight=False, size="auto"):
    s = Segments.from_sizes(bags.sizes)
    if size != "auto":
        s = Segments(s.index, s.n_bags, size)
    if weight:
        s = s.with_weight(torch.tensor(bags.weight, dtype=torch.float32))
    return s.without(torch.tensor(bags.removed)) if removed else s


def seats_of(bags, removed=True, weight=False):
    return oracles.seats(bags.index, len(bags.sizes), bags.removed if removed else None, bags.weight if weight else None)


# -- against the loops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_equal_the_loop(op, scale):
    def check(bags):
        x = bags.values(3, scale)
        same(getattr(segments_of(bags), op)(tensor(x)), REDUCTIONS[op](x.tolist(), seats_of(bags)))

    examine(check, CASES, bags=ragged(spare=False))


@pytest.mark.parametrize("op", WEIGHTED)
def test_weight_is_multiplicity(op):
    """An instance of weight 2 counts as if it stood in the bag twice."""

    def check(bags):
        x = bags.values(2)
        same(getattr(segments_of(bags, weight=True), op)(tensor(x)), REDUCTIONS[op](x.tolist(), seats_of(bags, weight=True)))

    examine(check, CASES, bags=ragged())


@pytest.mark.parametrize("op", REDUCTIONS)
def test_weight_two_is_two_copies(op):
    def check(bags, instance):
        instance %= bags.n
        x, twin = bags.values(2), np.arange(bags.n).tolist()
        twin.insert(instance + 1, instance)
        sizes = list(bags.sizes)
        sizes[bags.index[instance]] += 1
        weight = torch.ones(bags.n)
        weight[instance] = 2
        one = getattr(Segments.from_sizes(bags.sizes).with_weight(weight), op)(tensor(x))
        two = getattr(Segments.from_sizes(sizes), op)(tensor(x[twin]))
        same(one[twin] if op == "softmax" else one, two)

    examine(check, CASES, bags=ragged(), instance=st.integers(0, 99))


def test_fractional_weights():
    """Quarter votes: a quarter of the sum, the same mean, log 4 less, four times the share of each (quarter) copy."""

    def check(bags):
        x, whole = tensor(bags.values(2)), segments_of(bags, weight=True)
        quarter = whole.with_weight(whole.weight / 4)
        same(quarter.sum(x) * 4, whole.sum(x))
        same(quarter.total_weight() * 4, whole.total_weight())
        same(quarter.mean(x), whole.mean(x))
        same(quarter.logsumexp(x) + math.log(4), whole.logsumexp(x))
        same(quarter.softmax(x) / 4, whole.softmax(x))

    examine(check, CASES, bags=ragged())


@pytest.mark.parametrize("op", WEIGHTED)
def test_removed_is_weight_zero_is_absent(op):
    def check(bags):
        x, gone = bags.values(2), np.array(bags.removed)
        keep = np.flatnonzero(~gone)
        sizes = [len(sit) for sit in seats_of(bags)]
        removed = getattr(segments_of(bags), op)(tensor(x))
        weightless = getattr(segments_of(bags, removed=False).with_weight(torch.tensor(~gone).float()), op)(tensor(x))
        absent = getattr(Segments.from_sizes(sizes), op)(tensor(x[keep]))
        if op == "softmax":
            assert not removed[gone].any()
            removed, weightless = removed[keep], weightless[keep]
        same(removed, absent)
        same(weightless, absent)

    examine(check, CASES, bags=ragged())


@pytest.mark.parametrize(("op", "want"), [("max", [0.0]), ("logsumexp", [0.0]), ("softmax", [1.0])])
def test_a_large_value_of_weight_zero_has_no_effect(op, want):
    s = Segments.from_sizes([2]).with_weight(torch.tensor([1.0, 0.0]))
    same(getattr(s, op)(torch.tensor([0.0, 1e4]))[:1], want)


# -- paths -------------------------------------------------------------------------------------------------------------


def test_equal_size_path_equals_ragged_path():
    def check(bags, weight):
        x, size = tensor(bags.values(2)), bags.sizes[0]
        even, loose = (segments_of(bags, weight=weight, size=k) for k in (size, None))
        assert even.size == size == segments_of(bags).size
        for op in REDUCTIONS:
            same(getattr(even, op)(x), getattr(loose, op)(x))
        same(even.total_weight(), loose.total_weight())
        v = torch.arange(2.0 * len(bags.sizes)).view(-1, 2)
        same(even.broadcast(v), loose.broadcast(v))
        for s in (even, loose):
            same(s.to_flat(s.to_dense(x)[0]), x.masked_fill(s.removed[:, None], 0))

    examine(check, 2 * CASES, bags=ragged(even=True, spare=False), weight=st.booleans())


def test_padding_is_removal():
    """A padded batch gives what the flat one gives, for any padding."""

    def check(bags):
        x, length = bags.values(2), max(bags.sizes) + bags.seed % 2
        padded = np.full((len(bags.sizes), length, 2), np.nan)
        mask = np.zeros((len(bags.sizes), length), dtype=bool)
        where = bags.rng(5).permuted(np.tile(np.arange(length), (len(bags.sizes), 1)), axis=1)  # gaps anywhere
        places = [sorted(row[:size]) for row, size in zip(where, bags.sizes, strict=True)]
        rows = iter(x)
        for b, taken in enumerate(places):
            for k in taken:
                padded[b, k], mask[b, k] = next(rows), True
        padded, flat = tensor(padded).flatten(0, 1), Segments.from_sizes(bags.sizes)
        s = Segments.from_padded(torch.tensor(mask))
        for op in ("sum", "mean", "max", "logsumexp"):
            same(getattr(s, op)(padded), getattr(flat, op)(tensor(x)))
        same(s.softmax(padded)[mask.flatten()], flat.softmax(tensor(x)))
        same(s.total_weight(), flat.total_weight())

    examine(check, CASES, bags=ragged())


def test_sizes_number_the_bags():
    def check(bags):
        assert Segments.from_sizes(bags.sizes).index.tolist() == bags.index

    examine(check, CASES, bags=ragged())


def test_order_does_not_matter():
    """Instances may be in any order: the values of bags stay, those of instances are permuted."""

    def check(bags, weight):
        x, s = tensor(bags.values(2)), segments_of(bags, weight=weight, size=None)
        order = torch.from_numpy(bags.rng(3).permutation(bags.n))
        mixed = Segments(s.index[order], s.n_bags, None, None if s.weight is None else s.weight[order])
        for op in ("sum", "mean", "max", "logsumexp"):
            same(getattr(mixed, op)(x[order]), getattr(s, op)(x))
        same(mixed.softmax(x[order]), s.softmax(x)[order])
        same(mixed.broadcast(mixed.sum(x[order])), s.broadcast(s.sum(x))[order])
        same(mixed.to_flat(mixed.to_dense(x[order])[0]), s.to_flat(s.to_dense(x)[0])[order])

    examine(check, CASES, bags=ragged(spare=False), weight=st.booleans())


@pytest.mark.parametrize("even", [True, False])
def test_repeat_appends_whole_copies(even):
    def check(bags, times, weight):
        views = [tensor(bags.values(2, purpose=10 + v)) for v in range(times)]
        s = segments_of(bags, weight=weight)
        often = s.repeat(times)
        for op in REDUCTIONS:
            same(getattr(often, op)(torch.cat(views)), torch.cat([getattr(s, op)(x) for x in views]))
        same(often.total_weight(), s.total_weight().repeat(times))
        assert often.removed.tolist() == s.removed.tolist() * times
        assert (often.n_bags, often.size) == (s.n_bags * times, s.size)

    examine(check, CASES, bags=ragged(even=even, spare=False), times=st.integers(1, 3), weight=st.booleans())


def test_any_number_of_axes():
    def check(bags):
        x, s = tensor(bags.values(6)), segments_of(bags, weight=True)
        for op in REDUCTIONS:
            whole = getattr(s, op)(x)
            same(getattr(s, op)(x.view(-1, 2, 3)).flatten(1), whole)
            same(getattr(s, op)(x[:, 4]), whole[:, 4])
        same(s.broadcast(s.sum(x.view(-1, 2, 3))).flatten(1), s.broadcast(s.sum(x)))
        same(s.to_dense(x.view(-1, 2, 3))[0].flatten(2), s.to_dense(x)[0])
        same(s.to_dense(x[:, 4])[0], s.to_dense(x)[0][..., 4])

    examine(check, CASES, bags=ragged(spare=False))


# -- conversion --------------------------------------------------------------------------------------------------------


def test_broadcast_equals_the_loop():
    def check(bags):
        v = bags.rng(4).normal(size=(len(bags.sizes), 2))
        want = oracles.broadcast(v.tolist(), bags.index, bags.removed, len(bags.sizes))
        same(segments_of(bags).broadcast(tensor(v)), want)

    examine(check, CASES, bags=ragged(spare=False))


def test_to_dense_equals_the_loop():
    def check(bags, fill):
        x, sits = bags.values(2), seats_of(bags)
        length = max(map(len, sits))
        sheet, taken = segments_of(bags, size=None).to_dense(tensor(x), fill)
        want, mask = oracles.to_dense(x.tolist(), sits, length, fill)
        same(sheet, np.array(want).reshape(len(sits), length, 2))
        assert taken.tolist() == mask

    examine(check, CASES, bags=ragged(spare=False), fill=st.sampled_from([0.0, -7.0, -math.inf]))


def test_to_dense_of_equal_bags_keeps_the_order():
    def check(bags, fill):
        x, size = bags.values(2), bags.sizes[0]
        sheet, taken = segments_of(bags).to_dense(tensor(x), fill)
        for j, gone in enumerate(bags.removed):
            assert taken[j // size, j % size] == (not gone)
            same(sheet[j // size, j % size], [fill, fill] if gone else x[j])

    examine(check, CASES, bags=ragged(even=True, spare=False), fill=st.sampled_from([0.0, -math.inf]))


def test_to_flat_inverts_to_dense():
    def check(bags):
        x, s = tensor(bags.values(2)), segments_of(bags)
        sheet, taken = s.to_dense(x, -math.inf)
        assert int(taken.sum()) == int((~s.removed).sum())
        same(s.to_flat(sheet), x.masked_fill(s.removed[:, None], 0))
        same(sheet.amax(1), s.max(x)) if sheet.shape[1] else None

    examine(check, CASES, bags=ragged(spare=False))


def test_sum_and_broadcast_are_adjoint():
    def check(bags):
        x, s = tensor(bags.values(2)), segments_of(bags)
        v = tensor(bags.rng(4).normal(size=(len(bags.sizes), 2)))
        same((s.sum(x) * v).sum(), (x * s.broadcast(v)).sum(), 1e-8)

    examine(check, CASES, bags=ragged(spare=False))


# -- gradients ---------------------------------------------------------------------------------------------------------


def numerical_gradient(f, x, step=1e-5):
    """Central differences of a loop over lists."""
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += step
        down[at] -= step
        out[at] = (f(up.tolist()) - f(down.tolist())) / (2 * step)
    return out


def gradient(s, op, x, c):
    x = tensor(x).requires_grad_()
    (getattr(s, op)(x) * tensor(c)).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("op", "large"), [(op, large) for op in REDUCTIONS for large in (None, 1e4, math.inf, math.nan) if (op, large) != MAX_NAN]
)
def test_gradient_equals_the_numerical_one(op, large):
    """Also when a removed instance is huge: it must not affect the others, not even as 0 * inf."""

    def check(bags, weight):
        x, weight = bags.rng(1).normal(size=(bags.n, 2)), weight and op != "max"  # a maximum has no multiplicity
        sits = seats_of(bags, weight=weight)
        c = bags.rng(2).normal(size=np.array(REDUCTIONS[op](x.tolist(), sits)).shape)
        want = numerical_gradient(lambda v: oracles.add((np.array(REDUCTIONS[op](v, sits)) * c).flatten()), x)
        if large is not None:
            x[np.array(bags.removed)] = large
        sizes = {bags.sizes[0], None} if len(set(bags.sizes)) == 1 else {None}
        for size in sizes:
            got = gradient(segments_of(bags, weight=weight, size=size), op, x, c)
            assert not got[torch.tensor(bags.removed)].any()
            same(got, want, 1e-6)

    examine(check, CASES // 3, bags=ragged(most=4), weight=st.booleans())


@pytest.mark.parametrize("size", [2, None])
def test_equal_maxima_share_the_gradient(size):
    s = Segments(torch.tensor([0, 0, 1, 1]), 2, size)
    same(gradient(s, "max", [[3.0], [3.0], [1.0], [0.0]], [[1.0], [1.0]]), [[0.5], [0.5], [1.0], [0.0]])


def test_gradients_of_to_dense_and_to_flat():
    def check(bags):
        s, x = segments_of(bags), tensor(bags.values(2)).requires_grad_()
        sheet, taken = s.to_dense(x)
        c = tensor(bags.rng(2).normal(size=sheet.shape))
        (sheet * c).sum().backward()
        same(x.grad, s.to_flat(c))
        c.requires_grad_()
        s.to_flat(c).sum().backward()
        same(c.grad, taken[..., None].expand(c.shape).double())

    examine(check, CASES, bags=ragged(spare=False))


# -- edge cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[2, 2, 2], [2, 1, 3]])
@pytest.mark.parametrize("large", [1.0, 1e4, math.inf])
def test_emptied_bag(sizes, large):
    """The documented values: zeros, and -inf for the largest; its instances get no gradient."""
    index = np.repeat(np.arange(3), sizes)
    x = np.where(index == 1, large, 1.0)[:, None]
    s = Segments.from_sizes(sizes).without(torch.tensor(index == 1))
    assert s.total_weight().tolist() == [sizes[0], 0, sizes[2]]
    for op, want in {"sum": 0.0, "mean": 0.0, "max": -math.inf, "logsumexp": -math.inf}.items():
        assert float(getattr(s, op)(tensor(x))[1, 0]) == want
        slopes = gradient(s, op, x, [[1.0], [2.0], [3.0]])
        assert torch.isfinite(slopes).all()
        assert not slopes[index == 1].any()
    assert not s.softmax(tensor(x))[index == 1].any()
    assert torch.isfinite(gradient(s, "softmax", x, np.arange(6.0)[:, None])).all()
    assert not s.broadcast(torch.ones(3, 1))[index == 1].any()
    sheet, taken = s.to_dense(tensor(x), 5.0)
    assert not taken[1].any()
    assert (sheet[1] == 5).all()


def test_empty_bags():
    s = Segments.from_sizes([0, 2, 0])
    assert s.sum(torch.ones(2)).tolist() == [0, 2, 0]
    assert s.mean(torch.ones(2)).tolist() == [0, 1, 0]
    assert s.to_dense(torch.ones(2))[1].tolist() == [[False, False], [True, True], [False, False]]
    assert Segments.from_sizes([]).sum(torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, None])
def test_votes_are_counted_in_float32(dtype, size):
    """64 votes of 0.1 added in bfloat16 give 6.16."""
    x = torch.full((128, 1), 0.1, dtype=dtype)
    s = Segments(torch.arange(128) // 64, 2, size)
    for t in (s, s.with_weight(torch.ones(128, dtype=dtype))):
        assert t.sum(x).dtype is torch.float32
        same(t.sum(x), torch.full((2, 1), float(x[0]) * 64), 1e-6)
        same(t.mean(x), torch.full((2, 1), float(x[0])), 1e-6)
        same(t.logsumexp(x), torch.full((2, 1), float(x[0]) + math.log(64)), 1e-6)
        same(t.softmax(x), torch.full((128, 1), 1 / 64), 1e-6)
        assert {t.mean(x).dtype, t.max(x).dtype, t.logsumexp(x).dtype, t.softmax(x).dtype} == {torch.float32}


@pytest.mark.parametrize("size", [600, None])
def test_counts_beyond_half_precision(size):
    s = Segments(torch.arange(1200) // 600, 2, size)
    for votes in (torch.ones(1200, dtype=torch.bfloat16), torch.ones(1200, dtype=torch.bool), torch.ones(1200).long()):
        assert s.sum(votes).tolist() == s.total_weight().tolist() == [600, 600]


def test_float64_stays():
    def check(bags):
        s, x = segments_of(bags, weight=True), tensor(bags.values(1))
        assert {getattr(s, op)(x).dtype for op in REDUCTIONS} == {torch.float64}

    examine(check, 5, bags=ragged())


def test_softmax_and_logsumexp_are_shift_invariant():
    def check(bags, shift):
        s, x = segments_of(bags, weight=True), tensor(bags.values(2))
        same(s.softmax(x + shift), s.softmax(x), 1e-7)
        same(s.logsumexp(x + shift) - shift, s.logsumexp(x), 1e-7)
        same(s.sum(s.softmax(x)), torch.ones(len(bags.sizes), 2))

    examine(check, CASES, bags=ragged(), shift=st.sampled_from([-1e4, -50.0, 3.0, 1e4]))


def test_removal_adds_up():
    def check(bags):
        s = Segments.from_sizes(bags.sizes)
        first, second = (torch.from_numpy(bags.rng(k).random(bags.n) < 0.3) for k in (7, 8))
        assert s.without(first).without(second).index.tolist() == s.without(first | second).index.tolist()
        assert s.without(first).removed.tolist() == first.tolist()

    examine(check, CASES, bags=ragged())


@pytest.mark.parametrize("wrong", [lambda: Segments.from_sizes([2, -1]), lambda: Segments.from_padded(torch.ones(3))])
def test_errors_are_one_line(wrong):
    with pytest.raises(HeadcountError, match=r"got (\[2, -1\]|shape \(3,\))") as error:
        wrong()
    assert "\n" not in str(error.value)


def test_fractional_sizes_are_refused():
    with pytest.raises(HeadcountError):
        Segments.from_sizes([1.5, 2.5])


def test_a_removed_nan_does_not_affect_the_gradient_of_max():
    s = Segments(torch.tensor([0, 0]), 1).without(torch.tensor([False, True]))
    same(gradient(s, "max", [[1.0], [math.nan]], [[1.0]]), [[1.0], [0.0]])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dot_is_the_sum_of_products(dtype, large, monkeypatch):
    """With weights and removal, over equal and ragged bags, large ones one by one; value and gradient; in float32 or wider."""
    if large:
        monkeypatch.setattr("headcount.bags.segments.MIN_PRODUCT", 0)

    def check(bags):
        rng = bags.rng(9)
        share, x = (torch.tensor(rng.normal(size=s)).to(dtype) for s in ((bags.n,), (bags.n, 3)))
        s = Segments.from_sizes(bags.sizes).with_weight(torch.tensor(bags.weight, dtype=torch.float32))
        s = s.without(torch.tensor(bags.removed))
        wide = share.float() if dtype == torch.bfloat16 else share
        leaves = [(a.clone().requires_grad_(), x.clone().requires_grad_()) for a in (share, wide)]
        value, want = s.dot(*leaves[0]), s.sum(leaves[1][0][:, None] * leaves[1][1])
        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-4)
        if dtype != torch.bfloat16:  # whose slopes are rounded
            for v in (value, want):
                v.square().sum().backward()
            for a, b in zip(*leaves, strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)

    examine(check, 20, bags=ragged())


@pytest.mark.parametrize("sizes", [[3, 3], [2, 5, 1]])
def test_first_copy_inverts_repeat(sizes):
    n = sum(sizes)
    one = Segments.from_sizes(sizes).with_weight(torch.arange(n) % 3).without(torch.arange(n) == 4)
    for times in (1, 3):
        again = one.repeat(times).first_copy(times)
        assert torch.equal(again.index, one.index)
        assert torch.equal(again.weight, one.weight)
        assert (again.n_bags, again.size) == (one.n_bags, one.size)
