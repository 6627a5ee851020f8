"""Endpoints on this machine: one server process each, which outlives whoever started it."""

from __future__ import annotations

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
from onnx_ops.adapters.endpoints.server_process import APPLY_LOCK, LOG_FILE, ServerProcess
from onnx_ops.adapters.objects import durable_file
from onnx_ops.adapters.server_metrics import ServerMetrics
from onnx_ops.config.binding import bind_settings, file_fields
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import (
    EndpointConfig,
    EndpointState,
    OrphanedResource,
    build_rollback_state,
    drop_idle_deployments,
)
from onnx_ops.domain.execution import CPU
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Target
from onnx_ops.errors import CorruptStateError, OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    AdminState,
    Counts,
    UserCountsRequest,
    error_from_bytes,
    read_message,
)
from onnx_ops.protocol.routing_table import TableFile, build_next_table
from onnx_ops.protocol.server_process import (
    AUDIT_FILE,
    ContainerOptions,
    ServerOptions,
    ServerRecord,
    explain_unservable,
)

_LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_PORT_FILE = "port"
_KEPT = frozenset({AUDIT_FILE, LOG_FILE, _PORT_FILE, APPLY_LOCK})
_FIRST_PORT = 18_000
"""Chosen ports lie below those that systems give to outgoing connections, so that a restart finds its port free."""
_PORTS = 10_000
_OBSERVE_S = 5.0
_DEATH_S = 2.0
"""A killed process lets go of its ports a little before it lets go of its lock."""
_HURRY_S = 2.0
"""A server that takes longer to change weights does not answer."""
_APPLY_S = 300.0
"""Loading several large models takes this long at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings(ContainerOptions):
    """Settings of one endpoint: its port, which is chosen once and kept if left out, and options of its server.

    The trusted keys are the project's to name, not the pipeline's.
    """

    port: Annotated[int | None, Ge(1), Le(65_535), doc("Port that clients call.")] = None
    access_log: Annotated[str, doc("File that gets one JSON line per inference.")] = ""
    admin_socket: Annotated[str, doc("Unix socket of a second admin listener.")] = ""
    endpoint: Annotated[str, doc("Name of the endpoint in metrics.")] = ""


class LocalEndpoints:
    """Keeps each endpoint in `folder/<endpoint>/`, readable by its owner only.

    Its servers load what the keys in `trusted` have signed for, or anything where that is None.
    """

    tools = EXTRAS["serve"]

    def __init__(self, folder: Path, trusted: Path | None = None, *, python: str = sys.executable) -> None:
        self._folder = folder
        self._trusted = "" if trusted is None else str(trusted.resolve())
        self._python = python

    def capabilities(self, settings: Mapping[str, Json] | None = None) -> frozenset[str]:
        return frozenset({"split", "sticky"}) | self.metrics().capabilities()

    def metrics(self) -> ServerMetrics:
        return ServerMetrics(lambda config, watch: [self.counts(config, watch)])

    def counts(self, config: EndpointConfig, watch: UserCountsRequest | None = None) -> Counts:
        """What the running server has counted; by user, too, what is to be watched.

        Raises:
            ServiceUnavailableError: none runs, or it does not answer.
        """
        server = self._server(config)
        record = server.record()
        if record is None:
            raise ServiceUnavailableError("the endpoint's server does not run", where=config.endpoint)
        if watch is None:
            status, body = server.ask(record, "GET", path=COUNTS_PATH, timeout_s=_OBSERVE_S)
        else:
            status, body = server.ask(record, "POST", codec.dumps(watch), path=COUNTS_PATH, timeout_s=_OBSERVE_S)
        if status != 200:
            raise error_from_bytes(body)
        return read_message(body, Counts)

    def check(self, settings: Mapping[str, Json]) -> None:
        _read_settings(settings)

    def unservable(self, target: Target) -> str:
        on_processor = [provider.name for provider in target.providers] == [CPU]
        if on_processor:
            return explain_unservable(target, [CPU])
        import onnxruntime

        return explain_unservable(target, onnxruntime.get_available_providers())

    def lacking(self, config: EndpointConfig) -> OnnxOpsError | None:
        """That another program has the port that the settings name."""
        server, port = self._server(config), _read_settings(config.settings, where=config.endpoint).port
        record = server.record()
        own = server.orphaned() or (record is not None and record.port == port)
        return None if port is None or own or _is_free(port) else _taken(port, config, server)

    def place(self, config: EndpointConfig) -> str:
        return f"the server of {config.endpoint} on this machine"

    def check_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Every setting can be changed."""

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """What the running server serves; None if none runs, or some of its deployments are lost. Starts nothing."""
        server = self._server(config)
        record = server.record()
        if record is None:
            return None
        try:
            status, body = server.ask(record, "GET", timeout_s=_OBSERVE_S)
            found = read_message(body, AdminState) if status == 200 else AdminState(state=None)
        except (ServiceUnavailableError, CorruptStateError):
            return None
        if found.failed or found.state is None:
            return None
        return replace(found.state, drift=tuple(self._drift(config, record)))

    def _drift(self, config: EndpointConfig, record: ServerRecord) -> Iterator[str]:
        """How the running server differs from the settings. Whom it trusts is the business of who started it."""
        port = _read_settings(config.settings, where=config.endpoint).port
        if port is not None and port != record.port:
            yield f"port: {record.port}, not {port}"
        wanted = _options(config.settings, where=config.endpoint)
        for name in file_fields(ServerOptions):
            if name != "trusted_keys" and (there := getattr(record.options, name)) != (asked := getattr(wanted, name)):
                yield f"{name}: {there}, not {asked}"

    def unsupervised(self, config: EndpointConfig) -> bool:
        server = self._server(config)
        port = self._known_port(server, config)
        return port is not None and server.orphaned() and bool(server.ready(port, timeout_s=_OBSERVE_S))

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Start the server if it does not run, and publish the state; returns once requests are answered by it.

        Raises:
            ConflictError: a later generation, or another state of this generation, was applied already.
            DigestMismatchError: a deployment's files are not those of its manifest.
            NotFoundError: a deployment's files are not there.
            UserError: the endpoint's name, its port or the state is not one.
            ServiceUnavailableError: the port is taken, or the server cannot be started or does not answer.
            InfrastructureError: a model cannot be loaded.
        """
        server = self._server(config)
        body = codec.dumps(replace(state, generation=generation))
        with server.alone():
            try:
                status, answer = server.ask(self._running(server, config), "PUT", body, timeout_s=_APPLY_S)
            except ServiceUnavailableError:
                if not server.gone(_DEATH_S):
                    raise
                # It died under our hands; publishing the same generation again is safe.
                status, answer = server.ask(self._running(server, config), "PUT", body, timeout_s=_APPLY_S)
        if status != 200:
            raise error_from_bytes(answer)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """A server that does not run, or does not answer, is started anew by a table that holds nothing but the
        deployment with all traffic. Its workers go on answering until the new ones are ready.

        Raises:
            ConflictError: a later generation was applied already, or somebody else is changing the endpoint.
            NotFoundError, DigestMismatchError: the deployment is not loaded, and its files are lost or damaged.
            ServiceUnavailableError: the port is taken, or the server cannot be started or does not answer.
            OSError: the endpoint's folder cannot be written.
        """
        server = self._server(config)
        state = replace(state, generation=generation)
        if self._took_back(server, state):
            return
        server.kill(self._known_port(server, config))
        with server.alone(_HURRY_S):
            if self._took_back(server, state):  # whoever changed it until now has started it again
                return
            tables = TableFile(server.folder)
            tables.write(build_next_table(tables.read(), drop_idle_deployments(state)))
            self._running(server, config)
            if not self._took_back(server, state):
                raise ServiceUnavailableError("the endpoint server does not answer", where=config.endpoint)

    @staticmethod
    def _took_back(server: ServerProcess, state: EndpointState) -> bool:
        """Publish a rollback; false if no server answers."""
        record = server.record()
        if record is None:
            return False
        try:
            status, answer = server.ask(record, "GET", timeout_s=_HURRY_S)
            held = read_message(answer, AdminState).state if status == 200 else None
            wanted = drop_idle_deployments(state) if held is None else build_rollback_state(held, state)
            loads = held is None or held.held(state.leader()) is None
            timeout_s = _APPLY_S if loads else _HURRY_S
            status, answer = server.ask(record, "PUT", codec.dumps(wanted), timeout_s=timeout_s)
        except (ServiceUnavailableError, CorruptStateError):
            return False
        if status != 200:
            raise error_from_bytes(answer)
        return True

    def address(self, config: EndpointConfig) -> str | None:
        port = self._known_port(self._server(config), config)
        return None if port is None else f"http://{_LOOPBACK}:{port}"

    def stop(self, config: EndpointConfig) -> None:
        """End the endpoint's server; its folder stays, and `apply` starts it again on the same port."""
        server = self._server(config)
        if server.folder.is_dir():
            with server.alone():
                server.stop()

    def remove(self, config: EndpointConfig) -> None:
        """The audit log, the server's log and the port stay, for whoever asks later what happened here."""
        server = self._server(config)
        if not server.folder.is_dir():
            return
        with server.alone():
            server.stop()
            for path in server.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name not in _KEPT:
                    path.unlink()

    def leftovers(self, config: EndpointConfig, needed: frozenset[Digest]) -> Sequence[OrphanedResource]:
        """Nothing: the server holds what its state names, and a folder that was removed is gone."""
        return ()

    def discard(self, config: EndpointConfig, leftover: OrphanedResource) -> None:
        """There are none."""

    def _running(self, server: ServerProcess, config: EndpointConfig) -> ServerRecord:
        port = self._known_port(server, config) or self._choose_port(server)
        options = replace(_options(config.settings, where=config.endpoint), trusted_keys=self._trusted)
        record = server.record()
        if record is not None and (record.port, record.options) == (port, options):
            return record
        if not server.orphaned():
            server.stop()
        if not server.orphaned() and not _is_free(port):
            raise _taken(port, config, server)
        if self._python == sys.executable:
            require(*self.tools, where=f"endpoint {config.endpoint}")
        _write(server.folder / _PORT_FILE, port)
        return server.start(port, options)

    def _server(self, config: EndpointConfig) -> ServerProcess:
        if not _NAME.fullmatch(config.endpoint):
            raise UserError(
                f"{config.endpoint!r} cannot be the name of an endpoint",
                remedy="Use letters, digits, hyphens and underscores, at most 63.",
            )
        return ServerProcess(self._folder / config.endpoint, self._python)

    def _known_port(self, server: ServerProcess, config: EndpointConfig) -> int | None:
        wanted = _read_settings(config.settings, where=config.endpoint).port
        if wanted is None:
            path = server.folder / _PORT_FILE
            text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
            return int(text) if text.isdecimal() else None
        return wanted if server.folder.is_dir() else None

    @staticmethod
    def _choose_port(server: ServerProcess) -> int:
        first = zlib.crc32(str(server.folder.resolve()).encode()) % _PORTS
        for offset in range(_PORTS):
            port = _FIRST_PORT + (first + offset) % _PORTS
            if _is_free(port):
                return port
        raise ServiceUnavailableError("no port is free", where=server.folder.name)


def _taken(port: int, config: EndpointConfig, server: ServerProcess) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"port {port} is taken by another program",
        where=f"endpoint {config.endpoint}",
        remedy=f"Stop that program, or choose a port: `port` in this endpoint's settings "
        f"(or delete {server.folder / _PORT_FILE} to have another one chosen).",
    )


def _read_settings(given: Mapping[str, Json], where: str = "") -> LocalSettings:
    remedy = "Set ONNX_OPS_TRUSTED_KEYS for the project." if "trusted_keys" in given else ""
    return bind_settings(given, LocalSettings, where=where, remedy=remedy)


def _options(given: Mapping[str, Json], where: str = "") -> ServerOptions:
    settings = _read_settings(given, where)
    names = set(file_fields(LocalSettings)) & set(file_fields(ServerOptions))
    return ServerOptions(**{name: getattr(settings, name) for name in names})


def _write(path: Path, port: int) -> None:
    with durable_file(path) as temporary:
        temporary.write_text(str(port), encoding="utf-8")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
    return True
