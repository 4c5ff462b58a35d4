"""Files as an attacker, a failing disk or an editor might leave them, and what the commands that read them make of them.

A table of mutations times every kind of file that headcount reads back. ``python tests/hostile_files.py`` tries a sample,
``--all`` every case, and prints how many were refused in one line, accepted, or ended in a traceback or a hang. The readers of
a person's own data are fuzzed in tests/readers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from safetensors import numpy as tensors

from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe

TINY = Recipe(source="digits", bag_size=8, train_bags=20, valid_bags=10, test_bags=10, backbone="mlp", epochs=4, batch_bags=8)
SECONDS, PATIENCE = 5, 60  # of the processor that reading may take; of the clock, after which a case counts as a hang
MEMORY = 500 << 20  # bytes that reading may add
FAILURES = ("traceback", "hang", "time", "memory", "killed", "lines", "leftover")
Bytes = Callable[[Path], None]  # spoils one file


# -- what is done to a file ------------------------------------------------------------------------------------------------


def _replace(make: Callable[[Path], object]) -> Bytes:
    def spoil(file: Path) -> None:
        file.unlink()
        make(file)

    return spoil


def _bytes(change: Callable[[bytes], bytes]) -> Bytes:
    return lambda file: file.write_bytes(change(file.read_bytes())) and None


def _loop(file: Path) -> None:
    file.with_name("loop").symlink_to(file)
    file.symlink_to(file.with_name("loop"))


WHOLE_FILE: dict[str, Bytes] = {
    "a pipe": _replace(os.mkfifo),
    "a folder": _replace(Path.mkdir),
    "an endless device": _replace(lambda f: f.symlink_to("/dev/zero")),
    "links in a circle": _replace(_loop),
    "a link to nothing": _replace(lambda f: f.symlink_to(f.with_name("nothing"))),
    "a read error": _replace(lambda f: f.symlink_to("/proc/self/mem")),
    "empty": _bytes(lambda b: b""),
    "cut in half": _bytes(lambda b: b[: len(b) // 2]),
    "without its end": _bytes(lambda b: b[:-1]),
    "a flipped byte": _bytes(lambda b: b[: len(b) // 3] + bytes([b[len(b) // 3] ^ 0x55]) + b[len(b) // 3 + 1 :]),
    "zeros": _bytes(lambda b: bytes(len(b))),
    "noise": _bytes(lambda b: random.Random(0).randbytes(len(b))),
    "two bytes": _bytes(lambda b: b"\xff\xfe"),
}

WHOLE_JSON: dict[str, Bytes] = {
    "nested deeply": _bytes(lambda b: b"[" * 200_000 + b"]" * 200_000),
    "objects nested deeply": _bytes(lambda b: b'{"key":' * 100_000 + b"1" + b"}" * 100_000),
    "invalid UTF-8": _bytes(lambda b: b.replace(b'"', b'"\xff', 1)),
    "UTF-16": _bytes(lambda b: b.decode().encode("utf-16")),
    "a null character": _bytes(lambda b: b.replace(b":", b":\0", 1)),
    "a list": _bytes(lambda b: b"[" + b + b"]"),
    "null": _bytes(lambda b: b"null"),
    "many empty lists": _bytes(lambda b: b"[" + b"[]," * 5_000_000 + b"[]]"),
    "many words": _bytes(lambda b: b"[" + b'"abc",' * 8_000_000 + b"1]"),
    "many numbers": _bytes(lambda b: b"[" + b"1.5," * 12_000_000 + b"1]"),
    "one vast word": _bytes(lambda b: b'{"key": "' + b"x" * 100_000_000 + b'"}'),
    "spaces without end": _bytes(lambda b: b" " * 200_000_000),
    "a long number": _bytes(lambda b: b'{"key": ' + b"9" * 1_000_000 + b"}"),
}


def _npy(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _npz_bomb(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z, z.open("test_confidence.npy", "w") as f:
        f.write(_npy((1 << 16, 1 << 10)))
        for _ in range(16):
            f.write(bytes(1 << 24))


def _header(text: bytes) -> Bytes:
    return _bytes(lambda b: len(text).to_bytes(8, "little") + text + bytes(64))


WHOLE_ARRAYS: dict[str, dict[str, Bytes]] = {
    ".npz": {
        "a compressed bomb": _npz_bomb,
        "a single array": lambda file: file.write_bytes(_npy((2, 2)) + bytes(16)) and None,
    },
    ".npy": {
        "terabytes in a header": _bytes(lambda b: _npy((1 << 30, 1 << 10))),
        "a name of gigabytes": _bytes(lambda b: _npy((1,), "<U900000000")),
        "a header of no dictionary": _bytes(lambda b: b"\x93NUMPY\x01\x00\x08\x00(1,1)  \n"),
    },
    ".safetensors": {
        "terabytes in a header": _header(b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'),
        "offsets that overlap": _header(
            b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"b":{"dtype":"F32","shape":[8],"data_offsets":[16,48]}}'
        ),
        "a vast header": _bytes(lambda b: (90_000_000).to_bytes(8, "little") + b"{" + b" " * 90_000_000),
        "a header nested deeply": _header(b'{"__metadata__":' + b'{"a":' * 100_000 + b"}" * 100_000),
        "many names": _header(
            b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(200_000)) + b"}"
        ),
    },
}

VALUES: dict[str, Any] = {
    "null": None, "true": True, "text": "x", "markup": "<b>\ud800", "zero": 0, "minus one": -1, "half": 0.5, "empty list": [],
    "empty object": {}, "list of texts": ["a", "b"], "list of lists": [[[]]], "object": {"x": {"y": [1]}},
}  # fmt: skip
NUMBERS = {"not a number": "NaN", "infinity": "-Infinity", "beyond floats": "1e999", "beyond int64": "9" * 40, "huge": "1e300"}


def _paths(data: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field, and the first element of every list."""
    if prefix:
        yield prefix
    items = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, value in items:
        yield from _paths(value, (*prefix, key))


