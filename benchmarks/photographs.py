"""Tilt on photographs: the best recipe, its ablation, equal footing with the paper's methods, and robustness. For a GPU.

    python benchmarks/photographs.py --out results/tilt --minutes 9                      # best, CIFAR-10, 3 scenarios, 5 folds
    python benchmarks/photographs.py --out results/tilt --source svhn --minutes 9
    python benchmarks/photographs.py --out results/tilt --lines ablation --scenario various,small --fold 0
    python benchmarks/photographs.py --out results/tilt --lines "best,supervised twin" --fold 1
    python benchmarks/photographs.py --out results/tuning --fold 0 --try lr=0.2 --try "option.start=0.5 epochs=200"
    python benchmarks/photographs.py --out results/tuning --scenario various,small --fold 0 --tune --try lr=0.4 --try ...
    python benchmarks/photographs.py --list                                               # every line and its recipe
    python benchmarks/photographs.py --summary results/tilt                               # summary.json from the records
    python benchmarks/photographs.py --table results/tilt                                 # and the tables of the docs

Tuning looks at fold 0 of CIFAR-10 through the criterion, which needs no truth; the other folds and SVHN get
the recipe unchanged, but for the mirror image, which no digit survives. Runs that have a record are not run again; no run is
begun that would outlast the minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from campaign import campaign

from headcount.errors import choose
from headcount.files import write_whole
from headcount.judging.records import Record
from headcount.training.recipe import Recipe

OPTIONS = {
    "over": "instances", "form": "one", "decay": 0.995, "threshold": 0.95, "adapt": False, "align": 1.0, "start": 0.3,
    "fade": 0.3, "bag": 0.05, "vote": 0.5, "doubt": 0.01,  # the bag term, as a deep network can bear it
    "own": 1.0,
}  # fmt: skip
BEST = Recipe(
    head="tilt", options=tuple(OPTIONS.items()), backbone="quick", epochs=100, batch_bags=8, batch_instances=512,
    optimizer="sgd", lr=0.2, weight_decay=1e-3, decay="weights", schedule="cosine", warmup=0.05, views="image",
    selection="mean", mirror=True, precision="bf16",
)  # fmt: skip
TWIN = {"over": "instances", "views": 2, "decay": 0.995}  # the same batches, views and moving average
PAPER = Recipe(precision="bf16")  # the paper's stem, optimizer and epochs, no augmentation
TRUE_SHARE = {"various": 0.55, "small": 0.25, "large": 0.8}  # for the line that is given it


def _but(recipe: Recipe, **options: Any) -> Recipe:
    return recipe.but(options={**dict(recipe.options), **options})


def _epochs(times: float) -> int:
    """Of a training on so many times as many instances: as many steps, and at least a quarter of the epochs."""
    return max(BEST.epochs // 4, round(BEST.epochs / max(1, times)))


STEM = BEST.but(backbone="resnet18")
GROUPS: dict[str, dict[str, Recipe]] = {
    "main": {"best": BEST},
    "twin": {"supervised twin": BEST.but(head="supervised", options=TWIN)},
    "ablation": {
        "instance term alone": _but(BEST, teach=0.0, bag=0.0),
        "bag term alone": _but(BEST, instance=0.0, teach=0.0, bag=1.0, vote=0.0, over="bags"),
        "instance and bag term, no teaching": _but(BEST, teach=0.0),
        "no bag term": _but(BEST, bag=0.0),
        "bag term from the beginning": _but(BEST, vote=0.0),
        "bag term as shares and validation say": _but(BEST, bag="auto"),
        "no alignment": _but(BEST, align=0.0),
        "thresholds for each class": _but(BEST, adapt=True),
        "threshold 0.8": _but(BEST, threshold=0.8),
        "taught from the beginning": _but(BEST, start=0.05),
        "taught late": _but(BEST, start=0.6),
        "no fading": _but(BEST, fade=1.0),
        "fading to nought": _but(BEST, fade=0.0),
        "teacher is the pupil": _but(BEST, decay=0.0),
        "slow teacher": _but(BEST, decay=0.999),
        "tilt of full rows": _but(BEST, form="full"),
        "shares of the label alone": BEST.but(options={k: v for k, v in OPTIONS.items() if k != "own"}),
        "last epoch kept": BEST.but(selection="last"),
        "epochs judged under a temperature": _but(BEST, tempered=True),
        "two networks": _but(BEST.but(backbone_options={"networks": 2}), networks=2),
        "bags merged by four": BEST.but(trouble={"merge": 4}, batch_bags=2),
        "tilt given": BEST,  # its share is filled in by scenario
        "weak views only": BEST.but(views="flip_crop"),
        "no views": BEST.but(views="none", mirror=False),
        "ResNet18, 3x3 stem": BEST.but(backbone="resnet18", backbone_options={"stem": "small"}),
        "ResNet18, 3x3 stem and pooling": BEST.but(backbone="resnet18", backbone_options={"stem": "pool"}),
        "rate 0.1": BEST.but(lr=0.1),
        "rate down twice": _but(BEST.but(schedule="twice"), start=0.5),
        "AdamW": BEST.but(optimizer="adamw", lr=1e-3, weight_decay=0.05),
        "50 epochs": BEST.but(epochs=50),
        "200 epochs": BEST.but(epochs=200),
    },
    "footing": {  # the paper's stem: without augmentation and with it
        "paper's stem, nothing else: tilt": PAPER.but(head="tilt", options=BEST.options),
        "paper's stem, augmented: tilt": STEM,
        "paper's stem, augmented: count": STEM.but(head="count", options={}),
        "paper's stem, augmented: Output+Mean (nll)": STEM.but(head="output_mean", options={"form": "nll"}),
        "paper's stem, augmented: bag label": STEM.but(head="noisy_label", options={}),
    },
    "robust": {
        **{f"{r:.0%} wrong labels": BEST.but(trouble={"wrong": r}) for r in (0.1, 0.2, 0.3)},
        **{
            f"bags of {n}": BEST.but(bag_size=n, batch_bags=512 // n, epochs=_epochs(n / 64))  # 512 instances a step
            for n in (8, 32, 128, 512)
        },
        **{
            f"{n} bags": BEST.but(train_bags=n, valid_bags=max(20, n // 4), epochs=_epochs(n / 400))
            for n in (50, 200, 800, 3200)
        },
        "unequal classes": BEST.but(trouble={"unequal": 10.0}),
        "a class that never wins": BEST.but(trouble={"never": 9}),
    },
}
GROUPS["robust count"] = {  # the Counting Network beside it, 4,096 instances a step, 600 epochs where tilt has 100
    f"{name}, count": PAPER.but(
        **{
            "epochs": 6 * r.epochs,
            "bag_size": r.bag_size,
            "batch_bags": 4096 // r.bag_size,
            "train_bags": r.train_bags,
        },
        **{"valid_bags": r.valid_bags, "trouble": r.trouble},
    )
    for name, r in GROUPS["robust"].items()
}
LINES = {name: recipe for group in GROUPS.values() for name, recipe in group.items()}


def line(name: str, source: str, scenario: str, fold: int) -> Recipe:
    """A line's recipe for these data."""
    recipe = LINES[name].but(source=source, scenario=scenario, fold=fold)
    if name == "tilt given":
        recipe = _but(recipe, share=TRUE_SHARE[scenario])
    if source == "svhn":
        recipe = recipe.but(views={"image": "digit", "flip_crop": "crop"}.get(recipe.views, recipe.views), mirror=False)
    return recipe


