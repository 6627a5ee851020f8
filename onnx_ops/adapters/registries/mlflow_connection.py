"""Sessions with MLflow that fail fast if it does not answer.

Importing MLflow takes seconds, so it is imported at the first call.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from onnx_ops.errors import (
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    StorageError,
    UserError,
    quoted,
)
from onnx_ops.plugins import imported, missing_package, require
from onnx_ops.scratch import storage_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_PROBE_S = 5
"""Time limit in seconds of a request that checks whether the server answers."""

_DOWNLOAD_FAILURE = re.compile(
    r"^##### File .*\n(?:\[Errno (?P<number>\d+)\] )?(?P<text>.+)", re.MULTILINE
)
"""The failure of one file in the message of MLflow's error of a download."""
_MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))")
_ENVIRONMENT: Mapping[str, str] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Environment variables that MLflow reads on import or on use, and their values.

Values that the user has set are not changed. With its defaults, MLflow would wait minutes for a
server that does not respond.
"""

_MODULES = (
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
)

_default_uri_lock = threading.Lock()


class MlflowConnection:
    """Connection to an MLflow tracking server, or directly to its database.

    `uri` is the address of the server (`http://…` or `https://…`), or SQLAlchemy's URL of the
    database.

    Raises:
        UserError: the scheme of the URI is not supported.
        MissingPackageError: MLflow is not installed.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        self._kind = parts.scheme.partition("+")[0]
        if self._kind not in (*_DATABASES, "http", "https"):
            raise UserError(
                "this MLflow tracking URI cannot be used",
                where=self.shown,
                why="onnx-ops does not support MLflow's file stores"
                if self._kind in ("", "file")
                else f"onnx-ops does not support the scheme {self._kind}",
                remedy="Write http://HOST:PORT, or a database such as sqlite:///mlflow.db",
            )
        require("mlflow", where="registry")

    @property
    def is_database(self) -> bool:
        """Return whether the URI is that of a database, used without a server."""
        return self._kind in _DATABASES

    @cached_property
    def shown(self) -> str:
        """Return the URI without its password."""
        parts = urlsplit(self.uri)
        if parts.password is None:
            return self.uri
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))

    def sqlite_path(self) -> Path | None:
        """Return the path of a SQLite database; None for other URIs."""
        if self._kind != "sqlite":
            return None
        return Path(unquote(urlsplit(self.uri).path.removeprefix("/"))).absolute()

    @contextmanager
    def session(self, where: str) -> Iterator[MlflowClient]:
        """Provide a client for a few calls, and convert its errors to errors of onnx-ops.

        Raises:
            ServiceUnavailableError: MLflow is unreachable, refuses the credentials, or cannot
                process the request now.
            StorageError: the disk of this machine is full, or a file or folder is not accessible.
            NotFoundError: there is no such resource.
            RefusedError: the user does not have the permission.
            UserError: a name or value is invalid, or the resource already exists.
            MissingPackageError: a driver of the database or the artifact storage is not installed.
        """
        # MLflow retries failed requests for a long time. So a short request, or a connection to the
        # database, first checks that the server answers.
        if not self.is_database:
            self.statuses("/health", 1)
        elif (host := urlsplit(self.uri).hostname) and (
            port := urlsplit(self.uri).port or _PORTS.get(self._kind)
        ):
            try:
                socket.create_connection((host, port), timeout=_PROBE_S).close()
            except OSError as error:
                raise self._unavailable(str(error)) from error
        self._import()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with storage_errors(where):
                yield self._client
        except MlflowException as error:
            raise self._translated(error, where) from error
        except SQLAlchemyError as error:
            raise self._failed(str(error)) from error
        except OSError as error:
            raise self._translated_os_error(error, where) from error
        except ModuleNotFoundError as error:
            raise missing_package(imported(error), where=self.shown) from error

    @contextmanager
    def artifact_errors(self, where: str) -> Iterator[None]:
        """Convert errors of the artifact storage that `session` does not convert.

        The client of the storage can raise errors of any type, which MLflow passes on. For a failed
        download, MLflow raises an error whose message contains the error of each file.

        Raises:
            ServiceUnavailableError: the client of the storage failed.
            StorageError: the disk of this machine is full, or a file or folder is not accessible.
        """
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (OSError, ModuleNotFoundError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, MlflowException):
                failure = _DOWNLOAD_FAILURE.search(str(error))
                if failure is None or error.error_code != "INTERNAL_ERROR":
                    raise
                why = failure["text"]
                if failure["number"]:
                    # Only an OSError about storage is converted.
                    with suppress(OSError), storage_errors(where):
                        raise OSError(int(failure["number"]), why) from error
            raise ServiceUnavailableError(
                "the files of this version cannot be read now",
                where=where,
                why=quoted(self._redact(why)),
                remedy="Check that this machine can reach the artifact storage of MLflow, "
                "and has credentials for it.",
            ) from error

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Set MLflow's process-wide default URI to the database within the context.

        MLflow reads this URI when it creates or downloads a version. For a tracking server, nothing
        is set.
        """
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
                # `set_tracking_uri(None)` also unsets MLFLOW_TRACKING_URI, so the user's value is
                # restored.
                mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
                if before is not None:
                    os.environ["MLFLOW_TRACKING_URI"] = before

    @cached_property
    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _import(self) -> None:
        import_mlflow()
        import mlflow

        # Errors are raised as exceptions. Without these levels, MLflow also logs their tracebacks.
        logging.getLogger(mlflow.__name__).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store").setLevel(logging.CRITICAL)

    def statuses(self, path: str, count: int) -> list[int]:
        """Return the HTTP statuses of `count` concurrent requests.

        Concurrent requests can reach different workers of the server.

        Raises:
            ServiceUnavailableError: the server does not answer.
        """
        self._import()
        from mlflow.exceptions import MlflowException
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        options: dict[str, Any] = {"max_retries": 0, "timeout": _PROBE_S, "raise_on_status": False}
        try:
            # MLflow's own request function uses the same proxies, certificates and credentials as
            # later calls.
            credentials = get_default_host_creds(self.uri)  # type: ignore[no-untyped-call]
            with ThreadPoolExecutor(count) as pool:
                answers = [
                    pool.submit(http_request, credentials, path, "GET", **options)
                    for _ in range(count)
                ]
                return [int(answer.result().status_code) for answer in answers]
        except MlflowException as error:
            raise self._unavailable(str(error)) from error

    def _translated(self, error: Exception, where: str) -> OnnxOpsError:
        code = getattr(error, "error_code", "")
        text = self._clean(str(error))
        if code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
            return NotFoundError("MLflow has no such resource", where=where, why=text)
        if code == "PERMISSION_DENIED":
            return RefusedError(
                "MLflow refused the request",
                where=where,
                why=text,
                remedy="Ask an administrator of this MLflow server for the permission.",
            )
        if code in ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS"):
            return UserError("MLflow rejected the request", where=where, why=text)
        if code == "UNAUTHENTICATED":
            return ServiceUnavailableError(
                "MLflow does not accept the credentials",
                where=self.shown,
                remedy="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
                "or MLFLOW_TRACKING_TOKEN.",
            )
        return self._unavailable(text) if _is_unanswered(error) else self._failed(text)

    def _translated_os_error(self, error: OSError, where: str) -> OnnxOpsError:
        # Errors of a network have no file name. A FileNotFoundError without one reports that no
        # folder for temporary files can be used.
        if error.filename is not None or isinstance(error, FileNotFoundError):
            return StorageError(
                "a file or folder is not accessible",
                where=where,
                why=self._clean(str(error)),
                remedy="Check the path that the reason names.",
            )
        text = str(error)
        return self._failed(text) if _reports_status(error) else self._unavailable(text)

    def _failed(self, why: str) -> ServiceUnavailableError:
        return self._describe("MLflow could not process the request", why, "Check the server's log")

    def _unavailable(self, why: str) -> ServiceUnavailableError:
        return self._describe("MLflow does not answer", why, "Start the server or check its URL")

    def _describe(self, what: str, why: str, server_remedy: str) -> ServiceUnavailableError:
        remedy = (
            "Check that the database is reachable and writable"
            if self.is_database
            else server_remedy
        )
        return ServiceUnavailableError(what, where=self.shown, why=self._clean(why), remedy=remedy)

    def _clean(self, text: str) -> str:
        """Return the first line of a message without the password of the URI."""
        lines = self._redact(text).strip().splitlines()
        return quoted(lines[0]) if lines else ""

    def _redact(self, text: str) -> str:
        password = urlsplit(self.uri).password
        for secret in {password, unquote(password)} if password else ():
            text = text.replace(secret, "***")
        return text


def _is_unanswered(error: Exception) -> bool:
    """Return whether an MlflowException reports a request that got no answer.

    MLflow raises it while it handles the error of the request.
    """
    from requests.exceptions import RequestException

    cause = error.__cause__ or error.__context__
    return isinstance(cause, RequestException) and not _reports_status(cause)


def _reports_status(error: OSError) -> bool:
    """Return whether an error reports the HTTP status of an answer.

    A RetryError reports the status of the last of several answers, and has no `response`.
    """
    from requests.exceptions import RetryError

    return isinstance(error, RetryError) or getattr(error, "response", None) is not None


def import_mlflow() -> None:
    """Import MLflow's modules, with the environment variables of `_ENVIRONMENT`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _MODULES:
        importlib.import_module(name)


