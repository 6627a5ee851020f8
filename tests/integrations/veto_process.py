"""A guarded MLflow server as a process, and the calls of its users."""

from __future__ import annotations

import base64
import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.adapters.signers.ecdsa import EcdsaSigner

PASSWORD = "a long enough password"  # noqa: S105 (of a server that lives for one test session)
AUTH = """\
[mlflow]
default_permission = MANAGE
database_uri = sqlite:///{home}/auth.db
admin_username = release-bot
admin_password = {password}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 600
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedServer:
    """A guarded server: `url` has no user, `signer` is one that the server trusts."""

    url: str
    home: Path
    signer: EcdsaSigner

    def call(self, user: str, method: str, path: str, document: object = None) -> tuple[int, Any]:
        """Send a request as the browser or any client would; return its status and JSON."""
        word = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        headers = {"Authorization": f"Basic {word}", "Content-Type": "application/json"}
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def server_environment(home: Path, **changes: str) -> dict[str, str]:
    """Return the environment of a guarded server.

    A change to an empty text removes a variable.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ONNX_OPS_", "MLFLOW_"))
    }
    given = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a secret of this test",
        "MLFLOW_AUTH_CONFIG_PATH": str(home / "auth.ini"),
        "ONNX_OPS_BASIC_AUTH": "true",
        "ONNX_OPS_TRUSTED_KEYS": str(home / "keys"),
        "ONNX_OPS_PROMOTION_POLICY": str(home / "policy.yaml"),
        "ONNX_OPS_OVERRIDE_KEY": str(home / "server" / "override.pem"),
    }
    return kept | {name: value for name, value in (given | changes).items() if value}


def server_command(home: Path, port: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--app-name",
        "onnx-ops",
        "--host",
        "127.0.0.1",
    ]
    command += [
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        f"sqlite:///{home}/mlflow.db",
    ]
    return [*command, "--artifacts-destination", str(home / "files")]
