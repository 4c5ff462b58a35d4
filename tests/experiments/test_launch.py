"""Launching: what is sent to a node and back, without a cluster; what a failed run leaves; which options are compatible."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import types
from concurrent.futures import Future
from pathlib import Path

import pytest
from study_helpers import TINY, assert_same_record

from headcount.errors import HeadcountError
from headcount.experiments import launch, records, study
from headcount.experiments.launch import ray_cluster, read_files, run_remote, write_files
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.run import run as run_one
from headcount.io import atomic_write

MPEM = TINY.replace(removal=0.5)
SMALL = (
    "study --source digits --set backbone=mlp --set train_bags=20 --set valid_bags=10 --set test_bags=10 "
    "--bag-size 8 --epochs 2 --fold 0"
)
FAILING_HEAD = """
from pathlib import Path
from headcount.io import atomic_write
from headcount.models.heads.count import Count

class Fails(Count):
    title = "Fails"

    def forward(self, h, segments):
        if Path(__file__).with_name("fail").exists():
            raise ArithmeticError("on purpose")
        return super().forward(h, segments)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """A Counting Network and its MPEM, run in this process."""
    out = tmp_path_factory.mktemp("reference")
    study.study([TINY, MPEM], out, device="cpu")
    return out


@pytest.fixture
def scratch_root(tmp_path, monkeypatch) -> Path:
    """The folder of a node's scratch folders."""
    (folder := tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def failing(tmp_path) -> Recipe:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "fails.py").write_text(FAILING_HEAD)
    (tmp_path / "heads" / "fail").touch()
    return TINY.replace(head=f"{tmp_path}/heads/fails.py:Fails")


def remote_task(recipe: Recipe, key: str | None = None, **options) -> dict:
    made = {"task": run_one, "recipe": recipe, "key": key or recipe.key, "options": {"device": "cpu"} | options}
    return made | {"study_id": "test", "working_folder": os.getcwd(), "threads": 1}


# -- sending a run -------------------------------------------------------------------------------------------------------


def test_a_required_record_is_sent_along(reference, scratch_root, tmp_path):
    result = run_remote(read_files(reference, TINY.key), **remote_task(MPEM))
    assert list(result) == [f"{MPEM.key}.npz", f"{MPEM.key}.json"]
    write_files(tmp_path / "out", result)
    assert_same_record(Record.read(tmp_path / "out" / f"{MPEM.key}.json"), Record.read(reference / f"{MPEM.key}.json"))
    assert not list(scratch_root.iterdir())


def test_a_run_without_the_required_record(scratch_root):
    with pytest.raises(HeadcountError, match=f"needs the run {TINY.key}"):
        run_remote(**remote_task(MPEM))
    assert not list(scratch_root.iterdir())


def test_a_node_with_other_data(scratch_root):
    with pytest.raises(HeadcountError, match="has another digits"):
        run_remote(**remote_task(TINY, key="0123456789abcdef"))
    assert not list(scratch_root.iterdir())


