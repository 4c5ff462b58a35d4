"""Slow oracles: the specification's equations as plain loops over Python numbers, written without looking at the package.

The one idea they share: ``seats``, a list per bag of who sits in it (row numbers). Removed instances have no seat, an
instance of weight 2 has two, one of weight 0 none; no loop below knows of removal or weights any other way.

    x, logits, h   list of rows (lists of floats), one per instance
    target         list of rows over the classes, one per bag; a row of zeros is an unlabelled bag
"""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, seed, settings, strategies as st

NAN = float("nan")


def seats(index, bags, removed=None, weight=None):
    """Who sits in each bag, as often as the (whole) weight says."""
    found = [[] for _ in range(bags)]
    for row, bag in enumerate(index):
        if removed is not None and removed[row]:
            continue
        times = 1 if weight is None else int(weight[row])
        for _ in range(times):
            found[bag].append(row)
    return found


# -- per bag -----------------------------------------------------------------------------------------------------------


def add(values):
    total = 0.0
    for v in values:
        total += v
    return total


def columns(x, sits, reduce, empty):
    """Reduce each column of each bag; ``empty`` is what a bag without seats gives."""
    width = len(x[0]) if x else 0
    return [[reduce([x[j][d] for j in sit]) if sit else empty for d in range(width)] for sit in sits]


def bag_sum(x, sits):
    return columns(x, sits, add, 0.0)


def bag_mean(x, sits):
    return columns(x, sits, lambda v: add(v) / len(v), 0.0)


def bag_max(x, sits):
    return columns(x, sits, max, -math.inf)


def bag_logsumexp(x, sits):
    return columns(x, sits, log_sum_exp, -math.inf)


def log_sum_exp(v):
    top = max(v)
    return top + math.log(add([math.exp(a - top) for a in v]))


def bag_softmax(x, sits):
    """Per instance: its share (each copy's share); 0 for whoever has no seat."""
    width = len(x[0]) if x else 0
    out = [[0.0] * width for _ in x]
    for sit in sits:
        for d in range(width):
            if sit:
                whole = log_sum_exp([x[j][d] for j in sit])
                for j in sit:
                    out[j][d] = math.exp(x[j][d] - whole)
    return out


def broadcast(v, index, removed, bags):
    """Per instance the row of its bag; zeros for the removed."""
    width = len(v[0]) if v else 0
    return [[0.0] * width if removed[j] or index[j] == bags else list(v[index[j]]) for j in range(len(index))]


def to_dense(x, sits, length, fill):
    """Per bag ``length`` rows and a mask of the places taken, seats in order."""
    width = len(x[0]) if x else 0
    sheet, taken = [], []
    for sit in sits:
        rows = [list(x[j]) for j in sit]
        sheet.append(rows + [[fill] * width for _ in range(length - len(rows))])
        taken.append([k < len(sit) for k in range(length)])
    return sheet, taken


# -- heads -------------------------------------------------------------------------------------------------------------


def softmax(v, temperature=1.0, counted=None):
    """Over the classes that count; the others get 0."""
    able = [k for k in range(len(v)) if counted is None or counted[k]]
    top = max(v[k] for k in able)
    e = {k: math.exp((v[k] - top) / temperature) for k in able}
    whole = add(e.values())
    return [e[k] / whole if k in e else 0.0 for k in range(len(v))]


def linear(h, weight, bias):
    return [[add([a * b for a, b in zip(row, w, strict=True)]) + c for w, c in zip(weight, bias, strict=True)] for row in h]


def counting_network(logits, sits, t1=0.1, t2=0.1, mode="proportion", counted=None):
    """(shares, counts, probabilities) of each bag."""
    votes = [softmax(z, t1) for z in logits]
    counts = bag_sum(votes, sits)
    shares = bag_mean(votes, sits)
    outputs = [softmax(v, t2, counted) for v in (shares if mode == "proportion" else counts)]
    return shares, counts, outputs


def labelled(target):
    return [i for i, row in enumerate(target) if add(row) > 0]


