"""What models predict of bags: an Output of a network, probabilities of any estimator, Predictions of a fitted model.

Letters: N instances, B bags, C classes.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, Pool, Segments
from headcount.bags.pool import DirectReader, open_reader, release_large_blocks, to_feature_array
from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError, check_choice
from headcount.majority.calibration import log_mean_shares
from headcount.models.heads import ChunkedHead, Output, why_not_chunkable
from headcount.models.library_backbones import eval_mode, state_digest
from headcount.models.network import FrozenBackbone, Model, mean_logits
from headcount.models.trees import LinearModel, SklearnModel, Trees
from headcount.readers.flat_array import Part, build_flat_array

BATCH_INSTANCES = 8192
BATCH_IMAGES = 64  # images that go through a frozen backbone at once

Estimator = Model | Trees | LinearModel | SklearnModel


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts of B bags with N instances, in their order.

    Attributes
    ----------
    instance_probabilities
        (N, C), with the rest of the bag as context where the model uses it.
    bag_probabilities
        (B, C) probability of each class to be the bag's label.
    shares, shares_low, shares_high
        (B, C) estimated share of each class among the bag's instances, and the ends of an interval.
    seen_in_training
        (B,) whether the model was trained on this bag.
    """

    classes: tuple[str, ...]
    instance_probabilities: np.ndarray
    bag_probabilities: np.ndarray
    shares: np.ndarray
    shares_low: np.ndarray
    shares_high: np.ndarray
    seen_in_training: np.ndarray

    @property
    def instance_prediction(self) -> np.ndarray:
        """(N,) the number of the most probable class of each instance."""
        return self.instance_probabilities.argmax(1)

    @property
    def instance_classes(self) -> np.ndarray:
        """(N,) its name."""
        return np.asarray(self.classes)[self.instance_prediction]

    @property
    def confidence(self) -> np.ndarray:
        """(N,) the probability of that class."""
        return self.instance_probabilities.max(1)

    @property
    def bag_prediction(self) -> np.ndarray:
        """(B,) the number of the predicted label of each bag."""
        return self.bag_probabilities.argmax(1)


@torch.no_grad()
def predict(model: Model, bags: Bags, *, keep: tuple[str, ...] = (), batch_instances: int = BATCH_INSTANCES) -> Output:
    """What a model predicts of bags, on the CPU. Removed instances get predictions and do not count for their bag.

    ``keep`` names the parts to return, ``"features"`` among them; ``batch_instances`` go through the network at once.

    >>> from headcount.bags import Pool
    >>> from headcount.models.network import ModelConfig
    >>> bags = Bags.of(Pool(torch.eye(4).numpy()), sizes=[1, 3], labels=[0, 1], classes=2)
    >>> predict(Model(ModelConfig.for_bags(bags, backbone="linear")), bags).instance.shape
    torch.Size([4, 2])
    """
    if not len(bags):
        raise HeadcountError("no bags to predict; give at least one")
    parts = [bags.take(numbers) for numbers in bags.ranges(batch_instances)]
    plan = (addresses for part in parts for addresses in part.index.split(batch_instances))
    with eval_mode(model), open_reader(bags.pool, model.device, plan) as reader:
        return concatenate_outputs([_predict_part(model, part, reader, keep, batch_instances) for part in parts])


def _predict_part(model: Model, bags: Bags, reader: DirectReader, keep: tuple[str, ...], budget: int) -> Output:
    """Bags of at most ``budget`` instances together, or a larger one in chunks. Where the head needs the whole bag, or a part of its
    output is kept, only the backbone goes in chunks, and the features of the bag are held in memory."""
    segments, head = bags.segments(), model.head
    whole = len(bags.index) <= budget or bool(set(keep) - {"features"})
    if whole or not isinstance(head, ChunkedHead) or why_not_chunkable(head, segments):
        batches = [model.tta_features(reader.take(addresses)) for addresses in bags.index.split(budget)]
        views = [torch.cat(view) for view in zip(*batches, strict=True)]
        output = model.tta_output(views, segments.to(model.device))
        parts = {"features": views[0], **output.parts}
        for name in keep:
            check_choice("part of a model's output", name, parts)
        return Output(output.instance.cpu(), output.bag.cpu(), {k: parts[k].float().cpu() for k in keep})
    release_large_blocks()
    instance_logits, stats, features = [], [], []
    for rows in torch.arange(len(bags.index)).split(budget):
        views = model.tta_features(reader.take(bags.index[rows]))
        weight = None if segments.weight is None else segments.weight[rows]
        chunk = Segments(segments.index[rows], 1, len(rows), weight).to(model.device)
        accumulated = [head.accumulate(h, chunk) for h in views]
        instance_logits.append(mean_logits([instance for instance, _ in accumulated]).cpu())
        stats.append([bag_stats for _, bag_stats in accumulated])
        features += [views[0].float().cpu()] if keep else []
    bag_log_p = mean_logits([head.readout(head.merge(view))[0] for view in zip(*stats, strict=True)])
    return Output(torch.cat(instance_logits), bag_log_p.cpu(), {"features": torch.cat(features)} if keep else {})


