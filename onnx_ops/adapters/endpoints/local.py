"""Endpoints on this machine, each a server in a detached process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, doc

from onnx_ops import codec
from onnx_ops.adapters.endpoints.cloud import verify_new_files
from onnx_ops.adapters.endpoints.local_server import APPLY_LOCK, LOG_FILE, LOOPBACK, LocalServer
from onnx_ops.adapters.server_metrics import ServerMetrics
from onnx_ops.config.binding import bind_options, file_fields
from onnx_ops.domain.endpoint import (
    EndpointConfig,
    EndpointState,
    ServerMemory,
    build_rollback_state,
    drop_idle_deployments,
)
from onnx_ops.domain.execution import CPU
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Target
from onnx_ops.errors import CorruptStateError, OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.ports import EndpointProvider
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    AdminState,
    Counts,
    UserCountsRequest,
    error_from_bytes,
)
from onnx_ops.protocol.routing_table import TableFile, build_next_table
from onnx_ops.protocol.server_process import (
    AUDIT_FILE,
    ContainerOptions,
    ServerOptions,
    ServerRecord,
    explain_unservable,
)
from onnx_ops.scratch import write_durably

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_PORT_FILE = "port"
_KEPT_FILES = frozenset({AUDIT_FILE, LOG_FILE, _PORT_FILE, APPLY_LOCK})
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_FIRST_PORT = 18_000
"""First port of the range from which ports of endpoints are chosen.

The range is below the default range of Linux for outgoing connections, which therefore do not use
these ports.
"""
_PORTS = 10_000
_OBSERVE_S = 5.0
_DEATH_S = 2.0
"""Seconds to wait until an ended server has released its lock.

A process releases its ports a little before its lock.
"""
_ROLLBACK_S = 2.0
"""Seconds within which a server must change weights in a rollback.

A server that takes longer is treated as unavailable.
"""
_APPLY_S = 300.0
"""Seconds within which a server must apply a state.

Applying a state can include loading several large models.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions(ContainerOptions):
    """Options of one endpoint: its port, and those of its server.

    The project, not the pipeline, sets the trusted keys.
    """

    port: Annotated[int | None, Ge(1), Le(65_535), doc("Port that clients call.")] = None
    grpc_port: Annotated[int, Ge(0), Le(65_535), doc("Port that gRPC clients call; 0: none.")] = 0
    access_log: Annotated[
        str,
        doc(
            "File in the endpoint's folder that gets one JSON line per inference, "
            "such as access.log."
        ),
    ] = ""
    admin_socket: Annotated[
        str,
        doc("Unix socket of a second admin listener in the endpoint's folder, such as admin.sock."),
    ] = ""
    endpoint: Annotated[str, doc("Name of the endpoint in metrics.")] = ""


