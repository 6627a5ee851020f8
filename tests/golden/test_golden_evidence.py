"""Stored evidence is read and judged with the same result forever, to 12 digits.

Processors differ in the last digits of exponentials and logarithms.

Each folder below `schema-N` contains evidence of that schema as a pipeline wrote it. It also
contains its gates, and the decision that they led to. These tests must show each change of a rule
that changes a stored decision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.evidence import EVIDENCE_SCHEMA, Evidence
from onnx_ops.domain.gate import Gate
from onnx_ops.statistics.judge import judge

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("schema-*/*/evidence.json"))


def decided(case: Path) -> Decision:
    evidence = codec.loads((case / "evidence.json").read_bytes(), Evidence)
    return judge(codec.loads((case / "gates.json").read_bytes(), tuple[Gate, ...]), evidence)


def read_rounded(data: bytes) -> Any:
    """Parse JSON, and round numbers to 12 digits."""
    return json.loads(data, parse_float=lambda text: float(f"{float(text):.12g}"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_judge_of_stored_evidence_returns_stored_decision_to_12_digits(case: Path) -> None:
    assert read_rounded(codec.dumps(decided(case))) == read_rounded(
        (case / "decision.json").read_bytes()
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_codec_reads_stored_evidence_of_each_schema_and_keeps_current_bytes(case: Path) -> None:
    data = (case / "evidence.json").read_bytes()
    evidence = codec.loads(data, Evidence)
    assert f"schema-{evidence.schema}" == case.parent.name
    if evidence.schema == EVIDENCE_SCHEMA:
        assert codec.dumps(evidence) == data


@pytest.mark.parametrize("schema", range(1, EVIDENCE_SCHEMA + 1))
def test_evidence_schema_has_passing_inconclusive_and_failing_cases(schema: int) -> None:
    here = (case for case in CASES if case.parent.name == f"schema-{schema}")
    verdicts = {result.verdict for case in here for result in decided(case).results}
    assert {Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE} <= verdicts
