"""The heads, their options and their exceptions, for every test over the table of heads.

Give the options of a new head a line in VARIANTS. A head that breaks a law on purpose gets a line in EXCUSED, with its reason.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from headcount.bags import Bags, Pool, Segments
from headcount.errors import HeadcountError
from headcount.models.heads import HEADS, Batch, build_head, head_options
from headcount.models.network import Model, ModelConfig

VARIANTS = {
    "count": (
        {"t1": 1.0},
        {"t1": 1.0, "t2": 1.0},
        {"mode": "count"},
        {"reduction": "paper"},
        {"mode": "count", "reduction": "paper", "t2": 0.5},
    ),
    "output_mean": ({"form": "nll"}, {"form": "tempered"}, {"form": "logit"}),
    "election": ({"form": "independent"}, {"form": "conditioned"}, {"form": "normal"}),
    "feature_pnorm": ({"norm": True}, {"p": 8}),
    "feature_lse": ({"norm": True},),
    "attention": ({"gated": True},),
    "additive_trans": ({"attn": "exact"}, {"landmarks": 4}),
    "millet": ({"confidence": True}, {"positions": True}),
    "mctformer": ({"loss": "softmax", "instance": "patch"}, {"instance": "attention", "decay": 1.0}, {"validation": "bag"}),
    "weno": ({"loss": "soft", "mining": "threshold"}, {"loss": "classwise", "mining": "lowest", "hardest": 2}),
    "noisy_label": ({"loss": "gce"},),
    "proportion": ({"likelihood": "proportion"},),
    "tilt": (
        {"own": 0.5},
        {"over": "instances", "bag": 1.0, "form": "one"},
        {"teach": 0, "form": "class", "instance": 0, "bag": 0.5},
        {"share": 0.4, "bag": 0, "adapt": False, "fade": 0.1, "start": 0.0},
    ),
}
# any head with such an option is examined this small
SMALL = {"width": 12, "student_width": 12, "layers": 2, "heads": 2, "landmarks": 16}
EXCUSED: dict[str, dict[str, str]] = {}  # law -> head -> why it need not keep it
DECLARED = {  # what a head may say of itself -> the laws that it then need not keep
    "depends_on_order": (
        "test_order_of_instances_is_irrelevant",
        "test_weight_two_is_a_duplicate",  # twins stand somewhere, and move the others along
        "test_votes_are_counted_in_float32",
    ),
    "depends_on_batch": (
        "test_bags_are_independent",
        "test_bag_of_one",
        "test_an_emptied_bag_does_not_affect_others",
        "test_soft_label_is_a_mixture",
        "test_unlabelled_bags_do_not_matter",
        "test_predictions_in_parts_are_the_same",
    ),
}

D, C, CASES = 5, 4, 6


def over_heads(law):
    """Parametrise a law over every head, under its defaults and its variants."""
    params = [
        pytest.param(
            name,
            options,
            id="-".join([name, *(f"{k}={v}" for k, v in options.items())]),
            marks=[pytest.mark.skip(reason=why)] if (why := excuse(law.__name__, name, options)) else [],
        )
        for name in HEADS
        for options in ({}, *VARIANTS.get(name, ()))
    ]
    return pytest.mark.parametrize(("name", "options"), params)(law)


def excuse(law, name, options):
    said = [what for what in declared(name, tuple(options.items())) if law in DECLARED[what]]
    return EXCUSED.get(law, {}).get(name) or (f"{name} declares {said[0]}" if said else None)


@cache
def declared(name, options):
    return [what for what in DECLARED if getattr(small_head(name, dict(options)), what)]


def small_options(name, options):
    return {**{k: v for k, v in SMALL.items() if k in head_options(name)}, **options}


def small_head(name, options, counted=None, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_head(name, D, C, small_options(name, options), counted).eval()


def features(bags, scale=1.0):
    return torch.tensor(bags.rng(1).normal(size=(bags.n, D)) * scale, dtype=torch.float32)


def near(a: Tensor, b: Tensor, tolerance=1e-5):
    np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), rtol=tolerance, atol=tolerance)


def setup(head, sizes) -> None:
    """As before a training on labelled bags of these sizes."""
    head.setup(Segments.from_sizes(sizes), torch.eye(head.classes)[torch.arange(len(sizes)) % head.classes])


def network_and_bags(name="count", options=None, counted=None, backbone="mlp"):
    """A small network with this head, and ragged bags with weights and removed instances."""
    rng = np.random.default_rng(0)
    config = ModelConfig(
        (3,),
        tuple("abcd"),
        backbone,
        (("hidden", 6), ("dropout", 0.5)) if backbone == "mlp" else (),
        name,
        tuple(small_options(name, options or {}).items()),
        counted,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(config)
    pool = Pool(rng.normal(size=(30, 3)).astype(np.float32))
    sizes = [4, 1, 7, 2, 6]
    bags = Bags.of(
        pool,
        index=rng.integers(0, 30, 20),
        sizes=sizes,
        labels=[0, 1, 3, -1, 0],
        classes=list("abcd"),
        weight=rng.integers(1, 4, 20),
        counted=None if counted is None else list(counted),
    )
    gone = np.zeros(20, dtype=bool)
    gone[[0, 6, 7, 15]] = True
    return model, bags.without(gone)


def expect_error(call, *words):
    """A HeadcountError of one line with these words."""
    with pytest.raises(HeadcountError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


def why_never_split(head) -> str:
    """Why the batches of this head are never split; empty if they can be."""
    batch = Batch(Segments.from_sizes([1]), torch.eye(C)[:1], torch.arange(1), torch.arange(1))
    try:
        head.loss_weight(batch)
    except NotImplementedError as reason:
        return str(reason)
    return ""


NEVER_SPLIT = [name for name in HEADS if why_never_split(small_head(name, {}))]
