"""Convert weights to blocks of 4 or 8 bits (MatMulNBits), or a model to float16."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onnx_ops.adapters.optimizers.library import (
    CALIBRATION_REMEDY,
    KEEP_SOURCE,
    BatchReader,
    Names,
    build_exclusion_error,
    build_no_effect_error,
    convert_failures,
    read_options,
    suppress_output,
)
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.onnx_graph.files import (
    PROTOBUF_LIMIT,
    collect_constants,
    iterate_graphs,
    iterate_nodes,
    read_model,
    write_model,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.rewrites import lift_constants, restore_metadata, split_gemms, trace_nodes
from onnx_ops.plugins import require
from onnx_ops.ports import Optimizer
from onnx_ops.ports.optimize import OptimizeRequest

_FLOAT, _HALF, _DOUBLE = 1, 10, 11
_PRODUCTS = frozenset({"Gemm", "MatMul"})
_BLOCKED = "MatMulNBits"
"""Operator of a matrix product whose weights are in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOnlyOptions:
    """Options of weight-only quantization."""

    bits: Literal[4, 8] | None = None
    block: Literal[16, 32, 64, 128, 256] = 32
    symmetric: bool = True
    algorithm: Literal["rtn", "hqq", "gptq"] = "rtn"
    accuracy: Literal[0, 1, 2, 3, 4] | None = None


