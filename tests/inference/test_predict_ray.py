"""`headcount predict --launch ray`: the same file as without it, whatever happens to a node; one line for a mistake.

Without a cluster: what travels, what comes back, and the command with a Ray that runs everything in this process. With one
(soak): two nodes, one of them lost midway, and Ctrl-C, both through the command line.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.inference import predict as prediction, predict_ray
from headcount.inference.predict import predict_dataset
from headcount.inference.predict_ray import (
    RayOptions,
    detach_bags,
    model_files,
    predict_on_node,
    predict_on_ray,
    remote_predictor,
    split_bags,
)
from headcount.models.fitted import FittedModel
from headcount.models.heads import Output
from headcount.models.network import Model, ModelConfig
from headcount.models.predictions import concatenate_outputs, predict
from headcount.readers import read
from model_factory import KINDS, case, fitted


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- what travels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_context", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_predicts_as_this_process_does(kind, use_context, tmp_path, monkeypatch, one_thread):
    """Every kind of data, in many shards, there and back as Ray would take them."""
    monkeypatch.setattr(prediction, "SHARD_INSTANCES", 3)
    folder, data = case(tmp_path / "in", kind)
    model = FittedModel.load(folder).replace(concentration=2.0)
    model.save(folder, overwrite=True)
    dataset, travelled = model.read(data), []

    def predict_shards(shards, use_context):
        for bags in shards:
            sent = pickle.dumps(detach_bags(bags))
            travelled.append(pickle.loads(sent))
            arguments = {"use_context": use_context}
            result = predict_on_node(model_files(folder), pickle.loads(sent), arguments, RayOptions())
            yield pickle.loads(pickle.dumps(result))

    here = predict_dataset(model, dataset, use_context=use_context)
    there = predict_dataset(model, dataset, shard_predictor=predict_shards, use_context=use_context)
    assert len(travelled) > 2
    for name in ("instance_probabilities", "bag_probabilities", "shares", "shares_low", "shares_high"):
        assert np.array_equal(getattr(here, name), getattr(there, name)), name
    assert all(bags.truth is None and len(bags.pool) <= len(bags.index) for bags in travelled)


def bags_of(count: int = 30) -> Bags:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, count)
    index = rng.integers(0, 500, sizes.sum())  # bags share instances
    return Bags.of(
        Pool(rng.normal(size=(500, 6)).astype(np.float32)),
        index=index,
        sizes=sizes,
        labels=rng.integers(0, 3, count),
        classes=3,
        weight=rng.choice([1.0, 2.0], len(index)),
        truth=rng.integers(0, 3, len(index)),
    )


@pytest.fixture
def network(tmp_path) -> Path:
    """The folder of a network."""
    torch.manual_seed(0)
    return Model(ModelConfig((6,), ("a", "b", "c"), "mlp", head="attention")).save(tmp_path / "network")


def assert_same(outputs: Iterator[Output], want: Output) -> None:
    got = concatenate_outputs(list(outputs))
    torch.testing.assert_close(got.instance, want.instance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.bag, want.bag, rtol=1e-6, atol=1e-6)


def test_shards_are_all_of_it_with_their_own_instances_and_no_truth():
    bags = bags_of()
    shards = list(split_bags(bags, 100))
    assert len(shards) > 5
    assert sum(map(len, shards)) == len(bags)
    assert all(s.truth is None and len(s.pool) <= len(s.index) for s in shards)
    again = torch.cat([s.pool.take(s.index) for s in shards])
    assert torch.equal(again, bags.pool.take(bags.index))
    for wrong in (lambda: list(split_bags(bags, 0)), lambda: list(split_bags(bags.take([]), 10))):
        with pytest.raises(HeadcountError, match="at least one"):
            wrong()


@pytest.mark.parametrize("source", [lambda s: s, lambda s: lambda: s], ids=["bags", "function"])
def test_a_node_predicts_as_a_network_does(network, source):
    files, model = model_files(network), Model.load(network)
    arguments = {"keep": ("features",), "batch_instances": 64}
    for shard in split_bags(bags_of(), 200):
        got = predict_on_node(files, source(shard), arguments, RayOptions(cpus_each=torch.get_num_threads()))
        want = predict(model, shard, **arguments)
        assert torch.equal(got.instance, want.instance)
        assert torch.equal(got.bag, want.bag)
        assert torch.equal(got.parts["features"], want.parts["features"])
    assert predict_ray._cached_model.cache_info().hits >= 1, "a node builds a model once"


def test_exceptions_on_a_node(network, tmp_path):
    bags = read(case(tmp_path / "in", "images")[1]).bags
    damaged = (b"damaged", b"damaged")
    with pytest.raises(HeadcountError, match="model"):
        predict_on_node(damaged, detach_bags(bags), {}, RayOptions())

    def lost():
        raise HeadcountError("shard 3 is not on this disk")

    with pytest.raises(HeadcountError, match="shard 3 is not on this disk"):
        predict_on_node(model_files(network), lost, {}, RayOptions())


def test_a_bad_model_is_refused_before_anything_travels(tmp_path):
    with pytest.raises(HeadcountError, match=r"no model in .*nothing: model\.json is missing"):
        predict_on_ray(tmp_path / "nothing", bags_of())


def test_a_shard_of_images_is_small_enough_to_travel(tmp_path):
    dataset = read(case(tmp_path / "in", "images")[1])
    size, preprocessor = int(np.prod(dataset.bags.pool.shape)), dataset.fit_preprocessor()
    limit = min(prediction.SHARD_INSTANCES, prediction.SHARD_BYTES // size)
    assert prediction.shard_instances(dataset, preprocessor) == limit
    assert prediction.shard_instances(dataset, preprocessor, max_bytes=4 * size) == 4
    assert prediction.shard_instances(dataset, preprocessor, max_bytes=1) == 1
    table = read(case(tmp_path / "table", "table")[1])
    count = prediction.shard_instances(table, table.fit_preprocessor(), max_bytes=4 * 3 * 5)
    assert count == 5, "a table's rows travel as their features"


# -- the command, with a Ray that runs everything here ------------------------------------------------------------------------


class TaskError(RuntimeError):
    """As Ray wraps the exception of a task."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class LocalRay:
    """As much of Ray as is used, in this process: a task runs when its result is asked for."""

    exceptions = SimpleNamespace(RayError=RuntimeError, RayTaskError=TaskError)

    def __init__(self, cpus: int = 2) -> None:
        self.cpus, self.sent, self.running, self.most, self.cancelled = cpus, [], set(), 0, 0
        self.interrupt_at = self.fail_at = None
        self.connected = False

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: object) -> None:
        self.connected, self.options = True, options

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict]:
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}]

    def cluster_resources(self) -> dict:
        return {"CPU": self.cpus}

    def put(self, value: object) -> object:
        return value

    def remote(self, **options: object) -> Callable:
        def as_task(function: Callable) -> SimpleNamespace:
            def send(*arguments: object) -> int:
                self.sent.append((function, arguments))
                self.running.add(len(self.sent) - 1)
                self.most = max(self.most, len(self.running))
                return len(self.sent) - 1

            return SimpleNamespace(remote=send)

        return as_task

    def get(self, number: int) -> object:
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        function, arguments = self.sent[number]
        self.running.discard(number)
        if number == self.fail_at:
            arguments = ((b"damaged", b"damaged"), *arguments[1:])
        try:
            return function(*arguments)
        except Exception as e:
            raise TaskError(e) from e

    def cancel(self, number: int) -> None:
        self.cancelled += 1


