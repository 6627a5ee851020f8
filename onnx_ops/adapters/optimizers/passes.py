"""Graph hygiene: onnxslim, onnxsim and onnxoptimizer, each a method. The variant is float, and judged by parity.

Each runs in a process of its own: their native code may take its process down, and two of them print.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onnx_ops.adapters.isolation.shield import PATIENCE_S, Fallen, shielded
from onnx_ops.adapters.optimizers.library import check_interface
from onnx_ops.adapters.optimizers.options import Names, read_options
from onnx_ops.errors import StageError, UserError
from onnx_ops.onnx_graph.files import nodes, read_model, write_model
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.onnx_graph.rewrites import follow, like_source
from onnx_ops.plugins import imported, missing_package
from onnx_ops.ports.optimize import OptimizeRequest
from onnx_ops.scratch import Scratch

Clean = Callable[[Path, Path, Sequence[str]], None]
"""Writes to the second path what a tool makes of the model at the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassesOptions:
    """Passes to run."""

    passes: Names = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipOptions:
    """Passes to leave out."""

    skip: Names = ()


class _Passes:
    """One tool behind the port. Option `passes` names those of its passes to run, or `skip` those to leave out.

    Args:
        timeout: seconds that the tool may take.
        memory: bytes that its process may use, by default what the machine has.
    """

    tool: str
    option: str
    clean: Clean
    tools: tuple[str, ...]
    quantized = False
    needs_calibration = False

    def __init__(self, timeout: float = PATIENCE_S, memory: int | None = None) -> None:
        self._timeout = timeout
        self._memory = memory

    @property
    def options(self) -> type:
        """Dataclass of the options."""
        return PassesOptions if self.option == "passes" else SkipOptions

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        chosen = tuple(read_options(request.section, self.options).get(self.option, ()))
        where = f"variant {request.section.name}"
        source = read_model(request.source)
        follow(request.section.exclude, source, source)  # in float they stay by themselves
        with Scratch() as folder:
            result = folder / "result.onnx"
            self._run(request.source, result, chosen, where)
            derived = read_model(result)
            like_source(derived, source)
            write_model(derived, request.path)
        check_interface(request.source, request.path, self.tool, where)
        return (f"{self.tool} {version(self.tool)}: {_effect(request, source, derived)}",)

    def _run(self, source: Path, result: Path, chosen: tuple[str, ...], where: str) -> None:
        try:
            shielded(type(self).clean, source, result, chosen, timeout=self._timeout, memory=self._memory)
        except Fallen as fallen:
            raise StageError(
                f"{self.tool} failed",
                where=where,
                why="\n".join(part for part in (fallen.how, fallen.said) if part),
                remedy=f"Leave this variant out of `quantize`, or give other passes with options.{self.option}.",
            ) from None


def _slim(source: Path, result: Path, skip: Sequence[str]) -> None:
    library = _library("onnxslim")
    _known(skip, importlib.import_module("onnxslim.core").OptimizationSettings.keys(), "skip")
    write_model(library.slim(read_model(source), skip_optimizations=list(skip) or None), result)


def _simplify(source: Path, result: Path, skip: Sequence[str]) -> None:
    library = _library("onnxsim")
    simplified, _ = library.simplify(read_model(source), skipped_optimizers=list(skip) or None)
    write_model(simplified, result)


def _optimize(source: Path, result: Path, passes: Sequence[str]) -> None:
    library = _library("onnxoptimizer")
    _known(passes, library.get_available_passes(), "passes")
    chosen = list(passes) or library.get_fuse_and_elimination_passes()
    write_model(library.optimize(read_model(source), chosen, fixed_point=True), result)


class SlimOptimizer(_Passes):
    """onnxslim: constants folded, what repeats or does nothing removed, neighbours fused. Option `skip`."""

    tool = "onnxslim"
    option = "skip"
    clean = staticmethod(_slim)
    tools = ("onnxslim", "onnx")


class SimplifyOptimizer(_Passes):
    """onnxsim: constants folded by ONNX Runtime, shapes inferred, its own set of fusions. Option `skip`."""

    tool = "onnxsim"
    option = "skip"
    clean = staticmethod(_simplify)
    tools = ("onnxsim", "onnxruntime", "onnx")


class PassOptimizer(_Passes):
    """onnxoptimizer: its passes that eliminate and fuse, until nothing changes; or those of option `passes`."""

    tool = "onnxoptimizer"
    option = "passes"
    clean = staticmethod(_optimize)
    tools = ("onnxoptimizer", "onnx")


def _library(name: str) -> Any:
    """Raises MissingPackageError if the tool is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_package(imported(error) or name, where=f"method {name}") from error


def _known(names: Sequence[str], known: Sequence[str], option: str) -> None:
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"no pass is called {unknown[0]!r}", where=f"options.{option}", remedy=f"There are {', '.join(known)}."
        )


def _effect(request: OptimizeRequest, source: Any, derived: Any) -> str:
    before, after = sum(1 for _ in nodes(source)), sum(1 for _ in nodes(derived))
    sizes = info(request.source).size_bytes, info(request.path).size_bytes
    if before == after:
        return f"nothing to tidy: {before} nodes as before, {sizes[1] / sizes[0]:.2f} times the size"
    return f"{before} nodes became {after}, {sizes[1] / sizes[0]:.2f} times the size"
