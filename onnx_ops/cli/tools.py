"""The command `onnx-ops bench`, and functions shared by commands for single files.

`bench` measures the speed of one ONNX file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    KEEP,
    AsJson,
    Quiet,
    error_console,
    markup,
    open_project,
    print_result,
    print_table,
    print_text,
    say,
)
from onnx_ops.cli.progress import working
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.reporting.formatting import format_figure, format_interval

if TYPE_CHECKING:
    from numpy import ndarray

    from onnx_ops.domain.artifact import TensorSpec
    from onnx_ops.domain.evidence import Advice
    from onnx_ops.ports import Context
    from onnx_ops.tools.bench import SingleModelResult
    from onnx_ops.tools.sample_rows import SampleRows

ReportLine = Callable[[str], None]

TargetName = Annotated[
    str, typer.Option("--target", help="cpu-1t, cpu-all, or another target of `onnx-ops targets`.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Rows to run on, e.g. .npz with arrays by input name. Default: random ones.",
        show_default=False,
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="NAME=SIZE", help="Size of a symbolic dimension of random rows; default 8."
    ),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="NAME=VALUE",
        help="Value of an input that is the same in every run, such as sr=16000; "
        "repeat for several.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of random rows and of the order of runs.")
]


def bench(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    *,
    target: TargetName = "cpu-1t",
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Also measure the throughput of N concurrent requests.",
            metavar="N",
        ),
    ] = None,
    cold_start: Annotated[
        bool,
        typer.Option(
            "--cold-start",
            help="Also measure load time, first inference and peak memory of fresh processes.",
        ),
    ] = False,
    data: Data = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of one request.")] = 1,
    runs: Annotated[int, typer.Option(min=20, max=1_000_000, help="Timed runs.")] = 800,
    dims: Dims = None,
    fix: Fix = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time one model: quantiles of single runs in one session.

    --concurrency and --cold-start measure more. `onnx-ops judge A B --only latency` shows whether
    one model is slower than another.

    Exit code: 0 measured, 2 wrong input, 4 not measured.

    Example: onnx-ops bench model.onnx --target cpu-1t --concurrency 4
    """
    from onnx_ops.domain.gate import derive_measurement_request
    from onnx_ops.measure.row_layout import arrange_runtime
    from onnx_ops.onnx_graph.input_bounds import read_input_bounds
    from onnx_ops.onnx_graph.rewrites import read_boundary_types, write_with_boundary_casts
    from onnx_ops.scratch import Scratch
    from onnx_ops.tools.bench import benchmark as use_case
    from onnx_ops.tools.bench import build_pair_gates
    from onnx_ops.tools.compare import REFERENCE
    from onnx_ops.tools.generated_rows import generate_samples, settle_samples
    from onnx_ops.tools.model_inputs import shared_inputs

    gates = build_pair_gates(None, concurrency=concurrency, cold=cold_start)
    project = open_project()
    context, chosen = guard_context(project.context), project.targets.load(target, where="--target")
    with Scratch() as folder, show_progress("bench", model, quiet=quiet or as_json) as report:
        copy = folder / model.name
        casts = write_with_boundary_casts(model, read_boundary_types(model), copy)
        timed = copy if casts else model
        inputs, sizes, values = (
            shared_inputs(timed),
            parse_sizes(dims or []),
            parse_values(fix or []),
        )
        runtime = context.runtime(chosen.runtime)
        if data is None:
            bounds = read_input_bounds(timed)
            samples = generate_samples(
                inputs, count=batch, dims=sizes, seed=seed, bounds=bounds, fix=values
            )
            place = replace(REFERENCE, custom_ops=chosen.custom_ops)
            samples = settle_samples(context.runtime(place.runtime), place, timed, samples)
        elif sizes:
            raise UserError("--dim applies to random rows, and --data supplies rows", where="--dim")
        else:
            _, samples = load_rows(inputs, context, data, batch, values)
        if casts:
            report(casts)
        result = use_case(
            arrange_runtime(runtime, samples.read_layout(timed)),
            chosen,
            timed,
            samples.feed(batch),
            runs=runs,
            conditions=context.conditions,
            request=derive_measurement_request(gates),
            seed=seed,
            report=report,
        )
    document = {
        "tool": "bench",
        "a": str(model),
        "target": chosen.name,
        **codec.to_json(result),
        "exit_code": 0,
    }
    print_result(lambda: document, lambda: _report(result, model, chosen.name), as_json=as_json)


def guard_context(context: Context, timeout: float | None = None) -> Context:
    """Return the context with runtimes that first run each model in a forked process.

    A crash of a model in that run does not end this process. `timeout` is the limit of a forked
    process in seconds. Timed runs follow in this process, without this limit.
    """
    from onnx_ops.adapters.runtimes.placement import guard_runtime

    return replace(
        context, runtime=functools.cache(lambda name: guard_runtime(context.runtime(name), timeout))
    )


