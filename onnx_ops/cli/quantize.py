"""`onnx-ops quantize`: one variant of one ONNX file, by a recipe or by a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, Quiet, open_project, print_json, print_text, say
from onnx_ops.cli.tools import Fix, advise, guard_context, load_rows, parse_values, show_progress
from onnx_ops.domain.artifact import Digest, digest_file
from onnx_ops.domain.quantization import AUTO, METHODS, ROLES, Budget, Role
from onnx_ops.errors import UserError
from onnx_ops.plugins import require, tools
from onnx_ops.reporting.formatting import format_figure

if TYPE_CHECKING:
    from onnx_ops.domain.gate import MetricDefinition
    from onnx_ops.domain.pipeline import Calibrate
    from onnx_ops.domain.quantities import Json
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Context, Dataset
    from onnx_ops.tools.quantize import QuantizedFile


def quantize(
    model: Annotated[Path, typer.Argument(help="ONNX file in float.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(help="File of the variant; must not exist.", show_default=False)
    ],
    *,
    method: Annotated[str, typer.Option(help=f"{AUTO}, or a plugin: {', '.join(METHODS)}.")],
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="Target on which the variant will run; may be repeated. Default: cpu-1t.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Calibration rows, e.g. .npz with arrays by input name.", show_default=False
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Maximum number of rows to calibrate on.")
    ] = 256,
    calibration_method: Annotated[
        str, typer.Option(help="Calibration method: minmax, entropy, percentile.")
    ] = "minmax",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Node that stays in float; may be repeated.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Option of the method, e.g. bits=4."),
    ] = None,
    per_channel: Annotated[
        bool, typer.Option(help="Use one scale per output channel of a weight.")
    ] = True,
    tuning_data: Annotated[
        Path | None,
        typer.Option(
            help="auto: tuning rows of the search, e.g. .npz with labels.", show_default=False
        ),
    ] = None,
    label: Annotated[
        str, typer.Option(help="auto: array of the labels in the tuning rows.")
    ] = "label",
    metric: Annotated[
        str, typer.Option(help="auto: task metric that the budget limits.")
    ] = "accuracy",
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="auto: metric_drop=0.5%, size=2MB, p99=5ms, max_minutes=5, max_builds=9.",
        ),
    ] = None,
    select: Annotated[
        str, typer.Option(help="auto: point of the Pareto front to keep: fast, small or exact.")
    ] = "fast",
    fix: Fix = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Quantize an ONNX file by a recipe that fits its targets.

    `--method auto` searches for the recipe under a budget. A repeated call resumes an interrupted
    search. The search writes all its trials beside OUT, as OUT.search.json.

    The output shows how the variant was made and why, and its size. For each target, it shows what
    runs in int8, or for a float variant an estimate of its time. It also shows what slows the
    variant down there, with the setting that fixes it. `judge` and the gates of a pipeline decide
    whether it is correct and fast enough.

    Exit code: 0 created, 2 wrong input, 4 the library failed.

    Example: onnx-ops quantize model.onnx int8.onnx --method static --data train.npz

    Example: onnx-ops quantize model.onnx best.onnx --method auto --tuning-data tune.npz --budget
    metric_drop=0.5%
    """
    from onnx_ops.domain.pipeline import Quantize
    from onnx_ops.onnx_graph.model_info import read_model_info
    from onnx_ops.tools.quantize import quantize_file, search_variant

    project = open_project()
    context = guard_context(project.context)
    if method != AUTO:
        require(*tools(context.optimizer(method, None)), where=f"method {method}")
    chosen = [project.targets.load(name, where="--target") for name in targets or ["cpu-1t"]]
    section = Quantize(
        name=out.stem,
        method=method,
        calibrate=_parse_calibration(calibration_method, samples) if data else None,
        per_channel=per_channel,
        exclude=tuple(exclude or ()),
        options=_parse_options(options or []),
    )
    values = parse_values(fix or [])
    rows = (
        load_rows(read_model_info(model).inputs, context, data, samples, values)[1]
        if data
        else None
    )
    if method == AUTO:
        with show_progress("quantize", model, quiet=quiet or as_json) as report:
            _refuse_recipe_options(exclude, options)
            role, definition = _parse_role(select), _parse_metric(metric)
            result = search_variant(
                context,
                replace(section, variants=(role,), budget=_parse_budget(budget or [])),
                model,
                out,
                targets=tuple(chosen),
                tuning_data=_load_tuning(context, model, tuning_data, label, definition, values),
                metric=definition,
                calibration=rows.rows if rows else None,
                data=_digest_rows(tuning_data=tuning_data, data=data),
                report=report,
            )
    else:
        _refuse_search_options(method, tuning_data, budget)
        result = quantize_file(context, section, model, out, targets=chosen, calibration=rows)
    if as_json:
        _print_document(result, model, out)
    else:
        _report(result, out, chosen)


def _refuse_recipe_options(exclude: list[str] | None, options: list[str] | None) -> None:
    """Raise UserError for options that a search determines for each of its recipes."""
    if exclude or options:
        what, where = f"method {AUTO} determines these options", "--exclude, --option"
        raise UserError(what, where=where, remedy="Leave these options out.")


def _refuse_search_options(method: str, tuning_data: Path | None, budget: list[str] | None) -> None:
    """Raise UserError for --tuning-data and --budget, which only a search uses."""
    if tuning_data or budget:
        raise UserError(
            f"method {method} does not search",
            where="--tuning-data, --budget",
            remedy="Use these options only with --method auto.",
        )


