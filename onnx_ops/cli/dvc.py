"""The command that writes a release's figures for DVC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_ops.cli.common import AsJson, print_json, reported, version_of
from onnx_ops.errors import UserError


@reported
def export_dvc(
    version: Annotated[str, typer.Argument(metavar="MODEL/VERSION", help="Any version of the release, e.g. digits/3.")],
    metrics: Annotated[Path, typer.Option(metavar="FILE", help="Where the figures go.")] = Path("metrics.json"),
    plots: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the points of plots go.")] = Path("plots"),
    as_json: AsJson = False,
) -> None:
    """Write the figures of a whole release in DVC's formats, for `dvc metrics show` and `dvc plots show`.

    Nothing is measured; the evidence is that which was signed.

    Example: onnx-ops export-dvc digits-mlp/3 --metrics metrics.json --plots plots
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.release.audit import reevaluate_release
    from onnx_ops.reporting.metrics import dvc_metrics, dvc_plots

    model, number = version_of(version, "export-dvc")
    found = reevaluate_release(open_project().ports, model, number)
    judged = {
        variant: {one.target: (one.signed.record.verdict, one.evidence) for one in explained}
        for variant, explained in found.items()
    }
    files = {metrics: dvc_metrics(judged), **{plots / name: points for name, points in dvc_plots(judged).items()}}
    _write(files)
    if as_json:
        print_json({"model": model, "version": number, "files": [str(path) for path in files]})
    else:
        for path in files:
            typer.echo(str(path))


def _write(files: Mapping[Path, Any]) -> None:
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError("the file cannot be written", where=str(path), why=why) from error
