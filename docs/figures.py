"""Draw the figures of README and docs from results/ and benchmarks/results/: ``python docs/figures.py``."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from headcount import MajorityClassifier
from headcount.experiments import records, scores
from headcount.reporting import plots, render

ROOT = Path(__file__).parent.parent


def main() -> None:
    idea()
    size()
    speed()
    tilt("cifar10", "CIFAR10")
    tilt("svhn", "SVHN")
    paper()
    jumps()
    for source in ("cifar10", "svhn"):
        ablation(source)


def idea() -> None:
    """Three bags of digits with their majority labels, as a training gets them, and the classes that it predicts."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    rows = np.array([[*rng.choice(np.flatnonzero(y[:900] == b % 10), 12), *rng.integers(0, 900, 8)] for b in range(100)])
    model = MajorityClassifier().fit([x[r] for r in rows], [np.bincount(y[r]).argmax() for r in rows])
    fresh = np.array([[*rng.choice(900 + np.flatnonzero(y[900:] == k), 7), *rng.integers(900, len(y), 5)] for k in (3, 8, 5)])
    with render.panel(1000, 260, (10, 34, 10, 10), columns=2) as (figure, axes):
        for ax, title, left in zip(
            axes, ("given: bags, and the majority of each", "learned: the class of every instance"), (-3, 0), strict=True
        ):
            ax.set(title=title, xlim=(left - 0.2, left + 15.2), ylim=(3.9, -0.1))
            ax.set_axis_off()
        for b, r in enumerate(fresh):
            axes[0].text(-0.4, 1.3 * b + 0.5, f"mostly {np.bincount(y[r]).argmax()}", ha="right", va="center", weight="bold")
            for i, (row, predicted) in enumerate(zip(r, model.predict(x[r]), strict=True)):
                extent = (i + 0.04, i + 0.96, 1.3 * b + 1, 1.3 * b + 0.08)
                for ax in axes:
                    ax.imshow(16 - x[row].reshape(8, 8), cmap="gray", extent=extent, aspect="auto")
                colour = render.PALETTE[int(predicted != y[row])]
                axes[1].text(
                    i + 0.5, 1.3 * b + 1.15, str(predicted), ha="center", va="center", color=colour, size=9, weight="bold"
                )
    render.save(figure, ROOT / "docs" / "img" / "idea.png")
    print(
        "idea:",
        np.mean([model.predict(x[r]) == y[r] for r in fresh]),
        "of the shown,",
        (model.predict(x[900:]) == y[900:]).mean(),
    )


def ablation(source: str) -> None:
    """The paper's methods, scenario Various: a dot for each fold."""
    rows = [r for r in scores.rows(records.load_records(ROOT / "results" / "paper")) if len(r.records) == 5]
    rows = [r for r in rows if (r.source, r.scenario) == (source, "various")]
    accuracy = {r.label: [record.scores["instance_accuracy"] for record in r.records] for r in rows}
    accuracy = dict(sorted(accuracy.items(), key=lambda pair: -sum(pair[1]) / len(pair[1])))
    figure = plots.accuracy_dots(accuracy, render.method_colours(list(accuracy)))
    render.save(figure, ROOT / "docs" / "img" / f"{source}_various.svg")


def paper() -> None:
    """Figures 6 to 9 of the paper for CIFAR-10, Various."""
    runs = [
        r for r in records.load_records(ROOT / "results" / "paper") if (r.recipe.source, r.recipe.removal) == ("cifar10", 0)
    ]
    runs = sorted((r for r in runs if r.recipe.scenario == "various"), key=lambda r: r.recipe.fold)
    by_label = {name: [r for r in runs if r.recipe.label == name] for name in ("Output+Mean", "Counting Network")}
    gaps = {name: [v for r in group for v in r.data["share_difference"]] for name, group in by_label.items()}
    figure = plots.share_boxes(gaps, dict(zip(gaps, (render.PALETTE[2], render.PALETTE[0]), strict=True)))
    render.save(figure, ROOT / "docs" / "img" / "cifar10_figure6.svg")
    first = by_label["Counting Network"][0].arrays()
    figure = plots.share_scatter(first["train_share_before"], first["train_share_after_0.5"])
    render.save(figure, ROOT / "docs" / "img" / "cifar10_figure7.svg")
    sweeps = [r.data["sweep"] for r in by_label["Counting Network"]]
    purity, agreement, control = ([s[k] for s in sweeps] for k in ("purity", "agreement", "agreement_random"))
    render.save(
        plots.against_removal("purity", sweeps[0]["removal"], {"MPEM": purity}), ROOT / "docs" / "img" / "cifar10_figure8.svg"
    )
    figure = plots.against_removal("agreement", sweeps[0]["removal"], {"MPEM": agreement, "at random": control})
    render.save(figure, ROOT / "docs" / "img" / "cifar10_figure9.svg")


