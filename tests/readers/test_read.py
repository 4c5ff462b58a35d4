"""Reading people's own data: every kind of input, what becomes of it, and that nothing leaks or gets lost."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import read_factory as make
from headcount.errors import HeadcountError
from headcount.readers import ColumnRoles, read
from headcount.readers.preprocessing import Preprocessor


def same(a, b) -> bool:
    """Two readings hold the same bags."""
    x, y = a.bags, b.bags
    return x.names == y.names and x.classes == y.classes and torch.equal(x.target, y.target) and torch.equal(x.sizes, y.sizes)


# -- tables -----------------------------------------------------------------------------------------------------------------


def test_table_from_every_side(tmp_path):
    """CSV, TSV, semicolons, CRLF, BOM, gzip, Parquet, a DataFrame: one and the same reading."""
    import gzip

    table = make.rows()
    a = make.write_csv(tmp_path / "a.csv", table)
    (tmp_path / "z.csv.gz").write_bytes(gzip.compress(a.read_bytes()))
    pq.write_table(pa.table(table), tmp_path / "p.parquet")
    ways = [
        a,
        make.write_csv(tmp_path / "t.tsv", table, delimiter="\t"),
        make.write_csv(tmp_path / "s.csv", table, delimiter=";", newline="\r\n", encoding="utf-8-sig"),
        tmp_path / "z.csv.gz",
        tmp_path / "p.parquet",
        table,
        pa.table(table),
    ]
    first = read(a)
    features = first.to_bags(first.fit_preprocessor()).pool.data
    for way in ways:
        again = read(way)
        assert same(first, again), way
        torch.testing.assert_close(again.to_bags(again.fit_preprocessor()).pool.data, features)
        assert again.ids.column("id").to_pylist()[:2] == ["000", "001"]


def test_table_learns_and_applies():
    reading = read(make.rows())
    assert reading.kind == "table"
    learned = reading.fit_preprocessor()
    assert learned.feature_names == (
        "age", "age is missing", "height", "colour=blue", "colour=green", "colour=red",
    )  # fmt: skip
    x = reading.to_bags(learned).pool.data.numpy()
    table = make.rows()
    age = np.array([np.nan if v is None else v for v in table["age"]])
    want = (np.where(np.isnan(age), np.nanmedian(age), age) - np.nanmean(age)) / np.nanstd(age)
    np.testing.assert_allclose(x[:, 0], want, rtol=1e-5)
    assert x[:, 1].tolist() == np.isnan(age).tolist()
    assert (x[:, 5] == [c == "red" for c in table["colour"]]).all()


def test_only_the_given_bags_teach():
    """Whatever stands in the other bags, the preparation does not know it."""
    table = make.rows()
    reading = read(table)
    learned = reading.fit_preprocessor([0, 1, 2])
    other = {k: list(v) for k, v in table.items()}
    for i in range(15, 30):
        other["age"][i], other["height"][i], other["colour"][i] = 1e9, None, "mauve"
    changed = read(other)
    assert json.dumps(changed.fit_preprocessor([0, 1, 2]).to_json()) == json.dumps(learned.to_json())
    assert changed.fit_preprocessor().to_json() != learned.to_json()
    features = changed.to_bags(learned).pool.data
    assert torch.equal(features[:15], reading.to_bags(learned).pool.data[:15])
    assert bool(torch.isfinite(features).all())
    assert float(features[20, 3:].sum()) == 0, "a colour never seen is no colour"


def test_only_the_given_bags_teach_words():
    table = make.texts()
    learned = read(table).fit_preprocessor([0, 1, 2, 3])
    other = {**table, "text": [t if i < 32 else "quite unheard of" for i, t in enumerate(table["text"])]}
    again = read(other).fit_preprocessor([0, 1, 2, 3])
    assert again.to_json() == learned.to_json()
    assert all(np.array_equal(again.arrays()[k], v) for k, v in learned.arrays().items())


@pytest.mark.parametrize("table", [make.rows(), make.texts(), make.texts(bags=40, size=30)], ids=["table", "text", "svd"])
def test_learned_comes_back(table):
    if len(table["label"]) > 1000:  # enough words for a truncated SVD
        g = np.random.default_rng(0)
        table["text"] = [t + " " + " ".join(map(str, g.integers(100, 400, 5))) for t in table["text"]]
    reading = read(table)
    learned = reading.fit_preprocessor([0, 1, 2, 3])
    again = Preprocessor.from_parts(json.loads(json.dumps(learned.to_json())), learned.arrays())
    assert torch.equal(reading.to_bags(again).pool.data, reading.to_bags(learned).pool.data)
    assert again.shape[0] == reading.to_bags(again).pool.shape[0] == len(again.feature_names)
    assert all(v.flags.c_contiguous for v in learned.arrays().values()), "as safetensors wants them"


def test_shuffled_rows_are_the_same_instances():
    """Rows in any order: bag by bag the same features, and predictions find their way home."""
    table = make.rows()
    order = np.random.default_rng(3).permutation(len(table["bag"]))
    mixed = {k: [v[i] for i in order] for k, v in table.items()}
    a, b = read(table), read(mixed)
    learned = a.fit_preprocessor()
    assert {n: int(t) for n, t in zip(a.bags.names, a.bags.label, strict=True)} == {
        n: int(t) for n, t in zip(b.bags.names, b.bags.label, strict=True)
    }
    for reading, given in ((a, table), (b, mixed)):
        bags = reading.to_bags(learned)
        answer = bags.pool.take(bags.index)[:, 2].numpy()  # an answer that depends on the instance alone
        home = reading.broadcast(answer, np.nan)
        ids = reading.ids.column("id").to_pylist()
        assert ids == given["id"]
        assert dict(zip(ids, home.tolist(), strict=True)) == dict(
            zip(table["id"], a.to_bags(learned).pool.data[:, 2].tolist(), strict=True)
        )


def test_everything_said_of_an_instance_travels_with_it():
    table = make.rows(truth=["yes", "no", "no"] * 10, weight=[i + 0.5 for i in range(30)], x=list(range(30)), y=[7] * 30)
    table["known"] = ["" if i % 4 else "yes" for i in range(30)]
    order = np.random.default_rng(1).permutation(30)
    reading = read({k: [v[i] for i in order] for k, v in table.items()}, tile=5)
    was = order[reading.rows]  # the instance's number in the table before
    laid = reading.bags
    assert [f"b{i // 5}" for i in was] == [laid.names[b] for b in laid.bag.tolist()]
    assert laid.weight.tolist() == [i + 0.5 for i in was]
    assert laid.truth.tolist() == [int(i % 3 == 0) for i in was]
    assert laid.known.tolist() == [-1 if i % 4 else 1 for i in was]
    assert reading.coords.tolist() == [[i, 7] for i in was]
    assert reading.tile_sizes.tolist() == [5] * 30


def test_prediction_reads_as_the_model_did(tmp_path):
    """New data: no label, columns in another order, extra columns, a category in digits, a number that looks like none."""
    learned = read(make.rows(colour=["1", "2", "x"] * 10)).fit_preprocessor()
    new = make.rows(seed=9, colour=["1", "2", "2"] * 10)
    del new["label"]
    new = {"height": new.pop("height"), "extra": list(range(30)), **new}
    for way in (make.write_csv(tmp_path / "new.csv", new), new):
        got = read(way, preprocessor=learned, classes=["no", "yes"], need_labels=False)
        x = got.to_bags(learned).pool.data
        assert x.shape[1] == learned.shape[0]
        assert x[:, 3:].sum(1).tolist() == [1.0] * 30
        assert not got.bags.target.any()
        assert got.ids.column_names == ["extra", "bag", "id"]
    with pytest.raises(HeadcountError, match="lacks 'age'"):
        read({k: v for k, v in new.items() if k != "age"}, preprocessor=learned, classes=["no", "yes"], need_labels=False)


def test_of_data_without_labels_the_classes_are_told_and_no_counts():
    table = {k: v for k, v in make.rows().items() if k != "label"}
    said = read(table, classes=["no", "yes"], need_labels=False).description
    assert "2 classes to choose from, no bag has a label: no, yes" in said
    assert not any("0 bags" in line or "have no label" in line for line in said)


def test_labels_that_no_model_knows_are_told():
    """Where labels are not needed, a strange one is none, and it is said."""
    table = make.rows(truth=["yes", "never"] * 15)
    table["label"] = [v if b != "b2" else "unheard" for v, b in zip(table["label"], table["bag"], strict=True)]
    reading = read(table, classes=["no", "yes"], need_labels=False)
    assert reading.bags.label.tolist() == [0, 1, -1, 1, 0, 1]
    assert reading.bags.truth.tolist() == [1, -1] * 15
    assert any("1 bags have a label that is no class: 'b2'" in line for line in reading.description)
    assert any("15 instances have a truth that is no class" in line for line in reading.description)
    with pytest.raises(HeadcountError, match="name them with classes="):
        read({"bag": ["a"], "f": [1]}, need_labels=False)


def test_roles_are_no_features():
    table = make.rows(
        truth=["yes", "no"] * 15, x=list(range(30)), y=list(range(30)), weight=[1.5] * 30, site=[*"s" * 15, *"t" * 15]
    )
    table["known"] = ["yes", *[""] * 29]
    reading = read(table)
    assert {f.name for f in reading.schema.fields} == {"age", "height", "colour"}
    laid = reading.bags
    assert laid.truth is not None
    assert laid.truth.tolist() == [1, 0] * 15
    assert laid.known is not None
    assert laid.known.tolist() == [1] + [-1] * 29
    assert laid.weight is not None
    assert laid.weight.tolist() == [1.5] * 30
    assert laid.group == (*"sss", *"ttt")
    assert reading.coords is not None
    assert reading.coords[7].tolist() == [7, 7]
    assert {*reading.ids.column_names} == {"bag", "id", "x", "y", "weight", "site"}


def test_copies_of_the_label_are_no_features():
    table = make.rows()
    leaks = {
        "copy": [f"is {v}" for v in table["label"]],
        "number": [float(v == "yes") for v in table["label"]],
        "bag number": [int(b[1:]) + 7 for b in table["bag"]],
        "bag name": [b.upper() for b in table["bag"]],
        "row": list(range(1, 31)),
        "note": [f"note {i} of many" for i in range(30)],
    }
    reading = read({**table, **leaks})
    assert {f.name for f in reading.schema.fields} == {"age", "height", "colour", "note"}  # 30 rows: notes might be categories
    assert sum("repeats the label" in line for line in reading.description) == 2
    assert sum("repeats the bag" in line for line in reading.description) == 2
    with pytest.raises(HeadcountError, match="'copy' of the table cannot be a feature: it repeats the label"):
        read({**table, **leaks}, ColumnRoles(features=("age", "copy")))


def test_labels_from_elsewhere(tmp_path):
    table = make.rows()
    want = read(table)
    del table["label"]
    per_bag = {f"b{b}": ("no", "yes")[b % 2] for b in range(6)}
    file = make.write_csv(tmp_path / "l.csv", {"bag": list(per_bag), "label": list(per_bag.values())})
    odd = make.write_csv(tmp_path / "o.csv", {"which": list(per_bag), "said": list(per_bag.values())})
    for labels in (
        file,
        per_bag,
        list(per_bag.values()),
        np.array(list(per_bag.values())),
        pa.table({"bag": list(per_bag), "label": list(per_bag.values())}),
    ):
        assert same(read(table, labels=labels), want)
    assert same(read(table, ColumnRoles(label="said"), labels=odd), want)


class Frame:
    """A DataFrame of some make: nothing is known of it but that it speaks Arrow."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.columns = table, table.column_names

    def __arrow_c_stream__(self, schema=None):
        return self.table.__arrow_c_stream__(schema)


