"""A real browser, and visits of a page at the width of a laptop and of a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run")  # fmt: skip
SIZES = {"laptop": (1366, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        if os.environ.get("HEADCOUNT_REQUIRE_BROWSER") == "1":
            pytest.fail("HEADCOUNT_REQUIRE_BROWSER=1 and no chromium on the path")
        pytest.skip("no chromium on the path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=executable, args=list(QUIET))
        yield launched
        launched.close()


@pytest.fixture(scope="module", params=[("laptop", "light"), ("phone", "light"), ("phone", "dark")], ids="-".join)
def visit(request: pytest.FixtureRequest, browser: Any, page_file: Path) -> Iterator[tuple[Any, dict[str, list[str]], str]]:
    """The page, open, with all that it said and asked for."""
    size, scheme = request.param
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, heard = context.new_page(), {"console": [], "errors": [], "requests": [], "dialogs": []}
    page.on("console", lambda message: heard["console"].append(message.text))
    page.on("pageerror", lambda error: heard["errors"].append(str(error)))
    page.on("request", lambda asked: heard["requests"].append(asked.url))
    page.on("dialog", lambda dialog: (heard["dialogs"].append(dialog.message), dialog.dismiss()))
    page.goto(page_file.as_uri())
    yield page, heard, f"{size}-{scheme}"
    context.close()
