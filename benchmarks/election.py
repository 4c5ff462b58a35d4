"""How far each form of the election is from the truth, and what it costs: the tables of docs/explanation/election.md.

    OMP_NUM_THREADS=1 python benchmarks/election.py [--draws 1000000] [--bags 6] [--cost | --slopes]

The reference for small bags is the sum over all outcomes, for large ones simulated votes. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from headcount.bags import Segments
from headcount.datasets import share_sampler
from headcount.majority import vote_likelihood
from headcount.majority.ragged_votes import MAX_COUNTED_VOTES, choose_form, election_log_probs
from headcount.models.heads.count import Election

FORMS = ("independent", "conditioned", "normal")
VOTERS = {"vague": (0.8, 0.5), "unsure": (2.5, 1.0), "confident": (6.0, 1.5)}  # logit of the own class, noise on all


def vote(p: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(C,) how often each class won, ties shared, in ``draws`` elections of the votes p (n, C)."""
    counts = np.zeros((draws, p.shape[1]), np.int16)
    flat, row = counts.reshape(-1), np.arange(0, counts.size, p.shape[1])
    for cdf in p.cumsum(1).astype(np.float32):
        flat[row + np.searchsorted(cdf[:-1], rng.random(draws, np.float32), side="right")] += 1
    top = counts == counts.max(1, keepdims=True)
    return (top / top.sum(1, keepdims=True)).mean(0)


def bag(share: np.ndarray, n: int, voters: str, rng: np.random.Generator) -> torch.Tensor:
    """(n, C) logits of voters whose classes are drawn by these shares."""
    strength, noise = VOTERS[voters]
    z = rng.normal(size=(n, len(share))) * noise
    z[np.arange(n), rng.choice(len(share), n, p=share)] += strength
    return torch.from_numpy(z)


def probabilities(z: torch.Tensor, form: str) -> np.ndarray:
    return election_log_probs(z, Segments.from_sizes([len(z)]), form).softmax(1)[0].numpy()


def errors(cases, reference, forms) -> tuple[dict[str, float], dict[str, float], float]:
    """The largest and the mean error of each form, and how likely the winner was on average."""
    off: dict[str, list[float]] = {form: [] for form in forms}
    sure = []
    for z in cases:
        truth = reference(z)
        sure.append(truth.max())
        for form in forms:
            off[form].append(np.abs(probabilities(z, form) - truth).max())
    return {f: max(e) for f, e in off.items()}, {f: float(np.mean(e)) for f, e in off.items()}, float(np.mean(sure))


def row(*cells) -> None:
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def head(*cells) -> None:
    print()
    row(*cells)
    row(*["---"] * len(cells))


def small(rng: np.random.Generator) -> None:
    """Against all outcomes; 60 bags a row, shares uniform on the simplex."""
    head("classes", "votes", "auto is", *(f"{f}: largest (mean) error" for f in FORMS))
    for c, n in ((2, 2), (2, 9), (2, 40), (3, 4), (3, 8), (3, 20), (4, 5), (4, 12), (5, 8), (6, 6), (10, 3), (10, 6)):
        cases = [bag(rng.dirichlet(np.ones(c)), n, v, rng) for v in VOTERS for _ in range(20)]
        most, mean, _ = errors(cases, lambda z: probabilities(z, "exact"), FORMS)
        auto = "exact" if c == 2 else choose_form("auto", n, c)
        row(c, n, auto, *(f"{most[f]:.3f} ({mean[f]:.3f})" for f in FORMS))


