"""Backbones by name from timm or torchvision: ``timm:resnet18``, ``torchvision:convnext_tiny``. Needs ``headcount[vision]``.

Only ``load_pretrained`` may download anything; a saved model has its weights in its own file.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.errors import HeadcountError, check_bool, check_choice, check_number
from headcount.models.serialization import load_weights

LIBRARIES = ("timm", "torchvision")
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}  # for published weights that name none


def is_library_backbone(backbone: Any) -> bool:
    return isinstance(backbone, str) and ":" in backbone


def build_library_backbone(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> LibraryBackbone:
    """A backbone for images (H, W, channels), with random weights."""
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise HeadcountError(f"backbone {name} reads images of 1 or 3 channels, the instances have shape {shape}")
    return LibraryBackbone(_build(name), shape, **options)


def split_name(name: str) -> tuple[str, str]:
    """The library and the network's name in it, which is refused if it could be an address."""
    library, _, model = name.partition(":")
    check_choice("library of backbones", library, LIBRARIES)
    if not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?", model):  # no hf-hub: or local-dir: addresses
        raise HeadcountError(f"backbone {name!r}: give a plain name of {library}, such as {library}:resnet18")
    return library, model


def import_library(name: str) -> Any:
    """The library, imported, that knows this name."""
    library, model = split_name(name)
    try:
        source = importlib.import_module("timm" if library == "timm" else "torchvision.models")
        known = source.is_model(model.split(".")[0]) if library == "timm" else model in source.list_models()
    except (ImportError, RuntimeError) as e:  # a torchvision built for another torch raises RuntimeError
        why = " ".join(str(e).split())[:120]
        raise HeadcountError(f"backbone {name} needs {library}: pip install 'headcount[vision]' ({why})") from None
    if not known:
        raise HeadcountError(f"{library} has no model {model!r}; its list_models() names them")
    return source


def _build(name: str, *, classifier: bool = False, pretrained: bool = False) -> nn.Module:
    """The library's network, by default without its classifier."""
    source, (library, model) = import_library(name), split_name(name)
    if library == "timm":
        return source.create_model(model, pretrained=pretrained, **({} if classifier else {"num_classes": 0}))
    net = source.get_model(model, weights="DEFAULT" if pretrained else None)
    linear = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]  # the last is the classifier
    if not linear:
        raise HeadcountError(f"{type(net).__name__} has no linear classifier to remove; choose another backbone")
    if not classifier:
        net.set_submodule(linear[-1], nn.Identity())
    return net


class LibraryBackbone(nn.Module):
    """(n, channels, H, W) -> (n, dim). ``size``: resize to a square first. ``frozen``: never trained, batch-norm at rest. Gray
    images are repeated over three channels, which the libraries' weights expect."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], *, size: int | None = None, frozen: bool = False) -> None:
        super().__init__()
        check_library_options(size, frozen)
        self.net, self.size, self.frozen = net.eval(), size, frozen
        height, width = shape[:2] if size is None else (size, size)
        self.dim = count_features(self, (height, width, shape[2]), "the backbone")
        if frozen:
            self.net.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> LibraryBackbone:
        super().train(mode)
        if self.frozen:
            self.net.eval()  # running means stay as they are
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and x.shape[2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        return self.net(x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Inside, the module predicts; afterwards it trains again if it did before."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


@torch.no_grad()
def count_features(backbone: nn.Module, shape: tuple[int, ...], name: str) -> int:
    """How many features a backbone makes of instances of this shape, by trying two."""
    device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    x = torch.zeros((2, shape[2], *shape[:2]) if len(shape) == 3 else (2, *shape), device=device)
    try:
        with eval_mode(backbone):
            h = backbone(x)
    except Exception as e:  # every network raises its own
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
        advice = "; give the size it was made for, such as 224" if isinstance(backbone, LibraryBackbone) else ""
        raise HeadcountError(f"{name} does not take instances of shape {shape} ({why}){advice}") from None
    if not isinstance(h, Tensor) or h.ndim != 2 or len(h) != 2:
        got = f"shape {tuple(h.shape)}" if isinstance(h, Tensor) else type(h).__name__
        raise HeadcountError(f"{name} makes {got} of two instances; it has to make (2, features)")
    return h.shape[1]


def check_library_options(size: Any, frozen: Any) -> None:
    check_bool("frozen", frozen)
    if size is not None:
        check_number("size of a backbone's images", size, 8, 2048, integer=True)


@dataclass(frozen=True, eq=False)
class PretrainedBackbone:
    """A backbone of a library, and the weights it begins with."""

    name: str
    frozen: bool
    size: int | None
    weights: str  # pretrained, none, or the name of a file
    state: dict[str, Tensor] | None  # of the network without its classifier; None: random
    mean: tuple[float, ...] | None  # of the images these weights were trained on; None: to be fitted
    std: tuple[float, ...] | None

    @property
    def options(self) -> dict[str, Any]:
        """For a backbone that is trained."""
        return {} if self.size is None else {"size": self.size}

    def load_into(self, backbone: nn.Module) -> None:
        if self.state is not None:
            net: Any = backbone.net
            net.load_state_dict(self.state)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What identifies the choice, as plain JSON."""
        choice = {"backbone": self.name, "frozen": self.frozen, "size": self.size, "weights": self.weights}
        return choice if self.state is None else {**choice, "sha256": state_digest(self.state)}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """sha256 of tensors and their names."""
    digest = hashlib.sha256()
    for name, x in sorted(state.items()):
        digest.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_backbone_options(backbone: Any, frozen: bool | None, weights: str | None, size: int | None) -> None:
    """Refuse options that contradict each other, or need a library that is not installed."""
    if not is_library_backbone(backbone):
        for name, given in (("frozen", frozen), ("weights", weights), ("size", size)):
            if given is not None:
                raise HeadcountError(f"{name} is for a backbone of timm or torchvision, such as timm:resnet18")
        return
    check_library_options(size, bool(frozen) if frozen is None else frozen)
    if weights not in (None, "pretrained", "none") and not str(weights).lower().endswith(".safetensors"):
        raise HeadcountError(f"weights are pretrained, none or FILE.safetensors, got {weights!r}")
    if weights == "none" and frozen:
        raise HeadcountError("a frozen backbone with random weights is useless; give weights, or train it")
    import_library(backbone)


