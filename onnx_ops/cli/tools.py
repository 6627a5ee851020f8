"""`onnx-ops bench`: how fast one ONNX file is; and what the tools for single files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, Quiet, handle_errors, print_json
from onnx_ops.cli.terminal import KEEP, console, print_table, print_text
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.reporting.formatting import format_figure, format_interval

if TYPE_CHECKING:
    from onnx_ops.domain.artifact import TensorSpec
    from onnx_ops.domain.evidence import Advice, RuntimeFacts
    from onnx_ops.domain.target import HardwareFingerprint, Target
    from onnx_ops.ports import Ports
    from onnx_ops.tools.bench import BenchmarkFigure, SingleModelResult
    from onnx_ops.tools.probing import SampleRows

Tell = Callable[[str], None]

TargetName = Annotated[str, typer.Option("--target", help="cpu-1t, cpu-all, another one of `onnx-ops targets`.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Rows to run on: .npz, arrays by input name. Default: random ones.", show_default=False
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=SIZE", help="Size of a symbolic dimension of random rows; default 8."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of random rows and of the order of runs.")]


@handle_errors
def bench(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    *,
    target: TargetName = "cpu-1t",
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Also the throughput with N requests at once.", metavar="N"),
    ] = None,
    cold_start: Annotated[
        bool, typer.Option("--cold-start", help="Also load time, first inference and peak memory of fresh processes.")
    ] = False,
    data: Data = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of one request.")] = 1,
    runs: Annotated[int, typer.Option(min=20, max=1_000_000, help="Timed runs.")] = 800,
    dims: Dims = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time one model: quantiles of single runs in one session. --concurrency and --cold-start measure more.

    `onnx-ops judge A B --only latency` tells whether one model is slower than another.

    Exit code: 0 measured, 2 wrong input, 4 not measured.

    Example: onnx-ops bench model.onnx --target cpu-1t --concurrency 4
    """
    from onnx_ops.domain.gate import derive_measurement_request
    from onnx_ops.onnx_graph.rewrites import read_boundary_types, write_with_boundary_casts
    from onnx_ops.scratch import Scratch
    from onnx_ops.tools.bench import benchmark as use_case
    from onnx_ops.tools.bench import build_pair_gates

    gates = build_pair_gates(None, concurrency=concurrency, cold=cold_start)
    ports, chosen = _bench_of(target)
    with Scratch() as folder, show_progress("bench", model, quiet=quiet or as_json) as tell:
        copy = folder / model.name
        casts = write_with_boundary_casts(model, read_boundary_types(model), copy)
        timed = copy if casts else model
        feed = _samples(timed, ports, data, dims, rows=batch, seed=seed).feed(batch)
        if casts:
            tell(casts)
        result = use_case(
            ports.runtime(chosen.runtime),
            chosen,
            timed,
            feed,
            runs=runs,
            conditions=ports.conditions,
            request=derive_measurement_request(gates),
            seed=seed,
            report=tell,
        )
    if as_json:
        print_json(alone_document(result, model, chosen.name))
    else:
        alone_report(result, model, chosen.name)


def _bench_of(name: str) -> tuple[Ports, Target]:
    """Return the ports and the target, in a project or anywhere else."""
    from onnx_ops.app.project import open_project

    project = open_project()
    return project.ports, project.targets.load(name, where="--target")


def _samples(
    model: Path, ports: Ports, data: Path | None, dims: list[str] | None, *, rows: int, seed: int
) -> SampleRows:
    from onnx_ops.onnx_graph.input_bounds import read_input_bounds
    from onnx_ops.tools.probing import generate_samples, shared_inputs

    inputs, sizes = shared_inputs(model), parse_sizes(dims or [])
    if data is None:
        return generate_samples(inputs, count=rows, dims=sizes, seed=seed, bounds=read_input_bounds(model))
    if sizes:
        raise UserError("--dim is for random rows, and --data brings its own", where="--dim")
    return read_rows(inputs, ports, data, rows)


def read_rows(inputs: tuple[TensorSpec, ...], ports: Ports, data: Path, limit: int) -> SampleRows:
    """Return the first rows of a .npz file, checked against the inputs of a model."""
    from onnx_ops.domain.pipeline import FileData
    from onnx_ops.tools.probing import check_samples

    if not data.is_file():
        raise NotFoundError("no such file", where=str(data))
    path = data.resolve()
    section = FileData(file=path.name, inputs={spec.name: spec.name for spec in inputs})
    return check_samples(inputs, ports.source("file").load(section, path.parent), where=str(data), limit=limit)


def parse_sizes(dims: list[str]) -> dict[str, int]:
    """Return the sizes of dimensions by name, of `NAME=SIZE` texts."""
    sizes = {}
    for text in dims:
        name, _, size = text.partition("=")
        if not (name and size.isdecimal() and 0 < int(size) < 1 << 31):
            raise UserError(f"{text!r} is not NAME=SIZE", where="--dim", remedy="For example: --dim height=224.")
        sizes[name] = int(size)
    return sizes


@contextmanager
def show_progress(command: str, *places: object, quiet: bool) -> Iterator[Tell]:
    """Show on standard error what is at work: one line that is redrawn on a terminal, else a line each."""
    from rich.markup import escape

    from onnx_ops.cli.progress import working
    from onnx_ops.cli.terminal import error_console

    console = error_console()
    if quiet or not console.is_terminal:
        yield lambda text: None if quiet else console.print(escape(text), soft_wrap=True)
        return
    with working(" ".join((command, *map(str, places))), command) as progress:
        yield progress.tell


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
    from onnx_ops.reporting.structure import advice_lines

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