def large(rng: np.random.Generator, draws: int, bags: int) -> None:
    """Against drawn votes."""
    head("votes x classes", "shares", "voters", "P(winner)", *(f"{f}: largest (mean) error" for f in FORMS))
    for n, c in ((24, 5), (64, 10), (200, 10)):
        for scenario in ("small", "various", "large"):
            for voters in VOTERS:
                share = share_sampler.sample_shares(scenario, c, max(bags, 10), rng)[:bags]
                cases = [bag(s, n, voters, rng) for s in share]
                forms = ("normal",) if n > MAX_COUNTED_VOTES else FORMS
                number = max(1000, draws * 64 // max(n, 64))
                most, mean, sure = errors(cases, lambda z, d=number: vote(z.softmax(1).numpy(), d, rng), forms)
                cells = [f"{most[f]:.3f} ({mean[f]:.3f})" if f in forms else "" for f in FORMS]
                row(f"{n} x {c}", scenario, voters, f"{sure:.2f}", *cells)


def cost() -> None:
    """Forward and backward of 64 bags, milliseconds, the best of five."""
    head("votes x classes", "form", "ms forward", "ms forward + backward")
    todo = [(64, 10, "independent"), (64, 10, "conditioned"), (64, 10, "normal"), (4, 10, "exact"), (10, 4, "exact")]
    for n, c, form in [*todo, (24, 10, "conditioned"), (128, 10, "conditioned"), (1000, 10, "normal")]:
        torch.manual_seed(0)
        model, segments = Election(32, c, form=form), Segments.from_sizes([n] * 64)
        h, times = torch.randn(64 * n, 32), []
        for _ in range(5):
            started = time.perf_counter()
            loss = -model(h, segments).bag[:, 0].mean()
            forward = time.perf_counter() - started
            loss.backward()
            times.append((time.perf_counter() - started, forward))
        whole, forward = min(times)
        row(f"{n} x {c}", form, f"{1e3 * forward:.0f}", f"{1e3 * whole:.0f}")


def slopes(bags: int = 200) -> None:
    """Elections lost by confident votes: the largest gradient of -log P(label) in a logit, and the smallest cosine between a
    form's gradient and the exact one, over bags of 16 votes for 3 classes."""
    head("logit gap", *(f"{form}: steepest, cosine" for form in ("exact", *FORMS)))
    for gap in (2, 4, 8, 12, 20):
        g = torch.Generator().manual_seed(gap)
        z = torch.randn(bags * 16, 3, generator=g, dtype=torch.float64)
        z[torch.arange(len(z)), torch.randint(1, 3, (len(z),), generator=g)] += gap
        exact, cells = torch.zeros(0), []
        for form in ("exact", *FORMS):
            z = z.detach().requires_grad_()
            lost = -election_log_probs(z, Segments.from_sizes([16] * bags), form).log_softmax(1)[:, 0].sum()
            slope = torch.autograd.grad(lost, z)[0].reshape(bags, -1)
            exact = slope if form == "exact" else exact
            cells.append(f"{slope.abs().max():.2f}, {torch.cosine_similarity(slope, exact).min():.2f}")
        row(gap, *cells)


def count_cost() -> None:
    """The counts only, by both algorithms, of 64 bags for 10 classes: milliseconds forward and backward, the best of five."""
    head("votes", "sequential (CPU)", "tree (GPU)")
    for n in (24, 64, 128):
        z = torch.randn(64 * n, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
        cells = []
        for algorithm in (vote_likelihood.count_pmf_sequential, vote_likelihood.count_pmf_tree):
            times = []
            for _ in range(5):
                started = time.perf_counter()
                algorithm(*(t.unflatten(0, (64, n)) for t in vote_likelihood.log_p_and_complement(z))).sum().backward()
                times.append(time.perf_counter() - started)
            cells.append(f"{1e3 * min(times):.0f}")
        row(n, *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--bags", type=int, default=6)
    parser.add_argument("--cost", action="store_true", help="the milliseconds alone")
    parser.add_argument("--slopes", action="store_true", help="the slopes of lost elections alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.slopes:
        return slopes()
    if not args.cost:
        small(np.random.default_rng(0))
        large(np.random.default_rng(1), args.draws, args.bags)
    cost()
    count_cost()


if __name__ == "__main__":
    main()
