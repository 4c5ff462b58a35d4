"""Studies on a Ray cluster of two nodes: a process, a node and the head are killed, and the records equal those of a local study.

Forty runs each, twenty of them MPEM's, whose Counting Network's record must reach the node on which they run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from study_helpers import assert_same_record, wait_until

from headcount.errors import HeadcountError
from headcount.experiments import records, study
from headcount.experiments.launch import processes, ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of the cluster's processes and sockets
]
EPOCHS = 16
MIDDLE = range(2, EPOCHS - 6)
BASE = Recipe(
    source="digits",
    bag_size=32,
    train_bags=320,  # so that a record is over 100 KB: it stays in its node's store until the driver fetches it
    valid_bags=20,
    test_bags=20,
    backbone="mlp",
    backbone_options=(("hidden", 32),),
    epochs=EPOCHS,
    batch_bags=80,
    lr=1e-3,
)
RECIPES = [
    *study.grid(BASE, fold=range(5), seed=(0, 1), removal=(0, 0.5, 1.0)),
    *study.grid(BASE, fold=range(5), seed=(0, 1), head=["output_mean"]),
]
FAILING_HEAD = """
from headcount.models.heads.count import Count

class CustomError(Exception):
    pass

class Fails(Count):
    title = "Fails"

    def forward(self, h, segments):
        raise CustomError("on purpose")
"""


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """Before Ray is imported: it uses this machine only and sends no statistics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, Record]:
    """The same study on this machine, without interruptions."""
    result = study.study(RECIPES, tmp_path_factory.mktemp("reference"), launch=processes(2), device="cpu")
    assert len(result.records) == len(RECIPES) == 40
    return {record.key: record for record in result.records}


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """Two nodes with a CPU each; the driver is on the first. The test that kills the second is the last one to use it."""
    import ray
    from ray.cluster_utils import Cluster

    two_nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    two_nodes.add_node(num_cpus=1)
    yield two_nodes
    ray.shutdown()
    two_nodes.shutdown()


