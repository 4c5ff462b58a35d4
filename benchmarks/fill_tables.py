"""Fill the paper's tables: run what is missing, the most important first, several runs at a time, and stop in time.

    python benchmarks/fill_tables.py --list                                    # the groups, their missing runs, an estimate
    python benchmarks/fill_tables.py --minutes 27 --processes 3                # GPU; first: nvidia-cuda-mps-control -d
    python benchmarks/fill_tables.py --only sampler,ablation --minutes 9       # these groups, in this order
    python benchmarks/fill_tables.py --only oct --list --keys                  # the runs themselves, with their keys

Records go to RESULTS/paper (or the folder that --list shows), one JSON file each. Runs are made in the folder --work, which is
not under version control: checkpoints, and of each Counting Network the votes and distances from which MPEM starts
(WORK/paper/KEY.npz, 0.4 MB). Take that folder along to another machine, and no Counting Network is trained twice. One whose
record exists but whose votes were not kept is trained once more for its votes; its record stays.

No run is started that would not end within --minutes, by the time its method has needed. A run that is overtaken by the limit
stops after an epoch and is resumed by the next call, as is one that was killed. Several calls may work at the same time on the
same folders: each skips what another has started. Data sets are those in the cache ($HEADCOUNT_DATA); a column without its own
takes what is there (OCT2017's originals for OCT).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from headcount.datasets import registry
from headcount.errors import HeadcountError, check_choice
from headcount.experiments import paper
from headcount.experiments.launch import Launcher, in_process, processes
from headcount.experiments.paper import COARSE, METHODS, SCALES, Scale, substitute_sources
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, error_line, failure_path, load_records, write_failure
from headcount.experiments.run import run
from headcount.io import atomic_write, file_lock
from headcount.training import accel
from headcount.training.trainer import TrainProgress

ABLATION = ("Counting Network", "Counting Network w/o Count", "Output+Mean")
BASELINES = tuple(m for m in METHODS if m not in ABLATION)
MAIN = ("Output+Mean", "Feature+Mean", "MILLET", "Counting Network")
START_SECONDS = 30.0  # of a worker process: imports and compilation
Column = tuple[str, str]  # data set and scenario, as the paper names them


@dataclass(frozen=True)
class Group:
    """Runs with one purpose. The order of the groups is their priority."""

    folder: str  # of the records, under --results
    about: str
    recipes: Callable[[Scale], Iterable[Recipe]]
    plain: bool = False  # neither compiled nor captured


def cells(
    scale: Scale, columns: Iterable[Column], methods: Iterable[str], removals: Iterable[float] = (), folds: int = 5
) -> Iterator[Recipe]:
    """Column by column and fold by fold: an interruption leaves whole folds of all methods."""
    runs = [*((method, 0.0) for method in methods), *(("Counting Network", r) for r in removals)]
    for dataset, scenario in columns:
        yield from chain(*zip(*(scale.recipes(m, dataset, scenario, r)[:folds] for m, r in runs), strict=True))


def sampler_recipes(scale: Scale) -> Iterator[Recipe]:
    """Bags by the released sampler and TF32, as the released code has them, on five folds; their four combinations on three."""
    for method in ("Counting Network", "Counting Network w/o Count"):
        recipes = scale.recipes(method, "CIFAR10", "Various")
        yield from (r.replace(sampler="official", precision="tf32") for r in recipes)
        for change in ({"precision": "tf32"}, {"sampler": "official"}):  # both as in the records of the tables: there already
            yield from (r.replace(**change) for r in recipes[:3])


EVERYWHERE = [(d, s) for s in paper.SCENARIOS for d in paper.DATASETS]
VARIOUS = [(d, "Various") for d in paper.DATASETS]
CIFAR, SVHN, OCT = VARIOUS[:1], VARIOUS[1:2], VARIOUS[3:]
ABLATION_COLUMNS = [("CIFAR10", "Large"), ("SVHN", "Small"), ("SVHN", "Large")]
MPEM_COLUMNS = [("CIFAR10", "Small"), ("CIFAR10", "Large"), *SVHN, *ABLATION_COLUMNS[1:]]

GROUPS: dict[str, Group] = {
    "baselines-cifar10": Group(
        "paper", "table 2, CIFAR-10 Various: the ten other baselines", lambda s: cells(s, CIFAR, BASELINES)
    ),
    "ablation": Group("paper", "table 4: CIFAR-10 Large, SVHN Small and Large", lambda s: cells(s, ABLATION_COLUMNS, ABLATION)),
    "sampler": Group("sampler", "CIFAR-10 Various with the released sampler, with TF32, with both", sampler_recipes),
    "baselines-svhn": Group(
        "paper", "table 2, SVHN Various: the ten other baselines", lambda s: cells(s, SVHN, BASELINES)
    ),
    "mpem": Group(
        "paper", "MPEM, r = 0.1, 0.3, 0.5, 0.7, 1: CIFAR-10 Small and Large, SVHN",
        lambda s: cells(s, MPEM_COLUMNS, ["Counting Network"], COARSE),
    ),
    "mpem-svhn": Group(
        "paper", "table 6, SVHN Various: every r, two folds", lambda s: cells(s, SVHN, [], s.removals, folds=2)
    ),
    "oct": Group("paper", "OCT Various: four methods and MPEM, r as above", lambda s: cells(s, OCT, MAIN, COARSE)),
    "oct-others": Group(
        "paper", "OCT Various: all other methods", lambda s: cells(s, OCT, [m for m in METHODS if m not in MAIN])
    ),
    "rest": Group("paper", "everything else in the tables and figures", lambda s: cells(s, EVERYWHERE, METHODS, s.removals)),
    "nll": Group(
        "paper", "Output+Mean with the loss of its class's probability, not in the paper",
        lambda s: (r.replace(options={"form": "nll"}) for r in cells(s, [*CIFAR, *SVHN, *MPEM_COLUMNS], ["Output+Mean"])),
    ),
    "seeds": Group(
        "seeds", "CIFAR-10 Various, without Count from another seed",
        lambda s: (r.replace(seed=1) for r in cells(s, CIFAR, ["Counting Network w/o Count"])),
    ),
    "plain": Group(
        "plain", "CIFAR-10 Various, Counting Network in TF32, neither compiled nor captured",
        lambda s: (r.replace(precision="tf32") for r in cells(s, CIFAR, ["Counting Network"])), plain=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run to be made in ``work``, whose record belongs into ``out``."""

    recipe: Recipe
    out: Path
    work: Path
    plain: bool = False
    keep_arrays: bool = False  # MPEM needs them


