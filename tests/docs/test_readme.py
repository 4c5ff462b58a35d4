"""The README runs: every command that needs no installation and no GPU, and every snippet; its numbers are those of the records."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def fenced(text=README):
    """(kind, content) of every fenced block."""
    parts = re.split(r"^```(\w*)\n", text, flags=re.M)  # text, opening, content, closing, text, ...
    return [(parts[i], parts[i + 1]) for i in range(1, len(parts) - 1, 4)]


def blocks(kind, text=README):
    return [content for name, content in fenced(text) if name == kind]


def test_the_two_commands_come_first():
    first = blocks("")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


@pytest.mark.soak  # a minute of a core; the rest of the tests must stay under six
def test_readme_runs(tmp_path):
    """The bash and Python blocks, in their order, in one folder: as a reader would type them."""
    snippets = [block for block in fenced() if block[0] in ("bash", "python")]
    assert len(snippets) >= 5
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    for kind, block in snippets:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            (tmp_path / (name[1] if name else "snippet.py")).write_text(block)
            lines = [] if name else [[sys.executable, "snippet.py"]]
        else:
            words = [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]
            assert all(w[0] == "headcount" for w in words)
            lines = [[sys.executable, "-m", "headcount", *w[1:]] for w in words]
        for line in lines:
            done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(line)}\n{done.stderr}"
    assert (tmp_path / "bags.png").stat().st_size > 1000
    assert (tmp_path / "study" / "report.html").exists()


def test_commands_outside_the_blocks_that_run_are_installation_tests_or_gpu():
    for block in blocks(""):
        for line in block.splitlines():
            assert line.startswith(("make demo", "make test", "python3 -m venv", ".venv/bin/")) or "# GPU" in line, line


@pytest.mark.parametrize(
    "path",
    [p.relative_to(ROOT) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[!.]*/README.md")]],
    ids=str,
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / path).read_text()):
        if not target.startswith("http"):
            assert (ROOT / path).parent.joinpath(target).exists(), f"{path} links to {target}"


def rows_of(page: Path) -> list[list[str]]:
    """The rows of the tables of a page, as cells."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_results_table_is_that_of_the_results_page():
    page = rows_of(ROOT / "docs" / "reference" / "results.md")
    table = rows_of(ROOT / "README.md")
    assert len(table) == 8
    assert all(row in page for row in table)


def test_results_are_those_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import results

    for page in results.PAGES:
        text = page.read_text()
        assert text == results.current(page), f"run python docs/results.py: {page.name} has other tables than the records"
        assert "<!-- end -->" in text
    method = re.search(
        r"^\| Counting Network \| 0\.478 ± 0\.002 \(5\) \| 0\.487 ± 0\.012 \| −1\.5 \|",
        text := results.PAGES[0].read_text(),
        re.M,
    )
    assert method, text
    assert all(len(path.read_bytes()) < 8192 for path in (ROOT / "results" / "paper").glob("*.json"))


def test_tilt_results_are_those_of_the_summary():
    """Mean and deviation of each scenario, from the table of docs/explanation/tilt.md, which is held to the records."""
    tilt = (ROOT / "docs" / "explanation" / "tilt.md").read_text()
    best = [line for line in tilt.splitlines() if line.startswith("| best | 0.") and "(5)" in line]
    rows = rows_of(ROOT / "README.md")
    shown = [row for row in rows if row[1].startswith("tilt")]
    assert len(best) == len(shown) == 2
    for line, row in zip(best, shown, strict=True):
        numbers = re.findall(r"(0\.\d+) ± (0\.\d+) \(5\)", line)
        assert [(m, d) for m, d in numbers] == [re.match(r"\*\*(0\.\d+)\*\* ± (0\.\d+)", c).groups() for c in row[2:5]]
