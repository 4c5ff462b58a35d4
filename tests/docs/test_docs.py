"""The documentation builds without a warning, and what it shows runs: the bash and Python blocks of each page, in their
order, in one folder. A block that begins with `# needs a cluster` (a GPU, the network, an installation), or installs, is only parsed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from statistics import mean, pstdev

import pytest

import headcount
from headcount.experiments import records
from headcount.experiments.recipe import Recipe
from headcount.readers.columns import COMMON_NAMES, ID_NAMES
from headcount.readers.tables import MISSING_VALUES

ROOT = Path(__file__).parents[2]
PUBLIC = [name for name in headcount.__all__ if callable(getattr(headcount, name))]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
NEEDS = re.compile(r"(#!.*\n)?(# needs (a cluster|a GPU|the network|an installation)|python3 -m venv|docker build)")


def fenced(text: str) -> list[tuple[str, str]]:
    """(kind, content) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S)


FAST = ("cluster.md", "size.md", "predict.md")


def quick_or_soak(page: Path) -> object:
    """Tutorials, guides and some other pages train models: they run with the campaigns."""
    slow = page.parent.name in ("docs", "tutorials", "how-to") or page.name == "api.md"
    marks = pytest.mark.soak if slow and page.name not in FAST else ()
    return pytest.param(page, marks=marks, id=str(page.relative_to(ROOT / "docs")))


@pytest.mark.parametrize("page", [quick_or_soak(page) for page in PAGES])
def test_a_page_runs(page, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kind, block in fenced(page.read_text()):
        if kind == "python":
            ast.parse(block)
        if kind == "bash":
            done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
            assert done.returncode == 0, f"{page.name}: {block}\n{done.stderr}"
        if kind not in ("python", "bash") or NEEDS.match(block):
            continue
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            (tmp_path / (name[1] if name else "snippet.py")).write_text(block)
            lines = [] if name else [[sys.executable, "snippet.py"]]
        else:
            lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
            lines = [[sys.executable, *(["-m", "headcount"] if w[0] == "headcount" else []), *w[1:]] for w in lines if w]
        for line in lines:
            done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, f"{page.name}: {' '.join(line)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "term",
    ["imbalance", "overfitting", "early stopping", "hyperparameter", "confusion matrix", "calibration", "cross-validation"],
)
def test_the_glossary_has_the_terms_of_the_field(term):
    heads = re.findall(r"^\*\*(.*?)\.\*\*", (ROOT / "docs" / "reference" / "glossary.md").read_text(), flags=re.M)
    assert any(term in head.lower() for head in heads)


def test_the_architecture_describes_every_package():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    packages = [p.parent.name for p in (ROOT / "src" / "headcount").glob("*/__init__.py")]
    missing = [name for name in packages if f"\n**`{name}/`**" not in page]
    assert not missing, f"docs/explanation/architecture.md has no paragraph on {missing}"
    files = re.findall(r"`(\w+/[\w/]+\.py)`", page.partition("## The first hour")[2])
    assert len(files) >= 6
    assert not [name for name in files if not (ROOT / "src" / "headcount" / name).exists()]


def test_the_api_page_names_the_front_door():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    names = [*headcount.__all__, *(head.__name__ for head in headcount.HEADS.values())]
    missing = [name for name in names if name != "__version__" and not re.search(rf"\b{name}\b", page)]
    assert not missing, f"docs/reference/api.md says nothing of {missing}"


def test_the_command_line_page_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import command_line

    assert command_line.PAGE.read_text() == command_line.page(), "run python docs/command_line.py"


def test_a_recipe_says_what_its_fields_are():
    said = Recipe.__doc__ or ""
    missing = [f.name for f in fields(Recipe) if not re.search(rf"\b{f.name}\b", said.split(">>>")[0])]
    assert not missing, f"Recipe does not say what {missing} are"


def test_the_names_that_are_recognised_are_listed():
    told = (ROOT / "docs" / "how-to" / "fit.md").read_text()
    missing = [n for names in (*COMMON_NAMES.values(), ID_NAMES, MISSING_VALUES[1:]) for n in names if f"`{n}`" not in told]
    assert not missing, f"docs/how-to/fit.md does not name {missing}"


