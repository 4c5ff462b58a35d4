"""What only makes it fast changes nothing: rewrites are exact, compilation falls back, devices are checked."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from head_cases import small_head
from headcount.bags import Segments
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.models.backbones import MLP, ResNet18, build_backbone
from headcount.models.heads import HEADS, Batch
from headcount.training import accel
from headcount.training.trainer import encode, head_loss


def outcome(model, x):
    """Output, gradients and running statistics of one training step, in float64."""
    model = copy.deepcopy(model).double().train()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("side", [32, 28, 16])
@pytest.mark.parametrize("stem", ["paper", "small", "pool"])
def test_rewrites_are_exact(side, stem):
    torch.manual_seed(side)
    model = ResNet18(3, stem=stem, width=4)
    x = torch.randn(6, 3, side, side, dtype=torch.float64)
    want = outcome(model, x)
    fast = copy.deepcopy(model)
    accel.optimize_layout(fast, torch.device("cuda"), "tf32")  # the layout for a card runs on the CPU too
    assert isinstance(fast.conv1, accel.StemConv) == (stem == "paper")
    assert sum(isinstance(m, accel.TinyMapConv) for m in fast.modules()) >= 16
    assert sum(isinstance(m, accel.PointConv) for m in fast.modules()) == 3
    for a, b in zip(want, outcome(fast, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert list(fast.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", ["quick", "resnet18"])
def test_equal_views_are_computed_once(name, monkeypatch):
    """Same features and slopes; batch-norm's running variance alone knows how many there were (n / (n - 1))."""
    torch.manual_seed(0)
    model, x = build_backbone(name, (16, 16, 3), {"width": 4}).double(), torch.rand(8, 3, 16, 16, dtype=torch.float64)
    seen = []
    model.register_forward_hook(lambda _, args, out: seen.append(len(args[0])))

    def once():
        network = copy.deepcopy(model).train()
        out = encode(nn.Identity(), network, x, "none", 2)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        means = [b for n, b in network.named_buffers() if n.endswith("running_mean")]
        return [out.detach(), *(p.grad for p in network.parameters()), *means]

    short = once()
    monkeypatch.setattr(type(model), "deterministic", False)
    for a, b in zip(short, once(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert seen == [8, 16]


@pytest.mark.parametrize(("side", "stride"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_tiny_map_convolution(side, stride):
    conv = nn.Conv2d(5, 7, 3, stride, 1, bias=False)
    x = torch.randn(4, 5, side, side)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    want = conv(x)
    conv.__class__ = accel.TinyMapConv
    torch.testing.assert_close(conv(x), want, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(conv(x).sum(), conv.weight)
    assert slope.stride() == conv.weight.stride()  # else it would be copied before it is added


def test_failed_compilation_warns_once_and_runs_uncompiled(monkeypatch):
    def broken(function, **_):
        def call(*args):
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = accel.compile_function(lambda x: 2 * x, "on", "cpu")
    with pytest.warns(
        HeadcountWarning, match="not compiled .RuntimeError: no compiler here.; running uncompiled, which is slower"
    ):
        assert double(3) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(4) == 8


@pytest.mark.parametrize("without", [True, False])
def test_compilation_falls_back_to_no_options(monkeypatch, without):
    def compiler(function, dynamic, options=None):
        def call(x):
            if options or not without:
                raise RuntimeError("no such kernel")
            return 10 * function(x)  # so that it can be told apart

        return call

    monkeypatch.setattr(torch, "compile", compiler)
    double = accel.compile_function(lambda x: 2 * x, "on", "cuda")
    with pytest.warns(HeadcountWarning) as heard:
        assert double(3) == (60 if without else 6)
    said = ["not compiled with combo_kernels (RuntimeError: no such kernel); compiling without"]
    said += [] if without else ["not compiled (RuntimeError: no such kernel); running uncompiled, which is slower"]
    assert [str(w.message) for w in heard] == said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(4) == (80 if without else 8)
    assert double.failed == (not without)


def test_unknown_compiler_options_are_left_out(monkeypatch):
    told = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, options: told.append(options) or function)
    monkeypatch.setattr(accel, "COMBO_KERNELS", {"combo_kernels": True, "of_another_torch": True})
    for device in ("cuda", "cpu"):
        assert accel.compile_function(lambda x: 2 * x, "on", device)(2) == 4
    assert told == [{"combo_kernels": True}, None]


def test_nothing_is_compiled_on_the_cpu_by_default():
    def function(x):
        return x

    assert accel.compile_function(function, "auto", "cpu") is function
    assert accel.compile_function(function, "off", "cuda") is function
    assert accel.cuda_graph(function, torch.device("cpu")) is function
    with pytest.raises(HeadcountError, match="no compile 'maybe'"):
        accel.compile_function(function, "maybe", "cpu")


DROPOUT = {"additive_trans": {"dropout": 0.0, "iterations": 2}, "mctformer": {"drop_path": 0.0}, "weno": {"dropout": 0.0}}


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.compiled])
@pytest.mark.filterwarnings("default")  # of torch's own, on importing its compiler
def test_a_compiled_head_gives_the_same_loss_and_gradient(name):
    """As one graph in bf16, for both passes; the gradient is as precise as without a compiler."""
    torch.manual_seed(0)
    head, h = small_head(name, DROPOUT[name]).train(), torch.randn(12, 5)
    compiled = torch.compile(head_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    for over, bags in (("bags", 3), ("instances", 12)) if len(head.passes) > 1 else (("bags", 3),):
        segments = Segments(torch.arange(12) * bags // 12, bags, 12 // bags, complete=True)
        target, epoch = torch.eye(4)[torch.arange(bags) % 4], torch.zeros((), dtype=torch.int64)
        batch = Batch(segments, target, torch.arange(bags), torch.arange(12), epoch=epoch, over=over)
        outcomes = []
        for function in (head_loss, compiled):
            x = h.clone().requires_grad_()
            loss = function(head, x, batch, None, "bf16")
            loss.backward()
            outcomes.append((loss.detach(), x.grad))
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-5, atol=1e-7)


def test_devices():
    assert accel.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(HeadcountError, match="no device 'nonsense'; give auto, cpu, cuda"):
        accel.resolve_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(HeadcountError, match="torch sees no GPU here"):
            accel.resolve_device("cuda")


def test_threads_share_the_cores():
    assert accel.threads_per_process(10_000) == 1
    assert accel.threads_per_process(1) == accel.n_cores() >= 1


# -- the backbone is the usual one ------------------------------------------------------------------------------------------


def test_resnet18_has_the_usual_structure():
    """Names, shapes and parameter count of the usual one; beside torchvision itself see below, where it imports."""
    state = ResNet18(3).state_dict()
    assert sum(p.numel() for p in ResNet18(3).parameters()) == 11_176_512
    assert len(state) == 120
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer1.0.conv1.weight"].shape == (64, 64, 3, 3)
    assert state["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert state["layer4.1.bn2.running_var"].shape == (512,)
    assert "layer1.0.downsample.0.weight" not in state
    usual = ["conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1", "layer1.0.conv2", "layer1.0.bn2"]
    assert list(dict.fromkeys(k.rsplit(".", 1)[0] for k in state))[:6] == usual


def test_resnet18_initialisation():
    """Kaiming-normal, fan out: the deviation of each convolution is sqrt(2 / (outputs * taps))."""
    torch.manual_seed(0)
    for name, m in ResNet18(3).named_modules():
        if isinstance(m, nn.Conv2d):
            want = (2 / (m.out_channels * m.kernel_size[0] ** 2)) ** 0.5
            assert m.weight.std().item() == pytest.approx(want, rel=0.06), name
        if isinstance(m, nn.BatchNorm2d):
            assert (m.weight == 1).all()
            assert (m.bias == 0).all()


@pytest.mark.parametrize(("side", "maps"), [(32, [16, 8, 8, 4, 2, 1]), (28, [14, 7, 7, 4, 2, 1])])
def test_resnet18_map_sides(side, maps):
    model, seen = ResNet18(3, width=4).eval(), []
    for part in (model.conv1, model.maxpool, model.layer1, model.layer2, model.layer3, model.layer4):
        part.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[2]))
    h = model(torch.zeros(1, 3, side, side))
    assert seen == maps
    assert h.shape == (1, 32)
    assert (h >= 0).all()


def test_torchvision_agrees_where_it_imports():
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError):
        pytest.skip("torchvision does not import here")
    torch.manual_seed(0)
    theirs = resnet18(weights=None)
    theirs.fc = nn.Identity()
    ours, x = ResNet18(3), torch.randn(4, 3, 32, 32)
    ours.load_state_dict(theirs.state_dict())  # strict: the same names and shapes
    torch.testing.assert_close(theirs(x), ours(x))
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):  # batch-norm's too
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("side", "maps"), [(32, [16, 8, 4]), (28, [14, 7, 3]), (8, [4, 2, 1])])
def test_quick_halves_the_map_at_every_stage(side, maps):
    model, seen = build_backbone("quick", (side, side, 1), {"width": 8}), []
    for part in model.stages:
        part.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[2]))
    h = model(torch.randn(2, 1, side, side))
    assert seen == maps
    assert h.shape == (2, model.dim) == (2, 32)
    assert (h >= 0).all()


def test_backbones_for_features():
    assert build_backbone("mlp", (7,), {"hidden": 5, "layers": 1}).dim == 5
    assert build_backbone("linear", (8, 8, 1), {}).dim == 64
    assert isinstance(build_backbone("mlp", (8, 8, 3), {}), MLP)
    with pytest.raises(HeadcountError, match="resnet18 reads images, the instances are features of 7"):
        build_backbone("resnet18", (7,), {})
    with pytest.raises(HeadcountError, match=r"backbone mlp cannot be built with .*hiden"):
        build_backbone("mlp", (7,), {"hiden": 5})