class Interchange:
    """An older make, that speaks the interchange protocol."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __dataframe__(self, **how):
        return self.table.__dataframe__(**how)


def test_frames_of_any_make():
    table = pa.table(make.rows())
    order = np.random.default_rng(0).permutation(30)
    mixed = table.take(order).append_column("__index_level_0__", [order.tolist()])
    assert same(read(Frame(table)), read(table))
    assert same(read(Interchange(table.drop_columns(["age"]))), read(table))
    reading = read(Frame(mixed))
    assert {f.name for f in reading.schema.fields} == {"age", "height", "colour"}, "an index is no feature"
    assert "__index_level_0__" in reading.ids.column_names


def test_pandas_where_it_is():
    import pandas as pd

    table = make.rows()
    frame = pd.DataFrame(table)
    assert same(read(frame), read(table))
    labels = pd.Series({f"b{b}": ("no", "yes")[b % 2] for b in range(6)})
    for y in (labels, labels[::-1], labels.reset_index(drop=True)):
        assert same(read(frame.drop(columns="label"), labels=y), read(table))


def test_soft_labels_ties_and_the_uncounted():
    votes = {"a": [3, 3, 1, 1, 0, 0], "b": [1, 1, 1, 1, 0, 0], "c": [0, 0, 0, 0, 0, 0]}
    table = {"bag": list("xxyyzz"), "f": [1.0, 2, 3, 4, 5, 7], **votes}
    named = ColumnRoles(votes=("a", "b", "c"))
    laid = read(table, named).bags
    assert laid.classes == ("a", "b", "c")
    assert laid.target.tolist() == [[0.75, 0.25, 0], [0.5, 0.5, 0], [0, 0, 0]]
    assert read(table, named, ties="lowest").bags.target.tolist() == [[0.75, 0.25, 0], [1, 0, 0], [0, 0, 0]]
    dropped = read(table, named, ties="drop")
    assert dropped.bags.names == ("x", "z")
    assert dropped.rows.tolist() == [0, 1, 4, 5]
    assert any("tie" in line and "'y'" in line for line in dropped.description)
    words = {"bag": list("xxyyzz"), "f": table["f"], "label": ["a", "a", "b", "b", "a|b", "a|b"]}
    laid = read(words, uncounted=["sky"]).bags
    assert laid.classes == ("a", "b", "sky")
    assert laid.target[2].tolist() == [0.5, 0.5, 0]
    assert laid.counted is not None
    assert laid.counted.tolist() == [True, True, False]
    words["label"] = ["a", "a", "b", "b", "q|b", "q|b"]  # q is no label by itself: the bar belongs to the name
    assert read(words).bags.classes == ("a", "b", "q|b")


def test_order_of_bags_and_rows():
    reading = read({"bag": list("babcab"), "label": list("yxyzxy"), "f": [0.0, 1, 2, 3, 4, 6]})
    assert reading.bags.names == ("b", "a", "c")
    assert reading.rows.tolist() == [0, 2, 5, 1, 4, 3]
    assert reading.bags.classes == ("x", "y", "z")


def test_names_keep_their_looks(tmp_path):
    table = {"bag": ["007", "007", "ж\n1", "ж\n1"], "label": ["10", "10", "9", "9"], "größe": [1.5, 2, 3, 4]}
    reading = read(make.write_csv(tmp_path / "ö ü.csv", table))
    assert reading.bags.names == ("007", "ж\n1")
    assert reading.bags.classes == ("9", "10"), "numbers in the order of numbers"
    assert reading.bags.label.tolist() == [1, 0]


def test_vectors_dates_and_flags(tmp_path):
    import datetime as dt

    table = pa.table({
        "bag": list("aabb"), "label": list("xxyy"), "embedding": [[1.0, 2], [3, 4], [5, 6], [7, 8]],
        "when": [dt.date(2020, 1, d) for d in (1, 2, 3, 5)], "flag": [True, False, None, True],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet")
    reading = read(tmp_path / "t.parquet")
    learned = reading.fit_preprocessor()
    x = reading.to_bags(learned).pool.data
    assert x[:, :2].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert learned.feature_names == ("embedding[0]", "embedding[1]", "when", "flag", "flag is missing")
    assert x[1, 2] > x[0, 2]
    assert x[2, 4] == 1


def test_a_million_rows_without_a_loop():
    """Grouped, learned and applied in a few seconds; ten million: benchmarks/read.py."""
    import time

    n = 1_000_000
    g = np.random.default_rng(0)
    bag = g.integers(0, 20_000, n)
    table = pa.table({"bag": bag, "label": np.array(["no", "yes"])[bag % 2], "a": g.normal(size=n), "b": g.normal(size=n)})
    start = time.process_time()
    reading = read(table)
    bags = reading.to_bags(reading.fit_preprocessor(np.arange(10_000)))
    took = time.process_time() - start
    assert len(bags) == 20_000
    assert (np.diff(bag[reading.rows]) != 0).sum() == 19_999
    assert took < 10, f"{took:.1f} s"


# -- folders ----------------------------------------------------------------------------------------------------------------


def test_folder_of_bags(tmp_path):
    reading = read(make.folder(tmp_path))
    bags = reading.to_bags()
    assert (reading.kind, bags.pool.shape, len(bags), bags.names) == ("images", (6, 5, 3), 4, ("bag0", "bag1", "bag2", "bag3"))
    assert bags.label.tolist() == [0, 1, 0, 1]
    assert reading.ids.column("file").to_pylist()[4] == "bag1/1.png"
    from PIL import Image

    assert np.array_equal(bags.pool.data[4].numpy(), np.asarray(Image.open(tmp_path / "bag1" / "1.png")))
    assert read(make.folder(tmp_path / "grey", mode="L")).to_bags().pool.shape == (6, 5, 1)
    make.picture(tmp_path / "grey" / "bag0" / "colour.png")
    assert read(tmp_path / "grey").to_bags().pool.shape == (6, 5, 3), "grey only if all are"


def test_folder_by_label(tmp_path):
    reading = read(make.by_label(tmp_path))
    assert reading.bags.names == ("cat/0", "cat/1", "dog/0", "dog/1")
    assert reading.bags.classes == ("cat", "dog")
    assert same(reading, read(tmp_path / "bags"))


def test_sizes_are_made_one_or_refused(tmp_path):
    make.folder(tmp_path)
    make.picture(tmp_path / "bag1" / "big.png", size=(12, 12))
    with pytest.raises(HeadcountError, match=r"several sizes: .*0\.png is 5x6, .*big\.png is 12x12; give a side"):
        read(tmp_path)
    assert read(tmp_path, side=8).to_bags().pool.shape == (8, 8, 3)


def test_new_pictures_are_made_like_the_models(tmp_path):
    learned = read(make.folder(tmp_path / "a", mode="L"), side=7).fit_preprocessor()
    make.picture(tmp_path / "b" / "only" / "1.png", size=(9, 9))
    reading = read(
        tmp_path / "b", preprocessor=Preprocessor.from_parts(learned.to_json()), classes=["cat", "dog"], need_labels=False
    )
    assert reading.to_bags().pool.shape == (7, 7, 1)


def test_pictures_named_in_a_table(tmp_path):
    make.folder(tmp_path)
    paths = [f"bag{b}/{i}.png" for b in range(4) for i in range(3)]
    order = np.random.default_rng(0).permutation(12)
    table = {"bag": [paths[i][:4] for i in order], "path": [paths[i] for i in order]}
    table["label"] = ["cat" if p in ("bag0", "bag2") else "dog" for p in table["bag"]]
    a, b = read(tmp_path), read(make.write_csv(tmp_path / "rows.csv", table))
    for name in a.bags.names:
        x, y = (set(map(bytes, r.to_bags().pool.take(r.bags.take([r.bags.names.index(name)]).index).numpy())) for r in (a, b))
        assert x == y
    assert b.ids.column("path").to_pylist() == table["path"]


def test_links_that_go_round(tmp_path):
    make.folder(tmp_path / "data")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "bag0" / "up").symlink_to(tmp_path)
    (tmp_path / "data" / "bag9").symlink_to(tmp_path / "data" / "bag9")
    reading = read(tmp_path / "data")
    assert len(reading.bags) == 4
    back = [line for line in reading.description if "link back" in line]
    assert len(back) == len(set(back)) == 2  # each is said once


# -- arrays -----------------------------------------------------------------------------------------------------------------


def test_arrays_from_every_side(tmp_path):
    g = np.random.default_rng(0)
    held = [g.normal(size=(n, 3)).astype(np.float32) for n in (4, 2, 3)]
    flat, y, sizes = np.concatenate(held), np.array(["u", "v", "u"]), np.array([4, 2, 3])
    np.savez(tmp_path / "a.npz", features=flat, sizes=sizes, labels=y)
    np.savez(
        tmp_path / "b.npz", X=flat, offsets=np.array([0, 4, 6, 9]), labels=np.array([0, 1, 0]), classes=np.array(["u", "v"])
    )
    ways = [
        read(held, labels=y),
        read([torch.from_numpy(a) for a in held], labels=list(y)),
        read({"0": held[0], "1": held[1], "2": held[2]}, labels={"0": "u", "1": "v", "2": "u"}),
        read(tmp_path / "a.npz"),
        read(tmp_path / "b.npz"),
        read({"features": flat, "bag": np.repeat([0, 1, 2], sizes), "labels": y}),
    ]
    for reading in ways:
        assert same(reading, ways[0])
        assert np.array_equal(reading.to_bags().pool.data.numpy(), flat)
        assert reading.ids.column("instance").to_pylist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]


def test_arrays_of_one_size(tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (4, 3, 5, 5, 1), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.array([0, 1, 1, 0]))
    for reading in (read(tmp_path / "x.npy", labels=tmp_path / "y.npy"), read(x, labels=[0, 1, 1, 0])):
        assert reading.to_bags().pool.shape == (5, 5, 1)
        assert reading.bags.label.tolist() == [0, 1, 1, 0]
    half = torch.randn(4, 3, 2).to(torch.bfloat16)
    assert read(half, labels=[0, 1, 1, 0]).to_bags().pool.shape == (2,)


def test_what_is_known_of_arrays():
    x = np.random.default_rng(0).normal(size=(6, 2))
    given = {
        "features": x, "bag": list("aabbcc"), "labels": np.array([0, 1, -1]), "classes": ["n", "y"],
        "truth": np.array([0, 1, 1, 1, 0, -1]),
        "known": np.array([-1, 0, -1, -1, -1, -1]), "weight": np.arange(1.0, 7),
        "group": ["g", "g", "h"], "coords": np.arange(12).reshape(6, 2),
    }  # fmt: skip
    laid = read(given).bags
    assert laid.label.tolist() == [0, 1, -1]
    assert laid.truth is not None
    assert laid.truth.tolist() == [0, 1, 1, 1, 0, -1]
    assert laid.known is not None
    assert laid.known.tolist() == [-1, 0, -1, -1, -1, -1]
    assert laid.group == ("g", "g", "h")
    assert read(x.reshape(3, 2, 2), labels=[-1, 1, -1]).bags.classes == ("-1", "1"), "without class names, -1 is a class"


@pytest.mark.parametrize(
    ("bag", "names", "shown"),
    [
        ([2, 2, 0, 0, 1, 1], None, ["0", "1", "2"]),
        ([2, 0, 1, 2, 0, 1], ["a", "b", "c"], ["a", "b", "c"]),  # numbers count, names are for people
        ([*"zzxxyy"], [*"xyz"], [*"xyz"]),  # names are the ids: they say the order
        ([*"xyzzyx"], None, [*"xyz"]),
        ([8, 8, 9, 9, 10, 10], None, ["8", "9", "10"]),
    ],
)
def test_labels_find_their_bags(bag, names, shown):
    """Whatever the order of the instances: the k-th label, group and name are of the k-th bag."""
    given = {"features": np.arange(12.0).reshape(6, 2), "bag": bag, "group": ["g0", "g1", "g2"]}
    given |= {} if names is None else {"names": names}
    said = ["zero", "one", "two"]
    for reading in (read({**given, "labels": said}), read(given, labels=said)):
        laid = reading.bags
        assert list(laid.names or ()) == shown
        assert [laid.classes[k] for k in laid.label.tolist()] == said
        assert laid.group == ("g0", "g1", "g2")
        held = [[str(bag[r]) for r in part] for part in np.split(reading.rows, np.cumsum(laid.sizes.numpy())[:-1])]
        ids = sorted({str(b) for b in bag}, key=lambda b: (len(b), b))
        assert held == [[b] * 2 for b in ids], "and the instances are those of the bag"
        assert reading.ids.column("bag").to_pylist() == [shown[ids.index(str(b))] for b in bag]


def test_fingerprint_is_of_the_content(tmp_path):
    import os

    table = make.rows()
    a, b = make.write_csv(tmp_path / "a.csv", table), make.write_csv(tmp_path / "b.csv", table)
    os.utime(b, (0, 0))
    assert read(a).fingerprint == read(b).fingerprint
    assert len(bytes.fromhex(read(a).fingerprint)) == hashlib.sha256().digest_size
    table["age"][7] += 0.01
    assert read(make.write_csv(b, table)).fingerprint != read(a).fingerprint
    make.folder(tmp_path / "f")
    before = read(tmp_path / "f").fingerprint
    make.picture(tmp_path / "f" / "bag0" / "0.png", seed=99)
    assert read(tmp_path / "f").fingerprint != before


def test_words_for_nothing_are_nothing_among_other_words_too():
    """One wrong cell makes a text of a column of numbers: NA and blanks in it are still missing, and only it is bad."""
    heights = [f"{150 + i}.5" for i in range(40)]
    heights[3], heights[7], heights[11] = "NA", " ", "tall"
    table = {"bag": [f"b{i % 8}" for i in range(40)], "label": [("no", "yes")[i % 2] for i in range(40)], "height": heights}
    with pytest.raises(HeadcountError, match="row 12: 'tall' among the numbers of column 'height'"):
        read(table)
    reading = read(table, skip_bad=True)
    assert len(reading.skipped) == 1
    assert len(reading.rows) == 39
    blank = read({**table, "height": [" " if h == "tall" else h for h in heights]})
    assert [f.kind for f in blank.schema.fields] == ["number"]
    assert len(blank.rows) == 40
    assert blank.fit_preprocessor().feature_names == ("height", "height is missing")


def test_a_slip_in_the_group_is_no_feature():
    table = make.rows()
    n = len(table["bag"])
    county = [f"c{b}" for b in table["bag"]]
    assert read({**table, "county": county}).bags.group is not None
    bags = 24
    big = {"bag": [f"b{i % bags}" for i in range(96)], "label": ["ab"[i % 2] for i in range(96)], "f": list(range(96))}
    slip = [f"c{i % bags}" for i in range(96)]
    slip[5] = "typo"
    with pytest.raises(HeadcountError, match="'county' looks like the group, and has several values in bag 'b5'"):
        read({**big, "county": slip})
    mixed = read({**table, "county": [f"c{i % 2}" for i in range(n)]})
    assert mixed.bags.group is None


def test_sixteen_bits_are_read(tmp_path):
    folder = make.folder(tmp_path / "p")
    picture = sorted(folder.glob("*/*.png"))[0]
    with Image.open(picture) as eight:
        grey = np.asarray(eight.convert("L"))
    Image.fromarray((grey.astype(np.uint16) << 8) + 17).save(picture)
    reading = read(folder)
    found = reading.bags.pool.take(reading.bags.index[:1]).squeeze(0).numpy()
    assert np.abs(found.mean(-1) - grey).max() <= 1


def test_the_same_bags_in_another_format_are_known(tmp_path):
    import pyarrow.parquet as pq

    table = make.rows()
    make.write_csv(tmp_path / "t.csv", table)
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    one, two = read(tmp_path / "t.csv"), read(tmp_path / "t.parquet")
    assert one.fingerprint != two.fingerprint
    labels = {b: "yes" if i % 2 else "no" for i, b in enumerate(dict.fromkeys(table["bag"]))}
    other = read({k: v for k, v in table.items() if k != "label"}, labels=labels)
    third = read(
        {k: v for k, v in table.items() if k != "label"}, labels={b: "no" if v == "yes" else "yes" for b, v in labels.items()}
    )
    assert other.instances_hash == third.instances_hash
    assert other.fingerprint != third.fingerprint


def test_classes_that_differ_only_in_capitals_are_two_and_that_is_said():
    bags = [np.ones((2, 1))] * 4
    words = ["Ville", "ville", "Grand  lac", "grand lac"]
    reading = read(bags, labels=words)
    assert set(reading.bags.classes) == set(words)
    line = (
        "classes that differ only in capitals or blanks: 'Grand  lac' and 'grand lac', 'Ville' and 'ville'; "
        "if they are one, write them alike"
    )
    assert line in reading.description
    table = {"bag": list("aabb"), "label": ["Ville", "Ville", "ville ", "ville "], "v": [1.0, 2.0, 3.0, 5.0]}
    assert any("'Ville' and 'ville'" in said for said in read(table).description)
    for given, more in ((["Ville", "lac"] * 2, {}), (words, {"classes": words})):  # who lists them means them
        assert not any("capitals" in said for said in read(bags, labels=given, **more).description)


def test_a_folder_without_pictures_is_left_aside_and_said(tmp_path):
    folder = make.folder(tmp_path / "p")
    (folder / "emptyplot").mkdir()
    reading = read(folder)
    assert "emptyplot" not in reading.bags.names
    assert any("ignored: 'emptyplot', no images in it" in line for line in reading.description)
    (folder / "bag0" / "thumbs").mkdir()
    assert "ignored: 'emptyplot', 'bag0/thumbs', no images in them" in read(folder).description


def test_what_lies_beside_the_bags_is_said_to_be_left_aside(tmp_path):
    flat, deep = make.folder(tmp_path / "p"), make.by_label(tmp_path / "q") / "bags"
    assert not any("ignored" in line for folder in (flat, deep) for line in read(folder).description)
    for folder in (flat, deep):
        picture = next(folder.rglob("*.png"))
        (folder / "loose.png").write_bytes(picture.read_bytes())
        reading = read(folder)
        assert f"ignored in {folder}: 'loose.png', beside the folders of the bags and in none of them" in reading.description
    (deep / "labels.csv").write_text("bag,label\ncat/x,cat\n")
    line = f"ignored: {deep / 'labels.csv'}, the folders name the labels; to use it, give it as labels="
    assert line in read(deep).description


def test_so_is_an_empty_bag_among_folders_of_labels(tmp_path):
    folder = make.by_label(tmp_path) / "bags"
    for name in ("e1", "e2", "the\u0301"):
        (folder / "cat" / name).mkdir()
    (folder / "nobody" / "here").mkdir(parents=True)
    reading = read(folder)
    assert "ignored: 'nobody', 'cat/e1', 'cat/e2' and 1 more, no images in them" in reading.description
    assert not any("e1" in name or "nobody" in name for name in (*reading.bags.names, *reading.bags.classes))
    given = dict(zip(reading.bags.names, reading.bags.label_names, strict=True))
    with pytest.raises(HeadcountError, match="labels bag 'cat/th\u00e9', whose folder holds no images; fill it"):
        read(folder, labels={**given, "cat/th\u00e9": "cat"})


def test_minus_one_beside_class_numbers_is_no_label_as_in_scikit_learn():
    bags = [np.ones((2, 1))] * 4
    told = read(bags, labels=[0, 1, -1, 0])
    assert told.bags.classes == ("0", "1")
    assert told.bags.label.tolist() == [0, 1, -1, 0]
    assert "column 'labels': '-1' in 1 rows read as missing; a class of that name must be named in classes=" in told.description
    assert "1 bag has no label: '2'" in told.description
    table = {"bag": [b for b in "abcd" for _ in "12"], "label": [0, 0, 1, 1, -1, -1, 0, 0], "x": range(8)}
    assert read(table).bags.label.tolist() == [0, 1, -1, 0]
    assert (
        "column 'label': '-1' in 2 rows read as missing; a class of that name must be named in classes="
        in read(table).description
    )
    named = read(bags, labels=[0, 1, -1, 0], classes=["-1", "0", "1"])
    assert named.bags.label.tolist() == [1, 2, 0, 1]
    assert read(bags, labels=[0, 1, -1, 0], classes=["0", "1"]).bags.label.tolist() == [0, 1, -1, 0]
    for labels in ([1, -1, -1, 1], ["a", "-1", "b", "a"]):  # plus and minus one; words
        dataset = read(bags, labels=labels)
        assert "-1" in dataset.bags.classes
        assert not [line for line in dataset.description if "missing" in line]


def test_a_dict_of_arrays_may_hold_more():
    given = {"features": np.ones((4, 2)), "sizes": [2, 2], "labels": [0, 1], "zz": 1, "model": "ours"}
    reading = read(given)
    assert reading.bags.sizes.tolist() == [2, 2]
    assert "ignored in the dict: 'zz', 'model'" in reading.description
    assert read({"X": np.ones((2, 2)), "Y": np.zeros((3, 2))}, labels=[0, 1]).bags.names == ("X", "Y")  # bags, by name


def test_a_word_is_one_name():
    bags = [np.ones((2, 1))] * 3
    reading = read(bags, labels=["a", "b", "a"], uncounted="bg")
    assert reading.bags.classes == ("a", "b", "bg")
    with pytest.raises(HeadcountError, match="a list of two or more different names, got ab"):
        read(bags, labels=["a", "b", "a"], classes="ab")
    for how in ({"classes": 3}, {"uncounted": 3}):
        with pytest.raises(HeadcountError, match="must be a list of names, got 3"):
            read(bags, labels=["a", "b", "a"], **how)


def test_columns_beside_a_text_are_said_to_be_idle():
    table = {**make.texts(), "price": [i % 7 for i in range(48)], "id": list(range(48))}
    said = "\n".join(read(table).description)
    assert "not used: 'price'; beside a text, columns are named with features=" in said
    assert "'id';" not in said
    assert "not used" not in "\n".join(read(table, ColumnRoles(text="text", features=("price",))).description)
    assert "not used" not in "\n".join(read(make.texts()).description)


@pytest.mark.parametrize("ending", ["csv", "parquet", None])
def test_accents_in_names_of_columns_are_one_sign_or_two(tmp_path, ending):
    """A file of one system, a name typed on another."""
    table = {
        "r\u00e9gion": list("aabb"),
        "d\u00e9cision": list("xxyy"),
        "\u00e9t\u00e9": [1.5, 2.5, 3.5, 4.0],
        "v": [1.0, 2, 3, 5],
    }
    apart = {unicodedata.normalize("NFD", k): v for k, v in table.items()}
    data: object = apart
    if ending:
        data = tmp_path / f"t.{ending}"
        {"csv": pacsv.write_csv, "parquet": pq.write_table}[ending](pa.table(apart), data)
    for form in ("NFC", "NFD"):
        bag, label, summer = (unicodedata.normalize(form, k) for k in (*table,)[:3])
        reading = read(data, ColumnRoles(bag=bag, label=label, features=(summer, "v")))
        assert reading.bags.names == ("a", "b")
        assert [f.name for f in reading.schema.fields] == ["\u00e9t\u00e9", "v"]
    model = Preprocessor("table", tuple(replace(f, name=unicodedata.normalize("NFD", f.name)) for f in reading.schema.fields))
    assert [f.name for f in model.fields] == ["\u00e9t\u00e9", "v"]
    both = {**table, **apart}
    with pytest.raises(HeadcountError, match="has two columns called 'r\u00e9gion'; give each column its own name"):
        read(both, ColumnRoles(label="d\u00e9cision"))


def test_a_letter_is_one_whether_it_was_written_as_one_or_as_two(tmp_path):
    """Some systems take file names apart (e and an accent), tables rarely do: the names are the same, the files are found."""
    whole, apart = "caf\u00e9", "cafe\u0301"
    for bag in (apart, "th\u00e9"):
        (tmp_path / "bags" / bag).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "bags" / bag / f"{apart}.png")
    (tmp_path / "bags" / "labels.csv").write_text(f"bag,label\n{whole},{apart}\nthe\u0301,th\u00e9\n")
    reading = read(tmp_path / "bags", classes=[apart, "the\u0301"])
    assert dict(zip(reading.bags.names, reading.bags.target.argmax(1).tolist(), strict=True)) == {whole: 0, "th\u00e9": 1}
    assert reading.bags.classes == (whole, "th\u00e9")
    assert (tmp_path / "bags" / reading.ids.column("file")[0].as_py()).exists()
    rows = "".join(f"bags/{bag}/{apart}.png,{bag},{label}\n" for bag, label in ((apart, whole), ("th\u00e9", "x")))
    (tmp_path / "table.csv").write_text(f"path,bag,label\n{rows}")
    assert read(tmp_path / "table.csv").bags.names == (whole, "th\u00e9")


def test_values_the_model_never_met_the_like_of_are_said(tmp_path):
    table = {
        "bag": list("aabbccdd"), "label": list("xxyyxxyy"), "n": [1.0, 2, 3, 4, 5, 6, 7, 8],
        "said": ["good bread", "good soup", "bad soup", "bad bread"] * 2,
    }  # fmt: skip
    learned = read(table, ColumnRoles(text="said", features=("n",))).fit_preprocessor()
    how = {
        "preprocessor": Preprocessor.from_parts(learned.to_json(), learned.arrays()),
        "classes": ["x", "y"],
        "need_labels": False,
    }
    assert not [line for line in read(table, **how).description if "fitting" in line]
    strange = {**table, "n": [1000.0, 2000, *table["n"][2:]], "said": ["gutes Brot", "", *table["said"][2:]]}
    said = "\n".join(read(strange, **how).description)
    assert (
        "column 'n': 2 of 8 values lie more than 20 standard deviations from the mean in fitting; is it the same unit?" in said
    )
    assert "column 'said': 1 of 7 texts have no word of those in fitting" in said


def test_bags_that_name_no_group_are_said(tmp_path):
    table = {"bag": list("aabbcc"), "label": list("xxyyxx"), "n": range(6), "site": ["s", "s", "s", "s", "", ""]}
    said = read(table, ColumnRoles(group="site")).description
    assert "2 groups" in said
    assert "of these, 1 for bags that name none, one each: 'c'" in said


def test_votes_beside_a_label_decide_and_that_is_said():
    table = {"bag": list("aabb"), "label": list("xxxx"), "n": range(4), "x": [1, 1, 1, 1], "y": [3, 3, 0, 0]}
    reading = read(table, ColumnRoles(votes=("x", "y"), label="label", features=("n",)))
    assert reading.bags.target.tolist() == [[0.25, 0.75], [1.0, 0.0]]
    assert "column 'label' is not used: the votes decide" in reading.description


def test_whole_votes_are_counts():
    votes = {"a": [2, 2, 1, 1, 0, 5], "b": [0, 0, 0, 0, 0, 4]}
    table = {"bag": list("xxyyzw"), "f": [1.0, 2, 3, 4, 5, 7], **votes}
    named = ColumnRoles(votes=("a", "b"))
    dataset = read(table, named)
    assert dataset.bags.votes.tolist() == [[2, 0], [1, 0], [0, 0], [5, 4]]
    assert dataset.bags.label.tolist() == [0, 0, -1, 0]
    assert "votes are counts, by bags: as many as instances in 1, fewer in 1, more in 1" in dataset.description
    weighted = read({**table, "weight": [1.0, 1, 0.5, 0.5, 1, 9]}, ColumnRoles(votes=("a", "b"), weight="weight"))
    assert "votes are counts, by bags: as many as instances in 3" in weighted.description
    shares = read({**table, "b": [0, 0, 0, 0, 0, 4.5]}, named)  # one fraction: none is a count
    assert shares.bags.votes is None
    assert "1 bags have a soft label" in shares.description
    assert shares.fingerprint != dataset.fingerprint
    percentages = read({**table, "a": [60, 60, 50, 50, 0, 70], "b": [40, 40, 50, 50, 0, 30]}, named)
    assert percentages.bags.votes is None
    single = read({**table, "a": [1, 1, 0, 0, 0, 1], "b": [0, 0, 1, 1, 0, 0]}, named)  # a label in columns
    assert single.bags.votes is None
    arrays = {"features": np.ones((6, 2)), "sizes": np.array([2, 4]), "votes": np.array([[1, 1], [3, 1]])}
    assert read(arrays).bags.votes.tolist() == [[1, 1], [3, 1]]
    assert read(arrays, ties="lowest").bags.votes.tolist() == [[1, 1], [3, 1]]
