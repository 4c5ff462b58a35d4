"""The fused stem against the layers it stands for: on the CPU by Triton's interpreter, on a card as it runs there."""

import copy
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch on a machine with a card, and with the extra dev")

from headcount.errors import HeadcountError
from headcount.models.backbones import ResNet18
from headcount.training import accel, stem

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


@pytest.fixture
def called(monkeypatch) -> list[torch.dtype]:
    """What the operation was called with, each time: that it is not the layers that answer."""
    plain, seen = stem.stem, []

    def spy(x, *rest):
        seen.append(x.dtype)
        return plain(x, *rest)

    monkeypatch.setattr(stem, "stem", spy)
    return seen


def pixels(n: int, channels: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, side, side, channels, device=DEVICE).permute(0, 3, 1, 2)
    small = (side + 3) // 4
    return x + 0.3, torch.randn(n, 64, small, small, device=DEVICE)


@pytest.mark.parametrize(
    ("n", "channels", "side"), [(3, 3, 32), (2, 1, 28), (5, 3, 12), (1, 2, 18), (9, 3, 6), (4, 3, 31), (3, 1, 9)]
)
def test_the_fused_stem_is_the_layers(n, channels, side, called):
    layers, fused = pair(channels, seed=n)
    x, grad = pixels(n, channels, side)
    want = outcome(layers, x, grad)
    with fast():
        got = outcome(fused, x, grad)
    assert len(called) == 1
    for name, value in want.items():
        same(got[name], value, name)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="bf16 cannot tell such pictures apart")
def test_images_with_little_variation():
    layers, fused = pair(3, seed=4)
    x, _ = pixels(6, 3, 16)
    for shade in (x * 1e-4 + 1, x * 0 + 1, x + 50):
        want, said = (network.train().stem(shade) for network in (layers, fused))
        torch.testing.assert_close(said, want, rtol=1e-2, atol=2e-3)


def test_what_is_no_number_stays_none(called):
    layers, fused = pair(3, seed=5)
    x, _ = pixels(3, 3, 16)
    fused.conv1.weight.data[0] = layers.conv1.weight.data[0] = float("nan")
    with fast(), torch.no_grad():
        for mode in (True, False):
            want, said = (network.train(mode).stem(x) for network in (layers, fused))
            assert torch.equal(said.isnan(), want.isnan())
            assert said.isnan()[:, 0].all()
    assert len(called) == 2


def test_where_the_layers_answer(called, monkeypatch):
    """Gradients of images, one value a channel, nothing at all, maps too large for addresses of 32 bits, batch-norm apart."""
    _, fused = pair(3, seed=6)
    x, _ = pixels(3, 3, 16)
    with fast():
        leaf = x.clone().requires_grad_()
        fused.stem(leaf).sum().backward()
        assert leaf.grad is not None
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            fused.train().stem(x[:1, :, :2, :2])
        with torch.no_grad():
            assert fused.eval().stem(x[:0]).shape == (0, 64, 4, 4)
            monkeypatch.setattr(stem, "MAX_ELEMENTS", 64 * 3 * 8 * 8)
            fused.stem(x)
        fused.train().bn1.eval()
        fused.stem(x)
    assert not called


def test_the_operation_passes_opcheck():
    layers, _ = pair(3, seed=7)
    x, grad = pixels(2, 3, 12)
    kind = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    rows, weight = (t.to(kind).detach() for t in (stem.in_rows(x), stem.weight_in_rows(layers.conv1.weight)))
    sizes, norm = list(stem.StemSizes.of(3, 12, 12)), layers.bn1
    for known in (None, stem._eval_moments(norm)):
        learned = [t.detach().requires_grad_(known is None) for t in (weight, norm.weight, norm.bias)]
        tests = ("test_schema", "test_faketensor") + (("test_autograd_registration",) if known is None else ())
        torch.library.opcheck(stem.stem, (rows, sizes, *learned, norm.eps, known), test_utils=tests)
    winner = torch.randint(0, 10, (2 * 3 * 3, 64), dtype=torch.uint8, device=DEVICE)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(stem.stem_backward, (grad.to(kind), rows, sizes, winner), test_utils=tests)


