"""Fetch one official file: resumed where it broke off, checked, and renamed into place only when it is right.

When it cannot be had, the error is the recipe for doing it by hand: which file, from where, to where.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headcount.errors import HeadcountError

_BLOCK = 1 << 20
_PATIENCE = 30  # seconds without a byte


class Remote(NamedTuple):
    """A file at its official place, and the md5 its publishers (or everybody since) have given for it."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return urlsplit(self.url).path.rsplit("/", 1)[-1]


def fetch(url: str, path: str | Path, md5: str, source: str = "NAME") -> Path:
    """Make ``path`` the file behind ``url`` with this md5; a file already there is only checked.

    ``source`` is the name to give to ``headcount data import`` in the advice when this fails.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    advice = (
        f"get {path.name} from {url} and put it at {path}, "
        f"or bring the arrays you have with 'headcount data import {source} FILE.npz'"
    )
    try:
        if path.exists():
            if (found := _md5(path)) != md5:
                raise HeadcountError(
                    f"{path} is not the official file: md5 {found}, not {md5}; delete it, then {advice}"
                )
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(url, part)
        if (found := _md5(part)) != md5:
            part.unlink()
            raise HeadcountError(f"{url} gave a wrong file: md5 {found}, not {md5}; try again, or {advice}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", None) or e
        raise HeadcountError(f"cannot download {path.name} ({reason}); {advice}") from None
    return path


def _download(url: str, part: Path) -> None:
    """Ask for what is missing until nothing is; give up when an attempt brings nothing new."""
    while True:
        had = _size(part)
        whole = _attempt(url, part, had)
        got = _size(part)
        if whole is None or got >= whole:
            return
        if got <= had:
            raise OSError(f"the connection broke after {got} of {whole} bytes")


def _attempt(url: str, part: Path, had: int) -> int | None:
    """One request, for the bytes after ``had``. Returns the size of the whole file, None if nobody knows."""
    headers = {"User-Agent": "headcount", **({"Range": f"bytes={had}-"} if had else {})}
    try:
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_PATIENCE)
    except urllib.error.HTTPError as e:
        with e:  # it holds the open connection
            if e.code == 416:  # nothing lies after these bytes: we have them all, and the md5 will tell
                return None
            raise OSError(f"the server said {e.code} {e.reason}") from None
    with reply:
        start = had if reply.status == 206 else 0  # a server that ignores Range begins again, and so do we
        length = reply.headers.get("Content-Length")
        whole = start + int(length) if length else None
        with part.open("ab" if start else "wb") as f, _bar() as bar:
            task = bar.add_task(part.name.removesuffix(".part"), total=whole, completed=start)
            for block in _blocks(reply):
                f.write(block)
                bar.advance(task, len(block))
    return whole


def _blocks(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """The bytes until the end, or until the connection breaks: the caller counts them and asks again."""
    try:
        while block := reply.read(_BLOCK):
            yield block
    except http.client.IncompleteRead as e:
        yield e.partial
    except (ConnectionError, TimeoutError):
        return


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
