"""`onnx-ops affected`."""

from __future__ import annotations

from typing import Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, print_json, reported
from onnx_ops.cli.terminal import say


@reported
def affected(
    since: Annotated[str, typer.Option(help="Branch, tag or commit to compare with.")] = "main",
    as_json: AsJson = False,
) -> None:
    """List the pipelines that a change touches: by file, target, data, model, or code that they reach.

    What was changed since this branch left the other one, committed or not. A `.dvc` file stands for the data that it
    points to. Exit code: 0, also where none is touched.

    Example: onnx-ops affected --since origin/main
    """
    from onnx_ops.app.affected import affected as use_case
    from onnx_ops.app.affected import changed_since
    from onnx_ops.app.project import open_project

    project = open_project()
    found = use_case(project, changed_since(project.settings.root, since))
    if as_json:
        print_json(codec.to_json(found))
        return
    for one in found:
        say(f"{one.file}  because of {', '.join(one.because)}" + (f"\n  {one.problem}" if one.problem else ""))
    if not found:
        say("no pipeline is touched")
