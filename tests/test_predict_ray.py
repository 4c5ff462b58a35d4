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

from ask_factory import KINDS, case, fitted
from headcount.bags import Bags
from headcount.cli import main
from headcount.errors import HeadcountError
from headcount.inference import predict as answers
from headcount.inference import predict_ray
from headcount.inference.predict import PredictionShard, predict
from headcount.models.fitted import FittedModel
from headcount.readers import read


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """The exit code and stderr of a command, run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["headcount", *map(str, words)])
        with pytest.raises(SystemExit) as e:
            main.main()
        return int(e.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- what travels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_answers_as_we_do(kind, listen, tmp_path, monkeypatch, one_thread):
    """Every kind of data, in many shards, there and back as Ray would take them."""
    monkeypatch.setattr(answers, "SHARD_INSTANCES", 3)
    model, data = case(tmp_path / "in", kind)
    there = FittedModel.load(model).replace(concentration=2.0)
    there.save(model, overwrite=True)
    reading = there.read(data)
    travelled = []

    def each(parts, listen):
        for bags in parts:
            sent = pickle.dumps(predict_ray.detach_bags(bags))
            travelled.append(pickle.loads(sent))
            parcel = predict_ray.predict_shard_on_node(
                predict_ray.model_files(model), pickle.loads(sent), listen, "cpu", 1
            )
            assert not parcel.error
            yield PredictionShard(**parcel.unpack())

    here, away = (
        predict(there, reading, use_context=listen),
        predict(there, reading, shard_predictor=each, use_context=listen),
    )
    assert len(travelled) > 2
    for name in ("instance_probabilities", "bag_probabilities", "shares", "shares_low", "shares_high"):
        assert np.array_equal(getattr(here, name), getattr(away, name)), name
    assert all(bags.truth is None and len(bags.pool) <= len(bags.index) for bags in travelled), (
        "only what is asked about"
    )


def test_what_goes_wrong_on_a_node_is_told(tmp_path):
    bags = read(case(tmp_path / "in", "images")[1]).bags
    parcel = predict_ray.predict_shard_on_node(
        dict.fromkeys(predict_ray.MODEL_FILES, b"damaged"), predict_ray.detach_bags(bags), None, "cpu", 1
    )
    assert parcel.value is None
    with pytest.raises(HeadcountError, match="model"):
        parcel.unpack()


def test_a_shard_of_pictures_is_small_enough_to_travel(monkeypatch, tmp_path):
    reading = read(case(tmp_path / "in", "images")[1])
    each = int(np.prod(reading.bags.pool.shape))
    assert answers._shard_instances(reading, reading.fit_preprocessor()) == min(
        answers.SHARD_INSTANCES, answers.SHARD_BYTES // each
    )
    monkeypatch.setattr(answers, "SHARD_BYTES", 4 * each)
    assert answers._shard_instances(reading, reading.fit_preprocessor()) == 4
    monkeypatch.setattr(answers, "SHARD_BYTES", 1)
    assert answers._shard_instances(reading, reading.fit_preprocessor()) == 1
    table = read(case(tmp_path / "table", "table")[1])
    monkeypatch.setattr(answers, "SHARD_BYTES", 4 * 3 * 5)
    assert answers._shard_instances(table, table.fit_preprocessor()) == 5, (
        "a table's rows travel as what was made of them"
    )


# -- the command, with a Ray that runs everything here ------------------------------------------------------------------------


class Here:
    """So much of Ray as is used, in this process: tasks run when their answer is asked for."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, cpus: int = 2) -> None:
        self.cpus, self.sent, self.going, self.most, self.cancelled = cpus, [], set(), 0, 0
        self.interrupt_at = self.fail_at = None
        self.up = False

    def is_initialized(self) -> bool:
        return False

    def init(self, **how: object) -> None:
        self.up, self.how = True, how

    def shutdown(self) -> None:
        self.up = False

    def nodes(self) -> list[dict]:
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}]

    def cluster_resources(self) -> dict:
        return {"CPU": self.cpus}

    def put(self, what: object) -> object:
        return what

    def remote(self, **how: object) -> Callable:
        def made(task: Callable) -> SimpleNamespace:
            def send(*words: object) -> int:
                self.sent.append((task, words))
                self.going.add(len(self.sent) - 1)
                self.most = max(self.most, len(self.going))
                return len(self.sent) - 1

            return SimpleNamespace(remote=send)

        return made

    def get(self, number: int) -> object:
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        task, words = self.sent[number]
        self.going.discard(number)
        if number == self.fail_at:
            words = (dict.fromkeys(predict_ray.MODEL_FILES, b"damaged"), *words[1:])
        return task(*words)

    def cancel(self, number: int) -> None:
        self.cancelled += 1


@pytest.fixture
def ray(monkeypatch) -> Here:
    made = Here()
    monkeypatch.setattr(predict_ray, "import_ray", lambda: made)
    monkeypatch.setattr(answers, "SHARD_INSTANCES", 3)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_as_without_it(kind, ray, typed, tmp_path, one_thread):
    model, data = case(tmp_path / "in", kind)
    code, err = typed("predict", model, data, "--out", "here.csv", "--bags", "here-bags.csv")
    assert code == 0, err
    words = ("--launch", "ray", "--address", "auto")
    code, err = typed("predict", model, data, "--out", "ray.csv", "--bags", "ray-bags.csv", *words)
    assert code == 0, err
    assert len(ray.sent) > 2
    assert (ray.most, ray.up, ray.how["address"]) == (min(4, len(ray.sent)), False, "auto")
    for name in ("", "-bags"):
        assert (tmp_path / f"ray{name}.csv").read_bytes() == (tmp_path / f"here{name}.csv").read_bytes()
    assert all(isinstance(words[1], Bags) and words[1].truth is None for _, words in ray.sent)


