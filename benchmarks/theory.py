"""The simulations behind docs/explanation/theory.md: small worlds where everything is known, to check every statement.

    python benchmarks/theory.py            # draws docs/img/theory-*.svg, about two minutes on one core

A world: an instance is one of X symbols, each class has its symbols' frequencies, bags are drawn class by class with a chosen
majority share, and the classifier is the table of P(class | symbol) that maximises the likelihood: no network, no randomness of
training. It is compared with P(class | symbol) in those bags, which depends on the class frequencies in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from headcount.bags import Segments
from headcount.majority import transition

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class World:
    lean: np.ndarray  # (X, C) P(class | symbol) if all symbols were equally frequent

    @property
    def emission(self) -> np.ndarray:
        """(C, X) P(symbol | class), from which instances are drawn."""
        return (self.lean / self.lean.sum(0)).T

    def eta(self, prior: np.ndarray) -> np.ndarray:
        """(X, C) P(class | symbol) for the class frequencies ``prior`` (C,)."""
        joint = self.emission.T * prior
        return joint / joint.sum(1, keepdims=True)


def world(classes: int, symbols: int, overlap: float, rng: np.random.Generator) -> World:
    """Symbols of one class each for ``overlap`` 0, uninformative ones for 1."""
    own = np.eye(classes)[np.arange(symbols) % classes]
    blur = rng.dirichlet(np.ones(classes), symbols)
    return World((1 - overlap) * own + overlap * blur)


def draw(w: World, bags: int, size: int, share: float, rng: np.random.Generator, noise: float = 0.0, never: int = -1):
    """(bags, size) symbols and (bags,) labels. Winners alternate; the other classes share the remainder evenly; a bag
    whose drawn votes have another winner is drawn again. ``noise``: labels replaced by another; ``never``: a class that
    never wins."""
    classes = w.lean.shape[1]
    can_win = [c for c in range(classes) if c != never]
    classes_of, labels = np.empty((bags, size), dtype=int), np.empty(bags, dtype=int)
    for b in range(bags):
        c = can_win[b % len(can_win)]
        chance = np.full(classes, (1 - share) / (classes - 1))
        chance[c] = share
        while True:
            votes = rng.multinomial(size, chance)
            if votes[c] > np.delete(votes, c).max():
                break
        classes_of[b] = np.repeat(np.arange(classes), votes)
        labels[b] = c if rng.random() >= noise else rng.choice(np.delete(np.arange(classes), c))
    steps = w.emission.cumsum(1)
    symbols = (rng.random((bags, size))[..., None] > steps[classes_of]).sum(-1).clip(max=len(w.lean) - 1)
    return symbols, labels


def counted(symbols: np.ndarray, labels: np.ndarray, X: int, C: int) -> np.ndarray:
    """(X, C) how often each symbol is in a bag of each label: all that the instance term uses."""
    counts = np.zeros((X, C))
    np.add.at(counts, (symbols, np.broadcast_to(labels[:, None], symbols.shape)), 1)
    return counts


def fit_table(seen: np.ndarray, T: np.ndarray, rounds: int = 800, start: np.ndarray | None = None) -> np.ndarray:
    """(X, C) the table that minimises the forward-corrected loss under T, by EM from the uniform one, or from another."""
    eta = np.full((len(seen), len(T)), 1 / len(T)) if start is None else start.clip(1e-6)
    for _ in range(rounds):
        label_p = eta @ T  # (X, labels)
        eta = eta * ((seen / label_p.clip(1e-30)) @ T.T)
        eta /= eta.sum(1, keepdims=True).clip(1e-30)
    return eta


def purest(seen: np.ndarray, T: np.ndarray) -> np.ndarray:
    """(X, C) the likeliest table among those in which every symbol has one class."""
    return np.eye(len(T))[(seen @ np.log(T.clip(1e-12)).T).argmax(1)]


def truth(w: World, size: int, share: float, seed: int, noise: float = 0.0, never: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """(C, C) T[k, c] and (X, C) P(class | symbol), by the classes counted in many bags."""
    counts = counted_classes(w.lean.shape[1], size, share, seed, noise, never)
    return counts / counts.sum(1, keepdims=True), w.eta(counts.sum(1) / counts.sum())


@lru_cache
def counted_classes(C: int, size: int, share: float, seed: int, noise: float, never: int) -> np.ndarray:
    """(C, C) how often class k is in bags of label c."""
    classes, labels = draw(World(np.eye(C)), 20_000, size, share, np.random.default_rng(seed), noise, never)
    return counted(classes, labels, C, C) + 1e-9


def wrong(true: np.ndarray, eta: np.ndarray) -> float:
    """Mean distance (total variation) between the learned and the true distribution of a symbol's class."""
    return float(np.abs(true - eta).sum(1).mean() / 2)


# -- one simulation for each statement ----------------------------------------------------------------------------------------


