"""Weights of matrix products in 4 or 8 bits, arithmetic in float: MatMulNBits."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onnx_ops.adapters.optimizers.library import nothing_quantized, quiet, told
from onnx_ops.adapters.optimizers.options import read_options
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import constants, read_model, write_model
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.onnx_graph.rewrites import follow, like_source, split_gemms
from onnx_ops.plugins import require
from onnx_ops.ports.optimize import OptimizeRequest

_DOUBLE = 11

_MOVES = "moves weights by more than rounding, so as to keep the answers: parity.weight_steps must allow it"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Options of the quantization of weights."""

    bits: Literal[4, 8] | None = None
    block: Literal[16, 32, 64, 128, 256] = 32
    symmetric: bool = True
    algorithm: Literal["rtn", "hqq", "gptq"] = "rtn"
    accuracy: Literal[0, 1, 2, 3, 4] | None = None


class WeightQuantizer:
    """Constant matrices in blocks of few bits. A recipe for size, and for memory-bound models.

    Options: `bits` (8), `block` (32), `symmetric` (true), `algorithm` (rtn rounds; hqq and gptq have 4 bits only and
    move weights so as to keep answers, gptq by calibration rows), `accuracy` (4: activations in 8 bits too).
    """

    tools: tuple[str, ...] = ("onnxruntime", "onnx", "numpy")
    options = WeightOptions
    quantized = True
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        options = read_options(request.section, self.options)
        algorithm = str(options.get("algorithm", "rtn"))
        _check(request, options, algorithm)
        source, model = read_model(request.source), read_model(request.source)
        follow(request.section.exclude, source, source)
        del model.graph.value_info[:]
        split_gemms(model, set(request.section.exclude))
        with (
            quiet(),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
            told("the weights cannot be narrowed", request.section.name, "Leave this variant out of `quantize`."),
        ):
            derived = _narrowed(model, request, options, algorithm)
        found = [node for node in derived.graph.node if node.op_type == "MatMulNBits"]
        if not found:
            raise nothing_quantized(request.section, source, frozenset({"Gemm", "MatMul"}))
        like_source(derived, source)
        write_model(derived, request.path)
        return _notes(request, options, algorithm, len(found))


def _check(request: OptimizeRequest, options: Mapping[str, Any], algorithm: str) -> None:
    where = f"variant {request.section.name}"
    if algorithm == "gptq" and request.calibration is None:
        raise UserError(
            "gptq needs calibration rows", where=where, remedy="Add calibrate: {data: train, samples: 256}."
        )
    if algorithm != "rtn" and options.get("bits", 4) != 4:
        raise UserError(
            f"{algorithm} has 4 bits only",
            where=where,
            why="the runtime's kernels do not run what it makes of 8",
            remedy="Set bits: 4, or algorithm: rtn.",
        )
    if algorithm == "hqq":
        require("torch", where=f"{where}, algorithm hqq")


def _narrowed(model: Any, request: OptimizeRequest, options: Mapping[str, Any], algorithm: str) -> Any:
    library = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    bits, block = int(options.get("bits", 8 if algorithm == "rtn" else 4)), int(options.get("block", 32))
    symmetric = bool(options.get("symmetric", True))
    if algorithm == "hqq":
        config = library.HQQWeightOnlyQuantConfig(block_size=block, bits=bits)
    elif algorithm == "gptq":
        from onnx_ops.adapters.optimizers.calibration import BatchReader

        reader = BatchReader(request.calibration or {}, info(request.source))
        config = library.GPTQWeightOnlyQuantConfig(calibration_data_reader=reader, block_size=block)
    else:
        config = library.DefaultWeightOnlyQuantConfig(
            block_size=block, is_symmetric=symmetric, accuracy_level=options.get("accuracy"), bits=bits
        )
    quantizer = library.MatMulNBitsQuantizer(
        model,
        bits,
        block,
        symmetric,
        options.get("accuracy"),
        nodes_to_exclude=[*request.section.exclude, *_name_doubles(model)],
        algo_config=config,
    )
    quantizer.process()
    found = quantizer.model
    return getattr(found, "model", found)


def _name_doubles(model: Any) -> list[str]:
    """Return the names of products with weights in float64: MatMulNBits has no kernel for them."""
    stored = constants(model)
    found = [
        n
        for n in model.graph.node
        if n.op_type == "MatMul" and (w := stored.get(n.input[1])) and w.data_type == _DOUBLE
    ]
    for number, node in enumerate(found):
        node.name = node.name or f"float64-product-{number}"
    return [node.name for node in found]


def _notes(request: OptimizeRequest, options: Mapping[str, Any], algorithm: str, count: int) -> tuple[str, ...]:
    notes = [f"weights of {count} matrix products in blocks, {algorithm}"]
    if algorithm != "rtn":
        notes.append(f"{algorithm} {_MOVES}")
    if any(machine.family in ("x86", "arm") for machine in request.machines):
        notes.append(
            "on a CPU this is a recipe for size: it took 1.1 to 2.1 times the time of float32 where it was measured"
        )
    if options.get("accuracy") == 4:
        notes.append("accuracy 4: activations in 8 bits too, found anew in each run")
    return tuple(notes)
