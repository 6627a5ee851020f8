"""The HTML report of a release: one self-contained page, rendered from templates."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, digest_bytes, short_digest
from onnx_ops.domain.decision import Decision, GateResult, Verdict, combine_verdicts
from onnx_ops.domain.evidence import (
    EXPORT,
    Evidence,
    LatencyComparison,
    LatencySamples,
    PairedRatios,
)
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.gate import GATES
from onnx_ops.domain.quantization import SearchRecord
from onnx_ops.domain.release import BaseRelease, Choice, Lineage, Provenance, flatten_origins
from onnx_ops.domain.system_comparison import SystemExample
from onnx_ops.printable import show
from onnx_ops.reporting.comparison import (
    Pairs,
    base_comparisons,
    champion_comparisons,
    variant_rows,
)
from onnx_ops.reporting.description import made_by
from onnx_ops.reporting.formatting import (
    NOTHING,
    format_figure,
    number,
    result_figure,
    result_interval,
)
from onnx_ops.reporting.metrics import sampled_rows
from onnx_ops.reporting.plots import (
    SERIES,
    Figure,
    latency_figure,
    parity_figure,
    ratio_figure,
    search_figure,
    share,
    weights_figure,
)
from onnx_ops.reporting.slices import slice_figures, slice_tables
from onnx_ops.reporting.structure import structure_entries
from onnx_ops.reporting.svg import STYLE
from onnx_ops.reporting.variants_plot import pareto_figure
from onnx_ops.statistics.latency import compare
from onnx_ops.statistics.rules.parity_rules import EXPORT_OUTPUTS, OUTPUTS, WEIGHTS
from onnx_ops.statistics.variants.choice import estimate_prospects

if TYPE_CHECKING:
    from jinja2 import Environment

_MARKS = {Verdict.PASS: "✓", Verdict.INCONCLUSIVE: "?", Verdict.ERROR: "!", Verdict.FAIL: "✗"}


@functools.cache
def load_environment(*folders: Path) -> Environment:
    """Return the environment of the reports' templates; `folders` are searched first.

    Values are escaped. A value that is not given is an error.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent / "templates"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    filters = (short_digest, number, result_figure, result_interval)
    environment.filters |= {
        "figure": format_figure,
        **{function.__name__: function for function in filters},
    }
    environment.globals |= {"marks": _MARKS, "style": STYLE, "series": SERIES, "export": EXPORT}
    return environment


def render(template: str, **values: Any) -> str:
    """Return the page of a template; the page loads nothing from a network.

    The same values always give the same text.
    """
    return show(load_environment().get_template(template).render(values))


def release_report(
    decisions: Sequence[Decision],
    evidence: Sequence[Evidence],
    choices: Sequence[Choice],
    lineage: Lineage | None,
    versions: Mapping[str, str],
    *,
    digests: Mapping[tuple[str, str], Digest] | None = None,
    searches: Sequence[SearchRecord] = (),
    provenance: Provenance | None = None,
    base: BaseRelease | None = None,
    pairs: Pairs = lambda *_: (),
    example: SystemExample | None = None,
) -> str:
    """Return the HTML report of a release.

    It shows choices, comparisons, gate results, plots and measurement conditions.

    Args:
        decisions: decisions on every variant and target, in the order of the pipeline file.
        evidence: evidence for the decisions; only decisions with evidence have plots.
        versions: registered version by variant; empty before registration.
        digests: digests of the stored evidence by variant and target; by default, digests of its
            canonical text.
        searches: records of the searches that made variants.
        base, pairs: release of the base branch, and the function that compares its rows.
        example: values of the first step that differs from the project's own code.
    """
    known = {(e.variant, e.target): e for e in evidence}
    stored = _complete_digests(digests or {}, known)
    name, release = _name_release(lineage, evidence)
    chosen = {choice.target: choice.variant for choice in choices}
    return render(
        "release.html",
        title=f"{name}, release {short_digest(release)}" if release is not None else name,
        made_by="" if provenance is None else made_by(provenance),
        verdict=combine_verdicts(choice.verdict for choice in choices),
        choices=choices,
        chosen=chosen,
        decisions=decisions,
        versions=versions,
        variants=variant_rows(decisions, evidence),
        sampled=sampled_rows(evidence),
        comparisons=(
            champion_comparisons(choices, evidence),
            () if base is None else base_comparisons(choices, evidence, base, pairs),
        ),
        gates=list_gates(decisions, known, stored),
        slices=slice_tables(decisions),
        example=example,
        prospects=list(_list_prospects(decisions)),
        plots_by_target=_plot_targets(decisions, evidence, chosen),
        searches=[_describe_search(record) for record in searches],
        measured=[
            (e.variant, e.target, _describe_conditions(e, stored[e.variant, e.target]))
            for e in evidence
        ],
        origin={} if lineage is None else _describe_origin(lineage),
    )


