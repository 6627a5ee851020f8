"""The HTML report of a release."""

from __future__ import annotations

import math
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.evidence import (
    ColdStartMeasurement,
    Divergence,
    Evidence,
    LatencyComparison,
    LatencySamples,
    PairedCounts,
    PairedRatios,
    ParityMeasurement,
    ThroughputMeasurement,
    WeightMeasurement,
)
from onnx_ops.domain.gate import (
    ColdStartGate,
    Gate,
    LatencyGate,
    MemoryGate,
    MetricGate,
    ParityGate,
    SizeGate,
    ThroughputGate,
)
from onnx_ops.domain.release import Choice, Lineage
from onnx_ops.printable import show
from onnx_ops.reporting.html import release_report
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.output_columns import LARGEST
from onnx_ops.statistics.variants.choice import choose
from tests.support.evidence import CPU, CPU_FACTS, HARDWARE, make_evidence
from tests.support.golden import Golden

GATES: tuple[Gate, ...] = (
    ParityGate(),
    MetricGate(max_drop=0.02, min=0.9),
    LatencyGate(max_regression=0.05, p99=0.005),
    SizeGate(max=2_000_000),
)
LINEAGE = Lineage(
    pipeline="digits",
    release=digest_bytes(b"release"),
    git_sha="0123abcd",
    data={"test": digest_bytes(b"t")},
)
VOID = {"meta", "br"}
TARGETS = ("cpu-1t", "cpu-4t")


def parity(ratio: float, *, mismatch: str = "") -> tuple[ParityMeasurement, ...]:
    return tuple(
        ParityMeasurement(
            output="y",
            group=group,
            rows=512,
            error=r * 1e-7,
            noise=1e-7,
            ratio=r,
            mismatch=mismatch if i == 0 else "",
        )
        for i, (group, r) in enumerate((("real", ratio), ("zeros", 0.0), ("spikes", ratio / 2)))
    )


def evidence_of(variant: str = "fp32", target: str = "cpu-1t", **changes: Any) -> Evidence:
    quantized = variant != "fp32"
    shift = -0.3 if quantized else 0.0
    sorted_ns = tuple(int((10_000 + 20 * i) * math.exp(shift)) for i in range(800))
    found = make_evidence(
        variant,
        pipeline="digits",
        target=target,
        release=LINEAGE.release,
        manifest=digest_bytes(variant.encode()),
        target_digest=digest_bytes(target.encode()),
        size_bytes=10_000 if quantized else 40_000,
        hardware=replace(HARDWARE, cpu_model="Example CPU", cores=4),
        conditions={"load": "0.5"},
        runtime=replace(CPU_FACTS, nodes={CPU: 12}),
        baseline="fp32" if quantized else "",
        parity=() if quantized else parity(1.5),
        export_parity=parity(1.5),
        weights=(WeightMeasurement(tensor="w", steps=0.5, elements=64),) if quantized else (),
        metrics=(
            PairedCounts(
                metric="accuracy", against="", n=2000, both=1960, only_baseline=0, only_candidate=0
            ),
            *(
                (
                    PairedCounts(
                        metric="accuracy",
                        against="fp32",
                        n=2000,
                        both=1955,
                        only_baseline=5,
                        only_candidate=5,
                    ),
                )
                if quantized
                else ()
            ),
        ),
        comparisons=(comparison(shift),) if quantized else (),
        latency=LatencySamples(
            batch=1,
            runs=810,
            preempted=10,
            quantiles_ns={"p50": float(sorted_ns[400])},
            sorted_ns=sorted_ns,
        ),
    )
    return replace(found, **changes)


def comparison(shift: float, against: str = "fp32") -> LatencyComparison:
    wobble = (-0.004, 0.003, 0.0, 0.005, -0.002)
    return LatencyComparison(
        against=against,
        baseline=digest_bytes(b"fp32"),
        log_ratios=tuple((shift + w, shift + 2 * w) for w in wobble),
        self_log_ratios=tuple((w, w / 2) for w in wobble),
        runs=400,
        preempted=8,
    )


def ratios(figure: str, shift: float) -> PairedRatios:
    like = comparison(shift)
    return PairedRatios(
        figure=figure,
        against=like.against,
        baseline=like.baseline,
        log_ratios=tuple(pair[:1] for pair in like.log_ratios),
        self_log_ratios=like.self_log_ratios,
    )


def page_of(
    evidence: list[Evidence],
    gates: tuple[Gate, ...] = GATES,
    versions: dict[str, str] | None = None,
) -> str:
    decisions = [judge(gates, e) for e in evidence]
    targets = dict.fromkeys(e.target for e in evidence)
    choices = [choose([d for d in decisions if d.target == target]) for target in targets]
    return release_report(decisions, evidence, choices, LINEAGE, versions or {})


