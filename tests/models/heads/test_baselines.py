"""The field of baselines: the specification's vectors, slow loops for every head, and what each one claims of itself.

The loops know of removal and weights only through ``seats`` (see oracles.py) and work in float64 on a head's own parameters.
"""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import test_head_contract as contract
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import head_cases
from headcount.bags import Bags, Pool, Segments
from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.models.heads import HEADS, Batch, build_head
from headcount.models.heads.additive import IteratedInverse
from headcount.models.heads.mctformer import rank_pool
from headcount.models.network import Model, ModelConfig
from headcount.training import loop
from headcount.training.trainer import Trainer
from oracles import Ragged, add, bag_logsumexp, bag_max, bag_mean, bag_softmax, bag_sum, examine, ragged, seats, softmax

D, C = 5, 4
SMALL = {  # the same head, in a size that loops can follow
    "additive_trans": {"width": 8, "heads": 2, "landmarks": 6},
    "mctformer": {"layers": 2, "width": 12, "heads": 3},
    "weno": {"width": 8, "student_width": 10},
}
NAMES = (
    *("feature_mean", "feature_max", "feature_pnorm", "feature_lse", "attention", "additive", "additive_trans"),
    *("millet", "mctformer", "weno", "noisy_label", "supervised"),
)


def made(name, options=None, counted=None, seed=0, loud=1.0):
    """A small head in eval mode, its parameters drawn anew (``loud`` times as large): no zero bias, no neutral norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build_head(name, D, C, {**SMALL.get(name, {}), **(options or {})}, counted)
        with torch.no_grad():
            for p in head.parameters():
                p.copy_(loud * torch.randn(p.shape) / math.sqrt(p.shape[-1]))
            for m in head.modules():
                if isinstance(m, torch.nn.BatchNorm1d):
                    m.running_mean.copy_(torch.randn(m.running_mean.shape))
                    m.running_var.copy_(torch.rand(m.running_var.shape) + 0.5)
    return head.eval()


def numbers(head):
    """Everything a head has learned, in float64."""
    return {k: v.detach().double().numpy() for k, v in head.state_dict().items()}


class Case:
    """A drawn case as a head sees it and as the loops see it."""

    def __init__(self, bags, weight=False, scale=1.0):
        self.x = np.round(bags.values(D, scale), 3)
        self.h = torch.tensor(self.x, dtype=torch.float32)
        s = Segments.from_sizes(bags.sizes)
        s = s.with_weight(torch.tensor(bags.weight, dtype=torch.float32)) if weight else s
        self.segments = s.without(torch.tensor(bags.removed))
        self.sits = seats(bags.index, len(bags.sizes), bags.removed, bags.weight if weight else None)
        self.kept = [j for j in range(bags.n) if not bags.removed[j]]
        rng = bags.rng(8)
        soft = (
            rng.dirichlet(np.ones(C), len(bags.sizes)) if rng.random() < 0.3 else np.eye(C)[rng.integers(0, C, len(bags.sizes))]
        )
        self.target = soft * (rng.random(len(bags.sizes)) < 0.8)[:, None]

    def batch(self, **more):
        b = self.segments.n_bags
        more = {"epoch": torch.zeros((), dtype=torch.int64), **more}
        return Batch(self.segments, torch.tensor(self.target).float(), torch.arange(b), torch.arange(len(self.h)), **more)


def linear(x, weight, bias):
    return np.array(
        [[add([a * b for a, b in zip(row, w, strict=True)]) + c for w, c in zip(weight, bias, strict=True)] for row in x]
    )


def layer(p, name, x):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)


def relu(x):
    return np.maximum(x, 0)


def norm(p, name, x, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * p[f"{name}.weight"] + p[f"{name}.bias"]


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got.detach().numpy(), np.array(want), rtol=tolerance, atol=tolerance)


def agrees(output, case, instance, logits, tolerance=2e-5):
    """The head said these logits of the instances in their bags, and elected by these logits of bags."""
    close(output.instance[case.kept], np.array(instance)[case.kept], tolerance)
    close(output.bag.exp(), [softmax(list(row)) for row in logits], tolerance)


def cross_entropy(p, target, eps=0.0):
    rows = [i for i in range(len(target)) if target[i].sum() > 0]
    return add([-target[i][k] * math.log(p[i][k] + eps) for i in rows for k in range(C) if target[i][k] > 0]) / max(
        1, len(rows)
    )


# -- the specification's vectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "pool"),
    [
        ("feature_pnorm", {}, (2.030543, 1.198391)),
        ("feature_pnorm", {"norm": True}, (1.542879, 0.910580)),
        ("feature_lse", {}, (8.018479, 4.758624)),
        ("feature_lse", {"norm": True}, (1.729967, 0.915003)),
        ("feature_mean", {}, (1.0, 2.5 / 3)),
        ("feature_max", {}, (2.0, 1.0)),
    ],
)
def test_pools_of_the_specification(name, options, pool):
    """A classifier that passes the two features through, and a third class at zero to measure them against."""
    head = build_head(name, 2, 3, options)
    with torch.no_grad():
        head.classifier.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [0, 0]]))
        head.classifier.bias.zero_()
    bag = head(torch.tensor([[0.0, 1], [2, 0.5], [1, 1]]), Segments.from_sizes([3])).bag[0]
    close(bag[:2] - bag[2], pool, 1e-6)


@pytest.mark.parametrize(("name", "options"), [("feature_pnorm", {"norm": True}), ("feature_lse", {"norm": True})])
def test_normalised_pools_say_of_a_bag_of_one_what_they_say_of_its_instance(name, options):
    h = torch.rand(6, D)
    output = made(name, options)(h, Segments.from_sizes([1] * 6))
    close(output.bag, output.instance.log_softmax(1).detach().numpy())
    official = made(name)(h, Segments.from_sizes([1] * 6))
    same = torch.allclose(official.bag, official.instance.log_softmax(1), atol=1e-3)
    assert same == (name == "feature_pnorm")  # one instance: the p-norm is the instance, log-sum-exp is r times it


def test_rank_pooling_of_the_specification():
    pooled = rank_pool(torch.tensor([[[3.0], [1.0], [2.0]]]), torch.ones(1, 3), 0.996)
    close(pooled, [[2.002672]], 1e-6)


def test_rank_pooling_against_a_loop():
    def law(bags, decay):
        case = Case(bags, weight=True)
        said, _ = case.segments.to_dense(case.h)
        u, _ = case.segments.to_dense(case.segments.weight)
        want = [[ranked([case.x[j][d] for j in sit], decay) for d in range(D)] for sit in case.sits]
        close(rank_pool(said, u, decay), want)

    examine(law, 20, bags=ragged(), decay=st.sampled_from([0.996, 0.951, 0.5, 1.0]))


def ranked(values, decay):
    weights = [decay**k for k in range(len(values))]
    return add([w * v for w, v in zip(weights, sorted(values, reverse=True), strict=True)]) / add(weights)


# -- pools of features -------------------------------------------------------------------------------------------------

POOLS = {
    "feature_mean": [({}, lambda x, sits: bag_mean(x.tolist(), sits))],
    "feature_max": [({}, lambda x, sits: bag_max(x.tolist(), sits))],
    "feature_pnorm": [
        ({"p": p, "norm": n}, lambda x, sits, p=p, n=n: powers(x, sits, p, n)) for p in (1, 4, 8) for n in (False, True)
    ],
    "feature_lse": [
        ({"r": r, "norm": n}, lambda x, sits, r=r, n=n: soft_max(x, sits, r, n)) for r in (4, 0.5) for n in (False, True)
    ],
}


def powers(x, sits, p, normalised):
    total = bag_sum((np.maximum(x, 0) ** p).tolist(), sits)
    return [[(v / len(sit) if normalised else v) ** (1 / p) for v in row] for row, sit in zip(total, sits, strict=True)]


def soft_max(x, sits, r, normalised):
    total = bag_logsumexp((r * x).tolist(), sits)
    return [[(v - math.log(len(sit))) / r if normalised else v for v in row] for row, sit in zip(total, sits, strict=True)]


@pytest.mark.parametrize("name", POOLS)
def test_pooled_features_against_loops(name):
    for options, pool in POOLS[name]:

        def law(bags, weight, options=options, pool=pool):
            case, head = Case(bags, weight, 2.0), made(name, options)
            p = numbers(head)
            w, b = p["classifier.weight"], p["classifier.bias"]
            output = head(case.h, case.segments)
            agrees(output, case, linear(case.x, w, b), linear(pool(case.x, case.sits), w, b))
            close(head.loss(output, case.batch()), cross_entropy(output.bag.exp().detach().numpy(), case.target))

        examine(law, 12, bags=ragged(), weight=st.booleans())


# -- attention, addition, conjunction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
def test_attention_against_loops(gated):
    def law(bags, weight):
        case, head = Case(bags, weight), made("attention", {"gated": gated, "width": 6})
        p = numbers(head)
        seen = np.tanh(layer(p, "project", case.x))
        seen = seen / (1 + np.exp(-layer(p, "gate", case.x))) if gated else seen
        share = np.array(bag_softmax(layer(p, "score", seen).tolist(), case.sits))
        pool = bag_sum((share * case.x).tolist(), case.sits)
        instance = layer(p, "classifier", case.x)
        agrees(head(case.h, case.segments), case, instance, layer(p, "classifier", np.array(pool)))

    examine(law, 20, bags=ragged(), weight=st.booleans())


def test_additive_against_loops():
    def law(bags, weight):
        case, head = Case(bags, weight), made("additive", {"width": 6})
        p, x = numbers(head), case.x
        for i in (0, 3):
            x = layer(p, f"score.{i}", x)
            x = (x - p[f"score.{i + 1}.running_mean"]) / np.sqrt(p[f"score.{i + 1}.running_var"] + 1e-5)
            x = x * p[f"score.{i + 1}.weight"] + p[f"score.{i + 1}.bias"]
            x = np.where(x > 0, x, 0.2 * x)
        share = np.array(bag_softmax(layer(p, "score.6", x).tolist(), case.sits))
        x = relu(layer(p, "classifier.0", share * case.x))
        instance = layer(p, "classifier.4", relu(layer(p, "classifier.2", x)))
        agrees(head(case.h, case.segments), case, instance, bag_sum(instance.tolist(), case.sits))

    examine(law, 20, bags=ragged(), weight=st.booleans())


@pytest.mark.parametrize("options", [{}, {"confidence": True}, {"positions": True}], ids=str)
def test_millet_against_loops(options):
    def law(bags, weight):
        weight = weight and "positions" not in options
        case, head = Case(bags, weight), made("millet", options)
        p, x = numbers(head), case.x.copy()
        if "positions" in options:
            for sit in case.sits:
                for position, j in enumerate(sit):
                    for d in range(D):
                        angle = position / 10000 ** ((d - d % 2) / D)
                        x[j, d] += math.cos(angle) if d % 2 else math.sin(angle)
        a = 1 / (1 + np.exp(-layer(p, "score.2", np.tanh(layer(p, "score.0", x)))))
        z = layer(p, "classifier", x)
        if "confidence" in options:
            each = a * [softmax(list(row)) for row in z]
            bag = np.log([np.array(v) / add(v) for v in bag_sum(each.tolist(), case.sits)])
        else:
            bag = bag_mean((a * z).tolist(), case.sits)
        agrees(head(case.h, case.segments), case, z, bag)

    examine(law, 20, bags=ragged(), weight=st.booleans())


# -- instance losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"loss": "gce"}, {"loss": "gce", "q": 0.3}], ids=str)
def test_noisy_label_against_loops(options):
    def law(bags, weight):
        case, head = Case(bags, weight), made("noisy_label", options)
        z, q = layer(numbers(head), "classifier", case.x), options.get("q", 0.7)
        probability = [softmax(list(row)) for row in z]
        output = head(case.h, case.segments)
        agrees(output, case, z, np.log(bag_mean(probability, case.sits)))
        losses, rows = [], [i for i in range(len(case.sits)) if case.target[i].sum() > 0]
        for i in rows:
            for j in case.sits[i]:
                for k in range(C):
                    wrong = -math.log(probability[j][k]) if not options else (1 - probability[j][k] ** q) / q
                    losses.append(case.target[i][k] * wrong / len(case.sits[i]))
        close(head.loss(output, case.batch()), add(losses) / max(1, len(rows)))

    examine(law, 15, bags=ragged(), weight=st.booleans())


def test_generalised_cross_entropy_lies_between():
    """q near zero is cross-entropy, q = 1 the probability that is missing."""
    case = Case(Ragged([4, 2], [False] * 6, [1] * 6, 7))
    case.target = np.eye(C)[[1, 3]]
    losses = {}
    for key, options in {"ce": {}, "small": {"loss": "gce", "q": 1e-4}, "one": {"loss": "gce", "q": 1.0}}.items():
        head = made("noisy_label", options)
        output = head(case.h, case.segments)
        losses[key] = float(head.loss(output, case.batch()).detach())
    missing = 1 - (case.segments.mean(output.instance.softmax(1)) * torch.tensor(case.target)).sum(1)
    assert losses["small"] == pytest.approx(losses["ce"], rel=1e-3)
    assert losses["one"] == pytest.approx(float(missing.mean().detach()), rel=1e-5)


def test_supervised_against_loops():
    def law(bags, weight):
        case, head = Case(bags, weight), made("supervised").train()
        z = layer(numbers(head), "classifier", case.x)
        probability = [softmax(list(row)) for row in z]
        known = bags.rng(3).integers(-1, C, bags.n)
        output = head(case.h, case.segments)
        agrees(output, case, z, np.log(bag_mean(probability, case.sits)))
        told = [-math.log(probability[j][known[j]]) for sit in case.sits for j in sit if known[j] >= 0]
        want = add(told) / max(1, len(told))
        close(head.loss(output, case.batch(known=torch.from_numpy(known))), want)
        close(head.eval().loss(output, case.batch(known=torch.from_numpy(known))), want)
        close(head.loss(output, case.batch()), cross_entropy(output.bag.exp().detach().numpy(), case.target))

    examine(law, 20, bags=ragged(), weight=st.booleans())


def test_supervised_says_what_it_lacks():
    assert "instance labels given" in HEADS["supervised"].title
    case, head = Case(Ragged([2], [False] * 2, [1] * 2, 7)), made("supervised").train()
    with pytest.raises(HeadcountError, match=r"supervised learns from instance labels.*known"):
        head.loss(head(case.h, case.segments), case.batch())


@pytest.mark.parametrize("wrong", [{"views": 0}, {"views": True}, {"decay": 1.5}, {"over": "rows"}], ids=str)
def test_supervised_names_a_wrong_option(wrong):
    with pytest.raises(HeadcountError, match=next(iter(wrong))):
        made("supervised", wrong)


# -- AdditiveTransMIL --------------------------------------------------------------------------------------------------


def rows_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def released_attention(p, name, bags, heads, m, iterations, inverse=None):
    """Nystrom attention as released, over a list of bags (rows after the LayerNorm): zero rows in front, no mask, landmarks
    that are means of rows on end, and an inverse that begins with maxima over the whole batch."""
    width, plans = bags[0].shape[1] // heads, []
    for x in bags:
        x = np.concatenate([np.zeros(((-len(x)) % m if len(x) else m, x.shape[1])), x])
        q, k, v = np.split(x @ p[f"{name}.qkv.weight"].T, 3, axis=1)
        for i in range(heads):
            mine = slice(i * width, (i + 1) * width)
            qi, ki, vi = q[:, mine] * width**-0.5, k[:, mine], v[:, mine]
            group = len(x) // m
            q_mark = np.array([qi[g * group : (g + 1) * group].mean(0) for g in range(m)])
            k_mark = np.array([ki[g * group : (g + 1) * group].mean(0) for g in range(m)])
            pairs = ((qi, k_mark), (q_mark, k_mark), (q_mark, ki), (qi, ki))
            plans.append(([rows_softmax(left @ right.T) for left, right in pairs], vi))
    top = max(np.abs(a[1]).sum(1).max() for a, _ in plans) * max(np.abs(a[1]).sum(0).max() for a, _ in plans)
    outs = []
    for b, x in enumerate(bags):
        mixed = []
        for i in range(heads):
            (left, a, right, whole), v = plans[b * heads + i]
            z, one = a.T / top, np.eye(m)
            for _ in range(iterations):
                az = a @ z
                z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
            z = inverse(a) if callable(inverse) else z
            taps = p[f"{name}.residual_conv.weight"][i, 0, :, 0]
            along = np.zeros_like(v)
            for t in range(len(v)):
                for tap in range(33):
                    if 0 <= t + tap - 16 < len(v):
                        along[t] += taps[tap] * v[t + tap - 16]
            mixed.append((whole @ v if inverse == "exact" else left @ z @ right @ v) + along)
        outs.append(
            (np.concatenate(mixed, 1) @ p[f"{name}.out.0.weight"].T + p[f"{name}.out.0.bias"])[len(mixed[0]) - len(x) :]
        )
    return outs


def pinv(a):
    return np.linalg.pinv(a, rcond=1e-12)


def released_additive_trans(head, x, sits, m=6, heads=2, iterations=6, inverse=None):
    """Logits of every instance (in its last seat) and of every bag."""
    p = numbers(head)
    bags = [relu(layer(p, "embed.0", x[sit])) for sit in sits]
    for name in ("layers.0", "layers.1"):
        told = released_attention(p, name, [norm(p, f"{name}.norm", t, 1e-5) for t in bags], heads, m, iterations, inverse)
        bags = [t + u for t, u in zip(bags, told, strict=True)]
    instance, logits = np.zeros((len(x), C)), []
    for t, sit in zip(bags, sits, strict=True):
        said = layer(p, "classifier.3", relu(layer(p, "classifier.1", norm(p, "classifier.0", t, 1e-5))))
        instance[sit] = said
        logits.append(said.sum(0))
    return instance, logits


def transformers(options=None, mute=False, **more):
    """In float64: six steps of the iteration magnify rounding by three each, in the released float32 as in ours."""
    head = made("additive_trans", options, **more).double()
    if mute:
        for attention in head.layers:
            torch.nn.init.zeros_(attention.residual_conv.weight)
    return head


def test_released_nystrom_against_loops():
    """Bags smaller and larger than the six landmarks, removed instances forgotten."""

    def law(bags):
        case, head = Case(bags), transformers()
        want = released_additive_trans(head, case.x, case.sits)
        agrees(head(case.h.double(), case.segments), case, *want, 1e-5)

    examine(law, 15, bags=ragged(most=5))
    examine(law, 25, bags=ragged(most=17))


def test_exact_attention_against_loops():
    """Plain attention over the filled-up bag, whatever its size."""

    def law(bags, m):
        case, head = Case(bags), transformers({"attn": "exact", "landmarks": m})
        want = released_additive_trans(head, case.x, case.sits, m, inverse="exact")
        agrees(head(case.h.double(), case.segments), case, *want, 1e-6)

    examine(law, 25, bags=ragged(most=17), m=st.sampled_from([3, 6, 17]))


@pytest.mark.parametrize("attn", ["nystrom", "exact"])
def test_weights_are_twins_but_for_the_convolution(attn):
    """Small bags and large: u copies are u copies in every mean, softmax and inverse."""

    def law(bags):
        case, head = Case(bags, weight=True), transformers({"attn": attn}, mute=True)
        want = released_additive_trans(head, case.x, case.sits, inverse="exact" if attn == "exact" else None)
        agrees(head(case.h.double(), case.segments), case, *want, 1e-5)

    examine(law, 20, bags=ragged(most=9))


def test_exact_attention_is_what_nystrom_approximates():
    """With the pseudo-inverse itself in the released form, or with many steps of its iteration, the two forms agree."""

    def law(bags):
        case, exact = Case(bags), transformers({"attn": "exact", "landmarks": 17})
        want = released_additive_trans(exact, case.x, case.sits, m=17, inverse=pinv)
        agrees(exact(case.h.double(), case.segments), case, *want, 1e-5)
        patient = transformers({"landmarks": 17, "iterations": 40})
        agrees(patient(case.h.double(), case.segments), case, *want, 1e-4)

    examine(law, 20, bags=ragged(most=17))


def test_released_nystrom_on_a_bag_of_64():
    """Full size: eight heads of 64, 256 landmarks, so 192 zero rows; and the closed form with its extra +192."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads = {attn: build_head("additive_trans", D, C, {"attn": attn}).eval().double() for attn in ("nystrom", "exact")}
    heads["exact"].load_state_dict(heads["nystrom"].state_dict())
    x = np.random.default_rng(0).normal(size=(64, D))
    for attn, inverse in (("nystrom", None), ("exact", pinv)):
        instance, logits = released_additive_trans(heads[attn], x, [list(range(64))], m=256, heads=8, inverse=inverse)
        output = heads[attn](torch.tensor(x), Segments.from_sizes([64]))
        close(output.instance, instance, 1e-6)
        close(output.bag.exp(), [softmax(list(row)) for row in logits], 1e-5)
    p = numbers(heads["exact"])  # one head of the first layer, by hand
    t = norm(p, "layers.0.norm", relu(layer(p, "embed.0", x)), 1e-5)
    q, k, v = (a[:, :64] for a in np.split(t @ p["layers.0.qkv.weight"].T, 3, axis=1))
    e = np.exp(q @ k.T / 8)
    by_hand = e / (e.sum(1, keepdims=True) + 192) @ v
    zeros = np.zeros((192, 64))
    padded = rows_softmax(np.concatenate([zeros, q]) @ np.concatenate([zeros, k]).T / 8) @ np.concatenate([zeros, v])
    np.testing.assert_allclose(by_hand, padded[192:], atol=1e-12)


