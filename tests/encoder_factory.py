"""A tiny encoder of texts, and test doubles of the libraries that load and download one."""

from __future__ import annotations

import json
import re
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

WIDTH, MOST = 6, 5  # numbers of an embedding, words of a window
PARTS = ("Transformer", "Pooling", "Normalize")


def write_encoder(folder: Path, weights: bytes = b"weights") -> Path:
    """A folder as sentence-transformers writes it; the test double reads none of it."""
    (folder / "1_Pooling").mkdir(parents=True)
    modules = [
        {"idx": i, "name": str(i), "path": f"1_{p}" * (i == 1), "type": f"sentence_transformers.models.{p}"}
        for i, p in enumerate(PARTS)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "model_args": {}}')
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def embed_words(text: str) -> np.ndarray:
    """(WIDTH,) the slow oracle: which words a text has."""
    x = np.zeros(WIDTH, np.float32)
    for word in text.split():
        x[zlib.crc32(word.encode()) % WIDTH] += 1
    return x


class WordEncoder:
    """Counts words; a text of more than MOST words is cut off, as a real encoder does it."""

    encoded: list[str]  # all texts, of all encoders
    max_seq_length = MOST + 2

    def __init__(self, folder: str, *, local_files_only: bool, trust_remote_code: bool, model_kwargs: dict[str, Any]) -> None:
        assert local_files_only
        assert not trust_remote_code
        assert model_kwargs["use_safetensors"] is True
        self.tokenizer = WordTokenizer()

    def encode(self, texts: list[str], show_progress_bar: bool) -> np.ndarray:
        self.encoded.extend(texts)
        return np.stack([embed_words(" ".join(t.split()[:MOST])) for t in texts])


class WordTokenizer:
    def num_special_tokens_to_add(self) -> int:
        return 2

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        assert options["truncation"] is False
        assert options["add_special_tokens"] is False
        return {"offset_mapping": [[m.span() for m in re.finditer(r"\S+", t)] for t in texts]}


def replace_text_libraries(monkeypatch, hub_folder: Path | None = None) -> tuple[list[str], list[tuple[str, bool]]]:
    """The texts that are encoded, and the names asked of the hub, each with whether it might be downloaded."""
    from headcount.readers import text_encoders

    encoded, asked = list[str](), list[tuple[str, bool]]()

    def snapshot_download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not {"*.py", "*.bin", "*"} & {*allow_patterns}  # neither code nor pickles
        asked.append((name, not local_files_only))
        if local_files_only or hub_folder is None:
            raise OSError("not in the cache\nof the hub")
        return str(hub_folder)

    encoder = type("Encoder", (WordEncoder,), {"encoded": encoded})
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=encoder))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    text_encoders._load_model.cache_clear()
    return encoded, asked
