"""The comparison of a release with the champion and with its base branch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import (
    ChampionFacts,
    Evidence,
    Interval,
    PairedCounts,
    ScoreComparison,
)
from onnx_ops.domain.release import BaseRelease, Choice, Provenance
from onnx_ops.reporting.comparison import (
    ComparedMetric,
    ModelComparison,
    base_comparisons,
    champion_comparisons,
    summarize_metrics,
    variant_rows,
)
from onnx_ops.reporting.description import made_by, version_description
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.pull_request import Checked, page
from onnx_ops.reporting.variants_plot import pareto_figure
from onnx_ops.statistics.judge import judge
from tests.reporting.test_reporting_html import GATES, LINEAGE, comparison, evidence_of
from tests.support.golden import Golden
from tests.support.must import must

CHOICE = Choice(target="cpu-1t", variant="fp32", verdict=Verdict.PASS, reason="it passes")
CHAMPION = ChampionFacts(version="3", manifest=digest_bytes(b"champion"), size_bytes=50_000)
ERROR = Interval(estimate=57.3, low=52.1, high=64.3)
MINE = evidence_of(
    baseline="champion",
    champion=CHAMPION,
    metrics=(
        PairedCounts(
            metric="accuracy", against="", n=2000, both=1960, only_baseline=0, only_candidate=0
        ),
        PairedCounts(
            metric="accuracy",
            against="champion",
            n=2000,
            both=1940,
            only_baseline=10,
            only_candidate=20,
        ),
    ),
    scores=(
        ScoreComparison(metric="rmse", against="", n=2000, candidate=ERROR),
        ScoreComparison(
            metric="rmse",
            against="champion",
            n=2000,
            candidate=ERROR,
            baseline=60.1,
            ratio=Interval(estimate=0.953, low=0.93, high=0.98),
        ),
    ),
    comparisons=(comparison(-0.1, "champion"),),
)
BASE = BaseRelease(
    branch="main", commit="0123456789abcdef", choices=(CHOICE,), evidence=(evidence_of(),)
)
MADE = Provenance(
    at="2026-11-25 10:41 UTC", author="Ada Example", commit="0123456789abcdef", branch="main"
)


def rows_of(found: tuple[ModelComparison, ...]) -> dict[str, ComparedMetric]:
    return {row.metric: row for one in found for row in one.rows}


def changed(**changes: Any) -> Evidence:
    return evidence_of(manifest=digest_bytes(b"new"), **changes)


def test_champion_comparisons_use_paired_evidence() -> None:
    found = rows_of(champion_comparisons([CHOICE], [MINE]))
    assert found["accuracy"].theirs == "97.5% [96.8, 98]%"
    assert found["accuracy"].change == "+0.5 [+0.0519, +0.988] points"
    assert found["rmse"].change == "0.953× [0.93, 0.98]×"
    assert found["median latency"].change.startswith("0.905× [")
    assert found["size"] == ComparedMetric(
        metric="size", ours="40 kB", theirs="50 kB", change="0.8×"
    )


@pytest.mark.parametrize(
    ("mine", "part"),
    [
        (evidence_of(), "cpu-1t: this release was measured without a champion"),
        (
            replace(MINE, champion=replace(CHAMPION, manifest=MINE.manifest)),
            "the same files as the champion (version 3)",
        ),
    ],
)
def test_champion_comparisons_without_champion_or_with_same_files_give_reason(
    mine: Evidence, part: str
) -> None:
    (found,) = champion_comparisons([CHOICE], [mine])
    assert found.rows == ()
    assert part in found.note


def test_base_comparisons_without_pairs_compare_values_side_by_side() -> None:
    mine = changed(size_bytes=30_000, scores=MINE.scores[:1])
    found = rows_of(base_comparisons([CHOICE], [mine], BASE))
    assert found["accuracy"].change == "0 points"
    assert found["rmse"] == ComparedMetric(
        metric="rmse", ours="57.3 [52.1, 64.3]", theirs="not measured", change="–"
    )
    assert (found["median latency"].change, found["size"].change) == ("1×", "0.75×")


def test_base_comparisons_of_same_rows_are_paired() -> None:
    counts = PairedCounts(
        metric="accuracy", against="base", n=2000, both=1940, only_baseline=10, only_candidate=20
    )
    found = rows_of(base_comparisons([CHOICE], [changed()], BASE, lambda mine, theirs: (counts,)))
    assert found["accuracy"].change == "+0.5 [+0.0519, +0.988] points"


@pytest.mark.parametrize(
    ("mine", "base", "part"),
    [
        (evidence_of(), BASE, "the same files as fp32 of main at 0123456789ab"),
        (
            changed(),
            replace(BASE, choices=()),
            "No evidence is recorded for main at 0123456789ab on cpu-1t",
        ),
        (
            changed(),
            BaseRelease(branch="main", why="git found no commit 'main'"),
            "git found no commit",
        ),
        (
            replace(
                MINE,
                manifest=digest_bytes(b"n"),
                champion=replace(CHAMPION, manifest=evidence_of().manifest),
            ),
            BASE,
            "is the champion (version 3), which is compared above",
        ),
    ],
)
def test_base_comparisons_without_evidence_or_with_files_of_release_or_champion_give_reason(
    mine: Evidence, base: BaseRelease, part: str
) -> None:
    (found,) = base_comparisons([CHOICE], [mine], base)
    assert found.rows == ()
    assert part in found.note


def test_base_comparisons_from_another_machine_name_it() -> None:
    other = replace(evidence_of(), hardware=replace(evidence_of().hardware, cpu_model="Other CPU"))
    (found,) = base_comparisons([CHOICE], [changed()], replace(BASE, evidence=(other,)))
    assert "another machine: Other CPU" in found.note


def test_variant_rows_show_metrics_of_each_variant_and_champion() -> None:
    quantized = evidence_of("int8-static")
    rows = variant_rows([judge(GATES, one) for one in (MINE, quantized)], [MINE, quantized])
    figures = {
        (row.variant, row.version): {name: one.figure for name, one in row.metrics.items()}
        for row in rows
    }
    assert figures["fp32", ""] == {"accuracy": "98% [97.4, 98.5]%", "rmse": "57.3 [52.1, 64.3]"}
    assert figures["int8-static", ""] == {"accuracy": "98% [97.4, 98.5]%"}
    assert figures["champion", "3"] == {"accuracy": "97.5% [96.8, 98]%", "rmse": "60.1"}


def test_variant_rows_of_compared_variant_scale_median_of_baseline_by_ratio() -> None:
    """The machine was four times as slow while the variant's own runs were timed."""
    source, quantized = evidence_of(), evidence_of("int8-static")
    assert quantized.latency is not None
    slow = tuple(4 * ns for ns in quantized.latency.sorted_ns)
    quantized = replace(quantized, latency=replace(quantized.latency, sorted_ns=slow))
    evidence = [source, quantized]
    decisions = [judge(GATES, one) for one in evidence]
    rows = variant_rows(decisions, evidence)
    own, beside = (row.latency for row in rows)
    ((_, ratio),) = rows[1].ratios
    assert own is not None
    assert beside is not None
    assert beside.estimate == pytest.approx(own.estimate * ratio.estimate)
    assert beside.low == pytest.approx(own.estimate * ratio.low)
    assert beside.estimate < own.estimate
    figure = must(pareto_figure("cpu-1t", evidence, decisions, None))
    assert [key.split(", ")[1] for _, key in figure.keys] == [
        f"median {median.text()}".split(", ")[0] for median in (own, beside)
    ]


