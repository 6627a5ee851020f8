"""Stages in separate processes.

The tests cover results, errors, crashes, time-outs, and parents that are killed.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.isolation.process import LAST_LINES
from onnx_ops.app import worker
from onnx_ops.app.context import build_context
from onnx_ops.app.execution import StageExecutor, run_in_subprocess
from onnx_ops.app.running_stages import machine_lock
from onnx_ops.config.settings import Settings, load_settings, to_environ
from onnx_ops.domain.artifact import Digest, digest_bytes, digest_file
from onnx_ops.domain.pipeline import FileData
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import (
    NotFoundError,
    RefusedError,
    StageError,
    StorageError,
    UserError,
    from_document,
)
from onnx_ops.file_locks import try_lock
from onnx_ops.pipeline.stages import execute
from onnx_ops.ports import Context, Observer, Pools
from tests.support.processes import is_alive, until

KEY = digest_bytes(b"key")

TRAINING = """
import ctypes, os, pathlib, signal, subprocess, sys, tempfile, time

from onnx_ops.errors import RefusedError


def note(name):
    path = pathlib.Path(__file__).with_name(name + ".tmp")
    path.write_text(str(os.getpid()))
    path.rename(path.with_suffix(""))

def refuse(data):
    raise RefusedError("not today", where="the moon", why="it is full", remedy="Wait.")

def fail(data):
    note("trainer")
    return 1 / 0

def crash(data):
    for number in range(100):
        print("line", number)
    sys.stdout.flush()
    ctypes.string_at(0)

def leave(data):
    os._exit(7)

def eat(data):
    held = []
    while True:
        held.append(bytearray(1 << 25))

def chatter(data):
    line = b"x" * 79 + b"\\n"
    for _ in range(300_000):
        os.write(1, line)
    os.abort()

def hang(data):
    tempfile.mkdtemp(prefix="left-behind-")
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path(__file__).with_name("grandchild").write_text(str(grandchild.pid))
    print("about to hang", flush=True)
    note("trainer")
    time.sleep(1000)