def _parent(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def json_changes(file: Path) -> Iterator[tuple[str, Bytes]]:
    """Every field of the file, changed in every way."""
    original = json.loads(file.read_bytes())

    def change(path: tuple[Any, ...], edit: Callable[[Any, Any], None], text: tuple[str, str] = ("", "")) -> Bytes:
        def spoil(target: Path) -> None:
            data = copy.deepcopy(original)
            edit(_parent(data, path), path[-1])
            target.write_text(json.dumps(data).replace(*text) if text[0] else json.dumps(data))

        return spoil

    def shorten(parent: Any, key: Any) -> None:
        parent[key] = parent[key][:-1]

    for path in _paths(original):
        name = ".".join(map(str, path))
        value = _parent(original, path)[path[-1]]
        yield f"{name} is missing", change(path, lambda parent, key: parent.pop(key))
        for what, new in VALUES.items():
            yield f"{name}: {what}", change(path, lambda parent, key, new=new: parent.__setitem__(key, new))
        for what, number in NUMBERS.items():
            marked = lambda parent, key: parent.__setitem__(key, "@@")  # noqa: E731
            yield f"{name}: {what}", change(path, marked, ('"@@"', number))
        if isinstance(value, list | str) and value:
            yield f"{name} is shorter", change(path, shorten)
        if isinstance(value, list) and value:
            yield f"{name} holds texts", change(path, lambda parent, key: parent.__setitem__(key, ["x"] * len(parent[key])))
    twice = json.dumps(original)
    first = json.dumps(next(iter(original)))
    yield "a field twice", lambda target: target.write_text(twice[:-1] + f", {first}: 0}}") and None


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "missing": lambda a: None,
    "empty": lambda a: a[:0] if a.ndim else np.zeros(0),
    "shorter": lambda a: a[:-1] if a.ndim else np.zeros((1, 1)),
    "longer": lambda a: np.concatenate([a, a]) if a.ndim else np.zeros(3),
    "a scalar": lambda a: np.array(1),
    "one more axis": lambda a: a[None],
    "texts": lambda a: np.full(a.shape, "x"),
    "bytes": lambda a: np.full(a.shape, b"x"),
    "complex": lambda a: a.astype(complex),
    "dates": lambda a: np.zeros(a.shape, "M8[s]"),
    "a record type": lambda a: np.zeros(a.shape, [("a", "f8"), ("b", "U5")]),
    "not numbers": lambda a: np.full(a.shape, np.nan),
    "infinite": lambda a: np.full(a.shape, -np.inf),
    "minus ten": lambda a: np.full(a.shape, -10, a.dtype if a.dtype.kind in "if" else np.int64),
    "large": lambda a: np.full(a.shape, 2**62, np.int64),
    "objects": lambda a: np.full(a.shape, None),
}  # fmt: skip


