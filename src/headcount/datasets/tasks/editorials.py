"""Sentences of newspaper editorials: the sentiment of each, if only the prevailing one of the editorial is known."""

from headcount.datasets.tasks import Task
from headcount.datasets.tasks.amazon import CLASSES, FILE, NOTE, load_ratings

TASK = Task(
    "Sentences by editorial", lambda file: load_ratings(file, "nytEditorialSnippets"), CLASSES, (FILE,), NOTE, text="text"
)