def read_pages(read: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield the entries of all pages of a listing.

    `read` returns the page with the given token; None is the token of the first page.
    """
    token: str | None = None
    while True:
        page = read(token)
        yield from page
        if not (token := page.token):
            return


@contextmanager
def suppress_codes(*codes: str) -> Iterator[None]:
    """Suppress MLflow's errors that have one of these codes."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in codes:
            raise


class MlflowModels:
    """Read-only access to MLflow's models by URI.

    A URI is `models:/NAME/VERSION` or `models:/NAME@ALIAS`. Both methods raise UserError for any
    other URI, and the errors of `MlflowConnection.session`.
    """

    def __init__(self, tracking_uri: str) -> None:
        self._mlflow = MlflowConnection(tracking_uri)

    def fingerprint(self, uri: str) -> str:
        """Return the version that a URI names, and the location of its files.

        The files of a version do not change.
        """
        name, version, source = self._version(uri)
        return f"{name}/{version} {source}"

    def fetch(self, uri: str, folder: Path) -> None:
        """Download the files of a URI's version into an empty folder."""
        name, version, _ = self._version(uri)
        with self._mlflow.session(uri), self._mlflow.as_default():
            from mlflow.artifacts import download_artifacts

            source = f"models:/{name}/{version}"
            with self._mlflow.artifact_errors(uri):
                download_artifacts(
                    artifact_uri=source, dst_path=str(folder), tracking_uri=self._mlflow.uri
                )

    def _version(self, uri: str) -> tuple[str, str, str]:
        match = _MODEL_URI.fullmatch(uri)
        if match is None:
            remedy = "Write models:/NAME/VERSION or models:/NAME@ALIAS."
            raise UserError(f"{uri!r} names no version", where="model", remedy=remedy)
        with self._mlflow.session(uri) as client:
            if match["alias"]:
                entry = client.get_model_version_by_alias(match["name"], match["alias"])
            else:
                entry = client.get_model_version(match["name"], match["version"])
        return str(entry.name), str(entry.version), str(entry.source)