@pytest.fixture
def ray(monkeypatch) -> LocalRay:
    local = LocalRay()
    monkeypatch.setattr(predict_ray, "import_ray", lambda: local)
    monkeypatch.setattr(prediction, "SHARD_INSTANCES", 3)
    return local


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_as_without_it(kind, ray, run_cli, tmp_path, one_thread):
    model, data = case(tmp_path / "in", kind)
    code, _, err = run_cli("predict", model, data, "--out", "here.csv", "--bags", "here-bags.csv")
    assert code == 0, err
    options = ("--launch", "ray", "--address", "auto")
    code, _, err = run_cli("predict", model, data, "--out", "ray.csv", "--bags", "ray-bags.csv", *options)
    assert code == 0, err
    assert len(ray.sent) > 2
    assert (ray.most, ray.connected, ray.options["address"]) == (min(4, len(ray.sent)), False, "auto")
    for name in ("", "-bags"):
        assert (tmp_path / f"ray{name}.csv").read_bytes() == (tmp_path / f"here{name}.csv").read_bytes()
    assert all(isinstance(shard, Bags) and shard.truth is None for _, (_, shard, *_) in ray.sent)


def test_shards_are_read_only_when_there_is_room(ray, tmp_path):
    """A generator of shards is not drained into the cluster: two for each place to run."""
    folder, data = case(tmp_path / "in", "table")
    model, running = FittedModel.load(folder), []
    predictor = remote_predictor(folder)

    def predict_shards(shards, use_context):
        def counted():
            for bags in shards:
                running.append(len(ray.running))
                yield bags

        yield from predictor(counted())

    predict_dataset(model, model.read(data), shard_predictor=predict_shards)
    assert len(running) == 8
    assert max(running) == 4 == ray.most


