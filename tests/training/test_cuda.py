"""On a card only: what capture and compilation change is the time, for every head; and how far a run repeats itself."""

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool
from headcount.experiments.recipe import Recipe
from headcount.models.heads import HEADS
from headcount.models.network import Model, ModelConfig
from headcount.training import accel
from headcount.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")


def some_bags(pool: Pool, bags: int, size: int, known: bool, seed: int) -> Bags:
    rng = np.random.default_rng(seed)
    index = rng.integers(0, len(pool), bags * size)
    extra = {"known": rng.integers(0, 3, bags * size)} if known else {}
    labels = rng.integers(0, 3, bags)
    return Bags.of(pool, index=index, sizes=[size] * bags, labels=labels, classes=3, **extra).to("cuda")


def curve(head: str, shape: tuple[int, ...], backbone: str, epochs: int, compile: str = "off", precision="fp32", **options):
    """The losses of each epoch and the last weights."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 256, (300, *shape), dtype=np.uint8) if len(shape) == 3 else rng.normal(size=(300, *shape))
    pool = Pool(kind.astype(np.uint8 if len(shape) == 3 else np.float32)).to("cuda")
    told = HEADS[head].uses_instance_labels
    torch.manual_seed(0)
    model = Model(ModelConfig(shape, ("a", "b", "c"), backbone, head=head, options=tuple(options.items()))).to("cuda")
    recipe = Recipe(source="digits", head=head, backbone=backbone, batch_bags=8, precision=precision)
    state = Trainer(model, some_bags(pool, 20, 8, told, 1), some_bags(pool, 12, 8, told, 2), recipe.train_config, compile)
    losses = []
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        losses.append((float(state.train_epoch(epoch)), float(state.valid_loss())))
    return np.array(losses), {k: v.clone() for k, v in state.model.state_dict().items()}


@pytest.mark.parametrize("head", HEADS)
def test_a_captured_head_learns_as_the_plain_one(head, monkeypatch):
    captured, _ = curve(head, (20,), "mlp", 8)
    monkeypatch.setattr(accel, "cuda_graph", lambda function, device: function)
    plain, _ = curve(head, (20,), "mlp", 8)
    assert np.isfinite(captured).all()
    np.testing.assert_allclose(captured, plain, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("head", "dropout"), [("additive_trans", "dropout"), ("mctformer", "drop_path"), ("weno", "dropout")])
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_a_compiled_head_learns_as_the_plain_one(head, dropout):
    (compiled, _), (plain, _) = (curve(head, (20,), "mlp", 4, compile, **{dropout: 0.0}) for compile in ("on", "off"))
    np.testing.assert_allclose(compiled, plain, rtol=5e-3, atol=5e-4)


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's own, on importing its compiler
def test_a_compiled_network_repeats_itself():
    """The whole fast path twice; printed, so that the bound in docs/explanation/speed.md can be seen again."""
    (one, a), (two, b) = (curve("count", (32, 32, 3), "resnet18", 6, "on", "bf16") for _ in range(2))
    apart = max(float((a[k].float() - b[k].float()).abs().max()) for k in a)
    print(f"largest difference of a weight after 6 epochs: {apart:g}; of a loss: {np.abs(one - two).max():g}")
    np.testing.assert_allclose(one, two, rtol=5e-2)
