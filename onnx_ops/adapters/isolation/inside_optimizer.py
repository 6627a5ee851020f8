"""The inner side of an optimizer: runs in the environment of its packages, and imports no more than that brings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.isolation.inside import serve
from onnx_ops.adapters.runtimes.arrays import get_arrays
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import Arithmetic
from onnx_ops.ports.optimize import OptimizeRequest


class Inside:
    """One optimizer."""

    where = "quantize"
    refusing: tuple[str, ...] = ()

    def optimize(
        self, optimizer: str, section: Any, source: str, path: str, calibration: str | None, machines: Any
    ) -> list[str]:
        module, _, name = optimizer.partition(":")
        request = OptimizeRequest(
            section=codec.from_json(section, Quantize, where=self.where),
            source=Path(source),
            path=Path(path),
            calibration=None if calibration is None else get_arrays(Path(calibration)),
            machines=tuple(codec.from_json(one, Arithmetic, where=self.where) for one in machines),
        )
        return list(getattr(importlib.import_module(module), name)().optimize(request))


def main() -> None:
    serve(Inside())
