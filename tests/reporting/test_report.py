"""The report: right numbers, inert words, one file, and a reason instead of a failure."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headcount.datasets.registry import Source
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, write_record
from headcount.experiments.scores import rows
from headcount.models.heads import HEADS
from headcount.reporting import plots, render, report, results_table
from headcount.reporting.figures import section_figures
from headcount.reporting.results_table import display_names
from report_factory import HOSTILE, Page, features, make_record, make_study, pictures

SMALL = Recipe(source="noise", bag_size=12, train_bags=20, valid_bags=5, test_bags=6, epochs=30, backbone="mlp")


@pytest.fixture(scope="module")
def source() -> Source:
    return pictures(HOSTILE)


@pytest.fixture(scope="module")
def study(source: Source, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return make_study(tmp_path_factory.mktemp("study"), source)


@pytest.fixture(scope="module")
def html(study: list[Record], source: Source, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    written = report.write_report(study, path, title="A <b>bold</b> title", load_source=lambda name: source)
    assert written == path
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    return path.read_text("utf-8")


def test_user_strings_are_escaped(html: str) -> None:
    page = Page(html)
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{}]  # the page's own
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    assert all(name in page.text for name in HOSTILE)
    assert "A <b>bold</b> title" in page.text


def test_page_loads_nothing(html: str) -> None:
    page = Page(html)
    addresses = page.all("src") + page.all("href") + re.findall(r"url\(([^)]*)\)|@import (\S+)", html)
    assert all(str(a).startswith(("data:", "#", "('#")) for a in addresses)
    assert "default-src 'none'" in html
    assert len(html.encode()) < 3_000_000


def test_links_have_targets_and_ids_are_unique(html: str, study: list[Record]) -> None:
    page = Page(html)
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    inside = [a[1:] for a in page.all("href") if a.startswith("#")] + re.findall(r"url\(#([^)]*)\)", html)
    assert set(inside) <= set(ids)
    assert {f"run-{r.key}" for r in study} <= set(ids)


def test_table_shows_means_and_deviations(html: str, study: list[Record]) -> None:
    for row in rows(study):
        mean, deviation, _ = row.score("instance_accuracy")
        assert re.search(rf">{mean:.3f} <span class=\"deviation\">± {deviation:.3f}<", html)
    best = max(rows(study), key=lambda row: row.score("instance_accuracy")[0])
    assert re.findall(r'class="number best">([\d.]+)', html) == [f"{best.score('instance_accuracy')[0]:.3f}"]
    chosen = next(row for row in rows(study) if "MPEM" in row.label)
    said = ", ".join(f"{r.recipe.removal:g}" for r in chosen.records)
    assert f"r chosen by validation loss: {said}" in html


def test_one_run_has_no_deviation(study: list[Record], source: Source) -> None:
    several, one = (report.render_report(records, "t", load_source=lambda name: source) for records in (study, study[:1]))
    assert ["standard deviation" in page for page in (several, one)] == [True, False]
    assert ["Faint dots are folds" in page for page in (several, one)] == [True, False]


def test_pictures_and_figures_have_alternative_texts(html: str) -> None:
    page = Page(html)
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")
    figures = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(figures) >= 13
    assert all(attrs["aria-label"] for attrs in figures)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_provenance_is_shown_without_the_host(html: str) -> None:
    assert "0123abc" in html
    assert "torch 2.6.0" in html
    assert "secret-host" not in html
    assert "made up for a test" in html


def test_report_is_deterministic(study: list[Record], source: Source) -> None:
    few = study[:3]
    assert report.render_report(few, "t", lambda _: source) == report.render_report(few, "t", lambda _: source)


def test_report_needs_records() -> None:
    with pytest.raises(HeadcountError, match="no records"):
        report.write_report([], Path("nowhere.html"))


def _missing(name: str) -> Source:
    raise HeadcountError(f"{name} is not prepared here")


@pytest.mark.parametrize(
    ("arrays", "load", "excuse"),
    [
        (False, lambda s: lambda _: s, "arrays of the run were not kept"),
        (True, lambda s: _missing, "noise is not prepared here"),
        (True, lambda s: lambda _: replace(s, checksum="other"), "checksums differ"),
    ],
)
def test_gallery_gives_the_reason_if_empty(tmp_path: Path, source: Source, arrays: bool, load, excuse: str) -> None:
    record = make_record(tmp_path, source, SMALL, arrays)
    assert excuse in report.render_report([record], "t", load(source))


def test_gallery_never_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.registry, "is_available", lambda name: False)
    with pytest.raises(HeadcountError, match="not in the cache"):
        report.cached_source("cifar10")


def test_gallery_counts_votes(tmp_path: Path, source: Source) -> None:
    record = make_record(tmp_path, source, SMALL)
    arrays = record.arrays()
    shown = _gallery(record, lambda _: source)
    right = [bag.n_correct / bag.n_known for bag in shown.bags]
    assert right == sorted(right, reverse=True)
    for bag in shown.bags:
        here = slice(*arrays["test_offsets"][bag.number : bag.number + 2])
        truth, said = arrays["test_truth"][here], arrays["test_said"][here]
        label = arrays["test_label"][bag.number]
        assert bag.n_correct == (truth == said).sum()
        assert bag.true_share == pytest.approx((truth == label).mean())
        assert bag.predicted_share == pytest.approx((said == label).mean())
        assert sum(v.count for v in bag.votes) == sum(len(v.instances) for v in bag.votes) == bag.size == 12
        assert sum(t.wrong for v in bag.votes for t in v.instances) == bag.size - bag.n_correct


def test_gallery_of_features_has_no_pictures(tmp_path: Path) -> None:
    table = features(HOSTILE[:3])
    page = report.render_report([make_record(tmp_path, table, SMALL.replace(source="digits"))], "t", lambda _: table)
    assert page.count('class="tile') == page.count(" chip") == 36
    assert "<img" not in page


def test_large_pictures_lose_colours_then_are_dropped(tmp_path: Path) -> None:
    heavy = pictures(("a", "b"), count=300)
    noise = np.random.default_rng(0).integers(0, 256, (300, 80, 80, 3), dtype=np.uint8)
    heavy = replace(heavy, data=noise)
    record = make_record(tmp_path, heavy, SMALL)
    full = _weight(_gallery(record, lambda _: heavy, 1 << 24))
    assert 0 < _weight(_gallery(record, lambda _: heavy, full // 2)) <= full // 2
    assert "too large" in _gallery(record, lambda _: heavy, 1000).missing_reason


def test_a_record_without_instances_has_no_gallery(tmp_path: Path, source: Source) -> None:
    record = make_record(tmp_path, source, SMALL)
    empty = {name: a[:1] if name == "test_offsets" else a[:0] for name, a in record.arrays().items()}
    write_record(tmp_path, record.data, empty)
    assert "names other classes or instances" in _gallery(record, lambda _: source).missing_reason


def _gallery(record: Record, *args):
    (method,) = results_table.rank_methods(rows([record]))
    return report.build_gallery(method, *args)


def _weight(shown) -> int:
    return sum(len(t.picture) for bag in shown.bags for v in bag.votes for t in v.instances)


def test_records_without_optional_fields(tmp_path: Path, source: Source) -> None:
    """An old record, or a foreign one: no curve, no confusion, no sweep, no provenance."""
    whole = make_record(tmp_path, source, SMALL)
    body = {k: v for k, v in whole.data.items() if k not in ("confusion", "sweep", "share_difference", "provenance")}
    body["fit"] = {k: v for k, v in body["fit"].items() if k != "curve"}
    body["scores"] = {"instance_accuracy": 0.5}
    page = report.render_report([Record(body, tmp_path / "gone.json")], "t", lambda _: source)
    assert 'class="number best">0.500</td>' in page
    assert page.count(">–<") >= 4


def test_oracles_are_never_best(study: list[Record], source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HEADS["count"], "uses_instance_labels", True)
    named = results_table.rank_methods(rows(study))
    assert results_table.best_method(named).name == "Output+Mean"
    assert [m.oracle for m in named] == [False, True, True]


def test_rows_with_one_label_get_distinct_names(tmp_path: Path, source: Source) -> None:
    made = [make_record(tmp_path, source, SMALL.replace(epochs=e, scenario=s)) for e in (30, 60) for s in ("large", "small")]
    names = {m.name for m in results_table.rank_methods(rows(made)[::2])}
    assert names == {"Counting Network, epochs 30", "Counting Network, epochs 60"}
    page = report.render_report(made, "t", lambda _: source)
    assert 'id="overview"' in page
    assert page.count('class="number best"') == 4


def test_many_methods_of_one_head_are_named_by_their_differences(tmp_path: Path, source: Source) -> None:
    base = SMALL.replace(head="tilt", options={"decay": 0.9, "own": 1.0})
    tried = [
        base,
        *(base.replace(options={**dict(base.options), k: v}) for k, v in (("own", 0.0), ("bag", 0.0), ("form", "one"))),
    ]
    made = [make_record(tmp_path, source, r) for r in [*tried, base.replace(epochs=60)]]
    made.append(make_record(tmp_path, source, base.replace(scenario="large")))
    names, remarks = display_names(rows(made))
    assert set(names) == {"Tilt", "Tilt, epochs 60", "Tilt (own=0.0)", "Tilt (bag=0.0)", "Tilt (form=one)"}
    assert names.count("Tilt") == 2, "a method has one name in all tables; common settings are not repeated in each"
    assert remarks == {"Tilt": "unless stated: decay=0.9, own=1.0, epochs 30"}, "but once"
    assert f"Tilt, {remarks['Tilt']}" in Page(report.render_report(made, "t", lambda _: source)).text
    made += [make_record(tmp_path, source, base.replace(**c)) for c in ({"lr": 0.1}, {"trouble": {"wrong": 0.2}})]
    names, remarks = display_names(rows(made))
    assert {"Tilt", "Tilt, epochs 60", "Tilt, lr 0.1", "Tilt, trouble wrong=0.2"} < set(names)
    made.append(make_record(tmp_path, source, base.replace(options={"decay": 0.9, "own": 0.5}, schedule="twice")))
    assert "Tilt (own=0.5), schedule twice" in display_names(rows(made))[0], "an option tells it apart, and is not all"
    few, none = display_names(rows([r for r in made if r.recipe in tried[:3]]))
    assert "Tilt (decay=0.9, own=1.0)" in few
    assert not none


def test_other_data_or_code_make_another_row(tmp_path: Path, source: Source) -> None:
    made = [make_record(tmp_path, source, SMALL.replace(fold=fold)) for fold in (0, 1)]
    made += [Record({**r.data, "data": {**r.data["data"], "checksum": "77" * 16}}, r.path) for r in made]
    names = [m.name for m in results_table.rank_methods(rows(made))]
    assert sorted(names) == ["Counting Network, data 0f0f0f0f", "Counting Network, data 77777777"]
    own = {**made[0].data["recipe"], "head": "away/own.py:Own"}
    body = {**made[0].data, "recipe": own, "label": "Own", "text": "Own, fold 0"}
    made = [Record({**body, "own_head": {"code": code * 8, "told": code == "ab"}}, made[0].path) for code in ("ab", "cd")]
    named = results_table.rank_methods(rows(made))
    assert [(m.name, m.oracle) for m in named] == [("Own, code cdcdcdcd", False), ("Own, code abababab", True)]
    assert "Own, code abababab" in report.render_report(made, "t", lambda _: source)


def test_duplicate_runs_count_once(tmp_path: Path, source: Source) -> None:
    made = [make_record(tmp_path, source, SMALL.replace(options={"t1": t1}, fold=0)) for t1 in (1, 1.0)]
    assert made[0].key != made[1].key
    late = {**made[0].data, "provenance": {**made[0].data["provenance"], "started": "2025-02-01T00:00:00+00:00"}}
    made[0] = Record(late, made[0].path)
    with pytest.warns(HeadcountWarning, match="1 of 2 records of Counting Network w/o Count repeat a run"):
        (row,) = rows(made)
    assert row.records == (made[0],)


def test_report_does_not_run_custom_heads(tmp_path: Path, source: Source) -> None:
    """A record names the file of its custom head, which may be untrusted or missing."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    body = make_record(tmp_path, source, SMALL).data
    for file in ("evil.py", "gone.py"):
        recipe = {**body["recipe"], "head": f"{tmp_path / file}:X", "options": {"what": 1}}
        record = Record({**body, "recipe": recipe, "label": "X marks"}, tmp_path / "x.json")
        assert "X marks" in report.render_report([record], "t", lambda _: source)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_protocol_figure_is_saved_deterministically(tmp_path: Path, suffix: str) -> None:
    share, edges = np.linspace(0.05, 0.99, 40), np.linspace(0.1, 1, 11)
    figure = plots.protocol_figure(share, np.arange(40) % 5, np.arange(40) < 4, HOSTILE, edges)
    assert "10.0 % tied" in figure.axes[1].get_title("left")
    assert "outside" in figure.axes[0].get_xlabel()
    path = render.save(figure, tmp_path / f"bags.{suffix}")
    again = render.save(figure, tmp_path / "again" / f"bags.{suffix}")
    assert path.read_bytes() == again.read_bytes()
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


