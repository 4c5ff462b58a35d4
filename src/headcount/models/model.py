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
from headcount.bags.ahead import AtOnce, reading, return_large_blocks
from headcount.data.prepare import Prepare
from headcount.errors import HeadcountError, choose
from headcount.files import beside, write_whole
from headcount.models import distrust
from headcount.models.arrays import look
from headcount.models.backbones import build_backbone
from headcount.models.heads import Output, build_head, find_head

FORMAT = 1


@dataclass(frozen=True)
class Design:
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


class Model(nn.Module):
    """(n, ...) stored instances -> Output."""

    def __init__(self, design: Design, prepare: Prepare | None = None) -> None:
        super().__init__()
        self.design = design
        channels = design.shape[-1]
        self.prepare = prepare or Prepare(design.shape, torch.zeros(channels), torch.ones(channels))
        self.backbone = build_backbone(design.backbone, design.shape, dict(design.backbone_options))
        counted = None if design.counted is None else torch.tensor(design.counted)
        dim: Any = self.backbone.dim
        self.head = build_head(design.head, dim, len(design.classes), dict(design.options), counted)

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(self.prepare(x))

    def forward(self, x: Tensor, segments: Segments) -> Output:
        return self.head(self.features(x), segments)

    @property
    def by_bag(self) -> bool:
        """Whether an instance is judged by the others in its bag, or by its place among them."""
        return self.head.whole_bag or self.head.order_matters

    @property
    def device(self) -> torch.device:
        return self.prepare.mean.device


@torch.no_grad()
def say(model: Model, bags: Bags, *, keep: tuple[str, ...] = (), batch_instances: int = 8192) -> Output:
    """Ask the model about bags: eval mode, no gradients, removal respected. The answer lies on the CPU.

    ``keep``: names of parts to return, ``"features"`` among them.
    """
    if not len(bags):
        raise HeadcountError("no bags to ask about; give at least one")
    was_training = model.training
    model.eval()
    said: list[Output] = []
    parts = by_instances(bags, batch_instances)
    plan = (addresses for part in parts for addresses in part.index.split(batch_instances))
    try:
        with reading(bags.pool, model.device, plan) as reader:
            for part in parts:
                say_part = _say if len(part.index) <= batch_instances else _say_large
                said.append(say_part(model, part, reader, keep, batch_instances))
    finally:
        model.train(was_training)
    instance, bag, kept = zip(*said, strict=True)
    return Output(torch.cat(instance), torch.cat(bag), {k: torch.cat([one[k] for one in kept]) for k in keep})


def _say(model: Model, bags: Bags, reader: AtOnce, keep: tuple[str, ...], budget: int) -> Output:
    seen = [faces(model, reader.take(addresses)) for addresses in bags.index.split(budget)]
    sides = [torch.cat(side) for side in zip(*seen, strict=True)]
    output = answer(model, sides, bags.segments().to(model.device))
    parts = {"features": sides[0], **output.parts}
    for name in keep:
        choose("part of what a model says", name, parts)
    return Output(output.instance.cpu(), output.bag.cpu(), {k: parts[k].float().cpu() for k in keep})


def _say_large(model: Model, bag: Bags, reader: AtOnce, keep: tuple[str, ...], budget: int) -> Output:
    """One bag in chunks. Where the head must have the whole bag, or a part of what it says is to be kept, only the backbone
    goes in chunks, and the features of the bag lie in memory."""
    segments = bag.segments()
    if model.head.undivided(segments) or set(keep) - {"features"}:
        return _say(model, bag, reader, keep, budget)
    return_large_blocks()
    said, noted, features = [], [], []
    for rows in torch.arange(len(bag.index)).split(budget):
        sides = faces(model, reader.take(bag.index[rows]))
        weight = None if segments.weight is None else segments.weight[rows]
        piece = Segments(segments.index[rows], 1, len(rows), weight).to(model.device)
        heard = [model.head.hear(h, piece) for h in sides]
        said.append(_mean([instance for instance, _ in heard]).cpu())
        noted.append([note for _, note in heard])
        features += [sides[0].float().cpu()] if keep else []
    decided = _mean([model.head.decide(model.head.join(side))[0] for side in zip(*noted, strict=True)])
    return Output(torch.cat(said), decided.cpu(), {"features": torch.cat(features)} if keep else {})


