"""Draw the pictures of README and docs from the records in results/: ``python docs/figures.py``."""

from __future__ import annotations

from pathlib import Path

from headcount.judging import records, select
from headcount.showing import plots

ROOT = Path(__file__).parent.parent


def main() -> None:
    rows = [r for r in select.rows(records.load(ROOT / "results" / "paper")) if len(r.records) == 5]
    rows = [r for r in rows if (r.source, r.scenario) == ("cifar10", "various")]
    scores = {r.label: [record.scores["instance_accuracy"] for record in r.records] for r in rows}
    figure = plots.accuracy_dots(scores, plots.method_colours(list(scores)))
    plots.save(figure, ROOT / "docs" / "img" / "cifar10_various.svg")


if __name__ == "__main__":
    main()
