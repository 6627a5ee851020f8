"""Holders of leases: how a process is identified, and whether it still runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from onnx_ops.protocol.server_process import LocalHost

HOLDER = (
    "from onnx_ops.protocol.server_process import LocalHost; "
    "print(LocalHost().holder(), flush=True); input()"
)


def test_alive_of_own_holder_returns_true() -> None:
    host = LocalHost()
    assert host.alive(host.holder())


def test_holder_begins_with_host_name_and_process_id() -> None:
    assert LocalHost().holder().startswith(f"{socket.gethostname()}:{os.getpid()}:")


def test_alive_of_killed_holder_returns_false() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        holder = process.stdout.readline().strip()
        assert LocalHost().alive(holder)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not LocalHost().alive(holder), "killed, and its parent has not waited for it"
        process.wait()
        assert not LocalHost().alive(holder)


def test_alive_of_reused_process_id_returns_false() -> None:
    host, process, started = LocalHost().holder().split(":")
    assert not LocalHost().alive(f"{host}:{process}:{int(started) - 1}")


@pytest.mark.parametrize(
    "holder",
    [
        "another-machine:1:1",
        f"{socket.gethostname()}:me:1",
        f"{socket.gethostname()}:1",
        f"{socket.gethostname()}:1:",
        "",
        "nonsense",
    ],
)
def test_alive_of_foreign_or_malformed_holder_returns_true(holder: str) -> None:
    assert LocalHost().alive(holder)


def test_actor_without_user_name_is_user_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONNX_OPS_ACTOR", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert LocalHost().actor() == f"uid-4000000000@{socket.gethostname()}"


def test_actor_from_environment_overrides_user_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONNX_OPS_ACTOR", raising=False)
    assert LocalHost().actor().endswith(f"@{socket.gethostname()}")
    monkeypatch.setenv("ONNX_OPS_ACTOR", "release-bot")
    assert LocalHost().actor() == "release-bot"