@dataclass(frozen=True)
class Outcome:
    """What became of a job; ``record`` is None if another process has it, or if the time limit stopped it."""

    record: Record | None
    seconds_per_epoch: float = 0.0
    overhead: float = 0.0  # seconds of everything but the epochs: bags, compilation, scores
    first: bool = False  # of its process


class TimeIsUp(KeyboardInterrupt):
    """Stops a training like Ctrl-C does: with a checkpoint."""


def execute(job: Job, end: float, first: bool, device: str) -> Outcome:
    """Make a run, publish its record, and keep its arrays if they are needed; in a worker process."""
    key, started, epochs = job.recipe.key, time.time(), []

    def on_progress(progress: TrainProgress) -> None:
        epochs.append(time.time())
        if epochs[-1] > end and progress.epoch < job.recipe.epochs:
            raise TimeIsUp

    with file_lock(job.work / "running" / f"{key}.claim", wait=False) as acquired:
        if not acquired or ((job.out / f"{key}.json").exists() and has_arrays(job, key)):
            return Outcome(None)
        if job.keep_arrays and not (job.work / f"{key}.npz").exists():
            (job.work / f"{key}.json").unlink(missing_ok=True)
        with without_acceleration() if job.plain else nullcontext():
            try:
                compile = "off" if job.plain else "auto"
                record = run(job.recipe, job.work, on_progress=on_progress, device=device, compile=compile)
            except TimeIsUp:
                return Outcome(None)
        if not (job.out / f"{key}.json").exists():
            atomic_write(job.out / f"{key}.json", lambda f: f.write(record.path.read_bytes()))
        if not job.keep_arrays:
            record.path.with_suffix(".npz").unlink(missing_ok=True)
            record.path.unlink()
    rate = (epochs[-1] - epochs[0]) / (len(epochs) - 1) if len(epochs) > 1 else 0.0
    return Outcome(Record.read(job.out / f"{key}.json"), rate, time.time() - started - rate * len(epochs), first)


