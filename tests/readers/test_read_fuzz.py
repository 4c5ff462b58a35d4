"""Fuzzing: whatever comes in, a reading whose promises hold comes out, or one line that says what is wrong."""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import read_factory as make
from headcount.errors import HeadcountError
from headcount.readers import BagDataset, ColumnRoles, read
from headcount.readers.preprocessing import Preprocessor

FEW = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def promises(reading: BagDataset) -> None:
    """What every reading promises."""
    laid, n = reading.bags, len(reading.rows)
    assert len(laid.index) == n == int(laid.sizes.sum())
    assert len(set(reading.rows.tolist())) == n
    assert n == 0 or (reading.rows.min() >= 0 and reading.rows.max() < reading.n_rows)
    assert reading.ids.num_rows == reading.n_rows
    assert len(set(laid.names)) == len(laid)
    assert int(laid.sizes.min()) > 0
    totals = laid.target.double().sum(1)
    assert bool(((totals - 1).abs() < 1e-5).logical_or(totals == 0).all())
    assert reading.description
    assert all("\n" not in line or line for line in reading.description)
    for part in (reading.coords, reading.tile_sizes):
        assert part is None or len(part) == n
    try:
        learned = reading.fit_preprocessor()
    except HeadcountError:  # no words, or nothing but empty columns
        return
    bags = reading.to_bags(learned)
    assert bool(torch.isfinite(bags.pool.take(bags.index).float()).all())
    again = Preprocessor.from_parts(json.loads(json.dumps(learned.to_json())), learned.arrays())
    assert torch.equal(reading.to_bags(again).pool.data, bags.pool.data)
    json.loads(json.dumps(reading.description + reading.skipped))


def attempt(data: Any, **options: Any) -> BagDataset | None:
    """A reading, or a refusal of one line; both ways of treating what is bad."""
    got = None
    for skip in (False, True):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                got = read(data, skip_bad=skip, **options)
        except HeadcountError as e:
            said = str(e)
        else:
            said = "read"
            promises(got)
            assert skip or not got.skipped
        assert said.splitlines() == [said]
    return got


CELLS = st.one_of(
    st.sampled_from(["a", "b", "x", "y", "", "1", "2", "3.5", "-1", "NaN", "inf", "1e308", "a|b", "NA", "0", '"', " a "]),
    st.text(max_size=6),
    st.floats().map(repr),
    st.integers(-(2**70), 2**70).map(str),
)
HEADERS = st.lists(
    st.one_of(
        st.sampled_from(["bag", "label", "f", "text", "weight", "x", "y", "id", "group", "truth", "known", "path", "g"]),
        st.text(max_size=4),
    ),
    min_size=1,
    max_size=6,
)


@FEW
@given(st.data())
def test_tables_of_anything(data):
    """Cells of any kind under headers of any kind, as CSV."""
    names = data.draw(HEADERS)
    rows = data.draw(st.lists(st.lists(CELLS, min_size=len(names), max_size=len(names)), max_size=8))
    ending = data.draw(st.sampled_from([".csv", ".tsv"]))
    newline = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    import csv

    text = io.StringIO(newline="")
    out = csv.writer(text, delimiter="\t" if ending == ".tsv" else ",", lineterminator=newline)
    out.writerow(names)
    out.writerows(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{ending}"
        path.write_bytes(text.getvalue().encode("utf-8", "surrogatepass"))
        attempt(path)
        attempt(path, need_labels=False, classes=["a", "b"])
        assert [p.name for p in Path(folder).iterdir()] == [path.name]


@FEW
@given(st.data())
def test_tables_that_nearly_work(data):
    """A good table with a few cells changed: more of these get through."""
    table = make.rows(bags=4, size=3)
    table |= data.draw(
        st.sampled_from(
            [
                {},
                {"weight": [1.0] * 12},
                {"x": list(range(12)), "y": [0] * 12},
                {"truth": ["yes", "no"] * 6},
                {"text": ["good word"] * 12},
            ]
        )
    )
    columns = {name: list(map(str, column)) for name, column in table.items()}
    for _ in range(data.draw(st.integers(0, 4))):
        name, row = data.draw(st.sampled_from(sorted(columns))), data.draw(st.integers(0, 11))
        columns[name][row] = data.draw(CELLS)
    named = data.draw(
        st.sampled_from(
            [
                ColumnRoles(),
                ColumnRoles(text="colour"),
                ColumnRoles(features=("age",)),
                ColumnRoles(categories=("age",)),
                ColumnRoles(votes=("age", "height")),
            ]
        )
    )
    ties = data.draw(st.sampled_from(["split", "drop", "lowest"]))
    with tempfile.TemporaryDirectory() as folder:
        path = make.write_csv(Path(folder) / "t.csv", columns)
        attempt(path, roles=named, ties=ties)
    attempt(columns, roles=named, ties=ties)


@FEW
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"bag,label,f\n", b"bag,label,f\na,x,1\nb,y,2\n", b"\xef\xbb\xbfbag\tlabel\tf\n"]),
)
def test_bytes_as_tables(tail, head):
    with tempfile.TemporaryDirectory() as folder:
        for ending in (".csv", ".tsv", ".parquet", ".npz", ".npy", ".csv.gz"):
            path = Path(folder) / f"t{ending}"
            path.write_bytes(head + tail)
            attempt(path)


VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(),
    pa.float16(): st.floats(width=16),
    pa.string(): st.text(max_size=4),
    pa.large_string(): st.text(max_size=4),
    pa.bool_(): st.booleans(),
    pa.binary(): st.binary(max_size=4),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.list_(pa.float32()): st.lists(st.floats(width=32), min_size=2, max_size=3),
    pa.struct([("a", pa.int8())]): st.fixed_dictionaries({"a": st.integers(0, 3)}),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["u", "v", ""]),
    pa.null(): st.none(),
}


@FEW
@given(st.data())
def test_frames_of_any_type(data):
    """Parquet and frames with columns of every type, nulls among them."""
    n = data.draw(st.integers(1, 9))
    columns = {"bag": pa.array([str(i * 3 // n) for i in range(n)]), "label": pa.array(["xyz"[i * 3 // n] for i in range(n)])}
    for name in data.draw(
        st.lists(st.sampled_from(["f", "g", "h", "weight", "text", "bag", "label", "known"]), max_size=4, unique=True)
    ):
        kind = data.draw(st.sampled_from(list(VALUES)))
        values = data.draw(st.lists(st.one_of(st.none(), VALUES[kind]), min_size=n, max_size=n))
        columns[name] = pa.array(values, kind)
    table = pa.table(columns)
    attempt(table)
    with tempfile.TemporaryDirectory() as folder:
        try:
            pq.write_table(table, Path(folder) / "t.parquet")
        except pa.ArrowException:
            return
        attempt(Path(folder) / "t.parquet")


ARRAYS = st.sampled_from([np.float32, np.float64, np.float16, np.int32, np.uint8, np.bool_, np.complex64, "S3", "U2", ">f4"])


@st.composite
def arrays(draw: Any) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    a = np.random.default_rng(draw(st.integers(0, 9))).normal(0, 50, shape)
    if a.size and draw(st.booleans()):
        a.flat[draw(st.integers(0, a.size - 1))] = draw(st.floats())
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return a.astype(draw(ARRAYS))


@FEW
@given(st.data())
def test_arrays_of_anything(data):
    attempt(
        data.draw(st.lists(arrays(), max_size=3)),
        labels=data.draw(st.sampled_from([["a", "b"], [0, 1], None, ["a", "b", "a"], [[1, 2], [2, 2]]])),
    )
    keys = st.sampled_from(
        [
            "features",
            "images",
            "bag",
            "sizes",
            "offsets",
            "labels",
            "weight",
            "truth",
            "coords",
            "names",
            "votes",
            "classes",
            "group",
        ]
    )
    held = data.draw(st.dictionaries(keys, arrays(), max_size=5))
    attempt(held)
    attempt({"features": np.eye(4), "sizes": np.array([2, 2]), "labels": ["a", "b"], **held})


@FEW
@given(st.data())
def test_slides_of_anything(data):
    """Files with datasets of any shape and type, and with bytes turned over."""
    with tempfile.TemporaryDirectory() as folder:
        root = make.slides(Path(folder))
        victim = root / "TCGA.1.h5"
        if data.draw(st.booleans()):
            with h5py.File(victim, "w") as f:
                for name in ("features", "coords"):
                    if data.draw(st.booleans()):
                        a = data.draw(arrays())
                        f[name] = a.astype("S3") if a.dtype.kind == "U" else a
                        for key in data.draw(st.lists(st.sampled_from(["patch_size_level0", "patch_size", "downsample"]))):
                            f[name].attrs[key] = data.draw(
                                st.one_of(
                                    st.floats(),
                                    st.text(max_size=3).filter(lambda t: "\0" not in t),
                                    st.lists(st.floats(), max_size=3),
                                )
                            )
        else:
            raw = bytearray(victim.read_bytes())
            for _ in range(data.draw(st.integers(1, 8))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            victim.write_bytes(bytes(raw[: data.draw(st.integers(1, len(raw)))]) if data.draw(st.booleans()) else bytes(raw))
        attempt(root)


@FEW
@given(st.binary(max_size=200))
def test_tensor_files_of_anything(raw):
    with tempfile.TemporaryDirectory() as folder:
        root = make.slides(Path(folder))
        (root / "TCGA.1.h5").unlink()
        (root / "TCGA.1.pt").write_bytes(raw)
        assert len(attempt(root).bags) == 3


@FEW
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=4),
        lambda s: (
            st.lists(s, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "kind", "shape", "roles", "fields", "name"]), s)
        ),
        max_leaves=12,
    )
)
def test_preparations_of_anything(said):
    good = read(make.rows()).fit_preprocessor().to_json()
    for hostile in (said, {**good, "fields": said}, {**good, "roles": said}, {**good, "shape": said}):
        try:
            learned = Preprocessor.from_parts(hostile)
        except HeadcountError:
            continue
        assert learned.kind in ("images", "features", "table", "text")


@pytest.mark.soak
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_slides_of_anything_for_long(data):
    test_slides_of_anything.hypothesis.inner_test(data)


@pytest.mark.soak
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_tables_for_long(data):
    which = data.draw(
        st.sampled_from(
            [test_tables_of_anything, test_tables_that_nearly_work, test_frames_of_any_type, test_arrays_of_anything]
        )
    )
    which.hypothesis.inner_test(data)