def _complete_digests(
    digests: Mapping[tuple[str, str], Digest], evidence: Mapping[tuple[str, str], Evidence]
) -> dict[tuple[str, str], Digest]:
    computed = {
        place: digest_bytes(codec.dumps(e)) for place, e in evidence.items() if place not in digests
    }
    return {**digests, **computed}


def _name_release(
    lineage: Lineage | None, evidence: Sequence[Evidence]
) -> tuple[str, Digest | None]:
    """Return the name of a report's pipeline, and the digest of its release.

    Without lineage, they are those in the first evidence. Without evidence, the name is `release`,
    and the digest is None.
    """
    if lineage is not None:
        return lineage.pipeline, lineage.release
    if evidence:
        return evidence[0].pipeline, evidence[0].release
    return "release", None


def _describe_origin(lineage: Lineage) -> dict[str, str]:
    """Return what a release was made from: commit, data, origins, parameters."""
    return {
        "pipeline": lineage.pipeline,
        "release": lineage.release,
        "commit": lineage.git_sha or "not recorded",
        **{f"{data} data": digest for data, digest in sorted(lineage.data.items())},
        **flatten_origins(lineage),
        **dict(sorted(lineage.parameters.items())),
    }


def _describe_search(record: SearchRecord) -> dict[str, Any]:
    """Return the values of a search for the template.

    Nodes are by recipe, the most sensitive first.
    """
    return {
        "record": record,
        "figures": [
            figure for target in record.targets if (figure := search_figure(record, target))
        ],
        "time_heads": [f"time on {target}" for target in record.targets],
        "sensitivities": sorted(
            record.sensitivities, key=lambda s: (s.recipe, -(s.error or 0.0), s.node)
        ),
    }


def list_gates(
    decisions: Sequence[Decision],
    evidence: Mapping[tuple[str, str], Evidence],
    digests: Mapping[tuple[str, str], Digest],
) -> list[tuple[Decision, str, Digest | None, list[tuple[GateResult, list[str], list[str]]]]]:
    """Return each decision with its machine, its evidence's digest and its results.

    The results are in the form that the template macro `gate_table` shows. Evidence and digests are
    by variant and target.
    """
    groups = []
    for decision in decisions:
        place, e = "", evidence.get((decision.variant, decision.target))
        if e is not None:
            used = "provider not recorded"
            if e.runtime is not None:
                used = _list_nodes(e.runtime) or ", ".join(e.runtime.used) or "no provider"
            place = f"{e.hardware.cpu_model}, {e.hardware.cores} cores · {used}"
        results = [(result, *_describe_samples(result, e)) for result in decision.results]
        groups.append((decision, place, digests.get((decision.variant, decision.target)), results))
    return groups