def test_unknown_figure_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadcountError, match="a figure is saved as"):
        render.save(plots.share_scatter([0.5], [0.6]), tmp_path / "bags.gif")


def test_inline_svg_uses_css_colours_and_escapes_text() -> None:
    scores, colours = {"a<b>": [0.5], "#0072b2": [0.6]}, {"a<b>": "#0072b2", "#0072b2": "#0072b2"}
    text = render.inline_svg(plots.accuracy_dots(scores, colours), "one", 'said "so"')
    assert "a&lt;b&gt;" in text
    assert ">#0072b2<" in text  # a word keeps its letters, a colour becomes a variable
    assert "var(--c0)" in text
    assert 'aria-label="said &quot;so&quot;"' in text
    assert not re.search(r"font-family|<style|<metadata|xlink", text)


@pytest.mark.parametrize("size", [1, 30, 60])
def test_confusion_matrix_of_any_size(size: int) -> None:
    text = render.confusion_table(3 * np.eye(size, dtype=int), [f"<{k}>" for k in range(size)], "y")
    assert text.count("<tr>") == size + 1
    assert text.count('class="hit strong"') == text.count("100 %</td>") == size
    assert text.count(">3</td>") == (size if size <= 12 else 0)
    assert "<0>" not in text


def test_removal_sweep_marks_the_chosen_r() -> None:
    folds = [[0.5, np.nan, 0.3], [0.4, 0.2, 0.6]]
    figure = plots.against_removal("validation loss", [0.1, 0.5, 1.0], {"": folds}, [1.0, 0.5], 0.45)
    rings = next(line for line in figure.axes[0].lines if line.get_label() == "chosen r")
    assert rings.get_xydata().tolist() == [[1.0, 0.3], [0.5, 0.2]]


