"""Sentences of product reviews: what does each say of the product, if only the prevailing opinion of the review is known?"""

from pathlib import Path

from headcount.datasets.cache import Remote
from headcount.datasets.tasks import GITHUB, Task, TaskData

NAMES = {"pos": "positive", "neg": "negative", "neu": "neutral", "mix": "mixed", "nr": "not related"}


def load(file: Path) -> TaskData:
    """Blocks of a line with the review's name, one with its domain and stars, then a line per sentence: class, tab, text."""
    bags, truth, texts = list[str](), list[str](), list[str]()
    for block in file.read_text("utf-8").strip().split("\n\n"):
        name, _, *lines = block.split("\n")
        for line in lines:
            label, _, text = line.partition("\t")
            bags.append(name)
            truth.append(NAMES[label])
            texts.append(text)
    return TaskData({"text": texts}, bags, truth)


FILE = Remote(
    f"{GITHUB}/oscartackstrom/sentence-sentiment-data/e8e957aa48901f1c528872eb8cf1698550919554/data/finegrained.txt",
    "15c2863dc5a654af8a4fa25ddda3214f",
)
TASK = Task(
    "Sentences by review",
    load,
    tuple(NAMES.values()),
    (FILE,),
    "fine-grained sentiment of Täckström and McDonald (ECIR 2011), release 1, free to use; reviews of five domains",
    text="text",
)
