"""`onnx-ops judge`: one verdict on two ONNX files."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops.cli.common import AsJson, Quiet, open_project, print_result, require_folder
from onnx_ops.cli.judgement_output import (
    build_document,
    build_heading,
    print_judgement,
    write_reports,
)
from onnx_ops.cli.tools import Fix, parse_values
from onnx_ops.errors import UserError
from onnx_ops.plugins import EXTRAS, require

if TYPE_CHECKING:
    from onnx_ops.domain.artifact import TensorSpec
    from onnx_ops.domain.gate import MetricGate
    from onnx_ops.ports import Context, Dataset
    from onnx_ops.statistics.slices import Slicing
    from onnx_ops.tools.judgement import Judgement, SweepPoint
    from onnx_ops.tools.sample_rows import SampleRows

_MOST_ROWS = 100_000
"""Maximum number of rows of the data that are used; the rest is read and ignored."""


def judge(
    baseline: Annotated[
        str,
        typer.Argument(
            help="The model in use: a file, folder, models:/NAME/VERSION or URL. With --system, "
            "the candidate."
        ),
    ],
    candidate: Annotated[
        str | None,
        typer.Argument(help="The model that would replace it.", show_default=False),
    ] = None,
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Rows: arrays by input name, and labels. Default: generated.", show_default=False
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Array of the labels in the data.", show_default=False),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="accuracy, f1, auc, mae, rmse, cosine, … or package.module:function. Default: "
            "derived from the labels.",
            show_default=False,
        ),
    ] = None,
    max_drop: Annotated[
        str,
        typer.Option(
            metavar="LIMIT",
            help="Largest loss of the metric: points, or a share of the baseline's error.",
        ),
    ] = "1%",
    retrained: Annotated[
        bool,
        typer.Option(
            "--retrained",
            help="The candidate was trained again: judge the task metric, not the difference of "
            "the answers.",
        ),
    ] = False,
    slices: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN[,COLUMN…]",
            help="Also judge the metric in slices: columns of the data, or a crossing A*B.",
            show_default=False,
        ),
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="Direction of a custom metric.")
    ] = False,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="TARGET",
            help="Target to run on; repeat for several. Default: cpu-1t.",
        ),
    ] = None,
    max_regression: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT",
            help="Largest slowdown. Default: 5%, cold start 20%, memory 10%.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N[,N…]", help="Rows of one request.")] = "1",
    dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dim", metavar="NAME=SIZE[,SIZE…]", help="Sizes of a symbolic dimension; default: 8."
        ),
    ] = None,
    fix: Fix = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            metavar="N",
            help="Also measure the throughput of N concurrent requests.",
        ),
    ] = None,
    cold_start: Annotated[
        bool,
        typer.Option(
            "--cold-start",
            help="Also measure load time, first inference and memory of fresh processes.",
        ),
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PART", help="Judge one part only: parity or latency.", show_default=False
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of rows on which answers are compared.")
    ] = 128,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of generated rows and of the order of runs.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that the answers of one session may take.")
    ] = 1800,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="Judge a whole system: package.module:predict, your own code for one raw input.",
            show_default=False,
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="PLACE",
            help="Raw inputs of --system: a folder, or rows in .jsonl, .csv or .txt.",
            show_default=False,
        ),
    ] = None,
    before: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=STEP",
            help="Step before the model: package.module:function or a .onnx file; repeat in order.",
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=STEP", help="Step after the model; repeat in order."),
    ] = None,
    tolerances: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            metavar="NAME=VALUE",
            help="Limit of --system: rounding, resampling, decoding, bias, answers, files, or a "
            "factor for one step.",
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            "--markdown", metavar="FILE", help="Write the table for a pull request; - prints it."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Judge whether one ONNX file may take the place of another.

    Answers, task metric and latency are judged; the size is only shown. The kind of the candidate
    is derived from both files. A float model must give the same answers. A rounded model (int8,
    4-bit, float16) is judged by its weights, activations, function without rounding, and task
    metric. A model that was trained again gives other answers: with --retrained, its task metric
    decides. --system compares your own code with what will be deployed, step by step, on raw
    inputs.

    Exit code: 0 accepted, 1 rejected, 2 wrong input, 3 inconclusive, 4 not measured.

    Example: onnx-ops judge fp32.onnx int8.onnx --data test.npz --labels y --max-drop 1%
    """
    from onnx_ops.cli.inspect import local_model
    from onnx_ops.cli.tools import guard_context, show_progress
    from onnx_ops.onnx_graph.model_kind import read_candidate_kind
    from onnx_ops.statistics.latency import load_functions
    from onnx_ops.tools.compare import REFERENCE
    from onnx_ops.tools.judge import judge_candidate
    from onnx_ops.tools.judgement import JudgeRequest
    from onnx_ops.tools.model_inputs import find_fixed_sizes, shared_inputs

    batches = _parse_options(only, batch, {"--markdown": page, "--html": str(html or "")})
    replacing = _check_models(
        candidate,
        system,
        of_pairs={"--data": data, "--labels": labels, "--metric": metric, "--only": only}
        | {"--retrained": retrained, "--dim": dims, "--fix": fix, "--slices": slices}
        | {"--lower-is-better": lower_is_better, "--max-drop": max_drop != "1%", "--seed": seed}
        | {"--max-regression": max_regression, "--batch": batch != "1"}
        | {"--concurrency": concurrency, "--cold-start": cold_start},
        of_systems={
            "--files": files,
            "--before": before,
            "--after": after,
            "--tolerance": tolerances,
        },
    )
    if system is not None:
        from onnx_ops.cli.system_judgement import SystemOptions, judge_system_command

        options = SystemOptions(
            source=system,
            candidate=baseline,
            files=files,
            before=before,
            after=after,
            tolerances=tolerances,
            targets=targets,
            limit=rows,
            timeout=timeout,
            page=page,
            html=html,
            as_json=as_json,
            quiet=quiet,
        )
        judge_system_command(options, open_project())
        return
    regression, drop = _share(max_regression, "--max-regression"), _share(max_drop, "--max-drop")
    _check_metric(metric, lower_is_better=lower_is_better)
    _check_rows(data, labels, metric, slices, dims, retrained=retrained and only != "latency")
    project = open_project()
    chosen = [
        project.targets.load(name, where="--target")
        for name in dict.fromkeys(targets or ["cpu-1t"])
    ]
    with ExitStack() as stack:
        given = [stack.enter_context(local_model(place)) for place in (baseline, replacing)]
        kind = read_candidate_kind(*given)
        a, b, casts = _with_casts(given, stack)
        inputs, fixed = shared_inputs(a, b), find_fixed_sizes(a, b)
        sweep = _parse_sweep(dims or [], fixed)
        values = parse_values(fix or [])
        dataset, supplied, slicings = _load_dataset(
            project.context, data, labels, inputs, values, slices
        )
        gate, functions = _build_gate(metric, dataset, drop or 0.0, lower_is_better=lower_is_better)
        _check_slices(slices, dataset, gate)
        settings = _list_options(
            a, inputs, supplied, sweep, batches, fixed=fixed, rows=rows, seed=seed, fix=values
        )
        request = JudgeRequest(
            baseline=a,
            candidate=b,
            kind=replace(kind, changes=("trained again", *kind.changes)) if retrained else kind,
            targets=chosen,
            settings=settings,
            runtime=guard_context(project.context, timeout).runtime,
            inside=project.context.runtime(REFERENCE.runtime),
            conditions=project.context.conditions,
            metric=gate,
            dataset=dataset,
            functions=functions,
            slices=slicings,
            max_regression=regression,
            concurrency=concurrency,
            cold=cold_start,
            only=only,  # type: ignore[arg-type]
            retrained=retrained,
            sizes=frozenset(fixed if data else sweep),
            seed=seed,
        )
        with show_progress("judge", baseline, replacing, quiet=quiet or as_json) as show_detail:
            # This thread imports SciPy's functions while other processes run the models.
            threading.Thread(target=load_functions, daemon=True).start()
            judgement = judge_candidate(replace(request, report=show_detail))
        judgement = _restore_given_files(judgement, given, casts)
    origin = _describe_origin(supplied, settings[0].samples, data, labels, seed)
    heading = build_heading(judgement, baseline, replacing, origin, settings)
    write_reports(judgement, heading, html, page)
    print_result(
        lambda: build_document(judgement, heading, baseline, replacing),
        lambda: print_judgement(judgement, heading, as_markdown=page == "-"),
        as_json=as_json,
    )
    raise typer.Exit(judgement.verdict.exit_code)


