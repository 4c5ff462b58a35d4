"""Model: a network for instances and bags. Normalize, then the backbone, then the head."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags, Segments
from headcount.bags.seeds import seed_for
from headcount.errors import HeadcountError
from headcount.models import library_backbones, serialization
from headcount.models.backbones import CUSTOM, CustomBackbone, Normalize, backbone_name, build_backbone
from headcount.models.heads import TRUSTED_HEADS, Head, Output, build_head, trust_head

_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class ModelConfig:
    """What is needed to build a model.

    Parameters
    ----------
    shape, classes
        Shape of an instance, (H, W, channels) of images or (D,) of features; names of the classes.
    backbone, backbone_options
        A name in ``BACKBONES``, or ``timm:NAME``, ``torchvision:NAME``; its options, as pairs. Or a ``torch.nn.Module`` of your own,
        or a class or function that makes one: float32 images (n, channels, H, W), or features (n, D), -> (n, features).
    head, options
        A name in ``HEADS``, ``FILE.py:CLASS``, or a class derived from ``Head``; its options, as pairs.
    counted
        Which classes count in the vote; None is all.
    mirror
        Predict the mean over an image and its mirror image.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    backbone: CustomBackbone | str = "resnet18"
    backbone_options: tuple[tuple[str, Any], ...] = ()
    head: str = "count"
    options: tuple[tuple[str, Any], ...] = ()
    counted: tuple[bool, ...] | None = None
    mirror: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", trust_head(self.head, trusted=False))
        for name in ("options", "backbone_options"):
            object.__setattr__(self, name, tuple(sorted(dict(getattr(self, name)).items())))
        serialization.check_counted(self.counted, len(self.classes))
        if not 1 <= len(self.shape) <= 3 or min(self.shape) < 1:
            raise HeadcountError(f"an instance has a shape such as (32, 32, 3) or (512,), got {self.shape}")
        if self.mirror and len(self.shape) != 3:
            raise HeadcountError(f"mirror is for images, and the instances have shape {self.shape}; leave mirror out")

    @classmethod
    def for_bags(cls, bags: Bags, **fields: Any) -> ModelConfig:
        """The configuration for instances and classes like those of these bags; ``fields`` are the other fields.

        >>> from headcount.bags import Pool
        >>> ModelConfig.for_bags(Bags.of(Pool(torch.eye(4).numpy()), sizes=[4], labels=[1], classes=2), backbone="mlp").shape
        (4,)
        """
        counted = None if bags.counted is None else tuple(bags.counted.tolist())
        return cls(shape=bags.pool.shape, classes=bags.classes, counted=counted, **fields)


class Model(nn.Module):
    """(n, ...) stored instances and their segments -> :class:`Output`. Without ``normalize`` the mean is 0, the deviation 1.

    >>> model = Model(ModelConfig((2,), ("a", "b"), "linear", head="count"))
    >>> model(torch.zeros(3, 2), Segments.from_sizes([1, 2])).bag.shape
    torch.Size([2, 2])
    """

    kind = "network"

    def __init__(self, config: ModelConfig, normalize: Normalize | None = None) -> None:
        super().__init__()
        self.config = config
        channels = config.shape[-1]
        self.normalize = normalize or Normalize(config.shape, torch.zeros(channels), torch.ones(channels))
        self.backbone = build_backbone(config.backbone, config.shape, dict(config.backbone_options))
        counted = None if config.counted is None else torch.tensor(config.counted)
        if isinstance(config.backbone, str):
            dim: Any = self.backbone.dim
        else:
            dim = library_backbones.count_features(self.backbone, config.shape, "the custom backbone")
        self.head = build_head(config.head, dim, len(config.classes), dict(config.options), counted)

    def forward(self, x: Tensor, segments: Segments) -> Output:
        return self.head(self.backbone(self.normalize(x)), segments)

    def tta_features(self, x: Tensor) -> list[Tensor]:
        """(n, D) features of x for prediction (test-time augmentation): with ``mirror`` those of the mirror images as well."""
        views = (x, x.flip(2)) if self.config.mirror else (x,)
        return [self.backbone(self.normalize(view)) for view in views]

    def tta_output(self, views: Sequence[Tensor], segments: Segments) -> Output:
        """The head's output for these features; of several views of the same instances the mean of the probabilities."""
        outputs = [self.head(h, segments) for h in views]
        instance, bag = mean_logits([o.instance for o in outputs]), mean_logits([o.bag for o in outputs])
        return Output(instance, bag, outputs[0].parts)

    @property
    def instance_depends_on_bag(self) -> bool:
        """Whether the prediction for an instance depends on the others in its bag, or on its place among them."""
        return self.head.depends_on_bag or self.head.depends_on_order

    @property
    def device(self) -> torch.device:
        return self.normalize.mean.device

    def fold_in_scaler(self, mean: np.ndarray, scale: np.ndarray) -> Model:
        """The model that predicts of x what this one predicts of (x - mean) / scale; (D,) float64 each."""
        model = copy.deepcopy(self)
        inner_mean, inner_std = (t.double().numpy() for t in (model.normalize.mean, model.normalize.std))
        model.normalize.mean.copy_(torch.from_numpy(inner_mean * scale + mean))
        model.normalize.std.copy_(torch.from_numpy(inner_std * scale))
        return model

    def arrays(self) -> dict[str, np.ndarray]:
        """Parameters and buffers, by name."""
        return serialization.state_arrays(self)

    def save(self, folder: Path | str, *, overwrite: bool = False) -> Path:
        """Write ``model.safetensors`` and ``model.json`` to a folder of their own."""
        lists = {k: v and list(v) for k in ("shape", "classes", "counted") for v in [getattr(self.config, k)]}
        data = {"kind": "bare network", **lists, "config": config_to_json(self)}
        parse = partial(parse_network, backbone=custom_backbone(self))
        return serialization.write_folder(Path(folder), self.arrays(), data, parse, overwrite=overwrite)

    @staticmethod
    def load(folder: Path | str, backbone: CustomBackbone | None = None, head: type[Head] | None = None) -> Model:
        """A model that :meth:`save` wrote. Anything unexpected in the files is an error. See :meth:`FittedModel.load`."""
        return serialization.load_folder(Path(folder), partial(parse_network, backbone=backbone, head=head))


