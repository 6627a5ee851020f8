"""The admin listeners: clients publish the state, read the counts, and set leases.

The first admin listener is on loopback, and requests need the token. An optional second listener is
on a Unix socket. Only the server's user can connect to this socket.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.artifact import canonical_json
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    LEASE_PATH,
    MAX_USER_THRESHOLDS,
    STATE_PATH,
    TABLE_PATH,
    AdminState,
    Counts,
    Lease,
    UserCountsRequest,
    error_to_bytes,
)
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.protocol.server_process import AUDIT_FILE, TOKEN_FILE
from onnx_ops.scratch import write_durably
from onnx_ops.serving.http.app import Handler, HttpApp, PendingResponse, read_by
from onnx_ops.serving.inference.responses import RawResponse, RequestHead, build_error


def read_token(folder: Path) -> str:
    """Return the admin token of a server's folder; create it on first use.

    Raises:
        RefusedError: other users can access the file of the token, or the token is empty.
    """
    path = folder / TOKEN_FILE
    if not path.exists():
        write_durably(path, secrets.token_urlsafe(32).encode())
    if path.stat().st_mode & 0o077:
        raise RefusedError(
            "other users can access the admin token",
            where=str(path),
            remedy=f"Run: chmod 600 {path}",
        )
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise RefusedError(
            "the admin token is empty",
            where=str(path),
            remedy="Delete the file, and start the server again. It creates a new token.",
        )
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOperations:
    """The operations behind the admin routes.

    The second argument of `publish` is the client's name in the audit trail.
    """

    report_state: Callable[[], AdminState]
    collect_counts: Callable[[UserCountsRequest | None], Counts]
    set_lease: Callable[[Lease], Lease]
    publish: Callable[[EndpointState | RoutingTable, str], Awaitable[None]]


class AdminApp(HttpApp):
    """Handlers of the admin routes.

    Without a token, every client that can connect is authorized.

    `actor` is the name of this listener's clients in the audit trail.
    """

    def __init__(self, operations: AdminOperations, token: str | None, actor: str) -> None:
        super().__init__(
            {
                STATE_PATH: {**read_by(self.get_state), b"PUT": self.put_state},
                TABLE_PATH: {b"PUT": self.put_table},
                LEASE_PATH: {b"PUT": self.put_lease},
                COUNTS_PATH: {**read_by(self.get_counts), b"POST": self.post_counts},
            }
        )
        self._operations = operations
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._actor = actor

    def respond(
        self,
        handler: Handler,
        head: RequestHead,
        body: bytes,
        deliver: Callable[[RawResponse], None],
    ) -> RawResponse | PendingResponse:
        """Respond as `HttpApp` does, but return status 401 to unauthorized clients."""
        given = head.get(b"authorization", b"")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            return build_error(
                401, "the admin token is missing or wrong", b"www-authenticate: Bearer\r\n"
            )
        return super().respond(handler, head, body, deliver)

    def get_state(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the `AdminState`: the published state, failures, and memory."""
        return _build_response(codec.dumps(self._operations.report_state()))

    def get_counts(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the counts of all deployments."""
        return _build_response(codec.dumps(self._operations.collect_counts(None)))

    def post_counts(self, _head: RequestHead, body: bytes) -> RawResponse:
        """Return the counts, including counts by user of the requested deployments.

        The status is 400 if the body is not a valid `UserCountsRequest`. There are counts by user
        only while every requested deployment gets requests (see `Supervisor.collect_counts`).
        """
        try:
            message = codec.loads(body, UserCountsRequest)
            if any(
                len(s) > MAX_USER_THRESHOLDS or list(s) != sorted(s)
                for s in message.limits_s.values()
            ):
                raise UserError(
                    "limits_s must be ascending, with at most "
                    f"{MAX_USER_THRESHOLDS} thresholds per deployment"
                )
        except (CorruptStateError, UserError) as error:
            return _build_response(error_to_bytes(error), 400)
        return _build_response(codec.dumps(self._operations.collect_counts(message)))

    async def put_state(self, head: RequestHead, body: bytes) -> RawResponse:
        """Publish a state, and respond when it is served or refused.

        The status is 200 when the state is served, and 400 if the body is not a state. It is 409 if
        the generation is outdated, or published with another state. It is 503 for a
        ServiceUnavailableError, and 422 for any other OnnxOpsError.
        """
        try:
            state = codec.loads(body, EndpointState)
        except CorruptStateError as error:
            return _build_response(error_to_bytes(error), 400)
        return await self._publish(head, state)

    async def put_table(self, head: RequestHead, body: bytes) -> RawResponse:
        """Publish a routing table; respond as `put_state` does.

        With a table, all servers of an endpoint get the same layout.
        """
        try:
            table = codec.loads(body, RoutingTable)
        except CorruptStateError as error:
            return _build_response(error_to_bytes(error), 400)
        return await self._publish(head, table)

    def put_lease(self, _head: RequestHead, body: bytes) -> RawResponse:
        """Set the ends of the two leases in a `Lease`; return the resulting `Lease`.

        Its `lapsed` counts the requests that lacked a lease.
        """
        try:
            lease = codec.loads(body, Lease)
        except CorruptStateError as error:
            return _build_response(error_to_bytes(error), 400)
        return _build_response(codec.dumps(self._operations.set_lease(lease)))

    async def _publish(
        self, head: RequestHead, desired: EndpointState | RoutingTable
    ) -> RawResponse:
        try:
            await self._operations.publish(desired, self._actor)
        except OnnxOpsError as error:
            statuses = ((ConflictError, 409), (ServiceUnavailableError, 503))
            status = next((status for kind, status in statuses if isinstance(error, kind)), 422)
            return _build_response(error_to_bytes(error), status)
        return self.get_state(head, b"")


def _build_response(content: bytes, status: int = 200) -> RawResponse:
    return RawResponse(status, b"content-type: application/json\r\n", content)


class AuditTrail:
    """File that durably records each attempt to publish a state, and its result.

    Requests that `TablePublisher.is_published` refuses, or that change nothing, are left out. A
    publication that cannot be recorded fails (ServiceUnavailableError). `actor` is `token` for
    clients with the admin token. For clients of the Unix socket, it is `uid:N` with the user id of
    the server.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / AUDIT_FILE

    def record_request(self, actor: str, state: EndpointState) -> None:
        """Record a change that is about to be made.

        Raises:
            ServiceUnavailableError: the file cannot be written.
        """
        names = {d.name: f"{d.model}/{d.version}" for d in state.deployments}
        split = {"weights": dict(state.split.weights), "shadow": dict(state.split.shadow)}
        self._write(
            {
                "what": "publish",
                "who": actor,
                "generation": state.generation,
                "deployments": names,
                **split,
            }
        )

    def record_result(self, actor: str, state: EndpointState, error: str = "") -> None:
        """Record the result of a change. `error` is the reason if nothing changed.

        Raises:
            ServiceUnavailableError: the file cannot be written.
        """
        line = {"what": "refused", "why": error} if error else {"what": "published"}
        self._write({**line, "who": actor, "generation": state.generation})

    def _write(self, line: dict[str, object]) -> None:
        now = datetime.fromtimestamp(time.time(), UTC)  # noqa: TID251 (the time of a change, for people)
        data = canonical_json({"at": now.isoformat(timespec="milliseconds"), **line}) + b"\n"
        try:
            handle = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                if os.write(handle, data) != len(data):
                    raise OSError("only a part of the line was written")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise ServiceUnavailableError(
                "the audit trail cannot be written", why=str(error)
            ) from error