def _check_models(
    candidate: str | None,
    system: str | None,
    *,
    of_pairs: Mapping[str, object],
    of_systems: Mapping[str, object],
) -> str:
    """Return the model that is to replace the baseline; empty with `--system`.

    `of_pairs` and `of_systems` are the options that apply only without and only with `--system`.

    Raises:
        UserError: a model is missing or superfluous, or an option does not apply.
    """
    others = of_systems if system is None else of_pairs
    name = next((name for name, value in others.items() if value), None)
    if system is not None:
        if candidate is not None:
            remedy = "Name the candidate alone: your own code is the baseline."
            raise UserError("a system is judged with one model", where="--system", remedy=remedy)
        if name is not None:
            raise UserError("the option does not apply to --system", where=name)
        return ""
    if name is not None:
        remedy = (
            "Name your own code: --system package.module:predict."
            if candidate is None
            else "Leave out this option: it applies only to `onnx-ops judge A.onnx --system …`."
        )
        raise UserError("the option needs --system", where=name, remedy=remedy)
    if candidate is None:
        remedy = (
            "Run `onnx-ops judge A.onnx B.onnx`, or compare one model with your own code: "
            "`onnx-ops judge A.onnx --system package.module:predict --files PLACE`."
        )
        raise UserError("the candidate is missing", where="judge", remedy=remedy)
    return candidate