class LocalEndpoints(EndpointProvider):
    """Provider that stores the files of each endpoint in `folder/<endpoint>/`.

    Only the owner of an endpoint's folder can read its files. Servers verify signatures with the
    public keys in the folder `trusted`. If `trusted` is None, they load any model.
    """

    tools = EXTRAS["serve"]

    def __init__(
        self, folder: Path, trusted: Path | None = None, *, python: str = sys.executable
    ) -> None:
        self._folder = folder
        self._trusted = trusted
        self._python = python

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return `split`, `sticky`, `epochs` and the counts that the server supports."""
        return frozenset({"split", "sticky", "epochs"}) | self.metrics().capabilities()

    def metrics(self, options: Mapping[str, Json] | None = None) -> ServerMetrics:
        """Return the metrics source that reads the counts of the endpoint's server."""
        return ServerMetrics(lambda config, request: [self.counts(config, request)])

    def counts(self, config: EndpointConfig, request: UserCountsRequest | None = None) -> Counts:
        """Return the running server's counts; also by user, if requested.

        Raises:
            ServiceUnavailableError: the server does not run or answer.
            OnnxOpsError: the error of the server, if it refuses the request.
        """
        server = self._server(config)
        record = server.record()
        if record is None:
            raise ServiceUnavailableError(
                "the endpoint's server does not run, or is still starting", where=config.endpoint
            )
        method, body = ("GET", None) if request is None else ("POST", codec.dumps(request))
        status, answer = server.request(
            record, method, body, path=COUNTS_PATH, timeout_s=_OBSERVE_S
        )
        if status != 200:
            raise error_from_bytes(answer)
        return codec.loads(answer, Counts)

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        _read_options(options)

    def explain_unservable(self, target: Target) -> str:
        """Return why this machine cannot serve models of the target; empty if it can."""
        if [provider.name for provider in target.providers] == [CPU]:
            return explain_unservable(target, [CPU])
        import onnxruntime

        return explain_unservable(target, onnxruntime.get_available_providers())

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if the port of the options is not free for the server."""
        server, port = self._server(config), _read_options(config.options, config.endpoint).port
        record = server.record()
        is_own = server.is_orphaned() or (record is not None and record.port == port)
        return (
            None if port is None or is_own or _is_free(port) else _port_taken(port, config, server)
        )

    def place(self, config: EndpointConfig) -> str:
        """Return where the endpoint runs."""
        return f"the server of {config.endpoint} on this machine"

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the server's state, and its drift from its options.

        The result is None if the server does not answer, lacks a state, or reports a failed
        deployment.
        """
        server = self._server(config)
        record, answer = server.record(), _read_state(server)
        if record is None or answer.failed or answer.state is None:
            return None
        port, server_options = (
            _read_options(config.options, config.endpoint).port,
            _read_server_options(config),
        )
        values = [("port", record.port, record.port if port is None else port)] + [
            (name, getattr(record.options, name), getattr(server_options, name))
            for name in file_fields(ServerOptions)
            if name != "trusted_keys"
        ]
        drift = [
            f"{name}: {value}, not {desired}" for name, value, desired in values if value != desired
        ]
        out_of_service = tuple(f"{name}: {why}" for name, why in answer.out_of_service.items())
        return replace(answer.state, drift=tuple(drift), out_of_service=out_of_service)

    def list_memory(self, config: EndpointConfig) -> Sequence[ServerMemory]:
        """Return the memory of the server; empty if no server answers."""
        memory = _read_state(self._server(config)).memory
        return () if memory is None else (memory,)

    def explain_elsewhere(self, config: EndpointConfig) -> str:
        """Return a reason if the server was never started from this state folder.

        The server can then run from another state folder. Its clients would not send their requests
        to a server that is started from this folder. The result is empty if the endpoint has a
        folder in this state folder.
        """
        folder = self._server(config).folder
        return (
            ""
            if folder.is_dir()
            else f"its server was never started from this state folder: {folder} does not exist"
        )

    def is_unsupervised(self, config: EndpointConfig) -> bool:
        """Return whether workers answer requests although their supervisor has ended."""
        server = self._server(config)
        port = self._known_port(server, config)
        return (
            port is not None
            and server.is_orphaned()
            and bool(server.is_ready(port, timeout_s=_OBSERVE_S))
        )

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change.

        An error is raised if files of a model that must be loaded are missing or were changed. If
        the change starts the server, an error is also raised if a package is missing or the port is
        not free.
        """
        after = super().preview(config, state, current, is_rollback=is_rollback)
        restarts = current is None or (bool(current.drift) and not is_rollback)
        if restarts:
            require(*self.tools, where=f"endpoint {config.endpoint}")
            if (error := self.find_missing_requirement(config)) is not None:
                raise error
        verify_new_files(after, None if restarts else current)
        return after

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Start the server if needed, publish the state, and wait until it is served.

        Raises:
            ServiceUnavailableError: the server fails to start, or does not answer.
            MissingPackageError: a package of the server is not installed.
            ConflictError: another process is changing the endpoint.
            OnnxOpsError: the error of the server, if it refuses the state.
        """
        server = self._server(config)
        body = codec.dumps(replace(state, generation=generation))
        with server.lock():
            try:
                status, answer = server.request(
                    self._ensure_running(server, config), "PUT", body, timeout_s=_APPLY_S
                )
            except ServiceUnavailableError:
                if not server.wait_until_stopped(_DEATH_S):
                    raise
                # The server process ended. Publishing the same generation again is safe.
                status, answer = server.request(
                    self._ensure_running(server, config), "PUT", body, timeout_s=_APPLY_S
                )
        if status != 200:
            raise error_from_bytes(answer)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Publish the rollback; restart a server that does not answer.

        A restarted server loads only the deployments with traffic. Old workers that still answer
        are replaced when the new workers are ready; others are killed first.

        Raises:
            ServiceUnavailableError: the server fails to start, or does not confirm the rollback.
            MissingPackageError: a package of the server is not installed.
            ConflictError: another process is changing the endpoint.
            OnnxOpsError: the error of the server, if it refuses the state.
        """
        server = self._server(config)
        state = replace(state, generation=generation)
        if self._publish_rollback(server, state):
            return
        server.kill(self._known_port(server, config))
        with server.lock(_ROLLBACK_S):
            # Another process possibly restarted the server while it had the lock.
            if self._publish_rollback(server, state):
                return
            tables = TableFile(server.folder)
            tables.write(build_next_table(tables.read(), drop_idle_deployments(state)))
            self._ensure_running(server, config)
            if not self._publish_rollback(server, state):
                raise ServiceUnavailableError(
                    "the endpoint server did not confirm the rollback", where=config.endpoint
                )

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address that clients call; None if the endpoint has no port yet."""
        port = self._known_port(self._server(config), config)
        return None if port is None else f"http://{LOOPBACK}:{port}"

    def stop(self, config: EndpointConfig) -> None:
        """Stop the server. Its folder stays, so `apply` can start it on the same port."""
        server = self._server(config)
        if server.folder.is_dir():
            with server.lock():
                server.stop()

    def remove(self, config: EndpointConfig) -> None:
        """Stop the server; delete its files except server log, audit log, port and lock."""
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
        """Publish a rollback; return False without a valid answer of a server.

        Raises:
            OnnxOpsError: the error of the server, if it refuses the state.
        """
        record = server.record()
        if record is None:
            return False
        try:
            status, answer = server.request(record, "GET", timeout_s=_ROLLBACK_S)
            current = codec.loads(answer, AdminState).state if status == 200 else None
            desired = (
                drop_idle_deployments(state)
                if current is None
                else build_rollback_state(current, state)
            )
            must_load = current is None or current.find_deployment(state.leader()) is None
            timeout_s = _APPLY_S if must_load else _ROLLBACK_S
            status, answer = server.request(
                record, "PUT", codec.dumps(desired), timeout_s=timeout_s
            )
        except (ServiceUnavailableError, CorruptStateError):
            return False
        if status != 200:
            raise error_from_bytes(answer)
        return True

    def _ensure_running(self, server: LocalServer, config: EndpointConfig) -> ServerRecord:
        """Start the server unless it runs with these options.

        A server with other options is started again.

        Raises:
            ServiceUnavailableError: all ports are in use, another program uses the port, or the
                server does not become ready.
            MissingPackageError: a package of the server is not installed.
            RefusedError: other users can read the admin token.
        """
        port = self._known_port(server, config)
        if not port:
            first = zlib.crc32(str(server.folder.resolve()).encode())
            candidates = (_FIRST_PORT + (first + offset) % _PORTS for offset in range(_PORTS))
            port = next(filter(_is_free, candidates), None)
            if port is None:
                raise ServiceUnavailableError(
                    f"no port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} is free",
                    where=server.folder.name,
                    remedy="Set `port` in the options of this endpoint.",
                )
        # The working directory of the server is its own folder. With a relative path, this folder
        # and that of the trusted keys can be moved together.
        trusted = (
            ""
            if self._trusted is None
            else os.path.relpath(self._trusted.resolve(), server.folder.resolve())
        )
        server_options = replace(_read_server_options(config), trusted_keys=trusted)
        record = server.record()
        if record is not None and (record.port, record.options) == (port, server_options):
            return record
        if record is not None and record.port == port:
            # The workers of the old server answer until the workers of the next server are ready.
            server.kill_supervisor()
        elif not server.is_orphaned():
            server.stop()
        if not server.is_orphaned() and not _is_free(port):
            raise _port_taken(port, config, server)
        if self._python == sys.executable:
            tools = (*self.tools, *(EXTRAS["grpc"] if server_options.grpc_port else ()))
            require(*tools, where=f"endpoint {config.endpoint}")
        write_durably(server.folder / _PORT_FILE, str(port).encode())
        return server.start(port, server_options)

    def _server(self, config: EndpointConfig) -> LocalServer:
        if not _NAME.fullmatch(config.endpoint):
            raise UserError(
                f"{config.endpoint!r} cannot be the name of an endpoint",
                remedy="Use at most 63 letters, digits, hyphens and underscores, beginning with a "
                "letter or digit.",
            )
        return LocalServer(self._folder / config.endpoint, self._python)

    def _known_port(self, server: LocalServer, config: EndpointConfig) -> int | None:
        port = _read_options(config.options, config.endpoint).port
        if port is not None:
            return port if server.folder.is_dir() else None
        path = server.folder / _PORT_FILE
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdecimal() else None