def _describe_samples(result: GateResult, evidence: Evidence | None) -> tuple[list[str], list[str]]:
    """Return lines on the number of samples, and lines on the noise.

    The noise is that of a model compared with itself, and of preempted runs.
    """
    comparison = None if evidence is None else _find_comparison(result, evidence)
    if comparison is not None:
        return _describe_pairs(result, comparison)
    if not result.n:
        return [NOTHING], [NOTHING]
    if result.gate == "latency":
        return _describe_runs(result, None if evidence is None else evidence.latency)
    if result.gate == "parity" and result.metric == WEIGHTS.metric:
        return [f"{result.n} elements"], [NOTHING]
    if result.groups:
        return [f"{result.n} rows", f"{result.groups} groups"], [NOTHING]
    return [f"{result.n} {_name_counted(result)}".strip()], [NOTHING]


def _describe_runs(
    result: GateResult, latency: LatencySamples | None
) -> tuple[list[str], list[str]]:
    noise = [NOTHING if latency is None else f"{share(latency.preempted, latency.runs)} preempted"]
    return [f"{result.n} session pairs"] if result.unit == "x" else [
        f"{result.n} runs",
        "1 session",
    ], noise


def _name_counted(result: GateResult) -> str:
    """Return what `n` counts in the results of a gate; empty if the gate is unknown."""
    return GATES[result.gate].counts if result.gate in GATES else ""


def _describe_pairs(
    result: GateResult, comparison: LatencyComparison | PairedRatios
) -> tuple[list[str], list[str]]:
    """Return lines on the pairs of a ratio, and lines on the noise of the ratio.

    The noise is half the width of the interval of the model compared with itself. For latency, it
    is followed by the share of preempted runs.
    """
    selves = [pair for pair in comparison.self_log_ratios if pair]
    if selves:
        interval = compare(selves, tolerance=0.0)
        noise = [f"A/A ±{format_figure((interval.high - interval.low) / 2, '1')}"]
    else:
        noise = ["A/A not measured"]
    count = [f"{result.n} {'process' if _name_counted(result) == 'processes' else 'session'} pairs"]
    if isinstance(comparison, LatencyComparison):
        noise.append(f"{share(comparison.preempted, comparison.runs)} preempted")
        count.append(f"{comparison.runs} runs")
    return count if result.n else [NOTHING], noise


def _find_comparison(
    result: GateResult, evidence: Evidence
) -> LatencyComparison | PairedRatios | None:
    """Return the measurement behind a result about a ratio; None for other results."""
    if result.gate == "latency":
        timed = evidence.comparisons
        return next(
            (
                c
                for c in timed
                if result.metric in (f"ratio vs {c.against}", f"faster than {c.against}")
            ),
            None,
        )
    return next((r for r in evidence.ratios if result.metric == f"{r.figure} vs {r.against}"), None)


def _list_prospects(decisions: Sequence[Decision]) -> Iterator[tuple[str | float, ...]]:
    """Yield rows on the power of gates.

    A row has the probabilities of the verdicts on a variant without loss, and on a variant with a
    loss of twice the limit. Both are assumed to have the spread of the measured variant.
    """
    for decision in decisions:
        tried = sum(d.target == decision.target and d.variant != EXPORT for d in decisions)
        for result in decision.results:
            shares = estimate_prospects(result, tried if decision.variant != EXPORT else 1)
            if shares is not None:
                count = f"{result.n} in {result.groups} groups" if result.groups else str(result.n)
                yield decision.variant, decision.target, result.metric, result.limit, count, *shares


def _plot_targets(
    decisions: Sequence[Decision], evidence: Sequence[Evidence], chosen: Mapping[str, str | None]
) -> dict[str, list[Figure]]:
    targets = dict.fromkeys(e.target for e in evidence)
    return {
        target: _plot_target(target, decisions, evidence, chosen.get(target)) for target in targets
    }