def test_a_retry_resumes_from_the_checkpoint(reference, scratch_root):
    """The next process on the same node finds the checkpoint of a killed one."""
    epochs: list[int] = []

    def stop(progress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_one(TINY, scratch_root / "headcount-test" / TINY.key, device="cpu", on_progress=stop)
    result = run_remote(**remote_task(TINY, on_progress=lambda p: epochs.append(p.epoch)))
    assert epochs == [3, 4]
    data = json.loads(result[f"{TINY.key}.json"])
    assert data["scores"] == Record.read(reference / f"{TINY.key}.json").scores
    assert not list(scratch_root.iterdir())


def test_a_record_is_written_completely_or_not_at_all(reference, tmp_path, monkeypatch):
    def disk_full(path: Path, fill) -> None:
        if path.suffix == ".json":
            raise OSError(28, "No space left on device")
        atomic_write(path, fill)

    monkeypatch.setattr(launch, "atomic_write", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_files(tmp_path, read_files(reference, TINY.key))
    assert not list(tmp_path.iterdir())


# -- the launcher, with a simulated cluster -----------------------------------------------------------------------


class TaskError(Exception):
    """As Ray wraps the exception of a task: its text says where on the node it was raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("".join(traceback.format_exception(cause)))
        self.cause = cause


def node(**resources: float) -> dict:
    """This machine, without an address that could be lost."""
    return {"Alive": True, "Resources": resources, "NodeID": "here", "NodeManagerAddress": "", "NodeManagerPort": 0}


class FakeRay(types.SimpleNamespace):
    """The part of Ray that is used, in this process."""

    def __init__(self, **resources: float) -> None:
        super().__init__(calls=[], tasks=[], stored=0, nodes=lambda: [node(**resources)])

    def is_initialized(self) -> bool:
        return False

    def init(self, **options) -> None:
        self.calls.append(("init", options["address"]))

    def get_runtime_context(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(gcs_address="", get_node_id=lambda: "here")

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))

    def put(self, value):
        self.stored += 1
        return value

    def remote(self, **options):
        self.calls.append(("remote", options))

        def submit(*needs, **task):
            self.tasks.append(task)
            future: Future = Future()
            try:
                future.set_result(run_remote(*needs, **task))
            except Exception as error:
                future.set_exception(TaskError(error))
            return types.SimpleNamespace(future=lambda: future)

        return lambda task: types.SimpleNamespace(remote=submit)


@pytest.fixture
def fake_ray(scratch_root, monkeypatch) -> FakeRay:
    ray = FakeRay(CPU=2)
    monkeypatch.setattr(launch, "import_ray", lambda: ray)
    return ray


def test_a_study_over_the_cluster(fake_ray, reference, failing, tmp_path):
    """The records of a local study, a required record stored in the cluster once, a failure kept, and the connection closed."""
    out = tmp_path / "out"
    done = study.study([MPEM, TINY.replace(removal=1.0), failing], out, launch=ray_cluster("auto"))
    assert_same_record(done.records[0], Record.read(reference / f"{MPEM.key}.json"))
    assert [r.recipe for r in done.records] == [MPEM, TINY.replace(removal=1.0)]
    assert [(r, type(e)) for r, e in done.failed.items()] == [(failing, ArithmeticError)]
    assert 'raise ArithmeticError("on purpose")' in json.loads((out / f"{failing.key}.failed.json").read_text())["traceback"]
    assert fake_ray.stored == 1
    assert {e["options"]["device"] for e in fake_ray.tasks} == {"cpu"}
    assert fake_ray.calls == [
        ("init", "auto"),
        ("remote", {"num_cpus": 1, "num_gpus": 0, "max_retries": 3, "retry_exceptions": False}),
        ("shutdown",),
    ]
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


def test_the_record_of_another_driver_is_kept(fake_ray, reference, tmp_path):
    """Two drivers run the same recipe: the record that arrives first stays as it is."""
    out, name = tmp_path / "out", f"{TINY.key}.json"
    first = read_files(reference, TINY.key)
    first[name] = first[name].replace(b'"host":"', b'"host":"other-')
    done = study.study([TINY], out, launch=ray_cluster("auto"), on_run_progress=lambda _: write_files(out, first))
    assert len(fake_ray.tasks) == 1
    assert done.records[0].data["provenance"]["host"].startswith("other-")
    assert (out / name).read_bytes() == first[name]


def test_a_gpu_that_was_requested_is_used(fake_ray, tmp_path):
    """On a node whose torch finds no GPU, the run fails instead of training on the CPU for days."""
    fake_ray.nodes = lambda: [node(CPU=1, GPU=1)]
    done = study.study([TINY], tmp_path, launch=ray_cluster("auto", gpus_each=0.5))
    assert fake_ray.tasks[0]["options"]["device"] == "cuda"
    if not done.records:
        assert "torch sees no GPU" in str(done.failed[TINY])


def test_no_node_is_large_enough(fake_ray, tmp_path):
    with pytest.raises(HeadcountError, match="wants 4 CPUs and 0 GPUs of one node; the nodes have 2 CPUs and 0 GPUs"):
        study.study([TINY], tmp_path, launch=ray_cluster("auto", cpus_each=4))
    assert fake_ray.calls[-1] == ("shutdown",)


def test_no_cluster_at_the_address(fake_ray, tmp_path):
    with pytest.raises(HeadcountError, match=r"cannot connect to 127\.0\.0\.1:1 .*is the head of the cluster running"):
        study.study([TINY], tmp_path, launch=ray_cluster("127.0.0.1:1"))
    assert not fake_ray.calls


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"address": "ray://head:10001"}, "give auto, local or host:port, not 'ray://head:10001'"),
        ({"gpus_each": -1}, r"a part of a GPU or whole ones .*, got -1"),
        ({"gpus_each": 1.5}, r"a part of a GPU or whole ones .*, got 1.5"),
        ({"gpus_each": float("nan")}, "got nan"),
        ({"cpus_each": 0}, r"part of a CPU .*, got 0"),
        ({"retries": -1}, "retries is 0 or more, got -1"),
    ],
)
def test_invalid_arguments(words, says):
    with pytest.raises(HeadcountError, match=says):
        ray_cluster(**{"address": "auto"} | words)


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HeadcountError, match=r"needs Ray, which is not installed.*pip install 'headcount\[ray\]'"):
        ray_cluster("auto")


# -- what a failed run leaves -----------------------------------------------------------------------------------------------


def test_a_failure_is_kept_until_the_run_succeeds(failing, tmp_path):
    out = tmp_path / "out"
    done = study.study([failing, failing.replace(removal=0.5), TINY], out, device="cpu")
    assert len(done.records) == 1
    assert len(done.failed) == 2
    (left,) = out.glob("*.failed.json")  # a run that was not started has no traceback
    body = json.loads(left.read_text())
    assert (body["key"], Recipe.from_dict(body["recipe"])) == (failing.key, failing)
    assert body["error"] == "ArithmeticError: on purpose"
    assert 'raise ArithmeticError("on purpose")' in body["traceback"]
    assert [r.recipe for r in records.load_records(out)] == [TINY]

    (tmp_path / "heads" / "fail").unlink()
    done = study.study([failing, failing.replace(removal=0.5), TINY], out, device="cpu")
    assert not done.failed
    assert len(records.load_records(out)) == 3
    assert not list(out.glob("*.failed.json"))


def test_a_usage_error_is_kept_only_among_records(tmp_path):
    """A study in which every run has a usage error leaves nothing; one failed run among others is kept."""
    wrong = TINY.replace(options={"t1": -1})
    done = study.study([wrong], tmp_path, device="cpu")
    assert isinstance(done.failed[wrong], HeadcountError)
    assert not list(tmp_path.iterdir())
    study.study([wrong, TINY], tmp_path, device="cpu")
    assert [p.name for p in tmp_path.glob("*.failed.json")] == [f"{wrong.key}.failed.json"]


# -- the command --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--launch slurm", "no launcher 'slurm'; there are processes, ray"),
        ("--address auto", "--address and --gpus-each are for --launch ray"),
        ("--gpus-each 1", "--address and --gpus-each are for --launch ray"),
        ("--launch ray --processes 2", "--processes is for --launch processes"),
        ("--launch ray --device cuda:1", "--device is auto, cpu or cuda, got 'cuda:1'"),
        ("--launch ray --device cuda", "--device cuda and --gpus-each 0 contradict each other"),
        ("--launch ray --device cpu --gpus-each 1", "--device cpu and --gpus-each 1 contradict each other"),
        ("--launch ray --gpus-each 1.5", "a task takes a part of a GPU or whole ones"),
        ("--launch ray --address ray://x:1", "give auto, local or host:port"),
    ],
)
def test_incompatible_options(run_cli, tmp_path, words, says):
    code, out, err = run_cli(f"{SMALL} --out {tmp_path}/out {words}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("headcount: ")
    assert says in err
    assert not list(tmp_path.iterdir())


def test_the_command_over_the_cluster(fake_ray, run_cli, tmp_path):
    code, out, err = run_cli(f"{SMALL} --out {tmp_path}/out --launch ray --address local")
    assert (code, err) == (0, "")
    assert "1 records in" in out
    assert len(fake_ray.tasks) == 1


def test_the_command_counts_failed_runs(failing, run_cli, tmp_path):
    code, out, err = run_cli(f"{SMALL} --out {tmp_path}/out --head count,{failing.head} --device cpu")
    assert code == 2
    assert "1 records in" in out
    assert "failed: Fails" in out
    assert "ArithmeticError: on purpose" in out
    assert err == f"headcount: 1 run failed; see {tmp_path}/out/*.failed.json; the same command tries them again\n"
