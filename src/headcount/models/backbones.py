"""From a stored instance to its features: Normalize, then a backbone, which is ``deterministic`` if nothing in it is random."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags
from headcount.errors import HeadcountError, check_choice, check_number
from headcount.models import library_backbones
from headcount.readers.transforms import StandardScaler

_CHUNK = 1 << 12  # instances
_MAX_SAMPLE = 50_000  # instances, for a mean and a deviation


class Normalize(nn.Module):
    """(n, H, W, channels) uint8 -> (n, channels, H, W) float, or (n, D) -> (n, D): minus the mean, over the deviation. The
    permuted view is channels-last in memory, the fastest layout for convolutions: nothing is copied."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: tuple[int, ...], mean: Any, std: Any) -> None:
        super().__init__()
        self.shape = tuple(shape)
        for name, value in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32))
        if self.mean.shape != (self.shape[-1],) or self.std.shape != self.mean.shape:
            raise HeadcountError(f"mean and std need {self.shape[-1]} numbers, got {tuple(self.mean.shape)}")

    @classmethod
    def fit(cls, train: Bags, mean: Any = None, std: Any = None) -> Self:
        """The given constants, or the mean and deviation of each channel (each feature) over the training bags."""
        if mean is not None and std is not None:
            return cls(train.pool.shape, mean, std)
        addresses = train.index.unique()
        addresses = addresses[:: max(1, len(addresses) // _MAX_SAMPLE)]

        def chunks() -> Iterator[np.ndarray]:
            """(n, channels) or (n, D): large images, or many features, need not be in memory all at once."""
            for part in addresses.split(_CHUNK):
                x = train.pool.take(part).float()
                yield (x / 255 if train.pool.kind == "images" else x).flatten(0, -2).cpu().numpy()

        scaler = StandardScaler.fit_chunks(chunks, min_deviation=1e-6)
        return cls(train.pool.shape, scaler.mean_, scaler.scale_)

    @property
    def is_identity(self) -> bool:
        """Whether features stay as they are."""
        return len(self.shape) != 3 and not bool(self.mean.any()) and bool((self.std == 1).all())

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise HeadcountError(f"the model takes instances of shape {self.shape}, got {tuple(x.shape[1:])}")
        if len(self.shape) != 3:
            return (x.float() - self.mean).div_(self.std)  # in place: for features this is a good part of the time
        return ((x.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)


def _init_convolution(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + skip)


class ResNet18(nn.Module):
    """He et al., 2016, with torchvision's layers, initialisation and parameter names, so that weights can be exchanged.
    ``stem``: "paper" (7x7 stride 2, then max-pool), "small" (3x3, no pooling) or "pool" (3x3, then max-pool)."""

    deterministic = True

    def __init__(self, channels: int = 3, *, stem: str = "paper", width: int = 64) -> None:
        super().__init__()
        check_choice("stem", stem, ("paper", "small", "pool"))
        kernel, stride = (7, 2) if stem == "paper" else (3, 1)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if stem == "small" else nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2), BasicBlock(8 * width, 8 * width))
        self.dim = 8 * width
        self.apply(_init_convolution)

    def stem(self, x: Tensor) -> Tensor:
        return self.maxpool(self.relu(self.bn1(self.conv1(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x))))).mean((2, 3))


class Stage(nn.Module):
    """A convolution that halves the map, then a residual convolution."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.pool(self.conv1(x))))
        return x + self.relu(self.bn2(self.conv2(x)))


class SmallConvNet(nn.Module):
    """A shallow network for small images (8 to 64 pixels): seven convolutions, most of the work on small maps. The shape is
    that of the networks that learn CIFAR-10 in seconds (Page, 2018; Jordan, 2024): halve early, widen at once. A quarter of the
    arithmetic of a ResNet18 with a 3x3 stem."""

    deterministic = True

    def __init__(self, channels: int = 3, *, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width // 2, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width // 2)
        self.relu = nn.ReLU(inplace=True)
        self.stages = nn.Sequential(Stage(width // 2, width), Stage(width, 4 * width), Stage(4 * width, 4 * width))
        self.dim = 4 * width
        self.apply(_init_convolution)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.relu(self.bn(self.conv(x))))
        return x.amax((2, 3)) / 8  # maxima are large, and so would be the classifier's gradients


class ConcatBackbones(nn.Module):
    """Several networks side by side, each with its own initial weights; their features are concatenated."""

    def __init__(self, networks: list[Any]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.dim = sum(network.dim for network in networks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([network(x) for network in self.networks], 1)


class MLP(nn.Module):
    """Layers with ReLU over the flattened instance."""

    def __init__(self, inputs: int, *, hidden: int = 256, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden < 1 or layers < 0:
            raise HeadcountError(f"an mlp has hidden from 1 and layers from 0, got hidden={hidden}, layers={layers}")
        widths = [inputs] + [hidden] * layers
        blocks: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(widths):
            blocks += [nn.Linear(a, b), nn.ReLU(inplace=True)] + ([nn.Dropout(dropout)] if dropout else [])
        self.layers = nn.Sequential(*blocks)
        self.dim = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


CustomBackbone = nn.Module | Callable[[], nn.Module]  # (n, channels, H, W) or (n, D) float32 -> (n, features)

BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "resnet18": lambda shape, **options: ResNet18(shape[2], **options),
    "quick": lambda shape, **options: SmallConvNet(shape[2], **options),
    "mlp": lambda shape, **options: MLP(math.prod(shape), **options),
    "linear": lambda shape: MLP(math.prod(shape), layers=0),  # the instance itself: with a head on top a linear classifier
}
CUSTOM = "custom:"


def backbone_name(backbone: CustomBackbone | str) -> str:
    """The name that metadata keep: of a custom backbone ``custom:`` and the import path."""
    if isinstance(backbone, str):
        return backbone
    source: Any = type(backbone) if isinstance(backbone, nn.Module) else backbone
    return f"{CUSTOM}{source.__module__}.{getattr(source, '__qualname__', type(source).__name__)}"


def build_backbone(name: CustomBackbone | str, shape: tuple[int, ...], options: Mapping[str, Any]) -> nn.Module:
    """A backbone for instances of this shape, images as (H, W, channels): one of ``BACKBONES`` (of which the option ``networks``
    builds several side by side), ``timm:NAME``, ``torchvision:NAME``, or a custom one: a copy of a module, or what a class or a
    function makes of no arguments."""
    if not isinstance(name, str):
        module = copy.deepcopy(name) if isinstance(name, nn.Module) else name()
        if not isinstance(module, nn.Module) or options:
            raise HeadcountError(f"a custom backbone is a torch.nn.Module, or makes one, and has no options; got {module!r}")
        return module
    try:
        if library_backbones.is_library_backbone(name):
            return library_backbones.build_library_backbone(name, shape, options)
        build = BACKBONES[check_choice("backbone", name, BACKBONES)]
        if len(shape) != 3 and name in ("resnet18", "quick"):
            raise HeadcountError(f"backbone {name} reads images, the instances are features of {shape[0]}; use mlp or linear")
        remaining = {**options}
        networks = check_number("networks", remaining.pop("networks", 1), 1, 1 << 10, integer=True)
        built = [build(shape, **remaining) for _ in range(networks)]
        return built[0] if networks == 1 else ConcatBackbones(built)
    except (TypeError, RuntimeError) as e:  # torch raises a RuntimeError for a width below zero
        raise HeadcountError(f"backbone {name} cannot be built with {dict(options)}: {e}") from None
