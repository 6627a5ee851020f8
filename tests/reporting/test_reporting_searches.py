"""The section of a search in the report: plot, contributions of nodes, all trials."""

from __future__ import annotations

from dataclasses import replace

from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.quantization import (
    Budget,
    FrontierSlot,
    NodeContribution,
    SearchRecord,
    Sensitivity,
    Trial,
)
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.plots import search_figure
from tests.support.golden import Golden


def drawn(svg: str) -> None:
    """Assert that the plot is one closed element, and that all its values are numbers."""
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert "nan" not in svg.lower().replace("dominant", "")


def trial(recipe: str, drop: float, time: float, size: int, *excluded: str) -> Trial:
    ratio = Interval(estimate=time, low=0.9 * time, high=1.1 * time)
    return Trial(
        recipe=recipe,
        excluded=excluded,
        drop=drop,
        size_bytes=size,
        ratios={"cpu": ratio},
        why="to see",
    )


RECORD = SearchRecord(
    name="best",
    metric="accuracy",
    rows=400,
    export_bytes=4000,
    targets=("cpu",),
    budget=Budget(metric_drop=0.005, size=3000, p99=0.005),
    trials=(
        trial("static", 0.15, 0.4, 1000),
        trial("dynamic", 0.002, 0.5, 1100, "head<b>"),
        Trial(recipe="fp16", failure="the library failed"),
    ),
    sensitivities=(Sensitivity(recipe="dynamic", node="head<b>", error=0.7),),
    contributions=(
        NodeContribution(
            recipe="dynamic", node="head<b>", metric=0.11, time={"cpu": 1.04}, kept=True
        ),
    ),
    pareto_front=(1,),
    slots=(
        FrontierSlot(role="fast", trial=1),
        FrontierSlot(role="small", reason="best-fast is also the best for this role"),
    ),
    stopped="every recipe was tried",
    seconds=41.0,
)


def test_search_figure_shows_pareto_front_budget_and_variants(golden: Golden) -> None:
    figure = search_figure(RECORD, "cpu")
    assert figure is not None
    drawn(figure.svg)
    golden("tables", "\n".join([*(text for _, text in figure.keys), figure.caption]))
    assert search_figure(RECORD, "gpu") is None
    assert search_figure(replace(RECORD, trials=()), "cpu") is None


def test_search_figure_of_single_trial_without_loss_is_drawn() -> None:
    alike = replace(
        RECORD,
        trials=(trial("static", 0.0, 1.0, 1000),),
        budget=Budget(metric_drop=0.0),
        slots=(),
        pareto_front=(),
    )
    figure = search_figure(alike, "cpu")
    assert figure is not None
    drawn(figure.svg)


def test_release_report_of_search_shows_node_contributions_and_escapes_names() -> None:
    page = release_report([], [], [], None, {}, searches=(RECORD,))
    assert "<h2>Search best</h2>" in page
    assert "11 points" in page
    assert "1.04×" in page
    assert "head&lt;b&gt;" in page
    assert "head<b>" not in page
    assert "the library failed" in page
    assert f"empty: {RECORD.slots[1].reason}" in page
    assert "All 3 models tried" in page
    for limit in ("0.5% of accuracy", "at most 3 kB", "p99 within 5 ms"):
        assert limit in page
    figure = search_figure(RECORD, "cpu")
    assert figure is not None
    assert figure.title in page