class FrozenBackbone(nn.Module):
    """Images (n, H, W, channels) uint8 -> (n, D) float16, so that every method for features works on images too: Normalize, then a
    backbone of timm or torchvision, with random weights at first. Images are first resized to squares of side ``size``."""

    def __init__(self, name: str, shape: tuple[int, ...], size: int | None = None) -> None:
        super().__init__()
        self.name, self.shape, self.size = name, tuple(shape), size
        self.normalize = Normalize(self.shape, torch.zeros(shape[-1]), torch.ones(shape[-1]))
        self.backbone = library_backbones.build_library_backbone(name, self.shape, {"size": size, "frozen": True})
        self.dim = self.backbone.dim

    @classmethod
    def from_pretrained(cls, pretrained: library_backbones.PretrainedBackbone, shape: tuple[int, ...]) -> FrozenBackbone:
        """With pretrained weights, and the mean and deviation of the images these were trained on."""
        frozen_backbone = cls(pretrained.name, shape, pretrained.size)
        frozen_backbone.normalize = Normalize(frozen_backbone.shape, pretrained.mean, pretrained.std)
        pretrained.load_into(frozen_backbone.backbone)
        return frozen_backbone.eval()

    @classmethod
    def from_json(cls, data: Any, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> FrozenBackbone | None:
        """From a model's file: a plain name of a library, a size, and the weights; or null."""
        if data is None:
            if arrays:
                raise HeadcountError(f"the weights 'frozen_backbone.{min(arrays)[:60]}' belong to nothing")
            return None
        serialization.check_fields(data, {"backbone": Any, "size": Any}, "the frozen backbone")
        name, size = data["backbone"], data["size"]
        if not isinstance(name, str) or len(name) > 200 or not library_backbones.is_library_backbone(name):
            raise HeadcountError(f"the frozen backbone is none of a library: {str(name)[:40]!r}")
        return serialization.build_with_weights(lambda: cls(name, shape, size), arrays, on_meta=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.normalize(x)).float().clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half()


def build_model(config: ModelConfig, bags: Bags, *, seed: int = 0, mean: Any = None, std: Any = None) -> Model:
    """A model with fresh weights.

    Parameters
    ----------
    config : ModelConfig
        The network; see :meth:`ModelConfig.for_bags`.
    bags : Bags
        Training bags; mean and standard deviation of the normalisation are those of their instances.
    seed : int
        Seed of the weights.
    mean, std : optional
        Mean and standard deviation, where they are known.

    Examples
    --------
    >>> from headcount.bags import Pool
    >>> bags = Bags.of(Pool(torch.eye(4).numpy()), sizes=[2, 2], labels=[0, 1], classes=2)
    >>> build_model(ModelConfig.for_bags(bags, backbone="mlp", head="tilt"), bags).head.title
    'Tilt'
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "initialisation"))
        return Model(config, Normalize.fit(bags, mean, std).cpu())


def mean_logits(logits: Sequence[Tensor]) -> Tensor:
    """The logits of the mean probabilities."""
    if len(logits) == 1:
        return logits[0]
    return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))


def custom_backbone(model: Model) -> nn.Module | None:
    """The model's backbone if it is not what the name in its configuration builds."""
    backbone, config = model.backbone, model.config
    if isinstance(backbone, library_backbones.LibraryBackbone) and library_backbones.is_library_backbone(config.backbone):
        return None
    if isinstance(config.backbone, str) and type(backbone).__module__.startswith("headcount."):
        with torch.device("meta"):
            built = build_backbone(config.backbone, config.shape, dict(config.backbone_options))
        shapes = [{k: v.shape for k, v in module.state_dict().items()} for module in (built, backbone)]
        if isinstance(backbone, type(built)) and shapes[0] == shapes[1]:
            return None
    return backbone


def config_to_json(model: Model) -> dict[str, Any]:
    """What a file keeps of a configuration besides shape and classes; of a custom backbone the import path, as a remark."""
    config, custom = model.config, custom_backbone(model)
    if ":" in config.head and config.head not in TRUSTED_HEADS:
        raise HeadcountError(f"a model with a custom head ({config.head}) cannot be saved: loading runs no code")
    names = {"head": config.head, "mirror": config.mirror, "options": dict(config.options)}
    if custom is not None:
        return {**names, "backbone": backbone_name(custom), "backbone_options": {}}
    return {**names, "backbone": config.backbone, "backbone_options": dict(config.backbone_options)}


def network_from_json(
    data: Any, shape: tuple[int, ...], classes: tuple[str, ...], counted: tuple[bool, ...] | None,
    arrays: Mapping[str, np.ndarray], *, backbone: CustomBackbone | None = None, head: type[Head] | None = None,
) -> Model:  # fmt: skip
    """The network of a configuration in a file, with these weights."""
    schema = {"backbone": str, "backbone_options": Any, "head": str, "options": Any, "mirror": bool}
    serialization.check_fields(data, schema, "config")
    name = data["head"]
    if head is not None and ":" in name:
        name = trust_head(head)
    if ":" in name and name not in TRUSTED_HEADS:
        why = "loading runs no code: give its class, load(folder, head=Class)"
        raise HeadcountError(f"the config names a custom head ({name[:80]}); {why}")
    backbone_options, options = (serialization.check_options(data[k]) for k in ("backbone_options", "options"))
    names: dict[str, Any] = {"backbone": data["backbone"], "head": name, "mirror": data["mirror"]}
    custom = data["backbone"].removeprefix(CUSTOM)[:200]
    if data["backbone"].startswith(CUSTOM):
        if backbone is None:
            advice = f"pass the class, or a module: load(folder, backbone={custom.rpartition('.')[2]})"
            raise HeadcountError(f"its backbone {custom} is not headcount's, and loading runs no code of the folder; {advice}")
        names["backbone"] = backbone
    elif backbone is not None:
        raise HeadcountError(f"its backbone is {custom}, and none of your own; leave backbone= out")
    config = ModelConfig(shape, classes, backbone_options=backbone_options, options=options, counted=counted, **names)
    is_ours = backbone is None and ":" not in name and not library_backbones.is_library_backbone(config.backbone)
    return serialization.build_with_weights(lambda: Model(config), arrays, on_meta=is_ours)


def parse_network(
    data: dict[str, Any], arrays: Mapping[str, np.ndarray], *,
    backbone: CustomBackbone | None = None, head: type[Head] | None = None,
) -> Model:  # fmt: skip
    """The model of a folder that :meth:`Model.save` wrote."""
    if data["kind"] != "bare network":
        raise HeadcountError(f"kind {str(data['kind'])[:40]!r} is no bare network; use FittedModel.load")
    schema = {"format": int, "kind": str, "shape": [int], "classes": Any, "counted?": [bool], "config": dict}
    serialization.check_fields(data, schema)
    classes = serialization.check_names(data["classes"], "classes")
    counted = data["counted"] and tuple(data["counted"])
    return network_from_json(data["config"], tuple(data["shape"]), classes, counted, arrays, backbone=backbone, head=head)