def has_arrays(job: Job, key: str) -> bool:
    """Whether nothing is missing in the work folder for MPEM; arrays that were kept beside the record are taken over."""
    if not job.keep_arrays:
        return True
    if not (job.work / f"{key}.npz").exists() and (job.out / f"{key}.npz").exists():
        for name in (f"{key}.npz", f"{key}.json"):  # the JSON, by which the record counts as complete, last
            atomic_write(job.work / name, lambda f, name=name: f.write((job.out / name).read_bytes()))
    return (job.work / f"{key}.npz").exists() and (job.work / f"{key}.json").exists()


@contextmanager
def without_acceleration() -> Iterator[None]:
    """Training steps as written in Python, without CUDA graphs and memory-layout changes."""
    before = accel.cuda_graph, accel.optimize_layout
    accel.cuda_graph, accel.optimize_layout = lambda step, device: step, lambda model, device, precision: None
    try:
        yield
    finally:
        accel.cuda_graph, accel.optimize_layout = before


class Estimates:
    """How long a run takes: by the last run of its head in this call, before that by the records of its head."""

    def __init__(self, records: Iterable[Record], n_processes: int) -> None:
        self.rates: dict[str, list[float]] = {}  # head -> seconds per epoch
        self.overhead, self.n_processes, self.n_started = 15.0, n_processes, 0
        for record in records:
            if seconds := record.data["provenance"].get("seconds"):
                self.rates.setdefault(record.recipe.head, []).append(seconds / record.recipe.epochs)
        self.typical = statistics.median([rate for rates in self.rates.values() for rate in rates] or [0.07])

    def seconds(self, recipe: Recipe, epochs_done: int = 0) -> float:
        rate = statistics.median(self.rates.get(recipe.head, [self.typical]))
        start = START_SECONDS * (self.n_started < self.n_processes)
        return rate * (recipe.epochs - epochs_done) + self.overhead + start

    def update(self, recipe: Recipe, outcome: Outcome) -> None:
        """Compilation and start are in no rate, and those of the first run of each process in no overhead."""
        if outcome.seconds_per_epoch:
            self.rates[recipe.head] = [outcome.seconds_per_epoch]
        if not outcome.first:
            self.overhead = outcome.overhead


class Queue:
    """The jobs that wait, in the order of their priority."""

    def __init__(self, jobs: Iterable[Job], estimates: Estimates, end: float) -> None:
        self.waiting, self.estimates, self.end = list(dict.fromkeys(jobs)), estimates, end
        self.running: dict[Future, Job] = {}
        self.left_out: set[Job] = set()  # failed, stopped, or another process has them
        self.n_too_long = 0

    def next(self) -> Job | None:
        """The first job, or the one that it needs, that can be started and would end in time."""
        self.n_too_long = 0
        for waiting in self.waiting:
            needs = (replace(waiting, recipe=r, keep_arrays=True) for r in waiting.recipe.needs)
            job = next((need for need in needs if not has_arrays(need, need.recipe.key)), waiting)
            if job in self.left_out or job in self.running.values():
                continue
            if time.time() + self.estimates.seconds(job.recipe, epochs_done(job)) <= self.end:
                return job
            self.n_too_long += 1
        return None

    def work_off(self, launcher: Launcher, n_processes: int, device: str) -> int:
        """Run until nothing more can be started; the number of runs that failed."""
        n_failed = 0
        with launcher() as submit:
            while True:
                while len(self.running) < n_processes and (job := self.next()):
                    first = self.estimates.n_started < n_processes
                    self.estimates.n_started += 1
                    self.running[submit(execute, job, self.end, first, device)] = job
                if not self.running:
                    return n_failed
                for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                    n_failed += self._finish(self.running.pop(future), future)

    def _finish(self, job: Job, future: Future) -> bool:
        if (error := future.exception()) is not None:
            if isinstance(error, BrokenExecutor):
                raise error
            self.left_out.add(job)
            write_failure(failure_path(job.work, job.recipe.key), job.recipe, error)
            print(f"failed: {job.recipe}: {error_line(error)}", flush=True)
            return True
        outcome = future.result()
        if outcome.record is None:
            self.left_out.add(job)
            return False
        self.estimates.update(job.recipe, outcome)
        self.waiting = [waiting for waiting in self.waiting if (waiting.recipe, waiting.out) != (job.recipe, job.out)]
        fit, scores = outcome.record.data["fit"], outcome.record.scores
        text = f"valid {fit['valid_loss']:.4f}  instance {scores['instance_accuracy']:.4f}  epoch {fit['best_epoch']}"
        seconds = outcome.seconds_per_epoch * job.recipe.epochs + outcome.overhead
        print(f"{seconds:6.1f} s  {outcome.seconds_per_epoch:.4f} s/epoch  {text}  {job.recipe}", flush=True)
        return False


