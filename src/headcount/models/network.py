"""Model: prepare, then backbone, then head. ``say`` is the only way to ask one; ``save`` and ``load`` never run code."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headcount.bags import Bags, Segments
from headcount.bags.pool import DirectReader, open_reader, release_large_blocks
from headcount.errors import HeadcountError, check_choice
from headcount.io import atomic_path, atomic_write
from headcount.models import file_checks
from headcount.models.backbones import build_backbone
from headcount.models.heads import ChunkedHead, Output, build_head, find_head, why_not_chunkable
from headcount.models.normalize import Normalize
from headcount.models.weight_files import check_header
from headcount.seeds import seed_for

FORMAT = 1


@dataclass(frozen=True)
class ModelConfig:
    """What must be known to build the model again."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    backbone: str = "resnet18"
    backbone_options: tuple[tuple[str, Any], ...] = ()
    head: str = "count"
    options: tuple[tuple[str, Any], ...] = ()
    counted: tuple[bool, ...] | None = None
    mirror: bool = False  # answers are the mean over an image and its mirror image

    def __post_init__(self) -> None:
        for name in ("options", "backbone_options"):
            object.__setattr__(self, name, tuple(sorted(dict(getattr(self, name)).items())))
        if self.counted is not None and (len(self.counted) != len(self.classes) or sum(self.counted) < 2):
            raise HeadcountError(f"counted needs one true or false for each of {len(self.classes)} classes, two true")
        if not 1 <= len(self.shape) <= 3 or min(self.shape) < 1:
            raise HeadcountError(f"an instance has a shape such as (32, 32, 3) or (512,), got {self.shape}")
        if self.mirror and len(self.shape) != 3:
            raise HeadcountError(
                f"only images have a mirror image, and the instances have shape {self.shape}; leave mirror out"
            )

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
    """(n, ...) stored instances -> Output."""

    def __init__(self, config: ModelConfig, normalize: Normalize | None = None) -> None:
        super().__init__()
        self.config = config
        channels = config.shape[-1]
        self.normalize = normalize or Normalize(config.shape, torch.zeros(channels), torch.ones(channels))
        self.backbone = build_backbone(config.backbone, config.shape, dict(config.backbone_options))
        counted = None if config.counted is None else torch.tensor(config.counted)
        dim: Any = self.backbone.dim
        self.head = build_head(config.head, dim, len(config.classes), dict(config.options), counted)

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(self.normalize(x))

    def forward(self, x: Tensor, segments: Segments) -> Output:
        return self.head(self.features(x), segments)

    @property
    def instance_depends_on_bag(self) -> bool:
        """Whether an instance is judged by the others in its bag, or by its place among them."""
        return self.head.depends_on_bag or self.head.depends_on_order

    @property
    def device(self) -> torch.device:
        return self.normalize.mean.device


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


@torch.no_grad()
def predict(model: Model, bags: Bags, *, keep: tuple[str, ...] = (), batch_instances: int = 8192) -> Output:
    """Ask the model about bags: eval mode, no gradients, removal respected. The answer lies on the CPU.

    ``keep``: names of parts to return, ``"features"`` among them.
    """
    if not len(bags):
        raise HeadcountError("no bags to ask about; give at least one")
    was_training = model.training
    model.eval()
    outputs: list[Output] = []
    parts = split_by_instances(bags, batch_instances)
    plan = (addresses for part in parts for addresses in part.index.split(batch_instances))
    try:
        with open_reader(bags.pool, model.device, plan) as reader:
            for part in parts:
                say_part = _predict_bags if len(part.index) <= batch_instances else _predict_large_bag
                outputs.append(say_part(model, part, reader, keep, batch_instances))
    finally:
        model.train(was_training)
    instance, bag, kept = zip(*outputs, strict=True)
    return Output(torch.cat(instance), torch.cat(bag), {k: torch.cat([one[k] for one in kept]) for k in keep})


