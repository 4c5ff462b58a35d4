"""Prediction over a Ray cluster says what say() says, in order, also when a node dies midway."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.inference import predict_ray as shards
from headcount.inference.predict_ray import (
    model_files,
    predict_network_on_node,
    predict_on_ray,
    predict_shards_on_ray,
    split_bags,
)
from headcount.models.network import Model, ModelConfig
from headcount.models.predictions import predict


def bags(count: int = 30) -> Bags:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, count)
    index = rng.integers(0, 500, sizes.sum())  # bags share instances
    pool = Pool(rng.normal(size=(500, 6)).astype(np.float32))
    return Bags.of(
        pool,
        index=index,
        sizes=sizes,
        labels=rng.integers(0, 3, count),
        classes=3,
        weight=rng.choice([1.0, 2.0], len(index)),
        truth=rng.integers(0, 3, len(index)),
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    torch.manual_seed(0)
    Model(ModelConfig((6,), ("a", "b", "c"), "mlp", head="attention")).save(tmp_path / "model")
    return tmp_path / "model"


def same(got, want) -> None:
    torch.testing.assert_close(got.instance, want.instance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.bag, want.bag, rtol=1e-6, atol=1e-6)


# -- without a cluster --------------------------------------------------------------------------------------------------


def test_shards_are_all_of_it_with_their_own_instances_and_no_truth():
    given = bags()
    shards = list(split_bags(given, 100))
    assert len(shards) > 5
    assert sum(map(len, shards)) == len(given)
    assert all(s.truth is None and len(s.pool) <= len(s.index) for s in shards)
    again = torch.cat([s.pool.take(s.index) for s in shards])
    assert torch.equal(again, given.pool.take(given.index))
    for wrong in (lambda: list(split_bags(given, 0)), lambda: list(split_bags(given.take([]), 10))):
        with pytest.raises(HeadcountError, match="at least one"):
            wrong()


@pytest.mark.parametrize("made", [lambda s: s, lambda s: lambda: s], ids=["bags", "function"])
def test_a_node_answers_as_say_does(folder, made):
    given, model = bags(), Model.load(folder)
    files = model_files(folder)
    for shard in split_bags(given, 200):
        parcel = predict_network_on_node(files, made(shard), ("features",), 64, "cpu", torch.get_num_threads())
        arrays = parcel.unpack()
        want = predict(model, shard, keep=("features",), batch_instances=64)
        assert np.array_equal(arrays["instance"], want.instance)
        assert np.array_equal(arrays["bag"], want.bag)
        assert np.array_equal(arrays["part.features"], want.parts["features"])
    assert shards._cached_model.cache_info().hits >= 1, "a node builds a model once"


def test_what_goes_wrong_on_a_node_is_told(folder):
    def lost():
        raise HeadcountError("shard 3 is not on this disk")

    parcel = predict_network_on_node(model_files(folder), lost, (), 64, "cpu", 1)
    with pytest.raises(HeadcountError, match="shard 3 is not on this disk"):
        parcel.unpack()


def test_a_bad_model_is_told_before_anything_travels(tmp_path):
    with pytest.raises(HeadcountError, match=r"no model in .*nothing"):
        predict_on_ray(tmp_path / "nothing", bags())


# -- on a cluster -------------------------------------------------------------------------------------------------------

on_a_cluster = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes in"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        yield made
        ray.shutdown()
        made.shutdown()


class TestOnACluster:
    pytestmark = on_a_cluster

    def test_the_same_answer_in_the_same_order(self, cluster, folder):
        given = bags(60)
        same(
            predict_on_ray(folder, given, shard_instances=100, address=cluster.address),
            predict(Model.load(folder), given),
        )

    def test_a_shard_that_fails_ends_it(self, cluster, folder):
        def lost():
            from headcount.errors import HeadcountError

            raise HeadcountError("shard 3 is not on this disk")

        with pytest.raises(HeadcountError, match="shard 3 is not on this disk"):
            list(predict_shards_on_ray(folder, [*split_bags(bags(), 200), lost], address=cluster.address))

    def test_a_node_that_dies(self, cluster, folder, tmp_path):
        """Twenty shards of half a second; the second node goes while it has one. It is asked again on the first."""
        given, notes = bags(60), tmp_path / "notes"
        notes.mkdir()
        (doomed,) = cluster.worker_nodes
        raylet = doomed.all_processes["raylet"][0].process.pid

        def slowly(number, shard):
            def read():  # defined in here, so that it travels whole
                import os
                import time

                with open(f"{notes}/{number}-{os.getpid()}-{os.getppid()}-{time.monotonic_ns()}", "w"):
                    time.sleep(0.5)
                deadline = (
                    time.monotonic() + 60
                )  # the first node leaves the second its two, however late that one begins
                while os.getppid() != raylet and time.monotonic() < deadline:
                    if sum(f"-{raylet}-" in name for name in os.listdir(notes)) >= 2:
                        break
                    time.sleep(0.01)
                return shard

            return read

        shards = list(split_bags(given, 80))
        assert len(shards) >= 15

        def kill() -> None:
            deadline = time.monotonic() + 100
            while time.monotonic() < deadline:
                there = [p.name.split("-") for p in notes.iterdir()]
                mine = [int(pid) for _, pid, parent, _ in there if int(parent) == raylet]
                if len(mine) >= 2:
                    with suppress(ProcessLookupError):
                        os.kill(mine[-1], signal.SIGSTOP)
                    cluster.remove_node(doomed, allow_graceful=False)
                    with suppress(ProcessLookupError):
                        os.kill(mine[-1], signal.SIGKILL)
                    return
                time.sleep(0.01)

        killer = threading.Thread(target=kill)
        killer.start()
        said = predict_on_ray(folder, [slowly(i, s) for i, s in enumerate(shards)], address=cluster.address)
        killer.join()
        same(said, predict(Model.load(folder), given))
        asked = [p.name.split("-")[0] for p in notes.iterdir()]
        assert len(asked) > len(shards), "a shard was asked again"
        assert not cluster.worker_nodes