def epochs_done(job: Job) -> int:
    """The epochs of an interrupted run up to its last checkpoint, at most."""
    folder = job.work / "running" / job.recipe.key
    losses = folder / "metrics.jsonl"
    return len(losses.read_text().splitlines()) if losses.exists() and (folder / "checkpoint.safetensors").exists() else 0


def jobs_of(group: Group, scale: Scale, results: Path, work: Path, needed: set[Recipe]) -> list[Job]:
    """The group's missing runs, as far as their records go; the keys need the data."""
    out = results / group.folder
    done = {r.recipe for r in load_records(out)} if out.exists() else set()
    keep = needed if group.folder == "paper" else set()
    recipes = dict.fromkeys(r for r in group.recipes(scale) if r not in done)
    return [Job(r, out, work / group.folder, group.plain, r in keep) for r in recipes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--processes", type=int, default=3, help="runs at a time; three are the best on one H200")
    parser.add_argument("--only", default="", help=f"some of {', '.join(GROUPS)}, in the order given, with commas")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--work", type=Path, default=Path("results/work"), help="checkpoints, votes and distances")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--keys", action="store_true", help="list every run with its key")
    parser.add_argument("--scale", default="full", help="smoke: the same in small, on digits and generated stand-ins")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    end = time.time() + 60 * args.minutes
    names = [check_choice("group", name, GROUPS) for name in args.only.split(",")] if args.only else list(GROUPS)
    records = [
        r for f in dict.fromkeys(GROUPS[n].folder for n in GROUPS) if (p := args.results / f).exists() for r in load_records(p)
    ]
    cached = {name for name in registry.SOURCES if registry.is_available(name)}
    scale = substitute_sources(SCALES[check_choice("scale", args.scale, SCALES)], {r.recipe.source for r in records}, cached)
    needed = set(cells(scale, EVERYWHERE, ["Counting Network"]))  # by MPEM
    estimates = Estimates((r for r in records if r.recipe.epochs == scale.base.epochs), args.processes)
    jobs: dict[tuple[Recipe, Path], Job] = {}
    for name in names:
        new = [j for j in jobs_of(GROUPS[name], scale, args.results, args.work, needed) if (j.recipe, j.out) not in jobs]
        available = [j for j in new if j.recipe.source in cached]
        jobs |= {(j.recipe, j.out): j for j in available}
        minutes = sum(estimates.seconds(j.recipe) for j in available) / 60 / args.processes
        no_data = f", {len(new) - len(available)} more without data" if len(available) < len(new) else ""
        print(f"{name:18} {len(available):4} missing, about {minutes:4.0f} minutes{no_data}: {GROUPS[name].about}", flush=True)
        for job in available if args.keys else []:
            print(f"  {job.out / job.recipe.key}.json  {job.recipe}")
    if args.list or not jobs:
        return
    queue = Queue(jobs.values(), estimates, end)
    launcher = in_process if args.processes == 1 else processes(args.processes)
    n_failed = queue.work_off(launcher, args.processes, args.device)
    print(f"{len(queue.waiting)} runs are left, {n_failed} failed; {queue.n_too_long} would have taken too long")
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    try:
        main()
    except HeadcountError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