def _predict_bags(model: Model, bags: Bags, reader: DirectReader, keep: tuple[str, ...], budget: int) -> Output:
    features = [tta_features(model, reader.take(addresses)) for addresses in bags.index.split(budget)]
    views = [torch.cat(side) for side in zip(*features, strict=True)]
    output = tta_output(model, views, bags.segments().to(model.device))
    parts = {"features": views[0], **output.parts}
    for name in keep:
        check_choice("part of what a model says", name, parts)
    return Output(output.instance.cpu(), output.bag.cpu(), {k: parts[k].float().cpu() for k in keep})


def _predict_large_bag(model: Model, bag: Bags, reader: DirectReader, keep: tuple[str, ...], budget: int) -> Output:
    """One bag in chunks. Where the head must have the whole bag, or a part of what it says is to be kept, only the backbone
    goes in chunks, and the features of the bag lie in memory."""
    segments, head = bag.segments(), model.head
    if not isinstance(head, ChunkedHead) or why_not_chunkable(head, segments) or set(keep) - {"features"}:
        return _predict_bags(model, bag, reader, keep, budget)
    release_large_blocks()
    instance_logits, stats, features = [], [], []
    for rows in torch.arange(len(bag.index)).split(budget):
        views = tta_features(model, reader.take(bag.index[rows]))
        weight = None if segments.weight is None else segments.weight[rows]
        piece = Segments(segments.index[rows], 1, len(rows), weight).to(model.device)
        pairs = [head.accumulate(h, piece) for h in views]
        instance_logits.append(_mean_logits([instance for instance, _ in pairs]).cpu())
        stats.append([note for _, note in pairs])
        features += [views[0].float().cpu()] if keep else []
    bag_log_p = _mean_logits([head.readout(head.merge(side))[0] for side in zip(*stats, strict=True)])
    return Output(torch.cat(instance_logits), bag_log_p.cpu(), {"features": torch.cat(features)} if keep else {})


@torch.no_grad()
def predict_instances(model: Model, x: Tensor, *, batch_instances: int = 8192) -> Tensor:
    """(n, ...) loose instances, seen without any bag -> (n, C) logits, on the CPU. Some heads cannot be asked that."""
    if model.instance_depends_on_bag:
        raise HeadcountError(
            f"head {model.config.head} judges an instance by its bag, or by its place in it; give whole bags to say()"
        )
    was_training = model.training
    model.eval()
    try:
        parts = [part.to(model.device) for part in x.split(batch_instances)]
        ones = [Segments.from_sizes([1] * len(part), model.device) for part in parts]
        logits = [tta_output(model, tta_features(model, x), s).instance.cpu() for x, s in zip(parts, ones, strict=True)]
    finally:
        model.train(was_training)
    return torch.cat(logits)


def tta_features(model: Model, x: Tensor) -> list[Tensor]:
    """The features of x; where a model mirrors, those of the mirror images as well."""
    return [model.features(x), model.features(x.flip(2))] if model.config.mirror else [model.features(x)]


def tta_output(model: Model, views: Sequence[Tensor], segments: Segments) -> Output:
    """What the head says of these features: of several faces of the same instances, the mean as probabilities."""
    outputs = [model.head(h, segments) for h in views]
    return Output(
        _mean_logits([one.instance for one in outputs]), _mean_logits([one.bag for one in outputs]), outputs[0].parts
    )


def _mean_logits(logits: Sequence[Tensor]) -> Tensor:
    if len(logits) == 1:
        return logits[0]
    return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))


def split_by_instances(bags: Bags, budget: int) -> list[Bags]:
    """Consecutive bags in parts of at most ``budget`` instances (a larger bag is a part of its own)."""
    ends, parts, start = bags.offsets.tolist(), [], 0
    for b in range(1, len(bags) + 1):
        if b == len(bags) or ends[b + 1] - ends[start] > budget:
            parts.append(bags.take(range(start, b)))
            start = b
    return parts


