"""A table, from its file to an endpoint.

The endpoint answers records and CSV with missing cells as the source does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.ports import Dataset
from tests.e2e.e2e_project import Project
from tests.e2e.raw_tables import TABLES, TRAINING

pytestmark = [pytest.mark.services, pytest.mark.nightly]

PIPELINE = "configs/pipelines/churn-table.yaml"
COLUMNS = ("age", "income", "visits", "city", "plan", "member")
ROWS: list[dict[str, Any]] = [
    {"age": 41.5, "income": 30000.0, "visits": 3, "city": "Oslo", "plan": "basic", "member": True},
    {
        "age": None,
        "income": 52000.25,
        "visits": None,
        "city": "São Paulo",
        "plan": "pro",
        "member": False,
    },
    {"age": 23.0, "income": None, "visits": 11, "city": "Bergen", "plan": "plus", "member": True},
    {"age": None, "income": None, "visits": None, "city": "", "plan": "", "member": False},
]


def test_endpoint_of_table_model_answers_like_source(fresh_project: Project) -> None:
    import pandas as pd

    # This module imports scikit-learn, so it is imported only when the test runs.
    from examples.churn_table import train as train_churn

    fresh_project.run(pipeline=PIPELINE)
    arrays = FileSource().load(FileData(file="examples/data/churn-train.csv"), fresh_project.root)
    rows = Dataset(inputs={name: arrays[name] for name in COLUMNS}, label=arrays["churned"][:, 0])
    source = train_churn({"train": rows})
    frame = pd.DataFrame(ROWS).astype({"age": "float32", "income": "float32", "visits": "float32"})
    expected = source.predict_proba(frame)
    csv = "\n".join(
        [
            ",".join(COLUMNS),
            *(
                ",".join(
                    "" if row[c] is None else str(row[c]).lower() if c == "member" else str(row[c])
                    for c in COLUMNS
                )
                for row in ROWS
            ),
        ]
    )

    for body, kind in (
        ({"dataframe_records": ROWS}, "application/json"),
        (csv.encode(), "text/csv"),
    ):
        answers = fresh_project.ask("churn", "invocations", body, kind)["predictions"]
        np.testing.assert_allclose([row["probabilities"] for row in answers], expected, atol=1e-5)
        assert [row["label"] for row in answers] == source.predict(frame).tolist()


@pytest.mark.parametrize("name", TABLES)
def test_endpoint_of_raw_table_answers_like_source(fresh_project: Project, name: str) -> None:
    table, draw = TABLES[name], np.random.default_rng()
    root = fresh_project.root
    (root / "raw").mkdir()
    for part, count in (("train", 600), ("test", 300)):
        (root / "raw" / f"{part}-{table.file}").write_bytes(table.write(draw, count))
    (root / "raw_training.py").write_text(TRAINING)
    columns = ", ".join(f'"{column}"' for column in table.columns)
    sets = [
        f'  {part}: {{file: raw/{part}-{table.file}, label: "{table.label}", columns: [{columns}]}}'
        for part in ("train", "test")
    ]
    (root / "raw.yaml").write_text(
        "\n".join(
            [
                *(
                    "schema: 1",
                    "pipeline: raw",
                    "data:",
                    *sets,
                    'train: {run: "raw_training:train"}',
                ),
                *("export: {framework: sklearn}", "validate: {samples: {data: test}}"),
                *("benchmark: {targets: [cpu-1t]}", "gates: [{kind: parity}]"),
                *(
                    "register: {model: raw, promote: auto}",
                    "deploy:",
                    "  - endpoint: raw",
                    "    provider: local",
                ),
                *("    target: cpu-1t", "    rollout: {steps: [100%]}"),
            ]
        )
    )
    checked = fresh_project.command("check", "raw.yaml")
    assert checked.code == 0, checked.stderr
    fresh_project.run(pipeline="raw.yaml")
    sets_of = {
        part: FileSource().load(FileData(file=f"raw/{part}-{table.file}"), root)
        for part in ("train", "test")
    }
    inputs = {part: {c: arrays[c] for c in table.columns} for part, arrays in sets_of.items()}
    namespace: dict[str, Any] = {}
    exec(TRAINING, namespace)  # noqa: S102 (the project's own code)
    label = sets_of["train"][table.label][:, 0]
    source = namespace["train"]({"train": Dataset(inputs=inputs["train"], label=label)})
    frame = Dataset(inputs=inputs["test"]).frame()
    records = [
        {column: None if value != value else value for column, value in row.items()}  # noqa: PLR0124 (NaN)
        for row in frame.to_dict("records")
    ]
    answers = fresh_project.ask(
        "raw", "invocations", {"dataframe_records": records}, "application/json"
    )["predictions"]
    expected = source.predict_proba(frame)
    np.testing.assert_allclose([row["probabilities"] for row in answers], expected, atol=1e-4)
    predicted = source.predict(frame)
    if predicted.dtype == np.bool_:
        # The labels of an ONNX classifier are integers or texts.
        predicted = predicted.astype(np.int64)
    sure = np.abs(expected[:, 0] - 0.5) > 1e-4
    given = np.array([str(row["label"]) for row in answers])
    np.testing.assert_array_equal(given[sure], predicted.astype(str)[sure])