def load_rows(
    inputs: tuple[TensorSpec, ...],
    context: Context,
    data: Path,
    limit: int,
    fix: Mapping[str, Any] | None = None,
    labels: str | None = None,
) -> tuple[Mapping[str, ndarray], SampleRows]:
    """Return the arrays of a file of rows, and its first `limit` rows for a model.

    The rows are checked against the inputs of the model. With one array besides `labels`, and one
    input besides those in `fix`, the array is used for the input. Their names can differ, but they
    must have the same number of axes.
    """
    from onnx_ops.domain.pipeline import FileData
    from onnx_ops.tools.supplied_rows import check_samples

    if not data.exists():
        raise NotFoundError("no such file", where=str(data))
    path = data.resolve()
    arrays = context.source("file").load(FileData(file=path.name), path.parent)
    specs = [spec for spec in inputs if spec.name not in (fix or ())]
    others = [array for name, array in arrays.items() if name != labels]
    if len(specs) == len(others) == 1 and others[0].ndim == len(specs[0].shape):
        arrays = {**arrays, specs[0].name: others[0]}
    return arrays, check_samples(inputs, arrays, where=str(data), limit=limit, fix=fix)


def parse_sizes(dims: list[str]) -> dict[str, int]:
    """Return the sizes of dimensions by name, from `NAME=SIZE` texts."""
    sizes = {}
    for text in dims:
        name, _, size = text.partition("=")
        if not (name and size.isdecimal() and 0 < int(size) < 1 << 31):
            raise UserError(
                f"{text!r} is not NAME=SIZE", where="--dim", remedy="For example: --dim height=224."
            )
        sizes[name] = int(size)
    return sizes


def parse_values(texts: list[str], option: str = "--fix") -> dict[str, Any]:
    """Return values of inputs or parameters by name, from `NAME=VALUE` texts.

    A value is a number, a boolean, a text or a list.
    """
    import yaml

    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{text!r} is not NAME=VALUE", where=option, why=str(error)) from error
        if not (name and separator) or values[name] is None or isinstance(values[name], dict):
            raise UserError(
                f"{text!r} is not NAME=VALUE",
                where=option,
                remedy=f"For example: {option} sr=16000.",
            )
    return values


@contextmanager
def show_progress(command: str, *places: object, quiet: bool) -> Iterator[ReportLine]:
    """Show the running steps on standard error.

    A terminal shows one line that is redrawn. Without a terminal, each step is printed on a line.
    With `quiet`, nothing is shown.
    """
    console = error_console()
    if quiet or not console.is_terminal:
        shown: list[str] = []

        def report(text: str) -> None:
            # Lines can be redrawn only in a terminal, so repeated lines are left out elsewhere.
            if not quiet and text not in shown[-1:]:
                shown.append(text)
                console.print(markup("{}", text), soft_wrap=True)

        yield report
        return
    with working(" ".join((command, *map(str, places))), command) as progress:
        yield progress.show_detail


_RUNS = "single runs without preemption"
_PROCESSES = "fresh processes, file in the page cache; median"
_UNDER_LOAD = "fresh sessions under concurrent requests; median"
_OF = {
    "p50": _RUNS,
    "p90": _RUNS,
    "p99": _RUNS,
    "load": _PROCESSES,
    "first": _PROCESSES,
    "peak": _PROCESSES,
}
"""The samples behind the values of one model; other values are throughputs."""


def _report(result: SingleModelResult, model: Path, target: str) -> None:
    rows = "1 row" if result.batch == 1 else f"{result.batch} rows"
    print_text("[bold]{} on {}, {} a request[/bold]", model.name, target, rows)
    cells = []
    for name, metric in result.metrics.items():
        interval = format_interval(metric.low, metric.high, metric.unit, near=metric.value)
        texts = (format_figure(metric.value, metric.unit), interval)
        cells.append(
            [
                name,
                *(text.replace(" ", KEEP) for text in texts),
                f"{metric.n} {_OF.get(name, _UNDER_LOAD)}",
            ]
        )
    print_table(("metric", "value", "interval (95 % a side)", "n"), cells)
    if 0 < result.runs == result.preempted:
        say(f"All {result.runs} runs were preempted, so none was omitted.")
    else:
        share = result.preempted / result.runs if result.runs else 0.0
        preempted = f"{result.preempted} of {result.runs} runs"
        say(f"{preempted} were preempted ({100 * share:.2g}%) and omitted.")
    hardware, facts = result.hardware, result.facts
    nodes = ", ".join(
        f"{name} {count} node{'' if count == 1 else 's'}" for name, count in facts.nodes.items()
    )
    load = f", load {result.conditions['load']}" if "load" in result.conditions else ""
    machine = f"{hardware.cpu_model}, {hardware.cores} cores{load}"
    print_text(
        "[dim]{}; {} {}: {}[/dim]",
        machine,
        facts.runtime,
        facts.version,
        nodes or ", ".join(facts.used),
    )
    advise(result.advice)


def advise(advice: Sequence[Advice]) -> None:
    """Print the causes of a slow or wrong model, and the settings that fix them."""
    from onnx_ops.reporting.structure import advice_lines

    for line in advice_lines(advice):
        print_text("[yellow]advice[/yellow] {}", line)
