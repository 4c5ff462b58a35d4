"""Snippets of customers' reviews: the sentiment of each, if only the prevailing one of the review is known."""

from pathlib import Path

from headcount.datasets.cache import Remote
from headcount.datasets.tasks import PYPI, Task, TaskData, open_member

THRESHOLD = 0.5  # mean ratings are from -4 to 4; fixed before anything was trained
CLASSES = ("negative", "neutral", "positive")
FILE = Remote(
    f"{PYPI}/77/8c/4a48c10a50f750ae565e341e697d74a38075a3e43ff0df6f1ab72e186902/vaderSentiment-3.3.2.tar.gz",
    "a04f43dfcc57119bcabaa12f356c8c40",
)
NOTE = "rated by 20 people each (Hutto and Gilbert, ICWSM 2014; MIT licence); negative below a mean rating of -0.5, positive above 0.5"


def load_ratings(archive: Path, name: str) -> TaskData:
    """Lines of BAG_NUMBER, mean rating and text, in an archive inside the archive."""
    inner = open_member(archive, "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz")
    lines = open_member(inner, f"hutto_ICWSM_2014/{name}_GroundTruth.txt").read().decode("latin-1").splitlines()
    ids, ratings, texts = zip(*(line.split("\t") for line in lines if line.strip()), strict=True)
    truth = [CLASSES[(float(r) >= -THRESHOLD) + (float(r) > THRESHOLD)] for r in ratings]
    return TaskData({"text": texts}, [i.partition("_")[0] for i in ids], truth)


TASK = Task(
    "Snippets by Amazon review", lambda file: load_ratings(file, "amazonReviewSnippets"), CLASSES, (FILE,), NOTE, text="text"
)