def test_method_colours_are_stable_and_distinct() -> None:
    some, more = render.method_colours(["Max"]), render.method_colours(["Counting Network", "Max"])
    assert some["Max"] == more["Max"] != more["Counting Network"]
    assert len(set(render.method_colours([f"m{i}" for i in range(6)]).values())) == 8


def test_matplotlib_is_imported_late_and_without_pyplot() -> None:
    code = (
        "import sys; from headcount.reporting import plots, render, report; assert 'matplotlib' not in sys.modules;"
        "render.inline_svg(plots.share_scatter([.1], [.2]), 'a', 'b'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compact_figures_are_smaller(study: list[Record]) -> None:
    named = results_table.rank_methods(rows(study))
    colours = render.method_colours([m.name for m in named])
    full, lean = (section_figures(named, study, colours, "s", compact=x) for x in (False, True))
    assert [g.title for g in full] == [g.title for g in lean]
    assert sum(len(p.svg) for g in lean for p in g.panels) < sum(len(p.svg) for g in full for p in g.panels)
    assert "Mean of the folds" in lean[1].text


def test_of_many_methods_the_best_are_drawn(study):
    methods = results_table.rank_methods(rows(study))
    colours = dict.fromkeys((m.name for m in methods), "black")
    comparison, curves, *_ = section_figures(methods, study, colours, "s1", max_drawn=1)
    assert comparison.text == f"The 1 best of {len(methods)} methods."
    assert [panel.caption for panel in curves.panels] == [methods[0].name]
    assert section_figures(methods, study, colours, "s1")[0].text == ""
