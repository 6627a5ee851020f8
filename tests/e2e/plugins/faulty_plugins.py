"""Plugins with faults that the gates must find.

They are installed when this folder is put on the path.
"""

from __future__ import annotations

import onnx
from onnx import numpy_helper

from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer
from onnx_ops.errors import StageError
from onnx_ops.ports import ExportRequest, OptimizeRequest


class SwappedRowExporter(SklearnExporter):
    """An exporter that swaps two rows of the first weight after a correct export."""

    def export(self, model: object, request: ExportRequest) -> None:
        super().export(model, request)
        proto = onnx.load(request.path)
        weight = next(t for t in proto.graph.initializer if len(t.dims) == 2 and min(t.dims) > 1)
        rows = numpy_helper.to_array(weight).copy()
        rows[[20, 21]] = rows[[21, 20]]
        weight.CopyFrom(numpy_helper.from_array(rows, weight.name))
        onnx.save(proto, request.path)


class LossyQuantizer(DynamicQuantizer):
    """A quantizer that reverses the columns of the last weight.

    The quantization before that is correct. The reversed columns exchange the classes.
    """

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        notes = super().optimize(request)
        proto = onnx.load(request.path)
        weight = [t for t in proto.graph.initializer if t.name.endswith("_quantized")][-1]
        columns = numpy_helper.to_array(weight)[:, ::-1].copy()
        weight.CopyFrom(numpy_helper.from_array(columns, weight.name))
        onnx.save(proto, request.path)
        return notes


class CrashingOptimizer(DynamicQuantizer):
    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        raise StageError("the optimizer crashed", where=request.section.name)
