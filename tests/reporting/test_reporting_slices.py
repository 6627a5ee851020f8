"""Reports on slices: the order of rows, and slices that are not judged."""

from __future__ import annotations

import re

import pytest

from onnx_ops.domain.decision import Decision, GateResult, SliceResult, Verdict
from onnx_ops.reporting.judgement import Heading, html_report, markdown_page
from onnx_ops.reporting.pull_request import Checked, page
from onnx_ops.reporting.slices import slice_figures, slice_tables, slices_markdown


def one(name: str, verdict: Verdict | None, estimate: float | None, n: int) -> SliceResult:
    return SliceResult(
        slice=name,
        verdict=verdict,
        reason=f"not judged: {n} rows" if verdict is None else "why",
        n=n,
        estimate=estimate,
        low=None if estimate is None else estimate - 0.02,
        high=None if estimate is None else estimate + 0.02,
        p_value=None if estimate is None else 0.04,
    )


SLICES = (
    one("country=AT", Verdict.FAIL, -0.1, 200),
    one("country=<b>", Verdict.INCONCLUSIVE, -0.04, 90),
    one("country=DE", Verdict.PASS, 0.0, 400),
    one("country=LI", None, None, 12),
)


def decision(*slices: SliceResult) -> Decision:
    result = GateResult(
        gate="slices",
        metric="accuracy by slice vs fp32",
        limit="drop ≤ 5% in each slice",
        verdict=Verdict.FAIL,
        reason="country=AT",
        estimate=-0.1,
        bound=-0.05,
        unit="1",
        slices=slices,
    )
    return Decision(variant="int8", target="cpu", results=(result,))


def test_slice_figure_has_one_row_per_slice_in_order() -> None:
    (figure,) = slice_figures([decision(*SLICES)])
    names = re.findall(r">(country=[^<]*)</text>", figure.svg)
    assert names == ["country=AT", "country=&lt;b&gt;", "country=DE", "country=LI"]
    assert ">12 rows</text>" in figure.svg
    assert "change of accuracy against fp32 (%)" in figure.svg
    assert "Not judged because of too few rows or groups: country=LI (12 rows)." in figure.caption


def test_slice_figure_of_many_slices_shows_worst_30() -> None:
    many = [one(f"s={number}", Verdict.PASS, (number - 50) / 1000, 100) for number in range(50)]
    (figure,) = slice_figures([decision(*many)])
    assert figure.svg.count("<circle") == 30
    assert re.findall(r">(s=\d+)</text>", figure.svg) == [each.slice for each in many[:30]]
    assert figure.caption.startswith("The worst 30 of 50")


@pytest.mark.parametrize("slices", [(), (SLICES[3],)])
def test_slice_figure_without_judged_slice_is_left_out(slices: tuple[SliceResult, ...]) -> None:
    assert list(slice_figures([decision(*slices)])) == []


def test_slices_markdown_escapes_names_and_lists_slices_that_are_not_judged() -> None:
    (text,) = slices_markdown([decision(*SLICES)])
    assert "country=&lt;b&gt;" in text
    assert "❌ fail | -10% \\[-12, -8\\]% | 200 | 0.04" in text
    assert "not judged because of too few rows or groups: country=LI (12 rows)." in text


def test_slice_table_has_all_slices_and_short_table_only_judged_slices() -> None:
    (table,) = slice_tables([decision(*SLICES)])
    assert [cells[0] for _, cells in table.list_cells()] == [each.slice for each in SLICES]
    assert [cells[0] for _, cells in table.list_worst()] == [each.slice for each in SLICES[:3]]


def test_pages_of_pull_request_and_judgement_show_slices() -> None:
    decided = decision(*SLICES)
    heading = Heading(
        baseline="a", candidate="b", kind="int8", rows="10", times="", sizes=(1, 1),
        verdict=Verdict.FAIL,
    )  # fmt: skip
    checked = Checked(file="p.yaml", because=(), verdict=Verdict.FAIL, decisions=(decided,))
    for text in (page([checked], commit="c"), markdown_page(heading, [decided])):
        assert "country=AT" in text
    html = html_report(heading, [decided], [])
    assert html.index("<h2>Slices</h2>") < html.index("Forest plot of accuracy by slice vs fp32")
