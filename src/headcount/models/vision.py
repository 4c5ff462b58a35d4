"""Backbones by name from timm or torchvision: ``timm:resnet18``, ``torchvision:convnext_tiny``. Needs ``headcount[vision]``.

    Foreign      the network without its classifier, as a backbone; frozen or trained
    pretrained   the published weights, fetched because somebody asked for it; never when a model is built or loaded
    featured     a frozen backbone's features of all instances, computed once and kept in a cache
    joined       a head trained on such features, put back behind its backbone: one model again

Building never downloads: a saved model's weights live in its own safetensors file, and the names a file may give are plain
names of the library's list, not addresses.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags import Bags, Pool
from headcount.data import cache as data_cache
from headcount.data.prepare import Prepare
from headcount.errors import HeadcountError, choose
from headcount.files import alone, beside

LIBRARIES = ("timm", "torchvision")
_CHANNELS = (1, 3)


def foreign(name: str) -> bool:
    """Whether a backbone's name says a library.

    >>> foreign("timm:resnet18"), foreign("resnet18")
    (True, False)
    """
    return ":" in name


def build(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> Foreign:
    """A backbone for pictures (H, W, channels), with random weights."""
    library, own = _parts(name)
    if len(shape) != 3 or shape[2] not in _CHANNELS:
        raise HeadcountError(f"backbone {name} reads pictures of 1 or 3 channels, the instances have shape {shape}")
    return Foreign(_bare(library, own, shape[2], weights=False), shape, **options)


def _parts(name: str) -> tuple[str, str]:
    library, _, own = name.partition(":")
    choose("library of backbones", library, LIBRARIES)
    if not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?", own):  # no hf-hub: or local-dir: addresses
        raise HeadcountError(f"backbone {name!r}: give a plain name of {library}, such as {library}:resnet18")
    return library, own


def _bare(library: str, own: str, channels: int, weights: bool) -> nn.Module:
    """The network without its classifier."""
    try:
        source = importlib.import_module("timm" if library == "timm" else "torchvision.models")
        known = source.is_model(own.split(".")[0]) if library == "timm" else own in source.list_models()
    except (ImportError, RuntimeError) as e:  # a torchvision built for another torch raises RuntimeError
        why = " ".join(str(e).split())[:120]
        raise HeadcountError(
            f"backbone {library}:{own} needs {library}: pip install 'headcount[vision]' ({why})"
        ) from None
    if not known:
        raise HeadcountError(f"{library} has no model {own!r}; its list_models() names them")
    if library == "timm":
        return source.create_model(own, pretrained=weights, num_classes=0, in_chans=channels)
    return _headless(source.get_model(own, weights="DEFAULT" if weights else None))


def _headless(net: nn.Module) -> nn.Module:
    """The last linear layer, which is the classifier in all of torchvision's, becomes nothing."""
    last = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)][-1:]
    if not last:
        raise HeadcountError(f"{type(net).__name__} has no linear classifier to take away; choose another backbone")
    owner, _, leaf = last[0].rpartition(".")
    setattr(net.get_submodule(owner), leaf, nn.Identity())
    return net