def _restore_given_files(
    judgement: Judgement, given: Sequence[Path], casts: Sequence[str]
) -> Judgement:
    """Return the judgement with the digests and sizes of the user's files.

    The models that were judged can be copies of these files with casts. Notes on the casts are
    added.
    """
    from onnx_ops.domain.artifact import digest_file
    from onnx_ops.onnx_graph.model_info import read_model_info

    if not casts:
        return judgement
    return replace(
        judgement,
        digests=(digest_file(given[0]), digest_file(given[1])),
        sizes=(read_model_info(given[0]).size_bytes, read_model_info(given[1]).size_bytes),
        notes=(*casts, *judgement.notes),
    )


def _describe_origin(
    supplied: SampleRows | None,
    samples: SampleRows,
    data: Path | None,
    labels: str | None,
    seed: int,
) -> str:
    """Return a description of the compared rows: their number and their source."""
    if supplied is not None:
        source = f"{data}, labels {labels}" if labels else f"{data}, without labels"
        return f"{len(supplied)} of {source}" if supplied.rows else f"one request of {source}"
    if samples.rows:
        text = f"{len(samples)} generated from the graph (seed {seed})"
        return f"{text}; pass real rows with --data FILE"
    count = 1 + len(samples.further)
    text = f"none: {count} requests generated from the graph (seed {seed})"
    return f"{text}; pass a real request with --data FILE"


def _parse_options(only: str | None, batch: str, files: Mapping[str, str | None]) -> list[int]:
    """Validate options and return the batch sizes of `--batch`.

    Raises:
        UserError: the value of `--only` or `--batch` is invalid.
        NotFoundError: the folder of an output file does not exist.
    """
    if only not in (None, "parity", "latency"):
        raise UserError(
            f"there is no part {only!r} to judge", where="--only", remedy="Set parity or latency."
        )
    batches = [part.strip() for part in batch.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 100_000 for part in batches):
        remedy = "For example: --batch 1,8,32."
        what = f"{batch!r} is not a list of whole numbers from 1 to 100000"
        raise UserError(what, where="--batch", remedy=remedy)
    for option, path in files.items():
        if path and path != "-":
            require_folder(option, Path(path))
    return list(dict.fromkeys(map(int, batches)))


def _with_casts(given: Sequence[Path], stack: ExitStack) -> tuple[Path, Path, list[str]]:
    """Return both files, with added casts if needed, and notes on the casts.

    A file whose inputs have other float types than the baseline's gets casts, in a copy. Inputs and
    outputs of bfloat16 also get casts. See `write_with_boundary_casts`.
    """
    from onnx_ops.onnx_graph.rewrites import read_boundary_types, write_with_boundary_casts
    from onnx_ops.scratch import Scratch

    wanted, folder = read_boundary_types(given[0]), stack.enter_context(Scratch())
    files, notes = [], []
    for side, file in zip(("baseline", "candidate"), given, strict=True):
        path = folder / side / file.name
        path.parent.mkdir()
        casts = write_with_boundary_casts(file, wanted, path)
        files.append(path if casts else file)
        notes += [f"the {side} has {casts}"] if casts else []
    return files[0], files[1], notes