def summary(folder: Path) -> dict[str, Any]:
    """Mean and deviation of instance accuracy over the folds of every line that has records; the best line on top."""
    found: dict[tuple[str, str, str], dict[int, Record]] = {}
    names: dict[Recipe, str] = {}
    for n, source, scenario, fold in product(LINES, ("cifar10", "svhn"), TRUE_SHARE, range(5)):
        names.setdefault(line(n, source, scenario, fold), n)
    for path in sorted(folder.glob("*.json")):
        if path.name != "summary.json" and (name := names.get((record := Record.read(path)).recipe)):
            r = record.recipe
            found.setdefault((name, r.source, r.scenario), {})[r.fold] = record
    said: dict[str, Any] = {}
    for (name, source, scenario), folds in sorted(found.items()):
        right = np.array([folds[f].scores["instance_accuracy"] for f in sorted(folds)])
        row: dict[str, Any] = {"mean": round(right.mean(), 5), "std": round(right.std(), 5), "folds": len(right)}
        if len(others := [folds[f].scores["instance_accuracy"] for f in sorted(folds) if f]) > 1:
            row |= {"mean_without_fold_0": round(np.mean(others), 5)}
        row["each"] = {str(f): round(float(folds[f].scores["instance_accuracy"]), 5) for f in sorted(folds)}
        row["minutes"] = round(np.mean([r.body["provenance"]["seconds"] for r in folds.values()]) / 60, 2)
        if found_tilts := [folds[f].body["tilt"] for f in sorted(folds) if "tilt" in folds[f].body]:
            keys = ("share", "true_share", "mix_error", "shares_error", "shares_error_in_context", "shares_inside")
            keys += ("shares_error_unlabelled", "shares_inside_unlabelled")  # which the first records lack
            means = {
                k: np.mean([t[k] for t in found_tilts], 0).round(5).tolist()
                for k in (*keys, "context_instance_accuracy")
                if all(k in t for t in found_tilts)
            }
            row |= {"in_context": means.pop("context_instance_accuracy"), "tilt": means}
            row["criteria"] = {str(f): folds[f].body["tilt"]["criterion"] for f in sorted(folds)}
        where = said if name == "best" else said.setdefault("lines", {}).setdefault(name, {})
        where.setdefault(source, {})[scenario] = row
    return said


