"""The campaign: faults at every command's file-system calls, and hostile inputs to every reader. ``make campaign`` runs it.

python tests/campaign                              1,500 faults and 10,000 hostile inputs
python tests/campaign faults --cases 200 --seed 7 --only audit,predict --processes 2 --minutes 5
python tests/campaign --case audit:kill:66:half    repeats one case; each failure prints its own
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import commands
import faults
import fork_server
import hostile_inputs

SLOW = ("fit-private", "benchmark", "run", "study", "fit", "fit-network", "fit-images", "fit-slides", "report", "paper", "demo", "predict-h5",
        "fit-plan", "fit-fold", "record-page", "record-arrays")  # fmt: skip
DEFAULTS = {"faults": 1500, "inputs": 10_000}
assert not {*faults.NAMES} & {*hostile_inputs.NAMES}  # --case finds the part by the name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(DEFAULTS), metavar="faults|inputs")
    parser.add_argument("--cases", type=int, help=f"number of cases of each part; default {DEFAULTS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of commands or of inputs")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=1e9, help="no new case begins after this time")
    parser.add_argument("--case", nargs="+", help="repeat these")
    options = parser.parse_args()
    shim = fork_server.compiled_shim()
    if shim is None:
        print("no C compiler (cc): faults cannot be injected")
        return 77
    if os.environ.get("LD_PRELOAD") != str(shim):  # every write of this process goes through the shim
        os.environ |= {"LD_PRELOAD": str(shim), "HEADCOUNT_COMMIT": "campaign", "MPLBACKEND": "agg"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    fork_server.preload()
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        base = Path(folder).resolve()
        in_child(lambda: prepare(base))
        if options.case:
            return max(repeat(case, base) for case in options.case)
        failures = [line for part in options.parts for line in campaign(part, base, options)]
    return int(bool(failures))


def prepare(base: Path) -> None:
    """The inputs of all commands."""
    (base / "inputs").mkdir()

    def run(argv: list[str], cwd: Path) -> None:
        outcome = fork_server.run(argv, cwd, base)
        assert outcome.code == 0, f"{' '.join(argv)}: {outcome.err}"

    commands.make_inputs(base / "inputs", run)
    hostile_inputs.make_inputs(base / "inputs", run)


def in_child(work) -> int:
    """The pid of a child that does this; its threads stay its own."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert status == 0, "a preparation failed"
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def campaign(part: str, base: Path, options: argparse.Namespace) -> list[str]:
    """Run a part on several processes; prints a summary and returns a line per failure."""
    module = {"faults": faults, "inputs": hostile_inputs}[part]
    names, count = options.only or list(module.NAMES), options.cases or DEFAULTS[part]
    weights = {name: 0.1 if name in SLOW else 1.0 for name in names}
    shares = {name: max(1, round(count * w / sum(weights.values()))) for name, w in weights.items()}
    order = sorted(names, key=lambda name: name not in SLOW)
    started, pids, logs = time.monotonic(), [], []
    deadline = started + 60 * options.minutes
    for k in range(options.processes):
        logs.append(base / f"{part}-{k}.log")
        pids.append(os.fork())
        if not pids[-1]:
            code = 1
            try:
                with logs[k].open("w") as log:
                    for result in in_turn(
                        [module.search(n, shares[n], base, base / f"w{k}", options.seed) for n in order[k :: options.processes]]
                    ):
                        print(json.dumps(result), file=log, flush=True)
                        if result["problems"]:
                            print(failure_line(result), flush=True)
                        if time.monotonic() > deadline:
                            break
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
    crashed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    results = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    struck = [r for r in results if r["struck"]]
    failures = [failure_line(r) for r in results if r["problems"]]
    minutes = (time.monotonic() - started) / 60
    print(f"{part}: seed {options.seed}, {len(struck):,} cases ({len(results) - len(struck)} more had no effect), "
          f"{len(failures)} failures, {minutes:.1f} minutes on {options.processes} processes")  # fmt: skip
    for title in ("group", "kind"):
        counts, failed = Counter(r[title] for r in struck), Counter(r[title] for r in results if r["problems"])
        print(
            f"  by {title}: "
            + ", ".join(f"{k} {n}" + f" ({failed[k]} failed)" * bool(failed[k]) for k, n in sorted(counts.items()))
        )
    return failures + ["a worker of the campaign crashed"] * len(crashed)


def in_turn(searches: list[Iterator[dict]]) -> Iterator[dict]:
    """One result of each search, then the next of each: a campaign that is stopped early has tried everything."""
    while searches:
        for search in list(searches):
            if (result := next(search, None)) is None:
                searches.remove(search)
            else:
                yield result


def failure_line(result: dict) -> str:
    return f"python tests/campaign --case {result['case']}\n    " + "\n    ".join(result["problems"])


def repeat(case: str, base: Path) -> int:
    module = hostile_inputs if case.split(":")[0] in hostile_inputs.NAMES else faults
    result = module.repeat(case, base, base / "w0")
    print(result.pop("details"))
    print(json.dumps(result, indent=1))
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
