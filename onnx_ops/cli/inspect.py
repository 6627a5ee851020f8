"""`onnx-ops inspect`: the content of a model, its metadata, and where it can run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, console, markup, open_project, print_result, print_table, print_text
from onnx_ops.cli.tools import parse_sizes
from onnx_ops.domain.artifact import TensorSpec, short_digest
from onnx_ops.errors import UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.reporting.formatting import format_figure, number
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from onnx_ops.onnx_graph.model_summary import ModelSummary


def inspect(
    model: Annotated[
        str, typer.Argument(help="ONNX file, folder with one, models:/NAME/VERSION, or a URL.", show_default=False)
    ],
    batch: Annotated[int, typer.Option(min=1, max=1 << 20, help="Batch size used for the cost estimate.")] = 1,
    dims: Annotated[
        list[str] | None,
        typer.Option("--dim", metavar="NAME=SIZE", help="Size of a free dimension, for the cost; default 8."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Write author, license, version, description or any key."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --set: the copy to write. The model's own path changes it in place.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--as-python", metavar="FILE", help="Write Python source that builds the model.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Show the graph with Netron, on this machine only.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve; 0 selects a free one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the contents of an ONNX file and validate it: inputs, outputs, operators, weights, cost, targets.

    The cost comes from shapes alone; weights beside the file are not read.

    Exit code: 0 valid, 2 not valid, 5 its external weights are refused.

    Example: onnx-ops inspect model.onnx --batch 8
    """
    from onnx_ops.config.targets import list_targets
    from onnx_ops.onnx_graph.compatibility import (
        explain_missing_operators,
        explain_unsupported_blocks,
        explain_version_limits,
    )
    from onnx_ops.onnx_graph.model_info import write_copy
    from onnx_ops.onnx_graph.model_summary import summarize_model
    from onnx_ops.onnx_graph.python_source import write_python_source

    if bool(set_) != bool(output):
        raise UserError("--set and --output belong together", remedy="For example: --set license=MIT --output new.onnx")
    if serve:
        require(*EXTRAS["view"], where="--serve")
    with local_model(model) as path:
        written = [output] if set_ and output else []
        if set_ and output:
            values = {}
            for entry in set_:
                key, sign, value = entry.partition("=")
                if not (key and sign):
                    remedy = "For example: --set license=MIT"
                    raise UserError(f"{entry!r} is not KEY=VALUE", where="--set", remedy=remedy)
                values[key] = value
            if not output.parent.is_dir():
                raise UserError("there is no such folder", where=str(output.parent))
            write_copy(path, output, values)
        looked_at = output if set_ and output else path
        written += write_python_source(looked_at, source) if source else ()
        summary = summarize_model(looked_at, batch=batch, dims=parse_sizes(dims or []))
        files = open_project().targets
        known = {name: files.load(name, where="--target") for name in list_targets(files)}
        targets = {
            name: explain_version_limits(summary.info, target)
            or explain_missing_operators(summary.foreign, target)
            or explain_unsupported_blocks(summary.blocks, target)
            for name, target in known.items()
        }
        shown = (looked_at, summary, targets, written)
        print_result(lambda: _document(*shown), lambda: _report(*shown), as_json=as_json)
        if serve:
            with view(looked_at, port) as (address, wait):
                typer.echo(f"{looked_at.name} at {address}; Ctrl-C ends it", err=True)
                wait()
    if summary.problem:
        raise typer.Exit(2)


@contextmanager
def view(path: Path, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve a graph with Netron; return its URL and a function that waits until it ends. Port 0 selects a free one."""
    require(*EXTRAS["view"], where="inspect --serve")
    netron = importlib.import_module("netron")
    host, taken = netron.start(str(path), address=("127.0.0.1", port or None), browse=False)
    try:
        yield f"http://{host}:{taken}", netron.wait
    finally:
        netron.stop((host, taken))


@contextmanager
def local_model(place: str) -> Iterator[Path]:
    """Open the model as a local file; a download is removed afterwards."""
    from onnx_ops.onnx_graph.files import find_model_file

    if "://" not in place and not place.startswith("models:/"):
        yield find_model_file(Path(place))
        return
    from onnx_ops.app.context import build_context
    from onnx_ops.config.settings import load_settings

    with Scratch() as folder:
        yield find_model_file(build_context(load_settings()).models.path(place, folder / "model"))


def _document(path: Path, summary: ModelSummary, targets: Mapping[str, str], written: Sequence[Path]) -> dict[str, Any]:
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


def _report(path: Path, summary: ModelSummary, targets: Mapping[str, str], written: Sequence[Path]) -> None:
    from onnx_ops.onnx_graph.ort_format import is_ort_format

    info, cost = summary.info, summary.cost
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(info.opsets.items()))
    beside = f", weights in {', '.join(summary.external)}" if summary.external else ""
    sizes = ", ".join(f"{name} {size}" for name, size in cost.dims.items())
    at = f"with {sizes}: " if sizes else ""
    rest = f"; not counted: {_counts(cost.uncounted)}" if cost.uncounted else ""
    parts = ", ".join(f"{name} {number(count)}" for name, count in cost.macs.items())
    weights, activations = format_figure(cost.weight_bytes, "B"), format_figure(cost.activation_bytes, "B")
    unknown = f", without {n} value{'s' if n > 1 else ''} of unknown shape" if (n := cost.unknown_values) else ""
    flops = f"{at}{number(cost.flops)} FLOPs (multiply-adds: {parts or 'none'}){rest}"
    lines = {
        "file": f"{path.name}, {format_figure(info.size_bytes, 'B')}{beside}, sha256 {short_digest(summary.file)}",
        "versions": f"IR {info.ir_version}, opset {opsets or 'none'}",
        "producer": summary.producer or "not recorded",
        "author": summary.author,
        "license": summary.license,
        "version": str(summary.version or ""),
        "about": summary.description,
        "inputs": _tensors(info.inputs, summary.unranked),
        "outputs": _tensors(info.outputs, summary.unranked),
        "nodes": f"{sum(summary.operators.values())}: {_counts(summary.versions)}",
        "custom": "\n".join(f"{name} at {', '.join(at[:5])}" for name, at in summary.foreign.items()),
        "weights": _counts(summary.parameters) or "none",
        "cost": f"not known: {cost.problem}" if cost.problem else flops,
        "memory": "" if cost.problem else f"{at}weights {weights}, activations at most {activations}{unknown}",
        "metadata": "\n".join(f"{name} = {value}" for name, value in summary.metadata.items()) or "none",
        "targets": "\n".join(f"{name}: {reason or 'accepts its versions'}" for name, reason in targets.items()),
    }
    print_table(("", ""), [(name, text) for name, text in lines.items() if text])
    for file in written:
        console().print(markup("wrote {}", file), soft_wrap=True)
    if summary.problem:
        print_text("[red]not valid ONNX[/red]: {}", summary.problem)
    elif is_ort_format(path):
        print_text("[green]readable[/green]: ORT format, a graph that is optimized for one build of ONNX Runtime")
    else:
        print_text("[green]valid ONNX[/green]")


def _tensors(specs: Sequence[TensorSpec], unranked: Sequence[str]) -> str:
    shapes = {spec.name: " × ".join(map(str, spec.shape)) or "scalar" for spec in specs}
    shapes |= dict.fromkeys(unranked, "of any rank: no shape is declared")
    return "\n".join(f"{spec.name}: {spec.dtype} {shapes[spec.name]}" for spec in specs) or "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
