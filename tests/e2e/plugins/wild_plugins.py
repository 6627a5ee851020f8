"""Converters that take their process down; part of the distribution of `faulty_plugins`."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass

from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.adapters.optimizers.graph_passes import GraphOptimizer, GraphOptions
from onnx_ops.ports import ExportRequest, OptimizeRequest


def misbehave(how: str) -> None:
    print(f"about to {how}", flush=True)  # noqa: T201 (what a converter says before it falls)
    match how:
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "hang":
            time.sleep(1000)
        case "swallow":
            hoard = []
            while True:
                hoard.append(bytearray(1 << 26))
        case "babble":
            for _ in range(100):
                os.write(1, (b"x" * 999 + b"\n") * 1000)
            os._exit(3)
        case _:
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WildOptions(GraphOptions):
    how: str = ""


class WildOptimizer(GraphOptimizer):
    """Option `how` says how it ends."""

    options = WildOptions

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        misbehave(str(request.section.options["how"]))
        raise AssertionError("it should not come to this")


class WildExporter(OnnxExporter):
    options = ("how",)

    def export(self, model: object, request: ExportRequest) -> None:
        misbehave(str(request.section.options["how"]))
