"""Output keeps words, paths, intervals and names whole at any width."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from onnx_ops import codec
from onnx_ops.cli import common
from onnx_ops.cli.common import KEEP, SafeConsole, print_table, print_text, render_error
from onnx_ops.cli.rollouts import _render
from onnx_ops.cli.tables import gate_report
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.rollout import AnalysisResult, GuardrailResult, ServerOutlier
from onnx_ops.domain.rollout_policy import PlannedStep
from onnx_ops.errors import UserError
from onnx_ops.release.status import RolloutView
from onnx_ops.reporting.description import result_table

PATH = "/srv/models/.onnx-ops/endpoints/digits/deployments/v12/model.onnx"


@pytest.fixture
def sink(width: int, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output on a terminal of this width."""
    sink = io.StringIO()
    out = Console(file=sink, width=width, force_terminal=True, color_system=None, emoji=False)
    monkeypatch.setattr(common, "console", lambda: out)
    return sink


RESULT = GateResult(
    gate="metric",
    metric="accuracy vs fp32",
    limit="drop ≤ 2%",
    verdict=Verdict.FAIL,
    reason=f"see :torch: in {PATH}",
    estimate=0.00222,
    low=-0.000782,
    high=0.0067,
    unit="1",
    n=899,
)


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_gate_report_on_narrow_or_wide_terminal_keeps_words_whole(sink: io.StringIO) -> None:
    results = (RESULT, replace(RESULT, gate="latency", metric="ratio vs fp32"))
    gate_report(
        result_table(
            [Decision(variant="int8-dynamic-percentile", target="cpu-1t", results=results)]
        )
    )
    words = set(sink.getvalue().split())
    assert {"int8-dynamic-percentile", "accuracy", "latency", "FAIL", PATH, ":torch:"} <= words
    assert "[-0.0782, 0.67]%" in sink.getvalue()


@pytest.mark.parametrize("width", [40, 80])
def test_print_table_beyond_width_fits_width_and_keeps_paths_whole(
    sink: io.StringIO, width: int
) -> None:
    print_table(("name", "found"), [["signing key", "mode 0600 of a key that signs all decisions"]])
    assert all(len(line) <= width for line in sink.getvalue().splitlines())
    print_table(("name", "path"), [["signing key", PATH], ["trusted", PATH]])
    assert sink.getvalue().count(PATH) == 2


def test_print_text_without_terminal_writes_one_line() -> None:
    sink = io.StringIO()
    print_text(f"a text that is longer{KEEP}than twenty columns", out=Console(file=sink, width=20))
    assert sink.getvalue() == "a text that is longer than twenty columns\n"


@pytest.mark.parametrize("width", range(24, 60, 5))
def test_print_text_on_narrow_terminal_keeps_intervals_whole(sink: io.StringIO) -> None:
    print_text(
        "[bold]{}[/bold], and {}",
        "1.349x [1.26, 1.445] the latency, of [0.02588 ms, 0.1 ms]",
        "[x] is not a tag",
    )
    assert "[1.26, 1.445]" in sink.getvalue()
    assert "[0.02588 ms, 0.1 ms]" in sink.getvalue()
    assert "[x]" in sink.getvalue()


def test_print_table_without_terminal_does_not_wrap(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "found"), [["signing key", "word " * 100], ["other", PATH]])
    assert len(capsys.readouterr().out.splitlines()) == 3


def make_view(judged: AnalysisResult, next_action: str) -> RolloutView:
    return RolloutView(
        endpoint="digits",
        stable="v1",
        candidate="v2",
        step=0,
        steps=(PlannedStep(kind="canary", percent=10),),
        seconds=1.0,
        next=next_action,
        judged=judged,
    )


def test_rollout_view_prints_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    guard = GuardrailResult(name="errors", limit=1.0, evidence=2.0, holds=True)
    judged = AnalysisResult(
        started_at=0.0, guardrails=(guard, replace(guard, name="slow", evidence=0.0))
    )
    common.console().print(
        _render(make_view(judged, f"v2 has 10 % of traffic and is paused: {guard.summary}"))
    )
    output = capsys.readouterr().out
    assert (output.count(guard.summary), output.count("slow:"), len(output.splitlines())) == (
        1,
        1,
        3,
    )


def test_rollout_view_names_outliers(capsys: pytest.CaptureFixture[str]) -> None:
    outlier = ServerOutlier(
        server="r3", deployment="v2", place="slow", own=(90, 100), others=(5, 1000), evidence=8.0
    )
    view = make_view(AnalysisResult(started_at=0.0, outliers=(outlier,)), "v2 has 10 % of traffic")
    common.console().print(_render(view))
    assert capsys.readouterr().out.splitlines()[1].strip() == outlier.summary
    assert codec.to_json(view)["judged"]["outliers"][0]["server"] == "r3"


HOSTILE = "ok\x1b]0;owned\x07\x1b[2Jx\u202e\x9b31m\r\n::error::y\n  ::add-path::/e\n##[group]z"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("service", ["", "GITHUB_ACTIONS", "TF_BUILD"])
def test_safe_console_with_hostile_text_escapes_control_sequences(
    terminal: bool, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GITHUB_ACTIONS", "TF_BUILD"):
        monkeypatch.delenv(name, raising=False)
    if service:
        monkeypatch.setenv(service, "true")
    sink = io.StringIO()
    out = SafeConsole(file=sink, width=60, force_terminal=terminal, color_system=None, emoji=False)
    print_table(("name", HOSTILE), [[HOSTILE, "reason"]], out=out)
    print_text("{}: {}", "reason", HOSTILE, out=out)
    render_error(out, UserError(HOSTILE, where=HOSTILE, why=HOSTILE, remedy=HOSTILE))
    out.print(HOSTILE)
    found = sink.getvalue()
    assert not set("\x07\x1b\x9b\u202e\r") & set(found)
    assert "\\x1b" in found
    if service and not terminal:
        assert not any(line.lstrip().startswith("::") for line in found.splitlines())
        assert "##[" not in found


def test_print_json_escapes_control_characters_and_keeps_document() -> None:
    sink = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.__stdout__", sink)
        common.print_json({"reason": HOSTILE, "name": "模型"})
    assert json.loads(sink.getvalue()) == {"reason": HOSTILE, "name": "模型"}
    assert not set("\x07\x1b\x9b\u202e\r") & set(sink.getvalue())
    assert "模型" in sink.getvalue()
