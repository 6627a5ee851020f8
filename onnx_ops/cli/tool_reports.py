"""What the tools for single files print, for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from onnx_ops import codec
from onnx_ops.cli.tables import console
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.gate import Verdict
from onnx_ops.domain.hardware import HardwareFingerprint
from onnx_ops.domain.structure import Advice
from onnx_ops.reporting.figures import format_figure, format_interval, number
from onnx_ops.reporting.structure import advice_lines, coverage_lines, tree_lines
from onnx_ops.reporting.textplot import ratio_plot
from onnx_ops.stages.bench import PER_SECOND, Alone, Figure
from onnx_ops.stages.bench_pair import Paired, Versus
from onnx_ops.stages.compare import RULE, Difference, Parity

_COLOURS = {Verdict.PASS: "green", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "magenta", Verdict.FAIL: "red"}

_RUNS = "single runs that kept their core"
_PROCESSES = "fresh processes, file in the page cache; median"
_UNDER_LOAD = "fresh sessions under that many requests; median"
_OF = {"p50": _RUNS, "p90": _RUNS, "p99": _RUNS, "load": _PROCESSES, "first": _PROCESSES, "peak": _PROCESSES}
"""What the figures of one model are of; those that are not named are throughputs."""


def parity_document(found: Parity, a: Path, b: Path, target: str, source: str) -> dict[str, Any]:
    return {
        "tool": "compare",
        "a": {"path": str(a), "digest": found.a},
        "b": {"path": str(b), "digest": found.b},
        "target": target,
        "inputs": source,
        "rule": RULE,
        "verdict": found.verdict.value,
        "reason": found.reason,
        "differences": [codec.to_json(d) for d in found.differences],
        "notes": list(found.notes),
        "trees": codec.to_json(found.trees),
        "coverage": codec.to_json(found.coverage),
        "advice": [codec.to_json(one) for one in found.advice],
        "exit_code": found.verdict.exit_code,
    }


def parity_report(found: Parity, a: Path, b: Path, target: str, source: str) -> None:
    out = console()
    title = f"{b.name} on {target} against {a.name}, {source}"
    table = Table(title=escape(title), title_justify="left")
    for name in ("output", "inputs", "rows", "largest error", "limit", "verdict"):
        table.add_column(name, justify="right" if name in ("rows", "largest error", "limit") else "left")
    last = ""
    for one in found.differences:
        if last not in (one.output, ""):
            table.add_section()
        shown = one.output if one.output != last else ""
        table.add_row(escape(shown), escape(one.group), str(one.rows), *_figures(one), coloured(one.verdict))
        last = one.output
    out.print(table)
    out.print(f"{escape(RULE)}.", style="dim")
    for note in found.notes:
        out.print(f"[yellow]note[/yellow] {escape(note)}")
    for line in (*tree_lines(found.trees), *coverage_lines(found.coverage)):
        out.print(escape(line), soft_wrap=True)
    advise(found.advice)
    out.print(f"{coloured(found.verdict)} {escape(found.reason)}")


def alone_document(found: Alone, model: Path, target: str) -> dict[str, Any]:
    document = codec.to_json(found)
    return {"tool": "bench", "a": str(model), "target": target, **document, "exit_code": 0}


def alone_report(found: Alone, model: Path, target: str) -> None:
    out = console()
    rows = "1 row" if found.batch == 1 else f"{found.batch} rows"
    table = Table(title=escape(f"{model.name} on {target}, {rows} a request"), title_justify="left")
    for name in ("figure", "value", "interval", "n", "of"):
        table.add_column(name, justify="right" if name in ("value", "n") else "left")
    of = ""
    for name, figure in found.figures.items():
        if of and of != _OF.get(name, _UNDER_LOAD):
            table.add_section()
        of = _OF.get(name, _UNDER_LOAD)
        table.add_row(name, *_cells(figure), of)
    out.print(table)
    out.print("Intervals: 95 % a side.", style="dim")
    share = found.preempted / found.runs if found.runs else 0.0
    out.print(f"{found.preempted} of {found.runs} runs were preempted ({100 * share:.2g}%) and left out.")
    out.print(escape(_machine(found.hardware, found.facts, found.conditions)), style="dim")
    advise(found.advice)


def paired_document(found: Paired, a: Path, b: Path) -> dict[str, Any]:
    evidence, latency = found.evidence, found.latency
    return {
        "tool": "bench",
        "a": {"path": str(a), "median_s": latency.medians[0]},
        "b": {"path": str(b), "median_s": latency.medians[1]},
        "target": evidence.target,
        "batch": found.batch,
        "verdict": found.verdict.value,
        "reason": found.decision.reason if found.verdict is not Verdict.PASS else found.decision.results[0].reason,
        "ratio": {"estimate": latency.ratio, "low": latency.low, "high": latency.high, "limit": latency.limit},
        "faster": found.faster,
        "session_pairs": len(latency.ratios),
        "session_pair_ratios": list(latency.ratios),
        "noise": latency.noise,
        "figures": [codec.to_json(figure) for figure in found.figures],
        "results": [codec.to_json(result) for result in found.decision.results],
        "evidence": codec.to_json(evidence),
        "exit_code": found.verdict.exit_code,
    }


def paired_report(found: Paired, a: Path, b: Path) -> None:
    out = console()
    comparison = found.evidence.comparisons[0]
    rows = "1 row" if found.batch == 1 else f"{found.batch} rows"
    out.print(escape(f"{b.name} (B) against {a.name} (A) on {found.evidence.target}, {rows} a request"), style="bold")
    one = found.latency
    for row in ratio_plot(one.ratios, estimate=one.ratio, low=one.low, high=one.high, limit=one.limit):
        out.print(escape(row), soft_wrap=True)
    for figure in found.figures:
        out.print(escape(_versus(figure)), soft_wrap=True)
    lost = 100 * comparison.preempted / max(1, comparison.runs)
    out.print(f"{comparison.runs} timed runs, {lost:.3g}% preempted and left out")
    facts = found.evidence.runtime
    if facts is not None:
        out.print(escape(_machine(found.evidence.hardware, facts, found.evidence.conditions)), style="dim")
    for result in found.decision.results:
        out.print(f"{coloured(result.verdict)} {escape(result.reason)}", soft_wrap=True)
    if found.faster:
        out.print("B is faster than A with confidence.")
    elif found.verdict is Verdict.PASS:
        out.print("B keeps the limit; that it is faster than A is not shown.")
    advise(found.evidence.advice)


def advise(found: Sequence[Advice]) -> None:
    """What slows a model down, and what to set."""
    for line in advice_lines(found):
        console().print(f"[yellow]advice[/yellow] {escape(line)}", soft_wrap=True)


def _versus(one: Versus) -> str:
    medians = ", ".join(f"{side} {format_figure(m, one.unit)}" for side, m in zip("AB", one.medians, strict=True))
    interval = format_interval(one.low, one.high, "x", near=one.ratio)
    what = "memory" if one.unit == "B" else "time per request" if one.unit == PER_SECOND else "time"
    noise = f"±{100 * one.noise:.2g}%" if one.noise is not None else "unknown"
    ratio = f"B takes {format_figure(one.ratio, 'x')} {interval} the {what} of A"
    return f"{one.figure}: median {medians}; {ratio}; A against itself {noise}"


def _figures(one: Difference) -> tuple[str, str]:
    if one.mismatch:
        return "mismatch", "none"
    if one.labels:
        return f"{format_figure(one.error, '1')} of rows", "0%"
    return number(one.error), number(one.limit)


def _cells(figure: Figure) -> tuple[str, str, str]:
    interval = format_interval(figure.low, figure.high, figure.unit, near=figure.value)
    return format_figure(figure.value, figure.unit), escape(interval), str(figure.n)


def _machine(hardware: HardwareFingerprint, facts: RuntimeFacts, conditions: Mapping[str, str]) -> str:
    nodes = ", ".join(f"{name} {count} nodes" for name, count in facts.nodes.items()) or ", ".join(facts.used)
    load = f", load {conditions['load']}" if "load" in conditions else ""
    return f"{hardware.cpu_model}, {hardware.cores} cores{load}; {facts.runtime} {facts.version}: {nodes}"


def coloured(verdict: Verdict) -> str:
    return f"[{_COLOURS[verdict]}]{verdict.value.upper()}[/{_COLOURS[verdict]}]"
