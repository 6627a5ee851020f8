"""Runs inside `mlflow server --app-name onnx-ops` and refuses what no signed decision allows, for UI and API alike.

MLflow looks `create_app` up before it starts its workers, and each worker does so again. A worker that cannot start is
started again for ever, so a wrong configuration must end the first look-up, with one message.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onnx_ops.integrations.mlflow_app.start import create_app, refuse_to_start_wrong

    refuse_to_start_wrong()
    return create_app
