"""Float variants with another graph: ONNX Runtime's own optimizations saved, patterns of transformers fused, shapes
fixed."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from onnx_ops.adapters.optimizers.library import quiet, told
from onnx_ops.adapters.optimizers.options import read_options
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import EXTERNAL_LIMIT, external_names, nodes, read_model, read_structure, write_model
from onnx_ops.onnx_graph.rewrites import follow, like_source
from onnx_ops.ports.optimize import OptimizeRequest
from onnx_ops.scratch import Scratch

_TOOLS = ("onnxruntime", "onnx")
_ERRORS_ONLY = 3
_LEAVE_OUT = "Leave this variant out of `quantize`."


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of saved graph optimizations."""

    level: Literal["basic", "extended", "all"] = "extended"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionOptions:
    """Options of the fusion of transformer patterns."""

    family: Literal["bart", "bert", "clip", "gpt2", "phi", "t5", "unet", "vit"] = "bert"
    heads: Annotated[int, Ge(1)] | None = None
    hidden: Annotated[int, Ge(1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """Options of fixed shapes."""

    dims: Annotated[Mapping[str, Annotated[int, Ge(1)]], MinLen(1)] = field(default_factory=dict)


class GraphOptimizer:
    """The graph as ONNX Runtime optimizes it, saved, so that loading does not do it again.

    Option `level`: basic and extended hold on every machine; all also lays out convolutions for the registers of the
    machine, so that the targets must be alike.
    """

    tools: tuple[str, ...] = _TOOLS
    options: type = GraphOptions
    quantized = False
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        level = str(read_options(request.section, self.options).get("level", "extended"))
        source = _checked(request, read_structure(request.source))
        if level == "all" and len({(one.family, one.wide) for one in request.machines}) > 1:
            raise UserError(
                "level `all` lays a graph out for the registers of one kind of machine, and the targets have several",
                where=f"variant {request.section.name}, options",
                remedy="Set level: extended, or make a pipeline for each kind.",
            )
        with Scratch() as folder, quiet():
            result = folder / "result.onnx"
            with told("ONNX Runtime cannot optimize the graph", request.section.name, _LEAVE_OUT):
                _save(request.source, result, level)
            derived = read_model(result)
        like_source(derived, source)
        write_model(derived, request.path)
        laid = ", laid out for this kind of machine" if level == "all" else ""
        return (f"graph level {level}{laid}: {_changes(source, derived)}",)


class FusionOptimizer:
    """Patterns of transformers made single operators by ONNX Runtime's tools for them.

    Options: `family` (bert unless given), `heads` and `hidden` (found in the graph unless given).
    """

    tools: tuple[str, ...] = _TOOLS
    options = FusionOptions
    quantized = False
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        options = read_options(request.section, self.options)
        family = str(options.get("family", "bert"))
        source = _checked(request, read_structure(request.source))
        with quiet(), told("the patterns of transformers cannot be fused", request.section.name, _LEAVE_OUT):
            library = importlib.import_module("onnxruntime.transformers.optimizer")
            fused = library.optimize_model(
                str(request.source),
                model_type=family,
                num_heads=options.get("heads", 0),
                hidden_size=options.get("hidden", 0),
                opt_level=0,
            )
        counts = {name: count for name, count in sorted(fused.get_fused_operator_statistics().items()) if count}
        if not counts:
            raise UserError(
                f"no pattern of {family} was found in the graph",
                where=f"variant {request.section.name}",
                why="the patterns are those of TorchScript exports; exports by dynamo look otherwise",
                remedy="Give another `family`, or leave this variant out: on a CPU, fusion rarely pays.",
            )
        derived = fused.model
        like_source(derived, source)
        write_model(derived, request.path)
        return (f"fused: {', '.join(f'{name} {count}' for name, count in counts.items())}",)


class ShapeOptimizer:
    """Symbolic dimensions made fixed sizes, for kernels that are planned ahead.

    Option `dims`: sizes by name. The batch axis stays free: gates and endpoints ask groups of all sizes.
    """

    tools: tuple[str, ...] = _TOOLS
    options = ShapeOptions
    quantized = False
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        where = f"variant {request.section.name}, options"
        dims = read_options(request.section, self.options).get("dims", {})
        model = _checked(request, read_model(request.source))
        shapes = [value.type.tensor_type.shape.dim for value in model.graph.input]
        batch = {shape[0].dim_param for shape in shapes if shape} - {""}
        known = {dim.dim_param for shape in shapes for dim in shape} - batch - {""}
        if not dims or (wrong := sorted(set(dims) - known)):
            told_ = f"{wrong[0]!r} is no free dimension besides the batch" if dims else "needs `dims`"
            hint = f"dims may name {', '.join(sorted(known))}." if known else "This model has none: leave it out."
            raise UserError(told_, where=where, remedy=hint)
        library = importlib.import_module("onnxruntime.tools.onnx_model_utils")
        del model.graph.value_info[:]
        with told("the shapes cannot be fixed", request.section.name, _LEAVE_OUT):
            for name, size in dims.items():
                library.make_dim_param_fixed(model.graph, name, size)
        write_model(model, request.path)
        return (f"fixed: {', '.join(f'{name} = {size}' for name, size in sorted(dims.items()))}",)


def _checked(request: OptimizeRequest, source: Any) -> Any:
    """The source. What is excluded must be there; in float it stays by itself."""
    follow(request.section.exclude, source, source)
    return source


def _save(source: Path, result: Path, level: str) -> None:
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath = str(result)
    if source.stat().st_size > EXTERNAL_LIMIT or external_names(source):  # whose places mean another folder
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{result.name}.data"
        )
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _changes(source: Any, derived: Any) -> str:
    before, after = _operators(nodes(source)), _operators(nodes(derived))
    new = ", ".join(f"{name} {count}" for name, count in sorted((after - before).items()) if name not in before)
    return f"{before.total()} nodes became {after.total()}" + (f", new {new}" if new else "")


def _operators(found: Iterable[Any]) -> Counter[str]:
    return Counter(node.op_type for node in found)
