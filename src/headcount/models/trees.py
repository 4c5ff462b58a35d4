"""Classifiers of scikit-learn as plain arrays, which are saved without pickle and predict the same with numpy.

Letters: n instances, D features, C classes, M nodes, T trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import softmax

from headcount.errors import HeadcountError

_TOLERANCE = 1e-6
_OFF_HALFWAY = 2**-8  # of the gap: half a second of a time stamp


def round_down(x: np.ndarray) -> np.ndarray:
    """float64 -> the largest float32 that is not above: a float32 is at most that just where it is at most x."""
    nearest = x.astype(np.float32)
    return np.where(nearest.astype(np.float64) > x, np.nextafter(nearest, np.float32(-np.inf)), nearest)


@dataclass(frozen=True, eq=False)
class Trees:
    """The mean prediction of T trees. A node is a leaf (feature -1), or sends x[feature] <= threshold to the left. Children
    stand behind their parent, inside their own tree, and have one parent each, so that every path ends in a leaf."""

    kind: ClassVar[str] = "forest"
    dtype: ClassVar[Any] = np.float32  # in which scikit-learn compares

    roots: np.ndarray  # (T,) int64, the first node of each tree
    feature: np.ndarray  # (M,) int32, -1 at a leaf
    threshold: np.ndarray  # (M,) float64
    left: np.ndarray  # (M,) int32, its own number at a leaf
    right: np.ndarray  # (M,) int32
    value: np.ndarray  # (M, C) float32, probabilities

    def predict_proba(self, x: np.ndarray, chunk: int = 1 << 20) -> np.ndarray:
        """(n, D) -> (n, C) float64; ``chunk`` is how many instances times trees are held in memory at a time."""
        x = np.ascontiguousarray(x, dtype=self.dtype)
        step = max(1, chunk // len(self.roots))
        return np.concatenate([self.combine(self._leaves(x[i : i + step])) for i in range(0, max(1, len(x)), step)])

    def combine(self, leaf: np.ndarray) -> np.ndarray:
        """(n, T) leaves -> (n, C) probabilities."""
        return self.value[leaf].mean(1, dtype=np.float64)

    def _leaves(self, x: np.ndarray) -> np.ndarray:
        node = np.tile(self.roots, len(x))
        row = np.repeat(np.arange(len(x)), len(self.roots))
        active = np.flatnonzero(self.feature[node] >= 0)
        while len(active):
            at = node[active]
            lower = x[row[active], self.feature[at]] <= self.threshold[at]
            node[active] = np.where(lower, self.left[at], self.right[at])
            active = active[self.feature[node[active]] >= 0]
        return node.reshape(len(x), len(self.roots))

    def fold_in_scaler(self, mean: np.ndarray, scale: np.ndarray) -> Self:
        """The trees that predict of x what these predict of (x - mean) / scale; (D,) float64 each."""
        feature = np.maximum(self.feature, 0)  # leaves use none
        threshold = np.where(self.feature >= 0, self.threshold * scale[feature] + mean[feature], 0.0)
        return replace(self, threshold=threshold)

    def without_float32_rounding(self) -> Self:
        """The same trees for numbers that are not rounded to float32 before they are compared, as scikit-learn rounds them. A
        time stamp (1.7e9) is rounded by up to a minute: below a threshold lies what is rounded to a number below it, which ends
        halfway between two numbers of float32. Halfway itself is rounded to the even one; the threshold avoids it."""
        below = round_down(self.threshold)
        above = np.nextafter(below, np.float32(np.inf))
        even = below.view(np.int32) % 2 == 0
        gap = above.astype(np.float64) - below
        threshold = below + gap * np.where(even, 0.5 + _OFF_HALFWAY, 0.5 - _OFF_HALFWAY)
        return replace(self, threshold=np.where(self.feature >= 0, threshold, 0.0))

    def arrays(self) -> dict[str, np.ndarray]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], features: int, classes: int) -> Self:
        """From a file: every tree is a tree, and the leaves are valid."""
        trees, m = (np.atleast_1d(arrays[name]).size if name in arrays else 0 for name in ("roots", "feature"))
        a = _checked(arrays, {
            "roots": (np.int64, (trees,)), "feature": (np.int32, (m,)), "threshold": (np.float64, (m,)),
            "left": (np.int32, (m,)), "right": (np.int32, (m,)), **cls.leaf_arrays(trees, m, classes),
        })  # fmt: skip
        if not 0 < trees <= m:
            raise _damaged(f"it has {trees} trees and {m} nodes")
        roots, feature, leaf, node = a["roots"], a["feature"], a["feature"] == -1, np.arange(m)
        ends = np.append(roots[1:], m)
        if roots[0] != 0 or (roots < 0).any() or (ends <= roots).any():
            raise _damaged("its trees do not follow one another")
        if (bad := np.flatnonzero((feature < -1) | (feature >= features))).size:
            raise _damaged(f"node {bad[0]} uses feature {feature[bad[0]]} of {features}")
        end, parents = np.repeat(ends, ends - roots), np.bincount(roots, minlength=m)
        for name in ("left", "right"):
            child = a[name].astype(np.int64)
            valid = np.where(leaf, child == node, (child > node) & (child < end))
            if (bad := np.flatnonzero(~valid)).size:
                where = f"the {name} child of node {bad[0]} is node {child[bad[0]]}"
                raise _damaged(f"{where}, outside its tree or not behind it")
            parents += np.bincount(child[~leaf], minlength=m)
        if (bad := np.flatnonzero(parents != 1)).size:
            raise _damaged(f"node {bad[0]} has {parents[bad[0]]} parents")
        model = cls(**a)
        model.check_leaves(classes)
        return model

    @staticmethod
    def leaf_arrays(trees: int, nodes: int, classes: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Types and shapes of what the leaves predict."""
        return {"value": (np.float32, (nodes, classes))}

    def check_leaves(self, classes: int) -> None:
        if (self.value < 0).any() or (np.abs(self.value.sum(1, dtype=np.float64) - 1) > 1e-3).any():
            raise _damaged("the probabilities of a node do not add up to one")