def consistency(bags=(50, 200, 800, 3200), seeds: int = 5) -> dict[str, list[float]]:
    """The error falls as the root of the number of bags if T is correct; with the label as class it does not fall."""
    ours, naive = [], []
    for B in bags:
        one, two = [], []
        for s in range(seeds):
            rng = np.random.default_rng(s)
            w = world(4, 24, 0.4, rng)
            T, true = truth(w, 16, 0.5, 100 + s)
            seen = counted(*draw(w, B, 16, 0.5, rng), 24, 4)
            one.append(wrong(true, fit_table(seen, T)))
            two.append(wrong(true, seen / seen.sum(1, keepdims=True).clip(1)))
        ours.append(float(np.mean(one)))
        naive.append(float(np.mean(two)))
    return {"bags": list(bags), "forward-corrected": ours, "label as class": naive}


def vanishing(shares=(0.3, 0.35, 0.4, 0.5, 0.7, 0.9), seeds: int = 5) -> dict[str, list[float]]:
    """As the majority share falls to 1/C the signal of the labels vanishes, and the error grows as its inverse."""
    rows: dict[str, list[float]] = {"share": list(shares), "error": [], "condition": [], "pull": []}
    for share in shares:
        errors, T = [], None
        for s in range(seeds):
            rng = np.random.default_rng(s)
            w = world(4, 24, 0.4, rng)
            T, true = truth(w, 64, share, 100 + s)
            errors.append(wrong(true, fit_table(counted(*draw(w, 400, 64, share, rng), 24, 4), T)))
        rows["error"].append(float(np.mean(errors)))
        rows["condition"].append(float(np.linalg.cond(T)))
        rows["pull"].append(float((np.trace(T) / 4 - 0.25) / 0.75))
    return rows


def noise(rates=(0.0, 0.1, 0.2, 0.3, 0.5), seeds: int = 5) -> dict[str, list[float]]:
    """Wrong labels make T flatter. With the clean T the result is biased; with the flatter T only the variance grows."""
    rows: dict[str, list[float]] = {"noise": list(rates), "T with the noise in it": [], "T without": []}
    for rho in rates:
        right, clean = [], []
        for s in range(seeds):
            rng = np.random.default_rng(s)
            w = world(4, 24, 0.2, rng)
            (T, true), (kept, _) = (truth(w, 16, 0.6, 100 + s, n) for n in (rho, 0.0))
            seen = counted(*draw(w, 1600, 16, 0.6, rng, rho), 24, 4)
            right.append(wrong(true, fit_table(seen, T)))
            clean.append(wrong(true, fit_table(seen, kept)))
        rows["T with the noise in it"].append(float(np.mean(right)))
        rows["T without"].append(float(np.mean(clean)))
    return rows


def never(overlaps=(0.0, 0.2, 0.5, 0.8), bags: int = 1600, seeds: int = 5) -> dict[str, list[float]]:
    """A class that never wins is, by T, a mixture of the others: no likelihood distinguishes them. If every symbol is known to
    have one class, it is identifiable again, where that is true."""
    rows: dict[str, list[float]] = {
        "overlap": list(overlaps), "all win": [], "one never wins": [], "one never wins, symbols pure": [],
    }  # fmt: skip
    for overlap in overlaps:
        errors: dict[str, list[float]] = {name: [] for name in list(rows)[1:]}
        for s in range(seeds):
            for loser in (-1, 3):
                rng = np.random.default_rng(s)
                w = world(4, 24, overlap, rng)
                T, true = truth(w, 16, 0.5, 100 + s, never=loser)
                seen = counted(*draw(w, bags, 16, 0.5, rng, never=loser), 24, 4)
                errors["all win" if loser < 0 else "one never wins"].append(wrong(true, fit_table(seen, T)))
                if loser >= 0:
                    errors["one never wins, symbols pure"].append(wrong(true, purest(seen, T)))
        for name, found in errors.items():
            rows[name].append(float(np.mean(found)))
    return rows


def saturation(margins=(0.0, 0.05, 0.1, 0.2, 0.4), sizes=(16, 64, 256)) -> dict[str, list[float]]:
    """1 - P(the label wins), to which the bag term's gradient is proportional, for a bag whose votes are drawn with a lead of ``margin``
    over each of three others; and Hoeffding's bound on it."""
    rows: dict[str, list[float]] = {"margin": list(margins)}
    for S in sizes:
        slope = []
        for margin in margins:
            rest = (1 - margin) / 4
            votes = np.random.default_rng(0).multinomial(S, [rest + margin, rest, rest, rest], 20_000)
            most = votes.max(1, keepdims=True) == votes
            slope.append(float(1 - (most[:, 0] / most.sum(1)).mean()))
        rows[f"S = {S}"] = slope
        rows[f"bound {S}"] = [min(1.0, 3 * float(np.exp(-S * m * m / 2))) for m in margins]
    return rows


