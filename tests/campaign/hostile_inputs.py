"""Hostile files for every reader: valid files of every kind, changed at random, and things that are no files.

Whatever comes in, the command succeeds or ends in one line and exit code 2, within bounded time and memory.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import fork_server
import numpy as np
from commands import TINY, Command, remove

SECONDS, MEMORY = 5.0, 500 << 20  # of the processor; bytes


class Target(NamedTuple):
    """A command that reads ``file``, a copy of which is changed; ``before`` are files and folders copied from the inputs."""

    line: str
    before: dict[str, str]
    file: str


PEOPLE, SLIDES = {"people.csv": "table/people.csv"}, {"slides": "slides/slides", "model": "slides/model"}
MODEL = {"model": "table/model", **PEOPLE}
STUDY = f"run {TINY} --fold 0 --head count --removal 0.5 --epochs 2 --out records"
TARGETS = {
    "table": Target("check people.csv", PEOPLE, "people.csv"),
    "table-skip": Target("check people.csv --skip-bad", PEOPLE, "people.csv"),
    "table-predict": Target("predict model people.csv --out p.csv", MODEL, "people.csv"),
    "parquet": Target("check people.parquet", {"people.parquet": "people.parquet"}, "people.parquet"),
    "gzip": Target("check people.csv.gz", {"people.csv.gz": "people.csv.gz"}, "people.csv.gz"),
    "labels": Target("check images", {"images": "images/images"}, "images/labels.csv"),
    "image": Target("check images", {"images": "images/images"}, "images/bag1/1.png"),
    "image-skip": Target("check images --skip-bad", {"images": "images/images"}, "images/bag1/1.png"),
    "arrays": Target("check arrays.npz", {"arrays.npz": "arrays.npz"}, "arrays.npz"),
    "array": Target("check array.npy --labels labels.csv", {"array.npy": "array.npy", "labels.csv": "array.csv"}, "array.npy"),
    "slide": Target("check slides", {"slides": "slides/slides"}, "slides/TCGA.1.h5"),
    "slide-predict": Target("predict model slides --out p.csv --geojson geo", SLIDES, "slides/TCGA.1.h5"),
    "tensor": Target("check slides", {"slides": "tensors"}, "slides/TCGA.1.pt"),
    "flat-log": Target("predict model slides --out p.csv --cache cache", {**SLIDES, "cache": "flat"}, "cache/*.jsonl"),
    "flat-array": Target("predict model slides --out p.csv --cache cache", {**SLIDES, "cache": "flat"}, "cache/*.npy"),
    "model-json": Target("predict model people.csv --out p.csv", MODEL, "model/model.json"),
    "model-weights": Target("predict model people.csv --out p.csv", MODEL, "model/model.safetensors"),
    "network-json": Target("predict model slides --out p.csv", SLIDES, "model/model.json"),
    "text-json": Target("predict model texts.csv --out p.csv", {"model": "text/model", "texts.csv": "text/texts.csv"}, "model/model.json"),
    "table-shares": Target("table model people.csv --by colour --out t.csv", MODEL, "people.csv"),
    "model-table": Target("table model people.csv --by colour --out t.csv", MODEL, "model/model.json"),
    "private-json": Target("predict model people.csv --bags b.csv", {"model": "private", "people.csv": "table/people.csv"}, "model/model.json"),
    "polygons": Target("table model people.csv --map m.geojson --polygons areas.geojson --polygon-id name", {**MODEL, "areas.geojson": "areas.geojson"}, "areas.geojson"),
    "benchmark-record": Target("benchmark --task task.py --methods commonest --seeds 1 --out benchmark", {"task.py": "task.py", "benchmark": "benchmark"}, "benchmark/task/*.json"),
    "audit-key": Target("evaluate model people.csv --audit sheet.csv", {**MODEL, "sheet.csv": "sheet.csv", "sheet.key.json": "sheet.key.json"}, "sheet.key.json"),
    "audit-sheet": Target("evaluate model people.csv --audit sheet.csv", {**MODEL, "sheet.csv": "sheet.csv", "sheet.key.json": "sheet.key.json"}, "sheet.csv"),
    "record": Target("report records --csv", {"records": "records"}, "records/*.json"),
    "record-page": Target("report records", {"records": "records"}, "records/*.json"),
    "record-arrays": Target("report records", {"records": "records"}, "records/*.npz"),
    "record-paper": Target("paper table5 --scale smoke --out records --csv", {"records": "records"}, "records/*.json"),
    "record-study": Target(f"study {TINY} --fold 0 --head count --epochs 2 --out records", {"records": "records"}, "records/*.json"),
    "votes": Target(STUDY, {"records": "votes"}, "records/*.npz"),
    "checkpoint": Target(STUDY, {"records": "halfway"}, "records/running/*/checkpoint.safetensors"),
    "losses": Target(STUDY, {"records": "halfway"}, "records/running/*/metrics.jsonl"),
    "source": Target("bags --source noise.npz --bag-size 4 --train-bags 4 --valid-bags 2 --test-bags 2", {"noise.npz": "noise.npz"}, "noise.npz"),
    "import-file": Target("data import path path.npz", {"path.npz": "path.npz"}, "path.npz"),
    "cached-json": Target("bags --source path --bag-size 2 --train-bags 4 --valid-bags 2 --test-bags 2", {"cache": "cache"}, "cache/path/source.json"),
    "cached-array": Target("bags --source path --bag-size 2 --train-bags 4 --valid-bags 2 --test-bags 2", {"cache": "cache"}, "cache/path/images.npy"),
    "fit-plan": Target("fit people.csv --out model --method logistic --folds 2", {**PEOPLE, "model.work": "model.work"}, "model.work/*/plan.json"),
    "fit-fold": Target("fit people.csv --out model --method logistic --folds 2", {**PEOPLE, "model.work": "model.work"}, "model.work/*/*.npz"),
}  # fmt: skip
NAMES = tuple(TARGETS)

# -- changes: each takes a path and a generator -----------------------------------------------------------------------------

NUMBERS = [0, -1, 1, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**70, 1e308, 1e-320, 0.5, 10**6]
VALUES: list[Any] = [None, True, False, "", "x", "nan", "x" * 5000, "a\nb\x00\x1b[31m", "\ud800", "../../etc/passwd", "日本 🎈", [], {}, [[]], [None], {"a": 1},
                     [1] * 1000, ["a"] * 70, float("nan"), float("inf"), *NUMBERS]  # fmt: skip
WORDS = ["", " ", "nan", "inf", "-1", "1e999", "99999999999999999999", "NULL", '"', '""', ",", "\t", "\r", "\n\n", "\0", "\ufeff", "é", "\udcff", "=1+1",
         "<b>", "{{7*7}}", "$x", "x" * 70_000, "../..", "/dev/zero", "0x10", "１", "true"]  # fmt: skip


def change_bytes(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        size = len(raw)
        at, length = rng.randrange(size + 1), rng.choice([1, 1, 2, 4, 8, 100])
        match rng.randrange(7):
            case 0 if size:
                raw[min(at, size - 1)] ^= 1 << rng.randrange(8)
            case 1:
                raw[at : at + length] = rng.randbytes(length)
            case 2:
                del raw[at : at + length]
            case 3:
                raw[at:at] = rng.randbytes(length)
            case 4:
                raw[at:at] = raw[at : at + 10 * length]
            case 5:
                raw[at : at + 8] = struct.pack(rng.choice("<>") + "q", rng.choice([-1, 0, 1 << 20, 1 << 40, (1 << 63) - 1]))
            case 6:
                raw[at : at + 4] = struct.pack(
                    rng.choice("<>") + "I", rng.choice([0, 1, 1 << 16, (1 << 31) - 1, (1 << 32) - 1])
                )
    path.write_bytes(raw)


def cut(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: rng.choice([0, 1, len(raw) // 2, max(len(raw) - 1, 0), rng.randrange(len(raw) + 1)])])


def change_lines(path: Path, rng: random.Random) -> None:
    """Cells, lines and columns of a text."""
    lines = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.choice([0, rng.randrange(len(lines))])
        cells = lines[at].split(",")
        cell = rng.randrange(len(cells))
        match rng.randrange(6):
            case 0 | 1:
                cells[cell] = rng.choice([*WORDS, *cells])
            case 2:
                cells[cell:cell] = [rng.choice(WORDS)] * rng.choice([1, 2, 500])
            case 3:
                del cells[cell]
            case 4:
                lines[at:at] = lines[at : at + 1] * rng.choice([1, 3])
            case 5:
                cells = [] if rng.random() < 0.5 else [rng.choice(cells) for _ in cells]
        lines[at] = ",".join(cells)
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace"))


def change_json(path: Path, rng: random.Random) -> None:
    """Nodes of the tree: other values and types, missing and new keys, long lists, deep nesting."""
    text = path.read_text("utf-8")
    path.write_text(hostile_json(text, rng), "utf-8", "surrogatepass")


def hostile_json(text: str, rng: random.Random) -> str:
    try:
        data = json.loads(text.split("\n")[0] if text.count("\n{") else text)
    except ValueError:
        data = {}
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        nodes = [
            (holder, key) for holder in containers(data) for key in (holder if isinstance(holder, dict) else range(len(holder)))
        ]
        if not nodes:
            return json.dumps(rng.choice(VALUES))
        holder, key = rng.choice(nodes)
        other = rng.choice(nodes)
        match rng.randrange(8):
            case 0 | 1 | 2:
                holder[key] = rng.choice(VALUES)
            case 3:
                holder.pop(key)
            case 4:
                holder[key] = (
                    json.loads(json.dumps(other[0][other[1]]))
                    if other[1] in range(len(other[0])) or isinstance(other[0], dict)
                    else None
                )
            case 5 if isinstance(holder[key], (int, float)):
                holder[key] = rng.choice(
                    [-holder[key], holder[key] + 1, holder[key] * 10**6, float(holder[key]), str(holder[key])]
                )
            case 6 if isinstance(holder[key], list):
                holder[key] = holder[key] * rng.choice([0, 2, 100]) + [rng.choice(VALUES)] * rng.randrange(2)
            case 7 if isinstance(holder, dict):
                holder[rng.choice(["", "x", "format", "__class__", "日本"])] = rng.choice(VALUES)
    text = json.dumps(data)
    if rng.random() < 0.05:
        depth = rng.choice([900, 100_000])
        text = "[" * depth + "]" * depth if rng.random() < 0.5 else '{"a":' * depth + text + "}" * depth
    return text


def containers(data: Any) -> Iterator[Any]:
    if isinstance(data, (dict, list)) and data:
        yield data
        for part in data.values() if isinstance(data, dict) else data:
            yield from containers(part)


def hostile_array(a: np.ndarray, rng: random.Random) -> np.ndarray:
    a = np.array(a)
    match rng.randrange(8):
        case 0:
            return a.astype(
                rng.choice(
                    ["float32", "float64", "int8", "int64", "uint8", "bool", "complex64", "S3", "U2", ">f4", "float16", "V4"]
                )
            )
        case 1:
            return a[: len(a) // 2] if a.ndim else a
        case 2:
            return a.reshape(rng.choice([(-1,), (1, -1), (-1, 1), (*a.shape, 1), (1, *a.shape)]))
        case 3:
            return np.zeros(rng.choice([(), (0,), (0, 0), (1,), (3, 0, 2), (1,) * 20]), a.dtype)
        case 4 if a.size and a.dtype.kind in "iu":
            a.flat[rng.randrange(a.size)] = rng.choice([0, np.iinfo(a.dtype).max, np.iinfo(a.dtype).min])
        case 5 if a.size and a.dtype.kind == "f":
            a.flat[rng.randrange(a.size)] = rng.choice([np.nan, np.inf, -np.inf, 3e38, -1.0])
        case 6:
            return np.concatenate([a, a]) if a.ndim else a
        case 7:
            return np.random.default_rng(0).permutation(a) if a.ndim else a
    return a


def hostile_npy(a: np.ndarray, rng: random.Random) -> bytes:
    """An .npy file: of a changed array, of objects, or with a header that declares something else."""
    buffer = io.BytesIO()
    choice = rng.random()
    if choice < 0.7:
        np.save(buffer, hostile_array(a, rng), allow_pickle=False)
    elif choice < 0.8:
        np.save(buffer, np.array([{"a": 1}, os.system], object), allow_pickle=True)
    else:
        shape = rng.choice([(1 << 40,), (-1,), (1 << 62, 4), (10**9, *a.shape[1:]), (), (0,), a.shape[::-1]])
        fields = {
            "descr": rng.choice([a.dtype.str, "|O", "<f8", "|V100000000", "<U1000000"]),
            "fortran_order": rng.random() < 0.5,
            "shape": shape,
        }
        np.lib.format._write_array_header(buffer, fields, (2, 0))
        buffer.write(np.ascontiguousarray(a).tobytes()[: 1 << 16])
    return buffer.getvalue()


def change_npy(path: Path, rng: random.Random) -> None:
    path.write_bytes(hostile_npy(np.load(path), rng))


def change_npz(path: Path, rng: random.Random) -> None:
    with np.load(path) as arrays:
        members = dict(arrays)
    with zipfile.ZipFile(path, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        victims = rng.sample(sorted(members), min(len(members), rng.choice([1, 1, 2])))
        for name, a in members.items():
            buffer = io.BytesIO()
            np.save(buffer, a)
            raw = hostile_npy(a, rng) if name in victims else buffer.getvalue()
            match rng.randrange(12) if name in victims else 11:
                case 0:
                    continue
                case 1:
                    name = rng.choice(["", "x", "../x", "/tmp/x", "a/b", name.upper()])
                case 2:
                    header = io.BytesIO()
                    fields = {"descr": "|u1", "fortran_order": False, "shape": (300_000_000,)}
                    np.lib.format._write_array_header(header, fields, (2, 0))
                    raw = header.getvalue() + bytes(300_000_000)  # a bomb: 0.3 MB in the file
                    archive.writestr(zipfile.ZipInfo(f"{name}.npy"), raw, zipfile.ZIP_DEFLATED, 1)
                    continue
            archive.writestr(f"{name}.npy", raw)


def change_safetensors(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = raw[8 : 8 + length].decode(), raw[8 + length :]
    if rng.random() < 0.3:
        at = rng.randrange(len(body))
        body = body[:at] + struct.pack("<f", rng.choice([float("nan"), float("inf"), 1e38, -1.0])) + body[at + 4 :]
    else:
        data = json.loads(header)
        inner = data.get("__metadata__", {})
        if inner and rng.random() < 0.5:  # the JSON inside the JSON
            key = rng.choice(sorted(inner))
            inner[key] = hostile_json(inner[key], rng)
            header = json.dumps(data)
        else:
            header = hostile_json(header, rng)
    encoded = header.encode("utf-8", "surrogatepass")
    length = rng.choice([len(encoded)] * 9 + [1 << 60])
    path.write_bytes(struct.pack("<Q", length) + encoded + body)


def change_h5(path: Path, rng: random.Random) -> None:
    import h5py

    with h5py.File(path, "r") as f:
        arrays = {name: f[name][()] for name in f}
        attributes = {name: dict(f[name].attrs) for name in f}
    with h5py.File(path, "w") as f:
        for name, a in arrays.items():
            match rng.randrange(10):
                case 0:
                    continue
                case 1:
                    f.create_group(name)
                    continue
                case 2:
                    f.create_dataset(name, shape=(1 << 34, *a.shape[1:]), dtype=a.dtype, chunks=True)  # takes no room
                    continue
                case 3:
                    f[name] = (
                        h5py.SoftLink(rng.choice(["/nowhere", f"/{name}"]))
                        if rng.random() < 0.5
                        else h5py.ExternalLink("x.h5", name)
                    )
                    continue
                case 4:
                    f[name] = np.array(["x"] * len(a), dtype=h5py.string_dtype())
                    continue
            changed = hostile_array(a, rng) if rng.random() < 0.7 else a
            f[name] = changed.astype("S3") if changed.dtype.kind == "U" else changed
            for key, value in attributes[name].items():
                f[name].attrs[key] = rng.choice([value, value, 0, -1, float("nan"), "x", 1e300, [1.0, 2.0]])


def replace_file(path: Path, rng: random.Random) -> None:
    """Something that is no regular file, or an empty or endless one."""
    path.unlink()
    match rng.randrange(9):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to(path.name)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to("nowhere")
        case 5:
            path.touch()
        case 6:
            with path.open("wb") as f:
                f.truncate(1 << 36)  # sparse
        case 7:
            path.symlink_to("/proc/self/mem")
        case 8:
            path.write_bytes(
                rng.choice(
                    [
                        b"\x89PNG\r\n\x1a\n",
                        b"PK\x03\x04",
                        b"\x93NUMPY",
                        b"\x89HDF\r\n\x1a\n",
                        b"PAR1",
                        b"\x1f\x8b",
                        b"{",
                        b"[" * 10**6,
                    ]
                )
            )


def changes_for(path: Path) -> list[Callable[[Path, random.Random], None]]:
    by_ending = {".json": change_json, ".geojson": change_json, ".npy": change_npy, ".npz": change_npz, ".safetensors": change_safetensors, ".h5": change_h5,
                 ".csv": change_lines, ".jsonl": change_lines}  # fmt: skip
    special = by_ending.get(path.suffix)
    return [change_bytes, cut, *([special] * 5 if special else [change_bytes] * 3)]


# -- the cases --------------------------------------------------------------------------------------------------------------


def make_inputs(inputs: Path, run: Callable[[list[str], Path], object]) -> None:
    """What the targets need beside the inputs of the commands."""
    import gzip

    import pyarrow.csv
    import pyarrow.parquet

    import read_factory

    people = inputs / "table/people.csv"
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(people), inputs / "people.parquet")
    (inputs / "people.csv.gz").write_bytes(gzip.compress(people.read_bytes()))
    g = np.random.default_rng(0)
    np.save(inputs / "array.npy", g.normal(size=(6, 4, 3)).astype(np.float32))
    (inputs / "array.csv").write_text("bag,label\n" + "".join(f"{b},{'xy'[b % 2]}\n" for b in range(6)))
    arrays = {
        "features": g.normal(size=(24, 4)).astype(np.float32),
        "bag": np.repeat(np.arange(6), 4),
        "labels": np.arange(6) % 2,
    }
    np.savez(inputs / "arrays.npz", **arrays, weight=np.ones(24))
    read_factory.slides(inputs / "tensors")
    for i in range(4):
        (inputs / f"tensors/TCGA.{i}.h5").unlink()
        read_factory.slide(inputs / f"tensors/TCGA.{i}.pt", rows=4 + i, seed=i, layout="pt")
    shutil.copytree(inputs / "records", inputs / "votes")
    for path in (inputs / "votes").glob("*.json"):  # only the runs that others need
        if json.loads(path.read_text())["recipe"]["removal"]:
            path.unlink()
            path.with_suffix(".npz").unlink()
    run(Command("predict IN/slides/model IN/slides/slides --out p.csv --cache flat").argv(inputs), inputs)
    square = [[[0, 0], [0, 1], [1, 1], [0, 0]]]
    geometry = {"type": "Polygon", "coordinates": square}
    areas = [{"type": "Feature", "geometry": geometry, "properties": {"name": f"p{b}"}} for b in range(8)]
    (inputs / "areas.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": areas}))
    # a run and a fit that were killed halfway: at the last checkpoint, and after the first fold
    for result, line, copied, moment in (
        ("halfway", STUDY, {"records": "votes"}, "rename records/running/*checkpoint.safetensors"),
        ("model.work", TARGETS["fit-fold"].line, PEOPLE, "rename model.work/*.npz"),
    ):
        work, command = inputs / "work", Command(line, copied)
        command.prepare(inputs, work)
        trace = [call for _, call in fork_server.run(command.argv(inputs), work, work, trace=True).trace]
        n = max(n for n, call in enumerate(trace, 1) if fnmatch(call.replace(" /", " "), moment))
        command.prepare(inputs, work)
        fork_server.run(command.argv(inputs), work, work, fork_server.Fault(n + 1, -signal.SIGKILL))
        shutil.move(work / ("records" if result == "halfway" else result), inputs / result)
    remove(work)


def make_case(name: str, seed: str, base: Path, work: Path) -> tuple[list[str], Path, list[str]]:
    """Put the files of a case in place: its command, the changed file, and the names of the changes."""
    target, rng = TARGETS[name], random.Random(f"{seed} {name}")
    command = Command(target.line, target.before)
    command.prepare(base / "inputs", work)
    path = rng.choice(sorted(work.glob(target.file)))
    names = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        change = replace_file if not names and rng.random() < 0.04 else rng.choice(changes_for(path))
        names.append(change.__name__)
        try:
            change(path, rng)
        except Exception:  # it is no longer of this kind
            change_bytes(path, rng)
        if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 30:
            break
    return command.argv(base / "inputs"), path, names


def check(name: str, seed: str, base: Path, work: Path) -> dict[str, Any]:
    argv, _, changes = make_case(name, seed, base, work)
    outcome = fork_server.run(argv, work, base, limit=60, frozen=False)
    problems = [outcome.complaint] if outcome.complaint else []
    if outcome.seconds > SECONDS:
        problems.append(f"{outcome.seconds:.0f} s of the processor")
    if outcome.memory > MEMORY:
        problems.append(f"{outcome.memory >> 20} MB of memory")
    lines = [line for line in outcome.err.splitlines() if line.startswith("headcount: ")]
    return {"case": f"{name}:{seed}", "group": name, "kind": "+".join(dict.fromkeys(changes)), "struck": True, "problems": problems,
            "line": (lines or [""])[-1], "code": outcome.code}  # fmt: skip


def search(name: str, count: int, base: Path, work: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Check ``count`` random inputs to a target, which without a change succeeds."""
    target = TARGETS[name]
    command = Command(target.line, target.before)
    command.prepare(base / "inputs", work)
    undisturbed = fork_server.run(command.argv(base / "inputs"), work, base, trace=True)
    assert undisturbed.code == 0, f"{name} fails undisturbed: {undisturbed.err}"
    fork_server.learn(undisturbed.modules)
    for k in range(count):
        yield check(name, f"{seed}.{k}", base, work)


def uncopied(path: Path) -> bool:
    """A pipe, or a sparse file of 64 GB."""
    return not path.is_symlink() and (path.is_fifo() or path.stat().st_size > 1 << 30)


def repeat(text: str, base: Path, work: Path) -> dict[str, Any]:
    """Check one case, and keep its files to look at."""
    name, seed = text.split(":")
    result = check(name, seed, base, work)
    argv, path, changes = make_case(name, seed, base, work)
    kept = Path("campaign-case").resolve()
    remove(kept)
    shutil.copytree(
        work,
        kept,
        symlinks=True,
        ignore_dangling_symlinks=True,
        ignore=lambda folder, names: [n for n in names if uncopied(Path(folder) / n)],
    )
    return {"details": f"cd {kept} && headcount {' '.join(argv)}\n{', '.join(changes)} in {path.relative_to(work)}", **result}
