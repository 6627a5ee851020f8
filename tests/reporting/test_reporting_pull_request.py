"""The page about a commit: worst result first, no mentions, bounded length.

A mention would notify a user.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.release import Choice
from onnx_ops.reporting.pull_request import LIMIT, Checked, overall, page, title
from tests.support.golden import Golden

RESULT = GateResult(gate="size", metric="", limit="1 MB", verdict=Verdict.FAIL, reason="too large")


def checked(
    verdict: Verdict, reason: str = "because", results: int = 1, file: str = "a.yaml"
) -> Checked:
    decision = Decision(
        variant="fp32", target="cpu-1t", results=(replace(RESULT, reason=reason),) * results
    )
    choice = Choice(target="cpu-1t", variant=None, verdict=verdict, reason=reason)
    return Checked(
        file=file, because=("x.py",), verdict=verdict, choices=(choice,), decisions=(decision,)
    )


def test_pull_request_page_lists_worst_verdict_first_and_overall_returns_worst(
    golden: Golden,
) -> None:
    several = [checked(verdict, file=f"{verdict.value}.yaml") for verdict in Verdict]
    rendered = page(several, commit="abc1234")
    places = [
        rendered.index(f"{verdict.value}.yaml")
        for verdict in sorted(Verdict, key=lambda v: -v.rank)
    ]
    assert places == sorted(places)
    assert overall(several) is Verdict.FAIL
    golden("tables", title(several))


def test_overall_without_pipelines_returns_none(golden: Golden) -> None:
    assert overall([]) is None
    golden("tables", title([]))


@given(st.text(max_size=300))
def test_pull_request_page_escapes_mentions_and_markup(text: str) -> None:
    plain = page([checked(Verdict.PASS)], commit="abc1234")
    rendered = page([checked(Verdict.PASS, f"@team | <b>{text}")], commit="abc1234")
    assert "@" not in rendered
    assert rendered.count("<") == plain.count("<")


@given(st.integers(1, 40), st.integers(1, 300))
def test_pull_request_page_stays_within_limit(pipelines: int, results: int) -> None:
    assert (
        len(page([checked(Verdict.FAIL, "long " * 40, results)] * pipelines, commit="abc1234"))
        <= LIMIT
    )
