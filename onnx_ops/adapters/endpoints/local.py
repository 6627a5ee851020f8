"""Endpoints on this machine, each a server in a detached process."""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, doc

from onnx_ops import codec
from onnx_ops.adapters.files import exclusive_lock, try_lock
from onnx_ops.adapters.retry import attempts, wait_until
from onnx_ops.adapters.server_metrics import ServerMetrics
from onnx_ops.config.binding import bind_settings, file_fields
from onnx_ops.config.server_options import format_flags
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, build_rollback_state, drop_idle_deployments
from onnx_ops.domain.execution import CPU
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Target
from onnx_ops.errors import CorruptStateError, OnnxOpsError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.ports import EndpointProvider
from onnx_ops.protocol.messages import COUNTS_PATH, STATE_PATH, AdminState, Counts, UserCountsRequest, error_from_bytes
from onnx_ops.protocol.routing_table import TableFile, build_next_table
from onnx_ops.protocol.server_process import (
    AUDIT_FILE,
    LOCK_FILE,
    SERVER_FILE,
    TOKEN_FILE,
    ContainerOptions,
    ServerOptions,
    ServerRecord,
    explain_unservable,
    list_workers,
    signal_worker,
)
from onnx_ops.scratch import write_durably

LOG_FILE = "server.log"
APPLY_LOCK = "apply.lock"
LOOPBACK = "127.0.0.1"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_PORT_FILE = "port"
_KEPT_FILES = frozenset({AUDIT_FILE, LOG_FILE, _PORT_FILE, APPLY_LOCK})
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_FIRST_PORT = 18_000
"""Chosen ports lie below those that systems give to outgoing connections, so that a restart finds its port free."""
_PORTS = 10_000
_OBSERVE_S = 5.0
_DEATH_S = 2.0
"""A killed process releases its ports a little before it releases its lock."""
_ROLLBACK_S = 2.0
"""A server that takes longer to change weights counts as not answering."""
_APPLY_S = 300.0
"""Loading several large models takes this long at most."""
_START_S = 60.0
_STOP_S = 30.0
_KILLED_S = 2.0
_VARIABLES = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PREFIXES = ("LC_", "PYTHON", "CUDA_", "OMP_", "ORT_", "OTEL_")
"""Prefixes of variables in the server's environment, which has no secrets of the process that starts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings(ContainerOptions):
    """Settings of one endpoint: its port, and options of its server.

    The project, not the pipeline, sets the trusted keys.
    """

    port: Annotated[int | None, Ge(1), Le(65_535), doc("Port that clients call.")] = None
    grpc_port: Annotated[int, Ge(0), Le(65_535), doc("Port that gRPC clients call; 0: none.")] = 0
    access_log: Annotated[
        str, doc("File in the endpoint's folder that gets one JSON line per inference, such as access.log.")
    ] = ""
    admin_socket: Annotated[
        str, doc("Unix socket of a second admin listener in the endpoint's folder, such as admin.sock.")
    ] = ""
    endpoint: Annotated[str, doc("Name of the endpoint in metrics.")] = ""


class LocalEndpoints(EndpointProvider):
    """Keeps each endpoint in `folder/<endpoint>/`, readable by its owner only.

    Servers verify signatures with the public keys in the folder `trusted`; without it they load any model.
    """

    tools = EXTRAS["serve"]

    def __init__(self, folder: Path, trusted: Path | None = None, *, python: str = sys.executable) -> None:
        self._folder = folder
        self._trusted = trusted
        self._python = python

    def capabilities(self, settings: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return `split`, `sticky`, `epochs` and the counts that the server supports."""
        return frozenset({"split", "sticky", "epochs"}) | self.metrics().capabilities()

    def metrics(self) -> ServerMetrics:
        """Return the counts of the endpoint's own server."""
        return ServerMetrics(lambda config, request: [self.counts(config, request)])

    def counts(self, config: EndpointConfig, request: UserCountsRequest | None = None) -> Counts:
        """Return the running server's counts; also by user, if requested."""
        server = self._server(config)
        record = server.record()
        if record is None:
            raise ServiceUnavailableError("the endpoint's server does not run", where=config.endpoint)
        method, body = ("GET", None) if request is None else ("POST", codec.dumps(request))
        status, answer = server.request(record, method, body, path=COUNTS_PATH, timeout_s=_OBSERVE_S)
        if status != 200:
            raise error_from_bytes(answer)
        return codec.loads(answer, Counts)

    def validate_settings(self, settings: Mapping[str, Json]) -> None:
        """Validate settings; raises UserError."""
        _read_settings(settings)

    def explain_unservable(self, target: Target) -> str:
        """Return why this machine cannot serve models of the target; empty if it can."""
        if [provider.name for provider in target.providers] == [CPU]:
            return explain_unservable(target, [CPU])
        import onnxruntime

        return explain_unservable(target, onnxruntime.get_available_providers())

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return the error of a port that another program uses."""
        server, port = self._server(config), _read_settings(config.settings, config.endpoint).port
        record = server.record()
        is_own = server.is_orphaned() or (record is not None and record.port == port)
        return None if port is None or is_own or _is_free(port) else _port_taken(port, config, server)

    def place(self, config: EndpointConfig) -> str:
        """Return where the endpoint runs."""
        return f"the server of {config.endpoint} on this machine"

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the running server's state; None if a deployment is lost."""
        server = self._server(config)
        record = server.record()
        if record is None:
            return None
        try:
            status, body = server.request(record, "GET", timeout_s=_OBSERVE_S)
            answer = codec.loads(body, AdminState) if status == 200 else AdminState(state=None)
        except (ServiceUnavailableError, CorruptStateError):
            return None
        if answer.failed or answer.state is None:
            return None
        port, options = _read_settings(config.settings, config.endpoint).port, _server_options(config)
        values = [("port", record.port, record.port if port is None else port)] + [
            (name, getattr(record.options, name), getattr(options, name))
            for name in file_fields(ServerOptions)
            if name != "trusted_keys"
        ]
        drift = [f"{name}: {value}, not {desired}" for name, value, desired in values if value != desired]
        out_of_service = tuple(f"{name}: {why}" for name, why in answer.out_of_service.items())
        return replace(answer.state, drift=tuple(drift), out_of_service=out_of_service)

    def explain_elsewhere(self, config: EndpointConfig) -> str:
        """Return that the server runs from another state folder: one that is started here has none of its clients."""
        folder = self._server(config).folder
        return "" if folder.is_dir() else f"its server was never started from this state folder: there is no {folder}"

    def is_unsupervised(self, config: EndpointConfig) -> bool:
        """Return whether workers answer whose supervisor died."""
        server = self._server(config)
        port = self._known_port(server, config)
        return port is not None and server.is_orphaned() and bool(server.is_ready(port, timeout_s=_OBSERVE_S))

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Start the server if needed, publish the state, and wait until it is served."""
        server = self._server(config)
        body = codec.dumps(replace(state, generation=generation))
        with server.lock():
            try:
                status, answer = server.request(self._ensure_running(server, config), "PUT", body, timeout_s=_APPLY_S)
            except ServiceUnavailableError:
                if not server.wait_until_stopped(_DEATH_S):
                    raise
                # It has died; publishing the same generation again is safe.
                status, answer = server.request(self._ensure_running(server, config), "PUT", body, timeout_s=_APPLY_S)
        if status != 200:
            raise error_from_bytes(answer)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Publish the rollback; restart a server that does not answer, with only this state.

        The old workers answer until the new ones are ready.
        """
        server = self._server(config)
        state = replace(state, generation=generation)
        if self._publish_rollback(server, state):
            return
        server.kill(self._known_port(server, config))
        with server.lock(_ROLLBACK_S):
            if self._publish_rollback(server, state):  # the process that held the lock has started it again
                return
            tables = TableFile(server.folder)
            tables.write(build_next_table(tables.read(), drop_idle_deployments(state)))
            self._ensure_running(server, config)
            if not self._publish_rollback(server, state):
                raise ServiceUnavailableError("the endpoint server does not answer", where=config.endpoint)

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address that clients call; None if the endpoint has no port yet."""
        port = self._known_port(self._server(config), config)
        return None if port is None else f"http://{LOOPBACK}:{port}"

    def stop(self, config: EndpointConfig) -> None:
        """Stop the server; its folder stays, and `apply` starts it again on the same port."""
        server = self._server(config)
        if server.folder.is_dir():
            with server.lock():
                server.stop()

    def remove(self, config: EndpointConfig) -> None:
        """Stop the server and delete its files, except its logs and the port."""
        server = self._server(config)
        if not server.folder.is_dir():
            return
        with server.lock():
            server.stop()
            for path in server.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name not in _KEPT_FILES:
                    path.unlink()

    @staticmethod
    def _publish_rollback(server: LocalServer, state: EndpointState) -> bool:
        """Publish a rollback; return False if no server answers."""
        record = server.record()
        if record is None:
            return False
        try:
            status, answer = server.request(record, "GET", timeout_s=_ROLLBACK_S)
            current = codec.loads(answer, AdminState).state if status == 200 else None
            desired = drop_idle_deployments(state) if current is None else build_rollback_state(current, state)
            must_load = current is None or current.find_deployment(state.leader()) is None
            timeout_s = _APPLY_S if must_load else _ROLLBACK_S
            status, answer = server.request(record, "PUT", codec.dumps(desired), timeout_s=timeout_s)
        except (ServiceUnavailableError, CorruptStateError):
            return False
        if status != 200:
            raise error_from_bytes(answer)
        return True

    def _ensure_running(self, server: LocalServer, config: EndpointConfig) -> ServerRecord:
        """Start the server, or start it again with other options, unless it runs with these."""
        port = self._known_port(server, config)
        if not port:
            first = zlib.crc32(str(server.folder.resolve()).encode())
            candidates = (_FIRST_PORT + (first + offset) % _PORTS for offset in range(_PORTS))
            port = next(filter(_is_free, candidates), None)
            if port is None:
                raise ServiceUnavailableError("no port is free", where=server.folder.name)
        # Relative to the server's folder, in which it runs: both may be moved while it does.
        trusted = "" if self._trusted is None else os.path.relpath(self._trusted.resolve(), server.folder.resolve())
        options = replace(_server_options(config), trusted_keys=trusted)
        record = server.record()
        if record is not None and (record.port, record.options) == (port, options):
            return record
        if record is not None and record.port == port:
            server.kill_supervisor()  # the old workers answer until those of the next server are ready
        elif not server.is_orphaned():
            server.stop()
        if not server.is_orphaned() and not _is_free(port):
            raise _port_taken(port, config, server)
        if self._python == sys.executable:
            tools = (*self.tools, *(EXTRAS["grpc"] if options.grpc_port else ()))
            require(*tools, where=f"endpoint {config.endpoint}")
        write_durably(server.folder / _PORT_FILE, str(port).encode())
        return server.start(port, options)

    def _server(self, config: EndpointConfig) -> LocalServer:
        if not _NAME.fullmatch(config.endpoint):
            raise UserError(
                f"{config.endpoint!r} cannot be the name of an endpoint",
                remedy="Use letters, digits, hyphens and underscores, at most 63.",
            )
        return LocalServer(self._folder / config.endpoint, self._python)

    def _known_port(self, server: LocalServer, config: EndpointConfig) -> int | None:
        port = _read_settings(config.settings, config.endpoint).port
        if port is not None:
            return port if server.folder.is_dir() else None
        path = server.folder / _PORT_FILE
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdecimal() else None


def _port_taken(port: int, config: EndpointConfig, server: LocalServer) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"port {port} is taken by another program",
        where=f"endpoint {config.endpoint}",
        remedy=f"Stop that program, or choose a port: `port` in this endpoint's settings "
        f"(or delete {server.folder / _PORT_FILE} to have another one chosen).",
    )


def _read_settings(values: Mapping[str, Json], where: str = "") -> LocalSettings:
    remedy = "Set ONNX_OPS_TRUSTED_KEYS for the project." if "trusted_keys" in values else ""
    return bind_settings(values, LocalSettings, where=where, remedy=remedy, rules=_check_files)


def _check_files(settings: LocalSettings) -> Iterator[tuple[str, str]]:
    """Yield files that are not in the endpoint's folder, or could be one of the server's own."""
    for key, ending in (("access_log", ".log"), ("admin_socket", ".sock")):
        name = getattr(settings, key)
        if name and (not _FILE.fullmatch(name) or not name.endswith(ending) or name == LOG_FILE):
            yield key, f"'{name[:80]}' must be a name in the endpoint's folder that ends with {ending}"


def _server_options(config: EndpointConfig) -> ServerOptions:
    settings = _read_settings(config.settings, config.endpoint)
    names = set(file_fields(LocalSettings)) & set(file_fields(ServerOptions))
    options = ServerOptions(**{name: getattr(settings, name) for name in names})
    return replace(options, endpoint=options.endpoint or config.endpoint)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


class LocalServer:
    """The server of one folder: a supervisor and its workers.

    It runs while its lock is held, which the system releases when it dies: neither a stale record nor a reused process
    id is ever trusted, or sent the token.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self._python = python

    def lock(self, timeout_s: float = 120.0) -> AbstractContextManager[None]:
        """Keep other processes from starting, stopping or changing this server."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        return exclusive_lock(self.folder / APPLY_LOCK, timeout_s, where=self.folder.name)

    def record(self) -> ServerRecord | None:
        """Return the server's ports and options; None if none runs, or it is not ready."""
        pid = self._pid()
        if pid is None:
            return None
        try:
            record = codec.loads((self.folder / SERVER_FILE).read_bytes(), ServerRecord)
        except (FileNotFoundError, CorruptStateError):
            return None
        return record if record.pid == pid else None

    def is_orphaned(self) -> bool:
        """Return whether workers serve whose supervisor died; a new server replaces them."""
        return self._pid() is None and bool(list_workers(self.folder))

    def is_ready(self, port: int, *, timeout_s: float) -> bool | None:
        """Return whether the server on a port is ready; None if it does not answer."""
        try:
            with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)) as connection:
                connection.request("GET", "/v2/health/ready")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return None

    def start(self, port: int, options: ServerOptions) -> ServerRecord:
        """Start the server and wait until it is ready; an error holds the end of its log."""
        token = self.folder / TOKEN_FILE
        if not token.exists():
            write_durably(token, secrets.token_urlsafe(32).encode())
        if token.stat().st_mode & 0o077:
            raise RefusedError("others may read the admin token", where=str(token), remedy=f"Run: chmod 600 {token}")
        command = [self._python, "-P", "-m", "onnx_ops.serving.main", "--state-dir", "."]
        with (self.folder / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [*command, "--host", LOOPBACK, "--port", str(port), *format_flags(options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={k: v for k, v in os.environ.items() if k in _VARIABLES or k.startswith(_PREFIXES)},
                start_new_session=True,
            )
        # Reaps the server should it die before this process does.
        threading.Thread(target=process.wait, name="reap-server", daemon=True).start()
        for _ in attempts(_START_S, 0.02):
            record = self.record()
            if record is not None and record.pid == process.pid:
                return record
            if process.poll() is not None:
                raise self._failure(f"the endpoint server ended at once (exit code {process.returncode})")
        process.kill()
        raise self._failure(f"the endpoint server was not ready within {_START_S:.0f} s")

    def kill_supervisor(self) -> None:
        """Kill the supervisor, if any. Its workers answer by its last table, until another server takes over."""
        if (pid := self._pid()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait_until_stopped(_KILLED_S)

    def kill(self, port: int | None) -> None:
        """Kill the supervisor, if any, and its workers if the port does not answer."""
        self.kill_supervisor()
        if list_workers(self.folder) and (port is None or self.is_ready(port, timeout_s=_KILLED_S) is None):
            self._signal_workers(signal.SIGKILL, _KILLED_S)

    def stop(self) -> None:
        """Stop the server and its workers, if any, by SIGTERM, then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if (pid := self._pid()) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                self.wait_until_stopped(_STOP_S)
            self._signal_workers(number, _STOP_S)

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Return whether the server is stopped, or stops within the time limit."""
        return wait_until(lambda: self._pid() is None, timeout_s)

    def request(
        self, record: ServerRecord, method: str, body: bytes | None = None, *, path: str = STATE_PATH, timeout_s: float
    ) -> tuple[int, bytes]:
        """Return status and body of the answer to an admin request."""
        try:
            token = (self.folder / TOKEN_FILE).read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            with closing(http.client.HTTPConnection(LOOPBACK, record.admin_port, timeout=timeout_s)) as connection:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailableError(
                "the endpoint server does not answer",
                where=self.folder.name,
                why=str(error) or type(error).__name__,
                remedy=f"Its log is {self.folder / LOG_FILE}.",
            ) from error

    def _pid(self) -> int | None:
        """Return the process that holds the server's lock."""
        try:
            with (self.folder / LOCK_FILE).open(encoding="utf-8") as stream:
                if try_lock(stream.fileno(), fcntl.LOCK_SH):
                    return None
                text = stream.read()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def _signal_workers(self, number: signal.Signals, timeout_s: float) -> None:
        for worker in list_workers(self.folder):
            signal_worker(worker, self.folder, number)
        wait_until(lambda: not list_workers(self.folder), timeout_s)

    def _failure(self, what: str) -> ServiceUnavailableError:
        log = self.folder / LOG_FILE
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return ServiceUnavailableError(
            what, where=self.folder.name, why="its log ends: " + " | ".join(lines), remedy=f"The whole log is {log}."
        )
