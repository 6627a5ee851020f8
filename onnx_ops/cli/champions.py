"""`onnx-ops champions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, Quiet, print_json, reported

if TYPE_CHECKING:
    from onnx_ops.domain.decision import Drift


@reported
def champions(
    pipelines: Annotated[
        list[str] | None, typer.Argument(metavar="PIPELINE...", help="Pipelines or models; all by default.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure the champions again, after an upgrade or on a new machine.

    Each one's own benchmark, judged by the gates that it was released by. Nothing is recorded or changed. Exit code: 1
    if one has drifted, else 4 if one could not be measured, else 0.

    Example: onnx-ops champions digits-mlp
    """
    from onnx_ops.app.champions import measure_again, reigns
    from onnx_ops.app.child import Performer
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working
    from onnx_ops.domain.decision import compute_drift_exit_code

    project = open_project()
    performer = Performer(settings=project.settings, ports=project.ports)
    found: list[Drift] = []
    with working("champions", "registry", quiet=quiet or as_json) as progress:
        standing = reigns(project.ports, tuple(pipelines or ()))
        names = [f"{reign.record.model} v{reign.record.version} on {reign.target}" for reign in standing]
        progress.plan(names)
        for name, reign in zip(names, standing, strict=True):
            progress.begin(name)
            found.append(measure_again(project.ports, performer, reign))
    if as_json:
        print_json(codec.to_json(found))
    else:
        _tell(found)
    raise typer.Exit(compute_drift_exit_code(found))


def _tell(found: Sequence[Drift]) -> None:
    from onnx_ops.cli.tables import champions_table

    if found:
        champions_table(found)
    else:
        typer.echo("no champions yet: the first release of a pipeline makes one")
