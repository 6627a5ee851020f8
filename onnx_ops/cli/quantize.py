"""`onnx-ops quantize`: one variant of one ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops.cli.common import AsJson, Quiet, print_json, reported
from onnx_ops.errors import UserError
from onnx_ops.plugins import require, tools

if TYPE_CHECKING:
    from onnx_ops.domain.quantities import Json
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Ports, Tensors
    from onnx_ops.tools.quantize import QuantizedFile


@reported
def quantize(
    model: Annotated[Path, typer.Argument(help="ONNX file in float.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The variant; must not exist.", show_default=False)],
    *,
    method: Annotated[
        str,
        typer.Option(
            help="auto, static, dynamic, fp16, weight-only, graph, onnxslim, onnxsim, onnxoptimizer, fusion, "
            "fixed-shapes."
        ),
    ],
    targets: Annotated[
        list[str] | None, typer.Option("--target", help="Where it is to run; may be repeated. Default: cpu-1t.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Calibration rows: .npz, arrays by input name.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rows to calibrate on.")] = 256,
    ranges: Annotated[str, typer.Option(help="How ranges are read off them: minmax, entropy, percentile.")] = "minmax",
    exclude: Annotated[list[str] | None, typer.Option(help="Node that stays in float; may be repeated.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Of the method, e.g. bits=4.")
    ] = None,
    per_channel: Annotated[bool, typer.Option(help="One scale per output channel of a weight.")] = True,
    tune: Annotated[
        Path | None, typer.Option(help="auto: rows that it decides by: .npz, with labels.", show_default=False)
    ] = None,
    label: Annotated[str, typer.Option(help="auto: array of the labels among them.")] = "label",
    metric: Annotated[str, typer.Option(help="auto: task metric that must be kept.")] = "accuracy",
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="auto: metric_drop=0.5%, size=2MB, p99=5ms, max_minutes=5, max_builds=9."
        ),
    ] = None,
    keep: Annotated[str, typer.Option(help="auto: what of the front is wanted: fast, small or exact.")] = "fast",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Quantize an ONNX file by a recipe that fits its targets, and show what each target makes of it.

    `--method auto` searches for the recipe under a budget, and goes on where it was stopped when it is called again.
    It writes everything it tried beside OUT, as OUT.search.json.

    Shows how the variant was made and why, its size, what runs in int8 (of a float variant: a first measurement of its
    time), and what slows it down with the setting that mends it. Whether it is right and fast enough is for `judge` and
    for the gates of a pipeline.

    Exit code: 0 made, 2 wrong input, 4 the library failed.

    Example: onnx-ops quantize model.onnx int8.onnx --method static --data train.npz

    Example: onnx-ops quantize model.onnx best.onnx --method auto --tune tune.npz --budget metric_drop=0.5%
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.tools import telling
    from onnx_ops.domain.pipeline import Quantize
    from onnx_ops.domain.quantization import AUTO
    from onnx_ops.tools.quantize import quantize_file

    project = open_project()
    ports = project.ports
    if method != AUTO:
        require(*tools(ports.optimizer(method)), where=f"method {method}")
    chosen = [project.targets.load(name, where="--target") for name in targets or ["cpu-1t"]]
    section = Quantize(
        name=out.stem,
        method=method,
        calibrate=_calibrate(ranges, samples) if data else None,
        per_channel=per_channel,
        exclude=tuple(exclude or ()),
        options=_options(options or []),
    )
    rows = _rows(ports, model, data, samples) if data else None
    if method == AUTO:
        from onnx_ops.cli.searching import Tuning, quantize_by_search

        tuning = Tuning(tune=tune, label=label, metric=metric, budget=tuple(budget or ()), keep=keep, data=data)
        with telling("quantize", model, quiet=quiet or as_json) as tell:
            found = quantize_by_search(ports, section, model, out, chosen, rows, tuning, tell)
    elif tune or budget:
        raise UserError(f"{method} does as it is told", where="--tune, --budget", remedy="They are for --method auto.")
    else:
        found = quantize_file(ports, section, model, out, targets=chosen, calibration=rows)
    if as_json:
        print_json(_document(found, model, out))
    else:
        _report(found, out, chosen)


def _calibrate(ranges: str, samples: int) -> Any:
    from typing import get_args, get_type_hints

    from onnx_ops.domain.pipeline import Calibrate
    from onnx_ops.domain.quantization import DISTRIBUTION

    known = get_args(get_type_hints(Calibrate)["method"])
    if ranges not in known:
        why = DISTRIBUTION if ranges == "distribution" else f"there are {', '.join(known)}"
        raise UserError(f"ranges cannot be read off by {ranges!r}", where="--ranges", why=why)
    return Calibrate(samples=samples, method=ranges)  # type: ignore[arg-type]


def _options(texts: list[str]) -> dict[str, Json]:
    import yaml

    found: dict[str, Json] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{text!r} is not NAME=VALUE", where="--option", why=str(error)) from error
        if not (name and separator):
            raise UserError(f"{text!r} is not NAME=VALUE", where="--option", remedy="For example: --option bits=4.")
    return found


def _rows(ports: Ports, model: Path, data: Path, samples: int) -> Tensors:
    from onnx_ops.cli.tools import read_rows
    from onnx_ops.onnx_graph.model_info import read_model_info

    return read_rows(read_model_info(model).inputs, ports, data, samples).rows


def _document(found: QuantizedFile, model: Path, out: Path) -> dict[str, Any]:
    from onnx_ops import codec

    return {
        "tool": "quantize",
        "model": {"path": str(model), "bytes": found.sizes[0]},
        "variant": {"path": str(out), "bytes": found.sizes[1]},
        "recipe": list(found.recipe),
        "targets": {name: codec.to_json(one) for name, one in found.examined.items()},
        "times": {
            name: {"why": one.why} if one.why else {"ratio": one.ratio, "low": one.low, "high": one.high}
            for name, one in found.effects.items()
        },
        "exit_code": 0,
    }


def _report(found: QuantizedFile, out: Path, targets: list[Target]) -> None:
    from rich.markup import escape

    from onnx_ops.cli.terminal import console, print_text
    from onnx_ops.cli.tool_reports import advise
    from onnx_ops.reporting.formatting import format_figure
    from onnx_ops.reporting.structure import coverage_lines

    show = console()
    before, after = found.sizes
    sizes = f"{format_figure(before, 'B')} to {format_figure(after, 'B')}, {after / before:.2f} times the size"
    print_text(show, f"[bold]{escape(f'{out.name}: {sizes}')}[/bold]")
    for note in found.recipe:
        print_text(show, escape(f"recipe: {note}"))
    for target in targets:
        one = found.examined[target.name]
        for line in coverage_lines(one.coverage):
            print_text(show, escape(f"{target.name}: {line}"))
        if target.name in found.effects:
            print_text(show, escape(f"{target.name}: {found.effects[target.name].words()}"))
        advise(one.advice)
