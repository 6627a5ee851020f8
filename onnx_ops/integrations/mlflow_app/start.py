"""Build the guarded MLflow application from environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from onnx_ops.adapters.host import SystemClock
from onnx_ops.errors import OnnxOpsError, RefusedError, UserError
from onnx_ops.integrations.mlflow_app.guard import Guard, read_configuration
from onnx_ops.integrations.mlflow_app.store import ServerStore

if TYPE_CHECKING:
    from fastapi import FastAPI
    from flask import Flask


def create_app() -> FastAPI | Flask:
    """Return MLflow's application with the guard.

    The application uses MLflow's basic-auth if the environment configures it. As in MLflow itself,
    it is a Flask application under WSGI servers. Under uvicorn, it is a FastAPI application around
    the Flask application.
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
    # Hooks run in the order of their installation. The guard runs after the hook of basic-auth,
    # since it uses the user that this hook has identified.
    install(app, Guard(configuration, ServerStore(), SystemClock()))
    return served


def refuse_to_start_wrong() -> None:
    """Exit if the configuration is invalid, or if MLflow cannot be guarded.

    With basic-auth, the first user is created if it does not exist.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.server import app

    try:
        require_handlers(app)
        if read_configuration(os.environ).basic_auth:
            from mlflow.server import auth

            # MLflow also checks the secret and creates the first user before it starts workers.
            auth.get_flask_server_secret_key()
            auth.bootstrap_admin_user()
    except (OnnxOpsError, MlflowException) as error:
        raise SystemExit(f"onnx-ops refuses to start MLflow: {error}") from error


Check = Callable[[Guard, str, Any], None]

CHECKS: Mapping[str, Check] = {
    "_set_registered_model_alias": lambda guard, user, message: guard.set_alias(
        user, message.name, message.alias, message.version
    ),
    "_delete_registered_model_alias": lambda guard, user, message: guard.delete_alias(
        user, message.name, message.alias
    ),
    "_set_model_version_tag": lambda guard, user, message: guard.set_tag(
        user, message.name, message.version, message.key, message.value
    ),
    "_delete_model_version_tag": lambda guard, user, message: guard.delete_tag(
        user, message.name, message.version, message.key
    ),
    "_delete_model_version": lambda guard, _, message: guard.delete_version(
        message.name, message.version
    ),
    "_delete_registered_model": lambda guard, _, message: guard.delete_model(message.name),
    "_rename_registered_model": lambda guard, _, message: guard.rename_model(message.name),
}
"""Checks of requests, by the name of MLflow's handler."""

_FUNCTIONS = ("_get_model_registry_store", "_get_request_message", "catch_mlflow_exception")
"""Functions of MLflow's module of handlers that the guard calls."""


def require_handlers(app: Flask) -> None:
    """Check that MLflow has the handlers and functions that the guard needs.

    Raises:
        UserError: this MLflow lacks one of them.
    """
    from mlflow.server import handlers

    missing = [name for name in CHECKS if name not in app.view_functions]
    missing += [name for name in _FUNCTIONS if not hasattr(handlers, name)]
    if missing:
        raise UserError(
            "the plugin cannot guard this version of MLflow",
            why=f"it lacks {', '.join(sorted(missing))}",
            remedy="Install mlflow>=3.17,<4 as onnx-ops requires.",
        )


def install(app: Flask, guard: Guard) -> None:
    """Make the guard check the requests of `CHECKS` before MLflow handles them.

    The application must have passed `require_handlers`.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2, model_registry_pb2
    from mlflow.server import handlers

    @handlers.catch_mlflow_exception  # type: ignore[untyped-decorator]
    def check_request() -> None:
        from flask import g, request

        handler = request.endpoint or ""
        if (check := CHECKS.get(handler)) is None:
            return
        # The request's message is named after the handler, such as `SetModelVersionTag`.
        kind = getattr(model_registry_pb2, handler.title().replace("_", ""))
        message = handlers._get_request_message(kind())  # type: ignore[no-untyped-call] # noqa: SLF001 (see `_FUNCTIONS`)
        # basic-auth, or an application that replaces it, sets this variable. Without both, the user
        # is empty.
        user = str(g.get("mlflow_authenticated_user", ""))
        try:
            check(guard, user, message)
        except RefusedError as error:
            raise MlflowException(str(error), databricks_pb2.PERMISSION_DENIED) from error

    app.before_request(check_request)
