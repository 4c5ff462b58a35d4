"""Mutation check: small changes of one line each, every one of which the tests must notice.

    python benchmarks/mutants.py                # all of them, two at a time; exit code 1 if one survives
    python benchmarks/mutants.py bags training  # only files whose path contains one of these words

Each mutation is applied to a temporary copy of src/ and tests/; there the examples of its module and the tests named with it are run until the
first fails.
A mutation whose line is no longer found is an error: correct it here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMIT = 300  # seconds for the tests of one mutation


class Mutation(NamedTuple):
    """``old`` occurs once in ``file`` (below src/headcount) and becomes ``new``; one of ``tests`` must fail: names of files
    below tests/, wherever they are, with ``-k`` words after a space."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # bags
    Mutation(
        "bags/segments.py",
        "out = x.new_zeros((self.n_bags + 1, *x.shape[1:]))\n        return out.index_add(0, self.index, x)[: self.n_bags]",
        "out = x.new_zeros((self.n_bags + 1, *x.shape[1:]))\n        return out.index_add(0, self.index, x)[1:]",
        "test_segments.py",
    ),
    Mutation(
        "bags/segments.py",
        "torch.where(weight == 0, self.n_bags, self.index)",
        "torch.where(weight < 0, self.n_bags, self.index)",
        "test_segments.py",
    ),
    Mutation("bags/segments.py", "self.index + v * self.n_bags", "self.index + v", "test_segments.py"),
    Mutation("bags/bags.py", "mask | self.removed", "mask & self.removed", "test_bags.py"),
    Mutation(
        "bags/bags.py",
        "ends[b + 1] - ends[start] > max_instances",
        "ends[b + 1] - ends[start] >= max_instances",
        "test_bags.py",
    ),
    Mutation(
        "bags/bags.py",
        "return torch.where(self.labelled, self.target.argmax(1), -1)",
        "return self.target.argmax(1)",
        "test_bags.py",
    ),
    # majority
    Mutation(
        "majority/metrics.py",
        "true[removed] != label[bag[removed]]",
        "true[removed] == label[bag[removed]]",
        "test_against_oracles.py",
    ),
    Mutation(
        "majority/metrics.py", "correct = bag_predicted == label", "correct = bag_predicted != label", "test_against_oracles.py"
    ),
    Mutation("majority/metrics.py", ">= target.max(1) - 1e-6", "> target.max(1) + 1e-6", "test_model_commands.py tie"),
    Mutation(
        "majority/transition.py",
        "diagonal = trust * rows.diagonal() + (1 - trust) * share",
        "diagonal = rows.diagonal()",
        "test_transition.py",
    ),
    Mutation(
        "majority/transition.py",
        "ratio = (label_mix / Transition(mix, label_prior).prior",
        "ratio = (mix * Transition(mix, label_prior).prior",
        "test_transition.py",
    ),
    # datasets
    Mutation("datasets/protocol.py", "blocks[(fold + 1) % FOLDS]", "blocks[(fold + 2) % FOLDS]", "test_protocol.py"),
    Mutation("datasets/protocol.py", "length = count // FOLDS", "length = -(-count // FOLDS)", "test_protocol.py"),
    # readers
    Mutation("readers/transforms.py", "np.where(varies, deviation, 1.0)", "deviation", "test_transforms.py"),
    Mutation("readers/dataset.py", 'options.ties == "lowest"', 'options.ties != "lowest"', "test_read.py"),
    Mutation("readers/preprocessing.py", "+ self.missing", "", "test_read.py"),
    # models
    Mutation("models/heads/count.py", "(z / self.t1).softmax(1)", "(z * self.t1).softmax(1)", "test_vectors.py"),
    Mutation("models/heads/count.py", "eps=1e-8) / self.classes", "eps=1e-8)", "test_vectors.py"),
    Mutation(
        "models/heads/output.py",
        "self.masked_log_softmax(self.masked_log_softmax(mean).exp())",
        "self.masked_log_softmax(mean)",
        "test_against_oracles.py",
    ),
    Mutation(
        "models/heads/feature.py",
        "hidden = hidden * torch.sigmoid(self.gate(h))",
        "hidden = hidden + torch.sigmoid(self.gate(h))",
        "test_baselines.py",
    ),
    # training
    Mutation(
        "training/mpem.py", "dissents & (rank < quota[bag])", "dissents & (rank <= quota[bag])", "test_against_oracles.py"
    ),
    Mutation("training/mpem.py", "descending=True", "descending=False", "test_against_oracles.py"),
    Mutation(
        "training/loop.py",
        "config.patience <= progress.epoch - progress.best_epoch",
        "config.patience < progress.epoch - progress.best_epoch",
        "test_loop.py",
    ),
    Mutation("training/config.py", "if p.ndim > 1]", "if p.ndim > 0]", "test_tilt_head.py decay"),
    # inference
    Mutation(
        "inference/label_issues.py",
        'order = np.argsort(p_label, kind="stable")',
        'order = np.argsort(-p_label, kind="stable")',
        "test_model_commands.py flipped",
    ),
    Mutation(
        "inference/label_issues.py",
        "wrong = (suggestion != label) & unlikely",
        "wrong = suggestion != label",
        "test_model_commands.py",
    ),
    Mutation("inference/evaluate.py", "optimum / (drawn + 1)", "optimum", "test_audit.py"),
    # selection
    Mutation("bags/splits.py", "np.concatenate([labelled[fold != k]", "np.concatenate([labelled", "test_fit.py"),
    Mutation(
        "selection/cross_validation.py",
        "dataset.fit_preprocessor(split.train)",
        "dataset.fit_preprocessor(None)",
        "test_fit.py",
    ),
    # experiments
    Mutation("experiments/launch.py", 'if not (out / f"{key}.json").exists():', "if True:", "test_launch.py"),
    Mutation(
        "experiments/study.py", "(*with_needs(recipe.needs), recipe)", "(recipe, *with_needs(recipe.needs))", "test_study.py"
    ),
    Mutation(
        "experiments/scores.py",
        "max(differences) - min(differences) <= 1e-9",
        "max(differences) - min(differences) <= 1e9",
        "test_paper.py",
    ),
    Mutation(
        "experiments/recipe.py", '"source": registry.source_checksum(self.source)', '"source": self.source', "test_recipe.py"
    ),
    # reporting
    Mutation("reporting/geo.py", "(x + side, y + side)", "(x + side, y - side)", "test_predict.py geojson"),
    Mutation(
        "reporting/results_table.py",
        "for r in self.row.records)\n        return",
        "for r in self.row.records[:1])\n        return",
        "test_report.py",
    ),
    # estimators
    Mutation("estimators/model_selection.py", "test = fold[bag] == k", "test = fold[bag] != k", "test_majority_classifier.py"),
    Mutation(
        "estimators/model_selection.py", "np.arange(len(first))", "np.zeros(len(first), int)", "test_majority_classifier.py"
    ),
    # command line
    Mutation(
        "cli/main.py",
        "file=sys.stderr)\n    return code",
        "file=sys.stderr)\n    return 0",
        "test_cli_errors.py test_wrong_input",
    ),
    Mutation("cli/running.py", "if name in pairs:", "if False:", "test_cli_errors.py test_wrong_input"),
    Mutation(
        "cli/options.py", "name for name in map(str.strip, parts) if name", "name for name in parts", "test_check.py lists"
    ),
    Mutation("cli/own_data.py", "if not n_trained:", "if n_trained:", "test_seen_in_training.py"),
    # errors and files
    Mutation(
        "io.py",
        "os.replace(part, path)\n        if mark",
        "os.replace(part, part)\n        if mark",
        "test_cli_errors.py read_only_disk",
    ),
    Mutation(
        "io.py",
        "if _is_there(source := _earlier(path)):",
        "if not _is_there(source := _earlier(path)):",
        "test_io.py or_not_at_all",
    ),
    Mutation("errors.py", "or not low <= value <= high", "or not low <= value", "test_cli_errors.py test_wrong_input"),
]


