"""Commands about this machine: doctor, targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, print_json, reported


@reported
def doctor(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pipeline files whose endpoints --provider looks at.")
    ] = None,
    provider: Annotated[
        str, typer.Option(help="Look at what this provider of endpoints needs: azureml, sagemaker.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check packages, providers, services, keys and pins; every problem comes with a remedy.

    With --provider, only what that provider of endpoints needs is looked at: package, credentials, region, role, quota.
    Exit code 4 if something is broken.

    Example: onnx-ops doctor --provider azureml configs/pipelines/digits.yaml
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.diagnosis import CHECKS, diagnose, diagnose_provider
    from onnx_ops.cli.progress import working
    from onnx_ops.cli.tables import doctor_table

    project = open_project()
    with working("doctor", provider or CHECKS[0], *([] if provider else CHECKS[1:]), quiet=as_json) as progress:
        findings = diagnose_provider(project, provider, files or ()) if provider else diagnose(project, progress.begin)
    if as_json:
        print_json(codec.to_json(findings))
    else:
        doctor_table(findings)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(4)


@reported
def targets(as_json: AsJson = False) -> None:
    """List the project's targets and the shipped profiles, and which this machine can measure.

    A session of a tiny model is built for each; nothing is measured. A profile is used by its name, and a file
    configs/targets/NAME.yaml wins over the profile of that name.

    Example: onnx-ops targets --json
    """
    from dataclasses import asdict

    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working
    from onnx_ops.cli.tables import targets_table
    from onnx_ops.cli.targeting import tell_targets

    with working("targets", "building a session for each", quiet=as_json):
        told = list(tell_targets(open_project()))
    if as_json:
        print_json([asdict(one) for one in told])
    else:
        targets_table(told)
