"""The command that fetches a release's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_ops.cli.common import AsJson, print_json, reported, version_of
from onnx_ops.errors import UserError

REPORT = "report.html"


@reported
def report(
    version: Annotated[str, typer.Argument(metavar="MODEL/VERSION", help="A registered version, e.g. digits-mlp/3.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: MODEL-VERSION.html.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the HTML report of a version's whole release to a file.

    Nothing is measured or judged; prints the path of the file.

    Example: onnx-ops report digits-mlp/3 --output report.html
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working

    model, number = version_of(version, "report")
    with working("report", "fetching the report", quiet=as_json):
        registry = open_project().ports.registry()
        page = registry.document(registry.version(model, number), REPORT)
    path = output or Path(f"{model.replace('/', '-')}-{number}.html")
    try:
        path.write_bytes(page)
    except OSError as error:
        raise UserError("the report cannot be written", where=str(path), why=error.strerror or str(error)) from error
    if as_json:
        print_json({"model": model, "version": number, "report": str(path)})
    else:
        typer.echo(str(path))
