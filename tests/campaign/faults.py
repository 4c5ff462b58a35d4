"""Faults at the n-th file-system call of every command: kills, stops, full, broken and read-only disks.

After each: an error is one line and exit code 2; every output is whole (as before the command, or as after it) or absent; the same
command then succeeds, and leaves exactly the files of an undisturbed call, equal in every byte.
"""

from __future__ import annotations

import errno
import hashlib
import random
import signal
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import fork_server
from commands import COMMANDS
from fork_server import Fault, Outcome

NAMES = tuple(COMMANDS)
READS, WRITES, LOCK = 1 | 2 | 4, 8 | 16 | 32 | 64 | 128 | 256, 512
GROWS = 8 | 16 | 32 | 64 | 128  # what needs room on the disk
RENAME = 32
ALL = READS | WRITES | LOCK


class Kind(NamedTuple):
    what: int  # an error number, or minus a signal
    mask: int
    sticky: bool = False  # every later call fails too


KINDS = {
    "kill": Kind(-signal.SIGKILL, ALL),
    "term": Kind(-signal.SIGTERM, ALL),
    "int": Kind(-signal.SIGINT, ALL),
    "stop": Kind(-signal.SIGSTOP, ALL),
    "twin": Kind(-signal.SIGSTOP, WRITES | LOCK),  # while it is stopped, the same command is called again
    "eio": Kind(errno.EIO, ALL),
    "eio-stays": Kind(errno.EIO, ALL, True),
    "enospc": Kind(errno.ENOSPC, GROWS, True),
    "edquot": Kind(errno.EDQUOT, GROWS, True),
    "erofs": Kind(errno.EROFS, WRITES, True),
    "estale": Kind(errno.ESTALE, ALL),
    "emfile": Kind(errno.EMFILE, 1 | 8),
    "enolck": Kind(errno.ENOLCK, LOCK, True),
}
KILLS = ("kill", "term", "int", "stop", "twin")
Tree = dict[str, str]


class Case(NamedTuple):
    """A fault at the n-th call of a command; ``half``: of a write, half is done first."""

    command: str
    kind: str
    n: int
    half: bool = False

    def __str__(self) -> str:
        return ":".join([self.command, self.kind, str(self.n), *["half"] * self.half])

    @classmethod
    def parse(cls, text: str) -> Case:
        command, kind, n, *half = text.split(":")
        return cls(command, kind, int(n), bool(half))


