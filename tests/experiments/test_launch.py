"""Launching: what travels to a node and back, without any cluster; what a failed run leaves; which options go together."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import types
from concurrent.futures import Future
from pathlib import Path

import pytest

from headcount.cli import main
from headcount.errors import HeadcountError
from headcount.experiments import ray_launcher, records, study
from headcount.experiments.ray_launcher import (
    RemoteTask,
    ray_cluster,
    read_files,
    run_remote,
    write_files,
)
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.run import run as run_one
from headcount.inference.ray_cluster import RemoteResult

BASE = Recipe(
    source="digits",
    bag_size=8,
    train_bags=20,
    valid_bags=10,
    test_bags=10,
    backbone="mlp",
    epochs=4,
    batch_bags=8,
)
MPEM = BASE.replace(removal=0.5)
SMALL = (
    "study --source digits --set backbone=mlp --set train_bags=20 --set valid_bags=10 --set test_bags=10 "
    "--bag-size 8 --epochs 2 --fold 0"
)
MOODY = """
from pathlib import Path
from headcount.models.heads.count import Count

class Moody(Count):
    title = "Moody"

    def forward(self, h, segments):
        if Path(__file__).with_name("bad mood").exists():
            raise ArithmeticError("not today")
        return super().forward(h, segments)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A Counting Network and its MPEM, run in this process."""
    out = tmp_path_factory.mktemp("here")
    study.study([BASE, MPEM], out, device="cpu")
    return out


@pytest.fixture
def temp(tmp_path, monkeypatch) -> Path:
    """Where a node would keep its scratch folders."""
    (folder := tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def moody(tmp_path) -> Recipe:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "moody.py").write_text(MOODY)
    (tmp_path / "heads" / "bad mood").touch()
    return BASE.replace(head=f"{tmp_path}/heads/moody.py:Moody")


def errand(recipe: Recipe, task=run_one, key: str | None = None, **options) -> RemoteTask:
    return RemoteTask(task, recipe, key or recipe.key, {"device": "cpu"} | options, "test", os.getcwd(), 1)


def same(mine: Record, theirs: Record) -> None:
    assert mine.result() == theirs.result()
    a, b = mine.arrays(), theirs.arrays()
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


# -- there and back -------------------------------------------------------------------------------------------------------


def test_a_run_takes_along_what_it_needs(here, temp, tmp_path):
    parcel = run_remote(errand(MPEM), read_files(here, BASE.key))
    assert list(parcel.value) == [f"{MPEM.key}.npz", f"{MPEM.key}.json"]
    write_files(tmp_path / "out", parcel.unpack())
    same(Record.read(tmp_path / "out" / f"{MPEM.key}.json"), Record.read(here / f"{MPEM.key}.json"))
    assert not list(temp.iterdir())


def test_a_run_without_what_it_needs(temp):
    parcel = run_remote(errand(MPEM))
    with pytest.raises(HeadcountError, match=f"needs the run {BASE.key}") as failed:
        parcel.unpack()
    assert "find_dissenters" in str(failed.value.__cause__)  # where it arose on the node
    assert not list(temp.iterdir())


def test_a_node_with_other_data(temp):
    with pytest.raises(HeadcountError, match="has another digits"):
        run_remote(errand(BASE, key="0123456789abcdef")).unpack()
    assert not list(temp.iterdir())


def test_a_second_try_goes_on_from_the_checkpoint(here, temp):
    """What a killed process left on this node is found by the next."""
    seen: list[int] = []

    def stop(progress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_one(BASE, temp / "headcount-test" / BASE.key, device="cpu", on_progress=stop)
    parcel = run_remote(errand(BASE, on_progress=lambda p: seen.append(p.epoch)))
    assert seen == [3, 4]
    mine = json.loads(parcel.value[f"{BASE.key}.json"])
    assert mine["scores"] == Record.read(here / f"{BASE.key}.json").scores
    assert not list(temp.iterdir())


def test_an_exception_that_only_the_node_knows(temp):
    class Own(Exception):
        pass

    def task(recipe, out, device) -> None:
        raise Own("of a kind")

    with pytest.raises(RuntimeError, match="Own: of a kind") as failed:
        run_remote(errand(BASE, task)).unpack()
    assert 'raise Own("of a kind")' in str(failed.value.__cause__)
    with pytest.raises(RuntimeError, match="Unknown: gone"):
        RemoteResult({}, b"no pickle", "Traceback ...\nUnknown: gone\n").unpack()


def test_a_record_is_put_whole_or_not_at_all(here, tmp_path, monkeypatch):
    def full(path: Path, fill) -> None:
        if path.suffix == ".json":
            raise OSError(28, "No space left on device")
        path.write_bytes(b"")

    monkeypatch.setattr(ray_launcher, "atomic_write", full)
    with pytest.raises(OSError, match="No space"):
        write_files(tmp_path, read_files(here, BASE.key))
    assert not list(tmp_path.iterdir())


# -- the launcher, over a cluster that is only played -----------------------------------------------------------------------


class Played(types.SimpleNamespace):
    """As much of Ray as is asked for, in this process."""

    def __init__(self, **resources: float) -> None:
        super().__init__(said=[], tasks=[], stored=0, nodes=lambda: [{"Alive": True, "Resources": resources}])

    def is_initialized(self) -> bool:
        return False

    def init(self, **options) -> None:
        self.said.append(("init", options["address"]))

    def shutdown(self) -> None:
        self.said.append(("shutdown",))

    def put(self, value):
        self.stored += 1
        return value

    def remote(self, **options):
        self.said.append(("remote", options))

        def submit(errand: RemoteTask, *needs):
            self.tasks.append(errand)
            back: Future = Future()
            back.set_result(run_remote(errand, *needs))
            return types.SimpleNamespace(future=lambda: back)

        return lambda task: types.SimpleNamespace(remote=submit)


@pytest.fixture
def played(temp, monkeypatch) -> Played:
    ray = Played(CPU=2)
    monkeypatch.setattr(ray_launcher, "import_ray", lambda: ray)
    return ray


def test_a_study_over_the_cluster(played, here, moody, tmp_path):
    """The records of a study at home, what is needed put into the cluster once, a failure kept, and the cluster left."""
    out = tmp_path / "out"
    done = study.study([MPEM, BASE.replace(removal=1.0), moody], out, launch=ray_cluster("auto"))
    same(done.records[0], Record.read(here / f"{MPEM.key}.json"))
    assert [r.recipe for r in done.records] == [MPEM, BASE.replace(removal=1.0)]
    assert [(r, type(e)) for r, e in done.failed.items()] == [(moody, ArithmeticError)]
    assert (
        'raise ArithmeticError("not today")' in json.loads((out / f"{moody.key}.failed.json").read_text())["traceback"]
    )
    assert played.stored == 1
    assert {e.options["device"] for e in played.tasks} == {"cpu"}
    assert played.said == [
        ("init", "auto"),
        ("remote", {"num_cpus": 1, "num_gpus": 0, "max_retries": 3, "retry_exceptions": False}),
        ("shutdown",),
    ]
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


def test_a_gpu_is_used_where_it_is_paid_for(played, tmp_path):
    """On a node whose torch sees none, the run fails instead of training on its CPU for days."""
    played.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 1, "GPU": 1}}]
    done = study.study([BASE], tmp_path, launch=ray_cluster("auto", gpus_each=0.5))
    assert played.tasks[0].options["device"] == "cuda"
    if not done.records:
        assert "torch sees no GPU" in str(done.failed[BASE])


def test_no_node_is_large_enough(played, tmp_path):
    with pytest.raises(HeadcountError, match="wants 4 CPUs and 0 GPUs of one node; the nodes have 2 CPUs and 0 GPUs"):
        study.study([BASE], tmp_path, launch=ray_cluster("auto", cpus_each=4))
    assert played.said[-1] == ("shutdown",)


def test_nobody_at_the_address(played, tmp_path):
    with pytest.raises(HeadcountError, match=r"cannot connect to 127\.0\.0\.1:1 .*is the head of the cluster running"):
        study.study([BASE], tmp_path, launch=ray_cluster("127.0.0.1:1"))
    assert not played.said


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
def test_wrong_words(words, says):
    with pytest.raises(HeadcountError, match=says):
        ray_cluster(**{"address": "auto"} | words)


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HeadcountError, match=r"needs Ray, which is not installed.*pip install 'headcount\[ray\]'"):
        ray_cluster("auto")


# -- what a failed run leaves -----------------------------------------------------------------------------------------------


def test_a_failure_is_kept_until_it_is_mended(moody, tmp_path):
    out = tmp_path / "out"
    done = study.study([moody, moody.replace(removal=0.5), BASE], out, device="cpu")
    assert len(done.records) == 1
    assert len(done.failed) == 2
    (left,) = out.glob("*.failed.json")  # what was never run has no traceback to keep
    body = json.loads(left.read_text())
    assert (body["key"], Recipe.from_dict(body["recipe"])) == (moody.key, moody)
    assert body["error"] == "ArithmeticError: not today"
    assert 'raise ArithmeticError("not today")' in body["traceback"]
    assert [r.recipe for r in records.load_records(out)] == [BASE]

    (tmp_path / "heads" / "bad mood").unlink()
    done = study.study([moody, moody.replace(removal=0.5), BASE], out, device="cpu")
    assert not done.failed
    assert len(records.load_records(out)) == 3
    assert not list(out.glob("*.failed.json"))


def test_a_mistake_is_kept_only_among_records(tmp_path):
    """A study that is all mistake says so in a line and leaves nothing; one run that diverges among others is kept."""
    wrong = BASE.replace(options={"t1": -1})
    done = study.study([wrong], tmp_path, device="cpu")
    assert isinstance(done.failed[wrong], HeadcountError)
    assert not list(tmp_path.iterdir())
    study.study([wrong, BASE], tmp_path, device="cpu")
    assert [p.name for p in tmp_path.glob("*.failed.json")] == [f"{wrong.key}.failed.json"]


# -- the command --------------------------------------------------------------------------------------------------------------


def typed(monkeypatch, capsys, line: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["headcount", *shlex.split(line)])
    with pytest.raises(SystemExit) as left:
        main.main()
    return (left.value.code, *capsys.readouterr())


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
def test_options_that_do_not_go_together(monkeypatch, capsys, tmp_path, words, says):
    code, out, err = typed(monkeypatch, capsys, f"{SMALL} --out {tmp_path}/out {words}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("headcount: ")
    assert says in err
    assert not list(tmp_path.iterdir())


def test_the_command_over_the_cluster(played, monkeypatch, capsys, tmp_path):
    code, out, err = typed(monkeypatch, capsys, f"{SMALL} --out {tmp_path}/out --launch ray --address local")
    assert (code, err) == (0, "")
    assert "1 records in" in out
    assert len(played.tasks) == 1


def test_the_command_counts_what_failed(moody, monkeypatch, capsys, tmp_path):
    code, out, err = typed(monkeypatch, capsys, f"{SMALL} --out {tmp_path}/out --head count,{moody.head} --device cpu")
    assert code == 2
    assert "1 records in" in out
    assert "failed: Moody" in out
    assert "ArithmeticError: not today" in out
    assert err == f"headcount: 1 run failed; see {tmp_path}/out/*.failed.json; the same command tries them again\n"