@torch.no_grad()
def predict_instances(model: Model, x: Tensor, *, batch_instances: int = BATCH_INSTANCES) -> Tensor:
    """(n, C) logits of single instances x (n, ...), each without a bag, on the CPU."""
    if model.instance_depends_on_bag:
        why = "judges an instance by its bag, or by its place in it; give whole bags to predict()"
        raise HeadcountError(f"head {model.config.head} {why}")
    logits = []
    with eval_mode(model):
        for part in x.split(batch_instances):
            segments = Segments.from_sizes([1] * len(part), model.device)
            logits.append(model.tta_output(model.tta_features(part.to(model.device)), segments).instance.cpu())
    return torch.cat(logits)


def concatenate_outputs(outputs: Sequence[Output]) -> Output:
    parts = {k: torch.cat([o.parts[k] for o in outputs]) for k in outputs[0].parts}
    return Output(torch.cat([o.instance for o in outputs]), torch.cat([o.bag for o in outputs]), parts)


def estimator_probabilities(
    estimator: Estimator, bags: Bags, counted: tuple[bool, ...] | None = None, *,
    frozen_backbone: FrozenBackbone | None = None, batch_instances: int = BATCH_INSTANCES,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(N, C) probabilities of instances without context, and (B, C) log-probabilities of labels: the mean over a bag's instances
    among the ``counted`` classes, unless the estimator is a network that knows better."""
    if frozen_backbone is not None:
        bags = replace(bags, pool=LazyFeaturePool(bags.pool, frozen_backbone))
    if isinstance(estimator, Model) and not estimator.head.mean_of_instances:
        output = predict(estimator, bags, batch_instances=batch_instances)
        return output.instance.softmax(1), output.bag
    parts = []  # a bag of any size goes in parts
    for addresses in bags.index.split(batch_instances):
        x = bags.pool.take(addresses)
        if isinstance(estimator, Model):
            parts.append(predict_instances(estimator, x).softmax(1))
        else:
            parts.append(torch.from_numpy(estimator.predict_proba(to_feature_array(x))).float())
    p = torch.cat(parts)
    return p, log_mean_shares(p, bags.segments().to("cpu"), None if counted is None else torch.tensor(counted))


class LazyFeaturePool(Pool):
    """Images seen as features of a frozen backbone, which are computed when they are taken and never all at once."""

    is_lazy = True

    def __init__(self, images: Pool, frozen_backbone: FrozenBackbone) -> None:
        self.images, self.frozen_backbone = images, frozen_backbone
        self.data = torch.empty(0, frozen_backbone.dim, dtype=torch.float16)
        self.on_disk = True

    @torch.no_grad()
    def take(self, addresses: Tensor) -> Tensor:
        device = self.frozen_backbone.normalize.mean.device
        parts = addresses.split(BATCH_IMAGES)
        features = [self.frozen_backbone(self.images.take(part).to(device)).cpu() for part in parts]
        return torch.cat(features) if features else self.data

    def __len__(self) -> int:
        return len(self.images)


def extract_features(
    frozen_backbone: FrozenBackbone, bags: Bags, cache: Path | str | None = None,
    on_progress: Callable[[int, int], None] | None = None, batch_images: int = BATCH_IMAGES,
) -> Bags:  # fmt: skip
    """The same bags over their features (M, D) float16, memory-mapped from the cache; what is not there yet is computed. The
    file's name is a hash of the images and of the backbone with its weights; ``on_progress`` gets the images done, and all."""
    features = LazyFeaturePool(bags.pool, frozen_backbone)
    batches = torch.arange(len(features)).split(batch_images)

    def compute(k: int) -> Part:
        rows = features.take(batches[k]).numpy()
        if on_progress is not None:
            on_progress(int(batches[k][-1]) + 1, len(features))
        return Part(rows, digest="", problems={})

    def make_key() -> str:
        weights, pool = state_digest(frozen_backbone.state_dict()), bags.pool
        digest = hashlib.sha256(f"{frozen_backbone.name} {frozen_backbone.size} {weights} {len(pool)} {pool.shape}".encode())
        for rows in torch.arange(len(pool)).split(4096):
            digest.update(pool.take(rows).cpu().contiguous().numpy())
        return digest.hexdigest()[:40]

    sizes, folder = list(map(len, batches)), cache_folder(cache) / "features"
    array, _, _ = build_flat_array(sizes, (frozen_backbone.dim,), np.float16, compute, folder, make_key)
    return replace(bags, pool=Pool(array))
