"""Malformed input: each is handled, or refused in one line that says where; never another exception, never a silent guess."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import read_factory as make
from headcount.errors import HeadcountError
from headcount.readers import ColumnRoles, read
from headcount.readers.preprocessing import Preprocessor

GOOD = b"bag,label,f,g\na,x,1,5\na,x,2,6\nb,y,3,7\nb,y,4,9\n"

# ninety rows, of which each has another f
MANY = "bag;label;n;f\n" + "".join(f"{'ab'[k % 2]};{'xy'[k % 2]};{k % 7};{{}}{k}\n" for k in range(10, 100))

VOTES = {"roles": ColumnRoles(votes=("u", "v"))}

# (file, its bytes, options, what the refusal says)
TABLES: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "empty": ("t.csv", b"", {}, "t.csv is empty"),
    "blank lines": ("t.csv", b"\n\n\n", {}, "t.csv is empty"),
    "header only": ("t.csv", b"bag,label,f\n", {}, "a header and no rows"),
    "two columns of one name": ("t.csv", b"bag,label,f,f\na,x,1,2\n", {}, "two columns called 'f'"),
    "torn row": ("t.csv", GOOD + b"c,x,1\n", {}, r"row 5 has 3 cells for 4 columns: 'c,x,1'"),
    "long row": ("t.csv", GOOD + b"c,x,1,2,3\n", {}, r"row 5 has 5 cells for 4 columns"),
    "unclosed quote": ("t.csv", GOOD + b'c,"x,1,2\nd,y,1,2\n', {}, "opens a quote after line 5 and never closes it"),
    "latin-1": ("t.csv", "bag,label,f\nstraße,x,1\nb,y,2\n".encode("latin-1"), {}, r"not UTF-8 \(line 2"),
    "utf-16": ("t.csv", GOOD.decode().encode("utf-16"), {}, "UTF-16"),
    "a picture": ("t.csv", b"\x89PNG\r\n\x1a\n\x00\x00\xff", {}, "not UTF-8"),
    "no bag": ("t.csv", b"a,label,f\n1,x,1\n2,y,2\n", {}, r"which column is the bag\? It has 'a', 'label', 'f'"),
    "two bag columns": ("t.csv", b"bag,slide_id,label,f\na,b,x,1\n", {}, "bag may be column 'bag' or 'slide_id'"),
    "two groups": ("t.csv", b"bag,site,county,label,f\na,b,c,x,1\n", {}, "group may be column 'site' or 'county'"),
    "no label": ("t.csv", b"bag,f\na,1\nb,2\n", {}, "no label column"),
    "no label at all": ("t.csv", b"bag,label,f\na,,1\nb,,2\n", {}, "no class in column 'label'"),
    "one class": ("t.csv", b"bag,label,f\na,x,1\nb,x,2\n", {}, "only class 'x'"),
    "two labels in a bag": ("t.csv", GOOD + b"a,y,1,1\n", {}, "row 5: bag 'a' has two labels, 'x' and 'y'"),
    "no bag in a row": ("t.csv", GOOD + b",y,1,1\n", {}, r"row 5 is in no bag \(column 'bag' is empty\)"),
    "no features": ("t.csv", b"bag,label\na,x\nb,y\n", {}, "no column to learn from"),
    "only empty features": ("t.csv", b"bag,label,f\na,x,\nb,y,\n", {}, "no column to learn from .'f': it is empty"),
    "infinite": ("t.csv", GOOD + b"b,y,inf,1\n", {}, "row 5: inf in column 'f'"),
    "decimal commas, each another": ("t.csv", MANY.replace("{}", "1,").encode(), {}, r"decimal comma \('1,10'\)"),
    "dates of another form": (
        "t.csv",
        MANY.replace("{}", "01/10/20").encode(),
        {},
        r"has dates that are not written like 2021-12-31 \('01/10/2010'\)",
    ),
    "decimal comma": ("t.csv", b"bag;label;f\na;x;1,5\nb;y;2,5\n", {}, r"decimal comma \('1,5'\)"),
    "a word among numbers": (
        "t.csv", b"bag,label,f\n" + b"".join(b"%d,%d,%d.5\n" % (i // 9, i // 9 % 2, i) for i in range(36)) + b"0,0,1O\n",
        {}, r"row 37: '1O' among the numbers of column 'f'",
    ),
    "named column missing": ("t.csv", GOOD, {"roles": ColumnRoles(weight="mass")}, r"no column 'mass' \(weight\)"),
    "one column, two roles": ("t.csv", GOOD, {"roles": ColumnRoles(label="label", truth="label")}, "named as label and as truth"),
    "only x": ("t.csv", GOOD, {"roles": ColumnRoles(x="f")}, "name both"),
    "feature is the label": ("t.csv", GOOD, {"roles": ColumnRoles(features=("label",), label="f")}, "cannot be a feature|two labels"),
    "weight negative": ("t.csv", b"bag,label,f,weight\na,x,1,1\nb,y,2,-1\n", {}, "row 2: -1.0 in column 'weight' is no weight"),
    "weight huge": ("t.csv", b"bag,label,f,weight\na,x,1,1e300\nb,y,2,1\n", {}, "row 1: 1e.300 in column 'weight'"),
    "weight missing": ("t.csv", b"bag,label,f,weight\na,x,1,1\nb,y,2,\n", {}, "row 2: nan in column 'weight'"),
    "weight in words": ("t.csv", b"bag,label,f,weight\na,x,1,one\nb,y,2,1\n", {}, "row 1: 'one' in column 'weight' is not"),
    "weights all zero": ("t.csv", b"bag,label,f,weight\na,x,1,0\nb,y,2,1\n", {}, r"bag 0 \(a\) has no instance left"),
    "coordinates missing": ("t.csv", b"bag,label,f,x,y\na,x,1,1,\nb,y,2,1,1\n", {}, "row 1 has no finite coordinates"),
    "duplicate id": ("t.csv", b"bag,label,id,f\na,x,7,1\nb,y,7,2\na,x,7,3\n", {}, "row 3: id '7' .id. occurs twice"),
    "votes negative": ("t.csv", b"bag,u,v,f\na,1,-2,1\nb,1,2,2\n", VOTES, r"row 1: votes \[1.0, -2.0\]"),
    "votes half": ("t.csv", b"bag,u,v,f\na,1,,1\nb,1,2,2\n", VOTES, r"row 1: votes \[1.0, nan\]"),
    "votes differ": ("t.csv", b"bag,u,v,f\na,1,2,1\na,2,2,2\n", VOTES, "row 2: bag 'a' has two sets of votes"),
    "votes in words": ("t.csv", b"bag,u,v,f\na,1,q,1\n", VOTES, "row 1: 'q' in column 'v' is not a number"),
    "group differs": ("t.csv", b"bag,label,g,f\na,x,1,1\na,x,2,2\nb,y,1,3\n", {"roles": ColumnRoles(group="g")}, "row 2: .*groups"),
    "truth unknown": ("t.csv", b"bag,label,truth,f\na,x,x,1\nb,y,q,2\n", {}, "row 2: truth 'q' is none of the classes x, y"),
    "known unknown": ("t.csv", b"bag,label,known,f\na,x,x,1\nb,y,q,2\n", {}, "row 2: known 'q' is none of the classes x, y"),
    "only NA": ("t.csv", b"bag,label,f\na,x,1\nb,NA,2\n", {}, "only class 'x'"),
    "category not a feature": (
        "t.csv", GOOD, {"roles": ColumnRoles(features=("f",), categories=("g",))}, "'g' .* is in categories= and not in features=",
    ),
    "category beside pictures": (
        "t.csv", b"bag,label,path,g\na,x,p.png,1\n", {"roles": ColumnRoles(categories=("g",))}, "'g' is named in features= or",
    ),
    "unknown class": ("t.csv", GOOD, {"classes": ["x", "z"]}, r"row 3: 'y', the label of bag 'b', is none of the classes"),
    "uncounted unknown": ("t.csv", GOOD, {"classes": ["x", "y"], "uncounted": ["z"]}, "no class 'z' to leave out"),
    "uncounted label": ("t.csv", GOOD, {"classes": ["x", "y", "z"], "uncounted": ["y"]}, "a class that is not counted"),
    "no such rule": ("t.csv", GOOD, {"ties": "toss"}, "no rule for ties 'toss'; there are split, drop, lowest"),
    "one class asked": ("t.csv", GOOD, {"classes": ["x"]}, "two or more different names"),
    "no words": ("t.csv", b"bag,label,text\na,x,!!\nb,y,??\n", {}, "column 'text' has no words"),
    "text and path": ("t.csv", b"bag,label,text,path\na,x,q,p.png\n", {}, "has text 'text' and images 'path'"),
    "picture missing": ("t.csv", b"bag,label,path\na,x,no.png\nb,y,no.png\n", {}, "row 1: no.png cannot .*: No such file"),
    "not parquet": ("t.parquet", b"PAR1 but no", {}, "cannot read .*t.parquet as a table"),
    "empty parquet": ("t.parquet", b"", {}, "cannot read .*t.parquet as a table"),
    "not gzip": ("t.csv.gz", b"plain", {}, "cannot read .*t.csv.gz"),
    "unknown ending": ("t.xlsx", b"PK", {}, "give a folder, or a file ending in .csv"),
    "one slide": ("t.h5", b"", {}, "t.h5 is one slide; give the folder that holds"),
    "not npz": ("t.npz", b"PK\x03\x04", {}, "cannot read .*t.npz"),
    "text as npz": ("t.npz", GOOD, {}, r"t.npz is no \.npz file; give an \.npz file written by numpy.savez$"),
    "text as npy": ("t.npy", GOOD, {}, r"t.npy is no \.npy file; give an \.npy file written by numpy.save$"),
    "not npy": ("t.npy", b"\x93NUMPY\x01\x00", {}, "cannot read .*t.npy"),
    "pickled npy": ("t.npy", b"", {"object": True}, "cannot read .*t.npy"),
    "side nought": ("t.csv", GOOD, {"side": 0}, "side is a whole number from 1 to"),
    "labels lost": ("t.csv", GOOD, {"labels": "nowhere.csv"}, "no label file nowhere.csv"),
    "labels too few": ("t.csv", GOOD, {"labels": ["x"]}, r"labels of shape \(1,\) for 2 bags"),
    "labels for nobody": ("t.csv", GOOD, {"labels": {"a": "x", "c": "y"}}, "row 2 labels bag 'c', and there is no such bag"),
    "votes too narrow": ("t.csv", GOOD, {"labels": np.ones((2, 3)), "classes": ["x", "y"]}, "a number for each of 2 classes"),
}  # fmt: skip


def outcome(data: Any, options: dict[str, Any]) -> Any:
    """The tables' bottom line: a reading that becomes bags."""
    reading = read(data, **options)
    return reading.to_bags(reading.fit_preprocessor())


