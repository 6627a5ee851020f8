"""`onnx-ops init`."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onnx_ops.cli.common import AsJson, print_json, reported


class TemplateChoice(StrEnum):
    """What a project starts from."""

    SKLEARN = "sklearn"
    TORCH = "torch"
    ONNX = "onnx"


@reported
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.", show_default=False)],
    template: Annotated[
        TemplateChoice, typer.Option(help="scikit-learn, PyTorch, or an ONNX file that you bring.")
    ] = TemplateChoice.SKLEARN,
    name: Annotated[
        str | None,
        typer.Option(help="Of pipeline, model and endpoint. Default: the folder's name.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a working project: pipeline, model, flows, workflows, infrastructure, tests.

    Its demo and its tests run at once, on data that scikit-learn brings. Nothing that is there is overwritten.

    Example: onnx-ops init fraud --template sklearn
    """
    from onnx_ops.app.scaffold import scaffold

    chosen = name or folder.resolve().name
    files = scaffold(folder, chosen, template.value)
    if as_json:
        print_json({"name": chosen, "folder": str(folder), "files": list(files)})
        return
    typer.echo(f"{folder}: {len(files)} files around configs/pipelines/{chosen}.yaml")
    typer.echo(
        f"\n  cd {shlex.quote(str(folder))}\n"
        "  make demo                    # makes .venv/; from training to an endpoint that answers\n"
        "  make test\n"
        "  . .venv/bin/activate         # puts onnx-ops on the path\n"
        "\nREADME.md describes the files."
    )