def _parse_role(name: str) -> Role:
    """Return the point of the Pareto front that `--select` names."""
    role = next((known for known in ROLES if known == name), None)
    if role is None:
        why = f"there are {', '.join(ROLES)}"
        what = f"the Pareto front has no point {name!r}"
        raise UserError(what, where="--select", why=why)
    return role


def _parse_metric(name: str) -> MetricDefinition:
    """Return the task metric that `--metric` names."""
    from onnx_ops.domain.gate import MetricGate
    from onnx_ops.domain.task_metrics import METRICS

    score = next((known for known in METRICS if known == name), None)
    if score is None:
        why = f"there are {', '.join(METRICS)}"
        raise UserError(f"no metric is called {name!r}", where="--metric", why=why)
    return MetricGate(name=score).definition()


def _digest_rows(**paths: Path | None) -> dict[str, Digest]:
    """Return the digest of each given file of rows.

    A search can only be resumed with the same rows.
    """
    return {name: digest_file(path) for name, path in paths.items() if path}


def _print_document(result: QuantizedFile, model: Path, out: Path) -> None:
    ratios = {
        name: {"why": entry.why}
        if entry.why
        else {"ratio": entry.ratio, "low": entry.low, "high": entry.high}
        for name, entry in result.effects.items()
    }
    print_json(
        {
            "tool": "quantize",
            "model": {"path": str(model), "bytes": result.sizes[0]},
            "variant": {"path": str(out), "bytes": result.sizes[1]},
            "recipe": list(result.recipe),
            "targets": codec.to_json(dict(result.examined)),
            "times": ratios,
            "exit_code": 0,
        }
    )


def _parse_calibration(method: str, samples: int) -> Calibrate:
    from onnx_ops.config.binding import REFUSED
    from onnx_ops.domain.pipeline import Calibrate

    known = get_args(get_type_hints(Calibrate)["method"])
    if method not in known:
        why = REFUSED.get(method, f"there are {', '.join(known)}")
        raise UserError(
            f"no calibration method is called {method!r}", where="--calibration-method", why=why
        )
    return Calibrate(samples=samples, method=method)  # type: ignore[arg-type]


def _parse_options(texts: list[str]) -> dict[str, Json]:
    import yaml

    options: dict[str, Json] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(
                f"{text!r} is not NAME=VALUE", where="--option", why=str(error)
            ) from error
        if not (name and separator):
            raise UserError(
                f"{text!r} is not NAME=VALUE",
                where="--option",
                remedy="For example: --option bits=4.",
            )
    return options


def _report(result: QuantizedFile, out: Path, targets: list[Target]) -> None:
    from onnx_ops.reporting.structure import coverage_lines

    before, after = result.sizes
    sizes = (
        f"{format_figure(before, 'B')} to {format_figure(after, 'B')}, "
        f"{after / before:.2f} times the size"
    )
    print_text("[bold]{}: {}[/bold]", out.name, sizes)
    for note in result.recipe:
        say(f"recipe: {note}")
    for target in targets:
        entry = result.examined[target.name]
        if entry.why:
            say(f"{target.name}: not examined: {entry.why}")
        for line in coverage_lines(entry.coverage):
            say(f"{target.name}: {line}")
        if target.name in result.effects:
            say(f"{target.name}: {result.effects[target.name]}")
        advise(entry.advice)


def _parse_budget(texts: list[str]) -> Budget:
    from annotated_types import Unit

    from onnx_ops.config.quantities import parse_quantity

    hints = get_type_hints(Budget, include_extras=True)
    values: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in hints:
            known = ", ".join(f.name for f in fields(Budget))
            raise UserError(
                f"a budget has no limit {name!r}", where="--budget", why=f"it has {known}"
            )
        unit = next((part.unit for part in _parts(hints[name]) if isinstance(part, Unit)), None)
        try:
            values[name] = (
                parse_quantity(value, unit)
                if unit
                else (int if name == "max_builds" else float)(value)
            )
        except ValueError as error:
            raise UserError(str(error), where=f"--budget {text}") from error
        if not values[name] > 0 and name != "metric_drop":
            raise UserError("the limit must be above 0", where=f"--budget {text}")
    return Budget(**values)


def _parts(hint: Any) -> list[Any]:
    """Return a type hint and, recursively, all of its type arguments and annotations."""
    return [hint, *(part for argument in get_args(hint) for part in _parts(argument))]


def _load_tuning(
    context: Context,
    model: Path,
    path: Path | None,
    name: str,
    metric: MetricDefinition,
    fix: Mapping[str, Any],
) -> Dataset:
    """Return at most 512 tuning rows, on which a search measures its recipes."""
    from onnx_ops.onnx_graph.model_info import read_model_info
    from onnx_ops.ports import Dataset

    if path is None:
        raise UserError(
            "a search needs tuning rows",
            where="--tuning-data",
            remedy="For example: --tuning-data tune.npz, with the model's inputs and an array "
            f"{name!r}.",
        )
    arrays, samples = load_rows(read_model_info(model).inputs, context, path, 512, fix, name)
    if name not in arrays and not metric.label_free:
        raise UserError(
            f"the file has no array {name!r}",
            where=str(path),
            why=f"{metric.name} needs labels; the file has {', '.join(arrays)}",
            remedy="Name the array of the labels: --label NAME.",
        )
    label = arrays[name][:512] if name in arrays else None
    return Dataset(inputs=samples.rows, label=label, values=samples.fixed)
