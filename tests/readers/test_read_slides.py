"""Feature folders of whole-slide pipelines: layouts, bags of slides or of patients, tiles, and the cache that survives."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import read_factory as make
from headcount.errors import HeadcountError
from headcount.readers import ColumnRoles, flat_array, read
from headcount.readers.preprocessing import Preprocessor


@pytest.mark.parametrize("layout", ["trident", "batched", "clam"])
def test_layouts(tmp_path, layout):
    reading = read(make.slides(tmp_path, layout))
    bags = reading.to_bags()
    assert (reading.kind, bags.names) == ("features", ("TCGA.0", "TCGA.1", "TCGA.2", "TCGA.3"))
    assert bags.sizes.tolist() == [4, 5, 6, 7]
    assert bags.classes == ("normal", "tumour")
    assert bags.label.tolist() == [1, 1, 0, 0]
    assert bags.group == ("case0", "case0", "case1", "case1")
    with h5py.File(tmp_path / "TCGA.2.h5") as f:
        assert np.array_equal(bags.pool.data[9:15].numpy(), f["features"][()].reshape(6, 4))
        assert np.array_equal(reading.coords[9:15], f["coords"][()])
    assert reading.tile_sizes is not None
    assert reading.tile_sizes[[0, 4, 9, 15]].tolist() == [512, 256, 512, 256]
    assert reading.ids.column_names == ["slide", "tile", "x", "y"]
    assert read(tmp_path, tile=99).tile_sizes[3] == 99


def test_tensors_and_both(tmp_path):
    """CLAM's folder: the HDF5 file where there is one, for its coordinates; else the tensor."""
    for i in range(4):
        make.slide(tmp_path / "pt_files" / f"TCGA.{i}.pt", rows=4 + i, seed=i, layout="pt")
    make.label_table(tmp_path / "labels.csv")
    alone = read(tmp_path)
    assert alone.coords is None
    assert np.array_equal(alone.to_bags().pool.data, read(tmp_path / "pt_files").to_bags().pool.data)
    for i in range(3):
        make.slide(tmp_path / "h5_files" / f"TCGA.{i}.h5", rows=4 + i, seed=i, layout="plain")
    both = read(tmp_path)
    assert torch.equal(both.to_bags().pool.data, alone.to_bags().pool.data)
    assert np.isnan(both.coords).any(1).tolist() == [False] * 15 + [True] * 7
    assert both.tile_sizes is None
    assert any("tile size unknown" in line for line in both.description)


def test_patients_are_bags(tmp_path):
    reading = read(make.slides(tmp_path), ColumnRoles(bag="case_id"))
    assert reading.bags.names == ("case0", "case1")
    assert reading.bags.sizes.tolist() == [9, 13]
    assert reading.tile_sizes[[0, 4]].tolist() == [512, 256], "each slide keeps its own tile"
    assert reading.ids.column("slide").to_pylist()[4] == "TCGA.1"
    assert reading.ids.column("bag").to_pylist()[4] == "case0"


def test_prediction_needs_no_table(tmp_path):
    learned = read(make.slides(tmp_path / "a")).fit_preprocessor()
    make.slide(tmp_path / "b" / "new.h5", rows=3)
    new = read(tmp_path / "b", preprocessor=Preprocessor.from_parts(learned.to_json()), classes=["n", "t"], need_labels=False)
    assert new.to_bags().names == ("new",)
    make.slide(tmp_path / "b" / "new.h5", width=5)
    with pytest.raises(HeadcountError, match=r"new\.h5 has features of 5 numbers, the model 4"):
        read(tmp_path / "b", preprocessor=learned, classes=["n", "t"], need_labels=False)


# -- the cache --------------------------------------------------------------------------------------------------------------


def test_cache_is_the_same_data_in_half(tmp_path):
    make.slides(tmp_path / "s")
    a, b = read(tmp_path / "s"), read(tmp_path / "s", cache=tmp_path / "c")
    assert b.bags.pool.data.dtype == torch.float16
    torch.testing.assert_close(b.bags.pool.data.float(), a.bags.pool.data, rtol=1e-3, atol=1e-3)
    assert a.fingerprint == b.fingerprint, "of what was read, not of how it is kept"
    assert sorted(p.suffix for p in (tmp_path / "c").iterdir()) == [".jsonl", ".npy"]