def array_changes(file: Path) -> Iterator[tuple[str, Bytes]]:
    """Every array of an .npz, .npy or .safetensors file, changed in every way."""
    if file.suffix == ".npy":
        arrays = {"array": np.load(file)}
    elif file.suffix == ".npz":
        with np.load(file) as npz:
            arrays = dict(npz)
    else:
        arrays = tensors.load_file(file)

    def write(target: Path, changed: dict[str, Any]) -> None:
        if target.suffix == ".npy":
            np.save(target, changed.get("array", np.zeros(0)))
        elif target.suffix == ".npz":
            np.savez(target, **changed)
        else:
            header = tensors.safe_open(file, "np").metadata() if hasattr(tensors, "safe_open") else None
            tensors.save_file({k: np.ascontiguousarray(v) for k, v in changed.items()}, target, metadata=header)

    names = list(arrays) if len(arrays) < 20 else sorted(arrays)[:: len(arrays) // 20]
    for name in names:
        for what, edit in ARRAYS.items():
            value = edit(arrays[name])
            changed = {**arrays, name: value} if value is not None else {k: v for k, v in arrays.items() if k != name}
            if file.suffix == ".safetensors" and any(v.dtype.kind not in "biuf" for v in changed.values()):
                continue
            yield f"{name}: {what}", lambda target, changed=changed: write(target, changed)


# -- what reads the files --------------------------------------------------------------------------------------------------


class Reader(NamedTuple):
    """A file in the folder of specimens, and what reads it."""

    folder: str  # copied for every case
    pattern: str
    read: Callable[[Path], None]  # is given the copy
    prepare: Callable[[Path], None] = lambda folder: None  # in the copy, before the file is spoilt


def command(line: str) -> Callable[[Path], None]:
    """A command line, run in this process, in the copy."""

    def run(folder: Path) -> None:
        from headcount.cli.main import main

        here, argv = Path.cwd(), sys.argv
        os.chdir(folder)
        sys.argv = ["headcount", *line.split()]
        try:
            main()
        finally:
            os.chdir(here)
            sys.argv = argv

    return run


def _page(folder: Path) -> None:
    from headcount.experiments.records import load_records
    from headcount.reporting.report import write_report

    if records := load_records(folder):
        write_report(records, folder / "page.html")


def _table(folder: Path) -> None:
    from headcount.cli.printing import study_csv, study_latex
    from headcount.experiments.records import load_records
    from headcount.experiments.scores import rows

    study_csv(rows(load_records(folder)))
    study_latex(rows(load_records(folder)))


def _paper(folder: Path) -> None:
    from headcount.experiments import paper
    from headcount.reporting.paper_page import render_paper

    render_paper(paper.SCALES["smoke"], paper.records_by_recipe(folder))


def _resume(folder: Path) -> None:
    from headcount.experiments.run import run

    run(RESUMED, folder, device="cpu")


def _fit(folder: Path) -> None:
    from headcount import fit, read

    fit(read(folder / "t.csv"), "forest,count", folds=2, epochs=2, device="cpu", work=folder / "work")


def _source(folder: Path) -> None:
    from headcount.datasets.cache import read_source

    images, labels, metadata = read_source(folder / "name")
    list(metadata["classes"]), str(metadata["checksum"] + metadata["note"])
    assert images.shape == (metadata["count"], *metadata["shape"])
    assert len(labels) == metadata["count"]


def _images(folder: Path) -> None:
    from headcount import read

    read(folder / "images", labels=folder / "labels.csv", cache=folder / "cache")


def _cache_images(folder: Path) -> None:
    shutil.rmtree(folder / "cache")  # its key has the path of the specimen
    _images(folder)


def _estimator(folder: Path) -> None:
    from headcount import MajorityClassifier

    MajorityClassifier.load(folder / "model")


def _weights(folder: Path) -> None:
    from headcount.models.serialization import load_weights

    load_weights(folder / "model.safetensors")


PREDICT = command("predict model t.csv --out out.csv --bags bags.csv --device cpu")
READERS: dict[str, Reader] = {
    "record, report": Reader("study", "????????????????.json", _page),
    "record, table": Reader("study", "????????????????.json", _table),
    "record, paper": Reader("paper", "????????????????.json", _paper),
    "arrays of a record, report": Reader("needed", "????????????????.npz", _page),
    "arrays of a record, MPEM": Reader("needed", "????????????????.npz", lambda folder: _mpem(folder)),
    "record, report command": Reader("study", "????????????????.json", command("report .")),
    "record, paper command": Reader("paper", "????????????????.json", command("paper --scale smoke --out . --missing")),
    "checkpoint of a run": Reader("resume", "running/*/checkpoint.safetensors", _resume),
    "plan of a fit": Reader("fit", "work/*/plan.json", _fit),
    "fold of a fit": Reader("fit", "work/*/*.npz", _fit),
    "source.json": Reader("source", "name/source.json", _source),
    "images of a source": Reader("source", "name/images.npy", _source),
    "labels of a source": Reader("source", "name/labels.npy", _source),
    "cached images": Reader("images", "cache/*.npy", _images, _cache_images),
    "log of cached images": Reader("images", "cache/*.jsonl", _images, _cache_images),
    "key of an audit": Reader("forest", "sheet.key.json", command("evaluate model t.csv --audit sheet.csv --device cpu")),
    "model.json of a forest": Reader("forest", "model/model.json", PREDICT),
    "arrays of a forest": Reader("forest", "model/model.safetensors", PREDICT),
    "model.json, estimator": Reader("forest", "model/model.json", _estimator),
    "model.json of a network": Reader("network", "model/model.json", PREDICT),
    "arrays of a network": Reader("network", "model/model.safetensors", PREDICT),
    "weights": Reader("weights", "model.safetensors", _weights),
}
RESUMED = TINY.replace(epochs=6)


def _mpem(folder: Path) -> None:
    from headcount.experiments.run import run

    run(TINY.replace(removal=0.5), folder, device="cpu")


class _Stop(Exception):
    pass


def make_specimens(folder: Path) -> None:
    """One valid file of each kind, as the commands write them."""
    from PIL import Image

    from headcount import fit, grid, read, study
    from headcount.datasets.cache import write_source
    from headcount.experiments import paper
    from headcount.selection.methods import Method

    recipes = [TINY, TINY.replace(fold=1), TINY.replace(removal=0.5), TINY.replace(head="output_mean")]
    assert not study(recipes, folder / "study", device="cpu").failed
    assert not study([TINY], folder / "needed", device="cpu").failed
    cells = grid(paper.SCALES["smoke"].base.replace(source="digits", epochs=2), fold=(0,), removal=(0.0, 0.5))
    assert not study(cells, folder / "paper", device="cpu").failed

    def stop(progress: Any) -> None:
        if progress.epoch == 3:
            raise _Stop

    study([RESUMED], folder / "resume", device="cpu", checkpoint_seconds=0, on_run_progress=stop)
    for failure in (folder / "resume").glob("*.failed.json"):
        failure.unlink()

    g = np.random.default_rng(0)
    lines = [f"b{b},{'no' if b % 2 else 'yes'},{g.normal(b % 2):.3f},{g.normal():.3f}" for b in range(12) for _ in range(6)]
    for name in ("forest", "network", "fit"):
        (folder / name).mkdir()
        (folder / name / "t.csv").write_text("\n".join(["bag,label,u,v", *lines, ""]))
    data = read(folder / "fit" / "t.csv")
    fit(data, "forest", folds=2).save(folder / "forest" / "model")
    fit(data, "count", folds=2, epochs=2, device="cpu").save(folder / "network" / "model")
    with contextlib.suppress(SystemExit):
        command("audit model t.csv --out sheet.csv --count 8 --device cpu")(folder / "forest")
    sheet = (folder / "forest" / "sheet.csv").read_text().splitlines()
    (folder / "forest" / "sheet.csv").write_text("\n".join([sheet[0], *(f"{line}yes" for line in sheet[1:]), ""]))
    (folder / "weights").mkdir()
    shutil.copy(folder / "network" / "model" / "model.safetensors", folder / "weights")

    usual, calls = Method.fit, []

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("work") is not None:
            calls.append(self.name)
        if len(calls) == 4:  # the second fold of the network
            usual(self, *args, **options)
            raise _Stop
        return usual(self, *args, **options)

    Method.fit = interrupted  # ty: ignore[invalid-assignment]
    with contextlib.suppress(_Stop):
        fit(data, "forest,count", folds=2, epochs=2, device="cpu", work=folder / "fit" / "work")
    Method.fit = usual  # ty: ignore[invalid-assignment]

    images = g.integers(0, 255, (20, 4, 4, 3)).astype(np.uint8)
    write_source(folder / "source" / "name", images, np.arange(20) % 2, ("a", "b"), "a note")
    for b in range(4):
        (folder / "images" / "images" / f"b{b}").mkdir(parents=True)
        for i in range(3):
            Image.fromarray(images[3 * b + i]).save(folder / "images" / "images" / f"b{b}" / f"{i}.png")
    (folder / "images" / "labels.csv").write_text("bag,label\nb0,x\nb1,y\nb2,x\nb3,y\n")
    _images(folder / "images")


# -- the attack --------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    reader: str
    change: str
    file: Path  # the specimen
    spoil: Bytes

    def __str__(self) -> str:
        return f"{self.reader} | {self.change}"


def all_cases(specimens: Path) -> list[Case]:
    cases = []
    for name, reader in READERS.items():
        file = min((specimens / reader.folder).glob(reader.pattern))
        changes = WHOLE_FILE | WHOLE_ARRAYS.get(file.suffix, {})
        if file.suffix in (".json", ".jsonl"):
            changes |= WHOLE_JSON
        if file.suffix == ".json":
            changes |= dict(json_changes(file))
        elif file.suffix != ".jsonl":
            changes |= dict(array_changes(file))
        cases += [Case(name, change, file, spoil) for change, spoil in changes.items()]
    return cases


def sample_cases(cases: list[Case], each: int, seed: int) -> list[Case]:
    """The same number of cases for every reader."""
    generator = random.Random(seed)
    by_reader: dict[str, list[Case]] = {}
    for case in cases:
        by_reader.setdefault(case.reader, []).append(case)
    return [c for group in by_reader.values() for c in generator.sample(group, min(each, len(group)))]


def attempt(case: Case, specimens: Path) -> tuple[str, str]:
    """What became of it, and the message: refused, left out (with a warning) or accepted; or a failure. The file is read in a
    process of its own, since a signal or too much memory would end this one."""
    reader = READERS[case.reader]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / reader.folder
        shutil.copytree(specimens / reader.folder, folder)
        reader.prepare(folder)
        case.spoil(min(folder.glob(reader.pattern)))
        source, sink = os.pipe()
        if not (child := os.fork()):
            _report(reader.read, folder, sink)
        os.close(sink)
        with open(source, encoding="utf-8") as f:
            outcome, _, message = f.read().partition("\0")
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return "hang" if code == -signal.SIGALRM else "killed", f"exit status {code}"
        if outcome == "refused" and any(p.suffix in (".part", ".old") for p in folder.rglob("*")):
            outcome = "leftover"
    return outcome, message


def _report(read: Callable[[Path], None], folder: Path, sink: int) -> None:
    """In the child: read, and write what became of it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 4 * MEMORY, resource.RLIM_INFINITY))
    before, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, message = _outcome(read, folder)
    seconds = time.process_time() - before
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    if outcome in ("refused", "left out") and (seconds > SECONDS or memory > MEMORY):
        outcome, message = "time" if seconds > SECONDS else "memory", f"{seconds:.1f} s, {memory >> 20} MB: {message}"
    os.write(sink, f"{outcome}\0{message[:2000]}".encode("utf-8", "replace"))
    os._exit(0)


def _outcome(read: Callable[[Path], None], folder: Path) -> tuple[str, str]:
    outcome, message, notes, err = "accepted", "", [], io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as notes,
        ):
            warnings.simplefilter("always")
            read(folder)
    except HeadcountError as e:
        return "refused", str(e)
    except SystemExit as e:
        message = (err.getvalue().splitlines() or [""])[-1]
        if e.code == 2:
            return "refused" if message.startswith("headcount: ") else "lines", message
        outcome = "traceback" if e.code else outcome
    except MemoryError as e:
        return "memory", str(e)
    except BaseException as e:
        return "traceback", f"{type(e).__name__}: {e}"
    left_out = [str(n.message) for n in notes if n.category.__name__ == "DamagedFileWarning"]
    return ("left out", left_out[0]) if outcome == "accepted" and left_out else (outcome, message)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--each", type=int, default=10, help="cases of each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", help="only readers whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="show every message")
    args = parser.parse_args()
    table: dict[str, Counter[str]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            make_specimens(specimens := Path(temporary) / "specimens")
        cases = [c for c in all_cases(specimens) if not args.reader or args.reader in c.reader]
        for case in cases if args.all else sample_cases(cases, args.each, args.seed):
            outcome, message = attempt(case, specimens)
            table.setdefault(case.reader, Counter())[outcome] += 1
            if args.verbose or outcome in FAILURES:
                print(f"{outcome}: {case}: {' '.join(message.split())[:160]}", flush=True)
    outcomes = ("refused", "left out", "accepted", *FAILURES)
    print("\n| reader | cases | " + " | ".join(outcomes) + " |\n" + "|---" * (len(outcomes) + 2) + "|")
    total = sum(table.values(), Counter())
    for name, counts in [*table.items(), ("all", total)]:
        print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[o]) for o in outcomes) + " |")
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(total[o] for o in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
