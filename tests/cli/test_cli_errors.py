"""Wrong inputs through the command line: one line that says what was given and what to do, exit code 2, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from headcount.cli import main
from headcount.errors import DamagedFileWarning, HeadcountError
from headcount.experiments import study
from headcount.experiments.recipe import Recipe
from headcount.io import atomic_path, atomic_write

SMALL = (
    "--source digits --set backbone=mlp --set train_bags=20 --set valid_bags=10 --set test_bags=10 "
    "--bag-size 8 --epochs 2 --device cpu"
)
RUN = f"run --out out {SMALL}"
STUDY = f"study --out out {SMALL}"
BAGS = "bags --bag-size 8 --train-bags 20 --valid-bags 10 --test-bags 10"
TABLE = "run --out out --bag-size 4 --set train_bags=20 --set valid_bags=10 --set test_bags=10 --epochs 2 --device cpu"

# what is typed, and what the line must say: what was given, and what to do
WORDS = [
    ("stduy --out out", "No such command 'stduy'", "Did you mean 'study'"),
    ("data fetsh cifar10", "No such command 'fetsh'", "fetch"),
    ("run --out out --epoch 3", "No such option: --epoch", "--epochs"),
    ("run", "Missing option '--out'"),
    ("run --out", "'--out' requires an argument"),
    (f"{RUN} left_over", "unexpected extra argument", "left_over"),
    (f"{RUN} --head cuont", "no head 'cuont'; there are count", "did you mean 'count'?"),
    (f"{STUDY} --head count,outputmean", "no head 'outputmean'", "did you mean 'output_mean'?"),
    ("run --out out --source digit", "no source 'digit'; there are digits", "did you mean 'digits'?"),
    ("run --out out --source missing_folder/x", "no source 'missing_folder/x'", "FILE.npz"),
    (f"{RUN} --option t1=0.1,0.2", "run takes one recipe, these options make 2"),
    (f"{RUN} --scenario varous", "no scenario 'varous'; there are various, small, large", "did you mean 'various'?"),
    (f"{BAGS} --scenario big", "no scenario 'big'; there are various, small, large"),
    (f"{BAGS} --sampler offical", "no sampler 'offical'", "did you mean 'official'?"),
    (f"{BAGS} --tie lowset", "no tie rule 'lowset'", "did you mean 'lowest'?"),
    (f"{BAGS} --rounding up", "no rounding 'up'; there are official, largest_remainder"),
    (f"{RUN} --set learning_rate=1", "no recipe field 'learning_rate'; there are", " lr,"),
    (f"{RUN} --set epoch=3", "no recipe field 'epoch'", "did you mean 'epochs'?"),
    (f"{RUN} --set optimizer=adma", "no optimizer 'adma'", "did you mean 'adam'?"),
    (f"{RUN} --set lr", "--set takes NAME=VALUE, got 'lr'"),
    (f"{RUN} --set =3", "--set takes NAME=VALUE, got '=3'"),
    (f"{RUN} --set lr=", "--set takes NAME=VALUE, got 'lr='"),
    (f"{RUN} --set options=t1", "--set cannot give options", "--option NAME=VALUE"),
    (f"{RUN} --set backbone_options=1", "--set cannot give backbone_options"),
    (f"{RUN} --set trouble=1", "--set cannot give trouble", "trouble.NAME=VALUE"),
    (f"{RUN} --set trouble.wrogn=0.1", "no trouble 'wrogn'", "did you mean 'wrong'"),
    (f"{RUN} --set trouble.wrong=2", "trouble wrong is a number from 0 to 1, got 2"),
    (f"{RUN} --set head.t1=2", "--set head.t1: only backbone and trouble"),
    (f"{RUN} --option t1", "--option takes NAME=VALUE, got 't1'"),
    (f"{RUN} --option t1=1 --option t1=2", "--option t1 is given twice"),
    (f"{RUN} --set lr=1e-3 --set lr=1e-4", "--set lr is given twice", "commas between"),
    (f"{RUN} --set backbone.hidden=8 --set backbone.hidden=9", "--set backbone.hidden is given twice"),
    (f"{RUN} --set epochs=3", "--set epochs=3: epochs has an option of its own", "give --epochs alone"),
    (f"{RUN} --set fold=1", "fold has an option of its own", "give --fold alone"),
    (f"{RUN} --head heads.py:Lost --option zz=1", "no option of head heads.py:Lost 'zz'"),
    (f"{RUN} --option t3=1", "no option of head count 't3'; there are t1, t2"),
    (f"{RUN} --head output_mean --option t1=1", "no option of head output_mean 't1'; there are form"),
    (f"{RUN} --fold 0,1", "these options make 2", "use `headcount study`"),
    (f"{RUN} --head count,output_mean --removal 0,0.5", "these options make 4", "use `headcount study`"),
    ("paper tabel2", "no table or figure 'tabel2'", "did you mean 'table2'?"),
    ("probe cuont", "no head 'cuont'; there are count", "did you mean 'count'?"),
    ("data fetch cifra10", "no data set 'cifra10'", "did you mean 'cifar10'?"),
    ("data import cifar100 good.npz", "no source to import 'cifar100'", "did you mean 'cifar10'?"),
    ("data import digits good.npz", "no source to import 'digits'; there are cifar10"),
]
NUMBERS = [
    (f"{RUN} --removal 1.5", "removal is a number from 0.0 to 1.0, got 1.5"),
    (f"{RUN} --removal -0.1", "removal is a number from 0.0 to 1.0, got -0.1"),
    (f"{RUN} --removal nan", "removal is a number from 0.0 to 1.0, got 'nan'"),
    (f"{RUN} --removal half", "removal is a number from 0.0 to 1.0, got 'half'"),
    (f"{RUN} --fold 9", "fold is a whole number from 0 to 4, got 9"),
    (f"{RUN} --fold x", "fold is a whole number from 0 to 4, got 'x'"),
    (f"{STUDY} --fold 0,,1", "fold is a whole number from 0 to 4, got ''"),
    (f"{BAGS} --fold 9", "fold is a whole number from 0 to 4, got 9"),
    (f"{BAGS} --fold x", "Invalid value for '--fold'", "int"),
    (f"{RUN} --bag-size 0", "bag_size is a whole number from 1", "got 0"),
    (f"{BAGS} --bag-size 0", "bag_size is a whole number from 1 to 1048576, got 0"),
    (f"{BAGS} --train-bags 0", "train_bags is a whole number from 1 to 16777216, got 0"),
    (f"{BAGS} --seed -1", "Invalid value for '--seed'", "0"),  # the limit, in the words of typer
    (f"{RUN} --epochs -1", "epochs is a whole number from 1", "got -1"),
    (f"{RUN} --epochs ten", "Invalid value for '--epochs'", "int"),
    (f"{RUN} --set lr=abc", "lr is a number from 0.0", "got 'abc'"),
    (f"{RUN} --set lr=-1", "lr is a number from 0.0", "got -1"),
    (f"{RUN} --set seed=1.5", "seed is a whole number from 0", "got 1.5"),
    (f"{RUN} --set lr=Infinity", "Infinity is not a number that can be computed with", "give a finite one"),
    (f"{RUN} --option t1=1e999", "1e999 is not a number that can be computed with", "give a finite one"),
    (f"{STUDY} --processes 0", "Invalid value for '--processes'", "1"),
    ("demo --folds 9", "Invalid value for '--folds'", "5"),
    (f"{RUN} --device nonsense", "no device 'nonsense'; give auto, cpu, cuda or cuda:1"),
    (f"{RUN} --device cuda:x", "no device 'cuda:x'; give auto, cpu, cuda or cuda:1"),
    (f"{STUDY} --device gpu", "no device 'gpu'; give auto, cpu, cuda or cuda:1"),
]
FILES = [
    (f"{TABLE} --source missing.npz", "no file missing.npz", "give an .npz that exists"),
    (f"{TABLE} --source not_zip.npz", "not_zip.npz is no .npz file", "give an .npz with 'images' or 'features'"),
    (f"{TABLE} --source torn.npz", "cannot read", "torn.npz", "give an .npz with 'images' or 'features'"),
    (f"{TABLE} --source single.npy", "single.npy is a single array; give an .npz"),
    (f"{TABLE} --source pickled.npz", "cannot read", "pickled.npz", "Object arrays", "give an .npz"),
    (f"{TABLE} --source short.npz", "short.npz: 200 rows but labels of shape (5,)", "one class number per row"),
    (f"{TABLE} --source nan.npz", "nan.npz: ", "row 17 of the features has nan in column 2; drop the row or fill the value in"),
    (f"{TABLE} --source float_labels.npz", "labels are float64, such as 0.5; give whole numbers from 0"),
    (f"{TABLE} --source negative.npz", "row 3 has label -1; number the classes 0, 1, 2"),
    (f"{TABLE} --source no_labels.npz", "no_labels.npz has no 'labels' or 'y'; it has features"),
    (f"{RUN} --head no_file.py:Mine", "no file no_file.py", "give path/to/file.py:Class"),
    (f"{RUN} --head broken.py:Mine", "broken.py does not run: SyntaxError", "line 1"),
    (f"{RUN} --head heads.py:Other", "heads.py has no class 'Other' derived from headcount's Head"),
    (f"{RUN} --head heads.py:NotAHead", "heads.py has no class 'NotAHead' derived from headcount's Head"),
    ("data import cifar10 good.npz", "good.npz is not cifar10: it holds float32 (200, 6), not uint8 (60000, 32, 32, 3)"),
    ("data import cifar10 missing.npz", "cannot read missing.npz", "give an .npz"),
    ("report no_folder", "no folder no_folder; give the --out of a study"),
    ("report good.npz", "no folder good.npz; give the --out of a study"),
    ("report empty", "no records in empty; give the --out of a study"),
    ("report half_json", "cannot read half_json/a.json: Unterminated", "move it away"),
    ("report list_json", "cannot read list_json/a.json: it is [], not an object", "move it away"),
    ("report other_json", "cannot read other_json/a.json: it lacks text, data, fit, provenance", "move it away"),
    ("report a_model", "a_model is a model, and report is for studies", "a_model/report.html"),
    ("paper table4 --out good.npz", "no folder good.npz; give the --out of a study"),
    ("paper table4 --csv --latex", "--csv, --latex and --matrix", "give one of the three"),
    ("paper table4 --csv --missing", "--missing lists runs, --csv writes a table", "give one of the two"),
    (f"{BAGS} --export bags.txt", "bags are exported as .npz, got bags.txt"),
    (f"{BAGS} --export bags.txt --picture bags.png", "bags are exported as .npz, got bags.txt"),
    (f"{BAGS} --picture bags.xyz --export bags.npz", "a figure is saved as .png, .svg or .pdf, got 'bags.xyz'"),
    (f"{BAGS} --picture folder.png", "folder.png is a folder or a device", "choose another path"),
    (f"{BAGS} --picture good.npz/x.png", "good.npz", "there is a file where a folder is needed"),
]
# these are noticed when the run has begun, so its heading stands on stdout already
BEGUN = [
    (f"{RUN} --option t1=abc", "option t1 of head count is a number, got 'abc'"),
    (f"{RUN} --option t1=0", "temperature t1 must be above 0, got 0"),
    (f"{RUN} --set backbone.hidden=-3", "hidden from 1 and layers from 0, got hidden=-3"),
    (f"{RUN} --set backbone.hidden=0", "hidden from 1 and layers from 0, got hidden=0"),
    (f"{TABLE} --source digits --set backbone=quick --set backbone.width=-4", "quick cannot be built with {'width': -4}"),
    (f"{STUDY} --fold 0 --head millet --option width=-1", "head millet cannot be built with {'width': -1}"),
    (f"{STUDY} --fold 0 --head mctformer --option heads=0", "head mctformer cannot be built with {'heads': 0}"),
    (
        f"{STUDY} --fold 0 --head additive --set batch_bags=1".replace("--bag-size 8", "--bag-size 1"),
        "a step of 1 bags has a single instance, and batch-norm cannot learn from one; give larger",
    ),
    (f"{RUN} --option mode=counting", "no mode 'counting'; there are proportion, count"),
    (f"{RUN} --bag-size 300", "class '", "instances in the train part of digits, a bag needs ", "smaller bags"),
    (f"{TABLE} --source one_class.npz --set backbone=mlp", "needs at least", "classes"),
    (f"{TABLE} --source good.npz", "resnet18 reads images, the instances are features of 6; use mlp or linear"),
    (
        f"{TABLE} --source good.npz --set backbone=mlp --set views=image",
        "views=image are for images, and the instances are features; give one of none, noise, feature",
    ),
    (f"{TABLE} --source good.npz --bag-size 12 --set backbone=mlp", "class '", "valid part of good.npz", "needs"),
    (f"run --out good.npz {SMALL}", "Not a directory: good.npz/running", "there is a file where a folder is needed"),
    (f"run --out good.npz/below {SMALL}", "good.npz/below", "there is a file where a folder is needed"),
    (f"run --out {'x' * 300} {SMALL}", "File name too long", "choose a shorter name"),
    (f"{STUDY} --option t1=0 --fold 0,1", "temperature t1 must be above 0, got 0"),
    (f"{BAGS} --export good.npz/bags.npz", "good.npz", "there is a file where a folder is needed"),
    (f"{BAGS} --export folder.npz", "folder.npz is a folder or a device", "choose another path"),
    ("demo --folds 1 --processes 1 --out good.npz", "good.npz/records", "there is a file where a folder is needed"),
]


HEADS = """
from headcount.models.heads.count import Count