# -- on disk --------------------------------------------------------------------------------------------------------------


def save_network(model: Model, folder: Path | str, extra: Mapping[str, Any] | None = None) -> None:
    """``model.safetensors`` and, last, ``model.json``: what was learned, and how to build it again."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if ":" in model.config.head:
        raise HeadcountError(
            f"a model with a head from a file ({model.config.head}) cannot be saved: loading runs no code"
        )
    with atomic_path(folder / "model.safetensors") as part:
        save_file({k: v.contiguous().cpu() for k, v in model.state_dict().items()}, part)
        weights = _sha256(part)
    design = {**(extra or {}), **vars(model.config), "format": FORMAT, "weights": weights}
    atomic_write(folder / "model.json", lambda f: f.write(json.dumps(design, indent=1).encode()))


def load_network(folder: Path | str) -> Model:
    """A model saved by :func:`save`. Anything unexpected in the files is refused."""
    folder = Path(folder)
    json_path, weights_path = folder / "model.json", folder / "model.safetensors"
    try:
        size, _ = (file.stat().st_size for file in (json_path, weights_path))  # both are there
        if size > file_checks.MAX_JSON:
            raise HeadcountError(f"{json_path} is larger than {file_checks.MAX_JSON >> 20} MB")
        data = json.loads(json_path.read_text())
        if data["format"] != FORMAT:
            raise HeadcountError(f"{json_path} has format {data['format']!r}, this version reads {FORMAT}")
        config = _parse_config(data)
        check_header(weights_path)
        model = file_checks.build_with_weights(lambda: Model(config), load_file(weights_path))
        if _sha256(weights_path) != data["weights"]:
            raise HeadcountError(f"{folder}: model.json and model.safetensors are of two models; save it again")
        return model
    except FileNotFoundError as e:
        raise HeadcountError(f"no model in {folder}: {Path(e.filename or '').name} is missing") from None
    except OSError as e:
        raise HeadcountError(f"no model in {folder}: {Path(e.filename or folder).name}: {e.strerror}") from None
    except HeadcountError as e:
        raise HeadcountError(str(e) if str(folder) in str(e) else f"{folder} holds no readable model: {e}") from None
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError, SafetensorError) as e:
        why = " ".join(str(e).split())[:600]
        raise HeadcountError(f"{folder} holds no readable model: {type(e).__name__}: {why}") from None


def _parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """What a file says of the network, each word looked at: nothing is built yet."""
    classes = file_checks.check_names(data["classes"], "classes")
    shape, mirror = data["shape"], data.get("mirror", False)  # earlier versions mirrored nothing
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        raise HeadcountError(f"shape is a list of whole numbers, got {str(shape)[:40]}")
    counted = None if data["counted"] is None else file_checks.check_counted(data["counted"], len(classes))
    own = {k: dict(data[k]) for k in ("backbone_options", "options")}
    return config_from_json({**data, **own, "mirror": mirror}, tuple(shape), classes, counted)


def config_from_json(
    data: Mapping[str, Any], shape: tuple[int, ...], classes: tuple[str, ...], counted: tuple[bool, ...] | None
) -> ModelConfig:
    """A network as anybody's file describes it: its names and options looked at, no head of one's own."""
    if not isinstance(data["head"], str) or ":" in data["head"]:
        raise HeadcountError(f"the design names a head from a file ({str(data['head'])[:40]}); loading runs no code")
    find_head(data["head"])
    if not isinstance(data["backbone"], str) or not isinstance(data["mirror"], bool):
        raise HeadcountError("the design names no backbone, or mirrors neither truly nor falsely")
    own, head = (file_checks.check_options(data[k]) for k in ("backbone_options", "options"))
    return ModelConfig(shape, classes, data["backbone"], own, data["head"], head, counted, data["mirror"])


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
