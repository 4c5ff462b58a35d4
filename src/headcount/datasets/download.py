"""Download an official file: resumed after an interruption, verified, and renamed into place only if it is correct."""

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

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headcount.errors import HeadcountError

_BLOCK = 1 << 20
_TIMEOUT = 30  # seconds without a byte


class Remote(NamedTuple):
    """The official address of a file, and its published md5."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return self.url.partition("?")[0].rsplit("/", 1)[-1]


def fetch(url: str, path: str | Path, md5: str, source: str = "NAME") -> Path:
    """Download ``url`` to ``path`` and verify its md5; a file that exists already is only verified.

    ``source`` is the name for ``headcount data import`` in the advice given when this fails.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    advice = f"get {path.name} from {url} and put it at {path}, or bring the arrays you have with "
    advice += f"'headcount data import {source} FILE.npz'"
    try:
        if path.exists():
            if (actual := _md5(path)) != md5:
                problem = f"{path} is not the official file: md5 {actual}, not {md5}"
                raise HeadcountError(f"{problem}; delete it, then {advice}")
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        _download(url, part)
        if (actual := _md5(part)) != md5:
            part.unlink()
            raise HeadcountError(f"{url} gave a wrong file: md5 {actual}, not {md5}; try again, or {advice}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", None) or e
        raise HeadcountError(f"cannot download {path.name} ({reason}); {advice}") from None
    return path


def _download(url: str, part: Path) -> None:
    """Request what is missing until the file is complete; give up when an attempt brings nothing new."""
    while True:
        before = part.stat().st_size
        total = _request(url, part, before)
        after = part.stat().st_size
        if total is None or after >= total:
            return
        if after <= before:
            raise OSError(f"the connection broke after {after} of {total} bytes")


def _request(url: str, part: Path, start: int) -> int | None:
    """One request, for the bytes from ``start`` on. Returns the size of the whole file, None if it is unknown."""
    headers = {"User-Agent": "headcount", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as e:
        with e:  # closes the connection
            if e.code == 416:  # no bytes after these: the file is complete, or the md5 will differ
                return None
            raise OSError(f"the server answered {e.code} {e.reason}") from None
    with reply:
        start = start if reply.status == 206 else 0  # a server that ignores Range starts again from 0
        length = reply.headers.get("Content-Length")
        total = start + int(length) if length else None
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        with part.open("ab" if start else "wb") as f, bar:
            task = bar.add_task(part.name.removesuffix(".part"), total=total, completed=start)
            for block in _blocks(reply):
                f.write(block)
                bar.advance(task, len(block))
    return total


def _blocks(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """The bytes until the end, or until the connection breaks: the caller counts them and sends another request."""
    try:
        while block := reply.read(_BLOCK):
            yield block
    except http.client.IncompleteRead as e:
        yield e.partial
    except (ConnectionError, TimeoutError):
        return


def _md5(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
