"""The output of `run` about a failed stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.app.context import open_project
from onnx_ops.app.results import Summary
from onnx_ops.cli.tables import summary_report
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import SampledRows
from onnx_ops.domain.gate import SizeGate
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.variants.choice import choose
from tests.reporting.test_reporting_html import evidence_of
from tests.support.golden import Golden


def summary_of(decisions: Sequence[Decision], *executed: str, exit_code: int = 0) -> Summary:
    return Summary(
        pipeline="p",
        executed=executed,
        outcomes=(),
        decisions=tuple(decisions),
        choices=(choose(tuple(decisions)),),
        registration=None,
        awaiting=(),
        left=(),
        exit_code=exit_code,
    )


def unmeasured(variant: str, target: str, reason: str) -> Decision:
    result = GateResult(
        gate="measurement", metric="", limit="", verdict=Verdict.ERROR, reason=reason
    )
    return Decision(variant=variant, target=target, results=(result,))


def test_summary_report_prints_stage_error_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    error = UserError(
        "it answers differently each time", where="train", remedy="Switch off dropout."
    )
    decisions = [unmeasured(name, "cpu", f"export: {error}") for name in ("fp32", "int8")]
    summary = summary_of(decisions, "export", exit_code=2)
    for details in (False, True):
        summary_report(summary, {"export": error}, open_project(tmp_path), {}, details=details)
        printed = capsys.readouterr().out
        golden("errors", printed, "details" if details else "short")
        assert printed.count("it answers differently each time") == 1


def test_summary_report_of_two_variants_prints_sampled_rows_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = SampledRows(data="test", used=512, total=1000)
    evidence = [replace(evidence_of(name), sampled=sampled) for name in ("fp32", "int8-static")]
    summary = summary_of([judge((SizeGate(max=10**9),), one) for one in evidence], "export")
    by_pair = {(one.variant, one.target): one for one in evidence}
    summary_report(summary, {}, open_project(tmp_path), by_pair, details=False)
    assert capsys.readouterr().out.count("metrics of 512 of 1,000 rows of test") == 1


def test_summary_report_groups_stages_with_same_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    error = MeasurementError(
        "no GPU", where="target cuda", why="none is there", remedy="Take another machine."
    )
    stages = {f"benchmark/{name}@cuda": error for name in ("fp32", "int8")}
    decisions = [
        unmeasured(name, "cuda", f"benchmark/{name}@cuda: {error}") for name in ("fp32", "int8")
    ]
    summary = summary_of(decisions, *stages, exit_code=4)
    summary_report(summary, stages, open_project(tmp_path), {}, details=False)
    golden("errors", capsys.readouterr().out)