def jumps() -> None:
    """The loss of four of the paper's trainings, on the training and on the validation bags."""
    runs = records.load_records(ROOT / "results" / "paper")
    runs = [r for r in runs if (r.recipe.source, r.recipe.scenario) == ("cifar10", "various")]
    by_run = {(r.recipe.label, r.recipe.removal, r.recipe.fold): r for r in runs}
    shown = {
        "Counting Network, fold 3": ("Counting Network", 0.0, 3),
        "without Count, fold 1": ("Counting Network w/o Count", 0.0, 1),
        "MPEM, r = 0.8, fold 2": ("Counting Network + MPEM", 0.8, 2),
        "MPEM, r = 1, fold 3": ("Counting Network + MPEM", 1.0, 3),
    }
    with render.panel(900, 260, (48, 34, 16, 46), columns=4) as (figure, axes):
        figure.subplots_adjust(wspace=0.12)
        for ax, (title, key) in zip(axes, shown.items(), strict=True):
            fit = by_run[key].data["fit"]
            for name, colour in (("train", render.PALETTE[1]), ("valid", render.PALETTE[0])):
                ax.plot(fit["curve"]["epoch"], fit["curve"][name], color=colour, label=name, lw=1.2)
            ax.plot(fit["best_epoch"], fit["valid_loss"], "o", color=render.INK, ms=4, label="selected")
            ax.set(title=title, yscale="log", ylim=(3e-4, 2))
            ax.set_xticks([0, 500, 1000, 1500])
            ax.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"] if ax is axes[0] else [""] * 4)
            ax.minorticks_off()
        axes[-1].set_xlabel("epoch", loc="right")
        axes[0].legend(loc="lower right")
    render.save(figure, ROOT / "docs" / "img" / "cifar10_jumps.svg")


def tilt(source: str, title: str) -> None:
    """What the paper prints, tilt, and the supervised twin, if it was run."""
    summary = json.loads((ROOT / "results" / "tilt" / "summary.json").read_text())
    twin = summary["lines"]["supervised twin"].get(source, {})
    table = csv.DictReader((ROOT / "src" / "headcount" / "experiments" / "printed" / "table2.csv").open())
    printed = {r["scenario"]: float(r["mean"]) for r in table if (r["method"], r["dataset"]) == ("Ours", title)}
    scores, colours = {}, {}
    for scenario in ("Various", "Small", "Large"):
        rows = {
            "paper, printed" + " (other crops)" * (source == "svhn"): [printed[scenario]],
            "tilt": list(summary[source][scenario.lower()]["each"].values()),
            "every label given": list(twin.get(scenario.lower(), {"each": {}})["each"].values()),
        }
        for (name, values), colour in zip(rows.items(), (render.MUTED, *render.PALETTE), strict=False):
            if values:
                scores[f"{scenario}: {name}"], colours[f"{scenario}: {name}"] = values, colour
    render.save(plots.accuracy_dots(scores, colours), ROOT / "docs" / "img" / f"{source}_tilt.svg")


def speed() -> None:
    """An epoch in three implementations, and the throughput of ours as sizes grow."""
    said = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    names = {"size": "instances in a bag", "bags": "bags", "images": "images", "classes": "classes"}
    with render.panel(780, 300, (112, 34, 24, 46), columns=2) as (figure, (ways, growth)):
        figure.subplots_adjust(wspace=0.22)
        seconds = {name: way["seconds_per_epoch"] for name, way in reversed(said["ways"].items())}
        ways.barh([*seconds], [*seconds.values()], color=[render.MUTED, render.MUTED, render.PALETTE[0]], height=0.55)
        for at, value in enumerate(seconds.values()):
            ways.annotate(f"{value:.3g}", (value, at), (6, 0), textcoords="offset points", va="center", color=render.INK)
        ways.set(title="seconds of an epoch", xlim=(0, 1.2 * max(seconds.values())))
        ways.grid(False)
        for (name, label), colour in zip(names.items(), render.PALETTE, strict=False):
            rows = [r for r in said["growth"] if r["varied"] == name]
            times = [r["value"] / rows[0]["value"] for r in rows]
            growth.plot(times, [r["images_per_second"] / 1e6 for r in rows], "o-", color=colour, label=label)
        most = max(r["images_per_second"] for r in said["growth"]) / 1e6
        growth.set(title="million images a second", xscale="log", ylim=(0, 1.1 * most))
        growth.set_xticks([1, 10, 100], ["1", "10", "100"])
        growth.set_xlabel("times as many", loc="right")
        for ax in (ways, growth):
            ax.minorticks_off()
        growth.legend(loc="lower right", ncols=2)
    render.save(figure, ROOT / "docs" / "img" / "speed.svg")


def size() -> None:
    """Time and memory against the size of one bag, with the straight line through the largest."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "size-cpu.json").read_text())["rows"]
    with render.panel(780, 300, (56, 34, 24, 46), columns=2) as (figure, (time, memory)):
        figure.subplots_adjust(wspace=0.3)
        for what, colour in zip(("fit", "predict"), render.PALETTE, strict=False):
            mine = [r for r in rows if r["what"] == what and r["dtype"] == "float32"]
            n, last = [r["instances"] for r in mine], mine[-1]
            time.plot(n, [r["cpu_seconds"] for r in mine], "o-", color=colour, label=what)
            time.plot(n, [last["cpu_seconds"] * k / last["instances"] for k in n], "--", color=render.MUTED, lw=1)
            memory.plot(n, [r["peak_mib"] - r["before_mib"] for r in mine], "o-", color=colour, label=what)
        memory.plot(n, [r["file_mib"] for r in mine], "--", color=render.MUTED, lw=1, label="the file")
        time.set(title="CPU seconds (dashes: straight line)", xscale="log", yscale="log")
        time.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        memory.set(title="peak MiB of its own", xscale="log", ylim=(0, None))
        for ax in (time, memory):
            ax.set_xticks([1e4, 1e5, 1e6], ["10,000", "100,000", "1,000,000"])
            ax.minorticks_off()
            ax.set_xlabel("instances in the bag", loc="right")
            render.legend(ax)
    render.save(figure, ROOT / "docs" / "img" / "size.svg")


if __name__ == "__main__":
    main()
