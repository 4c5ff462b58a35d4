"""All tables and figures of the paper on one page: printed values beside ours, each of ours a link to its runs.

A figure is drawn from the available records and says which runs are missing.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from headcount.experiments import paper
from headcount.experiments.paper import Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.scores import REMOVALS
from headcount.io import atomic_write
from headcount.reporting import paper_tables as tables, plots
from headcount.reporting.figures import FigureGroup, share_scatters, svg_panel
from headcount.reporting.paper_tables import Records
from headcount.reporting.render import PALETTE, finite, inline_svg, render_template
from headcount.reporting.report import provenance
from headcount.reporting.results_table import RunSummary

RISING = ("Small", "Various", "Large")  # by the size of the majorities, as in the paper's figure 3
_MAX_POINTS = 400  # of a scatter: every bag of a fold


def write_paper(scale: Scale, records: Records, page: Path) -> Path:
    """Write the page of the paper at this scale atomically and return its path."""
    text = render_paper(scale, records)
    atomic_write(page, lambda f: f.write(text.encode()))
    return page


def render_paper(scale: Scale, records: Records) -> str:
    """The page as a string; without any records it shows the printed values, all of ours marked missing."""
    cells = {table: paper.table_cells(table, scale) for table in paper.TABLES}
    recipes = {item: paper.required_recipes(item, scale) for item in paper.ITEMS}
    required = dict.fromkeys(r for group in recipes.values() for r in group)
    used = {r: records[r] for r in required if r in records}
    shown = [tables.paper_table(name, group, records) for name, group in cells.items()]
    pairs = [e.pair for table in shown for e in table.entries if e.pair and e.complete]
    chosen = {r.key for group in cells.values() for c in group if c.method in paper.OURS for r in c.selected_records(records)}
    removals = sorted({r.removal for r in required if r.removal})
    substitutes = {d: s for d, s in scale.sources.items() if s != d.lower()}
    notes: dict[str, list[str]] = {}
    for source, note in sorted({(recipe.source, record.data["data"].get("note") or "") for recipe, record in used.items()}):
        notes.setdefault(note, []).append(source)
    notes.pop("", None)
    column_notes = dict(substitutes)
    if remarks := tables.data_remarks(used):
        pooled = ", ".join(f"{dataset} {short}" for dataset, (short, _) in remarks.items())
        notes |= {text: [dataset] for dataset, (_, text) in remarks.items()}
        column_notes |= dict.fromkeys((tables.AVERAGE, *paper.SCENARIOS), pooled) | {d: s for d, (s, _) in remarks.items()}
    scatter = plots.share_scatter(*np.array(pairs).T, PALETTE[0], "printed", "ours") if pairs else None
    label = "Every complete cell of the tables: our value against the printed one"
    return render_template(
        "paper.html",
        scale=scale,
        substitutes=substitutes,
        column_notes=column_notes,
        base=", ".join(f"{k}={v}" for k, v in scale.base.changes.items()),
        count=len(used),
        wanted=len(required),
        notes=notes,
        provenance=provenance(list(used.values())),
        tables=shown,
        items=[(item, sum(r in records for r in group), len(group)) for item, group in recipes.items()],
        agreement=inline_svg(scatter, "scatter", label) if scatter else "",
        pairs=tables.comparisons(cells["table2"] + cells["table4"], records),
        figures=paper_figures(scale, records),
        runs=[(scenario, run_groups(scenario, scale, records, chosen, removals)) for scenario in paper.SCENARIOS],
        unrelated=[RunSummary(record) for recipe, record in records.items() if recipe not in required],
    )


def run_groups(scenario: str, scale: Scale, records: Records, chosen: set[str], removals: list[float]) -> list[SimpleNamespace]:
    """The recipes that have run, a group for each method on all data sets and for the removals of MPEM on each; the runs that
    "Ours" chose are marked, and None stands where a fold has not run."""
    rows: dict[tuple[str, ...], dict[str, tuple[Recipe, ...]]] = {
        (method,): {d: scale.recipes(method, d, scenario) for d in paper.DATASETS} for method in paper.METHODS
    }
    for d in paper.DATASETS:
        rows[tables.MPEM, d] = {f"{r:g}": scale.recipes("Counting Network", d, scenario, r) for r in removals}
    in_base = ("source", "scenario", "fold", "removal", *scale.base.changes)
    groups = []
    for names, recipes in rows.items():
        lines = []
        for name, folds in recipes.items():
            available = [records.get(r) for r in folds]
            if any(available):
                runs = [None if r is None else RunSummary(r, chosen=r.key in chosen) for r in available]
                title = f"r = {name}" if folds[0].removal else name
                lines.append(SimpleNamespace(slug=tables.slug("runs", scenario, *names, name), name=title, runs=runs))
        if lines:
            changes = next(iter(recipes.values()))[0].changes
            text = ", ".join(f"{k}={v}" for k, v in changes.items() if k not in in_base)
            devices = ", ".join(dict.fromkeys(run.device for line in lines for run in line.runs if run))
            slug, title = tables.slug("runs", scenario, *names), ", ".join(names)
            groups.append(SimpleNamespace(slug=slug, title=title, text=text, devices=devices, lines=lines))
    return groups


def paper_figures(scale: Scale, records: Records) -> list[SimpleNamespace]:
    """Every figure of the paper; without any of its runs, a figure consists of the sentence on what is missing."""
    groups = {
        "figure3": _accuracy_groups(scale, records),
        "figure6": _share_error_groups(scale, records),
        "figure7": share_groups(scale, records),
        "figure8": _sweep_groups(scale, records, "purity"),
        "figure9": _sweep_groups(scale, records, "agreement", "agreement_random"),
    }
    return [
        SimpleNamespace(slug=name, title=paper.FIGURES[name], groups=drawn, missing=missing_runs(name, scale, records))
        for name, drawn in groups.items()
    ]


def missing_runs(figure: str, scale: Scale, records: Records) -> str:
    """The missing runs of a figure by method, data set and scenario, and by fold where only some are missing."""
    required = paper.figure_recipes(figure, scale)
    missing = [r for r in required if r not in records]
    if not missing:
        return ""
    by_label = {}
    for label in dict.fromkeys(r.label for r in missing):
        by_dataset = {}
        for dataset, source in scale.sources.items():
            parts = []
            for scenario in paper.SCENARIOS:
                cell = label, source, scenario.lower()
                folds, total = ([r.fold for r in rs if (r.label, r.source, r.scenario) == cell] for rs in (missing, required))
                if folds:
                    parts.append(scenario if len(folds) == len(total) else f"{scenario} (fold {', '.join(map(str, folds))})")
            by_dataset[dataset] = ", ".join(parts)
        by_label[label] = "; ".join(f"{names} ({scenarios})" for scenarios, names in _group_names(by_dataset).items())
    where = ". ".join(f"{names} on {datasets}" for datasets, names in _group_names(by_label).items())
    return f"Missing: {len(missing):,} of {len(required):,} runs. {where}."


def _group_names(values: Mapping[str, str]) -> dict[str, str]:
    """Each value with the names that have it: {"SVHN": "Small", "PATH": "Small"} -> {"Small": "SVHN, PATH"}."""
    distinct = dict.fromkeys(filter(None, values.values()))
    return {value: ", ".join(name for name, v in values.items() if v == value) for value in distinct}


def _accuracy_groups(scale: Scale, records: Records) -> list[FigureGroup]:
    grid = {(c.scenario, c.dataset): c for c in paper.table_cells("table4", scale) if c.method == "Counting Network"}
    panels = []
    for dataset in paper.DATASETS:
        cells = {s: grid[s, dataset] for s in RISING}
        chosen = {r.recipe: r for c in cells.values() for r in c.selected_records(records)}
        ours = {s: [r.scores[c.metric] for r in c.selected_records(records)] for s, c in cells.items()}
        figure = plots.accuracy_by_scenario({s: (c.printed.mean, c.printed.deviation or 0) for s, c in cells.items()}, ours)
        label = f"Instance accuracy of the Counting Network on {dataset} by scenario, printed and ours"
        remark, _ = tables.data_remarks(chosen).get(dataset, ("", ""))
        caption = f"{dataset} ({remark})" if remark else dataset
        panels.append(svg_panel(caption, figure, f"figure3-{dataset}", label))
    return [FigureGroup("", "", "four", tuple(panels))]


def _share_error_groups(scale: Scale, records: Records) -> list[FigureGroup]:
    errors: dict[str, list[float]] = {}
    colours = {}
    for scenario in paper.SCENARIOS:
        for method, colour in (("Output+Mean", PALETTE[2]), ("Counting Network", PALETTE[0])):
            recipes = [r for d in paper.DATASETS for r in scale.recipes(method, d, scenario)]
            runs = [records[r].data.get("share_difference") or () for r in recipes if r in records]
            if any(runs):
                part = "" if len(runs) == len(recipes) else f" ({len(runs)} of {len(recipes)} runs)"
                name = f"{scenario}, {method}{part}"
                errors[name], colours[name] = [v for bags in runs for v in bags], colour
    if not errors:
        return []
    label = "Box plots of the predicted minus the true share of the majority class, by scenario and method"
    drawn = svg_panel("", plots.share_boxes(errors, colours), "figure6", label)
    notes = [
        f"{name}: median {tables.signed(np.median(v))}, over-estimated in {100 * np.mean(np.array(v) > 0):.0f} % of the bags"
        for name, v in errors.items()
    ]
    groups = (scale.recipes("Output+Mean", d, s) for d in paper.DATASETS for s in paper.SCENARIOS)
    bags = ([v for r in g if r in records for v in records[r].data.get("share_difference") or ()] for g in groups)
    medians = [np.median(values) for values in bags if values]
    n_above = sum(median > 0 for median in medians)
    text = f"The median of Output+Mean is above zero in {n_above} of the {len(medians)} data sets and scenarios that have runs."
    text = f"The paper’s conclusion is not reproduced. {text}" if 2 * n_above < len(medians) else text
    return [FigureGroup("", text if medians else "", "wide", (drawn,), tuple(notes))]


def share_groups(scale: Scale, records: Records) -> list[FigureGroup]:
    """Figure 7: the panels of each scenario, or the reason why its run has none."""
    groups = []
    for recipe in paper.figure_recipes("figure7", scale):
        if recipe in records:
            group = share_scatters([records[recipe]], f"figure7-{recipe.scenario}", _MAX_POINTS)
            reason = f"The arrays of run {records[recipe].key} were not kept beside its record."
            groups.append(group._replace(title=recipe.scenario.title(), text="" if group.panels else reason))
    return groups


def _sweep_groups(scale: Scale, records: Records, *keys: str) -> list[FigureGroup]:
    """A panel with the mean of the data sets, which are its thin lines; then one per data set, with folds as thin lines."""
    curves: dict[str, list[np.ndarray]] = {}  # data set -> for each quantity (folds, removals)
    for dataset in paper.DATASETS:
        runs = [records[r] for r in scale.recipes("Counting Network", dataset, paper.SCENARIOS[0]) if r in records]
        sweeps = [s for r in runs if (s := r.data.get("sweep")) and tuple(s["removal"]) == REMOVALS]
        if sweeps:
            curves[dataset] = [np.array([s[k] for s in sweeps], float) for k in keys]
    values = [t.ravel() for group in curves.values() for t in group]
    if not any(len(finite(v)) for v in values):
        return []
    means = [np.array([plots.column_means(group[i]) for group in curves.values()]) for i in range(len(keys))]
    complete = len(curves) == len(paper.DATASETS)
    mean_of = "Mean of the data sets" if complete else f"Mean of the available data sets: {', '.join(curves)}"
    panels = []
    for name, group in {mean_of: means, **dict.fromkeys(paper.DATASETS, ()), **curves}.items():
        if not group:
            panels.append(SimpleNamespace(caption=name, svg=""))
            continue
        figure = plots.against_removal(keys[0], REMOVALS, dict(zip(("MPEM", "at random"), group, strict=False)))
        figure.axes[0].set_ylim(plots.padded_range(values))  # one scale, so that panels compare
        label = f"{keys[0].capitalize()} against the share r removed: {name}"
        panels.append(svg_panel(name, figure, f"{keys[0]}-{len(panels)}", label))
    return [FigureGroup("", "", "small", tuple(panels))]
