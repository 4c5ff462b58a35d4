"""The estimator's model as `headcount predict` reads it, and an estimator from such a model."""

from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.models.fitted import FittedModel
from headcount.models.trees import SklearnModel, Trees
from headcount.readers.columns import ColumnRoles
from headcount.readers.preprocessing import Preprocessor, number_fields
from headcount.readers.transforms import StandardScaler


def unscaled_model(model: FittedModel, scaler: StandardScaler | None, x: np.ndarray, names: list[str], bag: Any) -> FittedModel:
    """The model for numbers (N, D) that are not standardised: for a table, if the columns have names, or for features."""
    estimator = model.estimator
    if isinstance(estimator, SklearnModel):  # it cannot be saved either
        return model
    if not names or len(set(names)) < len(names):
        if scaler is not None:
            estimator = estimator.fold_in_scaler(scaler.mean_, scaler.scale_)
        return model.replace(estimator=estimator)
    if scaler is None:
        scaler = StandardScaler.fit(x)
        estimator = estimator.without_float32_rounding() if isinstance(estimator, Trees) else estimator
        estimator = estimator.fold_in_scaler(-scaler.mean_ / scaler.scale_, 1 / scaler.scale_)
    roles = ColumnRoles(bag=bag if isinstance(bag, str) else None)
    preprocessor = Preprocessor("table", number_fields(x, names), (x.shape[1],), roles=roles)
    return model.replace(preprocessor=preprocessor, estimator=estimator)


def fitted_attributes(model: FittedModel) -> dict[str, Any]:
    """The attributes of an estimator that predicts rows of numbers, or images, as this model does."""
    shape, fields = model.preprocessor.shape, model.preprocessor.fields
    if odd := [f.name for f in fields if f.kind != "number" or f.missing or f.time_kind]:
        problem = f"this model prepares column {odd[0]!r} by itself (words, dates, gaps); an estimator takes finite numbers"
        raise HeadcountError(f"{problem}; use FittedModel.load(folder).predict_proba(table)")
    values = model.metadata.get("class_values")
    values = values if isinstance(values, list) and {*map(type, values)} <= {str, bool, int, float} else ()
    method = model.metadata.get("method")
    attributes = {
        "classes_": np.asarray(values if len(values) == len(model.classes) else model.classes),
        "method_": method.get("name") if isinstance(method, dict) else None,
        "transition_": model.transition,
        "fitted_": model,
        "bags_": model.preprocessor.roles.bag,
        "_model": model,
        "_bags_given": True,
        "_scaler": None,
        "_class_weight": 1.0,
    }
    if len(shape) == 1:
        moments = np.array([(f.mean, f.scale) for f in fields] or [(0.0, 1.0)] * shape[0]).T
        attributes |= {"n_features_in_": shape[0], "_scaler": StandardScaler(*moments)}
    return attributes | ({"feature_names_in_": np.array([f.name for f in fields], object)} if fields else {})
