"""What `inspect` prints, for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from onnx_ops import codec
from onnx_ops.cli.terminal import console, print_table, print_text
from onnx_ops.domain.artifact import TensorSpec, short_digest
from onnx_ops.onnx_graph.model_summary import ModelCost, ModelSummary
from onnx_ops.onnx_graph.ort_format import is_ort_format
from onnx_ops.reporting.formatting import format_figure, number


def survey_document(
    path: Path, summary: ModelSummary, targets: Mapping[str, str], written: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return the summary of a model for --json."""
    return {
        "tool": "inspect",
        "path": str(path),
        **codec.to_json(summary),
        "macs": sum(summary.cost.macs.values()),
        "flops": summary.cost.flops,
        "valid": not summary.problem,
        "targets": {name: {"accepts": not reason, "reason": reason} for name, reason in targets.items()},
        "written": [str(file) for file in written],
        "exit_code": 2 if summary.problem else 0,
    }


def survey_report(path: Path, summary: ModelSummary, targets: Mapping[str, str], written: Sequence[Path] = ()) -> None:
    """Print the summary of a model."""
    out, info = console(), summary.info
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(info.opsets.items()))
    beside = f", weights in {', '.join(summary.external)}" if summary.external else ""
    lines = {
        "file": f"{path.name}, {format_figure(info.size_bytes, 'B')}{beside}, sha256 {short_digest(summary.file)}",
        "versions": f"IR {info.ir_version}, opset {opsets or 'none'}",
        "producer": summary.producer or "not told",
        "author": summary.author,
        "license": summary.license,
        "version": str(summary.version or ""),
        "about": summary.description,
        "inputs": _tensors(info.inputs),
        "outputs": _tensors(info.outputs),
        "nodes": f"{sum(summary.operators.values())}: {_counts(summary.versions)}",
        "custom": "\n".join(f"{name} at {', '.join(at[:5])}" for name, at in summary.foreign.items()),
        "weights": _counts(summary.parameters) or "none",
        **_cost(summary.cost),
        "metadata": "\n".join(f"{name} = {value}" for name, value in summary.metadata.items()) or "none",
        "targets": "\n".join(f"{name}: {reason or 'accepts its versions'}" for name, reason in targets.items()),
    }
    print_table(out, ("", ""), [[name, escape(text)] for name, text in lines.items() if text])
    for file in written:
        out.print(f"wrote {escape(str(file))}", soft_wrap=True)
    if summary.problem:
        print_text(out, f"[red]not valid ONNX[/red]: {escape(summary.problem)}")
    elif is_ort_format(path):
        text = "[green]readable[/green]: ORT format, a graph that is optimised for one build of ONNX Runtime"
        print_text(out, text)
    else:
        out.print("[green]valid ONNX[/green]")


def _cost(cost: ModelCost) -> dict[str, str]:
    sizes = ", ".join(f"{name} {size}" for name, size in cost.dims.items())
    at = f"with {sizes}: " if sizes else ""
    if cost.problem:
        return {"cost": f"not known: {cost.problem}"}
    rest = f"; not counted: {_counts(cost.uncounted)}" if cost.uncounted else ""
    parts = ", ".join(f"{name} {number(count)}" for name, count in cost.macs.items())
    unknown = f", without {cost.unknown_values} values of unknown shape" if cost.unknown_values else ""
    return {
        "cost": f"{at}{number(cost.flops)} FLOPs (multiply-adds: {parts or 'none'}){rest}",
        "memory": f"{at}weights {format_figure(cost.weight_bytes, 'B')}, activations at most "
        f"{format_figure(cost.activation_bytes, 'B')}{unknown}",
    }


def _tensors(specs: Sequence[TensorSpec]) -> str:
    lines = [f"{spec.name}: {spec.dtype} {' × '.join(map(str, spec.shape)) or 'scalar'}" for spec in specs]
    return "\n".join(lines) or "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