def load_pretrained(
    name: str, shape: tuple[int, ...], *, frozen: bool | None = None, weights: str | None = None,
    size: int | None = None, log: Callable[[str], None] | None = None,
) -> PretrainedBackbone:  # fmt: skip
    """A backbone with its initial weights, for images of this shape. ``weights``: pretrained (the default: the library may
    download them, which is logged first), none, or a .safetensors file. ``frozen``: by default wherever there are weights."""
    check_backbone_options(name, frozen, weights, size)
    net = build_library_backbone(name, shape, {"size": size}).net  # wrong sizes are refused before any download
    weights = weights or "pretrained"
    if weights == "none":
        return PretrainedBackbone(name, False, size, weights, None, None, None)
    if weights == "pretrained":
        if log is not None:
            log(f"{name}: asking {split_name(name)[0]} for the published weights, which it downloads unless it has them")
        try:
            state = _build(name, pretrained=True).state_dict()
        except HeadcountError:
            raise
        except Exception as e:  # no connection, no such file, or the library's own
            why = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}); give weights as FILE.safetensors, or none"
            raise HeadcountError(f"{name}: its published weights could not be loaded ({why}") from None
    else:
        state = _match_weights(load_weights(Path(weights)), net, name, weights)
        weights = Path(weights).name
    config: Any = getattr(net, "pretrained_cfg", None)  # timm keeps mean and deviation of the training images with its networks
    config = config if isinstance(config, Mapping) else {}
    constants = [tuple(map(float, config.get(key) or usual)) for key, usual in _IMAGENET.items()]
    mean, std = [v if len(v) == shape[2] else (sum(v) / len(v),) * shape[2] for v in constants]
    return PretrainedBackbone(name, True if frozen is None else frozen, size, weights, state, mean, std)


def _match_weights(given: dict[str, Tensor], net: nn.Module, name: str, path: str) -> dict[str, Tensor]:
    """The weights of this network, by name and shape, without those of its classifier."""
    expected = net.state_dict()
    extra = given.keys() - expected.keys()
    if extra:
        extra -= _build(name, classifier=True).state_dict().keys()
    if extra:
        raise HeadcountError(f"the weights {path} hold {min(extra)[:80]!r}, which {name} does not have")
    for key, tensor in expected.items():
        if key not in given:
            if key.endswith("num_batches_tracked"):  # a count that older files lack, and that no prediction depends on
                continue
            raise HeadcountError(f"the weights {path} lack {key!r}, which {name} needs")
        if given[key].shape != tensor.shape or given[key].is_floating_point() != tensor.is_floating_point():
            got = f"{tuple(given[key].shape)} {given[key].dtype}"
            raise HeadcountError(f"the weights {path}: {key!r} is {got}, {name} needs {tuple(tensor.shape)} {tensor.dtype}")
    return {key: given.get(key, tensor).to(tensor.dtype) for key, tensor in expected.items()}