def test_larger_than_memory_goes_to_the_cache(tmp_path, monkeypatch):
    make.slides(tmp_path / "s")
    make.folder(tmp_path / "p")
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(flat_array, "available_memory", lambda: 100)
    assert read(tmp_path / "s").bags.pool.data.dtype == torch.float16
    pictures = read(tmp_path / "p").to_bags().pool
    assert len(list((tmp_path / "home" / "flat").glob("*.npy"))) == 2
    monkeypatch.undo()
    assert torch.equal(pictures.data, read(tmp_path / "p").to_bags().pool.data)


def test_cache_is_used_and_renewed(tmp_path, monkeypatch):
    from headcount.readers import slides

    make.slides(tmp_path / "s")
    first = read(tmp_path / "s", cache=tmp_path / "c")
    opened = []
    honest = slides.load_features
    monkeypatch.setattr(slides, "load_features", lambda s: opened.append(s.file.name) or honest(s))
    assert read(tmp_path / "s", cache=tmp_path / "c").fingerprint == first.fingerprint
    assert opened == []
    make.slide(tmp_path / "s" / "TCGA.1.h5", rows=5, seed=99)
    assert read(tmp_path / "s", cache=tmp_path / "c").fingerprint != first.fingerprint
    assert len(opened) == 4


KILLED = """
import os, signal, sys
from headcount.readers import read
from headcount.readers import slides
honest, count = slides.load_features, 0
def dying(s):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(s)
slides.load_features = dying
read(sys.argv[1], cache=sys.argv[2])
"""


def test_killed_and_taken_up(tmp_path, monkeypatch):
    """Killed in the third slide: nothing but a .part; the next run reads the last two and is whole."""
    from headcount.readers import slides

    make.slides(tmp_path / "s")
    run = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "s", tmp_path / "c"], env={**os.environ})
    assert run.returncode == -signal.SIGKILL
    assert [p.suffix for p in (tmp_path / "c").iterdir() if p.suffix in (".npy", ".part")] == [".part"]
    log = next((tmp_path / "c").glob("*.jsonl"))
    assert len(log.read_text().splitlines()) == 2
    log.write_text(log.read_text() + '{"digest": "torn')
    opened = []
    honest = slides.load_features
    monkeypatch.setattr(slides, "load_features", lambda s: opened.append(s.file.name) or honest(s))
    again = read(tmp_path / "s", cache=tmp_path / "c")
    assert opened == ["TCGA.2.h5", "TCGA.3.h5"]
    assert again.fingerprint == read(tmp_path / "s").fingerprint
    torch.testing.assert_close(again.bags.pool.data.float(), read(tmp_path / "s").bags.pool.data, rtol=1e-3, atol=1e-3)
    assert not list((tmp_path / "c").glob("*.part"))


def test_damaged_cache_is_refused_or_made_anew(tmp_path):
    make.slides(tmp_path / "s")
    whole = read(tmp_path / "s", cache=tmp_path / "c")
    npy, log = next((tmp_path / "c").glob("*.npy")), next((tmp_path / "c").glob("*.jsonl"))
    log.write_text("nonsense\n")
    assert read(tmp_path / "s", cache=tmp_path / "c").fingerprint == whole.fingerprint
    npy.write_bytes(npy.read_bytes()[:-8])
    with pytest.raises(HeadcountError, match=r"cannot read .*\.npy: .*delete it"):
        read(tmp_path / "s", cache=tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadcountError, match="cannot write the cache"):
        read(tmp_path / "s", cache=tmp_path / "file")


def test_bad_tiles_in_the_cache_are_listed_again(tmp_path):
    make.slides(tmp_path / "s")
    with h5py.File(tmp_path / "s" / "TCGA.1.h5", "r+") as f:
        f["features"][3, 2] = 1e6
    for _ in range(2):
        reading = read(tmp_path / "s", cache=tmp_path / "c", skip_bad=True)
        assert [line.split("/")[-1].split(":")[0] for line in reading.skipped] == ["TCGA.1.h5 row 4"]
        assert reading.bags.sizes.tolist() == [4, 4, 6, 7]
        assert reading.n_rows == 22
        assert reading.broadcast(np.ones(21), 0).tolist() == [1] * 7 + [0] + [1] * 14
    with pytest.raises(HeadcountError, match=r"TCGA\.1\.h5 row 4: a feature is not finite, or beyond 65504"):
        read(tmp_path / "s", cache=tmp_path / "c")
    assert len(read(tmp_path / "s").rows) == 22, "float32 holds it"


