"""What `run` prints about a stage that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.analysis.choice import choose
from onnx_ops.cli.tables import summary_report
from onnx_ops.domain.gate import Decision, GateResult, Verdict
from onnx_ops.errors import UserError
from onnx_ops.wiring.project import open_project
from onnx_ops.wiring.summary import Summary
from tests.support.golden import Golden


def test_error_of_a_stage_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    error = UserError("it answers differently each time", where="train", remedy="Switch off dropout.")
    result = GateResult(gate="measurement", metric="", limit="", verdict=Verdict.ERROR, reason=f"export: {error}")
    decisions = tuple(Decision(variant=name, target="cpu", results=(result,)) for name in ("fp32", "int8"))
    summary = Summary(
        pipeline="p",
        executed=("export",),
        outcomes=(),
        decisions=decisions,
        choices=(choose(decisions),),
        registration=None,
        awaiting=(),
        exit_code=2,
    )
    for details in (False, True):
        summary_report(summary, {"export": error}, open_project(tmp_path), {}, details=details)
        printed = capsys.readouterr().out
        golden("errors", printed, "details" if details else "short")
        assert printed.count("it answers differently each time") == 1
