"""The audit trail: one durable line per change that somebody asked for."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from onnx_ops.domain.artifact import canonical_json
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.protocol.server_process import AUDIT_FILE


class Audit:
    """Appends to a file in the server's folder. Nothing is changed that could not be written down before.

    `who` is `token` for whoever showed the admin token, or `uid:N` for a user of the Unix socket.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / AUDIT_FILE

    def intend(self, who: str, state: EndpointState) -> None:
        """A change is about to be made.

        Raises:
            ServiceUnavailableError: it could not be written down.
        """
        names = {d.name: f"{d.model}/{d.version}" for d in state.deployments}
        split = {"weights": dict(state.split.weights), "shadow": dict(state.split.shadow)}
        self._write({"what": "publish", "who": who, "generation": state.generation, "deployments": names, **split})

    def outcome(self, who: str, state: EndpointState, error: str = "") -> None:
        """How it ended; `error` says why nothing was changed.

        Raises:
            ServiceUnavailableError: it could not be written down.
        """
        what = "refused" if error else "published"
        line = {"what": what, "who": who, "generation": state.generation}
        self._write({**line, "why": error} if error else line)

    def _write(self, line: dict[str, object]) -> None:
        now = datetime.fromtimestamp(time.time(), UTC)  # noqa: TID251 (when it was, for people to read)
        data = canonical_json({"at": now.isoformat(timespec="milliseconds"), **line}) + b"\n"
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.write(handle, data) != len(data):
                    raise OSError("the line was written in part")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise ServiceUnavailableError("the audit trail cannot be written", why=str(error)) from error
