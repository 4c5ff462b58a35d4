"""--precision and --compile, from the command line to the training: the one decides the number, the other only the speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headcount.cli import main, running
from headcount.datasets import registry
from headcount.errors import HeadcountWarning
from headcount.experiments import records
from headcount.experiments.recipe import Recipe
from headcount.training import loop

WORDS = (
    "--source digits --set backbone=mlp --set train_bags=20 --set valid_bags=10 --set test_bags=10 "
    "--bag-size 8 --epochs 2 --device cpu"
)
SMALL = WORDS.split()


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    def typed(*words: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["headcount", *words])
        with pytest.raises(SystemExit) as left:
            main.main()
        return (left.value.code, *capsys.readouterr())

    return typed


@pytest.fixture
def asked(monkeypatch):
    """What fit was told of compilation, run by run."""
    told, train = [], loop.train

    def listen(*args, compile, **more):
        told.append(compile)
        return train(*args, **more)

    monkeypatch.setattr(loop, "train", listen)
    return told


@pytest.mark.parametrize("command", ["run", "study"])
@pytest.mark.parametrize("compile", [None, "on", "off"])
def test_compile_reaches_the_training_and_is_no_part_of_the_recipe(typed, asked, tmp_path, command, compile):
    words = [] if compile is None else ["--compile", compile]
    code, _, err = typed(command, "--out", "out", "--fold", "0", *SMALL, *words)
    assert (code, err) == (0, "")
    assert asked == [compile or "auto"]
    (record,) = records.load_records(tmp_path / "out")
    plain = Recipe(source="digits", bag_size=8, train_bags=20, valid_bags=10, test_bags=10, backbone="mlp", epochs=2)
    assert record.recipe == plain
    body = json.loads(record.path.read_text())
    assert body["provenance"].pop("compiled") is False  # `fit` above was not passed it on
    assert "compile" not in json.dumps(body)


def test_precision_is_part_of_the_recipe_and_may_be_a_list(typed, tmp_path):
    code, _, err = typed("study", "--out", "out", "--fold", "0", *SMALL, "--precision", "fp32,bf16")
    assert (code, err) == (0, "")
    assert {r.recipe.precision for r in records.load_records(tmp_path / "out")} == {"fp32", "bf16"}


@pytest.mark.parametrize("command", ["run", "study", "paper"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--compile", "maybe"], "no compile 'maybe'; there are auto, on, off"),
        (["--precision", "fp16"], "no precision 'fp16'; there are tf32, fp32, bf16"),
    ],
)
def test_wrong_words(typed, tmp_path, command, words, says):
    rest = ["--scale", "smoke", "--run"] if command == "paper" else ["--out", "out", *SMALL]
    code, out, err = typed(command, *rest, *words)
    assert code == 2
    assert err.startswith("headcount: ")
    assert err.count("\n") == 1
    assert says in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_paper_passes_precision_and_compile_on(typed, monkeypatch):
    ran = []
    monkeypatch.setattr(running, "run_study", lambda recipes, *args, **more: ran.append((recipes, args[3])))
    monkeypatch.setattr(registry, "is_available", lambda name: True)
    command = ("paper", "table4", "--scale", "smoke", "--out", "out", "--run")
    code, _, err = typed(*command, "--precision", "bf16", "--compile", "off")
    assert (code, err) == (0, "")
    ((recipes, compile),) = ran
    assert {r.precision for r in recipes} == {"bf16"}
    assert compile == "off"
    code, _, err = typed(*command, "--precision", "fp16")
    assert code == 2
    assert "no precision 'fp16'" in err


def test_generated_data_are_called_so(typed):
    code, said, _ = typed("data", "list")
    assert code == 0
    assert all(line.endswith("(generated stand-in)") for line in said.splitlines() if line.startswith("standin"))
    assert " 1797 x 8x8x1, 10 classes: ready\n" in said


def test_a_warning_of_ours_is_one_line_and_others_are_as_ever():
    ours = main.format_warning(HeadcountWarning("not\ncompiled"), HeadcountWarning, "speed.py", 3)
    assert ours == "headcount: not compiled\n"
    assert main.format_warning("old", DeprecationWarning, "x.py", 3).startswith("x.py:3: DeprecationWarning: old")


@pytest.mark.soak
def test_compilation_that_fails_is_told_once_on_stderr(tmp_path):
    """No compiler in the path: two runs in one process, one line, and the records of an ordinary run."""
    (tmp_path / "bin").mkdir()
    env = {**os.environ, "PATH": str(tmp_path / "bin"), "CXX": "no-such-compiler"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "default::UserWarning"}
    command = [sys.executable, "-m", "headcount", "study", "--out", str(tmp_path / "out"), *SMALL, "--fold", "0,1"]
    done = subprocess.run([*command, "--compile", "on"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("headcount: not compiled (")
    assert done.stderr.endswith("; running uncompiled, which is slower\n")
    assert done.stderr.count("\n") == 1
    assert len(records.load_records(tmp_path / "out")) == 2
