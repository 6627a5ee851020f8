"""Write a table of what happens to each of scikit-learn's estimators.

These are its classifiers and regressors. Each is fitted with its defaults on a bundled data set
(iris, diabetes), exported at opset 18, and compared with its source on all rows. The outcome is
`same`, `differs` with the distance, the typed error that ends the export, or why an estimator could
not be fitted or gave no answers. Any other error ends this script with its traceback.

    python -m benchmarks.sklearn_estimators > docs/sklearn-estimators.md
"""

from __future__ import annotations

import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils import all_estimators

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import ExportRequest

CLOSE = 1e-3
"""Largest distance that counts as the same.

It is relative to the largest value of an output of floats. For other outputs, it is a share of the
elements.
"""


HEAD = """# Supported scikit-learn estimators

This page lists every classifier and regressor of scikit-learn. Each of them is fitted with its defaults and the
arguments that it requires, and exported at opset 18. The export is compared with its source on iris or diabetes, with
two classes, two targets or one feature if the estimator accepts no others. `benchmarks/sklearn_estimators.py` writes
this page.

*same*: outputs differ by at most 0.1 % of their largest value, and at most 0.1 % of labels differ. `UserError`,
`StageError`: the export is refused.
"""  # noqa: E501


def main() -> None:
    rows = [
        outcome(name, kind, make)
        for kind in ("classifier", "regressor")
        for name, make in estimators(kind)
    ]
    counts = Counter(what.split(":")[0] for _, _, what in rows)
    print(HEAD)
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()) + ".\n")
    print("| estimator | kind | outcome |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def estimators(kind: str) -> Iterator[tuple[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from all_estimators(type_filter=kind)


def outcome(name: str, kind: str, make: Any) -> tuple[str, str, str]:
    data = load_iris() if kind == "classifier" else load_diabetes()
    rows = data.data.astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, rows = fitted(make, kind, rows, data.target)
        except Exception as error:  # An estimator for other kinds of data can raise any error.
            return name, kind, f"not fitted: {shorten(str(error))}"
        try:
            return name, kind, compare(model, rows)
        except OnnxOpsError as error:
            return name, kind, f"{type(error).__name__}: {shorten(str(error))}"


def fitted(make: Any, kind: str, rows: Any, target: Any) -> tuple[Any, Any]:
    """Return an estimator that is fitted, with the rows that it was fitted on.

    It is made without arguments, with an inner estimator, with a list of them, or with one
    component. If it cannot be fitted, the same is tried with two classes, two targets, and one
    feature.

    Raises:
        Exception: the first error of all attempts, if none succeeds.
    """
    inner = LogisticRegression(max_iter=500) if kind == "classifier" else Ridge()
    makers = [
        make,
        lambda: make(inner),
        lambda: make([("a", inner)]),
        lambda: make(n_components=1),
    ]
    two = np.stack([target, target[::-1]], axis=1)
    first: Exception | None = None
    for x, y in ((rows, target), (rows, target > 0), (rows, two), (rows[:, :1], target)):
        for maker in makers:
            try:
                return maker().fit(x, y), x
            except Exception as error:
                first = first or error
    raise first or AssertionError("nothing was tried")


def compare(model: Any, rows: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        exporter = SklearnExporter()
        exporter.export(
            model,
            ExportRequest(section=Export(framework="sklearn"), samples={"x": rows[:20]}, path=path),
        )
        try:
            expected = exporter.reference(model, {"x": rows}, "float64") or {}
        except ValueError as error:
            return f"not asked: {shorten(str(error))}"
        (answers,) = OnnxRuntime().run(path, Target(name="cpu"), ({"x": rows},))
    if absent := [name for name in expected if name not in answers]:
        return f"differs: the export has no output {absent[0]}"
    worst = max(distance(answers[name], array) for name, array in expected.items())
    if not np.isfinite(worst):
        return "differs: in shape"
    return "same" if worst <= CLOSE else f"differs: by {worst:.2g} of its largest value"


def distance(answer: Any, expected: Any) -> float:
    if answer.shape != expected.shape:
        return float("inf")
    if expected.dtype.kind != "f":
        return float(np.mean(answer != expected))
    return float(np.abs(answer - expected).max() / max(1e-30, np.abs(expected).max()))


def shorten(message: str) -> str:
    """Return a message for a table cell: at most 300 characters, cut between words."""
    text = message.replace("|", "/")
    return textwrap.shorten(text, 300, placeholder=" …", break_on_hyphens=False)


if __name__ == "__main__":
    main()
