"""The fused stem against the layers it stands for: on the CPU by Triton's interpreter, on a card as it runs there."""

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch on a machine with a card, and with the extra dev")

from headcount.models.backbones import ResNet18
from headcount.training import speed, stem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    """On a card the layers would round to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def fast() -> AbstractContextManager:
    """A card's kernels multiply bf16 alone."""
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if DEVICE.type == "cuda" else nullcontext()


def same(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """To the last digits of float32; on a card as far as bf16 lets slopes agree, which hang on the few windows that rounding
    lifts above zero."""
    if DEVICE.type == "cuda":
        off = float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-6))
        assert off < (0.02 if name in ("pooled", "running_mean", "running_var") else 0.2), (name, off)
    else:
        scale = float(want.double().abs().max()) or 1.0
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * scale, msg=lambda m: f"{name}: {m}")


def pair(channels: int, seed: int, **options) -> tuple[ResNet18, ResNet18]:
    """The layers, and the fused stem with the same weights; batch-norm's weights of either sign."""
    torch.manual_seed(seed)
    layers = ResNet18(channels, **options).to(DEVICE)
    with torch.no_grad():
        layers.bn1.weight.uniform_(-1, 1.5)
        layers.bn1.bias.uniform_(-0.5, 0.5)
    fused = copy.deepcopy(layers)
    fused.__class__ = stem.FusedStem
    return layers, fused


def outcome(network: ResNet18, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    network.train().zero_grad()
    said = network.stem(x)
    said.backward(grad.to(said.dtype))
    learned = {name: network.get_parameter(name).grad for name in ("conv1.weight", "bn1.weight", "bn1.bias")}
    return {"pooled": said.detach(), **learned, **dict(network.bn1.named_buffers())}


def pixels(n: int, channels: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, side, side, channels, device=DEVICE).permute(0, 3, 1, 2)
    small = (side + 3) // 4
    return x + 0.3, torch.randn(n, 64, small, small, device=DEVICE)


@pytest.mark.parametrize(
    ("n", "channels", "side"), [(3, 3, 32), (2, 1, 28), (5, 3, 12), (1, 2, 18), (9, 3, 6), (4, 3, 31), (3, 1, 9)]
)
def test_the_fused_stem_is_the_layers(n, channels, side):
    layers, fused = pair(channels, seed=n)
    x, grad = pixels(n, channels, side)
    want = outcome(layers, x, grad)
    with fast():
        got = outcome(fused, x, grad)
    for name, value in want.items():
        same(got[name], value, name)


def test_bf16_rounds_no_worse_than_the_layers():
    """Against float32 layers on the same rounded weights and images: the fused stem in bf16 may be no further off than the
    layers in bf16. (Half as much again for gradients: they hang on the few windows that rounding lifts above zero.)"""
    off: dict[str, list[list[float]]] = {}
    for seed in range(3):
        layers, fused = pair(3, seed=seed)
        x, grad = (t.bfloat16().float() for t in pixels(16, 3, 32))
        for network in (layers, fused):
            network.conv1.weight.data = network.conv1.weight.data.bfloat16().float()
        exact = outcome(copy.deepcopy(layers), x, grad)
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
            found = [outcome(network, x, grad) for network in (layers, fused)]
        for name in ("pooled", "conv1.weight", "bn1.weight", "bn1.bias", "running_mean", "running_var"):
            apart = [float((one[name].float() - exact[name]).norm() / exact[name].norm()) for one in found]
            off.setdefault(name, []).append(apart)
    for name, rows in off.items():
        usual, ours = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        assert ours <= (1.5 if name.endswith(("weight", "bias")) else 1.1) * usual + 2e-3, (name, ours, usual)


def test_in_eval_mode_it_is_the_layers_with_what_was_learned():
    layers, fused = pair(3, seed=2)
    x, _ = pixels(6, 3, 32)
    layers.train().stem(x)
    fused.load_state_dict(layers.state_dict())
    want = layers.eval().stem(x).detach()
    assert torch.equal(fused.eval().stem(x), want)  # with gradients the layers answer
    with torch.no_grad(), fast():
        same(fused.stem(x), want, "pooled")


def test_it_traces():
    _, fused = pair(3, seed=3)
    x, grad = pixels(4, 3, 32)
    with fast():
        want = outcome(copy.deepcopy(fused), x, grad)
        fused.stem = torch.compile(fused.stem, backend="aot_eager", fullgraph=True)
        got = outcome(fused, x, grad)
    for name, value in want.items():
        same(got[name], value, name)


def test_only_the_stem_that_is_written_here_is_replaced(monkeypatch):
    assert stem.usable(ResNet18(3))
    assert not stem.usable(ResNet18(3, stem="small"))
    assert not stem.usable(ResNet18(3, stem="pool"))
    assert not stem.usable(ResNet18(3, width=16))
    assert not stem.usable(ResNet18(4))
    monkeypatch.setattr(speed, "_stem_runs", lambda device: True)
    for precision, device, fused in (("bf16", "cuda", True), ("tf32", "cuda", False), ("bf16", "cpu", False)):
        network = ResNet18(3)
        names = list(network.state_dict())
        speed.arrange(network, torch.device(device), precision)
        assert isinstance(network, stem.FusedStem) == fused
        assert list(network.state_dict()) == names


def test_a_card_that_cannot_run_the_kernels_gets_the_layers(monkeypatch):
    def too_small(device):
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(stem, "try_out", too_small)
    speed._stem_runs.cache_clear()
    network = ResNet18(3)
    with pytest.warns(UserWarning, match=r"layer by layer, .*\(RuntimeError: out of resource: shared memory\)$"):
        speed.arrange(network, torch.device("cuda"), "bf16")
    assert type(network) is ResNet18
    speed.arrange(ResNet18(3), torch.device("cuda"), "bf16")  # said once
    speed._stem_runs.cache_clear()


@pytest.mark.soak
def test_trying_out():
    stem.try_out(DEVICE)
