"""Sources from small files in the official formats, with the expected counts reduced accordingly."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import pickle
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from headcount.datasets import cache as caches, parsers, registry
from headcount.datasets.cache import Remote, fetch
from headcount.errors import HeadcountError, HeadcountWarning

RNG = np.random.default_rng(0)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def random_images(count: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


# -- small official files: each writes into <cache>/downloads and returns the expected arrays ---------------------------


def small_cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Six batches of four, in another order than in the source."""
    images, labels = random_images(24, 32, 32, 3), np.arange(24) % 10
    records = np.concatenate([labels[:, None].astype(np.uint8), images.transpose(0, 3, 1, 2).reshape(24, -1)], 1)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    parts = {name: records[4 * i : 4 * i + 4].tobytes() for i, name in enumerate(names)}
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name in sorted({*names, "batches.meta.txt"}, reverse=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(parts.get(name, b""))
            tar.addfile(member, io.BytesIO(parts.get(name, b"")))
    return images, labels


def small_svhn(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = random_images(14, 32, 32, 3), np.arange(14) % 10
    for file, rows in (("train_32x32.mat", slice(0, 11)), ("test_32x32.mat", slice(11, 14))):
        y = np.where(labels[rows] == 0, 10, labels[rows])  # as published: the digit 0 has label 10
        savemat(folder / file, {"X": images[rows].transpose(1, 2, 3, 0), "y": y[:, None].astype(np.uint8)})
    return images, labels


def small_medmnist(folder: Path, file: str, classes: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = random_images(15, *shape), np.arange(15) % classes
    np.savez(
        folder / file,
        train_images=images[:12],
        train_labels=labels[:12, None].astype(np.uint8),
        val_images=np.array([{"never": "read"}], dtype=object),  # reading it would need pickle, which is refused
        val_labels=np.array([{"never": "read"}], dtype=object),
        test_images=images[12:],
        test_labels=labels[12:, None].astype(np.uint8),
    )
    return images, labels


def small_path(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return small_medmnist(folder, "pathmnist.npz", 9, 28, 28, 3)


def small_oct(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = small_medmnist(folder, "octmnist.npz", 4, 28, 28)
    return np.stack([images] * 3, axis=-1), labels


WRITERS = {"cifar10": small_cifar10, "svhn": small_svhn, "path": small_path, "oct": small_oct}


@pytest.fixture
def shrink(tmp_path, monkeypatch):
    """shrink(name): a small official file in a new cache, and a registry entry that expects it."""

    def make(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        downloads = tmp_path / "downloads"
        downloads.mkdir(exist_ok=True)
        images, labels = WRITERS[name](downloads)
        entry = registry.SOURCES[name]
        files = tuple(Remote(old.url, md5(downloads / old.file)) for old in entry.files)
        digest = hashlib.sha256(images.tobytes()).hexdigest() if entry.sha256 else None
        small = replace(entry, count=len(images), files=files, sha256=digest)
        monkeypatch.setitem(registry.SOURCES, name, small)
        return tmp_path, images, labels

    return make


# -- named sources -----------------------------------------------------------------------------------------------------


def test_the_registry_has_the_papers_counts():
    real = {name: e for name, e in registry.SOURCES.items() if not name.startswith("standin")}
    sizes = {name: (e.count, len(e.classes), e.shape) for name, e in real.items()}
    assert sizes == {
        "digits": (1797, 10, (8, 8, 1)),
        "cifar10": (60_000, 10, (32, 32, 3)),
        "svhn": (99_289, 10, (32, 32, 3)),
        "path": (97_176, 9, (28, 28, 3)),
        "oct": (98_477, 4, (28, 28, 3)),
        "oct-originals": (46_453, 4, (28, 28, 3)),
    }


@pytest.mark.parametrize("name", WRITERS)
def test_official_files_become_train_then_test(shrink, name):
    cache, images, labels = shrink(name)
    assert not registry.is_available(name, cache)
    source = registry.load_source(name, cache)
    assert np.array_equal(source.data, images)
    assert np.array_equal(source.truth, labels)
    assert source.truth.dtype == np.int64
    assert source.checksum == hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    assert source.mean == (0.5071, 0.4865, 0.4409)
    assert source.note == ""
    assert isinstance(source.data, np.memmap)
    assert len(source.pool()) == len(source) == len(images)
    assert registry.is_available(name, cache)


def test_loading_again_parses_nothing(shrink, monkeypatch):
    cache, images, _ = shrink("svhn")
    first = registry.load_source("svhn", cache)
    assert registry.load_source("svhn", str(cache)) is first
    registry._load_named.cache_clear()  # as another process would find it
    monkeypatch.setitem(registry.SOURCES, "svhn", replace(registry.SOURCES["svhn"], parse=None))
    again = registry.load_source("svhn", cache)
    assert again is not first
    assert np.array_equal(again.data, images)
    assert registry.source_checksum("svhn", cache) == first.checksum


def test_the_checksum_prepares_a_missing_source(shrink):
    cache, _, _ = shrink("oct")
    assert registry.source_checksum("oct", cache) == registry.load_source("oct", cache).checksum


def test_the_cache_folder_may_come_from_the_environment(shrink, monkeypatch):
    cache, _, _ = shrink("oct")
    monkeypatch.setenv("HEADCOUNT_DATA", str(cache))
    assert len(registry.load_source("oct")) == 15
    assert caches.cache_folder("/elsewhere") == Path("/elsewhere")
    monkeypatch.delenv("HEADCOUNT_DATA")
    assert caches.cache_folder() == Path.home() / ".cache" / "headcount"


def test_digits_need_no_cache(tmp_path):
    source = registry.load_source("digits", tmp_path)
    assert (source.kind, source.data.shape, source.data.max()) == ("images", (1797, 8, 8, 1), 255)
    assert source.mean is None
    assert registry.source_checksum("digits") == "0b7e9c3202d7bcd255d6a19a238d3743bf5e320ba74812a6679958a017c55382"
    assert list(tmp_path.iterdir()) == []


def test_digits_from_another_place_in_the_library(monkeypatch):
    here = parsers.parse_digits()
    monkeypatch.setattr(parsers, "find_spec", lambda name: None)
    for ours, theirs in zip(here, parsers.parse_digits(), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


def test_unknown_names_list_the_choices():
    with pytest.raises(HeadcountError, match=r"no source 'cifr10'; there are digits, .*FILE.npz.*did you mean 'cifar10'"):
        registry.load_source("cifr10")
    with pytest.raises(HeadcountError, match=r"no file nowhere/cells.npz"):
        registry.load_source("nowhere/cells.npz")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"count": 23}, "it holds uint8"), ({"classes": ("a", "b")}, "its labels are"), ({"sha256": "0" * 64}, "pixels differ")],
)
def test_wrong_data_are_refused(shrink, monkeypatch, wrong, message):
    cache, _, _ = shrink("cifar10")
    monkeypatch.setitem(registry.SOURCES, "cifar10", replace(registry.SOURCES["cifar10"], **wrong))
    with pytest.raises(HeadcountError, match=message):
        registry.load_source("cifar10", cache)
    assert not (cache / "cifar10").exists()


def test_a_truncated_archive_is_one_line(shrink, monkeypatch):
    cache, _, _ = shrink("cifar10")
    file = cache / "downloads" / "cifar-10-binary.tar.gz"
    file.write_bytes(file.read_bytes()[:4000])
    entry = registry.SOURCES["cifar10"]
    monkeypatch.setitem(registry.SOURCES, "cifar10", replace(entry, files=(Remote(entry.files[0].url, md5(file)),)))
    with pytest.raises(HeadcountError, match=r"cannot read .*cifar-10-binary.tar.gz"):
        registry.load_source("cifar10", cache)


# -- the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["no facts", "half facts", "older format", "cut images", "other labels", "no images"])
def test_a_damaged_cache_names_the_file_and_what_to_do(shrink, harm):
    cache, _, _ = shrink("path")
    registry.load_source("path", cache)
    registry._load_named.cache_clear()
    folder = cache / "path"
    facts = json.loads((folder / "source.json").read_text())
    file = {"cut images": "images.npy", "no images": "images.npy", "other labels": "labels.npy"}.get(harm, "source.json")
    if harm in ("no facts", "no images"):
        (folder / file).unlink()
    elif harm == "half facts":
        (folder / file).write_text('{"name": "pa')
    elif harm == "older format":
        (folder / file).write_text(json.dumps({**facts, "format": 0}))
    elif harm == "cut images":
        (folder / file).write_bytes((folder / file).read_bytes()[:-100])
    else:
        np.save(folder / file, np.zeros(3, dtype=np.int64))
    with pytest.raises(HeadcountError, match=f"{file}.*delete {re.escape(str(folder))}"):
        registry.load_source("path", cache)


def test_leftovers_of_a_crash_are_replaced(shrink):
    cache, images, _ = shrink("oct")
    (cache / "oct.part").mkdir()
    (cache / "oct.part" / "images.npy").write_bytes(b"half")
    with pytest.warns(HeadcountWarning, match=r"oct\.part, left by a command that was interrupted, is removed"):
        assert np.array_equal(registry.load_source("oct", cache).data, images)
    assert not (cache / "oct.part").exists()


def test_a_full_disk_leaves_nothing_behind(shrink, monkeypatch):
    cache, images, _ = shrink("oct")

    def full(path, array, **_):
        path.write_bytes(array.tobytes()[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(caches.np, "save", full)
        with pytest.raises(HeadcountError, match=r"cannot write .*No space left on device.*HEADCOUNT_DATA"):
            registry.load_source("oct", cache)
    assert {p.name for p in cache.iterdir()} == {"downloads"}
    assert np.array_equal(registry.load_source("oct", cache).data, images)


def test_a_folder_without_write_permission(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadcountError, match=r"cannot write into .*set HEADCOUNT_DATA"):
        registry.load_source("oct", tmp_path / "file")


# -- importing a source ----------------------------------------------------------------------------------


def test_import_keeps_the_note_and_replaces_the_source(shrink, tmp_path):
    cache, images, labels = shrink("svhn")
    before = registry.load_source("svhn", cache)
    file = tmp_path / "mine.npz"
    np.savez(
        file, images=images[::-1], labels=labels[::-1].astype(np.uint8), split=np.arange(14) >= 11, class_names=[*"0123456789"]
    )
    source = registry.import_npz("svhn", file, cache, note="cropped anew")
    assert source.note == "cropped anew"
    assert "cropped anew" in repr(source)
    assert np.array_equal(source.data, images[::-1])
    assert source.checksum == registry.source_checksum("svhn", cache) != before.checksum
    assert "not compared" in registry.import_npz("svhn", file, cache).note
    assert {p.name for p in cache.iterdir()} == {"downloads", "mine.npz", "svhn"}


def test_import_copies_gray_into_colour(shrink, tmp_path):
    cache, images, labels = shrink("oct")
    np.savez(tmp_path / "mine.npz", images=images[..., 0], labels=labels)
    assert np.array_equal(registry.import_npz("oct", tmp_path / "mine.npz", cache).data, images)


def test_originals_of_oct_are_imported_under_their_own_name(tmp_path, monkeypatch):
    """Grey scans with class names, split and patient; no download stands in for them, and they are not OCTMNIST."""
    with pytest.raises(HeadcountError, match="cannot be downloaded; import it: headcount data import oct-originals"):
        registry.load_source("oct-originals", tmp_path)
    entry = registry.SOURCES["oct-originals"]
    images, labels = random_images(15, 28, 28), np.arange(15) % 4
    digest = hashlib.sha256(np.repeat(images[..., None], 3, axis=-1).tobytes()).hexdigest()
    monkeypatch.setitem(registry.SOURCES, "oct-originals", replace(entry, count=15, sha256=digest))
    arrays = {"labels": labels.astype(np.uint8), "split": np.zeros(15, np.uint8), "class_names": np.array(entry.classes)}
    np.savez(tmp_path / "oct.npz", images=images, group=np.arange(15), **arrays)
    assert not registry.is_available("oct-originals", tmp_path)
    source = registry.import_npz("oct-originals", tmp_path / "oct.npz", tmp_path)
    assert np.array_equal(source.data, np.repeat(images[..., None], 3, axis=-1))
    assert source.mean == (0.5071, 0.4865, 0.4409), "normalised as the paper's four"
    assert "not OCTMNIST" in source.note
    assert registry.is_available("oct-originals", tmp_path)
    assert not registry.is_available("oct", tmp_path)
    assert registry.source_checksum("oct-originals", tmp_path) == source.checksum
    np.savez(tmp_path / "oct.npz", images=images[::-1], **arrays)
    with pytest.raises(HeadcountError, match="pixels differ"):
        registry.import_npz("oct-originals", tmp_path / "oct.npz", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": random_images(24, 32, 32, 3)}, "pixels differ"),
        ({"images": random_images(24, 28, 28, 3)}, r"holds uint8 \(24, 28, 28, 3\), not uint8 \(24, 32, 32, 3\)"),
        ({"images": random_images(23, 32, 32, 3), "labels": np.arange(23) % 10}, r"\(23, 32, 32, 3\)"),
        ({"images": np.zeros((24, 32, 32, 3))}, "'images': .*float64"),
        ({"labels": np.arange(24) % 10 + 1}, r"labels are \[1, 2"),
        ({"class_names": np.array([*"abcdefghijk"])}, "names 11 classes; cifar10 has 10"),
        ({"split": np.arange(24) < 20}, "all train rows first"),
        ({"split": np.array(["train"] * 24)}, "'split' must be"),
    ],
)
def test_import_checks_its_arguments(shrink, tmp_path, change, message):
    cache, images, labels = shrink("cifar10")
    np.savez(tmp_path / "mine.npz", **{"images": images, "labels": labels, **change})
    with pytest.raises(HeadcountError, match=message):
        registry.import_npz("cifar10", tmp_path / "mine.npz", cache)
    assert not (cache / "cifar10").exists()


def test_import_of_an_unknown_name(tmp_path):
    with pytest.raises(HeadcountError, match="no source to import 'digits'; there are cifar10, svhn, path, oct"):
        registry.import_npz("digits", tmp_path / "mine.npz", tmp_path)


# -- a user's file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "shape"),
    [
        ({"images": random_images(6, 5, 4, 3)}, "images", (6, 5, 4, 3)),
        ({"x": random_images(6, 5, 4)}, "images", (6, 5, 4, 1)),
        ({"features": np.ones((6, 7))}, "features", (6, 7)),
        ({"X": np.ones((6, 7), dtype=np.int32)}, "features", (6, 7)),
    ],
)
def test_a_file_is_a_source(tmp_path, given, kind, shape):
    np.savez(tmp_path / "cells.npz", y=np.array([[0], [1], [2], [0], [1], [2]]), **given)
    source = registry.load_source(tmp_path / "cells.npz")
    assert (source.kind, source.data.shape, source.name) == (kind, shape, "cells.npz")
    assert source.classes == ("0", "1", "2")
    assert source.data.dtype == (np.uint8 if kind == "images" else np.float32)
    assert registry.load_source(str(tmp_path / "cells.npz")) is source
    assert registry.source_checksum(tmp_path / "cells.npz") == source.checksum
    assert source.pool().kind == kind


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "cells.npz"
    np.savez(file, features=np.ones((3, 2)), labels=[0, 1, 1], class_names=["healthy", "ill"])
    first = registry.load_source(file)
    np.savez(file, features=np.ones((4, 2)), labels=[0, 1, 1, 0], classes=["healthy", "ill"])
    assert first.classes == registry.load_source(file).classes == ("healthy", "ill")
    assert (len(first), len(registry.load_source(file))) == (3, 4)


NAN = np.ones((4, 3), dtype=np.float32)
NAN[2, 1] = np.nan
OK = {"features": np.ones((4, 3)), "labels": np.array([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": OK["features"]}, "has no 'labels' or 'y'; it has features"),
        ({"labels": OK["labels"]}, "has no 'images' or 'features'"),
        ({**OK, "labels": np.array([0, 1, 0])}, r"4 rows but labels of shape \(3,\)"),
        ({**OK, "labels": np.array([0, 1, "a", None], dtype=object)}, "cannot read .*Object arrays"),
        ({**OK, "labels": np.array([0.0, 1.5, 0.0, 1.0])}, "labels are float64"),
        ({**OK, "labels": np.array(["cat", "dog", "cat", "dog"])}, "labels are <U3, such as cat"),
        ({**OK, "labels": np.array([0, 1, -1, 1])}, "row 2 has label -1"),
        ({**OK, "labels": np.array([0, 1, 10**9, 1])}, "row 2 has label 1000000000"),
        ({**OK, "features": NAN}, "row 2 of the features has nan in column 1"),
        ({**OK, "features": np.full((4, 3), 1e300)}, "row 0 of the features has inf"),
        ({**OK, "features": np.array([["a"]] * 4)}, "'features': .*<U1"),
        ({**OK, "features": np.ones((4, 3, 2))}, r"'features': .*float64 of shape \(4, 3, 2\)"),
        ({"features": np.ones((0, 3)), "labels": np.ones(0, dtype=int)}, "is empty"),
        ({"images": random_images(4, 3, 9, 9), "labels": OK["labels"]}, "channels first"),
        ({**OK, "class_names": np.array(["only"])}, "1 class names for labels up to 1"),
        ({**OK, "class_names": np.array(["same", "same"])}, "give each class its own"),
    ],
)
def test_every_error_names_the_file(tmp_path, given, message):
    np.savez(tmp_path / "cells.npz", **given)
    with pytest.raises(HeadcountError, match=message) as caught:
        registry.load_source(tmp_path / "cells.npz")
    assert str(tmp_path / "cells.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "evil.npz").write_bytes(pickle.dumps({"labels": [1]}))
    np.savez(tmp_path / "cut.npz", **OK)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:300])
    (tmp_path / "empty.npz").write_bytes(b"")
    for file in ("one.npy", "table.csv", "evil.npz", "cut.npz", "empty.npz"):
        with pytest.raises(HeadcountError, match=f"{file}.*give an .npz with 'images' or 'features'"):
            registry.load_source(tmp_path / file)


# -- download ----------------------------------------------------------------------------------------------------------

BODY = RNG.bytes(300_000)
BODY_MD5 = hashlib.md5(BODY).hexdigest()


@dataclass
class Server:
    """A file served over HTTP, with or without failures."""

    ranges: bool = True
    breaks: int = 0  # how many answers stop midway
    body: bytes = BODY
    status: int = 0
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    settings = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            settings.asked.append(self.headers.get("Range"))
            start = int(settings.asked[-1][len("bytes=") : -1]) if settings.asked[-1] and settings.ranges else 0
            rest = settings.body[start:]
            self.send_response(settings.status or (416 if not rest else 206 if start else 200))
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest[: len(rest) // 2] if settings.breaks > 0 else rest)
            settings.breaks -= 1

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        settings.url = f"http://127.0.0.1:{http.server_port}/files/set.bin"
        yield settings
        http.shutdown()
        thread.join()


def test_fetch_downloads_once(server, tmp_path, capsys):
    path = tmp_path / "downloads" / "set.bin"
    assert fetch(server.url, path, BODY_MD5) == path
    assert fetch(server.url, path, BODY_MD5).read_bytes() == BODY
    assert server.asked == [None]
    assert [p.name for p in path.parent.iterdir()] == ["set.bin"]
    assert capsys.readouterr().err == ""  # no progress bar without a terminal


def test_fetch_resumes_after_an_interruption(server, tmp_path):
    server.breaks = 2
    assert fetch(server.url, tmp_path / "set.bin", BODY_MD5).read_bytes() == BODY
    assert server.asked == [None, "bytes=150000-", "bytes=225000-"]


@pytest.mark.parametrize(("ranges", "asked"), [(True, ["bytes=1000-"]), (False, ["bytes=1000-"])])
def test_fetch_resumes_an_earlier_download(server, tmp_path, ranges, asked):
    server.ranges = ranges
    (tmp_path / "set.bin.part").write_bytes(BODY[:1000])
    assert fetch(server.url, tmp_path / "set.bin", BODY_MD5).read_bytes() == BODY
    assert server.asked == asked


def test_fetch_finishes_a_complete_download(server, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(BODY)
    assert fetch(server.url, tmp_path / "set.bin", BODY_MD5).read_bytes() == BODY


def test_fetch_gives_up_when_nothing_new_comes(server, tmp_path):
    server.ranges, server.breaks = False, 99
    with pytest.raises(HeadcountError, match="broke after 150000 of 300000 bytes"):
        fetch(server.url, tmp_path / "set.bin", BODY_MD5)
    assert len(server.asked) == 2
    assert not (tmp_path / "set.bin").exists()


def test_a_wrong_download_is_deleted(server, tmp_path):
    server.body = b"another file"
    with pytest.raises(HeadcountError, match=f"gave a wrong file: md5 {hashlib.md5(server.body).hexdigest()}"):
        fetch(server.url, tmp_path / "set.bin", BODY_MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_put_there_by_hand_is_kept(server, tmp_path):
    (tmp_path / "set.bin").write_bytes(b"mine")
    with pytest.raises(HeadcountError, match=r"is not the official file.*delete it"):
        fetch(server.url, tmp_path / "set.bin", BODY_MD5)
    assert (tmp_path / "set.bin").read_bytes() == b"mine"
    assert server.asked == []


def test_the_error_of_the_server_is_shown(server, tmp_path):
    server.status = 404
    with pytest.raises(HeadcountError, match=r"cannot download set.bin .the server answered 404 Not Found"):
        fetch(server.url, tmp_path / "set.bin", BODY_MD5)


def test_without_network_the_error_is_an_instruction(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/cifar-10-binary.tar.gz"
    monkeypatch.setenv("no_proxy", "*")
    entry = replace(registry.SOURCES["cifar10"], files=(Remote(url, "0" * 32),))
    monkeypatch.setitem(registry.SOURCES, "cifar10", entry)
    with pytest.raises(HeadcountError) as caught:
        registry.load_source("cifar10", tmp_path)
    message = str(caught.value)
    assert message.startswith("cannot download cifar-10-binary.tar.gz (")
    assert f"from {url} and put it at {tmp_path / 'downloads' / 'cifar-10-binary.tar.gz'}" in message
    assert "headcount data import cifar10 FILE.npz" in message