class Foreign(nn.Module):
    """(n, channels, H, W) -> (n, dim). ``size``: resize to a square first. ``frozen``: never trained, batch-norm at rest.

    ``centre`` and ``scale`` standardise the features; nought and one unless a head was trained on features of their own.
    """

    centre: Tensor
    scale: Tensor

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], *, size: int | None = None, frozen: bool = False
    ) -> None:
        super().__init__()
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 8 <= size <= 2048):
            raise HeadcountError(f"size of a backbone's pictures is a whole number from 8 to 2048, got {size!r}")
        if not isinstance(frozen, bool):
            raise HeadcountError(f"frozen is true or false, got {frozen!r}")
        self.net, self.size, self.frozen = net.eval(), size, frozen
        with torch.no_grad():
            h = self._through(torch.zeros(1, shape[2], *(shape[:2] if size is None else (size, size))))
        if h.ndim != 2:
            raise HeadcountError(
                f"the backbone gives features of shape {tuple(h.shape[1:])}; choose one that pools them"
            )
        self.dim = int(h.shape[1])
        self.register_buffer("centre", torch.zeros(self.dim))
        self.register_buffer("scale", torch.ones(self.dim))
        if frozen:
            self.net.requires_grad_(False)
        self.train()

    def _through(self, x: Tensor) -> Tensor:
        first = next((m for m in self.net.modules() if isinstance(m, nn.Conv2d)), None)
        if x.shape[1] == 1 and (first is None or first.in_channels == 3):
            x = x.expand(-1, 3, -1, -1)  # torchvision's take colour
        return self.net(x)

    def train(self, mode: bool = True) -> Foreign:
        super().train(mode)
        if self.frozen:
            self.net.eval()  # running means stay as they are
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and x.shape[2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        return (self._through(x) - self.centre) / self.scale


def load_pretrained(backbone: Foreign, name: str) -> None:
    """Put the published weights into a backbone: the library may download them, so this is called by who asks for it only."""
    library, own = _parts(name)
    first = next((m for m in backbone.net.modules() if isinstance(m, nn.Conv2d)), None)
    fresh = _bare(library, own, 3 if first is None else first.in_channels, weights=True)
    backbone.net.load_state_dict(fresh.state_dict())


# -- features, once -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def featured(model: Any, bags: Bags, cache: Path | str | None = None, batch: int = 256) -> Bags:
    """The same bags over their features (M, D) float16, mapped from the cache; they are computed if they are not there.

    The file's name is a hash of the pool, the preparation and the backbone's weights: another of any of them is another file.
    """
    if not getattr(model.backbone, "frozen", False):
        raise HeadcountError("features are kept for a frozen backbone only: the others change while they train")
    folder = data_cache.home(cache) / "features"
    path = folder / f"{_key(model, bags.pool)}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(path.with_suffix(".lock")):
        if not path.exists():
            model.eval()
            with beside(path) as part, open(part, "wb") as f:  # not mapped: a full disk is an error, and no signal
                said = {"descr": "<f2", "fortran_order": False, "shape": (len(bags.pool), model.backbone.dim)}
                np.lib.format.write_array_header_2_0(f, said)
                for rows in torch.arange(len(bags.pool)).split(batch):
                    h = model.features(bags.pool.take(rows).to(model.device)).float().cpu()
                    f.write(h.clamp(-65504, 65504).numpy().astype("<f2").tobytes())
    return replace(bags, pool=Pool.mapped(path))


def _key(model: Any, pool: Pool) -> str:
    digest = hashlib.sha256(f"{model.design.backbone}{dict(model.design.backbone_options)}".encode())
    for name, value in sorted({**model.prepare.state_dict(prefix="p."), **model.backbone.state_dict()}.items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digest.update(f"{pool.data.dtype}{tuple(pool.data.shape)}".encode())
    for start in range(0, len(pool), 4096):
        digest.update(pool.data[start : start + 4096].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:40]


def joined(pictures: Any, features: Any) -> Any:
    """``pictures`` with the head of ``features``, a model with backbone "linear" trained on ``featured`` bags.

    What that model's preparation did to the features moves into the backbone, so that the whole answers the same.
    """
    design, other = pictures.design, features.design
    if other.backbone != "linear" or (other.head, other.options, other.classes) != (
        design.head,
        design.options,
        design.classes,
    ):
        raise HeadcountError(
            "only a linear model on features, with the same head and classes, can be put behind a backbone"
        )
    before: Prepare = features.prepare
    pictures.backbone.centre.copy_(before.mean)
    pictures.backbone.scale.copy_(before.std)
    pictures.head.load_state_dict(features.head.state_dict())
    return pictures
