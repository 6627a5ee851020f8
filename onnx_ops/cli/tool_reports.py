"""What `bench` prints, for people and for machines, and how tools print advice and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from onnx_ops import codec
from onnx_ops.cli.terminal import KEEP, console, print_table, print_text
from onnx_ops.domain.evidence import Advice, RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint
from onnx_ops.reporting.formatting import format_figure, format_interval
from onnx_ops.reporting.structure import advice_lines
from onnx_ops.tools.bench import BenchmarkFigure, SingleModelResult

_RUNS = "single runs that kept their core"
_PROCESSES = "fresh processes, file in the page cache; median"
_UNDER_LOAD = "fresh sessions under that many requests; median"
_OF = {"p50": _RUNS, "p90": _RUNS, "p99": _RUNS, "load": _PROCESSES, "first": _PROCESSES, "peak": _PROCESSES}
"""What the figures of one model are of; those that are not named are throughputs."""


def alone_document(result: SingleModelResult, model: Path, target: str) -> dict[str, Any]:
    """Return the result of `bench` for --json."""
    document = codec.to_json(result)
    return {"tool": "bench", "a": str(model), "target": target, **document, "exit_code": 0}


def alone_report(result: SingleModelResult, model: Path, target: str) -> None:
    """Print the result of `bench`."""
    out = console()
    rows = "1 row" if result.batch == 1 else f"{result.batch} rows"
    out.print(f"[bold]{escape(f'{model.name} on {target}, {rows} a request')}[/bold]")
    cells = [
        [name, *_cells(figure), f"{figure.n} {_OF.get(name, _UNDER_LOAD)}"] for name, figure in result.figures.items()
    ]
    print_table(out, ("metric", "value", "interval (95 % a side)", "n"), cells)
    share = result.preempted / result.runs if result.runs else 0.0
    print_text(out, f"{result.preempted} of {result.runs} runs were preempted ({100 * share:.2g}%) and left out.")
    print_text(out, f"[dim]{escape(_machine(result.hardware, result.facts, result.conditions))}[/dim]")
    advise(result.advice)


def advise(advice: Sequence[Advice]) -> None:
    """Print what slows a model down, and what to set."""
    for line in advice_lines(advice):
        print_text(console(), f"[yellow]advice[/yellow] {escape(line)}")


def _cells(figure: BenchmarkFigure) -> tuple[str, str]:
    interval = format_interval(figure.low, figure.high, figure.unit, near=figure.value)
    return tuple(escape(text.replace(" ", KEEP)) for text in (format_figure(figure.value, figure.unit), interval))  # type: ignore[return-value]


def _machine(hardware: HardwareFingerprint, facts: RuntimeFacts, conditions: Mapping[str, str]) -> str:
    nodes = ", ".join(
        f"{name} {count} node{'' if count == 1 else 's'}" for name, count in facts.nodes.items()
    ) or ", ".join(facts.used)
    load = f", load {conditions['load']}" if "load" in conditions else ""
    return f"{hardware.cpu_model}, {hardware.cores} cores{load}; {facts.runtime} {facts.version}: {nodes}"
