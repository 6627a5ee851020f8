"""An optimizer whose packages live in an environment of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.isolation.exporter import PATIENCE_S
from onnx_ops.adapters.isolation.interpreter import interpreter
from onnx_ops.adapters.isolation.process import Limits, Process
from onnx_ops.adapters.runtimes.arrays import put_arrays
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.ports.optimize import ConfiguredOptimizer, Optimizer, OptimizeRequest

INSIDE = "onnx_ops.adapters.isolation.inside_optimizer"


@dataclass(slots=True, kw_only=True)
class IsolatedOptimizer:
    """Does in another process what an optimizer does here; what needs no package of its own is asked here.

    Args:
        here: the optimizer.
        place: `module:Class`, as its entry point says.
        python: makes the environment if it must, and gives its interpreter.
        limits: of the process.
    """

    here: Optimizer
    place: str
    python: Callable[[], Path]
    limits: Limits = field(default_factory=Limits)
    tools: tuple[str, ...] = ()
    """None of this installation."""

    quantized: bool = field(init=False)
    needs_calibration: bool = field(init=False)

    def __post_init__(self) -> None:
        self.quantized, self.needs_calibration = self.here.quantized, self.here.needs_calibration

    def files(self, section: Quantize) -> tuple[str, ...]:
        return self.here.files(section) if isinstance(self.here, ConfiguredOptimizer) else ()

    def settle(self, section: Quantize, root: Path) -> Quantize:
        return self.here.settle(section, root) if isinstance(self.here, ConfiguredOptimizer) else section

    def quantizes(self, section: Quantize) -> bool:
        return self.here.quantizes(section) if isinstance(self.here, ConfiguredOptimizer) else self.quantized

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        package = self.place.partition(".")[0].partition(":")[0]
        process = Process(
            interpreter(self.python(), INSIDE, (package,)), self.limits, f"variant {request.section.name}"
        )
        try:
            with tempfile.TemporaryDirectory(dir=process.folder) as scratch:
                given = request.calibration
                rows = None if given is None else str(put_arrays(given, Path(scratch) / "calibration.npz"))
                notes = process.ask(
                    "optimize",
                    timeout=self.limits.timeout or PATIENCE_S,
                    optimizer=self.place,
                    section=codec.to_json(request.section),
                    source=str(request.source.resolve()),
                    path=str(request.path.resolve()),
                    calibration=rows,
                    machines=[codec.to_json(one) for one in request.machines],
                )
        finally:
            process.stop()
        return tuple(notes)
