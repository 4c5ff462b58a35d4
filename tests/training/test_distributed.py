"""Several processes at one training: the same weights as one process, one record, and a kill that costs nothing but time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import distributed_case as case
import numpy as np
import pytest
import torch

from head_cases import NEVER_SPLIT
from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.experiments.launch import processes, ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.run import run
from headcount.models.network import build_model
from headcount.selection.fit import fit
from headcount.training import distributed
from headcount.training.loop import load_checkpoint
from headcount.training.trainer import Trainer

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
# torch itself warns of its own in a process of its own
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def together(*words: str, **how) -> subprocess.CompletedProcess:
    return subprocess.run([*TORCHRUN, *words], env=ENV, capture_output=True, text=True, timeout=200, **how)


# -- the same weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("together")
    done = together(str(HERE / "distributed_case.py"), str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("name", case.NAMES, ids=lambda n: n.rpartition("/")[2])
def test_two_processes_train_as_one(made, name):
    number = case.NAMES.index(name)
    first, second = (load_checkpoint(made / f"{number}-{rank}.safetensors") for rank in (0, 1))
    assert first[1] == second[1] == {"of": 2}
    for k in first[0]:
        assert torch.equal(first[0][k], second[0][k]), f"{k} differs between the processes"
    if case.has_batch_norm(case.training(name)):
        return  # statistics per process: declared, and equal afterwards
    for k, want in case.outcome(name).items():
        torch.testing.assert_close(first[0][k], want, rtol=1e-5, atol=1e-5, msg=lambda said, k=k: f"{k}: {said}")


def test_the_cases_are_sensitive(made):
    """Weights move by far more than the tolerance, and an unweighted mean of the shares would not pass."""
    start = case.training("count").model.state_dict()
    end = load_checkpoint(made / f"{case.NAMES.index('count')}-0.safetensors")[0]
    assert max((end[k] - v).abs().max() for k, v in start.items() if v.is_floating_point()) > 1e-3


def test_state_across_bags_is_refused():
    state = case.training("count")
    state.model.head.register_buffer("prior", torch.zeros(3))
    memory = distributed.BufferSync(state)
    memory.sync()
    state.model.head.prior += 1
    with pytest.raises(HeadcountError, match=r"head count keeps 'prior' across bags.*train it with one process"):
        memory.sync()


def test_a_teacher_keeps_its_own_batch_norm():
    """It is an average as its weights are, not its pupil's."""
    pool = Pool(np.random.default_rng(0).integers(0, 256, (48, 8, 8, 1), dtype=np.uint8))
    bags = Bags.of(pool, sizes=[4] * 12, labels=[0, 1, 2] * 4, classes=3, known=np.arange(48) % 3)
    recipe = Recipe(backbone="quick", backbone_options={"width": 8}, batch_bags=4)
    recipe = recipe.replace(head="supervised", options={"views": 2, "decay": 0.995}, views="noise")
    state = Trainer(build_model(recipe.model_config(bags), bags, seed=recipe.seed), bags, bags, recipe.train_config)
    memory = distributed.BufferSync(state)
    for epoch in range(3):
        state.train_epoch(epoch)
    before = {k: v.clone() for k, v in state.teacher.named_buffers()}
    memory.sync()
    after, pupil = dict(state.teacher.named_buffers()), dict(state.model.named_buffers())
    averaged = [k for k in before if k.endswith("running_mean")]
    assert all(torch.equal(before[k], after[k]) for k in averaged)
    assert any(not torch.equal(pupil[k], after[k]) for k in averaged)


@pytest.mark.parametrize("name", case.NEVER_SPLIT)
def test_a_head_that_is_never_split_cannot_be_distributed(name):
    state = case.training(name)
    state.process_group = distributed.ProcessGroup(0, 2)
    with pytest.raises(HeadcountError, match=f"head {name} cannot be trained by several processes: .*; train it with one"):
        distributed.DistributedStep(state, state.head.passes[0], lambda step, device: step)


def test_the_cases_leave_out_only_heads_whose_batches_are_never_split():
    assert list(case.NEVER_SPLIT) == NEVER_SPLIT