def test_a_network_on_the_cluster(ray, network):
    bags = bags_of()
    outputs = predict_on_ray(network, bags, shard_instances=100)
    assert_same(outputs, predict(Model.load(network), bags))
    assert len(ray.sent) > 5


@pytest.mark.parametrize("what", ["interrupt_at", "fail_at"])
def test_what_ends_it_midway_leaves_nothing(what, ray, run_cli, tmp_path):
    model, data = case(tmp_path / "in", "table")
    setattr(ray, what, 2)
    code, _, err = run_cli("predict", model, data, "--out", "p.csv", "--bags", "b.csv", "--launch", "ray")
    last = err.strip().splitlines()[-1]
    assert (code, last.startswith("headcount: ")) == ((130, True) if what == "interrupt_at" else (2, True)), err
    assert "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} == {"in"}
    assert ray.cancelled >= 2, "submitted shards are cancelled"
    assert not ray.connected
    if what == "fail_at":
        assert "model" in last


@pytest.mark.parametrize(("options", "why"), [
    ("--launch rya", "did you mean 'ray'"), ("--address auto", "are for --launch ray"),
    ("--gpus-each 1", "are for --launch ray"),
    ("--launch ray --device cuda:1", "--device is auto, cpu or cuda"),
    ("--launch ray --device cuda", "contradict each other"), ("--launch ray --device cpu --gpus-each 1", "contradict"),
    ("--launch ray --gpus-each 1.5", "part of a GPU or whole ones"),
    ("--launch ray --address ray://there:1", "auto, local or host:port"),
    ("--launch ray --gpus-each 1", "the nodes have 2 CPUs and 0 GPUs"),
])  # fmt: skip
def test_mistakes_are_one_line(options, why, ray, run_cli, tmp_path):
    model, data = case(tmp_path / "in", "table")
    code, _, err = run_cli("predict", model, data, "--out", "p.csv", *options.split())
    assert code == 2
    assert why in err.strip().splitlines()[-1]
    assert not (tmp_path / "p.csv").exists()


def test_without_ray_the_extra_is_named_before_anything_is_read(run_cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    model, _ = case(tmp_path / "in", "table")
    code, _, err = run_cli("predict", model, "nothing.csv", "--out", "p.csv", "--launch", "ray")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "headcount[ray]" in err


def test_no_cluster_at_the_address(run_cli, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_ray, "import_ray", LocalRay)
    model, data = case(tmp_path / "in", "table")
    code, _, err = run_cli("predict", model, data, "--out", "p.csv", "--launch", "ray", "--address", "127.0.0.1:1")
    assert code == 2
    assert "cannot connect to 127.0.0.1:1" in err


# -- on a cluster -------------------------------------------------------------------------------------------------------------


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "headcount", *map(str, words)]