def _share(text: str | None, option: str) -> float | None:
    from onnx_ops.config.quantities import parse_option

    if text is None:
        return None
    value = parse_option(text, "1", option)
    if value <= 0:
        raise UserError(f"the limit {text} is not above 0%", where=option)
    return value


def _parse_sweep(dims: list[str], fixed: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the sizes of each dimension, from `NAME=SIZE[,SIZE…]` texts.

    Raises:
        UserError: a text is malformed, or the candidate fixes a dimension at another size.
    """
    sizes: dict[str, list[int]] = {}
    for text in dims:
        name, _, listed = text.partition("=")
        parts = listed.split(",")
        if not (name and all(part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts)):
            remedy = "For example: --dim length=32,128."
            raise UserError(f"{text!r} is not NAME=SIZE[,SIZE…]", where="--dim", remedy=remedy)
        sizes[name] = [int(part) for part in parts]
    for name, wanted in sizes.items():
        if name in fixed and wanted != [fixed[name]]:
            remedy = f"Set --dim {name}={fixed[name]}."
            what = f"the candidate fixes dimension {name} at {fixed[name]}"
            raise UserError(what, where="--dim", remedy=remedy)
    return sizes


def _load_dataset(
    context: Context,
    data: Path | None,
    labels: str | None,
    inputs: tuple[TensorSpec, ...],
    fix: Mapping[str, Any],
    by: str | None,
) -> tuple[Dataset | None, SampleRows | None, list[Slicing]]:
    """Return the rows of a file: as a data set, as samples, and as slices.

    Without a file, data set and samples are None. The data set is also None if the file contains a
    single request instead of rows.
    """
    from onnx_ops.cli.tools import load_rows
    from onnx_ops.config.messages import did_you_mean
    from onnx_ops.ports import Dataset

    if data is None:
        return None, None, []
    arrays, samples = load_rows(inputs, context, data, _MOST_ROWS, fix, labels)
    if labels is not None and labels not in arrays:
        others = [name for name in arrays if name not in samples.rows]
        hint = did_you_mean(labels, others) or f"; it has {', '.join(others) or 'only the inputs'}"
        remedy = "Name the array of the labels: --labels NAME."
        what = f"the file has no array {labels!r}{hint}"
        raise UserError(what, where=str(data), remedy=remedy)
    slicings = _read_slices(by, arrays, len(samples), data) if by else []
    if labels is None:
        return Dataset(inputs=samples.rows) if samples.rows else None, samples, slicings
    label = arrays[labels][:_MOST_ROWS]
    if not samples.rows:
        why = "the model's inputs share no dimension, so the file contains one request"
        raise UserError("labels need rows", where="--labels", why=why)
    if not label.ndim or len(label) != len(samples):
        what = (
            f"array {labels!r} has shape {arrays[labels].shape}, "
            f"but the inputs have {len(samples)} rows"
        )
        raise UserError(what, where=str(data), remedy="Store one label for each row.")
    return Dataset(inputs=samples.rows, label=label), samples, slicings


def _check_slices(slices: str | None, dataset: Dataset | None, gate: MetricGate) -> None:
    """Raise UserError if slices are requested, but the metric lacks labels."""
    if slices and not gate.definition().label_free and (dataset is None or dataset.label is None):
        remedy = "Name the array of the labels: --labels NAME."
        raise UserError("a metric in slices needs labels", where="--slices", remedy=remedy)


def _read_slices(by: str, arrays: Mapping[str, Any], rows: int, data: Path) -> list[Slicing]:
    """Return the slices of the rows by the columns of `--slices`."""
    from onnx_ops.measure.slices import make_slicings

    names = list(dict.fromkeys(name.strip() for name in by.split(",")))
    columns = {name: array[:_MOST_ROWS] if array.ndim else array for name, array in arrays.items()}
    return make_slicings(names, columns, rows, where=f"{data}: --slices")


def _check_rows(
    data: Path | None,
    labels: str | None,
    metric: str | None,
    slices: str | None,
    dims: list[str] | None,
    *,
    retrained: bool,
) -> None:
    """Raise UserError if options need missing rows or labels, or exclude rows."""
    options = {"--metric": metric, "--slices": slices, "--labels": labels}
    given = [option for option, value in options.items() if value]
    if data is None and given:
        raise UserError("this option needs rows", where=given[0], remedy="Give --data FILE.")
    if data is not None and dims:
        raise UserError(
            "--dim applies to generated rows, and --data supplies rows",
            where="--dim",
            remedy="Leave out one of them.",
        )
    if retrained and labels is None:
        raise UserError(
            "the metric of a model that was trained again needs labels",
            where="--retrained",
            remedy="Give --data FILE and --labels NAME.",
        )


def _check_metric(name: str | None, *, lower_is_better: bool) -> None:
    from onnx_ops.config.functions import explain_missing_function
    from onnx_ops.config.messages import did_you_mean
    from onnx_ops.domain.task_metrics import METRICS

    known = [str(metric) for metric in METRICS]
    if name is not None and ":" in name:
        if problem := explain_missing_function(name, Path.cwd()):
            raise UserError(
                problem,
                where="--metric",
                remedy="Name a function of (predictions, labels) that returns a float.",
            )
    elif name is not None and name not in known:
        hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
        remedy = "Or name package.module:function."
        raise UserError(f"no metric is called {name!r}{hint}", where="--metric", remedy=remedy)
    elif lower_is_better:
        what = "the direction of the metric is fixed"
        remedy = "Use --lower-is-better only with a custom metric."
        raise UserError(what, where="--lower-is-better", remedy=remedy)


def _build_gate(
    name: str | None, dataset: Dataset | None, drop: float, *, lower_is_better: bool
) -> tuple[MetricGate, dict[str, Any]]:
    """Return the gate of a metric, and the functions that the metric calls.

    The metric is that of `--metric`. By default, the labels determine it: classes or numbers.
    """
    from onnx_ops.domain.task_metrics import DEFAULT_FOR_CLASSES, DEFAULT_FOR_NUMBERS
    from onnx_ops.measure.user_functions import importable, load_functions
    from onnx_ops.tools.judgement import build_metric_gate

    label = dataset.label if dataset is not None else None
    if name is None and label is not None:
        whole = label.dtype.kind in "iubUSO" or not (label % 1).any()
        name = DEFAULT_FOR_CLASSES if whole else DEFAULT_FOR_NUMBERS
    gate = build_metric_gate(name, drop, lower_is_better=lower_is_better)
    if extra := gate.definition().extra:
        require(*EXTRAS[extra], where="--metric")
    if name is not None and label is None and not gate.definition().label_free:
        raise UserError(
            f"{name} needs labels",
            where="--metric",
            remedy="Name the array of the labels: --labels NAME.",
        )
    with importable(Path.cwd()):
        return gate, load_functions(gate.definition().functions, "--metric")


def _list_options(
    baseline: Path,
    inputs: tuple[TensorSpec, ...],
    supplied: SampleRows | None,
    sweep: Mapping[str, Sequence[int]],
    batches: Sequence[int],
    *,
    fixed: Collection[str],
    rows: int,
    seed: int,
    fix: Mapping[str, Any],
) -> list[SweepPoint]:
    """Return every combination of dimensions and batch size.

    If the models have a fixed batch size, only this size is used. `fixed` names the dimensions that
    the candidate fixes. They are free in `inputs` only if another input has the same dimension.
    """
    from onnx_ops.onnx_graph.input_bounds import read_input_bounds
    from onnx_ops.tools.generated_rows import generate_samples
    from onnx_ops.tools.judgement import SweepPoint
    from onnx_ops.tools.model_inputs import list_free_names

    settled = set(fixed) - set(list_free_names(inputs))
    bounds = read_input_bounds(baseline) if supplied is None else {}
    settings: list[SweepPoint] = []
    shapes = list(itertools.product(*sweep.values()))
    for sizes in shapes:
        dims = dict(zip(sweep, sizes, strict=True))
        free = {name: size for name, size in dims.items() if name not in settled}
        samples: SampleRows = (
            generate_samples(inputs, count=rows, dims=free, seed=seed, bounds=bounds, fix=fix)
            if supplied is None
            else supplied.head(max(rows, *batches))
        )
        shape = [f"{name}={size}" for name, size in dims.items()] if len(shapes) > 1 else []
        for size in [samples.batch] if samples.batch else batches:
            parts = [f"batch {size}"] if len(batches) > 1 and not samples.batch else []
            settings.append(
                SweepPoint(name=", ".join((*shape, *parts)), batch=size, samples=samples)
            )
    return settings