def test_too_few_bags_for_the_processes(monkeypatch):
    state = case.training("count")
    state.process_group = distributed.ProcessGroup(0, 6)
    with pytest.raises(HeadcountError, match="a step has 5 of 11 bags, too few for 6 processes"):
        distributed.DistributedStep(state, state.head.passes[0], lambda step, device: step)


def test_shards_cover_the_step():
    which = torch.arange(11)
    shares = [distributed.ProcessGroup(r, 3).shard(which) for r in range(3)]
    assert torch.equal(torch.cat(shares), which)
    assert [len(s) for s in shares] == [4, 4, 3]


def test_a_single_process_is_a_group_of_one():
    assert distributed.world_size() == 1
    assert distributed.process_group(torch.device("cpu")).size == 1


@pytest.mark.parametrize(
    "start",
    [lambda: processes(2), lambda: ray_cluster(None), lambda: fit(None)],  # ty: ignore[invalid-argument-type]
    ids=["processes", "ray", "fit"],
)
def test_torchrun_excludes_other_launchers(monkeypatch, start):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HeadcountError, match="torchrun already runs 2 processes"):
        start()


# -- through the command line -------------------------------------------------------------------------------------------

RECIPE = Recipe(
    source="digits", bag_size=16, train_bags=60, valid_bags=20, test_bags=10, backbone="mlp", epochs=60, batch_bags=15
)
WORDS = [
    *("-m", "headcount", "run", "--source", "digits", "--bag-size", "16", "--device", "cpu"),
    *(w for k in ("train_bags", "valid_bags", "test_bags", "batch_bags") for w in ("--set", f"{k}={getattr(RECIPE, k)}")),
    *("--set", "backbone=mlp"),
]


def pid_of_rank_1(torchrun: subprocess.Popen) -> int:
    """The process id of its worker of rank 1."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun.pid and b"\0RANK=1\0" in (folder / "environ").read_bytes():
                return int(folder.name)
        except (OSError, IndexError):
            continue
    raise AssertionError("no worker of rank 1")


@pytest.mark.soak
def test_one_record_as_from_one_process(tmp_path):
    recipe = RECIPE.replace(epochs=4)
    done = together(*WORDS, "--epochs", "4", "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("record ") == 1, "only the first process speaks"
    two, one = Record.read(tmp_path / "two" / f"{recipe.key}.json"), run(recipe, tmp_path / "one", device="cpu")
    assert two.data["provenance"]["processes"] == 2
    assert two.data["fit"]["best_epoch"] == one.data["fit"]["best_epoch"]
    for part in ("train", "valid"):
        assert two.data["fit"]["curve"][part] == pytest.approx(one.data["fit"]["curve"][part], abs=2e-5)
    assert two.scores["instance_accuracy"] == pytest.approx(one.scores["instance_accuracy"], abs=0.02)
    assert {p.suffix for p in (tmp_path / "two").iterdir()} == {".json", ".npz"}


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to look for processes in")
def test_a_killed_process_ends_in_one_line_and_the_same_command_resumes(tmp_path):
    env = {**ENV, "HEADCOUNT_CHECKPOINT_SECONDS": "0.05"}
    recipe = RECIPE.replace(removal=0.5)
    words = [*WORDS, "--removal", "0.5", "--epochs", "60"]
    command = [*TORCHRUN, *words, "--out", str(tmp_path / "torn")]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    (needed,) = recipe.needs
    log, deadline = tmp_path / "torn" / "running" / needed.key / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 10):
        time.sleep(0.01)
    os.kill(pid_of_rank_1(child), signal.SIGKILL)
    _, said = child.communicate(timeout=60)
    assert child.returncode != 0
    assert [line for line in said.splitlines() if line.startswith("headcount:")] == [f"headcount: {distributed.LOST_MESSAGE}"]
    assert (log.parent / "checkpoint.safetensors").exists()
    assert not list((tmp_path / "torn").glob("*.json"))

    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("record ") == 1, "only the first process speaks"
    whole = together(*words, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr[-2000:]
    for each in (needed, recipe):
        torn, other = (Record.read(tmp_path / w / f"{each.key}.json") for w in ("torn", "whole"))
        assert torn.data | {"provenance": {}} == other.data | {"provenance": {}}
        assert other.data["provenance"]["processes"] == 2
    assert not (tmp_path / "torn" / "running").exists()
