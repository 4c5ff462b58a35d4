"""One direction of dependency: a module may import from its own floor and the floors below, never from above."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headcount

ROOT = Path(headcount.__file__).parent
# from the ground up; what is not in a folder stands on a floor of its own
FLOORS = [
    "errors",
    "files",
    "__init__",
    "bags",
    "data",
    "models",
    "training",
    "judging",
    "showing",
    "fitting",
    "checking",
    "membership",
    "bagkfold",
    "estimator",
    "complaints",
    "typed",
    "commands",
    "answering",
    "commands_own",
    "demo",
    "papers",
    "auditing",
    "asking",
    "cli_options",
    "commands_ask",
    "cli_own",
    "cli",
]
MODULES = sorted(p.relative_to(ROOT) for p in ROOT.rglob("*.py"))


def floor(module: str) -> int:
    """Of a dotted name below headcount."""
    first = module.split(".")[0] or "__init__"
    return FLOORS.index(first if first in FLOORS else "__init__")


def imported(path: Path) -> set[str]:
    """What a file imports from headcount, as dotted names below it; late imports inside functions count too, those for type
    checkers alone do not: nobody runs them."""
    found = set()
    whole = ast.parse(path.read_text())
    unrun = {id(node) for block in for_type_checkers(whole) for node in ast.walk(block)}
    for node in ast.walk(whole):
        if id(node) in unrun:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "headcount":
            below = node.module.removeprefix("headcount").strip(".")
            found |= {below} if below else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("headcount.") for a in node.names if a.name.startswith("headcount.")}
    return found


def for_type_checkers(tree: ast.AST) -> list[ast.stmt]:
    """What stands below ``if TYPE_CHECKING``."""
    ifs = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return [line for n in ifs for line in n.body]


def test_the_front_door_is_the_same_for_type_checkers():
    """What is imported lazily is written out for who only reads: every name, and the room it lives in."""
    lines = for_type_checkers(ast.parse((ROOT / "__init__.py").read_text()))
    shown = {a.asname or a.name: (n.module, a.name) for n in lines if isinstance(n, ast.ImportFrom) for a in n.names}
    assert shown == {name: (f"headcount.{room}", thing) for name, (room, thing) in headcount._DOOR.items()}
    assert sorted(headcount.__all__) == sorted([*shown, "__version__"])
    for name in shown:
        assert getattr(headcount, name) is not None


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_down(module):
    own = module.parts[0].removesuffix(".py")
    assert own in FLOORS, f"{module} stands on no floor; give it one in FLOORS"
    for name in imported(ROOT / module):
        assert floor(name) <= floor(own), f"{module} (floor {own}) imports headcount.{name}, which stands above it"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_file_opens_with_its_claim(module):
    assert ast.get_docstring(ast.parse((ROOT / module).read_text())), f"{module} does not say what it is for"


def test_help_needs_no_torch():
    """So that --help answers in a fraction of a second."""
    code = "import sys, headcount.cli.main; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
