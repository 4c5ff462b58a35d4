"""Files that declare far more than they hold are refused before they are read; errors of the operating system are one line."""

from __future__ import annotations

import errno
import gzip
import io
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from headcount import fit, read
from headcount.errors import HeadcountError

ROWS = "bag,label,u,v\n" + "".join(f"{b},{'no' if b < 2 else 'yes'},{b + i},{i * i}\n" for b in range(4) for i in range(3))


def _zip_zeros(path: Path, name: str, head: bytes, n_bytes: int) -> None:
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as z, z.open(name, "w", force_zip64=True) as f:
        f.write(head)
        for _ in range(n_bytes >> 24):
            f.write(bytes(1 << 24))


def _npz(folder: Path) -> Path:
    head, sizes = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 16, 1 << 10)})
    np.save(sizes, np.full(1 << 6, 1 << 10))
    _zip_zeros(folder / "bomb.npz", "features.npy", head.getvalue(), 1 << 28)
    with zipfile.ZipFile(folder / "bomb.npz", "a") as z:
        z.writestr("sizes.npy", sizes.getvalue())
    return folder / "bomb.npz"


def _image(folder: Path) -> Path:
    (folder / "images" / "a").mkdir(parents=True)
    Image.new("RGB", (8000, 8000)).save(folder / "images" / "a" / "x.png", compress_level=1)
    return folder / "images"


def _hdf5(folder: Path) -> Path:
    (folder / "h5").mkdir()
    with h5py.File(folder / "h5" / "s.h5", "w") as f:
        f.create_dataset("features", data=np.zeros((1 << 14, 1 << 12), np.float32), compression="gzip", compression_opts=1)
    return folder / "h5"


def _tensor(folder: Path) -> Path:
    (folder / "pt").mkdir()
    torch.save(torch.zeros(1, 1).expand(1 << 20, 1 << 10), folder / "pt" / "s.pt")  # one number, a billion times
    return folder / "pt"


def _compressed_tensor(folder: Path) -> Path:
    (folder / "zipped").mkdir()
    _zip_zeros(folder / "zipped" / "s.pt", "archive/data/0", b"", 1 << 28)
    return folder / "zipped"


def _parquet_numbers(folder: Path) -> Path:
    with pq.ParquetWriter(folder / "numbers.parquet", pa.schema([("bag", pa.int64()), ("x", pa.float64())])) as writer:
        for _ in range(16):
            writer.write_table(pa.table({"bag": np.zeros(1 << 20, int), "x": np.zeros(1 << 20)}))
    return folder / "numbers.parquet"


def _parquet_texts(folder: Path) -> Path:
    text = pa.DictionaryArray.from_arrays(np.zeros(100, np.int32), pa.array(["y" * 2_000_000])).cast(pa.large_string())
    pq.write_table(pa.table({"bag": ["a"] * 100, "text": text}), folder / "texts.parquet", dictionary_pagesize_limit=1 << 28)
    return folder / "texts.parquet"


def _parquet_lists(folder: Path) -> Path:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1 << 26, np.float32)), 1 << 16).cast(pa.list_(pa.float32()))
    pq.write_table(pa.table({"bag": ["a"] * (1 << 10), "v": lists}), folder / "lists.parquet", compression="zstd")
    return folder / "lists.parquet"


def _csv(folder: Path) -> Path:
    with gzip.open(folder / "rows.csv.gz", "wb", 1) as f:
        f.write(b"bag,label,x\n")
        for _ in range(256):
            f.write(b"a,no,1\n" * 150_000)
    return folder / "rows.csv.gz"


BOMBS = [_npz, _image, _hdf5, _tensor, _compressed_tensor, _parquet_numbers, _parquet_texts, _parquet_lists, _csv]
READ_ALL = """
import resource, sys, time
import h5py, PIL.Image, pyarrow.parquet, torch
from headcount import HeadcountError, read
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
for path in sys.argv[1:]:
    start = time.process_time()
    try:
        read(path, need_labels=False, classes=["no", "yes"])
    except HeadcountError as e:
        print(path, round(time.process_time() - start, 2), (peak() - before) // 1024, e, sep="|")
"""


def test_compressed_bombs_cost_next_to_nothing(tmp_path):
    paths = [str(bomb(tmp_path)) for bomb in BOMBS]
    assert all(sum(f.stat().st_size for f in (p.rglob("*") if p.is_dir() else [p])) < 12e6 for p in map(Path, paths))
    done = subprocess.run([sys.executable, "-c", READ_ALL, *paths], capture_output=True, text=True, check=True)
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [path for path, *_ in lines] == paths
    for path, seconds, megabytes, message in lines:
        assert float(seconds) < 5, path
        assert int(megabytes) < 500, path
        assert "set HEADCOUNT_MAX_GB" in message, message
        assert path in message


