"""MLflow app that refuses changes without a signed decision that allows them.

The app runs inside `mlflow server --app-name onnx-ops`, and checks changes from the UI and the API.

MLflow looks up `create_app` before it starts its workers, and again in each worker. A worker that
cannot start is restarted forever. An invalid configuration, or an MLflow that cannot be guarded,
must therefore end the process at the first look-up, with one message.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onnx_ops.integrations.mlflow_app.start import create_app, refuse_to_start_wrong

    refuse_to_start_wrong()
    return create_app
