"""Eight-bit variants by ONNX Runtime's own quantizers."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.adapters.optimizers.options import read_options
from onnx_ops.errors import OnnxOpsError, StageFailure, UserError
from onnx_ops.graph.exclusion import follow, still_quantized
from onnx_ops.graph.files import EXTERNAL_LIMIT, read_model, write_model
from onnx_ops.graph.hygiene import DEFAULT_DOMAINS, flatten_biases, like_source
from onnx_ops.graph.inspect import info
from onnx_ops.graph.weights import constants
from onnx_ops.ports.models import OptimizeRequest

TOOLS = ("onnxruntime", "onnx", "numpy")

DYNAMIC_OPERATORS = ("MatMul", "Gemm")
"""What pays off without calibration: a convolution in MatMulInteger's manner is many times slower than in float."""

FLOAT_OPERATORS = frozenset({"Softmax", "ArgMax"})
"""Kept in float by static quantization: in steps of 1/256, probabilities tie and the larger one is lost."""

PER_CHANNEL_OPSET = 13
"""DequantizeLinear has an axis from this opset on."""

_REWRITTEN_GEMM = "_MatMul"
"""The dynamic quantizer first makes each Gemm X a MatMul X_MatMul, and only then looks at the exclusions."""

_FLOAT = 1
_DEFAULT_SEVERITY, _ERRORS_ONLY = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One quantization under way, between two files of a scratch folder.

    `excluded` holds names in the prepared file, by the name that the user gave.
    """

    request: OptimizeRequest
    options: Mapping[str, Any]
    prepared: Path
    result: Path
    excluded: Mapping[str, tuple[str, ...]]
    large: bool

    def nodes_to_exclude(self) -> list[str]:
        return [name for names in self.excluded.values() for name in names]


class DynamicQuantizer:
    """Weights of MatMul and Gemm in int8, activations quantized anew in every run. Needs no data.

    Options: `reduce_range` (7-bit weights, for CPUs whose 8-bit products saturate), `op_types`.
    """

    tools = TOOLS
    quantized = True
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> None:
        _quantize(request, _dynamic)


class StaticQuantizer:
    """Weights in int8 and activations in uint8 with ranges from calibration rows, as QuantizeLinear pairs.

    Options: `reduce_range` (7-bit weights, for CPUs whose 8-bit products saturate), `op_types`.
    """

    tools = TOOLS
    quantized = True
    needs_calibration = True

    def optimize(self, request: OptimizeRequest) -> None:
        if request.section.calibrate is None or not request.calibration:
            raise UserError(
                f"variant {request.section.name} needs calibration rows",
                where="quantize.calibrate",
                remedy="Add calibrate: {data: train, samples: 256}.",
            )
        _check_opset(request)
        _quantize(request, _static)


def _dynamic(job: _Job) -> None:
    library = importlib.import_module("onnxruntime.quantization")
    excluded = job.nodes_to_exclude()
    library.quantize_dynamic(
        str(job.prepared),
        str(job.result),
        op_types_to_quantize=list(job.options.get("op_types", DYNAMIC_OPERATORS)),
        per_channel=job.request.section.per_channel,
        reduce_range=job.options.get("reduce_range", False),
        weight_type=library.QuantType.QInt8,
        nodes_to_exclude=excluded + [name + _REWRITTEN_GEMM for name in excluded],
        use_external_data_format=job.large,
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": _FLOAT},
    )


def _static(job: _Job) -> None:
    from onnx_ops.adapters.optimizers.calibration import BatchReader

    library = importlib.import_module("onnxruntime.quantization")
    registry = importlib.import_module("onnxruntime.quantization.registry")
    section, rows = job.request.section, job.request.calibration
    method = section.calibrate.method if section.calibrate else "minmax"
    supported = sorted({*registry.QLinearOpsRegistry, *registry.QDQRegistry} - FLOAT_OPERATORS)
    library.quantize_static(
        str(job.prepared),
        str(job.result),
        BatchReader(rows or {}, info(job.prepared)),
        quant_format=library.QuantFormat.QDQ,
        op_types_to_quantize=list(job.options.get("op_types", supported)),
        per_channel=section.per_channel,
        reduce_range=job.options.get("reduce_range", False),
        activation_type=library.QuantType.QUInt8,
        weight_type=library.QuantType.QInt8,
        nodes_to_exclude=job.nodes_to_exclude(),
        use_external_data_format=job.large,
        calibrate_method={
            "minmax": library.CalibrationMethod.MinMax,
            "entropy": library.CalibrationMethod.Entropy,
            "percentile": library.CalibrationMethod.Percentile,
        }[method],
        extra_options={"CalibStridedMinMax": 1, "DefaultTensorType": _FLOAT},
    )


def _check_opset(request: OptimizeRequest) -> None:
    opsets = info(request.source).opsets
    opset = max(opsets.get(domain, 0) for domain in DEFAULT_DOMAINS)
    if request.section.per_channel and opset < PER_CHANNEL_OPSET:
        raise UserError(
            f"per-channel scales need opset {PER_CHANNEL_OPSET}, the model has {opset}",
            where=f"variant {request.section.name}",
            remedy="Set per_channel: false, or export at a newer opset.",
        )


def _quantize(request: OptimizeRequest, library_call: Callable[[_Job], None]) -> None:
    options = read_options(request.section)
    source = read_model(request.source)
    with tempfile.TemporaryDirectory(prefix="onnx-ops-quantize-") as scratch, _quiet():
        folder = Path(scratch)
        large = sum(len(tensor.raw_data) for tensor in source.graph.initializer) > EXTERNAL_LIMIT
        prepared = _prepare(source, folder, large)
        job = _Job(
            request=request,
            options=options,
            prepared=prepared,
            result=folder / "result.onnx",
            excluded=follow(request.section.exclude, source, read_model(prepared)),
            large=large,
        )
        try:
            library_call(job)
        except OnnxOpsError:
            raise
        except Exception as error:  # the library raises whatever its parts raise
            raise StageFailure(
                "ONNX Runtime cannot quantize the model",
                where=f"variant {request.section.name}",
                why=f"{type(error).__name__}: {_first_line(error)}",
                remedy="Keep the node that it names in float with `exclude`, or leave this variant out.",
            ) from error
        derived = read_model(job.result)
    _check_effect(job, derived)
    like_source(derived, source)
    write_model(derived, request.path)


def _prepare(source: Any, folder: Path, large: bool) -> Path:
    """Shapes inferred anew and the graph simplified; but not if that made weights of which the source knows nothing,
    since a quantized weight must remain comparable with its original. The shapes that the source brings are dropped
    first: the quantizers give weights other shapes and then stumble over the old ones."""
    known = set(constants(source))
    del source.graph.value_info[:]
    plain = folder / "plain.onnx"
    write_model(source, plain)
    try:
        prepared = _preprocess(plain, folder / "simplified.onnx", simplify=True, large=large)
        model = read_model(prepared)
        if any(t.data_type == _FLOAT and t.name not in known for t in model.graph.initializer):
            prepared = _preprocess(plain, folder / "inferred.onnx", simplify=False, large=large)
            model = read_model(prepared)
    except Exception as error:  # the library raises whatever its parts raise
        warnings.warn(f"quantizing without preparation: {_first_line(error)}", RuntimeWarning, stacklevel=2)
        return plain
    flatten_biases(model)
    write_model(model, prepared)
    return prepared


def _preprocess(path: Path, prepared: Path, *, simplify: bool, large: bool) -> Path:
    importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process(
        str(path),
        str(prepared),
        skip_optimization=not simplify,
        skip_symbolic_shape=True,  # it needs sympy, which is not everywhere: results would depend on it
        save_as_external_data=large,
        all_tensors_to_one_file=large,
    )
    return prepared


def _check_effect(job: _Job, derived: Any) -> None:
    section = job.request.section
    kept = {name for names in job.excluded.values() for name in names}
    ignored = still_quantized(sorted(kept), derived, _REWRITTEN_GEMM)
    if ignored:
        names = sorted(name for name, heirs in job.excluded.items() if set(heirs) & set(ignored))
        raise UserError(
            f"excluding {', '.join(names)} took no effect",
            where=f"variant {section.name}",
            why="the quantizer does not leave this node in float",
            remedy="Exclude the node that holds the weights, or leave it out of `exclude`.",
        )
    if not any(t.name.endswith("_quantized") for t in derived.graph.initializer):
        raise UserError(
            "nothing was quantized",
            where=f"variant {section.name}",
            why="the model has no operator with constant weights that this method quantizes",
            remedy="Leave this variant out of `quantize`.",
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The quantizers print, log through the root logger, and let sessions warn of what they are doing."""
    ort = importlib.import_module("onnxruntime")
    root = logging.getLogger()
    handlers, disabled = list(root.handlers), root.manager.disable
    ort.set_default_logger_severity(_ERRORS_ONLY)
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        ort.set_default_logger_severity(_DEFAULT_SEVERITY)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