@dataclass(frozen=True, eq=False)
class BoostedTrees(Trees):
    """Gradient boosting: each tree adds to the score of one class; softmax(scores). ``value`` is (M,) float64."""

    kind: ClassVar[str] = "boosting"
    dtype: ClassVar[Any] = np.float64

    target: np.ndarray  # (T,) int32, the class of each tree
    bias: np.ndarray  # (C,) float64, the scores before the first tree; very low for a class that was never seen

    def combine(self, leaf: np.ndarray) -> np.ndarray:
        return softmax(self.value[leaf] @ np.identity(len(self.bias))[self.target] + self.bias, 1)

    def without_float32_rounding(self) -> Self:
        return self

    @staticmethod
    def leaf_arrays(trees: int, nodes: int, classes: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
        return {"value": (np.float64, (nodes,)), "target": (np.int32, (trees,)), "bias": (np.float64, (classes,))}

    def check_leaves(self, classes: int) -> None:
        if (self.target < 0).any() or (self.target >= classes).any():
            raise _damaged(f"a tree adds to a class that is none of {classes}")


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Logistic regression: softmax(x W' + b)."""

    kind: ClassVar[str] = "linear"

    weight: np.ndarray  # (C, D) float64
    bias: np.ndarray  # (C,) float64; very low for a class that was never seen

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """(n, D) -> (n, C) float64."""
        return softmax(np.asarray(x, dtype=np.float64) @ self.weight.T + self.bias, 1)

    def fold_in_scaler(self, mean: np.ndarray, scale: np.ndarray) -> LinearModel:
        """The model that predicts of x what this one predicts of (x - mean) / scale; (D,) float64 each."""
        return LinearModel(self.weight / scale, self.bias - self.weight @ (mean / scale))

    def arrays(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight, "bias": self.bias}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], features: int, classes: int) -> LinearModel:
        return cls(**_checked(arrays, {"weight": (np.float64, (classes, features)), "bias": (np.float64, (classes,))}))


ARRAY_MODELS = {model.kind: model for model in (Trees, BoostedTrees, LinearModel)}


@dataclass(frozen=True, eq=False)
class SklearnModel:
    """A fitted scikit-learn classifier as it is: it predicts, and cannot be saved."""

    kind: ClassVar[str] = "sklearn"

    classifier: Any  # classes_ are class numbers
    classes: int

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """(n, D) -> (n, C) float64, a column for every class, those it never saw included."""
        out = np.zeros((len(x), self.classes))
        out[:, np.asarray(self.classifier.classes_)] = self.classifier.predict_proba(x)
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        raise _unsavable(self.classifier)


def is_savable(classifier: Any) -> bool:
    """Whether :func:`from_sklearn` knows this kind of classifier, fitted or not."""
    from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.tree import DecisionTreeClassifier

    if isinstance(classifier, HistGradientBoostingClassifier):  # no tree here asks for categories
        return classifier.categorical_features in (None, "from_dtype")
    return isinstance(classifier, (DecisionTreeClassifier, RandomForestClassifier, ExtraTreesClassifier, LogisticRegression))