class WeightOnlyQuantizer(Optimizer):
    """Optimizer that stores constant matrices in blocks of 4 or 8 bits, to save size.

    Options and their defaults: `bits` (8; 4 for hqq and gptq), `block` (32), `symmetric` (true),
    `algorithm` (rtn), and `accuracy` (unset). With accuracy 4, activations are also quantized to 8
    bits. rtn rounds the weights. hqq and gptq support 4 bits only. They adjust the weights to
    preserve the model's results, and gptq needs calibration rows. hqq refuses `symmetric` and
    `accuracy`.
    """

    tools: tuple[str, ...] = ("onnxruntime", "onnx", "numpy")
    options = WeightOnlyOptions
    quantized = True

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Store constant matrices in blocks of 4 or 8 bits."""
        options = read_options(request.section, self.options)
        algorithm = str(options.get("algorithm", "rtn"))
        _check_algorithm(algorithm, options, request)
        source, model = read_model(request.source), read_model(request.source)
        trace_nodes(request.section.exclude, source, source)
        del model.graph.value_info[:]
        lift_constants(model)
        split_gemms(model, set(request.section.exclude))
        _name_nodes(model)
        with (
            suppress_output(),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
            convert_failures(
                "the weights cannot be stored in fewer bits",
                request.section.name,
                KEEP_SOURCE,
            ),
        ):
            derived = _narrowed(model, request, options, algorithm)
        names = {node.name for node in derived.graph.node}
        if lost := [name for name in request.section.exclude if name not in names]:
            raise build_exclusion_error(request.section, lost)
        if not any(node.op_type == _BLOCKED for node in iterate_nodes(derived)):
            raise build_no_effect_error(request.section, source, _PRODUCTS)
        restore_metadata(derived, source)
        write_model(derived, request.path)
        return tuple(_list_notes(derived, request, options, algorithm))


def _check_algorithm(algorithm: str, options: Mapping[str, Any], request: OptimizeRequest) -> None:
    """Check that an algorithm can be used with the options.

    Raises:
        UserError: the algorithm lacks calibration rows, does not support the bits, or ignores an
            option.
        MissingPackageError: the algorithm lacks a package.
    """
    where = f"variant {request.section.name}"
    if algorithm == "gptq" and request.calibration is None:
        raise UserError("gptq needs calibration rows", where=where, remedy=CALIBRATION_REMEDY)
    if algorithm != "rtn" and options.get("bits", 4) != 4:
        raise UserError(
            f"{algorithm} supports 4 bits only",
            where=where,
            why="ONNX Runtime's quantizer or kernels do not support 8 bits for it",
            remedy="Set bits: 4, or algorithm: rtn.",
        )
    if algorithm == "hqq":
        if ignored := [name for name in ("symmetric", "accuracy") if name in options]:
            raise UserError(
                f"hqq ignores {' and '.join(ignored)}",
                where=where,
                remedy="Leave these options out, or set algorithm: rtn.",
            )
        require("torch", where=f"{where}, algorithm hqq")


def _list_notes(
    derived: Any, request: OptimizeRequest, options: Mapping[str, Any], algorithm: str
) -> Iterator[str]:
    """Yield notes for the user about what was quantized and its limits."""
    kinds = Counter(node.op_type for node in iterate_nodes(derived))
    total = kinds[_BLOCKED] + sum(kinds[kind] for kind in _PRODUCTS)
    stored = f"{kinds[_BLOCKED]} of {total} matrix products"
    yield f"{algorithm} stored the weights of {stored} in blocks"
    if left := [node.name for node in iterate_nodes(derived) if node.op_type in _PRODUCTS]:
        yield (
            "some products stay in float, for example because they are excluded, have float64 "
            "weights, or have no constant matrix: "
            f"{', '.join(left)}"
        )
    if algorithm != "rtn":
        yield (
            f"{algorithm} changes weights by more than rounding, to preserve the model's results: "
            "parity.weight_steps must allow these changes"
        )
    if any(machine.family in ("x86", "arm") for machine in request.machines):
        yield "on a CPU this method saves size, not time"
    if options.get("accuracy") == 4:
        yield "accuracy 4: activations are also quantized to 8 bits, with ranges from each run"


def _narrowed(
    model: Any, request: OptimizeRequest, options: Mapping[str, Any], algorithm: str
) -> Any:
    bits, block = (
        int(options.get("bits", 8 if algorithm == "rtn" else 4)),
        int(options.get("block", 32)),
    )
    symmetric = bool(options.get("symmetric", True))
    excluded = {*request.section.exclude, *_find_float64_products(model)}
    if algorithm == "gptq":
        reader = BatchReader(
            request.calibration or {}, read_model_info(request.source), request.values
        )
        # MatMulNBitsQuantizer of ONNX Runtime 1.31 ignores exclusions for gptq, so the function
        # that it calls is called directly.
        gptq = importlib.import_module("onnxruntime.quantization.neural_compressor").gptq_quantize
        return gptq(
            model,
            ((batch, None) for batch in reader),
            weight_config=dict.fromkeys(excluded, "fp32"),
            group_size=block,
            blocksize=block,
            scheme="sym" if symmetric else "asym",
            n_samples=-1,
            accuracy_level=options.get("accuracy") or 0,
        ).model
    library = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    if algorithm == "hqq":
        config = library.HQQWeightOnlyQuantConfig(block_size=block, bits=bits)
    else:
        config = library.DefaultWeightOnlyQuantConfig(
            block_size=block,
            is_symmetric=symmetric,
            accuracy_level=options.get("accuracy"),
            bits=bits,
        )
    quantizer = library.MatMulNBitsQuantizer(
        model, bits, block, nodes_to_exclude=excluded, algo_config=config
    )
    quantizer.process()
    return quantizer.model.model


def _name_nodes(model: Any) -> None:
    """Name each node without a name; gptq identifies nodes by name."""
    for node in iterate_nodes(model):
        node.name = node.name or f"{node.op_type} {' '.join(node.output)}"


def _find_float64_products(model: Any) -> Iterator[str]:
    """Yield the names of products with float64 weights.

    MatMulNBits has no kernel for these weights.
    """
    weights = [tensor for graph in iterate_graphs(model) for tensor in graph.initializer]
    doubles = {tensor.name for tensor in weights if tensor.data_type == _DOUBLE}
    for node in iterate_nodes(model):
        if node.op_type == "MatMul" and node.input[1] in doubles:
            yield node.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Options:
    """Options of the conversion to float16."""

    keep: Names = ()


class Fp16Optimizer(Optimizer):
    """Optimizer that converts weights and arithmetic to float16.

    Inputs and outputs keep their types. Excluded nodes stay in float32, and so do operators of the
    types in option `keep`.
    """

    tools: tuple[str, ...] = ("onnxruntime", "onnx", "numpy")
    options = Fp16Options
    quantized = True

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Convert weights and arithmetic to float16."""
        options = read_options(request.section, self.options)
        if read_model_info(request.source).size_bytes > PROTOBUF_LIMIT:
            raise TooLargeError(
                "the model has more than 2 GiB, the limit of the float16 converter",
                where=f"variant {request.section.name}",
                remedy="Convert the model before its export, for example "
                "with torch's model.half(), "
                "or use method: weight-only.",
            )
        source, model = read_model(request.source), read_model(request.source)
        trace_nodes(request.section.exclude, source, source)
        del model.graph.value_info[:]
        with (
            suppress_output(),
            convert_failures(
                "the model cannot be converted to float16",
                request.section.name,
                "Exclude the node named in the error (`exclude`), or leave this variant out.",
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
        count, excluded = (
            _round_as_numpy_does(derived, source, request.section),
            request.section.exclude,
        )
        halves = {
            name for name, tensor in collect_constants(derived).items() if tensor.data_type == _HALF
        }
        float_nodes = {
            node.name for node in derived.graph.node if not halves.intersection(node.input)
        }
        if lost := sorted(set(excluded) - float_nodes):
            raise UserError(
                f"excluding {', '.join(lost)} had no effect",
                where=f"variant {request.section.name}",
                why="the excluded nodes use weights in float16, for example those of other nodes",
                remedy="Exclude the other nodes that use these weights too.",
            )
        restore_metadata(derived, source)
        write_model(derived, request.path)
        exclusions = f", {len(excluded)} nodes kept in float32" if excluded else ""
        notes = [f"{count} constants in float16{exclusions}"]
        if any(not machine.fp16 for machine in request.machines):
            notes.append(
                "a target casts float16 to float32 for its computations: there, the model is "
                "smaller, but not faster"
            )
        return tuple(notes)


def _round_as_numpy_does(derived: Any, source: Any, section: Quantize) -> int:
    """Round weights to the nearest float16 value; return the number of weights.

    ONNX Runtime's converter moves the smallest values away from 0 and clips the largest.

    Raises:
        UserError: a weight exceeds the range of float16, or no weight was converted.
    """
    import numpy as np
    from onnx import numpy_helper

    originals = collect_constants(source)
    halves = {
        name: t
        for name, t in collect_constants(derived).items()
        if t.data_type == _HALF and name in originals
    }
    if all(originals[name].data_type == _HALF for name in halves):
        weighted = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
        raise build_no_effect_error(section, source, weighted, "nothing was converted")
    for name, tensor in halves.items():
        with np.errstate(over="ignore"):
            rounded = numpy_helper.to_array(originals[name]).astype(np.float16)
        if not np.isfinite(rounded).all():
            raise UserError(
                f"weight {name} has values beyond 65504, the largest float16 value",
                where=f"variant {section.name}",
                remedy=_explain_exclusion(name, source),
            )
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    return len(halves)


def _explain_exclusion(weight: str, source: Any) -> str:
    """Return the remedy that keeps a weight in float32.

    The converter also converts the weight of a Constant node if only the nodes that use it are
    excluded.
    """
    nodes = [node for node in source.graph.node if weight in (*node.input, *node.output)]
    if nodes and all(node.name for node in nodes):
        return f"Add {', '.join(node.name for node in nodes)} to `exclude`."
    return "Give each node that defines or uses this weight a name, and add the names to `exclude`."
