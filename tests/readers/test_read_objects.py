"""Python objects as their users hold them: labels missing, soft or per row; sparse matrices; stacks of images; DataFrames and Series."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from headcount import fit, read
from headcount.errors import HeadcountError
from headcount.readers import ColumnRoles

NAN = float("nan")
X = np.random.default_rng(0).normal(size=(12, 3))
IDS = np.repeat(["w", "x", "y", "z"], 3)
LABELS = ["a", "b", "a", "b"]
BAGS = [X[:3], X[3:6], X[6:9], X[9:]]
IMAGES = np.random.default_rng(1).integers(0, 256, (12, 4, 5, 3), dtype=np.uint8)
FRAME = pd.DataFrame(X, columns=["p", "q", "r"])


@pytest.mark.parametrize(
    "labels",
    [["a", None, "b", NAN], pd.Series(["a", pd.NA, "b", None]), [0, None, 1, NAN], np.array([0, NAN, 1, NAN]), [0, -1, 1, -1]],
    ids=["texts", "Series", "numbers", "floats", "minus one"],
)
def test_a_bag_without_a_label_is_unlabelled(labels):
    dataset = read(BAGS, labels=labels)
    assert dataset.bags.label.tolist() == [0, -1, 1, -1]
    assert "2 bags have no label: '1', '3'" in dataset.description


def test_minus_one_is_told_in_one_line_for_rows_too():
    dataset = read(X, bags=IDS, labels=np.repeat([0, 1, -1, 1], 3))
    assert dataset.bags.label.tolist() == [0, 1, -1, 1]
    assert any("'-1' in 3 rows read as missing" in line for line in dataset.description)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([[0.25, 0.75], [NAN, NAN], [1, 0], [0, 1]]),
        [[0.25, 0.75], None, [1, 0], [0, 1]],
        {"w": [0.25, 0.75], "x": None, "y": [1, 0], "z": [0, 1]},
        pd.Series([[0.25, 0.75], None, [1, 0], [0, 1]], index=list("wxyz")),
        pd.DataFrame({"no": [0.25, NAN, 1, 0], "yes": [0.75, NAN, 0, 1]}, index=list("wxyz")),
        pd.DataFrame({"yes": [0.75, 0, 1], "bag": ["w", "y", "z"], "no": [0.25, 1, 0]}),
    ],
    ids=["array", "list", "dict", "Series", "DataFrame by index", "DataFrame by column"],
)
def test_probabilities_of_bags_are_soft_labels(labels):
    dataset = read(dict(zip("wxyz", BAGS, strict=True)), labels=labels, classes=["no", "yes"])
    assert dataset.bags.target.tolist() == [[0.25, 0.75], [0, 0], [1, 0], [0, 1]]


def test_numeric_columns_that_are_no_probabilities_are_not_taken_for_them():
    with pytest.raises(HeadcountError, match="has no label column"):
        read(
            dict(zip("wxyz", BAGS, strict=True)), labels=pd.DataFrame({"bag": list("wxyz"), "age": X[:4, 0], "size": X[:4, 1]})
        )


@pytest.mark.parametrize(
    "data", [X, FRAME, FRAME.to_dict("list"), sparse.csr_matrix(X), torch.tensor(X)], ids=lambda d: type(d).__name__
)
@pytest.mark.parametrize("per_row", [False, True])
def test_bags_and_labels_beside_the_rows(data, per_row):
    shuffled = np.random.default_rng(2).permutation(12)
    if isinstance(data, dict):
        data = {name: [column[i] for i in shuffled] for name, column in data.items()}
    else:
        data = data.iloc[shuffled] if isinstance(data, pd.DataFrame) else data[shuffled]
    ids = IDS[shuffled]
    labels = pd.Series(np.repeat(LABELS, 3)[shuffled]) if per_row else dict(zip("wxyz", LABELS, strict=True))
    dataset = read(data, bags=pd.Series(ids), labels=labels)
    label = dict(zip(dataset.bags.names, dataset.bags.label_names, strict=True))
    assert label == dict(zip("wxyz", LABELS, strict=True))
    instances = dataset.to_bags(dataset.fit_preprocessor())
    for b, name in enumerate(dataset.bags.names):
        got = instances.pool.data[instances.index[instances.offsets[b] : instances.offsets[b + 1]]].numpy()
        expected = X[shuffled[ids == name]]
        if dataset.kind == "table":
            expected = (expected - X.mean(0)) / X.std(0)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_rows_of_one_bag_with_two_labels_are_refused():
    conflict = np.repeat(LABELS, 3)
    conflict[4] = "a"
    for data in (X, FRAME):
        with pytest.raises(HeadcountError, match="row 5: bag 'x' has two labels, 'b' and 'a'"):
            read(data, bags=IDS, labels=conflict)
    with pytest.raises(HeadcountError, match="bag 'x' has two labels"):  # a Series by bag, each bag several times
        read(X, bags=IDS, labels=pd.Series(conflict, index=IDS))


def test_bags_name_a_column_or_are_one_per_row():
    frame = FRAME.assign(street=IDS)
    assert read(frame, bags="street", labels=LABELS).bags.names == tuple("wxyz")
    for data in (X, FRAME, IMAGES):
        with pytest.raises(HeadcountError, match=r"one per (row|instance)"):
            read(data, bags=IDS[:-1], labels=LABELS)
    with pytest.raises(HeadcountError, match="given twice"):
        read(frame, ColumnRoles(bag="street"), bags=IDS, labels=LABELS)
    with pytest.raises(HeadcountError, match="in memory"):
        read("rows.csv", bags=IDS, labels=LABELS)
    for data in (X, sparse.csr_matrix(X), pd.Series(["a b"] * 12)):
        with pytest.raises(HeadcountError, match="bags="):
            read(data, labels=LABELS)


def test_a_series_of_texts_and_a_sparse_frame():
    texts = pd.Series(["good film", "dull film", "fine story"] * 4)
    assert read(texts, bags=IDS, labels=LABELS).kind == "text"
    dense = read(FRAME.clip(0), bags=IDS, labels=LABELS)
    frame = pd.DataFrame.sparse.from_spmatrix(sparse.csr_matrix(X.clip(0))).set_axis(["p", "q", "r"], axis=1)
    assert read(frame, bags=IDS, labels=LABELS).content.to_pydict() == dense.content.to_pydict()


@pytest.mark.parametrize("sparse_type", [sparse.csr_matrix, sparse.csc_array, sparse.coo_matrix])
def test_sparse_bags(sparse_type):
    dense = read(BAGS, labels=LABELS)
    assert read([sparse_type(b) for b in BAGS], labels=LABELS).fingerprint == dense.fingerprint
    assert read({"features": sparse_type(X), "bag": IDS}, labels=LABELS).bags.names == tuple("wxyz")


@pytest.mark.parametrize(
    ("stack", "note"),
    [
        (IMAGES, ""),
        (IMAGES / 255, "from 0 to 1"),
        ((IMAGES / 255).astype(np.float32), "from 0 to 1"),
        (IMAGES.astype(np.int64), ""),
        (IMAGES.astype(np.float32), ""),
        (torch.tensor(IMAGES).permute(0, 3, 1, 2), "channels first"),
    ],
    ids=["bytes", "0 to 1", "float32", "int64", "whole floats", "PyTorch"],
)
def test_a_stack_of_images(stack, note):
    expected = read({"images": IMAGES, "bag": IDS}, labels=LABELS)
    dataset = read(stack, bags=IDS, labels=LABELS)
    assert dataset.kind == "images"
    assert dataset.schema.shape == (4, 5, 3)
    assert np.array_equal(dataset.content, IMAGES)
    assert dataset.fingerprint == expected.fingerprint
    assert any(note in line for line in dataset.description)
    assert not note or not any(note in line for line in expected.description)


def test_numbers_that_are_no_images_are_refused():
    for stack in (IMAGES - 300.0, np.full((12, 4, 5, 3), NAN), IMAGES + 0.5):
        with pytest.raises(HeadcountError, match="images are uint8"):
            read(stack, bags=IDS, labels=LABELS)


def test_a_model_is_fitted_to_rows_and_their_bags():
    rng = np.random.default_rng(0)
    truth = np.concatenate([rng.permutation([b % 2] * 7 + [1 - b % 2] * 3) for b in range(30)])
    x = rng.normal(size=(300, 2)) + 4 * truth[:, None]
    labels = np.repeat([b % 2 for b in range(30)], 10)
    dataset = read(pd.DataFrame(x, columns=["u", "v"]), bags=np.repeat(np.arange(30), 10), labels=labels)
    predictions = fit(dataset, "em_forest", folds=2).predict(dataset)
    assert (predictions.instance_prediction == truth).mean() > 0.9
