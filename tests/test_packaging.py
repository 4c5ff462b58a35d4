"""What is shipped: the source distribution, the wheel in an empty environment, completion, the container, and the files for CI and citation."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import headcount

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
WORKFLOWS = {p.name: yaml.safe_load(p.read_text()) for p in ROOT.glob(".github/workflows/*.yml")}
DIGITS = (
    "--source digits --bag-size 8 --epochs 1 --set backbone=linear --set train_bags=20 --set valid_bags=10 --set test_bags=10"
)
CLEAN = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def repository_files() -> list[str]:
    """The files of the checkout; in an unpacked source distribution, which is none, those that it lists."""
    if not (ROOT / ".git").exists():
        return (ROOT / "src" / "headcount.egg-info" / "SOURCES.txt").read_text().splitlines()
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).exists()]


def copy_repository(to: Path, *prefixes: str) -> Path:
    for name in repository_files():
        if name.startswith(prefixes or ("",)):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())
    return to


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    checkout = copy_repository(tmp_path_factory.mktemp("checkout"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation"], cwd=checkout, capture_output=True, text=True, env=CLEAN
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Deprecat" not in done.stdout + done.stderr, "the build warns"
    return checkout / "dist"


@pytest.fixture(scope="module")
def python(dist, tmp_path_factory) -> Path:
    """Python of an environment with the wheel. The dependencies come from this environment, without the network."""
    env = tmp_path_factory.mktemp("user") / "env"
    venv.create(env, with_pip=True)
    (wheel,) = dist.glob("*.whl")
    install = [env / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, env=CLEAN)
    site = next((env / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = [env / "bin/python", "-I", "-c", "import headcount; print(headcount.__file__)"]
    assert str(site) in subprocess.run(where, capture_output=True, text=True, env=CLEAN, check=True).stdout
    return env / "bin" / "python"


def test_the_source_distribution_is_the_repository(dist):
    """So its tests, documentation and benchmarks run from it."""
    (archive,) = dist.glob("headcount-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert sorted(set(repository_files()) - names) == []
    assert not [name for name in names if name.endswith(".pyc") or "_build" in name]


def test_the_wheel_says_what_it_is(dist):
    (file,) = dist.glob("*.whl")
    assert file.name == f"headcount-{headcount.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(file) as wheel:
        names = {n.partition("/")[2] if n.startswith("headcount/") else n.partition("dist-info/")[2] for n in wheel.namelist()}
        text = wheel.read(f"headcount-{headcount.__version__}.dist-info/METADATA")
    package = ROOT / "src" / "headcount"
    files = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert files <= names, "files of the package are missing from the wheel"
    assert {"licenses/LICENSE", "entry_points.txt"} <= names
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.version.public == headcount.__version__
    assert not [c for c in metadata.classifiers or [] if c.startswith("License ::")], "the expression replaces them"
    assert email.message_from_bytes(text)["Description-Content-Type"] == "text/markdown"


def test_the_wheel_runs_in_an_empty_environment(python, tmp_path):
    def run(*words: object) -> str:
        done = subprocess.run([*words], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    module, script = [python, "-m", "headcount"], python.parent / "headcount"
    assert run(*module, "--version") == run(script, "--version") == f"headcount {headcount.__version__}\n"
    assert run(*module, "--help") == run(script, "--help")
    assert "digits" in run(*module, "demo", "--help")
    run(*module, "run", "--out", "study", *DIGITS.split())
    (record,) = tmp_path.glob("study/**/*.json")
    assert 0 <= json.loads(record.read_text())["scores"]["instance_accuracy"] <= 1


@pytest.mark.soak
def test_the_wheel_runs_the_demo(python, tmp_path):
    demo = [python.parent / "headcount", "demo", "--folds", "1", "--out", tmp_path / "demo"]
    subprocess.run(demo, cwd=tmp_path, env=CLEAN, check=True)
    assert len(json.loads((tmp_path / "demo" / "summary.json").read_text())["methods"]) == 6
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000


@pytest.mark.soak
def test_make_demo(tmp_path):
    """What the README asks a newcomer to type, in a copy of the checkout (its .venv is this one)."""
    copy_repository(tmp_path, "src/", "Makefile", "pyproject.toml", "constraints.txt", "README.md")
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    done = subprocess.run(["make", "demo", "-o", ".venv/ready"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["folds"] == 3
    assert "Counting Network + MPEM" in summary["methods"]
    assert all(m["instance_accuracy"]["mean"] > 0.5 for m in summary["methods"].values())


@pytest.mark.parametrize(
    ("typed", "offered"), [(["pre"], ["predict"]), (["fit", "--min"], ["--minutes"]), (["data", "f"], ["fetch"]), (["zz"], [])]
)
def test_bash_completes(tmp_path, typed, offered):
    """Installed by the option that the documentation names, in a home of its own, and asked as bash asks."""
    script = tmp_path / "headcount"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headcount "$@"\n')
    script.chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    words = " ".join(f"'{word}'" for word in ["headcount", *typed])
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _headcount_completion headcount; echo ${{COMPREPLY[*]}}"
    lines = f"headcount --install-completion >&2 && source ~/.bashrc && {ask}"
    done = subprocess.run(["bash", "-c", lines], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == offered


def test_the_declared_versions_of_python_are_those_tested():
    prefix = "Programming Language :: Python :: "
    declared = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if re.fullmatch(prefix + r"3\.\d+", c)]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"] == declared


def test_every_requirement_has_a_lower_bound_and_is_pinned_for_development():
    pins = {name.lower().replace("_", "-"): version for name, version in PINS.items()}
    not_pinned = {
        "timm",
        "torchvision",
        "rasterio",
        "sentence-transformers",
        "triton",
        "setuptools",
    }  # not in `dev`; chosen by PyTorch; by venv
    for line in [*PROJECT["dependencies"], *(r for rs in PROJECT["optional-dependencies"].values() for r in rs)]:
        requirement = Requirement(line)
        if requirement.name != "headcount":
            assert [s.operator for s in requirement.specifier] == [">="], line
            assert requirement.name in not_pinned or requirement.specifier.contains(pins[requirement.name]), line


def steps() -> Iterator[tuple[str, dict[str, str]]]:
    for file, workflow in WORKFLOWS.items():
        for name, job in workflow["jobs"].items():
            assert "uses" in job or {"runs-on", "steps"} <= set(job), f"{file}: {name}"
            for step in job.get("steps", []):
                yield f"{file}: {name}", step


def test_workflows_call_what_is_there():
    assert set(WORKFLOWS) == {"ci.yml", "release.yml"}
    assert set(WORKFLOWS["ci.yml"]["jobs"]) >= {"lint", "test", "lowest", "docs", "wheel"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    called = set()
    for where, step in steps():
        assert ("run" in step) != ("uses" in step), where
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"]), where
        called |= set(re.findall(r"\bmake (\w+)", step.get("run", "")))
    assert called <= targets
    assert {"check", "test", "soak", "lowest", "docs", "dist"} <= called
    for workflow in WORKFLOWS.values():
        for job in workflow["jobs"].values():
            assert set([job["needs"]] if "needs" in job else []) <= set(workflow["jobs"])
            assert not str(job.get("uses", "")).startswith("./") or (ROOT / job["uses"]).exists()


def test_only_publishing_may_write():
    writing = {
        (file, name)
        for file, workflow in WORKFLOWS.items()
        for name, job in workflow["jobs"].items()
        if "write" in job.get("permissions", {}).values()
    }
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert writing == {("release.yml", "publish")}


def test_commits_are_formatted_by_the_pinned_versions():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    installed = [d.split("==") for hook in hooks for d in hook.get("additional_dependencies", [])]
    assert installed
    assert all(PINS[name] == version for name, version in installed)
    for path in re.findall(r"\S+\.py\b", " ".join(hook["entry"] for hook in hooks)):
        assert (ROOT / path).exists(), path


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["version"] == headcount.__version__
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert PROJECT["urls"]["Paper"].endswith(paper["doi"])
    assert paper["doi"] in (ROOT / "README.md").read_text()


def test_the_container_is_built_from_files_that_are_sent():
    text = (ROOT / "Dockerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.M) for name in line.split()]
    assert set(copied) == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert PROJECT["readme"] in copied, "the build reads it"
    assert set(PROJECT["license-files"]) <= set(copied), "the build reads them"
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, flags=re.M)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (version,) = re.findall(r"^FROM python:([\d.]+)-", text, flags=re.M)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    assert "torch" in PINS