# -- bad slides ---------------------------------------------------------------------------------------------------------------


class Nasty:
    def __reduce__(self):
        return (Path.touch, (Path(os.environ["NASTY"]),))


def spoil(path: Path, how: str) -> None:
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    coords = np.zeros((5, 2), int)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:1500])
    elif how == "not hdf5":
        path.write_bytes(b"\x89HDF\r\n\x1a\nand no more")
    elif how == "empty file":
        path.write_bytes(b"")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how.startswith("pt"):
        path.unlink()
        path = path.with_suffix(".pt")
        held = {"pt code": Nasty(), "pt text": "hello", "pt rank": torch.zeros(4), "pt list": [torch.zeros(5, 4)]}
        if how == "pt pickle":
            path.write_bytes(pickle.dumps(Nasty()))
        elif how == "pt garbage":
            path.write_bytes(b"PK\x03\x04 no archive")
        else:
            torch.save(held[how], path)
    else:
        with h5py.File(path, "w") as f:
            if how == "no features":
                f["coords"] = coords
            elif how == "a group":
                f.create_group("features")
            elif how == "rank 1":
                f["features"] = x.ravel()
            elif how == "rank 3":
                f["features"] = np.stack([x, x])
            elif how == "scalar":
                f["features"] = 3.0
            elif how == "no rows":
                f["features"], f["coords"] = x[:0], coords[:0]
            elif how == "no columns":
                f["features"] = x[:, :0]
            elif how == "text":
                f["features"] = [["a", "b"]]
            elif how == "objects":
                f.create_dataset("features", (2,), dtype=h5py.vlen_dtype(np.float32))
            elif how == "compound":
                f["features"] = np.zeros((5, 4), dtype=[("a", "f4"), ("b", "f4")])
            elif how == "complex":
                f["features"] = x.astype(np.complex64)
            elif how == "nan":
                x[3, 1] = np.nan
                f["features"], f["coords"] = x, coords
            elif how == "inf":
                x[0, 0] = np.inf
                f["features"] = x
            elif how == "other width":
                f["features"] = np.zeros((5, 9), np.float32)
            elif how == "few coords":
                f["features"], f["coords"] = x, coords[:3]
            elif how == "coords rank":
                f["features"], f["coords"] = x, coords[:, 0]
            elif how == "coords nan":
                f["features"], f["coords"] = x, np.full((5, 2), np.nan)
            elif how == "coords text":
                f["features"], f["coords"] = x, [["a", "b"]] * 5
            elif how == "external":
                f["features"] = h5py.ExternalLink(str(make.slide(path.parent.parent / "other.h5")), "/features")
            elif how == "dangling":
                f["features"] = h5py.SoftLink("/nowhere")
            elif how == "huge":
                f.create_dataset("features", (10**12, 4), dtype="f4", chunks=(1024, 4))
            elif how == "virtual":
                layout = h5py.VirtualLayout((5, 4), "f4")
                layout[:] = h5py.VirtualSource(str(make.slide(path.parent.parent / "other.h5", rows=5)), "features", (5, 4))
                f.create_virtual_dataset("features", layout)
            else:
                raise AssertionError(how)


SPOILT = [
    "truncated", "not hdf5", "empty file", "a pipe", "pt code", "pt text", "pt rank", "pt list", "pt pickle", "pt garbage",
    "no features", "a group", "rank 1", "rank 3", "scalar", "no rows", "no columns", "text", "objects", "compound", "complex", "nan", "inf",
    "other width", "few coords", "coords rank", "coords nan", "coords text", "external", "dangling", "huge", "virtual",
]  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_bad_slides(tmp_path, monkeypatch, how):
    """Refused in one line that names the file, or skipped and listed; nothing in it runs."""
    monkeypatch.setenv("NASTY", str(tmp_path / "ran"))
    make.slides(tmp_path / "s")
    spoil(tmp_path / "s" / "TCGA.2.h5", how)
    with pytest.raises(HeadcountError) as e:
        read(tmp_path / "s")
    assert "TCGA.2." in str(e.value)
    assert "\n" not in str(e.value)
    reading = read(tmp_path / "s", skip_bad=True)
    assert all("TCGA.2" in line for line in reading.skipped)
    assert reading.skipped
    names = set(reading.bags.names)
    assert names == {"TCGA.0", "TCGA.1", "TCGA.3"} | ({"TCGA.2"} if how in ("nan", "inf") else set())
    assert not (tmp_path / "ran").exists(), "it ran"


