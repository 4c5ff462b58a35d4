"""Pupils by school: the grade of each in chemistry, if only the commonest grade of the school is known."""

import csv
from pathlib import Path

from headcount.datasets.cache import Remote
from headcount.datasets.tasks import GITHUB, Task, TaskData

MIN_PUPILS = 8
CLASSES = ("low", "middle", "high")  # of 0 to 10 points in steps of two: 0 and 2, 4 and 6, 8 and 10


def load(file: Path) -> TaskData:
    """A row per pupil, in the order of the schools."""
    with file.open(newline="") as f:
        rows = list(csv.DictReader(f))
    pupils = dict[str, int]()
    for row in rows:
        pupils[row["school"]] = pupils.get(row["school"], 0) + 1
    rows = [row for row in rows if pupils[row["school"]] >= MIN_PUPILS]
    columns = {"gender": [row["gender"] for row in rows], **{k: [float(row[k]) for row in rows] for k in ("gcsescore", "age")}}
    truth = [CLASSES[int(row["score"]) // 4] for row in rows]
    return TaskData(columns, [row["school"] for row in rows], truth, [row["lea"] for row in rows])


FILE = Remote(
    f"{GITHUB}/vincentarelbundock/Rdatasets/1c97ab8a1df2469762e635481ba27cf4e80e3e51/csv/mlmRev/Chem97.csv",
    "84fb309a7ead9d71b0639cdfdf0303c2",
)
TASK = Task(
    "Pupils by school",
    load,
    CLASSES,
    (FILE,),
    "A-level chemistry in England, 1997 (mlmRev, GPL); schools with eight candidates or more; earlier results, age and gender are "
    "known; schools of one education authority stay together",
)
