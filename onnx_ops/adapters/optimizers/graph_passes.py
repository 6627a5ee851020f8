"""Float variants with another graph: saved optimizations, fixed shapes, clean-up."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from onnx_ops.adapters.isolation.crash_guard import (
    DEFAULT_TIMEOUT_S,
    ProcessCrashError,
    run_guarded,
)
from onnx_ops.adapters.optimizers.library import (
    KEEP_SOURCE,
    Names,
    check_interface,
    convert_failures,
    read_options,
    suppress_output,
)
from onnx_ops.errors import StageError, UserError
from onnx_ops.onnx_graph.files import (
    EXTERNAL_LIMIT,
    iterate_nodes,
    list_external_names,
    read_model,
    read_structure,
    write_model,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.rewrites import restore_metadata, trace_nodes
from onnx_ops.plugins import imported, missing_package
from onnx_ops.ports import Optimizer
from onnx_ops.ports.optimize import OptimizeRequest
from onnx_ops.scratch import Scratch

_TOOLS = ("onnxruntime", "onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of saved graph optimizations."""

    level: Literal["basic", "extended", "all"] = "extended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """Options of fixed shapes: the size of each symbolic dimension."""

    dims: Annotated[Mapping[str, Annotated[int, Ge(1)]], MinLen(1)] = field(default_factory=dict)


class GraphOptimizer(Optimizer):
    """Optimizer that saves the graph after ONNX Runtime's optimizations.

    The saved graph loads faster. Option `level`: graphs of `basic` and `extended` run on every
    machine. `all` also adapts the memory layout of convolutions to the registers of the CPU. The
    targets must then have the same kind of CPU.
    """

    tools: tuple[str, ...] = _TOOLS
    options: type = GraphOptions
    quantized = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Save the graph after ONNX Runtime's optimizations.

        Raises:
            UserError: an option is wrong, an excluded node does not exist, or level `all` has
                targets with several kinds of machines.
            StageError: ONNX Runtime cannot optimize the graph.
        """
        level = str(read_options(request.section, self.options).get("level", "extended"))
        source = _checked(request, read_structure(request.source))
        if (
            level == "all"
            and len({(machine.family, machine.wide) for machine in request.machines}) > 1
        ):
            raise UserError(
                "level `all` optimizes the memory layout for one kind of machine, "
                "and the targets have several kinds",
                where=f"variant {request.section.name}, options",
                remedy="Set level: extended, or make a pipeline for each kind of machine.",
            )
        with Scratch() as folder, suppress_output():
            result = folder / "result.onnx"
            with convert_failures(
                "ONNX Runtime cannot optimize the graph", request.section.name, KEEP_SOURCE
            ):
                ort = importlib.import_module("onnxruntime")
                options = ort.SessionOptions()
                options.log_severity_level = 3  # At level 3, ONNX Runtime logs only errors.
                options.graph_optimization_level = getattr(
                    ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}"
                )
                options.optimized_model_filepath = str(result)
                # External data is named relative to the folder of the model. The saved model has
                # another folder than the source, so the weights are written beside it.
                if request.source.stat().st_size > EXTERNAL_LIMIT or list_external_names(
                    request.source
                ):
                    entry = "session.optimized_model_external_initializers_file_name"
                    options.add_session_config_entry(entry, f"{result.name}.data")
                ort.InferenceSession(
                    str(request.source), options, providers=["CPUExecutionProvider"]
                )
            derived = read_model(result)
        restore_metadata(derived, source)
        write_model(derived, request.path)
        before, after = (
            Counter(node.op_type for node in iterate_nodes(model)) for model in (source, derived)
        )
        new = ", ".join(
            f"{name} {count}"
            for name, count in sorted((after - before).items())
            if name not in before
        )
        laid = ", laid out for this kind of machine" if level == "all" else ""
        changes = f"{before.total()} nodes became {after.total()}" + (f", new {new}" if new else "")
        return (f"graph level {level}{laid}: {changes}",)