def _plot_target(
    target: str, decisions: Sequence[Decision], evidence: Sequence[Evidence], chosen: str | None
) -> list[Figure]:
    """Return the plots of a target: size, latency, ratios, parity, weights and slices.

    The parity of each export of quantized variants is plotted once.
    """
    judged = {d.variant: d for d in decisions if d.target == target}
    here = [(e, judged.get(e.variant)) for e in evidence if e.target == target]
    figures = [
        pareto_figure(target, evidence, decisions, chosen),
        latency_figure(target, [e for e, _ in here]),
        *plot_ratios(here),
        *_plot_outputs(here),
        *_plot_exports(here),
        *(weights_figure(e.variant, e, decision) for e, decision in here),
        *slice_figures(decision for _, decision in here if decision is not None),
    ]
    return [figure for figure in figures if figure is not None]


def plot_ratios(entries: Sequence[tuple[Evidence, Decision | None]]) -> Iterator[Figure | None]:
    """Yield plots of the ratios of all variants: latency, then throughput and starts."""
    for e, decision in entries:
        yield from (ratio_figure(e, comparison, decision) for comparison in e.comparisons)
    for e, decision in entries:
        yield from (ratio_figure(e, ratio, decision) for ratio in e.ratios)


def _plot_outputs(entries: Sequence[tuple[Evidence, Decision | None]]) -> Iterator[Figure | None]:
    for e, decision in entries:
        if e.parity:
            yield parity_figure(f"{e.variant} on {e.target}", e.parity, decision, OUTPUTS.metric)


def _plot_exports(entries: Sequence[tuple[Evidence, Decision | None]]) -> Iterator[Figure | None]:
    """Yield a parity plot of each export of quantized variants, once.

    An export that is also a float variant is skipped.
    """
    seen = [e.parity for e, _ in entries]
    for e, decision in entries:
        if e.quantized and e.export_parity and e.export_parity not in seen:
            seen.append(e.export_parity)
            yield parity_figure(
                "the export of the quantized variants",
                e.export_parity,
                decision,
                EXPORT_OUTPUTS.metric,
            )


def _describe_conditions(e: Evidence, digest: Digest) -> dict[str, str]:
    scored = ", ".join(f"{one.cpu_model}, {one.cores} cores" for one in e.scored_on)
    conditions = {
        "rows scored on": scored,
        "machine": _describe_machine(e),
        "CPU features": ", ".join(e.hardware.cpu_flags) or "none recorded",
        **_describe_runtime(e),
        "conditions": ", ".join(f"{name} {value}" for name, value in sorted(e.conditions.items()))
        or "not recorded",
        **structure_entries(e),
        "compared with": e.baseline or "nothing: the export is its own baseline",
        "model manifest": e.manifest,
        "evidence": f"{digest} (schema {e.schema})",
        "raw samples": e.raw or "none",
        "failure": e.failure,
    }
    optional = ("rows scored on", "failure")
    return {name: text for name, text in conditions.items() if text or name not in optional}


def _describe_machine(e: Evidence) -> str:
    hardware = e.hardware
    cpu = f"{hardware.cpu_model}, {hardware.machine}, {hardware.cores} cores"
    use = "dedicated" if e.dedicated else "shared: absolute latency limits are advisory"
    return f"{cpu}, {format_figure(hardware.memory_bytes, 'B')} memory, {use}"


def _describe_runtime(e: Evidence) -> dict[str, str]:
    runtime, facts = f"{e.hardware.runtime} {e.hardware.runtime_version}", e.runtime
    if facts is None:
        return {
            "runtime": runtime,
            "providers asked for": "not recorded",
            "providers used": "not recorded",
        }
    return {
        "runtime": f"{runtime}; {facts.build}",
        "providers asked for": ", ".join(facts.asked),
        "providers used": _list_nodes(facts) or ", ".join(facts.used),
    }


def _list_nodes(facts: RuntimeFacts) -> str:
    return ", ".join(f"{name} ({nodes} nodes)" for name, nodes in sorted(facts.nodes.items()))
