"""Release engineering for ONNX models.

The commands are functions in `onnx_ops.api`, which can also be imported from here. `record_step`
marks the steps of a system for `onnx-ops judge --system`.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Some builds of ONNX Runtime send telemetry from a separate thread, unless telemetry is disabled
# before the import. The endpoint server forks, and a process with such a thread must not fork.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from onnx_ops.api import Result as Result
    from onnx_ops.api import check as check
    from onnx_ops.api import judge as judge
    from onnx_ops.api import promote as promote
    from onnx_ops.api import rollback as rollback
    from onnx_ops.api import run as run
    from onnx_ops.api import status as status
    from onnx_ops.step_recorder import record_step as record_step

_API = ("Result", "check", "judge", "promote", "rollback", "run", "status")


def __getattr__(name: str) -> Any:
    """Load a function when its name is first used."""
    if name == "record_step":
        return import_module("onnx_ops.step_recorder").record_step
    if name in _API:
        return getattr(import_module("onnx_ops.api"), name)
    raise AttributeError(f"module 'onnx_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, "record_step"})
