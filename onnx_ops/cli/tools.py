"""Tools for single files, useful without any pipeline or project: compare, bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops.cli.common import AsJson, Quiet, print_json, reported
from onnx_ops.errors import NotFound, UserError

if TYPE_CHECKING:
    from onnx_ops.domain.artifact import TensorSpec
    from onnx_ops.domain.gate import Gate
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Ports, Tensors
    from onnx_ops.stages.probing import Samples

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


@reported
def compare(
    a: Annotated[Path, typer.Argument(help="The model that is right.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The model that should be the same function.", show_default=False)],
    data: Data = None,
    target: TargetName = "cpu-1t",
    rows: Annotated[int, typer.Option(min=1, max=100_000, help="Rows to compare on.")] = 128,
    dims: Dims = None,
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the runs of one session may take.")] = 1800,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Tell whether B computes what A computes: on rows of data (or random ones), at their edges, and in batches.

    A without graph optimisations is the reference, B runs as on the target. There is no float64 source here, so fixed
    tolerances hold: rtol 1e-3 and atol 1e-5 of the output's scale.

    Exit code: 0 the same, 1 not, 2 wrong input, 3 inconclusive, 4 not measured.

    Example: onnx-ops compare model.onnx model-optimised.onnx --data samples.npz
    """
    from onnx_ops.adapters.runtimes.shielded import shielded_runtime
    from onnx_ops.cli.tool_reports import parity_document, parity_report
    from onnx_ops.stages.compare import REFERENCE
    from onnx_ops.stages.compare import compare as use_case
    from onnx_ops.stages.probing import fixed_by

    ports, chosen = _bench_of(target)
    samples = _samples(a, b, ports, data, dims, rows=rows, seed=seed)
    with telling(quiet=quiet or as_json) as tell:
        runtime = shielded_runtime(ports.runtime(chosen.runtime), timeout)
        exact = shielded_runtime(ports.runtime(REFERENCE.runtime), timeout)
        sizes = fixed_by(a, b) if data else sizes_of(dims or [])  # a person's own rows have the sizes that matter
        found = use_case(runtime, chosen, a, b, samples, tell, sizes=sizes, exact=exact)
    source = str(data) if data else f"made-up rows (seed {seed}); other values need --data"
    if as_json:
        print_json(parity_document(found, a, b, chosen.name, source))
    else:
        parity_report(found, a, b, chosen.name, source)
    raise typer.Exit(found.verdict.exit_code)


