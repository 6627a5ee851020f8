"""How MLflow is reached: quietly, answering in seconds when it is down, with its errors made ours.

Importing MLflow takes seconds, so that happens when the first call is made.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from onnx_ops.errors import NotFoundError, OnnxOpsError, RefusedError, ServiceUnavailableError, UserError, quoted
from onnx_ops.plugins import imported, missing_package, require

if TYPE_CHECKING:
    from mlflow import MlflowClient

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_PROBE_SECONDS = 5

_ENVIRONMENT: Mapping[str, str] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""What MLflow reads at its own time; what the user has set stays. Its own defaults wait minutes for a dead server."""

_default_uri_lock = threading.Lock()


class Connection:
    """One MLflow: a tracking server, or the database behind one.

    Args:
        uri: `http://…`, `https://…`, or a SQLAlchemy URL of SQLite, PostgreSQL, MySQL or SQL Server.

    Raises:
        UserError: the URI is of another kind.
        MissingPackageError: MLflow is not installed.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        self._kind = parts.scheme.partition("+")[0]
        if self._kind not in (*_DATABASES, "http", "https"):
            raise UserError(
                "this is no MLflow tracking URI that can be used",
                where=self.shown,
                why="folders of files are no longer a registry in MLflow 3",
                remedy="Write http://HOST:PORT, or a database such as sqlite:///mlflow.db",
            )
        require("mlflow", where="registry")

    @property
    def is_database(self) -> bool:
        return self._kind in _DATABASES

    @cached_property
    def shown(self) -> str:
        """The URI without its password."""
        parts = urlsplit(self.uri)
        if parts.password is None:
            return self.uri
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))

    def sqlite_path(self) -> Path | None:
        """The file of a SQLite database."""
        if self._kind != "sqlite":
            return None
        return Path(unquote(urlsplit(self.uri).path.removeprefix("/"))).absolute()

    @contextmanager
    def session(self, where: str) -> Iterator[MlflowClient]:
        """A client for a few calls, whose errors become ours.

        Raises:
            ServiceUnavailableError: MLflow does not answer or cannot do it now.
            NotFoundError: it knows no such thing.
            RefusedError: it said no.
            UserError: it does not accept a name or value.
            MissingPackageError: the driver of the database is not installed.
        """
        self._probe()
        self._import()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield self._client
        except MlflowException as error:
            raise self._translated(error, where) from error
        except (SQLAlchemyError, OSError) as error:
            raise self._unavailable(str(error)) from error
        except ModuleNotFoundError as error:
            raise missing_package(imported(error), where=self.shown) from error

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """MLflow's process-wide default, for the calls that look it up: creating a version on a database does."""
        if not self.is_database:
            yield
            return
        import mlflow

        with _default_uri_lock:
            before = os.environ.get("MLFLOW_TRACKING_URI")
            mlflow.set_tracking_uri(self.uri)
            try:
                yield
            finally:
                # Resets MLflow's variable too, which the user's environment may have set.
                mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
                if before is not None:
                    os.environ["MLFLOW_TRACKING_URI"] = before

    @cached_property
    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _import(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow

        # Every error reaches us as an exception; MLflow would print its traceback as well.
        logging.getLogger(mlflow.__name__).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store").setLevel(logging.CRITICAL)

    def _probe(self) -> None:
        """Ask for a sign of life before MLflow starts to retry.

        Raises:
            ServiceUnavailableError: there is none.
        """
        if not self.is_database:
            self._probe_server()
            return
        host, port = urlsplit(self.uri).hostname, urlsplit(self.uri).port or _PORTS.get(self._kind)
        if host is None or port is None:
            return
        try:
            socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
        except OSError as error:
            raise self._unavailable(str(error)) from error

    def _probe_server(self) -> None:
        from mlflow.exceptions import MlflowException

        self._import()
        try:
            self._get("/health")
        except MlflowException as error:
            raise self._unavailable(str(error)) from error

    def statuses(self, path: str, count: int) -> list[int]:
        """HTTP statuses of that many requests at once, so that several of the server's workers answer.

        Raises:
            ServiceUnavailableError: there is no answer.
        """
        from mlflow.exceptions import MlflowException

        try:
            with ThreadPoolExecutor(count) as pool:
                return list(pool.map(self._get, [path] * count))
        except MlflowException as error:
            raise self._unavailable(str(error)) from error

    def _get(self, path: str) -> int:
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        # MLflow's own request, so that proxies, certificates and credentials are those of the calls that follow.
        answer = http_request(  # type: ignore[no-untyped-call]
            get_default_host_creds(self.uri),  # type: ignore[no-untyped-call]
            path,
            "GET",
            max_retries=0,
            timeout=_PROBE_SECONDS,
            raise_on_status=False,
        )
        return int(answer.status_code)

    def _translated(self, error: Exception, where: str) -> OnnxOpsError:
        code = getattr(error, "error_code", "")
        text = self._clean(str(error))
        if code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
            return NotFoundError("MLflow knows no such thing", where=where, why=text)
        if code == "PERMISSION_DENIED":
            return RefusedError(
                "MLflow refused", where=where, why=text, remedy="Ask who keeps this MLflow for permission"
            )
        if code in ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS"):
            return UserError("MLflow does not accept this", where=where, why=text)
        if code == "UNAUTHENTICATED":
            return ServiceUnavailableError(
                "MLflow does not know who you are",
                where=self.shown,
                remedy="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            )
        return self._unavailable(text)

    def _unavailable(self, why: str) -> ServiceUnavailableError:
        remedy = "Check that the database is up and may be written" if self.is_database else "Start it or check its URL"
        return ServiceUnavailableError("MLflow does not answer", where=self.shown, why=self._clean(why), remedy=remedy)

    def _clean(self, text: str) -> str:
        """One line without the password."""
        password = urlsplit(self.uri).password
        for secret in {password, unquote(password)} if password else ():
            text = text.replace(secret, "***")
        lines = text.strip().splitlines()
        return quoted(lines[0]) if lines else ""