def counting_loss(outputs, target, reduction="official"):
    """official: mean over bags and over classes of -Y_k log(y_k + 1e-8). paper: summed over classes, no epsilon."""
    total, rows = 0.0, labelled(target)
    for i in rows:
        for k, y in enumerate(target[i]):
            if y > 0 and reduction == "official":
                total -= y * math.log(outputs[i][k] + 1e-8) / len(target[i])
            elif y > 0:
                total -= y * math.log(outputs[i][k])
    return total / max(len(rows), 1)


def output_mean(logits, sits, form="official", counted=None):
    """Probabilities of each bag, such that the loss is their cross-entropy (for "tempered": the counting loss)."""
    if form == "logit":
        return [softmax(v, 1.0, counted) for v in bag_mean(logits, sits)]
    mean = bag_mean([softmax(z) for z in logits], sits)
    if form == "nll":
        able = [[p if counted is None or counted[k] else 0.0 for k, p in enumerate(row)] for row in mean]
        return [[p / add(row) for p in row] for row in able]
    once = [softmax(v, 1.0, counted) for v in mean]
    return once if form == "tempered" else [softmax(v, 1.0, counted) for v in once]


def output_mean_loss(outputs, target, form="official"):
    return counting_loss(outputs, target, "official" if form == "tempered" else "paper")


# -- MPEM --------------------------------------------------------------------------------------------------------------


def loyal(said, bag, label, bag_said, c, which="correct"):
    """M_c: instances said c, in bags labelled c (and said c, if only the right ones are asked)."""
    found = []
    for j in range(len(said)):
        i = bag[j]
        if label[i] == c and said[j] == c and (which == "all" or bag_said[i] == c):
            found.append(j)
    return found


def prototype(h, members):
    return [add([h[j][d] for j in members]) / len(members) for d in range(len(h[0]))] if members else None


def covariance(h, members):
    """Unbiased: divided by the number of members less one."""
    centre, width = prototype(h, members), len(h[0])
    out = [[0.0] * width for _ in range(width)]
    for a in range(width):
        for b in range(width):
            out[a][b] = add([(h[j][a] - centre[a]) * (h[j][b] - centre[b]) for j in members]) / (len(members) - 1)
    return out


def mpem_distances(h, said, bag, label, bag_said, classes, which="correct", metric="euclidean"):
    """(distances, prototypes): None where the class has no usable prototype, or the bag no label."""
    centres, inverses = [], []
    for c in range(classes):
        members = loyal(said, bag, label, bag_said, c, which)
        if metric == "mahalanobis" and len(members) < 2:
            members = []
        centres.append(prototype(h, members))
        wanted = metric == "mahalanobis" and members
        inverses.append(np.linalg.pinv(np.array(covariance(h, members)), rcond=1e-10, hermitian=True) if wanted else None)
    out = []
    for j in range(len(h)):
        c = label[bag[j]]
        if c < 0 or centres[c] is None:
            out.append(None)
            continue
        away = [a - b for a, b in zip(h[j], centres[c], strict=True)]
        if metric == "euclidean":
            out.append(math.sqrt(add([a * a for a in away])))
        else:
            terms = [away[a] * inverses[c][a][b] * away[b] for a in range(len(away)) for b in range(len(away))]
            out.append(math.sqrt(max(0.0, add(terms))))
    return out, centres


def mpem_removed(distance, said, bag, label, r):
    """Of each bag's dissenters the int(a r) farthest; a bag about to lose everybody keeps its nearest."""
    removed = [False] * len(said)
    for i in range(len(label)):
        own = [j for j in range(len(said)) if bag[j] == i]
        minority = [j for j in own if label[i] >= 0 and said[j] != label[i] and distance[j] is not None]
        ascending = sorted(minority, key=lambda j: distance[j])
        farthest = ascending[::-1][: int(len(minority) * r)]
        if own and len(farthest) == len(own):
            farthest = farthest[:-1]
        for j in farthest:
            removed[j] = True
    return removed


# -- metrics -----------------------------------------------------------------------------------------------------------


def rate(hits):
    return add([1.0 if hit else 0.0 for hit in hits]) / len(hits) if hits else NAN