@torch.no_grad()
def say_alone(model: Model, x: Tensor, *, batch_instances: int = 8192) -> Tensor:
    """(n, ...) loose instances, seen without any bag -> (n, C) logits, on the CPU. Some heads cannot be asked that."""
    if model.by_bag:
        raise HeadcountError(
            f"head {model.design.head} judges an instance by its bag, or by its place in it; give whole bags to say()"
        )
    was_training = model.training
    model.eval()
    try:
        parts = [part.to(model.device) for part in x.split(batch_instances)]
        ones = [Segments.from_sizes([1] * len(part), model.device) for part in parts]
        said = [answer(model, faces(model, x), s).instance.cpu() for x, s in zip(parts, ones, strict=True)]
    finally:
        model.train(was_training)
    return torch.cat(said)


def faces(model: Model, x: Tensor) -> list[Tensor]:
    """The features of x; where a model mirrors, those of the mirror images as well."""
    return [model.features(x), model.features(x.flip(2))] if model.design.mirror else [model.features(x)]


def answer(model: Model, sides: Sequence[Tensor], segments: Segments) -> Output:
    """What the head says of these features: of several faces of the same instances, the mean as probabilities."""
    said = [model.head(h, segments) for h in sides]
    return Output(_mean([one.instance for one in said]), _mean([one.bag for one in said]), said[0].parts)


def _mean(logits: Sequence[Tensor]) -> Tensor:
    if len(logits) == 1:
        return logits[0]
    return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))


def by_instances(bags: Bags, budget: int) -> list[Bags]:
    """Consecutive bags in parts of at most ``budget`` instances (a larger bag is a part of its own)."""
    ends, parts, start = bags.offsets.tolist(), [], 0
    for b in range(1, len(bags) + 1):
        if b == len(bags) or ends[b + 1] - ends[start] > budget:
            parts.append(bags.take(range(start, b)))
            start = b
    return parts


# -- on disk --------------------------------------------------------------------------------------------------------------


def save(model: Model, folder: Path | str, extra: Mapping[str, Any] | None = None) -> None:
    """``model.safetensors`` and, last, ``model.json``: what was learned, and how to build it again."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if ":" in model.design.head:
        raise HeadcountError(
            f"a model with a head from a file ({model.design.head}) cannot be saved: loading runs no code"
        )
    with beside(folder / "model.safetensors") as part:
        save_file({k: v.contiguous().cpu() for k, v in model.state_dict().items()}, part)
        weights = _sha256(part)
    design = {**(extra or {}), **vars(model.design), "format": FORMAT, "weights": weights}
    write_whole(folder / "model.json", lambda f: f.write(json.dumps(design, indent=1).encode()))


def load(folder: Path | str) -> Model:
    """A model saved by :func:`save`. Anything unexpected in the files is refused."""
    folder = Path(folder)
    said, held = folder / "model.json", folder / "model.safetensors"
    try:
        size, _ = (file.stat().st_size for file in (said, held))  # both are there
        if size > distrust.MOST_JSON:
            raise HeadcountError(f"{said} is larger than {distrust.MOST_JSON >> 20} MB")
        body = json.loads(said.read_text())
        if body["format"] != FORMAT:
            raise HeadcountError(f"{said} has format {body['format']!r}, this version reads {FORMAT}")
        design = _design(body)
        look(held)
        model = distrust.built(lambda: Model(design), load_file(held))
        if _sha256(held) != body["weights"]:
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


def _design(body: Mapping[str, Any]) -> Design:
    """What a file says of the network, each word looked at: nothing is built yet."""
    classes = distrust.names(body["classes"], "classes")
    shape, mirror = body["shape"], body.get("mirror", False)  # earlier versions mirrored nothing
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        raise HeadcountError(f"shape is a list of whole numbers, got {str(shape)[:40]}")
    counted = None if body["counted"] is None else distrust.counted(body["counted"], len(classes))
    own = {k: dict(body[k]) for k in ("backbone_options", "options")}
    return design_of({**body, **own, "mirror": mirror}, tuple(shape), classes, counted)


def design_of(
    said: Mapping[str, Any], shape: tuple[int, ...], classes: tuple[str, ...], counted: tuple[bool, ...] | None
) -> Design:
    """A network as anybody's file describes it: its names and options looked at, no head of one's own."""
    if not isinstance(said["head"], str) or ":" in said["head"]:
        raise HeadcountError(f"the design names a head from a file ({str(said['head'])[:40]}); loading runs no code")
    find_head(said["head"])
    if not isinstance(said["backbone"], str) or not isinstance(said["mirror"], bool):
        raise HeadcountError("the design names no backbone, or mirrors neither truly nor falsely")
    own, head = (distrust.options(said[k]) for k in ("backbone_options", "options"))
    return Design(shape, classes, said["backbone"], own, said["head"], head, counted, said["mirror"])


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
