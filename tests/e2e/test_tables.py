"""A CSV file to an endpoint that answers records and CSV with missing cells as the source does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.ports import Dataset
from tests.e2e.e2e_project import Project

pytestmark = [pytest.mark.services, pytest.mark.nightly]

PIPELINE = "configs/pipelines/churn-table.yaml"
COLUMNS = ("age", "income", "visits", "city", "plan", "member")
ROWS: list[dict[str, Any]] = [
    {"age": 41.5, "income": 30000.0, "visits": 3, "city": "Oslo", "plan": "basic", "member": True},
    {"age": None, "income": 52000.25, "visits": None, "city": "São Paulo", "plan": "pro", "member": False},
    {"age": 23.0, "income": None, "visits": 11, "city": "Bergen", "plan": "plus", "member": True},
    {"age": None, "income": None, "visits": None, "city": "", "plan": "", "member": False},
]


def test_endpoint_of_a_table_answers_like_its_source(fresh_project: Project) -> None:
    import pandas as pd

    from examples.churn_table import train

    fresh_project.run(pipeline=PIPELINE)
    arrays = FileSource().load(FileData(file="examples/data/churn-train.csv"), fresh_project.root)
    rows = Dataset(inputs={name: arrays[name] for name in COLUMNS}, label=arrays["churned"][:, 0])
    source = train({"train": rows})
    frame = pd.DataFrame(ROWS).astype({"age": "float32", "income": "float32", "visits": "float32"})
    expected = source.predict_proba(frame)
    csv = "\n".join(
        [",".join(COLUMNS), *(",".join("" if row[c] is None else str(row[c]).lower() if c == "member" else str(row[c])
                                       for c in COLUMNS) for row in ROWS)]
    )  # fmt: skip

    for body, kind in (({"dataframe_records": ROWS}, "application/json"), (csv.encode(), "text/csv")):
        answers = fresh_project.ask("churn", "invocations", body, kind)["predictions"]
        np.testing.assert_allclose([row["probabilities"] for row in answers], expected, atol=1e-5)
        assert [row["label"] for row in answers] == source.predict(frame).tolist()
