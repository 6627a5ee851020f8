"""Commands about this machine: doctor."""

from __future__ import annotations

import typer

from onnx_ops.cli.common import AsJson, print_json, reported


@reported
def doctor(as_json: AsJson = False) -> None:
    """Check packages, providers, services, keys and pins; every problem comes with a remedy.

    Exit code 4 if something is broken.

    Example: onnx-ops doctor
    """
    from onnx_ops.cli.diagnosis import diagnose
    from onnx_ops.cli.tables import doctor_table
    from onnx_ops.wiring.project import open_project

    findings = diagnose(open_project())
    if as_json:
        print_json([{"check": f.check, "ok": f.ok, "found": f.found, "remedy": f.remedy} for f in findings])
    else:
        doctor_table(findings)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(4)
