"""Commands of headcount in children of a process that has imported everything: a case costs milliseconds, not the import of torch.

A child may carry one fault (fault_shim.c). Its clock stands still, so that two undisturbed calls write the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
MEMORY = 8 << 30  # address space that a child may add, so that a hostile input does not take the machine down


class Fault(NamedTuple):
    """What happens at the n-th call below a folder: an error number, or minus a signal. See fault_shim.c."""

    n: int
    what: int
    mask: int = (1 << 10) - 1
    sticky: bool = False
    half: bool = False


class Outcome(NamedTuple):
    code: int  # exit code, or minus the signal that ended it
    out: str
    err: str
    seconds: float  # of the processor
    memory: int  # bytes that it added
    fired: bool
    trace: list[tuple[int, str]]  # kind and description of each call, if asked for
    modules: list[str]  # imported by the child, if its calls are traced

    @property
    def complaint(self) -> str:
        """What no outcome may have, empty if there is nothing: a traceback, an exit code other than 0 and 2, or 2 without its line."""
        lines = self.err.strip().splitlines()
        if "Traceback" in self.err or "Exception ignored" in self.err:
            return f"traceback: {lines[-1][:300]}"
        if self.code not in (0, 2):
            return f"exit code {self.code}: {lines[-1][:300] if lines else ''}"
        if self.code == 2 and not (lines and lines[-1].startswith("headcount: ")):
            return f"exit code 2 without a line: {lines[-1][:300] if lines else ''}"
        return ""


def compiled_shim() -> Path | None:
    """The shim as a library, or None where there is no C compiler."""
    path = Path(tempfile.gettempdir()) / f"headcount-shim-{os.getuid()}-{(HERE / 'fault_shim.c').stat().st_mtime_ns}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", part, HERE / "fault_shim.c", "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        os.replace(part, path)
    return path


def preload() -> None:
    """Import all of headcount and what it imports when it works; make the paper's data sets and the demo small."""
    os.environ["HEADCOUNT_CHECKPOINT_SECONDS"] = "-1"  # after every epoch; read when headcount is imported
    import torch

    torch.set_num_threads(1)
    import headcount

    for module in pkgutil.walk_packages(headcount.__path__, "headcount."):
        if not module.name.endswith(("__main__", "kernels")):
            importlib.import_module(module.name)
    for name in ("h5py", "pandas", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "PIL.Image"):
        importlib.import_module(name)
    from headcount.cli import running
    from headcount.datasets.registry import SOURCES
    from headcount.experiments.recipe import Recipe

    SOURCES["path"] = dataclasses.replace(SOURCES["path"], count=540, shape=(6, 6, 3))
    tiny = Recipe(source="digits", bag_size=8, train_bags=12, valid_bags=6, test_bags=6, backbone="mlp", epochs=2, batch_bags=8)
    running.demo_recipes = lambda folds: [tiny, tiny.replace(head="output_mean")]
    import typer.main

    from headcount.cli.main import app

    command = typer.main.get_command(app)  # built once: that takes longer than many a case
    typer.main.get_command = lambda _: command
    gc.freeze()  # pages that children share are not touched


def freeze_clock() -> None:
    from headcount.experiments import records, run
    from headcount.selection import fit

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 1, tzinfo=UTC)

    for module in (records, run, fit):
        module.datetime = Clock
    time.monotonic = time.perf_counter = time.process_time = lambda: 1000.0


def run(
    argv: list[str], cwd: Path, root: Path, fault: Fault | None = None, *, trace: bool = False, frozen: bool = True,
    limit: float = 60, while_stopped=None,
) -> Outcome:  # fmt: skip
    """Run a command line in a child, with a fault below ``root``. ``while_stopped`` is called when the fault has stopped it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as log:
        before = resident()
        pid = os.fork()
        if not pid:
            child(argv, cwd, root, fault, out.fileno(), err.fileno(), log.fileno(), trace, frozen)
        deadline = time.monotonic() + limit
        fired = False
        while True:
            found, status, usage = os.wait4(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                fired = True
                if while_stopped:
                    while_stopped()
                os.kill(pid, signal.SIGCONT)
            elif found:
                break
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline += 60
                os.lseek(err.fileno(), 0, os.SEEK_END)
                err.write(f"\nTraceback: hung for {limit:g} s".encode())
                err.flush()
            time.sleep(0.002)
        texts = []
        for f in (out, err, log):
            f.seek(0)
            texts.append(f.read().decode("utf-8", "replace"))
        code, lines = os.waitstatus_to_exitcode(status), [line.partition(" ")[::2] for line in texts[2].splitlines()]
        modules, events = (
            (name for kind, name in lines if kind == "import"),
            [(int(k), what) for k, what in lines if k.isdecimal()],
        )
        fired |= code < 0 or ("fired", "") in lines
        grown = max(0, usage.ru_maxrss * 1024 - before)
        return Outcome(code, *texts[:2], usage.ru_utime + usage.ru_stime, grown, fired, events, list(modules))


def learn(modules: list[str]) -> None:
    """Import what a child had to import, so that the next one need not."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def child(argv, cwd, root, fault, out, err, log, trace, frozen) -> None:
    """Never returns."""
    code, shim, known = 70, ctypes.CDLL(None), set(sys.modules)
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        os.environ["HEADCOUNT_DATA"] = str(cwd / "cache")
        if frozen:
            freeze_clock()
        from headcount.cli.main import main

        sys.argv = ["headcount", *argv]
        if fault or trace:
            f = fault or Fault(0, 0)
            shim.arm_faults(os.fsencode(root), ctypes.c_long(f.n), f.what, f.mask, f.sticky, f.half, log if trace else -1)
        try:
            main()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 0
        except BaseException:
            code = 1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        fired = shim.faults_fired() if fault else 0
        if trace:
            os.write(log, "".join(f"import {name}\n" for name in sys.modules if name not in known).encode())
        os.write(log, b"fired\n" * fired)
        os._exit(code)
