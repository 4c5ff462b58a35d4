"""Voters by precinct: the registration of each, by ethnic group, if only the strongest party of the precinct is known."""

import csv
from pathlib import Path

import numpy as np

from headcount.datasets.cache import Remote
from headcount.datasets.tasks import GITHUB, Task, TaskData

VOTERS = 30  # of each precinct
GROUPS = {"wh": "white", "bl": "black", "natam": "native American"}
PARTIES = {"dem": "Democratic", "rep": "Republican", "non": "unaffiliated"}


def expand_counts(counts: np.ndarray, voters: int) -> np.ndarray:
    """(voters,) the cells of every n-th voter, if those of one cell stand together: their shares are nearly those of the counts."""
    return np.searchsorted(np.cumsum(counts), (np.arange(voters) + 0.5) / voters * counts.sum())


def load(file: Path) -> TaskData:
    """A row per precinct, with a column for each ethnic group and party; what a voter is described by is known of everybody."""
    with file.open(newline="") as f:
        names, *rows = csv.reader(f, delimiter=" ")
    cells = [(group, party) for group in GROUPS for party in PARTIES]
    columns, bags, truth = {"ethnicity": [], "white": [], "black": []}, [], []
    for number, *values in rows:
        row = dict(zip(names, values, strict=True))
        counts = np.array([int(row[group + party]) for group, party in cells])
        of_group = counts.reshape(3, 3).sum(1) / counts.sum()
        for k in expand_counts(counts, VOTERS):
            columns["ethnicity"].append(GROUPS[cells[k][0]])
            columns["white"].append(of_group[0])
            columns["black"].append(of_group[1])
            truth.append(PARTIES[cells[k][1]])
        bags += [number] * VOTERS
    return TaskData(columns, bags, truth)


FILE = Remote(
    f"{GITHUB}/cran/eiPack/fcb0621c612a8e41575b7aa2da3d423b4b70f2b7/data/senc.tab", "5177dfd3190dbe3b3cbe3879f845c410"
)
TASK = Task(
    "Voters by precinct",
    load,
    tuple(PARTIES.values()),
    (FILE,),
    "registration in 212 precincts of North Carolina, 2001 (eiPack, GPL); 30 voters of each, whose shares are those of the counts; the "
    "ethnic group of a voter and the shares of the groups in the precinct are known; no precinct is won by the unaffiliated; one county "
    "of eight has most of the Republican precincts, so counties are divided",
)