def test_the_order_of_instances_matters_only_through_the_convolution():
    h = torch.randn(12, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s, order = Segments.from_sizes([5, 7]), torch.tensor([4, 2, 0, 1, 3, 11, 5, 9, 6, 10, 7, 8])
    for attn in ("nystrom", "exact"):
        head = transformers({"attn": attn, "landmarks": 8}, loud=2.0)
        assert head.depends_on_order
        assert (head(h, s).bag - head(h[order], s).bag).abs().max() > 0.1
        mute = transformers({"attn": attn, "landmarks": 8}, mute=True, loud=2.0)
        torch.testing.assert_close(mute(h, s).bag, mute(h[order], s).bag, rtol=1e-4, atol=1e-4)


def test_the_batch_matters_to_the_released_form_only():
    """The same bag beside one where everybody looks at one instance: another start of the inverse, another answer."""
    h = torch.randn(12, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = {}
    for attn in ("nystrom", "exact"):
        head = transformers({"attn": attn, "landmarks": 8}, loud=2.0)
        alone, together = head(h[:5], Segments.from_sizes([5])).bag, head(h, Segments.from_sizes([5, 7])).bag[:1]
        moved[attn] = float((alone - together).abs().max().detach())
        assert head.depends_on_batch == (attn == "nystrom")
    assert moved["nystrom"] > 1e-4
    assert moved["exact"] < 1e-6


def test_without_dropout_training_and_asking_are_the_same():
    h, s = torch.randn(80, D, generator=torch.Generator().manual_seed(0)), Segments.from_sizes([2] * 40)
    for name, option in {"additive_trans": "dropout", "mctformer": "drop_path", "weno": "dropout", "millet": "dropout"}.items():
        head = made(name, {option: 0.0})
        assert torch.equal(head(h, s).bag, head.train()(h, s).bag)
        noisy = made(name).train()
        assert not torch.equal(noisy(h, s).bag, noisy(h, s).bag)
        assert torch.equal(noisy.eval()(h, s).bag, noisy(h, s).bag)


def test_gradient_of_the_iterated_inverse():
    a = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(2)
    z = a.mT / a.sum(1).max()
    assert torch.autograd.gradcheck(lambda *given: IteratedInverse.apply(*given, 3), (a.requires_grad_(), z.requires_grad_()))


# -- MCTformer+ --------------------------------------------------------------------------------------------------------


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def mctformer(head, x, heads=3, layers=2, decay=0.996):
    """One bag: class logits, pooled logits, contrast of every class, patch logits F, listening M, its refinement P."""
    p = numbers(head)
    t = np.concatenate([p["token"] + p["position"], layer(p, "embed", x)])
    contrast, listening, passing = np.zeros(C), 0.0, 0.0
    for b in range(layers):
        n = f"blocks.{b}"
        parts = np.split(layer(p, f"{n}.qkv", norm(p, f"{n}.norm1", t, 1e-6)), 3 * heads, axis=1)
        mixed, mean = [], 0.0
        for i in range(heads):
            q, k, v = parts[i], parts[heads + i], parts[2 * heads + i]
            a = rows_softmax(q @ k.T / math.sqrt(q.shape[1]))
            mixed.append(a @ v)
            mean = mean + a / heads
        t = t + layer(p, f"{n}.out", np.concatenate(mixed, 1))
        t = t + layer(p, f"{n}.mlp.2", gelu(layer(p, f"{n}.mlp.0", norm(p, f"{n}.norm2", t, 1e-6))))
        token = t[:C] / np.linalg.norm(t[:C], axis=1, keepdims=True)
        contrast -= np.log([softmax(list(row))[c] for c, row in enumerate(token @ token.T)]) / layers
        listening, passing = listening + mean[:C, C:] / layers, passing + mean[C:, C:]
    said = layer(p, "patch", t[C:])
    pooled = [ranked(list(said[:, c]), decay) for c in range(C)]
    return t[:C].mean(1), np.array(pooled), contrast, said, listening.T, passing


@pytest.mark.parametrize("options", [{}, {"loss": "softmax"}, {"instance": "patch"}, {"instance": "attention"}], ids=str)
def test_mctformer_against_loops(options):
    fallbacks = 0

    def law(bags, weight):
        nonlocal fallbacks
        case, head = Case(bags, weight), made("mctformer", options, seed=bags.seed % 5)
        instance, logits, parts = np.zeros((len(case.x), C)), [], []
        for sit in case.sits:
            token, pooled, contrast, said, listening, passing = mctformer(head, case.x[sit])
            felt = passing @ np.sqrt(listening * relu(said))
            kind = options.get("instance", "fused")
            for row, j in enumerate(sit):
                nothing = not felt[row].any()
                fallbacks += nothing
                fused = said[row] if nothing else felt[row] * math.sqrt(len(sit)) / 2  # two blocks: the mean, not the sum
                instance[j] = {"fused": fused, "patch": said[row], "attention": np.log(listening[row])}[kind]
                if kind == "fused":  # scaling changed nobody's class
                    assert np.argmax(instance[j]) == np.argmax(said[row] if nothing else felt[row])
            logits.append((token + pooled) / 2)
            parts.append((token, pooled, contrast))
        output = head(case.h, case.segments)
        agrees(output, case, instance, logits, 5e-4)
        close(head.loss(output, case.batch()), mctformer_loss(parts, case.target, options.get("loss")), 1e-4)

    examine(law, 20, bags=ragged(), weight=st.booleans())
    assert fallbacks or options


def mctformer_loss(parts, target, kind):
    total, rows = 0.0, [i for i in range(len(parts)) if target[i].sum() > 0]
    for i in rows:
        total += add(target[i] * parts[i][2])
        for logits in parts[i][:2]:
            if kind == "softmax":
                total -= add(target[i] * np.log(softmax(list(logits))))
            else:
                yes = 1 / (1 + np.exp(-logits))
                total -= add(target[i] * np.log(yes) + (1 - target[i]) * np.log(1 - yes)) / C
    return total / max(1, len(rows))


def test_mctformer_leaves_classes_that_do_not_count_out_of_its_losses():
    counted = torch.tensor([True, False, True, True])
    case, head = Case(Ragged([3, 2], [False] * 5, [1] * 5, 7)), made("mctformer", counted=counted)
    case.target = np.eye(C)[[0, 2]]
    output = head(case.h, case.segments)
    for part in ("token", "pooled"):
        output.parts[part].retain_grad()
    head.loss(output, case.batch()).backward()
    assert all(not output.parts[part].grad[:, 1].any() for part in ("token", "pooled"))


def test_mctformer_may_be_selected_by_its_bags():
    case = Case(Ragged([3, 2], [False] * 5, [1] * 5, 7))
    case.target = np.eye(C)[[0, 2]]
    head = made("mctformer", {"validation": "bag"})
    output = head(case.h, case.segments)
    want = cross_entropy(output.bag.exp().detach().numpy(), case.target)
    close(head.loss(output, case.batch()), want)
    assert float(head.train().loss(output, case.batch()).detach()) != pytest.approx(want, abs=1e-3)


# -- WENO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one_vs_rest", "classwise"])
def test_weno_against_loops(kind):
    def law(bags, weight):
        case, head = Case(bags, weight), made("weno", {"loss": kind})
        p = numbers(head)
        seen = relu(layer(p, "teacher_network.embed.4", relu(layer(p, "teacher_network.embed.1", case.x))))
        score = layer(p, "teacher_network.score.2", np.tanh(layer(p, "teacher_network.score.0", seen)))
        share, logits = np.array(bag_softmax(score.tolist(), case.sits)), np.zeros((len(case.sits), C))
        for c in range(C):
            pool = np.array(bag_sum((share[:, [c % share.shape[1]]] * seen).tolist(), case.sits))
            logits[:, c] = layer(p, "teacher_network.classifier", pool)[:, c]
        student = layer(p, "student.4", relu(layer(p, "student.2", relu(layer(p, "student.0", case.x)))))
        output = head(case.h, case.segments)
        agrees(output, case, student, logits)
        close(head.loss(output, case.batch()), cross_entropy(output.bag.exp().detach().numpy(), case.target, 1e-5))

    examine(law, 15, bags=ragged(), weight=st.booleans())


@pytest.mark.parametrize("kind", ["one_vs_rest", "soft", "classwise"])
def test_weno_range_and_student_losses_against_loops(kind):
    """The range is of this epoch's teacher pass alone, dropout and all; q and the loss follow."""

    def law(bags, weight, w, counts):
        counted = torch.tensor([True, False, True, True]) if counts else None
        head = made("weno", {"loss": kind, "w": w}, counted).train()
        case, scores = Case(bags), []
        for epoch in (0, 1, 1):
            output = head(case.h, case.segments)
            head.loss(output, case.batch(epoch=torch.tensor(epoch)))
            scores.append(output.parts["score"].detach().double().numpy()[case.kept])
        both = np.concatenate(scores[1:])
        low, high = both.min(0), both.max(0)
        close(head.lowest, low)
        close(head.highest, high)
        loose = loosened(case, bags, weight)
        output = head(case.h, loose.segments)
        a, z = output.parts["score"].detach().double().numpy(), output.instance.detach().double().numpy()
        total, mass = 0.0, 0.0
        for j in loose.kept:
            y, times = loose.target[j], bags.weight[j] if weight else 1
            if y.sum() > 0:
                q = np.clip((a[j] - low) / np.maximum(high - low, 1e-12), 1e-5, 1 - 1e-5)
                able = [c for c in range(C) if counted is None or counted[c]]
                total += times * add([y[k] * student_loss(kind, z[j], q, k, w, able) for k in range(C)])
                mass += times
        if counts and kind == "classwise":
            return  # a label may fall on the class that does not count; the next test has clean ones
        close(head.loss(output, loose.batch(over="instances")), total / max(mass, 1e-12), 1e-4)

    examine(law, 15, bags=ragged(), weight=st.booleans(), w=st.sampled_from([0.2, 0.1]), counts=st.booleans())


def student_loss(kind, z, q, k, w, able):
    """Of one instance of a bag labelled k."""
    if kind == "soft":
        p = softmax(list(z))
        return -add([(q[0] if c == k else (1 - q[0]) / (C - 1)) * math.log(p[c]) for c in range(C)])
    if kind == "one_vs_rest":
        p = softmax(list(z))[k]
        return -((1 - w) * q[0] * math.log(p + 1e-5) + w * (1 - q[0]) * math.log(1 - p + 1e-5))
    p = 1 / (1 + np.exp(-z))
    q = [q[c] if c == k else 0.0 for c in range(C)]
    each = [-((1 - w) * q[c] * math.log(p[c] + 1e-5) + w * (1 - q[c]) * math.log(1 - p[c] + 1e-5)) for c in able]
    return add(each) / len(able)


def loosened(case, bags, weight):
    """The same instances, each a bag of one with its bag's label."""
    loose = Case(bags, weight)
    s = Segments.from_sizes([1] * bags.n)
    s = s.with_weight(torch.tensor(bags.weight, dtype=torch.float32)) if weight else s
    loose.segments, loose.target = s.without(torch.tensor(bags.removed)), case.target[bags.index]
    return loose


def test_weno_classwise_leaves_out_what_does_not_count():
    counted = torch.tensor([True, False, True, True])
    bags = Ragged([3, 2], [False] * 5, [1] * 5, 7)
    head, case = made("weno", {"loss": "classwise"}, counted), Case(bags)
    case.target = np.eye(C)[[0, 2]]
    loose = loosened(case, bags, False)
    output = head(case.h, loose.segments)
    q = head.membership(output.parts["score"]).double().numpy()
    z = output.instance.detach().double().numpy()
    want = [student_loss("classwise", z[j], q[j], int(loose.target[j].argmax()), 0.2, [0, 2, 3]) for j in range(5)]
    close(head.loss(output, loose.batch(over="instances")), add(want) / 5)


@pytest.mark.parametrize("options", [{"mining": "threshold", "threshold": 0.25}, {"mining": "lowest", "hardest": 2}], ids=str)
def test_weno_mining_against_loops(options):
    """After ``mining_after`` epochs the teacher is judged on the hard instances alone, and never on nobody."""

    def law(bags, kind):
        case, head = (Case(bags), made("weno", {**options, "loss": kind, "mining_after": 3, "dropout": 0.0}, loud=2.0).train())
        case.target = np.eye(C)[case.target.argmax(1)]
        output = head(case.h, case.segments)
        z = output.instance.detach()
        p = (z.sigmoid() if kind == "classwise" else z.softmax(1)).double().numpy()
        hard = torch.zeros(bags.n, dtype=torch.bool)
        for i, sit in enumerate(case.sits):
            k = int(case.target[i].argmax())
            ascending = sorted(sit, key=lambda j, k=k: p[j][k])
            low = [j for j in sit if p[j][k] <= 0.25] or ascending[:1]
            stay = ascending[:2] if options["mining"] == "lowest" else low
            hard[stay] = True
            hard[[j for j in sit if p[j][k] == p[stay[-1]][k]]] = True  # twins of the last
        mined = head(case.h, case.segments.without(~hard)).bag.exp().detach().numpy()
        plain = output.bag.exp().detach().numpy()
        for epoch, said in ((2, plain), (3, mined)):
            close(head.loss(output, case.batch(epoch=torch.tensor(epoch))), cross_entropy(said, case.target, 1e-5), 1e-4)

    examine(law, 15, bags=ragged(), kind=st.sampled_from(["one_vs_rest", "classwise"]))


# -- in the loop -------------------------------------------------------------------------------------------------------


def tiny(name, even=True, options=None, known=None, seed=0):
    """A model and bags of random features."""
    rng = np.random.default_rng(seed)
    sizes = [6] * 10 if even else [3, 7, 1, 5, 9, 2, 4, 6, 8, 3]
    parts = []
    for _ in range(2):
        n = sum(sizes)
        pool = Pool(rng.normal(size=(n, 3)).astype(np.float32))
        extras = {} if known is None else {"known": rng.integers(-1, C, n)}
        parts.append(Bags.of(pool, sizes=sizes, labels=rng.integers(0, C, 10), classes=C, **extras))
    options = {**SMALL.get(name, {}), **(options or {})}
    torch.manual_seed(seed)
    design = ModelConfig((3,), parts[0].classes, "mlp", (("hidden", 8),), name, tuple(options.items()))
    recipe = Recipe(backbone="mlp", head=name, options=options, epochs=2, batch_bags=4, lr=1e-2)
    return Model(design), *parts, recipe


TRAINED = [
    *((name, {}) for name in NAMES),
    ("feature_pnorm", {"norm": True}),
    ("feature_lse", {"norm": True}),
    ("attention", {"gated": True}),
    ("additive_trans", {"attn": "exact"}),
    ("additive_trans", {"landmarks": 4}),
    ("millet", {"confidence": True, "positions": True}),
    ("mctformer", {"loss": "softmax", "instance": "patch"}),
    ("mctformer", {"instance": "attention", "validation": "bag"}),
    ("weno", {"loss": "soft", "mining": "threshold", "mining_after": 1}),
    ("weno", {"loss": "classwise", "mining": "lowest", "mining_after": 1, "hardest": 2}),
    ("noisy_label", {"loss": "gce"}),
    ("supervised", {"over": "instances", "views": 2, "decay": 0.9}),
]


@pytest.mark.parametrize(("even", "precision"), [(True, "fp32"), (False, "fp32"), (True, "bf16")])
@pytest.mark.parametrize(("name", "options"), TRAINED, ids=str)
def test_every_head_trains(name, options, even, precision):
    model, train, valid, recipe = tiny(name, even, options, known=True if name == "supervised" else None)
    before = {k: v.clone() for k, v in model.named_parameters()}
    gone = torch.zeros(len(train.index), dtype=torch.bool)
    gone[1] = True
    fitted = loop.train(model, train.without(gone), valid, recipe.replace(precision=precision).train_config)
    assert np.isfinite(fitted.progress.curve).all()
    assert fitted.progress.epoch == 2
    for k, v in fitted.model.named_parameters():
        assert v.isfinite().all()
        assert not torch.equal(v, before[k]), f"{k} did not learn"


def test_supervised_without_labels_does_not_train():
    model, train, valid, recipe = tiny("supervised")
    with pytest.raises(HeadcountError, match="instance labels"):
        loop.train(model, train, valid, recipe.train_config)


@pytest.mark.parametrize("kind", ["one_vs_rest", "classwise"])
def test_weno_passes_train_what_they_declare(kind):
    model, train, valid, recipe = tiny("weno", options={"loss": kind})
    state = Trainer(model, train, valid, recipe.train_config)
    assert list(state.optimizers) == ["backbone", "head.teacher_network", "head.student"]
    declared = {n for n, _ in state.model.named_parameters() if n.startswith(tuple(state.optimizers))}
    assert declared == {n for n, _ in state.model.named_parameters()}
    state.model.train()
    for one, spared in zip(state.head.passes, ("head.student", "head.teacher_network"), strict=True):
        before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
        for which in state.train_loader.shuffled(one.over, 0, 0):
            state.train_steps[one](which)
        moved = {n for n, p in state.model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {n for n in before if not n.startswith(spared)}


def test_weno_range_is_of_the_last_teacher_pass():
    """Over a real epoch: neither the student's pass nor validation moves it, and a new epoch begins anew."""
    model, train, valid, recipe = tiny("weno")
    state = Trainer(model, train, valid, recipe.train_config)
    said, noted = [], []
    state.head.teacher_network.register_forward_hook(lambda _module, _given, output: said.append(output[1].detach().clone()))
    original = state.head.update_range
    state.head.update_range = lambda *given: (noted.append(said[-1]), original(*given))
    for epoch in range(2):
        noted.clear()
        state.train_epoch(epoch)
        state.valid_loss()
        every = torch.cat(noted)
        assert len(every) == len(train.index)
        assert torch.equal(state.head.lowest, every.amin(0))
        assert torch.equal(state.head.highest, every.amax(0))
        assert int(state.head.range_epoch) == epoch
    assert not any(k.endswith(("lowest", "highest", "range_epoch")) for k in state.model.state_dict())


# -- the contract, over more options than test_head_contract.py gives it --------------------------------------------------------

VARIANTS = {
    "feature_pnorm": ({"p": 1}, {"p": 8, "norm": True}),
    "feature_lse": ({"r": 1.0},),
    "additive_trans": ({"landmarks": 3, "iterations": 8}, {"attn": "exact", "landmarks": 3}),
    "weno": ({"loss": "soft"}, {"mining": "lowest"}),
    "noisy_label": ({"loss": "gce", "q": 1.0},),
}
LAWS = [
    law
    for name, law in vars(contract).items()
    if name.startswith("test_")
    and name != "test_wrong_value_is_refused"
    and list(inspect.signature(law).parameters) == ["name", "options"]
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("test_"))
@pytest.mark.parametrize(("name", "options"), [(n, o) for n, all_ in VARIANTS.items() for o in all_], ids=str)
def test_contract(law, name, options, monkeypatch):
    options = {**SMALL.get(name, {}), **options}
    if why := head_cases.excuse(law.__name__, name, options):
        pytest.skip(why)
    monkeypatch.setattr(contract, "CASES", 5)
    law(name, options)


WRONG = {
    "feature_pnorm": ({"p": 0.5}, {"p": math.nan}, {"p": "four"}),
    "feature_lse": ({"r": 0}, {"r": -1.0}),
    "additive_trans": ({"attn": "nystroem"}, {"width": 10}),
    "mctformer": ({"loss": "sigmoid"}, {"instance": "mask"}, {"decay": 0.0}, {"layers": 0}, {"validation": "none"}),
    "weno": ({"loss": "hard"}, {"mining": "on"}, {"w": 1.5}, {"hardest": 0}),
    "noisy_label": ({"loss": "mae"}, {"q": 0.0}, {"q": 2}),
}


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, all_ in WRONG.items() for o in all_], ids=str)
def test_wrong_value_is_refused(name, options):
    head_cases.expect_error(lambda: build_head(name, D, C, options), *options)


PARAMETERS = {  # of 512 features and 10 classes
    "feature_mean": 5_130,
    "feature_max": 5_130,
    "feature_pnorm": 5_130,
    "feature_lse": 5_130,
    "attention": 70_923,
    "additive": 398_091,
    "additive_trans": 2_498_330,  # without the released form's idle position module
    "millet": 9_243,
    "mctformer": 21_502_090,
    "weno": 21_034_005,
    "noisy_label": 5_130,
    "supervised": 5_130,
}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts(name):
    with torch.device("meta"):
        head = build_head(name, 512, 10, {})
    assert sum(p.numel() for p in head.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "options"), [*TRAINED, ("count", {})], ids=str)
@pytest.mark.parametrize("extras", ["plain", "removed", "weighted", "counted"])
def test_a_step_reads_nothing_from_the_device(name, options, extras, monkeypatch):
    """With bags of one size, shapes are all that Python may know: a step is captured as a graph. Tensors without numbers in
    them refuse every other question."""
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda t, **_: t)  # this one asks, but only once
    with FakeTensorMode():
        counted = torch.tensor([True, False, True, True]) if extras == "counted" else None
        head = build_head(name, D, C, {**SMALL.get(name, {}), **options}, counted)
        for over in dict.fromkeys(one.over for one in head.passes):
            b, size = (3, 7) if over == "bags" else (21, 1)
            s = Segments(torch.arange(21) // size, b, size).with_weight(torch.rand(21) if extras == "weighted" else None)
            s = s.without(torch.rand(21) < 0.3) if extras == "removed" else s
            where = torch.arange(b), torch.arange(21)
            batch = Batch(s, torch.rand(b, C), *where, torch.arange(21) % C, torch.zeros((), dtype=torch.int64), over)
            head.train().loss(head(torch.randn(21, D), s), batch).backward()
            head.eval().loss(head(torch.randn(21, D), s), batch)