def release() -> list[Evidence]:
    return [
        evidence_of(variant, target) for target in TARGETS for variant in ("fp32", "int8-static")
    ]


class Page(HTMLParser):
    """A parser that collects text and tags, and checks the order of closing tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_release_report_begins_with_verdict_of_each_target() -> None:
    text = Page(page_of(release(), versions={"fp32": "1", "int8-static": "2"})).text
    for target in TARGETS:
        assert (
            f"PASS {target} : int8-static (version 2) is chosen, because int8-static passes, 0.74"
            in text
        )
        assert text.index(f"{target} : int8-static") < text.index("Gates")
    assert f"A variant is chosen for {', '.join(TARGETS)}." in text


def test_release_report_shows_values_with_units_intervals_and_counts() -> None:
    text = Page(page_of(release())).text
    assert "0.741× [0.734, 0.748]× 5 session pairs 400 runs A/A ±0." in text
    assert "2% preempted" in text
    assert "98% [97.4, 98.5]% 2000 rows" in text
    assert "0.5 steps – 64 elements" in text
    assert "1.5× – 1536 rows" in text
    assert "800 runs 1 session 1.23% preempted" in text
    assert "latency p99 ✓ PASS advisory ≤" in text
    assert "Example CPU, 4 cores · CPUExecutionProvider (12 nodes)" in text


def test_release_report_shows_each_verdict_and_reason() -> None:
    evidence = [
        evidence_of(
            parity=parity(300.0),
            divergence=Divergence(node="conv1", op_type="Conv", scope="body.0", ratio=77.0),
        ),
        evidence_of("int8-static", comparisons=()),
        evidence_of(
            "int8-late", failure="the provider is missing", latency=None, comparisons=(), metrics=()
        ),
        evidence_of("int8-good"),
    ]
    page = page_of(evidence)
    text = Page(page).text
    for verdict in Verdict:
        assert f'class="verdict {verdict.value}"' in page
    for one in evidence:
        decision = judge(GATES, one)
        assert decision.results
        for result in decision.results:
            assert " ".join(result.reason.split()) in text
    assert "first diverging node: conv1 (Conv)" in text
    assert "int8-good is chosen" in text


def test_release_report_without_choice_gives_reason() -> None:
    page = release_report(
        [],
        [],
        [Choice(target="gpu", variant=None, verdict=Verdict.ERROR, reason="no GPU")],
        None,
        {},
    )
    text = Page(page).text
    assert "! ERROR gpu : no variant" in text
    assert "no GPU" in text
    nothing = release_report([Decision(variant="fp32", target="gpu", results=())], [], [], None, {})
    assert "no gate applied" in nothing
    assert "INCONCLUSIVE" in nothing


def test_release_report_uses_no_network_and_no_script() -> None:
    page = page_of(release())
    assert "//" not in page.partition("<body>")[0].replace("<!doctype html>", "")
    for word in (
        "http:",
        "https:",
        "url(",
        "@import",
        "<script",
        "<link",
        "<img",
        "<iframe",
        "javascript:",
    ):
        assert word not in page
    for tag, attributes in Page(page).tags:
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes), tag
    assert "default-src 'none'" in unescape(page)


def test_release_report_escapes_text_from_data() -> None:
    evil = "</svg><script>alert('x')</script>\"&\x1b[2J\u202e"
    one = evidence_of(
        evil,
        evil,
        conditions={evil: evil},
        weights=(WeightMeasurement(tensor=evil, steps=0.5, elements=3),),
        comparisons=(comparison(-0.2, evil),),
        baseline=evil,
        export_parity=(
            ParityMeasurement(
                output=evil, group=evil, rows=3, error=0, noise=1, ratio=0, mismatch=evil
            ),
        ),
        divergence=Divergence(note=evil),
        failure="",
    )
    lineage = Lineage(pipeline=evil, release=LINEAGE.release, git_sha=evil, parameters={evil: evil})
    choice = Choice(target=evil, variant=evil, verdict=Verdict.PASS, reason=evil)
    result = GateResult(
        gate=evil, metric=evil, limit=evil, verdict=Verdict.FAIL, reason=evil, estimate=1, unit=evil
    )
    decisions = [judge(GATES, one), Decision(variant=evil, target=evil, results=(result,))]
    page = release_report(decisions, [one], [choice], lineage, {evil: evil})
    assert "<script" not in page
    assert not set("\x1b\u202e") & set(page)
    assert "alert('x')" not in page
    parsed = Page(page)
    assert parsed.open == []
    assert show(evil) in parsed.text


def test_release_report_of_same_release_returns_same_well_formed_markup() -> None:
    page = page_of(release())
    again = [codec.loads(codec.dumps(e), Evidence) for e in release()]
    assert page_of(again) == page
    assert Page(page).open == []


def test_release_report_shows_digest_of_stored_evidence() -> None:
    one = evidence_of()
    page = page_of([one])
    assert short_digest(digest_bytes(codec.dumps(one))) in page
    stored = digest_bytes(b"as an older version wrote it")
    page = release_report(
        [judge(GATES, one)], [one], [], LINEAGE, {}, digests={("fp32", "cpu-1t"): stored}
    )
    assert stored in page
    assert short_digest(digest_bytes(codec.dumps(one))) not in page


@pytest.mark.parametrize(
    "changes",
    [
        {"parity": parity(LARGEST)},
        {"parity": parity(1.0, mismatch="shape (1,), the source gives (2,)")},
        {"parity": parity(math.nan)},
        {"latency": None},
        {"latency": LatencySamples(batch=1, runs=1, preempted=1, quantiles_ns={}, sorted_ns=(0,))},
        {"latency": LatencySamples(batch=1, runs=1, preempted=0, quantiles_ns={}, sorted_ns=(5,))},
        {"comparisons": (replace(comparison(0.0), log_ratios=((0.1,),), self_log_ratios=()),)},
        {"comparisons": (replace(comparison(0.0), log_ratios=((1e3, 1e3), (-1e3,)), runs=0),)},
        {"comparisons": (replace(comparison(0.0), log_ratios=((math.nan,),)),)},
        {"comparisons": (replace(comparison(0.0), log_ratios=((), ())),)},
        {"ratios": (replace(ratios("load", 0.0), log_ratios=((math.nan,),)),)},
        {"ratios": (replace(ratios("concurrency 4", 0.0), log_ratios=()),)},
        {"weights": (WeightMeasurement(tensor="w", steps=LARGEST, elements=1),)},
        {
            "weights": tuple(
                WeightMeasurement(tensor=f"w{i}", steps=0.0, elements=0) for i in range(40)
            )
        },
        {
            "metrics": (
                PairedCounts(
                    metric="accuracy", against="", n=3, both=5, only_baseline=0, only_candidate=0
                ),
            )
        },
        {"runtime": None, "size_bytes": 0},
    ],
)
def test_release_report_of_incomplete_or_extreme_evidence_is_well_formed(
    changes: dict[str, Any],
) -> None:
    one = (
        evidence_of("int8-static", **changes) if "parity" not in changes else evidence_of(**changes)
    )
    decision = judge(GATES, one)
    digests = {(one.variant, one.target): digest_bytes(b"evidence")}
    page = release_report([decision], [one], [], LINEAGE, {}, digests=digests)
    assert Page(page).open == []
    assert "nan" not in "".join(
        str(a) for tag, a in Page(page).tags if tag in ("polyline", "circle")
    )


def test_release_report_plots_show_measurements_and_limits(golden: Golden) -> None:
    page = Page(page_of(release()))
    golden(
        "tables",
        "\n".join(str(attributes["aria-label"]) for tag, attributes in page.tags if tag == "svg"),
    )
    for target in TARGETS:
        assert f"Latency ratio: int8-static against fp32 on {target}" in page.text
    assert "limit 1.05×" in page.text
    assert "n = 64 elements" in page.text
    assert "limit 0.51 steps" in page.text


def test_release_report_has_rows_and_plots_of_throughput_cold_start_and_memory() -> None:
    figures = tuple(ratios(name, 0.1) for name in ("concurrency 4", "load", "first", "peak"))
    evidence = evidence_of(
        "int8-static",
        ratios=figures,
        throughput=(
            ThroughputMeasurement(
                concurrency=4, batch=1, requests=500, per_second=(200.0, 210.0, 190.0, 205.0, 195.0)
            ),
        ),
        starts=ColdStartMeasurement(
            batch=1,
            requests=20,
            load_s=(0.1,) * 6,
            first_s=(0.01,) * 6,
            peak_bytes=(12_000_000,) * 6,
        ),
    )
    gates = (
        LatencyGate(faster_than="fp32"),
        ThroughputGate(max_regression=0.05, min=150.0),
        ColdStartGate(load=0.5, max_regression=0.2),
        MemoryGate(max=10**7, max_regression=0.5),
    )
    text = Page(page_of([evidence], gates)).text
    for expected in (
        "faster than fp32",
        "200 req/s",
        "[190, 210] req/s",
        "5 session pairs",
        "5 process pairs",
        "6 processes",
        "12 MB",
        "Time per request at concurrency 4 ratio: int8-static against fp32 on cpu-1t",
        "Load time ratio: int8-static against fp32 on cpu-1t",
        "Peak memory ratio: int8-static against fp32 on cpu-1t",
    ):
        assert expected in text
