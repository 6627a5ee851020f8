"""The gate table and the description of a version."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.release import Lineage
from onnx_ops.reporting.description import (
    DESCRIPTION_LIMIT,
    parse_reason,
    result_table,
    version_description,
)
from tests.support.golden import Golden

LINEAGE = Lineage(
    pipeline="digits-mlp",
    release=digest_bytes(b"release"),
    git_sha="0123456789abcdef0123",
    data={"test": digest_bytes(b"test"), "train": digest_bytes(b"train")},
)
LATENCY = GateResult(
    gate="latency",
    metric="ratio vs champion",
    limit="≤ 1.05×",
    verdict=Verdict.FAIL,
    reason="slower than the limit",
    estimate=1.12,
    low=1.09,
    high=1.15,
    unit="x",
    n=40,
)
SIZE = GateResult(
    gate="size",
    metric="size",
    limit="2 MB",
    verdict=Verdict.PASS,
    reason="small",
    estimate=1.5e6,
    unit="B",
    n=1,
)


def _decision(target: str, *results: GateResult) -> Decision:
    return Decision(variant="int8-static", target=target, results=results)


def test_result_table_rows_include_unit_interval_and_count() -> None:
    rows = result_table([_decision("cpu-1t", SIZE, LATENCY), _decision("cuda", SIZE)])
    assert [(row.target, row.result) for row in rows] == [
        ("cpu-1t", SIZE),
        ("cpu-1t", LATENCY),
        ("cuda", SIZE),
    ]
    assert [(row.measured, row.counted) for row in rows[:2]] == [
        ("1.5 MB", "1"),
        ("1.12× [1.09, 1.15]×", "40"),
    ]


def test_version_description_begins_with_verdict_and_worst_result(golden: Golden) -> None:
    decisions = {"cuda": _decision("cuda", SIZE), "cpu-1t": _decision("cpu-1t", SIZE, LATENCY)}
    text = version_description("int8-static", decisions, LINEAGE)
    golden("tables", text)


def test_version_description_without_results_is_inconclusive() -> None:
    assert version_description("fp32", {}, LINEAGE).startswith("INCONCLUSIVE: nothing was judged")
    empty = version_description("fp32", {"cpu-1t": _decision("cpu-1t")}, LINEAGE)
    assert empty.startswith("INCONCLUSIVE on cpu-1t: no binding gate applied")


def test_version_description_marks_advisory_results() -> None:
    advisory = GateResult(
        gate="latency",
        metric="p99",
        limit="5 ms",
        verdict=Verdict.FAIL,
        reason="slow",
        unit="s",
        advisory=True,
    )
    text = version_description("fp32", {"cpu-1t": _decision("cpu-1t", SIZE, advisory)}, LINEAGE)
    assert text.startswith("PASS on")
    assert "| fail (advisory) |" in text


def test_version_description_escapes_external_text() -> None:
    hostile = GateResult(
        gate="size",
        metric="",
        limit="<b>",
        verdict=Verdict.ERROR,
        reason="a|b\n[x](javascript:alert(1)) `c`",
    )
    text = version_description("fp32", {"t": _decision("t", hostile)}, LINEAGE)
    row = next(line for line in text.splitlines() if line.startswith("| size"))
    assert row.replace("\\|", "").count("|") == 7
    assert "&lt;b&gt;" in row
    assert r"\[x\](javascript" in row


def test_version_description_beyond_limit_counts_omitted_results() -> None:
    many = {f"t{n:03}": _decision(f"t{n:03}", SIZE, LATENCY) for n in range(12)}
    text = version_description("fp32", many, LINEAGE)
    assert len(text) <= DESCRIPTION_LIMIT
    shown = sum(line.startswith(("| size", "| latency")) for line in text.splitlines())
    assert shown == 24
    more = {f"t{n:03}": _decision(f"t{n:03}", SIZE, LATENCY, SIZE, SIZE) for n in range(40)}
    text = version_description("fp32", more, LINEAGE)
    shown = sum(line.startswith(("| size", "| latency")) for line in text.splitlines())
    assert f"{160 - shown} more results" in text
    assert text.startswith("FAIL on t000")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 120), st.integers(0, 8), st.text(max_size=600))
def test_version_description_stays_within_limit_and_ignores_order(
    targets: int, gates: int, reason: str
) -> None:
    results = [
        GateResult(gate="g", metric="m", limit="l", verdict=Verdict.FAIL, reason=reason)
        for _ in range(gates)
    ]
    decisions = {f"target-{n}": _decision(f"target-{n}", *results) for n in range(targets)}
    text = version_description("fp32", decisions, LINEAGE)
    assert len(text) <= DESCRIPTION_LIMIT
    assert text == version_description("fp32", dict(reversed(decisions.items())), LINEAGE)


@given(
    st.text(min_size=1, max_size=200).filter(
        lambda text: text.strip() == text and text.isprintable()
    )
)
def test_parse_reason_of_description_returns_written_reason(reason: str) -> None:
    result = GateResult(gate="latency", metric="p50", limit="", verdict=Verdict.FAIL, reason=reason)
    decision = Decision(variant="fp32", target="cpu-1t", results=(result,))
    written = version_description("fp32", {"cpu-1t": decision}, LINEAGE)
    assert parse_reason(written, "cpu-1t") == f"latency: {reason}"
    assert parse_reason(written, "cpu") == ""
