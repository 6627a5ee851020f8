"""One request of real rows, for whoever wants to call a version without asking its maker."""

from __future__ import annotations

import json

from onnx_ops import codec
from onnx_ops.domain.artifact import Manifest, ModelInfo
from onnx_ops.measure.reference import get_reference
from onnx_ops.ports import Store
from onnx_ops.statistics.probes import REAL

_MOST_BYTES = 1 << 20


def request_example(export: Manifest, store: Store) -> bytes:
    """JSON `{"inputs": {name: rows}}`: one row, or as many as a fixed batch asks for.

    Empty where no row can be written as JSON (NaN, bytes), or a request is larger than 1 MiB.
    """
    real = next((group for group in get_reference(store, export["reference.npz"]) if group.name == REAL), None)
    if real is None:
        return b""
    batch = codec.loads(store.read(export["info.json"]), ModelInfo).fixed_batch or 1
    if sum(array[:batch].nbytes for array in real.inputs.values()) > _MOST_BYTES:
        return b""
    try:
        request = {name: array[:batch].tolist() for name, array in real.inputs.items()}
        text = json.dumps({"inputs": request}, allow_nan=False).encode()
    except (TypeError, ValueError):
        return b""
    return text if len(text) <= _MOST_BYTES else b""