class NotAHead:
    pass

class Lost(Count):
    title = "Lost"

    def readout_sums(self, sums, total):
        return super().readout_sums(sums, total) * float("nan")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with every kind of broken file."""
    place = tmp_path_factory.mktemp("place")
    x, y = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32), np.arange(200) % 4
    gap, negative = x.copy(), y.copy()
    gap[17, 2], negative[3] = np.nan, -1
    np.savez(place / "good.npz", features=x, labels=y)
    np.savez(place / "pickled.npz", features=np.array([{}] * 200, dtype=object), labels=y)
    np.savez(place / "short.npz", features=x, labels=y[:5])
    np.savez(place / "nan.npz", features=gap, labels=y)
    np.savez(place / "float_labels.npz", features=x, labels=y + 0.5)
    np.savez(place / "negative.npz", features=x, labels=negative)
    np.savez(place / "no_labels.npz", features=x)
    np.savez(place / "one_class.npz", features=x, labels=y * 0)
    np.save(place / "single.npy", x)
    (place / "not_zip.npz").write_text("hello")
    (place / "torn.npz").write_bytes((place / "good.npz").read_bytes()[:-100])
    (place / "broken.py").write_text("def (:\n")
    (place / "heads.py").write_text(HEADS)
    for folder in ("empty", "half_json", "list_json", "other_json", "a_model", "folder.png", "folder.npz"):
        (place / folder).mkdir()
    (place / "half_json" / "a.json").write_text('{"key": "a", "rec')
    (place / "list_json" / "a.json").write_text("[]")
    (place / "a_model" / "model.json").write_text('{"format": 2}')
    (place / "other_json" / "a.json").write_text('{"key": "a", "recipe": {}, "scores": {}}')
    return place


def files_in(folder: Path) -> set[Path]:
    """All but Python's own cache, which it leaves beside a head's file unless it is told not to."""
    return {p for p in folder.rglob("*") if (p.is_file() or p.is_symlink()) and p.parent.name != "__pycache__"}


def one_line(code: int, err: str, *says: str) -> None:
    assert code == 2, err
    assert err.startswith("headcount: ")
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    assert "Traceback" not in err
    for words in says:
        assert words in err


@pytest.fixture
def typed(place, monkeypatch, capsys):
    """Type a command in the folder of broken files; returns exit code, stdout and stderr, and looks for what was left."""

    def typed(line: str) -> tuple[int, str, str]:
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["headcount", *shlex.split(line)])
        before = files_in(place)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main.main()
        assert files_in(place) == before
        return (left.value.code, *capsys.readouterr())

    return typed


@pytest.mark.parametrize(("line", "says"), [(line, says) for line, *says in WORDS + NUMBERS + FILES])
def test_wrong_input(typed, line, says):
    code, out, err = typed(line)
    one_line(code, err, *says)
    assert out == ""


@pytest.mark.parametrize(("line", "says"), [(line, says) for line, *says in BEGUN])
def test_wrong_input_noticed_later(typed, line, says):
    code, out, err = typed(line)
    one_line(code, err, *says)
    assert "Traceback" not in out
    if line.startswith("run "):
        heading, key = out.splitlines()
        assert heading.startswith("Counting Network")
        assert key.startswith("key ")


def test_a_bag_too_large_says_how_many_there_are(typed):
    _, _, err = typed(f"{RUN} --bag-size 300")
    words = err.split()
    has, needed = int(words[words.index("has") + 1]), int(words[words.index("needs") + 1].rstrip(";"))
    assert has < needed <= 300


def test_there_are_many_cases():
    assert len(WORDS) + len(NUMBERS) + len(FILES) + len(BEGUN) >= 90


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("command", [RUN, STUDY])
def test_no_gpu(typed, command, device):
    code, out, err = typed(f"{command} --device {device}")
    one_line(code, err, f"device {device} was given, but torch sees no GPU here; give cpu, or auto")
    assert out == ""


def test_no_network(typed, monkeypatch, tmp_path):
    """A proxy nobody listens at: refused at once, and the advice tells how to do without a network."""
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("cifar10", "svhn", "oct"):
        code, out, err = typed(f"data fetch {name}")
        one_line(code, err, "cannot download", "put it at", f"headcount data import {name} FILE.npz")
        assert out == ""
    code, _, err = typed("run --out out --source path")
    one_line(code, err, "cannot download pathmnist.npz")
    assert {p.name for p in files_in(tmp_path)} <= {".lock"}


def test_a_record_of_another_version(typed, kept, tmp_path):
    """A recipe field this version does not know."""
    record = json.loads(next(kept.glob("*.json")).read_text())
    (tmp_path / "a.json").write_text(json.dumps(record | {"recipe": record["recipe"] | {"mood": 1}}))
    code, _, err = typed(f"report {tmp_path}")
    one_line(code, err, f"cannot read {tmp_path / 'a.json'}: no recipe field 'mood'; there are source", "move it away")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A folder with a record."""
    folder = tmp_path_factory.mktemp("kept")
    small = {"bag_size": 8, "train_bags": 20, "valid_bags": 10, "test_bags": 10, "epochs": 2}  # as SMALL has it
    assert study.study([Recipe(source="digits", backbone="mlp", **small)], folder, device="cpu").records
    return folder


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"valid_loss"', '"loss"', "fit lacks valid_loss"),
        ('"best_epoch":', '"best_epoch":"x","was":', "fit.best_epoch is 'x', not a whole number"),
        ('"checksum"', '"sum"', "data lacks checksum"),
        ('"instance_accuracy":', '"instance_accuracy":"x","was":', "scores.instance_accuracy is 'x', not a number or null"),
        ('"head":"count"', '"head":"cuont"', "no head 'cuont'"),
    ],
)
def test_a_record_that_was_changed(typed, kept, tmp_path, old, new, says):
    (record,) = kept.glob("*.json")
    text = record.read_text()
    assert old in text
    (tmp_path / record.name).write_text(text.replace(old, new, 1))
    for command in (f"report {tmp_path}", f"paper --missing --out {tmp_path}"):
        code, _, err = typed(command)
        one_line(code, err, f"{record.name}: {says}", "move it away")