def table(said: dict[str, Any]) -> str:
    """The summary as Markdown, in parts: lines of several folds, a column for every scenario; the changes of the recipe that
    were tried on fold 0, by the criterion; what happens to it and to the Counting Network in trouble."""
    lines = {"best": said, **said.get("lines", {})}
    return "\n".join([*_folds(lines), *_ablation(lines), *_robust(lines)])


def _folds(lines: dict[str, Any]) -> Iterator[str]:
    for source in ("cifar10", "svhn"):
        here = {name: found[source] for name, found in lines.items() if source in found}
        here = {name: found for name, found in here.items() if any(row["folds"] > 1 for row in found.values())}
        if not here:
            continue
        yield f"| {source} | {' | '.join(TRUE_SHARE)} |"
        yield "|---" * (1 + len(TRUE_SHARE)) + "|"
        for name, found in here.items():
            cells = (
                f"{row['mean']:.3f} ± {row['std']:.3f} ({row['folds']})" if (row := found.get(s)) else "missing"
                for s in TRUE_SHARE
            )
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""


def _ablation(lines: dict[str, Any]) -> Iterator[str]:
    """Fold 0 of CIFAR-10: the criterion of the validation bags, which decides, and instances right, which do not."""
    rows: list[tuple[float, str]] = []
    for name in ("best", *GROUPS["ablation"]):
        found = lines.get(name, {}).get("cifar10", {})
        seen = [found.get(s, {}) for s in ("various", "small")]
        heard, right = ([one.get(what, {}).get("0") for one in seen] for what in ("criteria", "each"))
        if any(x is not None for x in right):
            total = sum(x if x is not None else math.inf for x in heard)
            cells = [
                format(x, ".3f") if x is not None and math.isfinite(x) else "missing" for x in (*heard, total, *right)
            ]
            rows.append((total, f"| {name} | {' | '.join(cells)} |"))
    if rows:
        yield "| changed | criterion, various | small | sum | right, various | small |"
        yield "|---|---|---|---|---|---|"
        yield from (text for _, text in sorted(rows, key=lambda row: row[0]))
        yield ""


