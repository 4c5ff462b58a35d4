"""Every command of headcount that writes, and some that only read, each on tiny data."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

TINY = "--source digits --bag-size 8 --device cpu --set backbone=mlp --set train_bags=12 --set valid_bags=6 --set test_bags=6 --set batch_bags=8"


@dataclass(frozen=True)
class Command:
    """A command line, run in an empty folder, where ``before`` is copied to from the inputs; IN is the folder of inputs."""

    line: str
    before: dict[str, str] = field(default_factory=dict)

    def argv(self, inputs: Path) -> list[str]:
        return [word.replace("IN/", f"{inputs}/") for word in self.line.split()]

    def prepare(self, inputs: Path, work: Path) -> None:
        """Empty the folder and put the earlier outputs there that the command is to replace."""
        remove(work)
        work.mkdir(parents=True)
        for name, source in self.before.items():
            copy = shutil.copytree if (inputs / source).is_dir() else shutil.copy
            copy(inputs / source, work / name)


COMMANDS = {
    "run": Command(f"run {TINY} --epochs 3 --out records"),
    "study": Command(f"study {TINY} --fold 0 --removal 0,0.5 --epochs 2 --out records"),
    "fit": Command("fit IN/table/people.csv --out model --method forest,logistic --folds 2"),
    "fit-network": Command(
        "fit IN/table/people.csv --out model --head count --epochs 2 --folds 2 --overwrite", {"model": "table/model"}
    ),
    "fit-images": Command("fit IN/images/images --out model --head count --epochs 1 --folds 2 --cache cache"),
    "fit-slides": Command("fit IN/slides/slides --out model --head count --epochs 1 --folds 2 --cache cache"),
    "predict": Command("predict IN/table/model IN/table/people.csv --out p.csv --bags b.csv"),
    "predict-again": Command(
        "predict IN/table/model IN/table/people.csv --out p.parquet --bags b.csv",
        {"p.parquet": "noise.npz", "b.csv": "noise.npz"},
    ),
    "predict-slides": Command("predict IN/slides/model IN/slides/slides --out out --geojson geo --heatmap heat --cache cache"),
    "predict-h5": Command("predict IN/images/model IN/images/images --out p.h5"),
    "shares": Command(
        "table IN/table/model IN/table/people.csv --by colour --out t.csv --bags b.csv --page p.html", {"t.csv": "noise.npz"}
    ),
    "audit": Command("audit IN/table/model IN/table/people.csv --out sheet.csv --count 6"),
    "audit-images": Command("audit IN/images/model IN/images/images --out sheet --count 4"),
    "evaluate": Command("evaluate IN/table/model IN/table/people.csv --audit IN/sheet.csv --json"),
    "explain": Command("explain IN/table/model IN/table/people.csv --out page.html"),
    "explain-texts": Command("explain IN/text/model IN/text/texts.csv --out page.html"),
    "report": Command("report IN/records --out report.html"),
    "report-csv": Command("report IN/records --csv"),
    "paper": Command("paper table5 --scale smoke --out IN/records --page page.html"),
    "export": Command("export IN/table/model --onnx model.onnx"),
    "import": Command("data import path IN/path.npz"),
    "import-again": Command("data import path IN/path.npz --note better", {"cache": "cache"}),
    "bags": Command(
        "bags --source IN/noise.npz --bag-size 8 --train-bags 8 --valid-bags 4 --test-bags 4 --export b.npz --picture b.png"
    ),
    "issues": Command("issues IN/table/people.csv --out issues.csv --folds 2"),
    "issues-model": Command("issues IN/table/people.csv --model IN/table/model --out issues.tsv"),
    "calibrate": Command("calibrate IN/table/model IN/many.csv --truth truth --out calibrated"),
    "fit-private": Command("fit IN/table/people.csv --out model --method logistic --folds 2 --private 3"),
    "predict-private": Command("predict IN/private IN/table/people.csv --bags b.csv"),
    "benchmark": Command(
        "benchmark --task IN/task.py --methods logistic,commonest --seeds 1 --out records --page p.html",
        {"records": "benchmark"},
    ),
    "check": Command("check IN/table/people.csv"),
    "demo": Command("demo --out demo --folds 1 --processes 1"),
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


TASK = """import numpy as np
from headcount.datasets.tasks import Task, TaskData

def load():
    g = np.random.default_rng(0)
    truth = g.integers(0, 2, 160)
    return TaskData(g.normal(3 * truth[:, None], 1, (160, 3)), np.repeat(np.arange(20), 8), np.array(["no", "yes"])[truth])

TASK = Task("Numbers by bag", load, ("no", "yes"))
"""


def make_inputs(inputs: Path, run: Callable[..., object]) -> None:
    """Data and models of every kind, records, a completed audit sheet. ``run`` takes a command line and a folder."""
    import numpy as np

    import model_factory
    import read_factory

    for kind in model_factory.KINDS:
        model_factory.case(inputs / kind, kind)
    g = np.random.default_rng(0)
    for name, rows, classes in (("noise", 300, 3), ("path", 540, 9)):
        labels = np.arange(rows) % classes
        np.savez(inputs / f"{name}.npz", images=g.integers(0, 256, (rows, 6, 6, 3), dtype=np.uint8), labels=labels)
    run(Command(f"study {TINY} --fold 0,1 --head count --removal 0,0.5 --epochs 2 --out records").argv(inputs), inputs)
    run(Command("audit IN/table/model IN/table/people.csv --out sheet.csv --count 6").argv(inputs), inputs)
    head, *rows = (inputs / "sheet.csv").read_text().splitlines()
    (inputs / "sheet.csv").write_text("\n".join([head, *(row + "yes" for row in rows)]) + "\n")
    run(Command("data import path IN/path.npz").argv(inputs), inputs)
    run(Command("fit IN/table/people.csv --out private --method logistic --folds 2 --private 3").argv(inputs), inputs)
    read_factory.write_csv(inputs / "many.csv", model_factory.people(12))
    (inputs / "task.py").write_text(TASK)
    run(Command("benchmark --task IN/task.py --methods commonest --seeds 1 --out benchmark").argv(inputs), inputs)
