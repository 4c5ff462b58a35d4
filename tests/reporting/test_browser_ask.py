"""The pages about one's own data in a real browser: what the data say is shown, and nothing of it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import read_factory as make
from headcount.cli.main import app
from headcount.readers import read
from model_factory import fitted, people
from report_factory import assert_own_script_only

EVIL = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(2)>",
    "javascript:alert(3)",
    "{{ 7 * 7 }}</style><style>*{display:none}",
)
HOW: dict[str, Any] = {}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tables whose bags, classes, ids, values and column names want to run; pictures in files of such names."""
    root = tmp_path_factory.mktemp("evil")
    table = people(bags=8, size=6)
    names = {"no": EVIL[0], "yes": EVIL[1]}
    table["label"] = [names[v] for v in table["label"]]
    table["precinct"] = [f"{EVIL[int(p[1:]) % 4]} {p}" for p in table["precinct"]]
    table["id"] = [f"{EVIL[2]} {i}" for i in table["id"]]
    table["colour"] = [EVIL[int(i[-1]) % 4] for i in table["id"]]
    table[EVIL[1]] = table.pop("height")
    del table["truth"]
    data = make.write_csv(root / "t.csv", table)
    model = fitted(read(data)).save(root / "m")
    app(["explain", str(model), str(data), "--out", str(root / "explain.html")], standalone_mode=False)
    app(["audit", str(model), str(data), "--out", str(root / "sheet"), "--count", "20"], standalone_mode=False)
    texts = make.texts()
    texts["text"] = [f"{EVIL[i % 4]} {t}" for i, t in enumerate(texts["text"])]
    words = make.write_csv(root / "w.csv", texts)
    app(
        ["explain", str(fitted(read(words), "linear").save(root / "mw")), str(words), "--out", str(root / "words.html")],
        standalone_mode=False,
    )
    folder = root / "pictures"
    for b, evil in enumerate(("<script>alert(4)<", "'onload='alert(5)")):
        for i in range(4):
            make.picture(folder / f"{evil}{b}" / f"{i}.png", (40, 30), seed=10 * b + i)
    make.write_csv(folder / "labels.csv", {"bag": ["<script>alert(4)<0", "'onload='alert(5)1"], "label": list(EVIL[:2])})
    model = fitted(read(folder), "network").save(root / "mp")
    app(["explain", str(model), str(folder), "--out", str(root / "pictures.html")], standalone_mode=False)
    app(["audit", str(model), str(folder), "--out", str(root / "pictures_sheet"), "--count", "4"], standalone_mode=False)
    return {
        "explain": root / "explain.html",
        "sheet": root / "sheet" / "index.html",
        "words": root / "words.html",
        "pictures": root / "pictures.html",
        "pictures_sheet": root / "pictures_sheet" / "index.html",
    }


@pytest.mark.parametrize("name", ["explain", "sheet", "words", "pictures", "pictures_sheet"])
@pytest.mark.parametrize("width", [1366, 390])
def test_user_strings_are_escaped(name: str, width: int, pages: dict[str, Path], browser: Any) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900})
    page, heard = context.new_page(), []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda asked: heard.append(asked.url) if not asked.url.startswith(("data:", "file:")) else None)
    page.goto(pages[name].as_uri())
    assert heard == []
    assert page.locator("img[onerror], [onload], a[href^='javascript']").count() == 0
    assert_own_script_only(page)
    assert page.locator("body").is_visible()
    shown = page.locator("body").inner_text()
    assert ("good" if name == "words" else "<script>") in shown
    wide, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= window
    sizes = page.evaluate("[...document.images].map(i => i.naturalWidth)")
    assert (len(sizes) > 0) == name.startswith("pictures")
    assert all(s > 0 for s in sizes)
    context.close()


def test_user_strings_are_shown_verbatim(pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    page.goto(pages["explain"].as_uri())
    shown = page.locator("body").inner_text()
    for evil in EVIL:
        assert evil in shown
    page.close()
