"""Release engineering for ONNX models.

The public names can be imported from here. The commands are functions of `onnx_ops.api`.
`record_step` marks the steps of a system for its comparison with a model. The functions of
`onnx_ops.onnx_graph.joining` build released files from graphs.
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
    from onnx_ops.onnx_graph.joining import build_image_decoder as build_image_decoder
    from onnx_ops.onnx_graph.joining import join_graphs as join_graphs
    from onnx_ops.step_recorder import record_step as record_step

_PUBLIC = {
    **dict.fromkeys(
        ("Result", "check", "judge", "promote", "rollback", "run", "status"), "onnx_ops.api"
    ),
    **dict.fromkeys(("build_image_decoder", "join_graphs"), "onnx_ops.onnx_graph.joining"),
    "record_step": "onnx_ops.step_recorder",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Load the module of a public name when the name is first used."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'onnx_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