def test_the_command_line_says_so_in_one_line(tmp_path, run_cli):
    code, _, error = run_cli("check", _parquet_numbers(tmp_path))
    assert code == 2
    assert len(error.splitlines()) == 1
    assert "numbers.parquet declares 0.27 GB in" in error


def test_one_setting_allows_more_or_less(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez(path, features=np.random.default_rng(0).normal(size=(4, 2)), sizes=[2, 2], labels=["a", "b"])
    _zip_zeros(path, "unused.npy", b"", 1 << 28)
    with pytest.raises(HeadcountError, match=r"a\.npz declares 0\.27 GB"):
        read(path)
    monkeypatch.setenv("HEADCOUNT_MAX_GB", "0.5")
    assert len(read(path).bags) == 2
    monkeypatch.setenv("HEADCOUNT_MAX_GB", "0.1")
    with pytest.raises(HeadcountError, match="declares"):
        read(path)
    monkeypatch.setenv("HEADCOUNT_MAX_GB", "lots")
    with pytest.raises(HeadcountError, match="HEADCOUNT_MAX_GB is a number of gigabytes, got 'lots'"):
        read(path)


def test_texts_and_lists_of_parquet_are_those_of_the_table(tmp_path):
    table = pa.table({
        "bag": ["a", "a", "b", "b"], "label": pa.array(["n", "n", "y", "y"], pa.large_string()),
        "category": pa.array(["u", None, "v", "u"]).dictionary_encode(), "x": pa.array([1, None, 3, 4], pa.int32()),
        "vector": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], "flag": [True, False, None, True],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    dataset, expected = read(tmp_path / "t.parquet"), read(table)
    assert dataset.content.to_pydict() == expected.content.to_pydict()
    assert dataset.ids.schema == expected.ids.schema


FILES = ["t.csv", "t.csv.gz", "t.npz", "t.npy", "images/a/x.png", "h5/s.h5", "pt/s.pt", "npy/s.npy"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reading /proc/self/mem at 0 is an I/O error on Linux")
def test_an_input_output_error_is_one_line_that_names_the_file(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")
    data = tmp_path / name.split("/")[0]
    with pytest.raises(HeadcountError) as e:
        read(data, need_labels=False, classes=["no", "yes"])
    assert str(tmp_path / name) in str(e.value)
    assert "Input/output error" in str(e.value)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EROFS, errno.EMFILE, errno.ENFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["data", "labels"])
def test_any_error_of_the_system_names_the_file(tmp_path, monkeypatch, code, where):
    (tmp_path / "t.csv").write_text(ROWS)
    (tmp_path / "labels.csv").write_text("bag,label\n0,a\n1,b\n2,a\n3,b\n")
    failing = tmp_path / {"data": "t.csv", "labels": "labels.csv"}[where]
    stat = Path.stat

    def fail(path: Path, **options):
        if path == failing:
            raise OSError(code, os.strerror(code), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(HeadcountError, match=f"^cannot read {failing}: {os.strerror(code)}$"):
        read(tmp_path / "t.csv", labels=tmp_path / "labels.csv")


def test_too_many_open_files(tmp_path):
    (tmp_path / "t.csv").write_text(ROWS)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
    try:
        with pytest.raises(HeadcountError, match=r"t\.csv.*Too many open files"):
            read(tmp_path / "t.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_links_in_a_circle_and_names_too_long(tmp_path, run_cli):
    for name in ("one", "one.csv"):
        (tmp_path / name).symlink_to(tmp_path / f"two{Path(name).suffix}")
        (tmp_path / f"two{Path(name).suffix}").symlink_to(tmp_path / name)
    (tmp_path / "t.csv").write_text(ROWS)
    fit(read(tmp_path / "t.csv"), "forest", folds=2).save(tmp_path / "model")
    for arguments in (
        ["check", tmp_path / "one"],
        ["check", tmp_path / "one.csv"],
        ["check", tmp_path / "t.csv", "--labels", tmp_path / "one.csv"],
        ["predict", tmp_path / "model", tmp_path / "one", "--out", tmp_path / "o.csv"],
        ["predict", tmp_path / "one", tmp_path / "t.csv", "--out", tmp_path / "o.csv"],
        ["predict", tmp_path / "model", tmp_path / "t.csv", "--out", tmp_path / "one"],
    ):
        code, _, error = run_cli(*arguments)
        assert code == 2, arguments
        assert "Traceback" not in error
        last = error.splitlines()[-1]
        assert last.startswith("headcount: ")
        assert "one" in last
    with pytest.raises(HeadcountError, match="File name too long"):
        read(tmp_path / ("a" * 300 + ".csv"))