def test_shards_are_read_only_when_there_is_room(ray, tmp_path):
    """A generator of shards is not drained into the cluster: two for each place to run."""
    model, data = case(tmp_path / "in", "table")
    there = FittedModel.load(model)
    reading, at = there.read(data), []
    asked = predict_ray.remote_predictor(model)

    def each(parts, listen):
        def counted():
            for n, bags in enumerate(parts):
                at.append((n, len(ray.going)))
                yield bags

        yield from asked(counted())

    predict(there, reading, shard_predictor=each)
    assert len(at) == 8
    assert max(going for _, going in at) == 4 == ray.most


@pytest.mark.parametrize("what", ["interrupt_at", "fail_at"])
def test_what_ends_it_midway_leaves_nothing(what, ray, typed, tmp_path):
    model, data = case(tmp_path / "in", "table")
    setattr(ray, what, 2)
    code, err = typed("predict", model, data, "--out", "p.csv", "--bags", "b.csv", "--launch", "ray")
    last = err.strip().splitlines()[-1]
    assert (code, last.startswith("headcount: ")) == ((130, True) if what == "interrupt_at" else (2, True)), err
    assert "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} == {"in"}
    assert ray.cancelled >= 2, "shards under way are called back"
    assert not ray.up
    if what == "fail_at":
        assert "model" in last


@pytest.mark.parametrize(("words", "why"), [
    ("--launch rya", "did you mean 'ray'"), ("--address auto", "are for --launch ray"),
    ("--gpus-each 1", "are for --launch ray"),
    ("--launch ray --device cuda:1", "--device is auto, cpu or cuda"),
    ("--launch ray --device cuda", "contradict each other"), ("--launch ray --device cpu --gpus-each 1", "contradict"),
    ("--launch ray --gpus-each 1.5", "part of a GPU or whole ones"),
    ("--launch ray --address ray://there:1", "auto, local or host:port"),
    ("--launch ray --gpus-each 1", "the nodes have 2 CPUs and 0 GPUs"),
])  # fmt: skip
def test_mistakes_are_one_line(words, why, ray, typed, tmp_path):
    model, data = case(tmp_path / "in", "table")
    code, err = typed("predict", model, data, "--out", "p.csv", *words.split())
    assert code == 2
    assert why in err.strip().splitlines()[-1]
    assert not (tmp_path / "p.csv").exists()


def test_without_ray_the_extra_is_named_before_anything_is_read(typed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    model, _ = case(tmp_path / "in", "table")
    code, err = typed("predict", model, "nothing.csv", "--out", "p.csv", "--launch", "ray")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "headcount[ray]" in err


def test_nobody_at_the_address(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_ray, "import_ray", Here)
    model, data = case(tmp_path / "in", "table")
    code, err = typed("predict", model, data, "--out", "p.csv", "--launch", "ray", "--address", "127.0.0.1:1")
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
            if (folder / "cmdline").read_bytes().startswith(b"ray::answer_fitted"):
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
        words = (
            "predict",
            model,
            data,
            "--out",
            tmp_path / "p.parquet",
            "--launch",
            "ray",
            "--address",
            cluster.address,
        )
        driver = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True)
        try:
            until(at_work)
            driver.send_signal(signal.SIGINT)
            _, said = driver.communicate(timeout=60)
        finally:
            driver.kill()
        assert driver.returncode == 130, said
        assert said.splitlines()[-1].startswith("headcount: interrupted")
        assert "Traceback" not in said
        until(lambda: not at_work(), 20)
        assert {p.name for p in tmp_path.iterdir()} == {"model", "large.npz"}

    def test_a_node_that_dies(self, cluster, large, tmp_path):
        """The second node goes while it is at a shard: the file is that of a quiet machine."""
        model, data = large
        subprocess.run(command("predict", model, data, "--out", tmp_path / "here.parquet"), check=True)
        (doomed,) = cluster.worker_nodes
        raylet, struck = doomed.all_processes["raylet"][0].process.pid, []

        def kill() -> None:
            other = until(lambda: next((p for p, parent in at_work().items() if parent != raylet), None))
            os.kill(other, signal.SIGSTOP)  # else the first node may be through before the second has begun
            pid = until(lambda: next((p for p, parent in at_work().items() if parent == raylet), None))
            os.kill(pid, signal.SIGSTOP)  # a node that dies takes its shard with it
            struck.append(pid)
            cluster.remove_node(doomed, allow_graceful=False)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.kill(other, signal.SIGCONT)

        killer = threading.Thread(target=kill)
        killer.start()
        words = (
            "predict",
            model,
            data,
            "--out",
            tmp_path / "ray.parquet",
            "--launch",
            "ray",
            "--address",
            cluster.address,
        )
        subprocess.run(command(*words), check=True)
        killer.join()
        assert len(struck) == 1
        assert not cluster.worker_nodes
        here, away = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("here", "ray"))
        assert here.num_rows == 1 << 20
        assert away.equals(here)