def command(mutation: Mutation) -> tuple[str, ...]:
    """The arguments of pytest: the examples of the mutated module, and the tests."""
    name, _, words = mutation.tests.partition(" ")
    (path,) = (ROOT / "tests").rglob(name)
    return (f"src/headcount/{mutation.file}", str(path.relative_to(ROOT)), *(["-k", words] if words else []))


def run(arguments: tuple[str, ...], mutation: Mutation | None) -> tuple[bool, str]:
    """Whether the tests pass in a copy of the repository, mutated or not, and the end of what they print."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "constraints.txt", "README.md", "benchmarks", "docs", "results"):
            (copy / name).symlink_to(ROOT / name)
        if mutation is not None:
            file = copy / "src" / "headcount" / mutation.file
            file.write_text(file.read_text().replace(mutation.old, mutation.new))
        env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not soak", *arguments]
        try:
            done = subprocess.run(pytest, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return False, f"more than {LIMIT} s"  # an endless loop, which whoever runs the tests would notice
        return done.returncode == 0, done.stdout[-1000:]


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(w in m.file for w in words)]
    if stale := [m for m in chosen if (ROOT / "src" / "headcount" / m.file).read_text().count(m.old) != 1]:
        sys.exit("\n".join(f"{m.file}: {m.old!r} does not occur exactly once; correct the list" for m in stale))
    with ThreadPoolExecutor(2) as pool:
        unchanged = list(dict.fromkeys(map(command, chosen)))
        for arguments, (passed, output) in zip(unchanged, pool.map(lambda a: run(a, None), unchanged), strict=True):
            if not passed:
                sys.exit(f"without any mutation {' '.join(arguments)} fails:\n{output}")
        survivors = 0
        for mutation, (passed, _) in zip(chosen, pool.map(lambda m: run(command(m), m), chosen), strict=True):
            survivors += passed
            change = " -> ".join(" ".join(text.split()) for text in (mutation.old, mutation.new))
            print(f"{'SURVIVED' if passed else 'caught':9}{mutation.file}: {change}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