class ShapeOptimizer(Optimizer):
    """Optimizer that replaces symbolic dimensions by fixed sizes.

    With fixed sizes, the runtime can plan kernels in advance. Option `dims`: sizes by name. The
    batch axis stays free, since gates and endpoints use batches of all sizes.
    """

    tools: tuple[str, ...] = _TOOLS
    options = ShapeOptions
    quantized = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Replace symbolic dimensions by fixed sizes.

        Raises:
            UserError: `dims` is missing, wrong or names an unknown dimension, or an excluded node
                does not exist.
            StageError: the shapes cannot be fixed.
        """
        where = f"variant {request.section.name}, options"
        dims = read_options(request.section, self.options).get("dims", {})
        model = _checked(request, read_model(request.source))
        shapes = [value.type.tensor_type.shape.dim for value in model.graph.input]
        batch = {shape[0].dim_param for shape in shapes if shape} - {""}
        known = {dim.dim_param for shape in shapes for dim in shape} - batch - {""}
        if not dims or (wrong := sorted(set(dims) - known)):
            what = (
                f"the model has no free dimension {wrong[0]!r} apart from the batch axis"
                if dims
                else "fixed shapes need option `dims`"
            )
            hint = (
                f"dims can name {', '.join(sorted(known))}."
                if known
                else "The model has no named free dimension apart from the batch axis. "
                f"{KEEP_SOURCE}"
            )
            raise UserError(what, where=where, remedy=hint)
        library = importlib.import_module("onnxruntime.tools.onnx_model_utils")
        del model.graph.value_info[:]
        with convert_failures("the shapes cannot be fixed", request.section.name, KEEP_SOURCE):
            for name, size in dims.items():
                library.make_dim_param_fixed(model.graph, name, size)
        write_model(model, request.path)
        return (f"fixed: {', '.join(f'{name} = {size}' for name, size in sorted(dims.items()))}",)


def _checked(request: OptimizeRequest, source: Any) -> Any:
    """Return the source after checking that excluded nodes exist."""
    trace_nodes(request.section.exclude, source, source)
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class PassesOptions:
    """Options of a tool that runs the named passes."""

    passes: Names = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipOptions:
    """Options of a tool that skips the named passes."""

    skip: Names = ()


class _CleanupOptimizer(Optimizer):
    """Base of the optimizers that run a tool for cleaning up graphs.

    Option `passes` names the passes of the tool to run, or option `skip` the passes to leave out.
    The time limit is `timeout` seconds.
    """

    tool: str
    option = "skip"
    options: type = SkipOptions
    clean: Callable[[Path, Path, Sequence[str]], None]
    """Function that writes the tool's result.

    The arguments are the path of the model, the path of the result, and the names of passes.
    """
    tools: tuple[str, ...]
    quantized = False

    def __init__(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self._timeout = timeout

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Run the tool in a forked process, and check its result.

        Raises:
            UserError: an option is wrong, or an excluded node does not exist.
            MissingPackageError: the tool is not installed.
            StageError: the tool fails, or changes the inputs or outputs.
        """
        chosen = tuple(read_options(request.section, self.options).get(self.option, ()))
        where = f"variant {request.section.name}"
        source = read_model(request.source)
        # The call raises an error if an excluded node does not exist. Its result is not needed,
        # since clean-up leaves all nodes in float.
        trace_nodes(request.section.exclude, source, source)
        with Scratch() as folder:
            result = folder / "result.onnx"
            try:
                run_guarded(type(self).clean, request.source, result, chosen, timeout=self._timeout)
            except ProcessCrashError as crash:
                remedy = f"{KEEP_SOURCE} Or name other passes in options.{self.option}."
                raise StageError(
                    f"{self.tool} failed", where=where, why=crash.explanation, remedy=remedy
                ) from None
            derived = read_model(result)
            restore_metadata(derived, source)
            write_model(derived, request.path)
        check_interface(request.source, request.path, self.tool, where)
        before, after = (sum(1 for _ in iterate_nodes(model)) for model in (source, derived))
        sizes = [read_model_info(path).size_bytes for path in (request.source, request.path)]
        effect = (
            f"the graph still has {before} nodes"
            if before == after
            else f"{before} nodes became {after}"
        )
        size = f"the size is {sizes[1] / sizes[0]:.2f} times that of the source"
        return (f"{self.tool} {version(self.tool)}: {effect}, and {size}",)


class SlimOptimizer(_CleanupOptimizer):
    """Optimizer that cleans up graphs with onnxslim; takes option `skip`."""

    tool = "onnxslim"
    tools = ("onnxslim", "onnx")

    @staticmethod
    def clean(source: Path, result: Path, skip: Sequence[str]) -> None:
        """Write onnxslim's result for the source."""
        library = _library("onnxslim")
        _known(skip, importlib.import_module("onnxslim.core").OptimizationSettings.keys(), "skip")
        write_model(library.slim(read_model(source), skip_optimizations=list(skip) or None), result)


class PassOptimizer(_CleanupOptimizer):
    """Optimizer that runs passes of onnxoptimizer; takes option `passes`."""

    tool = "onnxoptimizer"
    option = "passes"
    options = PassesOptions
    tools = ("onnxoptimizer", "onnx")

    @staticmethod
    def clean(source: Path, result: Path, passes: Sequence[str]) -> None:
        """Write the result of the passes for the source."""
        library = _library("onnxoptimizer")
        _known(passes, library.get_available_passes(), "passes")
        chosen = list(passes) or library.get_fuse_and_elimination_passes()
        write_model(library.optimize(read_model(source), chosen, fixed_point=True), result)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_package(imported(error) or name, where=f"method {name}") from error


def _known(names: Sequence[str], known: Sequence[str], option: str) -> None:
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"no pass is called {unknown[0]!r}",
            where=f"options.{option}",
            remedy=f"There are {', '.join(known)}.",
        )