def alternate(seen: np.ndarray, symbols: np.ndarray, labels: np.ndarray, rounds: int) -> float:
    """The majority share when neither table nor transition is known: from a low share, alternately the table under the current
    transition, and one EM step of the transition on held-out bags."""
    C, size = seen.shape[1], symbols.shape[1]
    target = torch.eye(C, dtype=torch.float64)[torch.from_numpy(labels)]
    rows, seen_labels = target.repeat_interleave(size, 0), transition.label_prior_from_counts(size * target.sum(0))
    mix = transition.mix_from_shares(torch.tensor(transition.initial_share(size, C), dtype=torch.float64), C)
    eta = None
    for _ in range(rounds):
        eta = fit_table(seen, transition.Transition(mix, seen_labels).matrix.numpy(), 800 if eta is None else 20, eta)
        counts = transition.e_step(torch.from_numpy(eta[symbols.ravel()]), rows, mix, seen_labels)
        mix = transition.m_step(counts, target.sum(0), "full", transition.min_majority_share(size, C))
    return float(mix.diagonal().mean())


def estimated(bags=(50, 200, 800, 3200), share: float = 0.5, seeds: int = 5, rounds=(10, 100)) -> dict[str, list[float]]:
    """The majority share estimated from held-out bags, and the true one: with a table learned under the true transition, and
    with neither known."""
    rows: dict[str, list[float]] = {"bags": list(bags), "true": [], "tilt known": []}
    rows |= {f"unknown, {n} rounds": [] for n in rounds}
    for B in bags:
        found: list[list[float]] = []
        for s in range(seeds):
            rng = np.random.default_rng(s)
            w = world(4, 24, 0.2, rng)
            T, _ = truth(w, 16, share, 100 + s)
            seen = counted(*draw(w, B, 16, share, rng), 24, 4)
            eta = fit_table(seen, T)
            symbols, labels = draw(w, max(20, B // 4), 16, share, rng)
            segments = Segments.from_sizes([16] * len(symbols))
            target = torch.eye(4)[torch.from_numpy(labels)]
            known = transition.estimate_transition(torch.from_numpy(eta[symbols.ravel()]), segments, target).share
            unknown = [alternate(seen, symbols, labels, n) for n in rounds]
            found.append([float(np.mean(np.diag(T))), float(known.mean()), *unknown])
        for values, mean in zip(list(rows.values())[1:], np.mean(found, 0).tolist(), strict=True):
            values.append(mean)
    return rows


WORDS = {  # the names of rows, as in the figures
    "forward-corrected": "forward-corrected loss", "label as class": "bag label as class of its instances",
    "share": "majority share of a bag", "noise": "share of wrong bag labels", "T with the noise in it": "T with the noise",
    "T without": "T without the noise", "overlap": "overlap of the classes", "all win": "every class wins some bags",
    "one never wins": "one class never wins", "one never wins, symbols pure": "the same, one class per symbol",
    "margin": "lead of the majority over each other class", "true": "true share", "tilt known": "transition known",
    "unknown, 10 rounds": "transition estimated, 10 rounds", "unknown, 100 rounds": "transition estimated, 100 rounds",
    **{f"S = {n}": f"{n} instances" for n in (16, 64, 256)}, **{f"bound {n}": f"bound for {n} instances" for n in (16, 64, 256)},
}  # fmt: skip


def main() -> None:
    from headcount.reporting import render

    def lines(name: str, rows: dict[str, list[float]], x: str, title: str, log: bool = False, only=None) -> None:
        with render.panel(420, 300, (56, 34, 24, 46)) as (figure, ax):
            for (label, y), colour in zip(
                [(k, v) for k, v in rows.items() if k != x and (only is None or k in only)], render.PALETTE, strict=False
            ):
                ax.plot(rows[x], y, "o-", color=colour, label=WORDS.get(label, label))
            if x == "bags":
                ax.set_xscale("log")
                ax.set_xticks(rows[x], [str(v) for v in rows[x]])
            if log:
                ax.set_yscale("log")
                ax.set_yticks([0.03, 0.1, 0.3], ["0.03", "0.1", "0.3"])
            ax.minorticks_off()
            ax.set_title(title)
            ax.set_xlabel(WORDS.get(x, x), loc="right")
            ax.legend(frameon=False, loc="best", fontsize="small")
        render.save(figure, ROOT / "docs" / "img" / f"theory-{name}.svg")
        print(name, {k: [round(v, 4) for v in values] for k, values in rows.items()}, flush=True)

    lines("consistency", consistency(), "bags", "error of the learned distribution", log=True)
    lines("vanishing", vanishing(), "share", "error as the majority shrinks (C = 4)", only=("error",))
    lines("noise", noise(), "noise", "error with wrong bag labels")
    lines("never", never(), "overlap", "error when a class never wins")
    lines("saturation", saturation(), "margin", "probability that the label does not win")
    lines("estimated", estimated(), "bags", "estimated majority share")


if __name__ == "__main__":
    main()
