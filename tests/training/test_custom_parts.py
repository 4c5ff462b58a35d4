"""Parts of one's own in train(): an optimizer, an augmentation, a Dataset of torch, a backbone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import headcount as hc
from headcount.bags import Bags, Pool
from headcount.bags.pool import DatasetPool
from headcount.errors import HeadcountError

N, SIZE = 24, 5


def features(n=N, seed=0):
    g = np.random.default_rng(seed)
    truth = (g.random((n, SIZE)) < np.where(np.arange(n) % 2, 0.8, 0.2)[:, None]).astype(int)
    return (g.normal(size=(n * SIZE, 3)) + 3.0 * truth.reshape(-1, 1)).astype(np.float32), (2 * truth.sum(1) > SIZE).astype(int)


def bags_of(pool, labels, index=None):
    return Bags.of(pool, index=index, sizes=[SIZE] * len(labels), labels=labels, classes=["no", "yes"])


def trained(config, head="count", bags=None, **options):
    x, labels = features()
    bags = bags or bags_of(Pool(x), labels)
    model_config = hc.ModelConfig.for_bags(bags, head=head, **{"backbone": "mlp", **options})
    return hc.train(hc.build_model(model_config, bags), bags, bags, config, compile="off")


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def bag_accuracy(result):
    x, labels = features(seed=1)
    return float((hc.predict(result.model, bags_of(Pool(x), labels)).bag.argmax(1).numpy() == labels).mean())


def test_an_optimizer_of_ones_own():
    """The same numbers as ours if it does the same, and others with another learning rate."""
    like_ours = hc.TrainConfig(epochs=4, batch_bags=6, optimizer=lambda p: torch.optim.Adam(p, 3e-4, fused=True))
    assert torch.equal(weights(trained(like_ours)), weights(trained(hc.TrainConfig(epochs=4, batch_bags=6))))
    result = trained(hc.TrainConfig(epochs=30, batch_bags=6, optimizer=lambda p: torch.optim.NAdam(p, 2e-3)))
    assert bag_accuracy(result) > 0.9
    with pytest.raises(HeadcountError, match=r"optimizer's function returns int, and no torch\.optim\.Optimizer"):
        trained(hc.TrainConfig(epochs=1, optimizer=lambda p: 3))


def test_a_schedule_sets_the_learning_rate_of_ones_own_optimizer():
    rates = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    trained(hc.TrainConfig(epochs=4, batch_bags=24, lr=0.2, schedule="cosine", optimizer=lambda p: Watched(p, 5.0)))
    assert rates[0] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)
    rates.clear()
    trained(hc.TrainConfig(epochs=4, batch_bags=24, lr=0.2, optimizer=lambda p: Watched(p, 5.0)))
    assert rates == [5.0] * 4


def test_an_augmentation_of_ones_own_sees_training_instances_and_no_others():
    seen = []

    def shift(x):
        seen.append((len(x), x.detach().clone(), torch.is_grad_enabled()))
        return x + 100

    plain = trained(hc.TrainConfig(epochs=2, batch_bags=8))
    shifted = trained(hc.TrainConfig(epochs=2, batch_bags=8, views=shift))
    assert [n for n, _, _ in seen] == [8 * SIZE] * 6, "three steps in two epochs, and no validation"
    assert float(torch.cat([x for _, x, _ in seen]).mean()) == pytest.approx(0, abs=1e-4), "normalised"
    assert not torch.equal(weights(plain), weights(shifted))


def test_weak_and_strong_views_of_ones_own():
    calls = {"weak": 0, "strong": 0}

    def view(name):
        def apply(x):
            calls[name] += 1
            return x

        return apply

    config = hc.TrainConfig(epochs=4, batch_bags=24, views=(view("weak"), view("strong")))
    trained(config, head="tilt", options=(("start", 0.0),))
    assert calls == {"weak": 4 * 3, "strong": 4}, "a weak and a strong view for the network, two weak ones for the teacher"


@pytest.mark.parametrize("field", ["views", "optimizer"])
def test_other_types_are_refused(field):
    with pytest.raises(HeadcountError, match=f"no {field}"):
        hc.TrainConfig(**{field: 3})


class Rows(torch.utils.data.Dataset):
    """A Dataset as anybody writes one."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.tensor(self.x[i]), i


def test_a_dataset_with_bag_ids_trains_as_its_array_does():
    x, labels = features()
    ids = np.repeat(np.arange(N), SIZE)
    mixed = np.random.default_rng(3).permutation(len(x))  # the instances of a bag stand anywhere
    order = np.argsort(ids[mixed], kind="stable")
    config = hc.TrainConfig(epochs=3, batch_bags=7)
    from_dataset = trained(config, bags=bags_of(DatasetPool(Rows(x[mixed])), labels, index=order))
    from_array = trained(config, bags=bags_of(Pool(x[mixed]), labels, index=order))
    assert from_dataset.progress.curve == from_array.progress.curve
    assert torch.equal(weights(from_dataset), weights(from_array))


def test_images_of_a_dataset():
    from PIL import Image

    g = np.random.default_rng(0)
    pixels = g.integers(0, 256, (8, 6, 4, 3), dtype=np.uint8)
    pools = [
        DatasetPool([Image.fromarray(p) for p in pixels]),
        DatasetPool(list(torch.from_numpy(pixels))),
        DatasetPool(pixels),
    ]
    for pool in pools:
        assert (pool.shape, pool.kind, len(pool)) == ((6, 4, 3), "images", 8)
        assert np.array_equal(pool.take(torch.tensor([5, 2])).numpy(), pixels[[5, 2]])
    assert DatasetPool(list(pixels[..., 0])).shape == (6, 4, 1), "grey"


def test_datasets_that_hold_no_instances_are_refused():
    for items, message in (
        (list(torch.rand(4, 3, 8, 8)), "images as uint8"),
        ([], "no items"),
        ([torch.tensor([1.0, float("nan")])], "nan"),
    ):
        with pytest.raises(HeadcountError, match=message):
            DatasetPool(items)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 7), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.layers(x)


def test_all_of_it_together_resumes_from_a_checkpoint(tmp_path):
    def noise(x):
        return x + 0.1 * torch.randn_like(x)

    x, labels = features()
    bags = bags_of(DatasetPool(Rows(x)), labels)
    config = hc.TrainConfig(epochs=6, batch_bags=8, views=noise, optimizer=lambda p: torch.optim.Adagrad(p, 0.05))
    model = hc.build_model(hc.ModelConfig.for_bags(bags, backbone=Backbone, head="count"), bags)
    whole = hc.train(model, bags, bags, config, work_dir=tmp_path / "whole", checkpoint_seconds=0)
    assert bag_accuracy(whole) > 0.9

    def interrupt(progress):
        if progress.epoch == 3:
            raise KeyboardInterrupt

    model = hc.build_model(hc.ModelConfig.for_bags(bags, backbone=Backbone, head="count"), bags)
    with pytest.raises(KeyboardInterrupt):
        hc.train(model, bags, bags, config, work_dir=tmp_path / "parts", on_progress=interrupt)
    epochs = []
    result = hc.train(model, bags, bags, config, work_dir=tmp_path / "parts", on_progress=lambda p: epochs.append(p.epoch))
    assert epochs == [4, 5, 6]
    assert torch.equal(weights(result), weights(whole))
