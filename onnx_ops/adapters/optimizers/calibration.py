"""Calibration rows for ONNX Runtime's quantizer, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnxruntime.quantization import CalibrationDataReader

from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array, Tensors

BATCH = 16
"""Rows of one calibration run of a model with a free batch axis; every activation of them is held in memory."""


class BatchReader(CalibrationDataReader):  # type: ignore[misc]
    """Batches in the order of the rows. A model with a fixed batch gets exactly that many; rows left over go unused.

    The quantizer asks for ranges of batches (`set_range`), so that it holds the activations of one range only.

    Raises:
        UserError: the rows do not fit the model's inputs, are too few, or are not finite.
    """

    def __init__(self, rows: Tensors, info: ModelInfo) -> None:
        _check(rows, info)
        fixed = {spec.shape[0] for spec in info.inputs if spec.shape and isinstance(spec.shape[0], int)}
        count = len(next(iter(rows.values())))
        self._rows = rows
        self._size = int(min(fixed)) if fixed else BATCH
        self._batches = count // self._size if fixed else -(-count // self._size)
        if not self._batches:
            raise UserError(
                f"{count} calibration rows, and the model takes {self._size} at once",
                where="quantize.calibrate",
                remedy="Raise `samples`.",
            )
        self._queue: Iterator[int] = iter(range(self._batches))

    def __len__(self) -> int:
        return self._batches

    def set_range(self, start_index: int, end_index: int) -> None:
        self._queue = iter(range(start_index, min(end_index, self._batches)))

    def get_next(self) -> dict[str, Array] | None:
        """The next batch of the range; None after the last."""
        index = next(self._queue, None)
        if index is None:
            return None
        return {name: rows[index * self._size : (index + 1) * self._size] for name, rows in self._rows.items()}


def _check(rows: Tensors, info: ModelInfo) -> None:
    wanted = {spec.name for spec in info.inputs}
    if wanted != set(rows):
        raise UserError(
            f"calibration data has inputs {sorted(rows)}, the model {sorted(wanted)}",
            where="quantize.calibrate",
            remedy="Map the arrays to the model's inputs in `data.<set>.inputs`.",
        )
    for name, array in rows.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(
                f"calibration rows of input {name} hold NaN or infinity: no range can be read off them",
                where="quantize.calibrate",
                remedy="Calibrate with clean rows.",
            )