def test_tables_of_slides(tmp_path):
    make.slides(tmp_path)
    table = {"case_id": ["a", "a", "b"], "slide_id": ["TCGA.0", "TCGA.9", "TCGA.3"], "label": ["x", "x", "y"]}
    make.write_csv(tmp_path / "labels.csv", table)
    with pytest.raises(HeadcountError, match=r"labels\.csv row 2 labels bag 'TCGA\.9', and there is no such bag"):
        read(tmp_path)
    reading = read(tmp_path, skip_bad=True)
    assert reading.bags.label.tolist() == [0, -1, -1, 1]
    assert any("2 bags have no label" in line for line in reading.description)
    with pytest.raises(HeadcountError, match=r"slide 'TCGA\.1' is not in .*, so that its case_id is unknown"):
        read(tmp_path, ColumnRoles(bag="case_id"))
    make.write_csv(tmp_path / "labels.csv", {**table, "slide_id": ["TCGA.0", "TCGA.1", "TCGA.0"]})
    with pytest.raises(HeadcountError, match=r"slide 'TCGA\.0' belongs to two bags"):
        read(tmp_path, ColumnRoles(bag="case_id"))
    (tmp_path / "labels.csv").unlink()
    with pytest.raises(HeadcountError, match=r"has no labels\.csv"):
        read(tmp_path)


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    make.slides(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(HeadcountError, match=r"pip install 'headcount\[slides\]'"):
        read(tmp_path, skip_bad=True)


def test_learned_is_plain_json(tmp_path):
    learned = read(make.slides(tmp_path)).fit_preprocessor()
    assert Preprocessor.from_parts(json.loads(json.dumps(learned.to_json()))).shape == (4,)


def test_a_disk_that_fills_up_is_one_line_and_can_be_taken_up(tmp_path):
    """A limit on the size of files stands for the disk: the write fails, no signal kills us, and the rest comes later."""
    make.slides(tmp_path / "s")
    whole = read(tmp_path / "s", cache=tmp_path / "other").bags.pool.data
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(HeadcountError, match=r"cannot write the cache in .*: .*; it needs 0.0 GB"):
            read(tmp_path / "s", cache=tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "c").glob("*.npy"))
    assert torch.equal(read(tmp_path / "s", cache=tmp_path / "c").bags.pool.data, whole)


def test_the_commonest_width_is_right(tmp_path):
    make.slides(tmp_path)
    make.slide(tmp_path / "A.0.h5", width=3)
    with open(tmp_path / "labels.csv", "a") as f:
        f.write("case9,A.0.svs,tumour\n")
    with pytest.raises(HeadcountError, match=r"A\.0\.h5 has features of 3 numbers, others 4"):
        read(tmp_path)
    reading = read(tmp_path, skip_bad=True)
    assert reading.bags.pool.shape == (4,)
    assert len(reading.bags) == 4


def test_new_slides_are_not_held_to_the_labels_of_others(tmp_path):
    """labels.csv in the folder above is looked at by who needs labels; rows of other bags then are a mistake."""
    make.slides(tmp_path)
    new = make.slide(tmp_path / "new" / "case_new1.h5").parent
    reading = read(new, need_labels=False, classes=["normal", "tumour"])
    assert reading.bags.names == ("case_new1",)
    make.label_table(new / "labels.csv")
    assert read(new, need_labels=False, classes=["normal", "tumour"]).bags.label.tolist() == [-1]
    for _ in range(2):
        with pytest.raises(HeadcountError, match=r"labels\.csv row 1 labels bag 'TCGA\.0', and there is no such bag"):
            read(new)
        (new / "labels.csv").unlink(missing_ok=True)  # then the one above is read
