"""`onnx-ops inspect`: the content of a model, its metadata, and where it can run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    AsJson,
    console,
    markup,
    open_project,
    print_result,
    print_table,
    print_text,
)
from onnx_ops.cli.tools import parse_sizes
from onnx_ops.domain.artifact import TensorSpec, short_digest
from onnx_ops.errors import NotReadyError, UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.reporting.formatting import format_figure, number
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from onnx_ops.onnx_graph.model_summary import ModelCost, ModelSummary


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="ONNX file, folder with one, models:/NAME/VERSION, or a URL.", show_default=False
        ),
    ],
    batch: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Batch size used for the cost estimate.")
    ] = 1,
    dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dim", metavar="NAME=SIZE", help="Size of a free dimension, for the cost; default 8."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Write author, license, version, description or any key.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --set: the copy to write. The model's own path changes it in place."
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--as-python", metavar="FILE", help="Write Python source that builds the model."
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the graph with Netron, on this machine only.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for --serve; 0 selects a free port.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the contents of an ONNX file and validate it.

    The contents are inputs, outputs, operators, weights, cost and targets. The cost comes from
    shapes alone; weights beside the file are not read.

    Exit code: 0 valid, 2 not valid, 5 its external weights are refused.

    Example: onnx-ops inspect model.onnx --batch 8
    """
    from onnx_ops.onnx_graph.model_summary import summarize_model
    from onnx_ops.onnx_graph.python_source import write_python_source

    if bool(set_) != bool(output):
        raise UserError(
            "--set and --output must be given together",
            remedy="For example: --set license=MIT --output new.onnx",
        )
    if serve:
        require(*EXTRAS["view"], where="--serve")
    with local_model(model) as path:
        looked_at, written = path, list[Path]()
        if set_ and output:
            _write_with_metadata(path, output, set_)
            looked_at, written = output, [output]
        if source:
            written += write_python_source(looked_at, source)
        summary = summarize_model(looked_at, batch=batch, dims=parse_sizes(dims or []))
        shown = (looked_at, summary, _explain_refusals(summary), written)
        print_result(lambda: _document(*shown), lambda: _report(*shown), as_json=as_json)
        if serve:
            with view(looked_at, port) as (address, wait):
                typer.echo(f"{looked_at.name} at {address}; Ctrl-C ends it", err=True)
                wait()
    if summary.problem:
        raise typer.Exit(2)


def _write_with_metadata(model: Path, output: Path, entries: Sequence[str]) -> None:
    """Write a copy of a model with the metadata of `--set`."""
    from onnx_ops.onnx_graph.model_info import write_copy

    values = {}
    for entry in entries:
        key, sign, value = entry.partition("=")
        if not (key and sign):
            remedy = "For example: --set license=MIT"
            raise UserError(f"{entry!r} is not KEY=VALUE", where="--set", remedy=remedy)
        values[key] = value
    if not output.parent.is_dir():
        remedy = "Create the folder, or choose another."
        raise UserError(
            "the folder of --output does not exist", where=str(output.parent), remedy=remedy
        )
    write_copy(model, output, values)


def _explain_refusals(summary: ModelSummary) -> dict[str, str]:
    """Return the reason why each known target refuses the model, by target.

    The reason is empty if the target accepts the model.
    """
    from onnx_ops.config.targets import list_targets
    from onnx_ops.onnx_graph.compatibility import (
        explain_missing_operators,
        explain_unsupported_blocks,
        explain_version_limits,
    )

    files = open_project().targets
    reasons: dict[str, str] = {}
    for name in list_targets(files):
        try:
            target = files.load(name, where="--target")
        except NotReadyError as error:
            reasons[name] = str(error)
            continue
        reasons[name] = (
            explain_version_limits(summary.info, target)
            or explain_missing_operators(summary.foreign, target)
            or explain_unsupported_blocks(summary.blocks, target)
        )
    return reasons