@reported
def bench(
    a: Annotated[Path, typer.Argument(help="The model, or the baseline of B.", show_default=False)],
    b: Annotated[Path | None, typer.Argument(help="The model that may not be slower.", show_default=False)] = None,
    *,
    target: TargetName = "cpu-1t",
    max_regression: Annotated[
        str | None,
        typer.Option(
            help="With B: how much worse each figure may be. Default: 5%, cold start 20%, memory 10%.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Also the throughput with N requests at once.", metavar="N"),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also load time, first inference and peak memory of fresh processes.")
    ] = False,
    data: Data = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of one request.")] = 1,
    runs: Annotated[int, typer.Option(min=20, max=1_000_000, help="Without B: timed runs.")] = 800,
    dims: Dims = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time A alone, or tell by a paired comparison whether B is slower than A.

    With B both models are timed now, side by side, in pairs of fresh sessions (5 and up, until it is decided), and A
    against itself for the noise of this machine. Alone: quantiles of single runs. --concurrency and --cold measure
    more; with B the worst verdict counts.

    Exit code: 0 within the limits, 1 worse, 2 wrong input, 3 inconclusive (a noisy machine), 4 not measured.

    Example: onnx-ops bench model.onnx model-int8.onnx --target cpu-1t --max-regression 5% --concurrency 4
    """
    from onnx_ops.stages.bench_pair import pair_gates

    gates = pair_gates(_tolerance(max_regression, paired=b is not None), concurrency=concurrency, cold=cold)
    ports, chosen = _bench_of(target)
    feed = _samples(a, b, ports, data, dims, rows=batch, seed=seed).feed(batch)
    with telling(quiet=quiet or as_json) as tell:
        show = (
            _time_pair(ports, chosen, a, b, feed, gates, seed, tell)
            if b
            else _time(ports, chosen, a, feed, runs, gates, seed, tell)
        )
    raise typer.Exit(show(as_json))


def _time(
    ports: Ports, target: Target, model: Path, feed: Tensors, runs: int, gates: Sequence[Gate], seed: int, tell: Tell
) -> Callable[[bool], int]:
    """Time one model; what is returned shows the result and gives the exit code."""
    from onnx_ops.cli.tool_reports import alone_document, alone_report
    from onnx_ops.domain.measuring import asked_by
    from onnx_ops.stages.bench import bench as use_case

    found = use_case(
        ports.runtime(target.runtime),
        target,
        model,
        feed,
        runs=runs,
        conditions=ports.conditions,
        asked=asked_by(gates),
        seed=seed,
        tell=tell,
    )

    def show(as_json: bool) -> int:
        if as_json:
            print_json(alone_document(found, model, target.name))
        else:
            alone_report(found, model, target.name)
        return 0

    return show


def _time_pair(
    ports: Ports, target: Target, a: Path, b: Path, feed: Tensors, gates: Sequence[Gate], seed: int, tell: Tell
) -> Callable[[bool], int]:
    """Time B against A; what is returned shows the result and gives the exit code."""
    from onnx_ops.cli.tool_reports import paired_document, paired_report
    from onnx_ops.stages.bench_pair import bench_pair

    found = bench_pair(
        ports.runtime(target.runtime),
        target,
        a,
        b,
        feed,
        gates=gates,
        conditions=ports.conditions,
        seed=seed,
        tell=tell,
    )

    def show(as_json: bool) -> int:
        if as_json:
            print_json(paired_document(found, a, b))
        else:
            paired_report(found, a, b)
        return found.verdict.exit_code

    return show


def _bench_of(name: str) -> tuple[Ports, Target]:
    """The outside world and the target, in a project or anywhere else."""
    from onnx_ops.spec.builtin import find_target
    from onnx_ops.wiring.project import open_project

    project = open_project()
    return project.ports, find_target(name, project.targets)


def _samples(
    a: Path, b: Path | None, ports: Ports, data: Path | None, dims: list[str] | None, *, rows: int, seed: int
) -> Samples:
    from onnx_ops.graph.input_bounds import input_bounds
    from onnx_ops.stages.probing import fixed_by, made_up, shared_inputs

    inputs = shared_inputs(a, b)
    sizes = sizes_of(dims or [])
    if b is not None:
        fixed = fixed_by(a, b)
        sizes = {name: size for name, size in sizes.items() if fixed.get(name) != size}
    if data is None:
        return made_up(inputs, count=rows, dims=sizes, seed=seed, bounds=input_bounds(a))
    if sizes:
        raise UserError("--dim is for random rows, and --data brings its own", where="--dim")
    return read_rows(inputs, ports, data, rows)


def read_rows(inputs: tuple[TensorSpec, ...], ports: Ports, data: Path, limit: int) -> Samples:
    """The first rows of a .npz file, checked against the inputs of a model."""
    from onnx_ops.domain.pipeline import FileData
    from onnx_ops.stages.probing import brought

    if not data.is_file():
        raise NotFound("no such file", where=str(data))
    path = data.resolve()
    section = FileData(file=path.name, inputs={spec.name: spec.name for spec in inputs})
    return brought(inputs, ports.source("file").load(section, path.parent), where=str(data), limit=limit)


def sizes_of(dims: list[str]) -> dict[str, int]:
    sizes = {}
    for text in dims:
        name, _, size = text.partition("=")
        if not (name and size.isdecimal() and 0 < int(size) < 1 << 31):
            raise UserError(f"{text!r} is not NAME=SIZE", where="--dim", remedy="For example: --dim height=224.")
        sizes[name] = int(size)
    return sizes


def _tolerance(text: str | None, *, paired: bool) -> float | None:
    from onnx_ops.spec.quantities import parse_quantity

    if text is None:
        return None
    if not paired:
        raise UserError(
            "there is nothing to compare with", where="--max-regression", remedy="Name two models: A.onnx B.onnx."
        )
    try:
        value = float(parse_quantity(text, "1"))
    except ValueError as error:
        raise UserError(str(error), where="--max-regression") from error
    if value <= 0:
        raise UserError("the limit must be above 0%", where="--max-regression")
    return value


@contextmanager
def telling(*, quiet: bool) -> Iterator[Tell]:
    """Tells on standard error what is at work: a spinner on a terminal, else a line each."""
    from rich.markup import escape

    from onnx_ops.cli.tables import error_console

    console = error_console()
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with console.status("…") as status:
            yield lambda text: status.update(escape(text))
    else:
        yield lambda text: console.print(escape(text), soft_wrap=True)
