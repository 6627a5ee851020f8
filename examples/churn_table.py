"""Logistic regression on a table of customers, with one input per column.

The columns hold numbers, texts, truth values and missing cells.
"""

from __future__ import annotations

from collections.abc import Mapping

from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from onnx_ops.ports import Dataset


def train(data: Mapping[str, Dataset], *, strength: float = 1.0) -> Pipeline:
    """Fit a pipeline with a step for each kind of column.

    It is fitted on the set `train` as a data frame.
    """
    rows = data["train"]
    columns = ColumnTransformer(
        [
            (
                "numbers",
                make_pipeline(SimpleImputer(), StandardScaler()),
                ["age", "income", "visits"],
            ),
            ("texts", OneHotEncoder(handle_unknown="ignore"), ["city", "plan", "member"]),
        ]
    )
    return make_pipeline(columns, LogisticRegression(C=strength, max_iter=500)).fit(
        rows.frame(), rows.label
    )