@contextmanager
def view(path: Path, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve a graph with Netron; yield the URL and a waiting function.

    The function waits until the server ends. Port 0 selects a free port.
    """
    require(*EXTRAS["view"], where="inspect --serve")
    netron = importlib.import_module("netron")
    host, taken = netron.start(str(path), address=("127.0.0.1", port or None), browse=False)
    try:
        yield f"http://{host}:{taken}", netron.wait
    finally:
        netron.stop((host, taken))


@contextmanager
def local_model(place: str) -> Iterator[Path]:
    """Open the model as a local file.

    A download is removed afterwards, unless it is in the cache of pinned addresses.
    """
    from onnx_ops.onnx_graph.files import find_model_file

    if "://" not in place and not place.startswith("models:/"):
        yield find_model_file(Path(place))
        return
    from onnx_ops.app.context import build_context
    from onnx_ops.config.settings import load_settings

    with Scratch() as folder:
        yield find_model_file(build_context(load_settings()).models.path(place, folder / "model"))


def _document(
    path: Path, summary: ModelSummary, targets: Mapping[str, str], written: Sequence[Path]
) -> dict[str, Any]:
    return {
        "tool": "inspect",
        "path": str(path),
        **codec.to_json(summary),
        "macs": sum(summary.cost.macs.values()),
        "flops": summary.cost.flops,
        "valid": not summary.problem,
        "targets": {
            name: {"accepts": not reason, "reason": reason} for name, reason in targets.items()
        },
        "written": [str(file) for file in written],
        "exit_code": 2 if summary.problem else 0,
    }


def _report(
    path: Path, summary: ModelSummary, targets: Mapping[str, str], written: Sequence[Path]
) -> None:
    info = summary.info
    beside = f", weights in {', '.join(summary.external)}" if summary.external else ""
    # Only lines with text are printed.
    lines = {
        "file": f"{path.name}, {format_figure(info.size_bytes, 'B')}{beside}, "
        f"sha256 {short_digest(summary.file)}",
        "versions": f"IR {info.ir_version}, opset {_describe_opsets(info.opsets)}",
        "producer": summary.producer or "not recorded",
        "author": summary.author,
        "license": summary.license,
        "version": str(summary.version or ""),
        "about": summary.description,
        "inputs": _tensors(info.inputs, summary.unranked),
        "outputs": _tensors(info.outputs, summary.unranked),
        "nodes": f"{sum(summary.operators.values())}: {_counts(summary.versions)}",
        "custom": "\n".join(
            f"{name} at {', '.join(at[:5])}" for name, at in summary.foreign.items()
        ),
        "weights": _counts(summary.parameters) or "none",
        "cost": _describe_cost(summary.cost),
        "memory": _describe_memory(summary.cost),
        "metadata": "\n".join(f"{name} = {value}" for name, value in summary.metadata.items())
        or "none",
        "targets": "\n".join(
            f"{name}: {reason or 'accepts its IR version, opset and operators'}"
            for name, reason in targets.items()
        ),
    }
    print_table(("", ""), [(name, text) for name, text in lines.items() if text])
    for file in written:
        console().print(markup("wrote {}", file), soft_wrap=True)
    _print_validity(path, summary.problem)


def _print_validity(path: Path, problem: str) -> None:
    from onnx_ops.onnx_graph.ort_format import is_ort_format

    if problem:
        print_text("[red]not valid ONNX[/red]: {}", problem)
    elif is_ort_format(path):
        print_text(
            "[green]readable[/green]: ORT format, a graph that is optimized for one build of "
            "ONNX Runtime"
        )
    else:
        print_text("[green]valid ONNX[/green]")


def _describe_opsets(opsets: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(opsets.items()))
        or "none"
    )


def _describe_cost(cost: ModelCost) -> str:
    """Return the number of operations of one run, or why it is unknown."""
    if cost.problem:
        return f"not known: {cost.problem}"
    parts = ", ".join(f"{name} {number(count)}" for name, count in cost.macs.items())
    text = f"{_describe_sizes(cost)}{number(cost.flops)} FLOPs (multiply-adds: {parts or 'none'})"
    return f"{text}; not counted: {_counts(cost.uncounted)}" if cost.uncounted else text


def _describe_memory(cost: ModelCost) -> str:
    """Return the memory of weights and activations; empty if the cost is unknown."""
    if cost.problem:
        return ""
    weights, activations = (
        format_figure(cost.weight_bytes, "B"),
        format_figure(cost.activation_bytes, "B"),
    )
    text = f"{_describe_sizes(cost)}weights {weights}, activations at most {activations}"
    if count := cost.unknown_values:
        text += f", without {count} value{'s' if count > 1 else ''} of unknown shape"
    return text


def _describe_sizes(cost: ModelCost) -> str:
    """Return a prefix with the sizes of free dimensions to which a cost applies."""
    sizes = ", ".join(f"{name} {size}" for name, size in cost.dims.items())
    return f"with {sizes}: " if sizes else ""


def _tensors(specs: Sequence[TensorSpec], unranked: Sequence[str]) -> str:
    shapes = {spec.name: " × ".join(map(str, spec.shape)) or "scalar" for spec in specs}
    shapes |= dict.fromkeys(unranked, "of any rank: no shape is declared")
    return "\n".join(f"{spec.name}: {spec.dtype} {shapes[spec.name]}" for spec in specs) or "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