def tree(folder: Path) -> Tree:
    """Every file and folder, by content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = content
    return found


class Reference:
    """A command undisturbed, in one folder: its files before and after, and its file-system calls."""

    def __init__(self, name: str, base: Path, work: Path) -> None:
        self.command, self.inputs, self.base, self.work = COMMANDS[name], base / "inputs", base, work
        self.command.prepare(self.inputs, work)
        self.before = tree(work)
        outcome = self.run(trace=True)
        assert outcome.code == 0, f"{name} fails undisturbed: {outcome.err}"
        fork_server.learn(outcome.modules)
        self.after, self.out, self.trace = tree(work), outcome.out, outcome.trace

    def run(self, fault: Fault | None = None, **options) -> Outcome:
        return fork_server.run(self.command.argv(self.inputs), self.work, self.base, fault, **options)

    @cached_property
    def whole(self) -> set[tuple[str, str]]:
        return {*self.before.items(), *self.after.items()}

    def broken(self, now: Tree) -> list[str]:
        """Final outputs that are neither as before nor as after; other names are leftovers. Logs (.jsonl) grow line by line."""
        names = {p for p in self.before | self.after if not p.endswith(".jsonl")}
        return [p for p, content in now.items() if p in names and (p, content) not in self.whole]

    def differences(self, now: Tree) -> str:
        """How a tree differs from that of the undisturbed call."""
        parts = {
            "lacks": [p for p in self.after if p not in now],
            "leaves": [p for p in now if p not in self.after],
            "differs in": [p for p in now if p in self.after and self.after[p] != now[p]],
        }
        return "; ".join(f"{word} {', '.join(paths[:4])}" for word, paths in parts.items() if paths)

    def check(self, case: Case) -> tuple[bool, list[str], str]:
        """Whether the fault struck, what is wrong after it, and the last line that the command printed."""
        kind, problems = KINDS[case.kind], []
        self.command.prepare(self.inputs, self.work)
        twins: list[Outcome] = []
        twin = (lambda: twins.append(self.run(limit=3))) if case.kind == "twin" else None
        outcome = self.run(Fault(case.n, kind.what, kind.mask, kind.sticky, case.half), while_stopped=twin)
        now = tree(self.work)
        complete = all(now.get(p) == content for p, content in self.after.items())
        if broken := self.broken(now):
            problems.append(f"after the fault, not whole: {', '.join(broken[:4])}")
        problems += self.complaints(case, outcome, now)
        again = self.run()
        now = tree(self.work)
        refused = again.code == 2 and complete and "already" in again.err
        if complaint := again.complaint:
            problems.append(f"the next call: {complaint}")
        elif again.code and not refused:
            problems.append(f"the next call fails: {again.err.strip().splitlines()[-1][:300]}")
        elif not refused and again.out != self.out:
            problems.append("the next call prints something else")
        if refused:  # it has not come to the cache, whose next reader removes the lock that the disk refused to remove
            now = {p: content for p, content in now.items() if p in self.after or not p.endswith(".lock")}
        if difference := self.differences(now):
            problems.append(f"the next call {difference}")
        line = (outcome.err.strip().splitlines() or [""])[-1]
        return outcome.fired, problems, line

    def complaints(self, case: Case, outcome: Outcome, now: Tree) -> Iterator[str]:
        """What is wrong with how the command ended under the fault."""
        lines = outcome.err.strip().splitlines() or [""]
        if case.kind in ("kill", "term") and outcome.code in (-signal.SIGKILL, -signal.SIGTERM):
            return
        if case.kind == "int" and outcome.code == 130:
            if (
                not lines[-1].startswith("headcount: interrupted")
                or "Traceback" in outcome.err
                or "Exception ig" in outcome.err
            ):
                yield f"interrupted, but not in one line: {lines[-1][:300]}"
            return
        if outcome.complaint:
            yield outcome.complaint
        if outcome.code == 2 and case.kind in ("kill", "term", "stop"):
            yield f"it stops with: {lines[-1][:300]}"
        if case.kind == "int" and outcome.code == 2:
            yield f"an interrupt is reported as: {lines[-1][:300]}"
        if outcome.code == 0 and case.kind != "twin":
            if any(now.get(p) != content for p, content in self.after.items()):
                yield f"exit code 0, but it {self.differences(now)}"
            elif outcome.out != self.out:
                yield "exit code 0, but it prints something else"
        first = next((n for n, (which, _) in enumerate(self.trace, 1) if which == RENAME), 0)
        undoable = case.n <= first or not KINDS[case.kind].sticky  # a disk that has broken down refuses to rename back, too
        if outcome.code == 2 and case.kind not in KILLS and undoable:
            new = [p for p, content in self.after.items() if content not in ("folder", self.before.get(p))]
            done = [p for p in new if now.get(p) == self.after[p]]
            if 0 < len(done) < len(new) and not {"records", "cache"} & {part for p in done for part in p.split("/")}:
                yield f"exit code 2, but some of its outputs are there: {', '.join(done[:4])}"


def draw(reference: Reference, name: str, rng: random.Random) -> Case:
    """A random case: mostly at calls that write."""
    kind = rng.choices(list(KINDS), [6, 1, 2, 1, 1, *[1] * (len(KINDS) - 5)])[0]
    mask = KINDS[kind].mask
    if rng.random() < 0.8 and mask & WRITES:
        mask &= WRITES
    calls = [n for n, (which, _) in enumerate(reference.trace, 1) if which & mask]
    calls = calls or list(range(1, len(reference.trace) + 1))
    return Case(name, kind, rng.choice(calls), rng.random() < 0.3)


def result(case: Case, reference: Reference) -> dict[str, Any]:
    struck, problems, line = reference.check(case)
    return {"case": str(case), "group": case.command, "kind": case.kind, "struck": struck, "problems": problems, "line": line}


def search(name: str, count: int, base: Path, work: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Check ``count`` random cases of a command."""
    reference, rng = Reference(name, base, work), random.Random(f"{seed} {name}")
    for _ in range(count):
        yield result(draw(reference, name, rng), reference)


def repeat(text: str, base: Path, work: Path) -> dict[str, Any]:
    """Check one case, and describe the call at which it strikes."""
    case = Case.parse(text)
    reference = Reference(case.command, base, work)
    kind, what = reference.trace[min(case.n, len(reference.trace)) - 1]
    command = f"headcount {' '.join(reference.command.argv(reference.inputs))}"
    return {
        "details": f"{command}\n{case.kind} at call {case.n} of {len(reference.trace)}: {what} (kind {kind})",
        **result(case, reference),
    }
