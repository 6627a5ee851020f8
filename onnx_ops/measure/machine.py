"""Whether this machine is one that a target may be measured on."""

from __future__ import annotations

from onnx_ops.domain.hardware import HardwareFingerprint
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import Runtime


def fitting(runtime: Runtime, target: Target) -> HardwareFingerprint:
    """The machine's fingerprint, if it has what the target requires.

    Raises:
        MeasurementError: it does not.
    """
    found = runtime.fingerprint(target)
    if lacking := target.requires.lacking(found):
        raise MeasurementError(
            f"this machine is not what the target requires: {'; '.join(lacking)}",
            where=f"target {target.name}",
            remedy="Figures from here mean nothing for this target; measure it on a machine that fits, see `pool`.",
        )
    return found