def at_work() -> dict[int, int]:
    """Processes at a shard, and their parents."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::predict_on_node"):
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def until(true: Callable, seconds: float = 100.0):
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


@pytest.fixture
def large(tmp_path) -> tuple[Path, Path]:
    """A forest, and sixteen shards of 65,536 instances."""
    g = np.random.default_rng(0)
    bags, size = 1024, 1024
    truth = np.where(g.random(bags * size) < 0.7, np.repeat(np.arange(bags) % 2, size), g.integers(0, 2, bags * size))
    x = (truth[:, None] + g.normal(size=(bags * size, 2))).astype(np.float32)
    data = tmp_path / "large.npz"
    np.savez(data, features=x, sizes=np.full(bags, size), labels=np.array(["no", "yes"])[np.arange(bags) % 2])
    few = read(list(x.reshape(bags, size, 2)[:20, :50]), labels=["no", "yes"] * 10)
    return fitted(few, "forest").save(tmp_path / "model"), data


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes in")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray", "ignore::ResourceWarning")
class TestOnACluster:
    def test_the_same_bytes(self, cluster, tmp_path):
        """A network, on pictures."""
        model, data = case(tmp_path / "in", "images")
        for name, words in (("here", ()), ("ray", ("--launch", "ray", "--address", cluster.address))):
            subprocess.run(command("predict", model, data, "--out", tmp_path / f"{name}.csv", *words), check=True)
        assert (tmp_path / "here.csv").read_bytes() == (tmp_path / "ray.csv").read_bytes()

    def test_ctrl_c(self, cluster, large, tmp_path):
        model, data = large
        out = ("--out", tmp_path / "p.parquet", "--launch", "ray", "--address", cluster.address)
        driver = subprocess.Popen(command("predict", model, data, *out), stderr=subprocess.PIPE, text=True)
        try:
            until(at_work)
            driver.send_signal(signal.SIGINT)
            _, err = driver.communicate(timeout=60)
        finally:
            driver.kill()
        assert driver.returncode == 130, err
        assert err.splitlines()[-1].startswith("headcount: interrupted")
        assert "Traceback" not in err
        until(lambda: not at_work(), 20)
        assert {p.name for p in tmp_path.iterdir()} == {"model", "large.npz"}

    def test_a_network_gives_the_same_in_the_same_order(self, cluster, network):
        bags = bags_of(60)
        outputs = predict_on_ray(network, bags, shard_instances=100, address=cluster.address)
        assert_same(outputs, predict(Model.load(network), bags))

    def test_a_shard_that_fails_ends_it(self, cluster, network):
        def lost():
            from headcount.errors import HeadcountError

            raise HeadcountError("shard 3 is not on this disk")

        with pytest.raises(HeadcountError, match="shard 3 is not on this disk"):
            list(predict_on_ray(network, [*split_bags(bags_of(), 200), lost], address=cluster.address))

    def test_a_node_that_dies(self, cluster, large, tmp_path):
        """The second node goes while it is at a shard: the file is that of a quiet machine."""
        model, data = large
        subprocess.run(command("predict", model, data, "--out", tmp_path / "here.parquet"), check=True)
        (doomed,) = cluster.worker_nodes
        raylet, killed = doomed.all_processes["raylet"][0].process.pid, []

        def kill() -> None:
            other = until(lambda: next((p for p, parent in at_work().items() if parent != raylet), None))
            os.kill(other, signal.SIGSTOP)  # else the first node may be done before the second has begun
            pid = until(lambda: next((p for p, parent in at_work().items() if parent == raylet), None))
            os.kill(pid, signal.SIGSTOP)  # a node that dies takes its shard with it
            killed.append(pid)
            cluster.remove_node(doomed, allow_graceful=False)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.kill(other, signal.SIGCONT)

        killer = threading.Thread(target=kill)
        killer.start()
        out = ("--out", tmp_path / "ray.parquet", "--launch", "ray", "--address", cluster.address)
        subprocess.run(command("predict", model, data, *out), check=True)
        killer.join()
        assert len(killed) == 1
        assert not cluster.worker_nodes
        here, there = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("here", "ray"))
        assert here.num_rows == 1 << 20
        assert there.equals(here)

    def test_a_node_that_dies_while_it_reads_a_shard(self, cluster, network, tmp_path):
        """Twenty shards of half a second; the second node goes while it has one, which is then predicted on the first."""
        bags, notes = bags_of(60), tmp_path / "notes"
        notes.mkdir()
        (doomed,) = cluster.worker_nodes or [cluster.add_node(num_cpus=1)]
        raylet = doomed.all_processes["raylet"][0].process.pid

        def slowly(number, shard):
            def read():  # defined in here, so that it travels whole
                import os
                import time

                with open(f"{notes}/{number}-{os.getpid()}-{os.getppid()}-{time.monotonic_ns()}", "w"):
                    time.sleep(0.5)
                deadline = time.monotonic() + 60
                while os.getppid() != raylet and time.monotonic() < deadline:  # the second node gets its two
                    if sum(f"-{raylet}-" in name for name in os.listdir(notes)) >= 2:
                        break
                    time.sleep(0.01)
                return shard

            return read

        shards = list(split_bags(bags, 80))
        assert len(shards) >= 15

        def kill() -> None:
            deadline = time.monotonic() + 100
            while time.monotonic() < deadline:
                started = [p.name.split("-") for p in notes.iterdir()]
                there = [int(pid) for _, pid, parent, _ in started if int(parent) == raylet]
                if len(there) >= 2:
                    with suppress(ProcessLookupError):
                        os.kill(there[-1], signal.SIGSTOP)
                    cluster.remove_node(doomed, allow_graceful=False)
                    with suppress(ProcessLookupError):
                        os.kill(there[-1], signal.SIGKILL)
                    return
                time.sleep(0.01)

        killer = threading.Thread(target=kill)
        killer.start()
        sources = [slowly(i, s) for i, s in enumerate(shards)]
        outputs = list(predict_on_ray(network, sources, address=cluster.address))
        killer.join()
        assert_same(outputs, predict(Model.load(network), bags))
        numbers = [p.name.split("-")[0] for p in notes.iterdir()]
        assert len(numbers) > len(shards), "a shard was predicted again"
        assert not cluster.worker_nodes
