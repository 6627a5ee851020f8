"""Half precision by ONNX Runtime's converter."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from onnx_ops.adapters.optimizers.library import nothing_quantized, quiet, told
from onnx_ops.adapters.optimizers.options import Names, read_options
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.onnx_graph.files import PROTOBUF_LIMIT, constants, read_model, write_model
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.onnx_graph.rewrites import follow, like_source
from onnx_ops.ports.optimize import OptimizeRequest

_FLOAT, _HALF = 1, 10
_WITH_WEIGHTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOptions:
    """Options of the conversion to float16."""

    keep: Names = ()


class HalfOptimizer:
    """Weights and arithmetic in float16; inputs and outputs keep their types.

    Excluded nodes stay in float32, and so do operators of the types that option `keep` lists.
    """

    tools: tuple[str, ...] = ("onnxruntime", "onnx", "numpy")
    options = HalfOptions
    quantized = True
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        options = read_options(request.section, self.options)
        if info(request.source).size_bytes > PROTOBUF_LIMIT:
            raise TooLargeError(
                "the model has more than 2 GiB, which the converter does not take",
                where=f"variant {request.section.name}",
                remedy="Convert it before its export, as in torch with model.half(), or use method: weight-only.",
            )
        source, model = read_model(request.source), read_model(request.source)
        follow(request.section.exclude, source, source)
        del model.graph.value_info[:]
        with (
            quiet(),
            told(
                "the model cannot be converted to float16",
                request.section.name,
                "Keep the node that it names in float32 with `exclude`, or leave this variant out.",
            ),
        ):
            library = importlib.import_module("onnxruntime.transformers.float16")
            derived = library.convert_float_to_float16(
                model,
                keep_io_types=True,
                op_block_list=[*library.DEFAULT_OP_BLOCK_LIST, *options.get("keep", ())],
                node_block_list=list(request.section.exclude),
            )
            models = importlib.import_module("onnxruntime.transformers.onnx_model")
            models.OnnxModel(derived).topological_sort(is_deterministic=True)
        halves = _round_as_numpy_does(derived, source, request.section)
        _check_effect(derived, request)
        like_source(derived, source)
        write_model(derived, request.path)
        kept = f", {len(request.section.exclude)} nodes kept in float32" if request.section.exclude else ""
        notes = [f"{halves} constants in float16{kept}"]
        if any(not machine.fp16 for machine in request.machines):
            notes.append("a target computes float16 in float32, with casts around it: half the size, and no faster")
        return tuple(notes)


def _round_as_numpy_does(derived: Any, source: Any, section: Quantize) -> int:
    """Weights to the nearest half, since the converter lifts the smallest away from 0 and cuts the largest."""
    import numpy as np
    from onnx import numpy_helper

    originals = constants(source)
    halves = {name: t for name, t in constants(derived).items() if t.data_type == _HALF and name in originals}
    if all(originals[name].data_type == _HALF for name in halves):
        raise nothing_quantized(section, source, _WITH_WEIGHTS, "nothing was converted")
    for name, tensor in halves.items():
        with np.errstate(over="ignore"):
            rounded = numpy_helper.to_array(originals[name]).astype(np.float16)
        if not np.isfinite(rounded).all():
            raise UserError(
                f"weight {name} holds values beyond 65504, the largest of float16",
                where=f"variant {section.name}",
                remedy="Keep the node that takes it in float32 with `exclude`.",
            )
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    return len(halves)


def _check_effect(derived: Any, request: OptimizeRequest) -> None:
    """Every excluded node is there under its name, and reads no half."""
    halves = {name for name, tensor in constants(derived).items() if tensor.data_type == _HALF}
    kept = {node.name for node in derived.graph.node if not halves.intersection(node.input)}
    if lost := sorted(set(request.section.exclude) - kept):
        raise UserError(
            f"excluding {', '.join(lost)} took no effect",
            where=f"variant {request.section.name}",
            why="another node takes the same weights in float16",
            remedy="Exclude that node too.",
        )