def test_a_damaged_record_is_left_out(typed, kept, tmp_path):
    """One line for each, and how many; with --strict the first one stops the command."""
    shutil.copytree(kept, tmp_path / "out")
    (record,) = kept.glob("*.json")
    (tmp_path / "out" / "a.json").write_text(record.read_text().replace('"valid_loss":', '"valid_loss":null,"was":', 1))
    os.mkfifo(tmp_path / "out" / "b.json")
    starts = [
        f"left out: cannot read {tmp_path}/out/a.json: fit.valid_loss is None, not a number; give a record as",
        f"left out: cannot read {tmp_path}/out/b.json: it is a folder, a pipe or a device, not a file; give a record",
        "2 of 3 records cannot be read and are left out (--strict stops instead)",
    ]
    for command in (f"report {tmp_path}/out", f"report {tmp_path}/out --csv", f"paper --out {tmp_path}/out"):
        with pytest.warns(DamagedFileWarning) as caught:
            assert typed(command)[0] == 0
        said = [str(w.message) for w in caught if w.category is DamagedFileWarning]  # old libraries warn too
        assert [line.startswith(start) for line, start in zip(said, starts, strict=True)] == [True] * 3
        one_line(*typed(f"{command} --strict")[::2], "left out: cannot read", "a.json: fit.valid_loss")
    (tmp_path / "out" / record.name).write_text("[]")
    line = f"study --out {tmp_path}/out {SMALL} --fold 0"
    one_line(*typed(line)[::2], f"cannot read {tmp_path}/out/{record.name}: it is [], not an object", "run the study again")


