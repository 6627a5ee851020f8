"""The fork server: what its processes inherit, and what happens when it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from onnx_ops import codec
from onnx_ops.app.execution import run_in_subprocess
from onnx_ops.app.fork_server import FORK_SERVER
from onnx_ops.config.settings import Settings, load_settings
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.errors import StageError, UserError
from tests.support.processes import is_alive, until

KEY = digest_bytes(b"key")

CODE = """
import json, os, random, sys, tempfile
import numpy as np

def train(data):
    document = {
        "folder": os.getcwd(), "path": sys.path[:2], "variable": os.environ.get("GIVEN"), "pid": os.getpid(),
        "temporary": tempfile.gettempdir(), "drawn": [float(np.random.random()), random.random()],
        "group": os.getpgid(0), "files": len(os.listdir("/proc/self/fd")),
    }
    raise RuntimeError(json.dumps(document))
"""  # noqa: E501


@pytest.fixture
def project(tmp_path: Path) -> Settings:
    (tmp_path / "describing.py").write_text(CODE)
    return load_settings(tmp_path, {})


STAGE = Stage(
    id="train",
    kind=StageKind.TRAIN,
    settings={"run": "describing:train", "with_": {}, "framework": "sklearn"},
    own_process=True,
)


def describe(project: Settings) -> dict[str, Any]:
    """Return the description that a stage's process gives."""
    with pytest.raises(UserError) as caught:
        run_in_subprocess(project, STAGE, KEY, {})
    text = str(caught.value)
    document: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return document


def servers(pid: int | None = None) -> list[psutil.Process]:
    """Return the fork servers of a process, by default of this one."""
    return [child for child in psutil.Process(pid).children() if is_fork_server(child)]


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "onnx_ops.app.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        # The process has ended since it was listed, or is a zombie.
        return False


def test_fork_server_process_has_current_environment_and_separate_group_and_temporary_folder(
    project: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORK_SERVER.start()
    monkeypatch.setenv("GIVEN", "later")
    monkeypatch.setenv("PYTHONPATH", f"{project.root}/more")
    document = describe(project)
    assert document["folder"] == str(project.root)
    assert document["path"] == [str(project.root), f"{project.root}/more"]
    assert document["variable"] == "later"
    assert document["group"] == document["pid"]
    assert document["temporary"] != describe(project)["temporary"]


def test_fork_server_processes_have_distinct_seeds_and_same_number_of_descriptors(
    project: Settings,
) -> None:
    with ThreadPoolExecutor(4) as threads:
        documents = list(threads.map(lambda _: describe(project), range(4)))
    drawn = [number for document in documents for number in document["drawn"]]
    assert len(set(drawn)) == len(drawn)
    assert len({document["files"] for document in documents}) == 1


def test_fork_server_after_kill_is_started_again(project: Settings) -> None:
    describe(project)
    (server,) = servers()
    server.kill()
    until(lambda: not servers())
    describe(project)
    assert len(servers()) == 1


def test_fork_server_that_cannot_start_raises_stage_error(
    project: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(FORK_SERVER, "_control", None)
    with pytest.raises(StageError, match="no process can be started") as caught:
        describe(project)
    command = caught.value.remedy.split("`")[1]
    subprocess.run(["sh", "-c", command.replace("/bin/false", python)], check=True)


USER = """
import os, sys
from pathlib import Path
import psutil
from onnx_ops import codec
from onnx_ops.app.execution import run_in_subprocess
from onnx_ops.app.fork_server import FORK_SERVER
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import UserError

FORK_SERVER.start()
for number in range(2):
    if (pid := os.fork()) == 0:
        stage = codec.loads(sys.argv[2].encode(), Stage)
        try:
            run_in_subprocess(load_settings(Path(sys.argv[1]), {}), stage, "sha256:0", {})
        except UserError:
            # A fork server that this fork had started would be its child.
            os._exit(4 if psutil.Process().children() else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
sys.stdin.read()
"""


def test_fork_server_is_shared_by_forks_and_ends_with_its_owner(project: Settings) -> None:
    command = [sys.executable, "-c", USER, str(project.root), codec.dumps(STAGE).decode()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        assert [user.stdout.readline() for _ in range(2)] == ["3\n", "3\n"]
        (server,) = servers(user.pid)
        user.kill()
    until(lambda: not is_alive(server.pid))
