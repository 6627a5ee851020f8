"""Optimizers that run ONNX Runtime's dynamic and static quantizers."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from onnx_ops.adapters.optimizers.calibration import exact_histograms, join_ranges
from onnx_ops.adapters.optimizers.library import (
    CALIBRATION_REMEDY,
    BatchReader,
    Names,
    build_exclusion_error,
    build_no_effect_error,
    convert_failures,
    read_options,
    suppress_output,
)
from onnx_ops.domain.quantization import choose_reduce_range, choose_static_recipe
from onnx_ops.errors import UserError, quoted
from onnx_ops.onnx_graph.files import (
    DEFAULT_DOMAINS,
    EXTERNAL_LIMIT,
    collect_constants,
    iterate_nodes,
    read_model,
    read_structure,
    write_model,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.rewrites import (
    find_quantized_nodes,
    flatten_biases,
    restore_metadata,
    trace_nodes,
)
from onnx_ops.ports import Optimizer
from onnx_ops.ports.optimize import OptimizeRequest
from onnx_ops.scratch import Scratch

TOOLS = ("onnxruntime", "onnx", "numpy")

DYNAMIC_OPERATORS = ("Gather", "Gemm", "MatMul")
"""Operators that dynamic quantization changes by default.

Gemm and MatMul can become faster, and tables of Gather become smaller. Conv is missing, since ONNX
Runtime recommends static quantization for convolutional networks
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
"""

FLOAT_OPERATORS = frozenset({"Softmax", "ArgMax"})
"""Operators that static quantization leaves in float by default.

In steps of 1/256, different probabilities can become equal. The largest one is then unknown.
"""

PER_CHANNEL_OPSET = 13
"""Lowest opset in which DequantizeLinear has an axis."""

WIDE_OPSET = 21
"""Lowest opset in which QuantizeLinear supports 16 bits."""

_REWRITTEN_GEMM = "_MatMul"
"""Suffix of the name of a MatMul that replaces a Gemm.