def from_sklearn(classifier: Any, classes: int) -> Trees | LinearModel:
    """The arrays of a fitted classifier (see :func:`is_savable`) whose ``classes_`` are numbers below ``classes``."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    if not is_savable(classifier):
        raise _unsavable(classifier)
    columns = np.asarray(classifier.classes_)
    if columns.dtype.kind not in "iu" or columns.min() < 0 or columns.max() >= classes:
        raise HeadcountError(f"the classifier knows classes {columns.tolist()[:8]}, and there are {classes} numbers")
    boosted = isinstance(classifier, HistGradientBoostingClassifier)
    linear = isinstance(classifier, LogisticRegression)
    convert = _linear_from_sklearn if linear else _boosting_from_sklearn if boosted else _trees_from_sklearn
    model = convert(classifier, columns, classes)
    x = np.random.default_rng(0).normal(size=(64, classifier.n_features_in_)).astype(np.float32)
    off = np.abs(model.predict_proba(x)[:, columns] - classifier.predict_proba(x)).max()
    if not off < _TOLERANCE:  # an unusual variety, such as one-against-rest, whose arrays mean something else
        name = type(classifier).__name__
        raise HeadcountError(f"this {name} predicts otherwise than its arrays (by {off:.2g}); it cannot be saved")
    return model


def _trees_from_sklearn(classifier: Any, columns: np.ndarray, classes: int) -> Trees:
    trees = [t.tree_ for t in getattr(classifier, "estimators_", [classifier])]
    sizes = np.array([t.node_count for t in trees])
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    node, root = np.arange(sizes.sum()), np.repeat(roots, sizes)
    names = ("children_left", "children_right", "feature", "threshold", "value")
    left, right, feature, threshold, weight = (np.concatenate([getattr(t, name) for t in trees]) for name in names)
    leaf, weight = left < 0, weight[:, 0, :]
    value = np.zeros((len(node), classes), dtype=np.float32)
    value[:, columns] = weight / weight.sum(1, keepdims=True)
    left, right = (np.where(leaf, node, child + root).astype(np.int32) for child in (left, right))
    return Trees(roots, np.where(leaf, -1, feature).astype(np.int32), np.where(leaf, 0.0, threshold), left, right, value)


def _boosting_from_sklearn(classifier: Any, columns: np.ndarray, classes: int) -> BoostedTrees:
    rounds, seen = classifier._predictors, columns if len(columns) > 2 else columns[1:]  # of two classes the second has scores
    trees, target = [tree.nodes for trees in rounds for tree in trees], np.tile(seen, len(rounds)).astype(np.int32)
    roots = np.cumsum([0, *map(len, trees[:-1])])
    nodes, root = np.concatenate(trees), np.repeat(roots, [len(tree) for tree in trees])
    leaf, node = nodes["is_leaf"] > 0, np.arange(len(nodes))
    left, right = (np.where(leaf, node, nodes[side] + root).astype(np.int32) for side in ("left", "right"))
    feature = np.where(leaf, -1, nodes["feature_idx"]).astype(np.int32)
    threshold, bias = np.where(leaf, 0.0, nodes["num_threshold"]), np.full(classes, -1e4)
    bias[columns] = 0.0
    bias[seen] = classifier._baseline_prediction[0]
    return BoostedTrees(roots, feature, threshold, left, right, np.where(leaf, nodes["value"], 0.0), target, bias)


def _linear_from_sklearn(classifier: Any, columns: np.ndarray, classes: int) -> LinearModel:
    coef, intercept = classifier.coef_.astype(np.float64), np.asarray(classifier.intercept_, dtype=np.float64)
    if len(coef) == 1:  # two classes: the first one's logit is zero
        coef, intercept = np.vstack([np.zeros_like(coef), coef]), np.append(0.0, intercept)
    weight, bias = np.zeros((classes, coef.shape[1])), np.full(classes, -1e4)
    weight[columns], bias[columns] = coef, intercept
    return LinearModel(weight, bias)


def _checked(arrays: Mapping[str, np.ndarray], expected: Mapping[str, tuple[Any, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """The arrays, if they have these names, types and shapes, and are finite."""
    if odd := sorted(set(arrays) ^ set(expected)):
        raise _damaged(f"it needs {', '.join(sorted(expected))}, and the file differs in {', '.join(odd[:4])}")
    for name, (dtype, shape) in expected.items():
        a = arrays[name]
        if a.dtype != dtype or a.shape != shape:
            raise _damaged(f"{name} is {a.dtype} of shape {a.shape}, not {np.dtype(dtype)} of shape {shape}")
        if a.dtype.kind == "f" and not np.isfinite(a).all():
            raise _damaged(f"{name} holds numbers that are not finite")
    return dict(arrays)


def _unsavable(classifier: Any) -> HeadcountError:
    use = "use trees, forests, histogram gradient boosting or a logistic regression of scikit-learn, or keep it in memory"
    return HeadcountError(f"a {type(classifier).__name__} cannot be saved without pickle; {use}")


def _damaged(why: str) -> HeadcountError:
    return HeadcountError(f"the arrays of the model are damaged: {why}")
