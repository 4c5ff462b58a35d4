"""Sentence embeddings: texts as the numbers that a published, frozen encoder makes of them. Needs ``headcount[text]``.

An encoder is a folder in the format of sentence-transformers, named by its path, by an installed package that contains it, or by its
name on the Hugging Face hub, from which it is downloaded only on request. Nothing in the folder is run: its parts must be those of
sentence-transformers itself, and its weights .safetensors. Each embedding is computed once and kept on disk, by the hash of its text:

    <cache>/features/<digest of the encoder>.sqlite
"""

import hashlib
import importlib.metadata
import io
import math
import re
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError
from headcount.loading import open_file, read_json

_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")  # configuration, vocabulary and weights: neither code nor pickles
_PARTS = {"Transformer": True, "Dense": True, "StaticEmbedding": True, "Pooling": False, "Normalize": False}  # has it weights?
_BLOCK = 512  # texts between two writes to the cache
_MAX_FLOAT16 = 65504.0
_EXPECTED = "the folder of an encoder in the format of sentence-transformers"


@dataclass(frozen=True)
class TextEncoder:
    """An encoder as the user named it, where it is, and the sha256 of its files, by which a fitted model recognises it."""

    name: str
    folder: Path
    digest: str


def find_encoder(name: str | Path, *, download: bool = False) -> TextEncoder:
    """The encoder in a folder, in an installed package, or of a name on the Hugging Face hub: in its cache, unless ``download``."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _package_folder(str(name)) or _hub_folder(str(name), download)
    digest = hashlib.sha256()
    for file in _list_files(folder):
        with open_file(file) as f:
            content = hashlib.file_digest(f, "sha256").hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return TextEncoder(str(name), folder, digest.hexdigest())


def _package_folder(name: str) -> Path | None:
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "modules.json"), None)


def _hub_folder(name: str, download: bool) -> Path:
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise HeadcountError(f"no encoder {name!r}: give {_EXPECTED}, or a plain name such as all-MiniLM-L6-v2")
    repository = name if "/" in name else f"sentence-transformers/{name}"
    hub = _import_library("huggingface_hub", f"encoder {name!r} is no folder here; a name")
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=list(_FILES), local_files_only=not download))
    except Exception as e:  # no connection, no such name, or the library's own
        problem = f"encoder {name!r} could not be downloaded ({_one_line(e)}); give its folder"
        if not download:
            problem = (
                f"encoder {name!r} is no folder, no installed package, and was not downloaded before; give its folder, or "
            )
            problem += f"download=True to get {repository} from the Hugging Face hub"
        raise HeadcountError(problem) from None


def _list_files(folder: Path) -> list[Path]:
    """The files that define the encoder, in a fixed order. Refused is what might run code: unknown parts, pickled weights, options."""
    files, has_weights = set(folder.glob("*.json")), False
    for part in read_json(folder / "modules.json", [{"path": str, "type": str}], _EXPECTED):
        path, (library, *_, kind) = folder / part["path"], part["type"].split(".")
        if library != "sentence_transformers" or kind not in _PARTS or not re.fullmatch(r"(\w[\w-]*)?", part["path"]):
            problem = f"{folder} has a part {part['type'][:80]!r} in {part['path'][:40]!r}"
            raise HeadcountError(f"{problem}; the parts of an encoder are {', '.join(_PARTS)} of sentence-transformers")
        if _PARTS[kind] and not any(path.glob("model.safetensors*")):
            raise HeadcountError(f"{path} has no model.safetensors, and pickled weights are not read; give {_EXPECTED}")
        has_weights |= _PARTS[kind]
        files |= {file for pattern in _FILES for file in path.glob(pattern)}
    if not has_weights:
        raise HeadcountError(f"{folder} has no weights; give {_EXPECTED}")
    for file in folder.glob("sentence_*config.json"):
        for option, value in read_json(file, dict[str, Any], _EXPECTED).items():
            if value and option.endswith(("_args", "_kwargs")):
                raise HeadcountError(f"{file} sets {option[:80]}, which may load more than weights; choose another encoder")
    return sorted(files)


def encode_texts(
    texts: Sequence[str | None], encoder: str | Path | TextEncoder, *, download: bool = False, cache: Path | str | None = None
) -> np.ndarray:
    """The embeddings of texts, as features for :class:`~headcount.MajorityClassifier` or any other classifier.

    Texts of more tokens than the encoder takes are cut into windows of equal length, whose embeddings are averaged.

    Parameters
    ----------
    texts
        Any strings; one that is blank or None is all zeros.
    encoder
        A folder, an installed package, or a name on the Hugging Face hub.
    download
        Download an encoder that is not here.
    cache
        The folder in which embeddings are kept; default ``$HEADCOUNT_DATA``.

    Returns
    -------
    numpy.ndarray
        (n, D) float32.

    Examples
    --------
    >>> encode_texts(["works well", "broke at once"], "all-MiniLM-L6-v2").shape          # doctest: +SKIP
    (2, 384)
    """
    encoder = encoder if isinstance(encoder, TextEncoder) else find_encoder(encoder, download=download)
    clean = [("" if text is None else str(text)).strip() for text in texts]
    row = {text: i for i, text in enumerate(filter(None, dict.fromkeys(clean)))}
    if not row:
        raise HeadcountError("there is no text to encode: all are blank")
    path = cache_folder(cache) / "features" / f"{encoder.digest[:40]}.sqlite"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=600)) as database:
            values = _load_or_embed(list(row), encoder, database)
        embeddings = np.frombuffer(b"".join(values), "<f2").reshape(len(row), -1).astype(np.float32)
        if len(set(map(len, values))) > 1 or not np.isfinite(embeddings).all():
            raise ValueError("it holds what no encoder made")
    except HeadcountError:
        raise
    except (OSError, sqlite3.Error, TypeError, ValueError) as e:
        raise HeadcountError(f"the cache {path} cannot be used: {e}; delete it, or give another folder with cache=") from None
    return np.vstack([embeddings, np.zeros_like(embeddings[:1])])[[row.get(text, -1) for text in clean]]


def _load_or_embed(texts: list[str], encoder: TextEncoder, database: sqlite3.Connection) -> list[bytes]:
    """The embedding of each text, float16; those that the database lacks are computed and added, block by block."""
    database.execute("CREATE TABLE IF NOT EXISTS embeddings (text BLOB PRIMARY KEY, embedding BLOB NOT NULL)")
    keys, known = [hashlib.sha256(text.encode()).digest() for text in texts], dict[bytes, bytes]()
    for block in (keys[i : i + _BLOCK] for i in range(0, len(keys), _BLOCK)):
        marks = ",".join("?" * len(block))
        known |= database.execute(f"SELECT text, embedding FROM embeddings WHERE text IN ({marks})", block)
    missing, console = [i for i, key in enumerate(keys) if key not in known], Console(stderr=True)
    blocks = [missing[i : i + _BLOCK] for i in range(0, len(missing), _BLOCK)]
    for block in track(blocks, f"encoding {len(missing):,} texts", console=console, disable=not sys.stderr.isatty()):
        rows = _embed([texts[i] for i in block], encoder)
        computed = {keys[i]: row.tobytes() for i, row in zip(block, rows, strict=True)}
        with database:  # one transaction: a killed process loses this block alone
            database.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", computed.items())
        known |= computed
    return [known[key] for key in keys]


def _embed(texts: list[str], encoder: TextEncoder) -> np.ndarray:
    """(n, D) float16, computed."""
    try:
        model = _load_model(encoder)
        windows = _split_into_windows(texts, model)
        rows = np.asarray(model.encode([w for part in windows for w in part], show_progress_bar=False), np.float32)
        counts = np.array(list(map(len, windows)))
        mean = np.add.reduceat(rows, np.cumsum(counts) - counts) / counts[:, None]
    except HeadcountError:
        raise
    except Exception as e:  # each library raises its own
        raise HeadcountError(f"encoder {encoder.name!r} cannot be used ({_one_line(e)}); choose another") from None
    return np.clip(mean, -_MAX_FLOAT16, _MAX_FLOAT16).astype("<f2")


def _split_into_windows(texts: list[str], model: Any) -> list[list[str]]:
    """Each text, or its parts of equal length, where it has more tokens than the encoder takes."""
    limit = getattr(model, "max_seq_length", None)
    if limit is None or not math.isfinite(limit):
        return [[text] for text in texts]
    most = max(1, limit - model.tokenizer.num_special_tokens_to_add())
    tokens = model.tokenizer(texts, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False)
    split = []
    for text, spans in zip(texts, tokens["offset_mapping"], strict=True):
        count = -(-len(spans) // most) or 1
        cuts = [0, *(spans[len(spans) * k // count][0] for k in range(1, count)), len(text)]
        split.append([text[start:end] for start, end in pairwise(cuts)])
    return split


@lru_cache(maxsize=1)
def _load_model(encoder: TextEncoder) -> Any:
    library = _import_library("sentence_transformers", f"encoder {encoder.name!r}")
    # a folder may name an implementation of attention that would be downloaded and run; this one is part of the library
    options = {"use_safetensors": True, "attn_implementation": "eager"}
    with redirect_stderr(io.StringIO()):  # a progress bar of less than a second
        return library.SentenceTransformer(
            str(encoder.folder), local_files_only=True, trust_remote_code=False, model_kwargs=options
        )


def _import_library(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise HeadcountError(f"{what} needs {module}: pip install 'headcount[text]' ({_one_line(e)})") from None


def _one_line(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