def finite(reading: Any) -> bool:
    return bool(torch.isfinite(reading.to_bags(reading.fit_preprocessor()).pool.data).all())


@pytest.mark.parametrize("case", TABLES)
def test_bad_files(tmp_path, case):
    name, content, options, says = TABLES[case]
    options = dict(options)
    (tmp_path / name).write_bytes(content)
    if options.pop("object", False):
        np.save(tmp_path / name, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(HeadcountError, match=says) as e:
        outcome(tmp_path / name, options)
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == [name], "nothing was left behind"


SKIPPED = {
    "torn row": (GOOD + b"c,x,1\n", {}, 1, 4),
    "no bag in a row": (GOOD + b",y,1,1\n", {}, 1, 4),
    "infinite": (GOOD + b"b,y,inf,1\na,x,-inf,1\n", {}, 2, 4),
    "duplicate id": (b"bag,label,id,f\na,x,7,1\nb,y,7,2\na,x,7,3\n", {}, 1, 2),
    "weight": (b"bag,label,f,weight\na,x,1,1\nb,y,2,-1\nb,y,2,nan\nb,y,2.5,1\n", {}, 2, 2),
    "two labels": (GOOD + b"a,y,1,1\na,z,1,1\nc,x,1,1\n", {}, 1, 7),
    "all of a bag": (GOOD + b"c,x,inf,1\n", {}, 1, 4),
    "label of nobody": (GOOD, {"labels": {"a": "x", "b": "y", "q": "y"}}, 1, 4),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped_and_listed(tmp_path, case):
    content, options, skipped, left = SKIPPED[case]
    (tmp_path / "t.csv").write_bytes(content)
    reading = read(tmp_path / "t.csv", skip_bad=True, **options)
    assert len(reading.skipped) == skipped
    assert len(reading.rows) == left
    assert all("row" in line for line in reading.skipped)
    assert finite(reading)
    if case == "two labels":
        assert reading.bags.label.tolist() == [-1, 1, 0], "two labels are none"
    if case == "all of a bag":
        assert any("1 bags left out" in line for line in reading.description)


@pytest.mark.parametrize("word", ["NA", "nan", "None", "null", "N/A", "<NA>"])
def test_words_for_nothing_are_no_class(tmp_path, word):
    """R writes NA where nothing is; the file's own labels and those beside it, truth and known alike."""
    table = {"bag": [*"aabbcc"], "label": [*"xxyy", word, word], "truth": [*"xxyyx", word], "f": [1, 5, 2, 7, 4, 3]}
    table["known"] = ["x", *[word] * 5]
    file = make.write_csv(tmp_path / "t.csv", table)
    reading = read(file)
    laid = reading.bags
    assert laid.classes == ("x", "y")
    assert laid.label.tolist() == [0, 1, -1]
    assert laid.truth is not None
    assert laid.known is not None
    assert (laid.truth.tolist(), laid.known.tolist()) == ([0, 0, 1, 1, 0, -1], [0, -1, -1, -1, -1, -1])
    assert f"column 'label': '{word}' in 2 rows read as missing; a class of that name must be named in classes=" in (
        reading.description
    )
    beside = make.write_csv(tmp_path / "l.csv", {"bag": [*"abc"], "label": ["x", "y", word]})
    assert read(file, labels=beside).bags.label.tolist() == [0, 1, -1]
    given = {"features": np.eye(6, dtype="f4"), "sizes": [2, 2, 2], "labels": ["x", "y", word]}
    np.savez(tmp_path / "t.npz", **given, truth=[*"xxyyx", word], known=["x", *[word] * 5])
    for arrays in (tmp_path / "t.npz", {**given, "truth": [*"xxyyx", word], "known": ["x", *[word] * 5]}):
        again = read(arrays)
        assert f"column 'labels': '{word}' in 1 rows read as missing; a class of that name must be named in classes=" in (
            again.description
        )
        assert again.bags.classes == ("x", "y")
        assert again.bags.label.tolist() == [0, 1, -1]
        assert (again.bags.truth.tolist(), again.bags.known.tolist()) == (laid.truth.tolist(), laid.known.tolist())
        assert read(arrays, classes=["x", "y", word]).bags.label.tolist() == [0, 1, 2]
    named = read(file, classes=["x", "y", word]).bags
    assert named.label.tolist() == [0, 1, 2], "who names it has the class"
    assert named.truth is not None
    assert named.truth.tolist()[-1] == 2


def test_a_known_class_that_no_bag_won_is_named():
    table = {"bag": [*"aabb"], "label": [*"xxyy"], "known": ["x", "q", None, None], "f": [1, 5, 2, 7]}
    for how in ({"classes": ["x", "y", "q"]}, {"uncounted": ["q"]}):
        laid = read(table, **how).bags
        assert laid.known is not None
        assert laid.known.tolist() == [0, 2, -1, -1]


def test_a_label_outside_the_classes_is_found(tmp_path):
    """In the label file if it stands there; an array has no rows."""
    labels = make.write_csv(tmp_path / "l.csv", {"bag": ["b", "a"], "label": ["Palme", "x"]})
    table = {"bag": [*"aabb"], "f": [1, 5, 2, 7]}
    with pytest.raises(HeadcountError, match=r"l\.csv row 1: 'Palme', the label of bag 'b', is none of the classes x, y;"):
        read(table, labels=labels, classes=["x", "y"])
    with pytest.raises(HeadcountError, match=r"^labels row 2: 'Palme', the label of bag 'b', is none of the classes x, y;"):
        read(table, labels=["x", "Palme"], classes=["x", "y"])


def test_a_slip_among_numbers_is_skipped():
    n = 40
    table = {"bag": [i // 4 for i in range(n)], "label": [i // 4 % 2 for i in range(n)], "f": [f"{i * i}.5" for i in range(n)]}
    table["f"][7] = "1O"
    reading = read(table, skip_bad=True)
    assert len(reading.skipped) == 1
    assert [f.kind for f in reading.schema.fields] == ["number"]
    assert reading.to_bags(reading.fit_preprocessor()).pool.data.shape == (39, 1)
    named = read(table, ColumnRoles(categories=("f",)))
    assert [f.kind for f in named.schema.fields] == ["category"]


def test_a_model_is_not_told_what_to_name():
    """A model's columns and classes are what they are: nobody can name them anew."""
    table = {"bag": [*"aabb"], "label": [*"xxyy"], "f": [1, 5, 2, 7]}
    how = {"preprocessor": read(table).fit_preprocessor(), "classes": ["x", "y"]}
    with pytest.raises(HeadcountError, match=r"row 2: '1O' among the numbers of column 'f'; correct it or leave it empty$"):
        read({**table, "f": ["1", "1O", "2", "3"]}, need_labels=False, **how)
    with pytest.raises(HeadcountError, match=r"'q', the label of bag 'b', .* x, y; correct it or leave it empty$"):
        read({**table, "label": [*"xxqq"]}, **how)


def test_categories_a_model_has_never_seen():
    table = {"bag": [*"aabb"], "label": [*"xxyy"], "soil": ["clay", "sand", "sand", "clay"], "f": [1, 5, 2, 7]}
    how = {"preprocessor": read(table).fit_preprocessor(), "classes": ["x", "y"], "need_labels": False}
    new = read({**table, "soil": ["lava", "sand", None, "lava"]}, **how)
    assert "column 'soil': 2 of 3 values were not seen in fitting ('lava')" in new.description
    assert not any("not seen" in line for line in read(table, **how).description)


def test_quotes_that_are_fine(tmp_path):
    """Newlines and quotes inside quotes; an inch sign in the middle of a word."""
    (tmp_path / "t.csv").write_bytes(b'bag,label,f,note\r\n"a\r\nb",x,1,"say ""hi"""\r\nb,y,2,5" pipe\r\n')
    reading = read(tmp_path / "t.csv")
    assert reading.bags.names == ("a\r\nb", "b")
    assert "note" in [f.name for f in reading.schema.fields]


# -- frames and arrays -------------------------------------------------------------------------------------------------

X = np.arange(12.0).reshape(6, 2)
ARRAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nothing": ([], {}, "list of bags is empty"),
    "none": (None, {}, "cannot read NoneType"),
    "a number": (7, {}, "cannot read int"),
    "an empty bag": ([X, X[:0]], {"labels": [0, 1]}, "bag '1' has shape"),
    "other width": ([X, X[:, :1]], {"labels": [0, 1]}, "bag '1' has shape"),
    "other rank": ([X, X[0]], {"labels": [0, 1]}, "bag '1' has shape"),
    "words": ([np.array([["a"]])], {"labels": [0]}, "bag '0' holds <U1; give numbers"),
    "objects": ([np.array([[{}]])], {"labels": [0]}, "bag '0' holds object; give numbers"),
    "complex": ([X + 1j], {"labels": [0]}, "bag '0' holds complex128"),
    "ragged": ([[[1, 2], [3]]], {"labels": [0]}, "is not an array"),
    "nan": ([X, np.where(X == 5, np.nan, X)], {"labels": [0, 1]}, "row 9 .bag '1'. has a number that is not finite; correct it"),
    "beyond float32": ([X, X * 1e300], {"labels": [0, 1]}, "row 7 .bag '1'. has a number that is not finite"),
    "float pictures": ([np.full((2, 4, 4, 3), 300.5)], {"labels": [0]}, "images are uint8"),
    "four channels": ([np.zeros((2, 4, 4, 4), np.uint8)], {"labels": [0]}, "images are uint8 .N, H, W, 1 or 3."),
    "flat array": (X, {}, "one array alone is"),
    "no labels": ([X, X], {}, "has no labels"),
    "labels of another kind": ([X, X], {"labels": 5}, "one per bag"),
    "deep labels": ([X, X], {"labels": np.zeros((2, 1, 1))}, r"labels of shape \(2, 1, 1\)"),
    "class number": ([X, X], {"labels": [0, 7], "classes": ["a", "b"]}, "label 7 of bag 2 is neither"),
    "no bags said": ({"features": X, "labels": [0, 1]}, {}, "by one of bag, sizes or offsets; it has none"),
    "said twice": ({"features": X, "bag": [0] * 6, "sizes": [6], "labels": [0]}, {}, "it has bag, sizes"),
    "two pools": ({"features": X, "X": X, "bag": [0] * 6}, {}, "it needs one of"),
    "sizes": ({"features": X, "sizes": [2, 3], "labels": [0, 1]}, {}, "do not add up"),
    "empty size": ({"features": X, "sizes": [6, 0], "labels": [0, 1]}, {}, "bag 2 of 2 is empty; .* skip_bad="),
    "ids in no order": ({"features": X, "bag": [*"bbaacc"], "labels": [0, 1, 2]}, {}, "which of the bags 'b', 'a', 'c'"),
    "numbers as words": ({"features": X, "bag": [10, 10, 8, 8, 9, 9], "labels": [0, 1, 2]}, {}, "Number them 0 to 2"),
    "other names": ({"features": X, "bag": [*"aaabbb"], "names": [*"ac"], "labels": [0, 1]}, {}, "let names list the"),
    "two names": ({"features": X, "bag": [*"aabbcc"], "names": [*"ab"], "labels": [0, 1, 0]}, {}, "are 2 for 3 bags"),
    "nobody in it": ({"features": X, "bag": [0, 0, 1, 1, 3, 3], "labels": [0, 1, 0, 1]}, {}, "no instance is in bag '2'"),
    "offsets": ({"features": X, "offsets": [1, 6], "labels": [0]}, {}, "do not add up"),
    "huge size": ({"features": X, "sizes": np.array([2**62, 2**62], np.int64), "labels": [0, 1]}, {}, "do not add up"),
    "float sizes": ({"features": X, "sizes": [2.0, 4.0], "labels": [0, 1]}, {}, "must be whole numbers"),
    "bags too few": ({"features": X, "bag": [0, 1], "labels": [0, 1]}, {}, "for 6 instances"),
    "names": ({"features": X, "sizes": [3, 3], "names": ["a", "a"], "labels": [0, 1]}, {}, "two bags called 'a'"),
    "coords": ({"features": X, "sizes": [3, 3], "coords": np.full((6, 2), np.nan), "labels": [0, 1]}, {}, "two finite numbers"),
    "weight": ({"features": X, "sizes": [3, 3], "weight": [1, 1, 1, 1, 1, -1], "labels": [0, 1]}, {}, "row 6: -1.0"),
    "truth": ({"features": X, "sizes": [3, 3], "truth": np.full(6, 9), "labels": [0, 1], "classes": [*"ab"]}, {}, "are 2"),
    "nested column": (pa.table({"bag": [1, 2], "label": [1, 2], "f": [{"a": 1}, {"a": 2}]}), {}, "it holds struct"),
    "uneven lists": (pa.table({"bag": [1, 2], "label": [1, 2], "f": [[1.0], [1.0, 2.0]]}), {}, "a list of 2 numbers in row 2"),
    "missing list": (pa.table({"bag": [1, 2], "label": [1, 2], "f": [[1.0], None]}), {}, "no list in row 2"),
    "mixed frame": ({"bag": [1, 2], "label": [1, 2], "f": [1, "a"]}, {}, "give each column one type"),
    "columns of two lengths": ({"bag": [1, 2], "label": [1]}, {}, "cannot take the DataFrame"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARRAYS)
def test_bad_objects(case):
    given, options, says = ARRAYS[case]
    with pytest.raises(HeadcountError, match=says) as e:
        outcome(given, options)
    assert "\n" not in str(e.value)


def test_skipped_rows_of_arrays():
    x = X.copy()
    x[1, 0] = np.nan
    reading = read([x, X], labels=[0, 1], skip_bad=True)
    assert reading.rows.tolist() == [0, 2, 3, 4, 5, *range(6, 12)]
    assert reading.n_rows == 12
    assert reading.to_bags().pool.data.shape == (11, 2)
    assert np.array_equal(reading.to_bags().pool.take(reading.bags.index).numpy(), np.concatenate([x, X])[reading.rows])
    assert "row 2" in reading.skipped[0]


def test_an_empty_bag_is_skipped_with_its_label():
    given = {"features": X, "sizes": [3, 0, 3], "labels": ["u", "v", "w"], "names": ["a", "b", "c"]}
    reading = read(given, skip_bad=True)
    assert reading.bags.names == ("a", "c")
    assert [reading.bags.classes[k] for k in reading.bags.label.tolist()] == ["u", "w"]
    assert "bag 2 of 3 ('b') is empty" in reading.skipped[0]


def test_a_misnamed_array_is_listed(tmp_path):
    np.savez(tmp_path / "t.npz", feats=X, sizes=[3, 3], labels=[0, 1])
    with pytest.raises(HeadcountError, match="has 'feats', 'sizes', 'labels'; it needs one of features"):
        read(tmp_path / "t.npz")


def test_odd_but_fine():
    assert read([X.astype(">f8"), X], labels=["u", "v"]).to_bags().pool.data.dtype.is_floating_point
    assert read([X[::-1], X], labels=["u", "v"]).to_bags().pool.data[0].tolist() == [10, 11]
    assert read([X.astype(bool), X > 3], labels=[True, False]).bags.classes == ("False", "True")
    assert read([X.astype(np.uint16), X.astype(np.int8)], labels=[1.0, np.nan], classes=["1", "2"]).bags.label.tolist() == [
        0,
        -1,
    ]


# -- folders -----------------------------------------------------------------------------------------------------------


def ruin(root: Path, how: str) -> str:
    """Spoil a good folder; gives what the refusal must say."""
    if how == "not a picture":
        (root / "bag1" / "1.png").write_bytes(b"no picture")
        return r"bag1/1\.png cannot be read as an image"
    if how == "cut short":
        whole = (root / "bag1" / "1.png").read_bytes()
        (root / "bag1" / "1.png").write_bytes(whole[: len(whole) - 40])
        return r"bag1/1\.png cannot be read as an image"
    if how == "broken link":
        (root / "bag1" / "x.png").symlink_to(root / "nowhere")
        return r"bag1/x\.png cannot be read as an image: No such file"
    if how == "round link":
        (root / "bag1" / "x.png").symlink_to(root / "bag1" / "x.png")
        return r"bag1/x\.png cannot be read as an image: Too many levels"
    if how == "a pipe":
        os.mkfifo(root / "bag1" / "x.png")
        return r"bag1/x\.png cannot be read as an image: it is a folder, a pipe or a device"
    if how == "32 bits":
        Image.fromarray(np.zeros((6, 5), np.float32)).save(root / "bag1" / "1.png", format="TIFF")
        return r"bag1/1\.png .*32 bits"
    if how == "no labels.csv":
        (root / "labels.csv").unlink()
        return "has no labels.csv"
    if how == "label for nobody":
        make.write_csv(root / "labels.csv", {"bag": ["bag0", "bag1", "bagX"], "label": ["a", "b", "a"]})
        return r"labels\.csv row 3 labels bag 'bagX'"
    if how == "empty bag":
        (root / "bag9").mkdir()
        make.write_csv(root / "labels.csv", {"bag": ["bag0", "bag1", "bag9"], "label": ["a", "b", "a"]})
        return r"labels\.csv row 3 labels bag 'bag9', whose folder holds no images"
    if how == "two labels":
        make.write_csv(root / "labels.csv", {"bag": ["bag0", "bag1", "bag0"], "label": ["a", "b", "b"]})
        return r"labels\.csv row 3: bag 'bag0' has two labels, 'a' and 'b'"
    if how == "labels without bags":
        make.write_csv(root / "labels.csv", {"u": ["bag0"], "v": ["q"], "label": ["a"]})
        return "which column names the bags"
    if how == "labels without labels":
        make.write_csv(root / "labels.csv", {"bag": ["bag0"], "v": ["q"]})
        return r"labels\.csv has no label column; it has 'bag', 'v'"
    if how == "two depths":
        make.picture(root / "bag0" / "deeper" / "1.png")
        return "is a bag one folder down or two"
    if how == "empty":
        for file in root.rglob("*.png"):
            file.unlink()
        return "no images in the sub-folders"
    raise AssertionError(how)


RUINED = [
    "not a picture", "cut short", "broken link", "round link", "a pipe", "32 bits", "no labels.csv", "label for nobody", "empty bag",
    "two labels", "labels without bags", "labels without labels", "two depths", "empty",
]  # fmt: skip


@pytest.mark.parametrize("how", RUINED)
def test_bad_folders(tmp_path, how):
    make.folder(tmp_path / "f")
    says = ruin(tmp_path / "f", how)
    with pytest.raises(HeadcountError, match=says) as e:
        read(tmp_path / "f")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("how", ["not a picture", "cut short", "32 bits"])
@pytest.mark.parametrize("cached", [False, True])
def test_bad_pictures_are_skipped(tmp_path, how, cached):
    make.folder(tmp_path / "f")
    good = read(tmp_path / "f")
    ruin(tmp_path / "f", how)
    for _ in range(2):  # the second time from the cache
        reading = read(tmp_path / "f", skip_bad=True, cache=tmp_path / "c" if cached else None)
        assert len(reading.skipped) == 1
        assert "bag1/1.png" in reading.skipped[0]
        assert reading.rows.tolist() == [0, 1, 2, 3, *range(5, 12)]
        x = reading.to_bags().pool.take(reading.bags.index)
        assert np.array_equal(x.numpy(), good.to_bags().pool.data[reading.rows].numpy())


def test_pictures_of_another_size_than_the_models(tmp_path):
    learned = read(make.folder(tmp_path / "f")).fit_preprocessor()
    new = make.folder(tmp_path / "new")
    how = {"preprocessor": learned, "classes": ["cat", "dog"], "need_labels": False}
    assert not any("resized" in line for line in read(new, **how).description)
    make.picture(new / "bag1" / "0.png", size=(9, 12))
    said = f"1 of 12 images are resized to the model's 5x6; the first, {new / 'bag1' / '0.png'}, is 12x9"
    assert said in read(new, **how).description


def test_folder_that_is_not_there(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(HeadcountError):
            read(path)


def test_strange_names(tmp_path):
    """Any name a disk allows, bytes that are no UTF-8 among them."""
    make.folder(tmp_path)
    import os

    (tmp_path / "bag0").rename(tmp_path / "<b>日本\n'\"")
    os.rename(bytes(tmp_path / "bag1"), bytes(tmp_path) + b"/\xff\xfe")
    (tmp_path / "labels.csv").unlink()
    reading = read(tmp_path, labels={"bag2": "u", "bag3": "v"})
    assert len(reading.bags) == 4
    assert "<b>日本\n'\"" in reading.bags.names
    assert all(name.encode() for name in reading.bags.names)


# -- hostile preparations ----------------------------------------------------------------------------------------------


def spoilt(said: dict[str, Any], how: str) -> Any:
    said = json.loads(json.dumps(said))
    number, category = said["fields"][0], said["fields"][2]
    match how:
        case "format":
            said["format"] = 3
        case "kind":
            said["kind"] = "pickle"
        case "shape":
            said["shape"] = [7]
        case "negative shape":
            said["shape"] = [-1]
        case "huge shape":
            said["shape"] = [2**40]
        case "shape of pictures":
            said["shape"] = [8, 8, 3]
        case "list":
            return [said]
        case "none":
            return None
        case "extra":
            said["code"] = "import os"
        case "missing":
            del said["fields"]
        case "fields":
            said["fields"] = {"a": 1}
        case "field":
            said["fields"][0] = "age"
        case "field kind":
            number["kind"] = "eval"
        case "field extra":
            number["hook"] = "x"
        case "scale":
            number["scale"] = 0
        case "nan":
            number["mean"] = float("nan")
        case "text for a number":
            number["mean"] = "0"
        case "flag":
            number["missing"] = 1
        case "name":
            number["name"] = 3
        case "one name":
            said["fields"][1]["name"] = "age"
        case "categories":
            category["categories"] = "abc"
        case "category twice":
            category["categories"] = ["blue", "blue", "red"]
        case "category number":
            category["categories"] = ["blue", 3, "red"]
        case "role":
            said["roles"] = {"__class__": "x"}
        case "role value":
            said["roles"] = {"bag": ["x"]}
        case "roles":
            said["roles"] = []
        case "no fields":
            said["fields"] = []
        case "text without arrays":
            said["fields"][0] = {"name": "t", "kind": "text", "vocabulary": ["a"]}
    return said  # fmt: skip


HOSTILE = [
    "format", "kind", "shape", "negative shape", "huge shape", "shape of pictures", "list", "none", "extra", "missing",
    "fields", "field", "field kind", "field extra", "scale", "nan", "text for a number", "flag", "name", "one name",
    "categories", "category twice", "category number", "role", "role value", "roles", "no fields", "text without arrays",
]  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_preparation_is_refused(how):
    said = read(make.rows()).fit_preprocessor().to_json()
    assert Preprocessor.from_parts(said).shape == (6,)
    with pytest.raises(HeadcountError):
        Preprocessor.from_parts(spoilt(said, how))


def test_hostile_arrays_are_refused():
    learned = read(make.texts()).fit_preprocessor()
    said, arrays = learned.to_json(), learned.arrays()
    idf = arrays["text.0.idf"]
    wrong: list[dict[str, Any]] = [
        {}, {"text.0.idf": idf[:-1]}, {"text.0.idf": idf.astype(object)}, {"text.0.idf": idf * np.nan},
        {"text.0.idf": idf.tolist()}, {**arrays, "more": idf}, {**arrays, "text.0.components": np.zeros((3, 2), np.float32)},
        {**arrays, "text.0.components": np.zeros((101, len(idf)), np.float32)},
    ]  # fmt: skip
    for held in wrong:
        with pytest.raises(HeadcountError):
            Preprocessor.from_parts(said, held)


def test_model_and_data_of_two_kinds(tmp_path):
    table, pictures, arrays = (
        read(make.rows()).fit_preprocessor(),
        read(make.folder(tmp_path / "f")).fit_preprocessor(),
        read([X, X], labels=[0, 1]).fit_preprocessor(),
    )
    how: dict[str, Any] = {"classes": ["a", "b"], "need_labels": False}
    with pytest.raises(HeadcountError, match="the model takes table"):
        read(tmp_path / "f", preprocessor=table, **how)
    with pytest.raises(HeadcountError, match="the model takes images, and the table is a table without images"):
        read(make.rows(), preprocessor=pictures, **how)
    with pytest.raises(HeadcountError, match=r"features of shape \(1,\), the model takes features of \(2,\)"):
        read([X[:, :1]], preprocessor=arrays, **how)
    with pytest.raises(HeadcountError, match="the model takes images"):
        read([X], preprocessor=pictures, **how)


def test_parquet_of_odd_types(tmp_path):
    """Dictionaries in another order, decimals, times, large strings: read, and in the order of first appearance."""
    import datetime as dt
    from decimal import Decimal

    bag = pa.DictionaryArray.from_arrays([2, 0, 2, 0], ["z", "unused", "a"])
    table = pa.table({
        "bag": bag, "label": pa.array(["x", "y", "x", "y"], pa.large_string()),
        "d": [Decimal("1.5"), Decimal("2.25"), None, Decimal(3)],
        "t": [dt.datetime(2020, 1, 1, 12, i) for i in (0, 5, 9, 7)], "s": pa.array(["u", "v", "u", "w"], pa.string_view()),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet")
    for way in (table, tmp_path / "t.parquet"):
        reading = read(way)
        assert reading.bags.names == ("a", "z")
        assert {f.name: f.kind for f in reading.schema.fields} == {"d": "number", "t": "number", "s": "category"}
        assert finite(reading)
