"""The structure of the package: imports point one way, names are unique, every file states its purpose, and --help is fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import headcount

ROOT = Path(headcount.__file__).parent
# a module may import from its own package and from those before it
PACKAGES = [
    "errors",
    "io",
    "loading",
    "bags",
    "majority",
    "datasets",
    "readers",
    "models",
    "training",
    "inference",
    "selection",
    "experiments",
    "reporting",
    "estimators",
    "__init__",
    "cli",
    "__main__",
]
MODULES = sorted(p.relative_to(ROOT) for p in ROOT.rglob("*.py"))


def position(module: str) -> int:
    """The place in PACKAGES of a dotted name below headcount; the names of the front door belong to ``__init__``."""
    first = module.split(".")[0]
    return PACKAGES.index(first if first in PACKAGES else "__init__")


def imported(path: Path) -> set[str]:
    """What a file imports from headcount, as dotted names below it, imports inside functions included. Imports for type checkers
    are not executed and do not count."""
    names = set()
    tree = ast.parse(path.read_text())
    not_executed = {id(node) for statement in type_checking_imports(tree) for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in not_executed:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "headcount":
            below = node.module.removeprefix("headcount").strip(".")
            names |= {below} if below else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {a.name.removeprefix("headcount.") for a in node.names if a.name.startswith("headcount.")}
    return names - {"__version__"}


def type_checking_imports(tree: ast.AST) -> list[ast.stmt]:
    """The statements below ``if TYPE_CHECKING``."""
    ifs = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return [statement for n in ifs for statement in n.body]


def test_the_front_door_is_the_same_for_type_checkers():
    """What is imported lazily is also written out for type checkers: every name, and where it is defined."""
    lines = type_checking_imports(ast.parse((ROOT / "__init__.py").read_text()))
    written = {a.asname or a.name: (n.module, a.name) for n in lines if isinstance(n, ast.ImportFrom) for a in n.names}
    lazy = {name: (f"headcount.{module}", name) for name, module in headcount._LAZY.items()}
    assert written == lazy
    assert sorted(headcount.__all__) == sorted([*written, "__version__"])
    for name in written:
        assert getattr(headcount, name) is not None


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_one_way(module):
    package = module.parts[0].removesuffix(".py")
    assert package in PACKAGES, f"{module} is in no package of the list"
    for name in imported(ROOT / module):
        assert position(name) <= position(package), f"{module} imports headcount.{name}, which comes after {package}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_file_opens_with_its_purpose(module):
    assert ast.get_docstring(ast.parse((ROOT / module).read_text())), f"{module} does not say what it is for"


def test_no_module_has_a_namesake():
    paths = defaultdict(list)
    for module in MODULES:
        if module.name != "__init__.py":
            paths[module.stem].append(str(module))
    assert not [same for same in paths.values() if len(same) > 1]


def test_no_public_class_has_a_namesake():
    paths = defaultdict(list)
    for module in MODULES:
        for node in ast.parse((ROOT / module).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths[node.name].append(str(module))
    assert not {name: where for name, where in paths.items() if len(where) > 1}


def test_help_needs_no_torch():
    """So that --help answers in a fraction of a second."""
    code = "import sys, headcount.cli.main; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_mutation_finds_its_line(monkeypatch):
    """``make mutants`` changes lines of the package by their text: whoever edits one corrects it there."""
    monkeypatch.syspath_prepend(str(ROOT.parents[1] / "benchmarks"))
    from mutants import MUTATIONS

    assert [(m.file, m.old) for m in MUTATIONS if (ROOT / m.file).read_text().count(m.old) != 1] == []