def test_the_speeds_told_are_those_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    told, results = ((ROOT / f"docs/{name}.md").read_text() for name in ("explanation/speed", "reference/results"))
    ways = {name: way["seconds_per_epoch"] for name, way in found["ways"].items()}
    assert f"| ours | {ways['ours']:.4f} | 1 |" in told
    assert f"TF32 | {ways['plain loop']:.3f} | {ways['plain loop'] / ways['ours']:.1f} |" in told
    assert f"plain loop | {ways['the released way']:.3f} | {ways['the released way'] / ways['ours']:.1f} |" in told
    assert f"{found['seconds_per_further_run']:.1f} s, {found['runs_per_hour']:.0f} runs an hour" in told
    assert f"| {found['seconds_per_run']:.1f} s |" in told
    assert f"| {found['peak_gib']:.1f} GiB |" in told
    starts = found["starts"]
    assert f"caches warm | {starts['first_step_cold']:.1f} s; {found['first_step_seconds']:.1f} s |" in told
    assert f"takes {ways['ours']:.3f} s on an H200" in results
    assert f"takes {ways['plain loop']:.3f} s on the same card in the same run" in results


def test_the_parts_of_a_step_of_one_bag_are_those_measured():
    parts = json.loads((ROOT / "benchmarks/results/abmil_profile.json").read_text())["microseconds"]
    ours, plain, needed = ([v for k, v in parts.items() if k.startswith(name)] for name in ("ours", "plain", "needed"))
    text = (ROOT / "docs/explanation/speed.md").read_text()
    for numbers in (ours, plain, [needed[0] + needed[1], needed[2]]):
        cells = [f"{v:.0f}" for v in numbers] + [f"{sum(numbers):,.0f}"]
        assert re.search(r"\|[ |]*".join(rf"{c} " for c in cells), text), cells
    room, gain = round(sum(plain) / 1.5 - sum(needed), -1), plain[-1] - ours[-1]
    assert f"leave {room:.0f} µs for all" in text
    assert f"gains {gain:.0f}; " in text
    assert f"cost {sum(ours) - sum(plain) + gain:.0f} more" in text


def test_the_run_repeated_in_another_process_gave_the_same_record():
    one, other = (json.loads((ROOT / "results" / d / "9893138dab6390cd.json").read_text()) for d in ("tuning", "tilt"))
    assert one.pop("provenance")["started"] != other.pop("provenance")["started"]
    assert one == other


def test_the_fast_path_beside_the_plain_one_is_that_of_the_records():
    told = (ROOT / "docs" / "explanation" / "speed.md").read_text()
    for name, folder in (("fast path", "paper"), ("plain", "plain")):
        runs = [r for r in records.load_records(ROOT / "results" / folder) if r.recipe.source == "cifar10"]
        runs = [r for r in runs if (r.recipe.label, r.recipe.scenario) == ("Counting Network", "various")]
        runs = sorted(runs, key=lambda r: r.recipe.fold)
        right = [r.scores["instance_accuracy"] for r in runs]
        assert f"| {name} | {' | '.join(f'{r:.3f}' for r in right)} | {mean(right):.3f} ± {pstdev(right):.3f} |" in told
        assert name == "fast path" or not any(r.data["provenance"]["compiled"] for r in runs)


def test_the_jumps_described_for_other_records_are_theirs():
    """Those of results/paper stand in a table, which is written from the records."""
    told = (ROOT / "docs" / "explanation" / "paper.md").read_text()
    script = [sys.executable, str(ROOT / "benchmarks" / "loss_jumps.py"), str(ROOT / "results" / "plain")]
    said = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert "| Counting Network | 306 to 585 | 5 of 5 |" in said
    assert "first at epoch 306 to 585, and all five are selected after a jump" in told
    seeds = {r.recipe.fold: r.scores["instance_accuracy"] for r in records.load_records(ROOT / "results" / "seeds")}
    assert f"`results/seeds`) {seeds[0]:.3f} and {seeds[1]:.3f}," in told


def test_the_jumps_described_are_those_of_the_records():
    script = [sys.executable, str(ROOT / "benchmarks" / "loss_jumps.py"), str(ROOT / "results" / "paper")]
    said = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    told = (ROOT / "docs" / "explanation" / "paper.md").read_text()
    rows = [line for line in said.splitlines() if line.startswith("|")]
    assert len(rows) == 14
    assert not [row for row in rows if row not in told]
    late, together = (line.rpartition("instance accuracy")[2].strip(": ") for line in said.splitlines()[-2:])
    assert f"the others have {late}" in told
    assert f"correlation of {together.rpartition(' ')[2]}" in told


def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heads = (f"models.heads.{head.__module__.rpartition('.')[2]}.{head.__name__}" for head in headcount.HEADS.values())
    for name in (*PUBLIC, *heads):
        page = (tmp_path / "site" / "reference" / "generated" / f"headcount.{name}.html").read_text()
        assert "sig-object" in page, name
        if name in PUBLIC:
            assert "highlight" in page, f"{name} has no example"
            assert "Parameters" in page or name == "HeadcountError", name
    for page in tmp_path.glob("site/**/*.html"):
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css|woff2?)"', page.read_text()), f"{page} is not offline"
