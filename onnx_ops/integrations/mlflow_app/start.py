"""From environment variables to a guarded application."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnx_ops.adapters.host import SystemClock
from onnx_ops.errors import OnnxOpsError
from onnx_ops.integrations.mlflow_app.configuration import Configuration, read_configuration
from onnx_ops.integrations.mlflow_app.guard import Guard
from onnx_ops.integrations.mlflow_app.hook import install
from onnx_ops.integrations.mlflow_app.store import ServerStore

if TYPE_CHECKING:
    from fastapi import FastAPI
    from flask import Flask


def create_app() -> FastAPI | Flask:
    """MLflow's application with the guard in it, and basic-auth around it if the environment says so.

    A Flask application under WSGI servers, a FastAPI one around it under uvicorn, as MLflow itself has it.
    """
    from mlflow.environment_variables import _MLFLOW_SGI_NAME
    from mlflow.server import app
    from mlflow.server.fastapi_app import create_fastapi_app

    configuration = read_configuration(os.environ)
    served: FastAPI | Flask
    if configuration.basic_auth:
        from mlflow.server import auth

        served = auth.create_app(app)
    else:
        on_asgi = _MLFLOW_SGI_NAME.get() == "uvicorn"  # type: ignore[no-untyped-call]
        served = create_fastapi_app(app) if on_asgi else app
    # After basic-auth, whose own hook has found out by then who asks.
    install(app, Guard(configuration, ServerStore(), SystemClock()))
    return served


def refuse_to_start_wrong() -> None:
    """Raises SystemExit with the reason if the application could not be made."""
    from mlflow.exceptions import MlflowException

    try:
        _prepare(read_configuration(os.environ))
    except (OnnxOpsError, MlflowException) as error:
        raise SystemExit(f"onnx-ops refuses to start MLflow: {error}") from error


def _prepare(configuration: Configuration) -> None:
    """What MLflow does before it starts workers under its own basic-auth: check the secret, make the first user."""
    if configuration.basic_auth:
        from mlflow.server import auth

        auth.get_flask_server_secret_key()
        auth.bootstrap_admin_user()