def test_bf16_rounds_no_worse_than_the_layers(called):
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
    assert called == [torch.bfloat16] * 3
    for name, rows in off.items():
        usual, ours = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        assert ours <= (1.5 if name.endswith(("weight", "bias")) else 1.1) * usual + 2e-3, (name, ours, usual)


def test_in_eval_mode_it_is_the_layers_with_what_was_learned(called):
    layers, fused = pair(3, seed=2)
    x, _ = pixels(6, 3, 32)
    layers.train().stem(x)
    layers.bn1.running_var[:32] = 1e-6  # eps counts
    fused.load_state_dict(layers.state_dict())
    want = layers.eval().stem(x).detach()
    assert torch.equal(fused.eval().stem(x), want)  # with gradients the layers answer
    with torch.no_grad(), fast():
        same(fused.stem(x), want, "pooled")
    assert len(called) == 1


def test_it_traces():
    _, fused = pair(3, seed=3)
    x, grad = pixels(4, 3, 32)
    with fast():
        want = outcome(copy.deepcopy(fused), x, grad)
        fused.stem = torch.compile(fused.stem, backend="aot_eager", fullgraph=True)
        got = outcome(fused, x, grad)
    for name, value in want.items():
        same(got[name], value, name)


@pytest.mark.parametrize("power", [1, 2])  # of a loss that is linear in the maps only the stem itself has a second one
def test_second_derivatives_are_refused(power, called):
    """They would be wrong: what the way back keeps are numbers."""
    _, fused = pair(3, seed=8)
    x, grad = pixels(2, 3, 12)
    learned = [fused.conv1.weight, fused.bn1.weight, fused.bn1.bias]
    with fast():
        loss = (fused.train().stem(x).float() ** power * grad).sum()
    with pytest.raises(HeadcountError, match=r"no second derivatives, and create_graph=True asks for them; take another"):
        torch.autograd.grad(loss, learned, create_graph=True, retain_graph=True)
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(loss, learned))
    assert len(called) == 1


def test_only_the_papers_stem_is_fused(monkeypatch):
    assert stem.can_fuse(ResNet18(3))
    assert not stem.can_fuse(ResNet18(3, stem="small"))
    assert not stem.can_fuse(ResNet18(3, stem="pool"))
    assert not stem.can_fuse(ResNet18(3, width=16))
    assert not stem.can_fuse(ResNet18(4))
    odd = ResNet18(3)
    odd.bn1.momentum = None
    assert not stem.can_fuse(odd)
    monkeypatch.setattr(accel, "stem_runs", lambda device: True)
    for precision, device, fused in (("bf16", "cuda", True), ("tf32", "cuda", False), ("bf16", "cpu", False)):
        network = ResNet18(3)
        names = list(network.state_dict())
        accel.optimize_layout(network, torch.device(device), precision)
        assert isinstance(network, stem.FusedStem) == fused
        assert list(network.state_dict()) == names


def test_a_gpu_that_cannot_run_the_kernels_gets_the_layers(monkeypatch):
    def too_small(device):
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(stem, "self_test", too_small)
    accel.stem_runs.cache_clear()
    network = ResNet18(3)
    with pytest.warns(UserWarning, match=r"layer by layer, .*\(RuntimeError: out of resource: shared memory\)$"):
        accel.optimize_layout(network, torch.device("cuda"), "bf16")
    assert type(network) is ResNet18
    accel.optimize_layout(ResNet18(3), torch.device("cuda"), "bf16")  # said once
    accel.stem_runs.cache_clear()


def test_the_kernels_compile_without_a_gpu(tmp_path):
    """As they are on Hopper: within its registers."""
    script = Path(__file__).parent.parent.parent / "benchmarks" / "machine_code.py"
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" 0 bytes spilled") == 4
    assert "a loop of" in done.stdout


@pytest.mark.soak
def test_self_test():
    stem.self_test(DEVICE)