"""


@pytest.fixture
def project(tmp_path: Path) -> Settings:
    (tmp_path / "training.py").write_text(TRAINING)
    np.savez(tmp_path / "data.npz", x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    return load_settings(tmp_path, {})


@pytest.fixture
def context(project: Settings) -> Context:
    return build_context(project)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for the temporary files of this process."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def data_stage(file: str = "data.npz", fingerprint: str = "") -> Stage:
    section = FileData(file=file, inputs={"x": "x"}, label="y")
    settings: dict[str, Any] = {
        "section": codec.to_json(section),
        "inputs": ["x"],
        "fingerprint": fingerprint,
    }
    return Stage(id="data/test", kind=StageKind.DATA, settings=settings)


def train_stage(function: str, **options: object) -> Stage:
    settings = {"run": f"training:{function}", "with_": {}, "framework": "sklearn"}
    return Stage(id="train", kind=StageKind.TRAIN, settings=settings, own_process=True, **options)  # type: ignore[arg-type]


def noted(project: Settings, name: str) -> int:
    return int((project.root / name).read_text())


def test_run_in_subprocess_returns_same_manifest_as_current_process(
    project: Settings, context: Context
) -> None:
    stage = data_stage(fingerprint=digest_file(context.root / "data.npz"))
    there = run_in_subprocess(project, stage, KEY, {})
    here = execute(stage, KEY, {}, context)
    assert there == here
    assert context.store.read(there["dataset.npz"])


def test_run_in_subprocess_with_failing_stage_keeps_error_type_and_text(project: Settings) -> None:
    with pytest.raises(NotFoundError) as missing:
        run_in_subprocess(project, data_stage("nowhere.npz"), KEY, {})
    assert missing.value.where.endswith("nowhere.npz")
    with pytest.raises(RefusedError) as refused:
        run_in_subprocess(project, train_stage("refuse"), KEY, {})
    said = refused.value
    assert (said.what, said.where, said.why, said.remedy) == (
        "not today",
        "the moon",
        "it is full",
        "Wait.",
    )
    with pytest.raises(UserError):
        run_in_subprocess(project, train_stage("nothing"), KEY, {})


def test_worker_answer_on_full_disk_returns_storage_error(
    project: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(project.root)
    monkeypatch.setattr(worker, "execute", write)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    answer = worker._answer({"stage": codec.to_json(data_stage()), "key": KEY, "inputs": {}})
    error = from_document(answer["error"])
    assert (type(error), error.where) == (StorageError, data_stage().id)


def test_run_in_subprocess_after_crash_raises_stage_error_with_output(project: Settings) -> None:
    with pytest.raises(StageError, match="signal SIGSEGV") as crashed:
        run_in_subprocess(project, train_stage("crash"), KEY, {})
    lines = crashed.value.why.splitlines()
    assert len(lines) <= LAST_LINES
    assert "line 99" in lines
    assert crashed.value.where == "train"


def test_run_in_subprocess_above_memory_limit_raises_stage_error(project: Settings) -> None:
    with pytest.raises(StageError, match=r"more memory than its limit of 0\.6 GB") as caught:
        run_in_subprocess(project, train_stage("eat", memory=600_000_000), KEY, {})
    assert "`memory`" in caught.value.remedy


def test_run_in_subprocess_with_much_output_shortens_it_and_reports_its_size(
    project: Settings, scratch: Path
) -> None:
    with pytest.raises(StageError, match="signal SIGABRT") as caught:
        run_in_subprocess(project, train_stage("chatter"), KEY, {})
    assert caught.value.why.endswith("(24 MB of output in all)")
    assert len(caught.value.why) < 20_000
    assert list(scratch.iterdir()) == []


def test_run_in_subprocess_without_result_raises_stage_error(project: Settings) -> None:
    with pytest.raises(StageError, match="exit code 7") as left:
        run_in_subprocess(project, train_stage("leave"), KEY, {})
    assert "printed nothing" in left.value.why


def test_run_in_subprocess_after_timeout_ends_all_processes(
    project: Settings, scratch: Path
) -> None:
    why = ""
    # The time-outs grow, since the training must start before one of them ends.
    for seconds in (2.5, 10.0, 40.0):
        with pytest.raises(StageError, match=f"time-out of {seconds:g} s") as stopped:
            run_in_subprocess(project, train_stage("hang", timeout=seconds), KEY, {})
        why = stopped.value.why
        if (project.root / "trainer").exists():
            break
    assert why == "about to hang"
    assert list(scratch.iterdir()) == []
    until(lambda: not any(is_alive(noted(project, name)) for name in ("trainer", "grandchild")))


PARENT = """
import sys
from pathlib import Path
from onnx_ops import codec
from onnx_ops.domain.plan import Stage
from onnx_ops.config.settings import load_settings
from onnx_ops.app.execution import run_in_subprocess