@pytest.mark.parametrize("left", [0, 500])
def test_arrays_that_were_cut_off(typed, kept, tmp_path, left):
    shutil.copytree(kept, tmp_path / "out")
    (arrays,) = (tmp_path / "out").glob("*.npz")
    arrays.write_bytes(arrays.read_bytes()[:left])
    with pytest.warns(DamagedFileWarning, match=f"left out: .*{arrays}"):
        assert typed(f"report {tmp_path}/out")[0] == 0
    for command in (f"report {tmp_path}/out --strict", f"run --out {tmp_path}/out {SMALL} --removal 0.5"):
        code, _, err = typed(command)
        one_line(code, err, str(arrays), f"move it away with {arrays.stem}.json")


def test_a_training_without_a_number(typed):
    """The record would hold no validation loss, and JSON has no NaN."""
    code, _, err = typed(f"{RUN} --head heads.py:Lost")
    one_line(code, err, "Lost, digits various fold 0", "the validation loss was never a number", "smaller lr than 0.0003")


def test_without_a_command_there_is_help(typed):
    for line in ("", "data"):
        code, out, err = typed(line)
        assert (code, err) == (0, "")
        assert "Usage:" in out


# -- interrupted ------------------------------------------------------------------------------------------------------


def broken_import() -> None:
    """What a library makes of Ctrl-C while it is loading."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as e:
        raise ImportError("initialization failed") from e


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [interrupt, broken_import])
def test_interrupted(typed, monkeypatch, how):
    monkeypatch.setattr("headcount.models.heads.head_options", lambda name: how())
    code, out, err = typed("heads")
    assert (code, out) == (130, "")
    assert err == "headcount: interrupted\n"


def test_interrupted_inside_an_eval(tmp_path):
    """Libraries run pieces of text as they load; CPython keeps that a Ctrl-C came in there, and would end by a signal."""
    stub = 'from headcount.cli import main\nmain.app = lambda **_: exec("raise KeyboardInterrupt")\nmain.main()\n'
    (tmp_path / "struck.py").write_text(stub)
    done = subprocess.run([sys.executable, "-m", "struck"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "headcount: interrupted\n"


def test_a_bug_is_not_hushed_up(typed, monkeypatch):
    def stumble(name: str) -> None:
        raise ImportError("no module named nothing")

    monkeypatch.setattr("headcount.models.heads.head_options", stumble)
    with pytest.raises(ImportError, match="no module named nothing"):
        typed("heads")


# -- the disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("line", [f"{BAGS} --export bags.npz", f"{BAGS} --picture bags.png", RUN])
def test_a_disk_that_refuses(typed, place, monkeypatch, line, number):
    """Noticed only when the bytes reach the disk; the part that was written is gone again."""

    def full(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = typed(line)
    one_line(code, err, os.strerror(number), "bags." if "bags" in line.split() else "out/", "space" if number in
             (errno.ENOSPC, errno.EDQUOT) else "folder")  # fmt: skip


def test_a_full_disk_in_the_words_of_a_library(tmp_path):
    def save() -> None:
        with atomic_path(tmp_path / "weights") as part:
            part.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="weights") as e:
        save()
    assert e.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="no device to spare")
def test_a_device_is_never_renamed_over(tmp_path):
    """A folder or a device under the name is refused before anything is written."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HeadcountError, match="pipe is a folder or a device"):
        atomic_write(tmp_path / "pipe", lambda f: f.write(b"x"))
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_folder_nobody_can_write_in(typed):
    code, _, err = typed(f"run --out /proc/nowhere {SMALL}")
    one_line(code, err, "/proc/nowhere")
    assert "check the path" in err or "choose another folder" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(typed, tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = typed(f"run --out {tmp_path}/out {SMALL}")
    one_line(code, err, "Permission denied", "choose another folder")


def test_a_finished_study_on_a_read_only_disk(typed, kept, monkeypatch):
    """Such a disk refuses to remove even what is not there; nothing has to be removed, so the table is shown."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    code, out, _ = typed(f"study --out {kept} {SMALL} --fold 0")
    assert code == 0
    assert "1 records in" in out
    with pytest.raises(OSError, match="full") as told, atomic_path(kept / "page.html"):
        raise OSError(errno.ENOSPC, "full", str(kept / "page.html.part"))
    assert told.value.filename == str(kept / "page.html")


# -- as people run it ---------------------------------------------------------------------------------------------------


def typed_outside(line: str, cwd: Path, **how) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "headcount", *shlex.split(line)]
    return subprocess.run(command, cwd=cwd, text=True, timeout=120, stderr=subprocess.PIPE, **how)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stduy", ["Did you mean 'study'"]),
        ("run --out out --epoch 3", ["No such option: --epoch"]),
        (f"{RUN} --head cuont", ["no head 'cuont'"]),
    ],
)
def test_from_outside(place, line, says):
    before = files_in(place)
    done = typed_outside(line, place, stdout=subprocess.PIPE)
    one_line(done.returncode, done.stderr, *says)
    assert done.stdout == ""
    assert files_in(place) == before


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_stdout_on_a_full_disk(place):
    with open("/dev/full", "w") as full:
        done = typed_outside("--version", place, stdout=full)
    one_line(done.returncode, done.stderr, "No space left on device", "free some space")


def test_stdout_that_nobody_reads(place):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = typed_outside("--version", place, stdout=closed)
    assert done.returncode != 0
    assert done.stderr == ""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount")
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("kilobytes", "seconds", "file"), [(4, 30, ".npz"), (12, 30, ".json"), (48, 0, "checkpoint.safetensors")]
)
def test_a_disk_that_is_really_full(typed, small_disk, monkeypatch, kilobytes, seconds, file):
    """Full when the arrays, the JSON or the checkpoint is written; nothing is left of the run, and it can be had later."""
    line = f"run --out {small_disk}/out {SMALL}"
    page = resource.getpagesize()
    (small_disk / "other").write_bytes(bytes((64 << 10) - max(page, kilobytes << 10)))
    monkeypatch.setitem(study.study.__kwdefaults__, "checkpoint_seconds", seconds)
    code, _, err = typed(line)
    one_line(code, err, f"No space left on device: {small_disk}/out", file, "free some space")
    assert {p.name for p in files_in(small_disk)} == {"other"}
    (small_disk / "other").unlink()
    monkeypatch.setitem(study.study.__kwdefaults__, "checkpoint_seconds", 30)
    code, _, err = typed(line)
    assert (code, err) == (0, "")
    assert {p.suffix for p in files_in(small_disk)} == {".json", ".npz"}
