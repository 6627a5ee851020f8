"""Runtime that uses another build of ONNX Runtime in an isolated environment.

The module contains both sides of the process boundary.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops.adapters.isolation.process import (
    DEFAULT_TIMEOUT_S,
    IsolatedProcess,
    ProcessLimits,
    RetainedProcess,
    build_interpreter_command,
)
from onnx_ops.adapters.isolation.worker_main import require_tensors, serve
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array, Tensors

_WORKER = "onnx_ops.adapters.runtimes.isolated:run_runtime"

_BUILD = re.compile(
    r"(?P<name>onnxruntime[a-z0-9_.-]*)(\[[^]]*\])?==(?P<version>\d[\w.+!-]*)", re.ASCII
)


@dataclass(slots=True, kw_only=True)
class IsolatedRuntimes:
    """Caller of methods of OnnxRuntime in the isolated environments of targets.

    The first call starts a process in the environment, and later calls reuse it. A new process is
    started if the process has ended or the target changes.
    """

    python: Callable[[Environment], Path]
    """Function that returns the interpreter of an environment, creating it if needed."""

    held: RetainedProcess = field(default_factory=RetainedProcess)

    def call(self, method: str, target: Target, **arguments: object) -> Any:
        """Call a method of OnnxRuntime in the target's environment; return its result.

        Values of this package's types are returned as plain JSON values.
        """
        env = target.env or Environment()
        limits = ProcessLimits(memory=env.memory, timeout=env.timeout or DEFAULT_TIMEOUT_S)

        def start() -> IsolatedProcess:
            read_runtime_build(target)
            command = build_interpreter_command(self.python(env), _WORKER)
            return IsolatedProcess(command, limits, f"target {target.name}")

        process = self.held.get(target.digest(), start)
        return process.ask(
            method, timeout=limits.timeout, target=replace(target, env=None), **arguments
        )


def read_runtime_build(target: Target) -> tuple[str, str]:
    """Return name and version of the build of ONNX Runtime in a target's environment.

    Raises:
        UserError: no requirement names an exact version of a build.
    """
    for requirement in target.env.requirements if target.env else ():
        if build := _BUILD.fullmatch(requirement.replace(" ", "").partition(";")[0]):
            return build["name"], build["version"]
    raise UserError(
        "the environment does not name the build of ONNX Runtime to measure",
        where=f"target {target.name}: env.requirements",
        remedy="Name exactly one version, such as `onnxruntime-openvino==1.24.1`.",
    )


class _InnerRuntime(OnnxRuntime):
    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        outputs = super().run(model, target, batches)
        for answer in outputs:
            require_tensors(answer)
        return outputs


def run_runtime() -> None:
    """Serve calls of OnnxRuntime's methods in the process of the environment."""
    # The processes that this process starts find the packages through PYTHONPATH. This process
    # itself runs with option `-I`, which ignores the variable.
    os.environ["PYTHONPATH"] = sys.argv[1]
    serve(_InnerRuntime(), "benchmark")