def accuracy(true, said):
    return rate([t == s for t, s in zip(true, said, strict=True) if t >= 0])


def majority(counts):
    """The lowest class among those with most votes."""
    best = 0
    for k, n in enumerate(counts):
        if n > counts[best]:
            best = k
    return best


def tally(said, sit, classes):
    counts = [0] * classes
    for j in sit:
        counts[said[j]] += 1
    return counts


def consistency_rate(label, bag_said, said, sits, classes):
    right = [i for i in range(len(label)) if bag_said[i] == label[i]]
    return rate([majority(tally(said, sits[i], classes)) == bag_said[i] for i in right])


def share(of, label, sits):
    return [rate([of[j] == label[i] for j in sit]) for i, sit in enumerate(sits)]


def share_difference(true, said, label, sits):
    return [a - b for a, b in zip(share(said, label, sits), share(true, label, sits), strict=True)]


def purity(true, label, bag, removed):
    return rate([true[j] != label[bag[j]] for j in range(len(true)) if removed[j]])


def agreement_rate(true, label, kept_seats, classes):
    return rate([majority(tally(true, sit, classes)) == label[i] for i, sit in enumerate(kept_seats)])


def confusion(true, said, classes):
    counts = [[0] * classes for _ in range(classes)]
    for t, s in zip(true, said, strict=True):
        if t >= 0:
            counts[t][s] += 1
    return counts


def miou(counts, balanced=True):
    """Rows (truth) scaled to one each if ``balanced``; the mean over classes that are true or said somewhere."""
    rows = [[n / add(row) if balanced and add(row) else float(n) for n in row] for row in counts]
    found = []
    for c in range(len(rows)):
        union = add(rows[c]) + add([row[c] for row in rows]) - rows[c][c]
        if union > 0:
            found.append(rows[c][c] / union)
    return add(found) / len(found) if found else NAN


# -- random bags to try them on ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """Random bags: hypothesis draws the shape of things, a generator seeded by it the numbers."""

    sizes: list[int]
    removed: list[bool]  # instances lie bag by bag
    weight: list[int]
    seed: int

    @property
    def n(self):
        return sum(self.sizes)

    @property
    def index(self):
        return [b for b, size in enumerate(self.sizes) for _ in range(size)]

    def rng(self, purpose=0):
        return np.random.default_rng([self.seed, purpose])

    def values(self, width, scale=1.0, purpose=1):
        """(N, width) float64; now and then whole numbers, so that there are ties."""
        x = self.rng(purpose).normal(size=(self.n, width)) * scale
        return np.round(x) if self.seed % 4 == 0 else x


@st.composite
def ragged(draw, even=None, spare=True, most=7, weights=(1, 3)):
    """``spare``: removal leaves every bag at least one instance of weight above 0."""
    if draw(st.booleans()) if even is None else even:
        sizes = [draw(st.integers(1, most))] * draw(st.integers(1, 5))
    else:
        sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=5))
    number = draw(st.integers(0, 2**32 - 1))
    part = draw(st.sampled_from([0.0, 0.3, 0.9]))
    rng = np.random.default_rng([number, 99])
    removed = (rng.random(sum(sizes)) < part).tolist()
    weight = rng.integers(weights[0], weights[1] + 1, sum(sizes)).tolist()
    if spare:
        start = 0
        for size in sizes:
            lucky = start + int(rng.integers(size))
            removed[lucky], weight[lucky] = False, max(weight[lucky], 1)
            start += size
    return Ragged(sizes, removed, weight, number)


def examine(law, cases, **drawn):
    """Hold a law over this many drawn cases, the same ones every time, and count them: the number is a claim.

    HEADCOUNT_CASES=20 tries twenty times as many, and others.
    """
    cases *= int(os.environ.get("HEADCOUNT_CASES", "1"))
    tried = 0

    @seed(zlib.crc32(f"{law.__qualname__} {cases}".encode()))
    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(**drawn)
    def hold(**case):
        nonlocal tried
        law(**case)
        tried += 1

    hold()
    assert tried >= cases, f"only {tried} of {cases} cases were tried"
    return tried