def test_version_description_shows_metrics_between_verdict_and_gate_table(golden: Golden) -> None:
    golden("tables", summarize_metrics(MINE))
    text = version_description(
        "fp32",
        {"cpu-1t": judge(GATES, MINE)},
        LINEAGE,
        summaries=[summarize_metrics(MINE)],
        provenance=MADE,
    )
    assert (
        text.index("PASS on cpu-1t")
        < text.index("- cpu-1t: accuracy")
        < text.index("| gate |")
        < text.index("Ada")
    )


def test_made_by_shows_unknown_fields_and_uncommitted_changes() -> None:
    assert made_by(Provenance()) == "date unknown · author unknown · commit unknown"
    assert made_by(replace(MADE, changed=True)).endswith(
        "commit 0123456789ab (main), with uncommitted changes"
    )


def test_report_and_pull_request_comment_include_comparisons(golden: Golden) -> None:
    decision = judge(GATES, MINE)
    mine = replace(MINE, manifest=digest_bytes(b"new"))
    html = release_report([decision], [mine], [CHOICE], LINEAGE, {}, provenance=MADE, base=BASE)
    assert all(
        part in html
        for part in ("Ada Example", "Against the champion", "Against main", "serves now")
    )
    comment = page(
        [
            Checked(
                file="digits.yaml",
                because=("train.py",),
                verdict=Verdict.PASS,
                choices=(CHOICE,),
                comparisons=(
                    *champion_comparisons([CHOICE], [mine]),
                    *base_comparisons([CHOICE], [mine], BASE),
                ),
                variants=variant_rows([decision], [mine]),
                made_by=made_by(MADE),
            )
        ],
        commit="0123456789abcdef",
    )
    golden("tables", comment)
