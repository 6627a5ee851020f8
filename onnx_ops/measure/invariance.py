"""Asks a model for the same rows in one batch and one by one."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.domain.evidence import BatchInvariance
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.files import rows
from onnx_ops.measure.reference import ReferenceGroup
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.statistics.invariance import batch_invariance, noises
from onnx_ops.statistics.probes import REAL

ROWS = 32
"""As many as make a fair sample of rounding, and few enough to ask one by one."""


def measure_invariance(
    runtime: Runtime, model: Path, target: Target, samples: Tensors, reference: list[ReferenceGroup]
) -> tuple[BatchInvariance, ...]:
    """One figure per output, in units of the source's noise on real samples.

    Nothing for a model whose batch is fixed, for fewer than two rows, and for one that cannot take a single row.
    """
    count = min(ROWS, *(len(array) for array in samples.values()))
    if count < 2 or info(model).fixed_batch:
        return ()
    single_rows = (rows(samples, index, index + 1) for index in range(count))
    try:
        together, *alone = runtime.run(model, target, (rows(samples, 0, count), *single_rows))
    except MeasurementError:
        return ()
    real = next((group for group in reference if group.name == REAL), None)
    noise = noises(real.single, real.double) if real else {}
    return batch_invariance(together, alone, noise)
