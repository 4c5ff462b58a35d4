"""Studies on a Ray cluster of two nodes: a node and a process are killed midway, and the records are those of a quiet machine.

Forty runs each, twenty of them MPEM's, whose Counting Network's record must reach whatever node they land on.
"""

from __future__ import annotations

import json
import os
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

from headcount.errors import HeadcountError
from headcount.experiments import records, study
from headcount.experiments.launch import processes
from headcount.experiments.ray_launcher import ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes in"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the cluster's own processes and sockets
]
EPOCHS = 16
MIDDLE = range(2, EPOCHS - 6)
BASE = Recipe(
    source="digits",
    bag_size=32,
    train_bags=320,  # with so many votes a record is over 100 KB: it stays in its node's store until the driver has it
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
STUMBLES = """
from headcount.models.heads.count import Count

class Trouble(Exception):
    pass

class Stumbles(Count):
    title = "Stumbles"

    def forward(self, h, segments):
        raise Trouble("on purpose")
"""


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """Before Ray is imported: it stays on this machine and tells nobody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> dict[str, Record]:
    """The same study on this machine, undisturbed."""
    done = study.study(RECIPES, tmp_path_factory.mktemp("quiet"), launch=processes(2), device="cpu")
    assert len(done.records) == len(RECIPES) == 40
    return {record.key: record for record in done.records}


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """Two nodes with a CPU each; the driver is on the first. The test that kills the second comes last."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


class Notes:
    """What the runs say of themselves while they run: a file per process, a line per epoch.

    When told to, runs halt in their middle, on every node: whoever looks for one there finds it, however fast the machine
    and wherever Ray puts the next.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop = folder, folder.with_suffix(".halt")
        folder.mkdir()

    def watch(self) -> Callable:
        folder, stop, middle = str(self.folder), str(self.stop), MIDDLE

        def watch(progress) -> None:  # defined in here, so that it travels whole
            import os
            import time

            with open(f"{folder}/{os.getpid()}", "a") as f:
                f.write(f"{progress.epoch}\n")
            while progress.epoch in middle and os.path.exists(stop):
                time.sleep(0.01)

        return watch

    @contextmanager
    def halted(self) -> Iterator[None]:
        self.stop.touch()
        try:
            yield
        finally:
            self.stop.unlink()

    def epoch(self, pid: int) -> int:
        """The last one this process told of."""
        path = self.folder / str(pid)
        lines = path.read_text().split() if path.exists() else []
        return int(lines[-1]) if lines else 0

    def begun(self) -> int:
        return sum(path.read_text().split().count("1") for path in self.folder.iterdir())


def busy(node) -> list[int]:
    """The processes of this node that are at a run."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet and (folder / "cmdline").read_bytes().startswith(b"ray::run_remote"):
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return found


def until(true: Callable, seconds: float = 100.0):
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def midway(node, notes: Notes) -> int:
    """Waits until a process of this node is in the middle of a run."""
    return until(lambda: next((p for p in busy(node) if notes.epoch(p) in MIDDLE), None))


def at_a_third(out: Path, deed: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    """Do it when a third of the records are there; a thread, and the process that suffered."""
    struck: list[int] = []

    def wait_and_do() -> None:
        until(lambda: len(list(out.glob("*.json"))) >= len(RECIPES) // 3)
        struck.append(deed())

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    return thread, struck


def same(mine: Record, theirs: Record) -> None:
    """Equal in all but clock, host and versions; the arrays bit for bit."""
    assert mine.result() == theirs.result()
    a, b = mine.arrays(), theirs.arrays()
    assert a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a)


def scratch() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("headcount-*"))


def test_what_fits_no_node_is_told(cluster, tmp_path):
    with pytest.raises(
        HeadcountError, match="a run wants 1 CPUs and 1 GPUs of one node; the nodes have 1 CPUs and 0 GPUs"
    ):
        study.study([BASE], tmp_path, launch=ray_cluster(cluster.address, gpus_each=1))
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_killed_and_a_run_that_fails(cluster, quiet, tmp_path):
    """The killed run goes on from its checkpoint where it lands on the same machine; the failed one is not tried again."""
    out, notes, before = tmp_path / "out", Notes(tmp_path / "notes"), scratch()
    (own := tmp_path / "own.py").write_text(STUMBLES)
    fails = BASE.replace(head=f"{own}:Stumbles")

    def kill() -> int:
        with notes.halted():
            pid = midway(cluster.head_node, notes)
            os.kill(pid, signal.SIGKILL)
        return pid

    killer, struck = at_a_third(out, kill)
    launch = ray_cluster(cluster.address)
    wanted = [fails, fails.replace(removal=0.5), *RECIPES]
    done = study.study(wanted, out, launch=launch, on_run_progress=notes.watch(), checkpoint_seconds=0)
    killer.join()
    assert len(struck) == 1
    assert notes.epoch(struck[0]) in MIDDLE
    assert [record.key for record in done.records] == [recipe.key for recipe in RECIPES]
    for record in done.records:
        same(record, quiet[record.key])

    assert [study.error_line(e) for e in done.failed.values()] == [
        "RuntimeError: Trouble: on purpose",  # its class is known only to the file of the head
        f"RuntimeError: not run, because {fails} failed",
    ]
    (left,) = out.glob("*.failed.json")
    body = json.loads(left.read_text())
    assert (left.name, body["key"]) == (f"{fails.key}.failed.json", fails.key)
    assert Recipe.from_dict(body["recipe"]) == fails
    assert 'raise Trouble("on purpose")' in body["traceback"]
    assert len(records.load_records(out)) == len(RECIPES)
    assert scratch() == before


def test_a_node_that_dies(cluster, quiet, tmp_path):
    out, notes, before = tmp_path / "out", Notes(tmp_path / "notes"), scratch()
    (doomed,) = cluster.worker_nodes

    def kill() -> int:
        with notes.halted():
            pid = midway(doomed, notes)
            os.kill(pid, signal.SIGSTOP)  # a node that dies takes its runs with it; these would end a little later
            cluster.remove_node(doomed, allow_graceful=False)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    killer, struck = at_a_third(out, kill)
    done = study.study(RECIPES, out, launch=ray_cluster(cluster.address), on_run_progress=notes.watch())
    killer.join()
    assert len(struck) == 1
    assert notes.epoch(struck[0]) in MIDDLE
    assert notes.begun() > len(RECIPES)
    assert not done.failed
    assert len(records.load_records(out)) == len(RECIPES)
    for record in done.records:
        same(record, quiet[record.key])
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}
    assert scratch() == before


def test_ctrl_c(tmp_path):
    """The command ends in seconds with its one line, calls its runs back, and leaves no process and no scratch folder."""
    before = scratch()
    words = "--source digits --bag-size 8 --fold 0,1,2 --epochs 1000000 --launch ray --address local --set backbone=mlp"
    small = "--set train_bags=20 --set valid_bags=10 --set test_bags=10"
    command = [
        sys.executable,
        "-m",
        "headcount",
        "study",
        "--out",
        str(tmp_path),
        *words.split(),
        *small.split(),
    ]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: [p for s in scratch() - before for p in s.glob("*/running/*/metrics.jsonl")])
        driver.send_signal(signal.SIGINT)
        _, said = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert said == "headcount: interrupted; the same command resumes the work\n"
    assert driver.returncode == 130
    until(lambda: scratch() == before, 10)