def _robust(lines: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name in GROUPS["robust"]:
        pair = (
            lines.get(n, {}).get("cifar10", {}).get("various", {}).get("each", {}).get("0")
            for n in (name, f"{name}, count")
        )
        cells = ["missing" if x is None else f"{x:.3f}" for x in pair]
        if cells != ["missing", "missing"]:
            rows.append(f"| {name} | {' | '.join(cells)} |")
    if rows:
        yield from ("| trouble | tilt | Counting Network |", "|---|---|---|", *rows, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/tilt"))
    parser.add_argument("--lines", default="best", help="names of lines or groups, with commas, or with semicolons")
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--scenario", default="various,small,large")
    parser.add_argument("--fold", default="0,1,2,3,4")
    parser.add_argument(
        "--set", action="append", default=[], help="NAME=JSON for the recipe, option.NAME=JSON for the head"
    )
    parser.add_argument(
        "--try", action="append", default=[], dest="tries", help="as --set; a run of its own for each --try"
    )
    parser.add_argument("--tune", action="store_true", help="each --try on top of those before it that helped")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.list:
        for name, recipe in LINES.items():
            print(f"{name:45} {recipe!r}")
        return
    if args.summary:
        body = json.dumps(summary(args.summary), indent=1) + "\n"
        write_whole(args.summary / "summary.json", lambda f: f.write(body.encode()))
        return
    if args.table:
        print(table(summary(args.table)))
        return
    names = names_of(args.lines)
    tries = [words.split() for words in args.tries]
    places = [(int(f), n) for f in args.fold.split(",") for n in names]

    def asked(words: list[str]) -> list[tuple[str, Recipe]]:
        words = [*args.set, *words]
        return [
            (f"{n}, {scenario} {f} {' '.join(words)}", changed(line(n, args.source, scenario, f), words))
            for (f, n), scenario in product(places, args.scenario.split(","))
        ]

    named = tuned(tries, asked, args.out) if args.tune else (one for words in tries or [[]] for one in asked(words))
    # nothing is built on the arrays of these
    campaign(named, args.out, args.minutes, after=lambda r: (args.out / f"{r.key}.npz").unlink(missing_ok=True))


def names_of(text: str) -> list[str]:
    """Lines by name, groups as their lines. Some names have commas: those stand alone, or between semicolons."""
    words = [text] if text in LINES else [word.strip() for word in text.split(";" if ";" in text else ",")]
    for word in words:
        choose("line", word, [*GROUPS, *LINES])
    return [name for word in words for name in GROUPS.get(word, [word])]


def tuned(
    tries: list[list[str]], asked: Callable[[list[str]], list[tuple[str, Recipe]]], out: Path
) -> Iterator[tuple[str, Recipe]]:
    """A greedy search by the criterion of the validation bags: a change stays if it lowers the sum over the runs it is tried
    on. What stays is in ``chosen.txt``. No truth is looked at."""
    chosen: list[str] = []
    least = math.inf
    for words in [[], *tries]:
        runs = asked([*chosen, *words])
        yield from runs  # whoever asks for the next has run this one
        found = sum(criterion_of(r, out) for _, r in runs)
        print(f"{'kept' if found < least else 'left'}: {' '.join(words) or 'as it is'}, {found:.4f}", flush=True)
        if found < least:
            chosen, least = [*chosen, *words], found
            text = " ".join(chosen).encode()
            write_whole(out / "chosen.txt", lambda f, text=text: f.write(text))


def criterion_of(recipe: Recipe, out: Path) -> float:
    """What the validation bags say of a run that has a record."""
    return Record.read(out / f"{recipe.key}.json").body["tilt"]["criterion"]


def changed(recipe: Recipe, words: list[str]) -> Recipe:
    """The recipe with what --set says."""
    for word in words:
        name, _, value = word.partition("=")
        own = name.removeprefix("option.")
        recipe = _but(recipe, **{own: json.loads(value)}) if own != name else recipe.but(**{name: json.loads(value)})
    return recipe


if __name__ == "__main__":
    main()