run_in_subprocess(load_settings(), codec.loads(sys.argv[1].encode(), Stage), "sha256:0", {})
"""


def test_run_in_subprocess_after_parent_is_killed_ends_stage(
    project: Settings, scratch: Path
) -> None:
    stage = codec.dumps(train_stage("hang")).decode()
    environ = {**os.environ, **to_environ(project), "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", PARENT, stage], env=environ) as parent:
        until((project.root / "trainer").exists)
        assert is_alive(noted(project, "trainer"))
        assert list(scratch.rglob("left-behind-*"))
        parent.send_signal(signal.SIGKILL)
    until(lambda: not any(is_alive(noted(project, name)) for name in ("trainer", "grandchild")))
    assert list(scratch.iterdir()) == []


def test_stage_executor_after_interrupt_ends_local_and_remote_stages(
    project: Settings, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere: Any = create_autospec(Pools, instance=True)
    monkeypatch.setattr("onnx_ops.plugins.load", lambda kind, name: elsewhere)
    executor = StageExecutor(settings=project, context=context)
    assert executor.running.pools == elsewhere

    def interrupt() -> None:
        with executor.running.ended_on_error():
            until((project.root / "trainer").exists)
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(executor, train_stage("hang"), KEY, {})
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert isinstance(begun.exception(), StageError)
    until(lambda: not any(is_alive(noted(project, name)) for name in ("trainer", "grandchild")))
    elsewhere.cancel.assert_called_once_with()
    assert executor.running.processes == set()
    with pytest.raises(StageError, match="the run was cancelled"):
        executor(train_stage("hang"), KEY, {})


def test_stage_executor_runs_only_configured_stages_in_subprocess(
    project: Settings, context: Context
) -> None:
    executor = StageExecutor(settings=project, context=context)

    def process_of(stage: Stage) -> int:
        with pytest.raises(UserError, match="ZeroDivisionError"):
            executor(stage, Digest(KEY), {})
        return noted(project, "trainer")

    stage = train_stage("fail")
    assert process_of(stage) != os.getpid()
    here = Stage(id="train", kind=StageKind.TRAIN, settings=stage.settings)
    assert process_of(here) == os.getpid()
    assert (
        process_of(Stage(id="train", kind=StageKind.TRAIN, settings=stage.settings, timeout=60.0))
        != os.getpid()
    )
    sys.modules.pop("training", None)


def test_machine_lock_while_locked_refuses_second_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with machine_lock():
        (path,) = tmp_path.iterdir()
        with path.open("w") as other:
            assert not try_lock(other.fileno())
    with path.open("w") as other:
        assert try_lock(other.fileno())


def test_run_in_subprocess_passes_progress_lines_to_observer(project: Settings) -> None:
    (project.root / "telling.py").write_text(
        "import os\n"
        "def train(data):\n"
        "    for number in range(3):\n"
        "        os.write(1, b'\\x1eprogress step %d\\n' % number)\n"
        "    print('last words', flush=True)\n"
        "    os._exit(7)\n"
    )
    settings: dict[str, Json] = {"run": "telling:train", "with_": {}, "framework": "sklearn"}
    telling = Stage(id="train", kind=StageKind.TRAIN, settings=settings, own_process=True)
    observer = RecordingObserver()
    with pytest.raises(StageError) as caught:
        run_in_subprocess(project, telling, KEY, {}, observer)
    assert observer.progress == [f"step {number}" for number in range(3)]
    assert observer.lines == ["last words"]
    assert caught.value.why == "last words"
    (file,) = observer.files
    assert file.read_text() == "last words\n"
    assert caught.value.remedy.endswith(f"The output of the stage is in {file}.")


def test_run_in_subprocess_stores_output_and_passes_lines_to_observer_while_stage_runs(
    project: Settings,
) -> None:
    (project.root / "printing.py").write_text(
        "import os, subprocess, sys, time\n"
        "def train(data):\n"
        "    print('epoch 1')\n"
        "    while not os.path.exists('seen'): time.sleep(0.01)\n"
        "    print('epoch 2', file=sys.stderr)\n"
        "    subprocess.run(['echo', 'of a child'], check=True)\n"
        "    raise ValueError('diverged')\n"
    )
    settings: dict[str, Json] = {"run": "printing:train", "with_": {}, "framework": "sklearn"}
    stage = Stage(id="train", kind=StageKind.TRAIN, settings=settings, own_process=True)

    class FirstLineObserver(RecordingObserver):
        def printed(self, stage: Stage, line: str, file: Path) -> None:
            super().printed(stage, line, file)
            (project.root / "seen").touch()

    observer = FirstLineObserver()
    with pytest.raises(UserError, match="diverged") as caught:
        run_in_subprocess(project, stage, KEY, {}, observer)
    (file,) = observer.files
    assert file.parent == project.state / "output"
    assert file.read_text().splitlines() == ["epoch 1", "epoch 2", "of a child"]
    assert observer.lines[0] == "epoch 1"
    assert f"The output of the stage is in {file}." in caught.value.remedy


def test_run_in_subprocess_of_later_execution_replaces_stored_output(project: Settings) -> None:
    (project.root / "counting.py").write_text(
        "def train(data, n):\n    print('run', n)\n    raise ValueError\n"
    )
    for number in (1, 2):
        settings: dict[str, Json] = {
            "run": "counting:train",
            "with_": {"n": number},
            "framework": "sklearn",
        }
        stage = Stage(id="train", kind=StageKind.TRAIN, settings=settings, own_process=True)
        with pytest.raises(UserError):
            run_in_subprocess(project, stage, KEY, {})
    (file,) = (project.state / "output").glob("*.log")
    assert file.read_text() == "run 2\n"


class RecordingObserver(Observer):
    def __init__(self) -> None:
        self.progress: list[str] = []
        self.lines: list[str] = []
        self.files: set[Path] = set()

    def progressed(self, stage: Stage, line: str) -> None:
        self.progress.append(line)

    def printed(self, stage: Stage, line: str, file: Path) -> None:
        self.lines.append(line)
        self.files.add(file)