The dynamic quantizer first replaces a Gemm X by a MatMul X_MatMul if alpha and beta are 1, and
transA is 0. It applies exclusions afterwards.
"""

_FLOAT = 1
_FUSED = "com.microsoft"
_KEEP = "Exclude the node named in the error (`exclude`), or leave this variant out."
_UNFUSED = (
    "Quantize the graph from before the fusion of operators: "
    "the types of fused operators cannot be inferred."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One quantization, from the prepared file to the result in a scratch folder.

    `excluded` maps names that the user specified to names of nodes in the prepared file. If the
    model is `large`, weights are written to a separate file.
    """

    request: OptimizeRequest
    options: Mapping[str, Any]
    prepared: Path
    result: Path
    excluded: Mapping[str, tuple[str, ...]]
    large: bool

    def nodes_to_exclude(self) -> list[str]:
        return [name for names in self.excluded.values() for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicOptions:
    """Options of dynamic quantization."""

    op_types: Names = ()
    reduce_range: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions(DynamicOptions):
    """Options of static quantization."""

    activations: Literal["uint8", "int8", "uint16"] | None = None
    weights: Literal["int8", "uint8"] | None = None
    symmetric: bool | None = None


class DynamicQuantizer(Optimizer):
    """Optimizer that quantizes weights to int8, and activations in each run.

    The optimizer needs no data. Options are `op_types` and `reduce_range` (7-bit weights). The
    default of `reduce_range` depends on the targets' CPUs.
    """

    tools: tuple[str, ...] = TOOLS
    options = DynamicOptions
    quantized = True

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Quantize weights, and add operators that quantize activations in each run."""
        options = read_options(request.section, self.options)
        source = read_structure(request.source)
        types = frozenset(options.get("op_types", DYNAMIC_OPERATORS))
        if types.isdisjoint(node.op_type for node in iterate_nodes(source)):
            raise build_no_effect_error(request.section, source, types)
        reduce_range, why = choose_reduce_range(options, request.machines)
        options = {"op_types": DYNAMIC_OPERATORS, **options, "reduce_range": reduce_range}
        notes = _quantize(request, options, _dynamic)
        return (
            why,
            (
                "ranges of activations are computed for each batch: "
                "the result of a row depends on the other rows of its batch"
            ),
            *notes,
        )


class StaticQuantizer(Optimizer):
    """Optimizer that quantizes weights and activations with calibration rows.

    Options are `op_types`, `activations` (uint8, int8, uint16), `weights` (int8, uint8),
    `reduce_range` (7-bit weights) and `symmetric` (ranges of activations symmetric to 0). The
    default of `weights` is int8. The defaults of `activations`, `reduce_range` and `symmetric`
    depend on the targets' machines.
    """

    tools: tuple[str, ...] = TOOLS
    options = StaticOptions
    quantized = True
    needs_calibration = True
    reads_ranges = True

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Quantize weights and activations with ranges from calibration rows."""
        options, notes = self._choose(request)
        with Scratch() as folder:
            ranges = join_ranges(request.ranges, folder / "ranges.json") if request.ranges else None
            with exact_histograms(is_part=False):
                return *notes, *_quantize(request, options, partial(_static, ranges=ranges))

    def read_ranges(self, request: OptimizeRequest, path: Path, shard: tuple[int, int]) -> None:
        """Write the ranges of one part of the calibration batches.

        The written file is a calibration cache of ONNX Runtime. If the part has no batches, the
        file is left out.
        """
        options, _ = self._choose(request)
        rows = BatchReader(
            request.calibration or {}, read_model_info(request.source), request.values
        ).slice(*shard)
        if not rows:
            return
        with Scratch() as folder, exact_histograms(is_part=True):
            part = replace(request, calibration=rows, path=folder / "unused.onnx")
            _quantize(part, options, partial(_static, ranges=path))

    def _choose(self, request: OptimizeRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the options of a quantization, and the reasons for them.

        Raises:
            UserError: calibration rows are missing, an option is wrong, or the opset of the model
                is too low for the options.
        """
        if request.section.calibrate is None or not request.calibration:
            what = f"variant {request.section.name} needs calibration rows"
            raise UserError(what, where="quantize.calibrate", remedy=CALIBRATION_REMEDY)
        options = read_options(request.section, self.options)
        recipe = choose_static_recipe(options, request.machines)
        opsets, where = read_model_info(request.source).opsets, f"variant {request.section.name}"
        opset = max(opsets.get(domain, 0) for domain in DEFAULT_DOMAINS)
        if request.section.per_channel and opset < PER_CHANNEL_OPSET:
            what = f"per-channel scales need opset {PER_CHANNEL_OPSET}, but the model has {opset}"
            raise UserError(
                what, where=where, remedy="Set per_channel: false, or export at a newer opset."
            )
        if recipe.activations == "uint16" and opset < WIDE_OPSET:
            what = f"16-bit activations need opset {WIDE_OPSET}, but the model has {opset}"
            raise UserError(
                what,
                where=where,
                remedy="Export at a newer opset, or remove `activations` to use the default.",
            )
        chosen = {
            "activations": recipe.activations,
            "weights": recipe.weights,
            "reduce_range": recipe.reduce_range,
            "symmetric": recipe.symmetric,
        }
        registry = importlib.import_module("onnxruntime.quantization.registry")
        supported = sorted({*registry.QLinearOpsRegistry, *registry.QDQRegistry} - FLOAT_OPERATORS)
        return {"op_types": supported, **options, **chosen}, recipe.notes


def _dynamic(job: _Job) -> None:
    library = importlib.import_module("onnxruntime.quantization")
    excluded = job.nodes_to_exclude()
    library.quantize_dynamic(
        str(job.prepared),
        str(job.result),
        op_types_to_quantize=list(job.options["op_types"]),
        per_channel=job.request.section.per_channel,
        reduce_range=job.options["reduce_range"],
        weight_type=library.QuantType.QInt8,
        nodes_to_exclude=excluded + [name + _REWRITTEN_GEMM for name in excluded],
        use_external_data_format=job.large,
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": _FLOAT},
    )


def _static(job: _Job, ranges: Path | None = None) -> None:
    """Quantize with the ranges in file `ranges`; write the file if it is missing.

    With None, the ranges are computed and not stored.
    """
    library = importlib.import_module("onnxruntime.quantization")
    section, rows = job.request.section, job.request.calibration
    method = section.calibrate.method if section.calibrate else "minmax"
    library.quantize_static(
        str(job.prepared),
        str(job.result),
        BatchReader(rows or {}, read_model_info(job.prepared), job.request.values),
        quant_format=library.QuantFormat.QDQ,
        op_types_to_quantize=list(job.options["op_types"]),
        per_channel=section.per_channel,
        reduce_range=job.options["reduce_range"],
        activation_type=_type(library, job.options["activations"]),
        weight_type=_type(library, job.options["weights"]),
        nodes_to_exclude=job.nodes_to_exclude(),
        use_external_data_format=job.large,
        calibration_cache_path=ranges,
        calibrate_method={
            "minmax": library.CalibrationMethod.MinMax,
            "entropy": library.CalibrationMethod.Entropy,
            "percentile": library.CalibrationMethod.Percentile,
        }[method],
        extra_options={
            "CalibStridedMinMax": 1,
            "DefaultTensorType": _FLOAT,
            "ActivationSymmetric": job.options["symmetric"],
        },
    )


def _type(library: Any, name: str) -> Any:
    return getattr(
        library.QuantType, {"int8": "QInt8", "uint8": "QUInt8", "uint16": "QUInt16"}[name]
    )


def _quantize(
    request: OptimizeRequest, options: Mapping[str, Any], library_call: Callable[[_Job], None]
) -> tuple[str, ...]:
    """Write the quantized model; return notes on additional steps.

    Raises:
        UserError: nothing was quantized, or an excluded node is missing or was quantized.
        StageError: ONNX Runtime cannot quantize the model.
    """
    # The module loads NumPy, so it is imported only here.
    from onnx_ops.onnx_graph.channel_balance import balance_channels

    source = read_model(request.source)
    balanced = balance_channels(source)
    with Scratch() as folder, suppress_output():
        large = sum(len(tensor.raw_data) for tensor in source.graph.initializer) > EXTERNAL_LIMIT
        prepared = _prepare(source, folder, large)
        job = _Job(
            request=request,
            options=options,
            prepared=prepared,
            result=folder / "result.onnx",
            excluded=trace_nodes(request.section.exclude, source, read_model(prepared)),
            large=large,
        )
        with convert_failures(
            "ONNX Runtime cannot quantize the model",
            request.section.name,
            _UNFUSED if any(node.domain == _FUSED for node in source.graph.node) else _KEEP,
        ):
            library_call(job)
        derived = read_model(job.result)
    section, excluded = request.section, {name for names in job.excluded.values() for name in names}
    if ignored := find_quantized_nodes(sorted(excluded), derived, _REWRITTEN_GEMM):
        names = sorted(name for name, heirs in job.excluded.items() if set(heirs) & set(ignored))
        raise build_exclusion_error(section, names)
    given = read_structure(request.source)
    # If the source is already quantized, names of some weights in the source also end in
    # `_quantized`.
    known = {tensor.name for tensor in given.graph.initializer}
    if not any(
        t.name.endswith("_quantized") and t.name not in known for t in derived.graph.initializer
    ):
        raise build_no_effect_error(section, given, frozenset(options["op_types"]))
    restore_metadata(derived, source)
    write_model(derived, request.path)
    return (
        (f"{balanced} outlier channels of normalizations were balanced with later weights",)
        if balanced
        else ()
    )


def _prepare(source: Any, folder: Path, large: bool) -> Path:
    """Infer shapes again and simplify the graph; return the path of the result.

    A quantized weight must stay comparable with its original. Therefore the graph is not simplified
    if simplification adds float32 weights that the source lacks. The source's shapes are removed
    first, since quantizers change the shapes of weights and would fail on the old shapes. If the
    preparation fails, a warning is issued, and the path of the unprepared model is returned.
    """
    known = set(collect_constants(source))
    del source.graph.value_info[:]
    plain = folder / "plain.onnx"
    write_model(source, plain)
    try:
        prepared = _preprocess(plain, folder / "simplified.onnx", simplify=True, large=large)
        model = read_model(prepared)
        if any(t.data_type == _FLOAT and t.name not in known for t in model.graph.initializer):
            prepared = _preprocess(plain, folder / "inferred.onnx", simplify=False, large=large)
            model = read_model(prepared)
    except Exception as error:  # The preprocessing raises many types of exceptions.
        warnings.warn(
            f"the model is quantized without preparation: {quoted(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
        return plain
    flatten_biases(model)
    write_model(model, prepared)
    return prepared


def _preprocess(path: Path, prepared: Path, *, simplify: bool, large: bool) -> Path:
    importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process(
        str(path),
        str(prepared),
        skip_optimization=not simplify,
        # Symbolic shapes need sympy, and results would depend on whether it is installed.
        skip_symbolic_shape=True,
        save_as_external_data=large,
        all_tensors_to_one_file=large,
    )
    return prepared
