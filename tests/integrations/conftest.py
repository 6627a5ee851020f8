"""One guarded MLflow server for the session: basic-auth, two users and a policy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from onnx_ops.adapters.signers.ecdsa import create_key, public_path, read_key
from tests.integrations.veto_parts import POLICY
from tests.integrations.veto_process import (
    AUTH,
    PASSWORD,
    GuardedServer,
    server_command,
    server_environment,
)
from tests.support.ports import free_port
from tests.support.processes import does_answer, running_process


@pytest.fixture(scope="session")
def veto_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with keys, policy and the users' file of a guarded server."""
    home = tmp_path_factory.mktemp("veto")
    create_key(home / "keys" / "signing.pem")
    create_key(home / "server" / "override.pem")
    public = public_path(home / "server" / "override.pem")
    (home / "keys" / public.name).write_bytes(public.read_bytes())
    (home / "policy.yaml").write_text(POLICY, encoding="utf-8")
    (home / "auth.ini").write_text(AUTH.format(home=home, password=PASSWORD), encoding="utf-8")
    return home


@pytest.fixture(scope="session")
def veto_server(veto_home: Path) -> Iterator[GuardedServer]:
    port = free_port()
    command, environ = server_command(veto_home, port), server_environment(veto_home)
    signer = read_key(veto_home / "keys" / "signing.pem")
    server = GuardedServer(url=f"http://127.0.0.1:{port}", home=veto_home, signer=signer)
    is_ready = partial(does_answer, f"{server.url}/health")
    with running_process(command, veto_home / "log", is_ready, cwd=veto_home, env=environ):
        for user in ("alice", "bob"):
            asked = {"username": user, "password": PASSWORD}
            status, answer = server.call(
                "release-bot", "POST", "/api/2.0/mlflow/users/create", asked
            )
            assert status == 200, answer
        yield server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store for all pipelines of the tests, so that common work is done once."""
    return tmp_path_factory.mktemp("store")