class EpochLog:
    """Epochs of the runs while they run: a file per process, a line per epoch.

    On request runs pause in the middle, on every node, so that one can be found there on any machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop = folder, folder.with_suffix(".halt")
        folder.mkdir()

    def callback(self) -> Callable:
        folder, stop, middle = str(self.folder), str(self.stop), MIDDLE

        def on_progress(progress) -> None:  # a local function, which is pickled by value
            import os

            with open(f"{folder}/{os.getpid()}", "a") as f:
                f.write(f"{progress.epoch}\n")
            while progress.epoch in middle and os.path.exists(stop):
                time.sleep(0.01)

        return on_progress

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop.touch()
        try:
            yield
        finally:
            self.stop.unlink()

    def epoch(self, pid: int) -> int:
        """The last epoch of this process."""
        path = self.folder / str(pid)
        lines = path.read_text().split() if path.exists() else []
        return int(lines[-1]) if lines else 0

    def n_started(self) -> int:
        return sum(path.read_text().split().count("1") for path in self.folder.iterdir())


def running_processes(node) -> list[int]:
    """The processes of this node that execute a run."""
    raylet = node.all_processes["raylet"][0].process.pid
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet and (folder / "cmdline").read_bytes().startswith(b"ray::run_remote"):
                pids.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return pids


def process_in_mid_run(node, log: EpochLog) -> int:
    """Wait until a process of this node is in the middle of a run."""
    return wait_until(lambda: next((p for p in running_processes(node) if log.epoch(p) in MIDDLE), None))


def after_a_third(out: Path, action: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    """Call the action when a third of the records exist; a thread, and the process that was killed."""
    killed: list[int] = []

    def wait_and_act() -> None:
        wait_until(lambda: len(list(out.glob("*.json"))) >= len(RECIPES) // 3)
        killed.append(action())

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread, killed


def scratch_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("headcount-*"))


def test_a_run_that_fits_no_node_is_refused(cluster, tmp_path):
    with pytest.raises(HeadcountError, match="a run wants 1 CPUs and 1 GPUs of one node; the nodes have 1 CPUs and 0 GPUs"):
        study.study([BASE], tmp_path, launch=ray_cluster(cluster.address, gpus_each=1))
    assert not list(tmp_path.iterdir())


def test_a_killed_process_and_a_failing_run(cluster, reference, tmp_path):
    """The killed run resumes from its checkpoint on the same machine; the failed one is not retried."""
    out, log, before = tmp_path / "out", EpochLog(tmp_path / "epochs"), scratch_folders()
    (head := tmp_path / "fails.py").write_text(FAILING_HEAD)
    fails = BASE.replace(head=f"{head}:Fails")

    def kill() -> int:
        with log.paused():
            pid = process_in_mid_run(cluster.head_node, log)
            os.kill(pid, signal.SIGKILL)
        return pid

    killer, killed = after_a_third(out, kill)
    launch = ray_cluster(cluster.address)
    recipes = [fails, fails.replace(removal=0.5), *RECIPES]
    result = study.study(recipes, out, launch=launch, on_run_progress=log.callback(), checkpoint_seconds=0)
    killer.join()
    assert len(killed) == 1
    assert log.epoch(killed[0]) in MIDDLE
    assert [record.key for record in result.records] == [recipe.key for recipe in RECIPES]
    for record in result.records:
        assert_same_record(record, reference[record.key])

    assert [records.error_line(e) for e in result.failed.values()] == [
        "headcount_head_fails.CustomError: on purpose",
        f"RuntimeError: not run, because {fails} failed",
    ]
    (left,) = out.glob("*.failed.json")
    body = json.loads(left.read_text())
    assert (left.name, body["key"]) == (f"{fails.key}.failed.json", fails.key)
    assert Recipe.from_dict(body["recipe"]) == fails
    assert 'raise CustomError("on purpose")' in body["traceback"]
    assert len(records.load_records(out)) == len(RECIPES)
    assert scratch_folders() == before


def test_a_node_that_dies(cluster, reference, tmp_path):
    out, log, before = tmp_path / "out", EpochLog(tmp_path / "epochs"), scratch_folders()
    (doomed,) = cluster.worker_nodes

    def kill() -> int:
        with log.paused():
            pid = process_in_mid_run(doomed, log)
            os.kill(pid, signal.SIGSTOP)  # the runs of a node that dies end with it; these would end a little later
            cluster.remove_node(doomed, allow_graceful=False)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    killer, killed = after_a_third(out, kill)
    result = study.study(RECIPES, out, launch=ray_cluster(cluster.address), on_run_progress=log.callback())
    killer.join()
    assert len(killed) == 1
    assert log.epoch(killed[0]) in MIDDLE
    assert log.n_started() > len(RECIPES)
    assert not result.failed
    assert len(records.load_records(out)) == len(RECIPES)
    for record in result.records:
        assert_same_record(record, reference[record.key])
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}
    assert scratch_folders() == before


def test_ctrl_c(tmp_path):
    """The command ends within seconds with one line, cancels its runs, and leaves no process and no scratch folder."""
    before = scratch_folders()
    words = "--source digits --bag-size 8 --fold 0,1,2 --epochs 1000000 --launch ray --address local --set backbone=mlp"
    small = "--set train_bags=20 --set valid_bags=10 --set test_bags=10"
    command = [sys.executable, "-m", "headcount", "study", "--out", str(tmp_path), *words.split(), *small.split()]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: [p for s in scratch_folders() - before for p in s.glob("*/running/*/metrics.jsonl")])
        driver.send_signal(signal.SIGINT)
        _, error = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert error == "headcount: interrupted; the same command resumes the work\n"
    assert driver.returncode == 130
    wait_until(lambda: scratch_folders() == before, 10)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_head_that_dies(replaced, tmp_path):
    """The command ends with one line, also if a new head takes the address at once; on the new cluster it runs what is missing."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    out, before, cluster = tmp_path / "out", scratch_folders(), Cluster(initialize_head=True, head_node_args=head)
    recipes = study.grid(BASE.replace(epochs=8), fold=range(5))
    fields = "bag_size=32 train_bags=320 valid_bags=20 test_bags=20 backbone=mlp backbone.hidden=32 batch_bags=80 lr=1e-3"
    words = ["--source", "digits", "--fold", "0,1,2,3,4", "--epochs", "8", *(w for f in fields.split() for w in ("--set", f))]
    command = [sys.executable, "-m", "headcount", "study", *words, "--out", str(out), "--launch", "ray", "--address"]
    driver = subprocess.Popen([*command, cluster.address], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list(out.glob("*.json"))) >= 2)
        port = int(cluster.address.rpartition(":")[2])
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        cluster.shutdown()
        cluster = Cluster(initialize_head=True, head_node_args=head | ({"gcs_server_port": port} if replaced else {}))
        _, error = driver.communicate(timeout=100)
        assert error.splitlines()[-1].startswith("headcount: the cluster was lost: cannot connect to 127.0.0.1:")
        assert error.splitlines()[-1].endswith("the same command runs what is missing")
        assert "Traceback" not in error
        assert driver.returncode == 2
        finished = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
        assert 2 <= len(finished) < len(recipes)
        again = subprocess.run([*command, cluster.address], capture_output=True, text=True, timeout=200)
        assert again.returncode == 0, again.stderr
    finally:
        driver.kill()
        cluster.shutdown()
        for left in scratch_folders() - before:
            shutil.rmtree(left, ignore_errors=True)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    for record in study.study(recipes, tmp_path / "alone", device="cpu").records:
        assert_same_record(record, Record.read(out / f"{record.key}.json"))
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}