def _read_state(server: LocalServer) -> AdminState:
    """Return what the server reports; without a valid answer, an empty `AdminState`."""
    record = server.record()
    if record is None:
        return AdminState(state=None)
    try:
        status, body = server.request(record, "GET", timeout_s=_OBSERVE_S)
        return codec.loads(body, AdminState) if status == 200 else AdminState(state=None)
    except (ServiceUnavailableError, CorruptStateError):
        return AdminState(state=None)


def _port_taken(port: int, config: EndpointConfig, server: LocalServer) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"another program uses port {port}, or this user has no permission for the port",
        where=f"endpoint {config.endpoint}",
        remedy="Stop that program, or set `port` in this endpoint's options. If `port` is not set, "
        f"delete {server.folder / _PORT_FILE}: another port is then chosen automatically.",
    )


def _read_options(values: Mapping[str, Json], where: str = "") -> LocalOptions:
    remedy = "Set ONNX_OPS_TRUSTED_KEYS for the project." if "trusted_keys" in values else ""
    return bind_options(values, LocalOptions, where=where, remedy=remedy, rules=_check_files)


def _check_files(options: LocalOptions) -> Iterator[tuple[str, str]]:
    """Yield an error for each file name that is not valid.

    The files are in the endpoint's folder, and must not have the name of the server's log.
    """
    for key, ending in (("access_log", ".log"), ("admin_socket", ".sock")):
        name = getattr(options, key)
        if name and (not _FILE.fullmatch(name) or not name.endswith(ending) or name == LOG_FILE):
            yield (
                key,
                (
                    f"'{name[:80]}' must end with {ending}, consist of at most 100 of "
                    f"A-Z a-z 0-9 _ . -, and must neither begin with a dot nor be {LOG_FILE}"
                ),
            )


def _read_server_options(config: EndpointConfig) -> ServerOptions:
    options = _read_options(config.options, config.endpoint)
    names = set(file_fields(LocalOptions)) & set(file_fields(ServerOptions))
    server_options = ServerOptions(**{name: getattr(options, name) for name in names})
    return replace(server_options, endpoint=server_options.endpoint or config.endpoint)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
