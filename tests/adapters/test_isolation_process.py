"""A framework in a separate process: its results, and all ways in which it fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from onnx_ops.adapters.isolation import process as process_module
from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter, RemoteModel
from onnx_ops.adapters.isolation.process import (
    LAST_LINES,
    IsolatedProcess,
    ProcessLimits,
    build_interpreter_command,
)
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import NotFoundError, RefusedError, StageError, UserError
from onnx_ops.ports import Dataset, ExportRequest, TrainingExporter
from tests.support.processes import is_alive, until

CONVERTER = """
import ctypes, os, subprocess, sys, threading, time
from pathlib import Path
import numpy as np
from onnx_ops.errors import RefusedError

class Converter:
    tools = ()

    def save(self, model, folder):
        (folder / "model.txt").write_text(str(model))

    def load(self, folder):
        return (folder / "model.txt").read_text()

    def reference(self, model, inputs, precision):
        if precision == "float64":
            return None
        if np.isnan(inputs["x"]).any():
            raise ValueError("no NaN, please")
        return {"y": inputs["x"] * float(model)}

    def export(self, model, request):
        print("about to", request.section.framework, flush=True)
        getattr(self, request.section.framework)(model, request)

    def write(self, model, request):
        request.path.write_text(f"{model} {request.section.opset} {request.samples['x'].shape}")

    def segfault(self, model, request):
        ctypes.string_at(0)

    def abort(self, model, request):
        print("terminate called after throwing an instance of 'std::bad_thing'", flush=True)
        os.abort()

    def leave(self, model, request):
        os._exit(3)

    def hang(self, model, request):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        request.path.write_text(str(child.pid))
        time.sleep(1000)

    def hang_in_c(self, model, request):
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock

    def swallow(self, model, request):
        hoard = [np.ones(1 << 24) for _ in range(1 << 10)]

    def babble(self, model, request):
        line = b"x" * 999 + b"\\n"
        for _ in range(100):
            os.write(1, line * 1000)
        os.write(2, b"the last word\\n")
        os.abort()

    def babble_and_write(self, model, request):
        for _ in range(100):
            os.write(1, (b"y" * 999 + b"\\n") * 1000)
        self.write(model, request)

    def refuse(self, model, request):
        raise RefusedError("not today", where="the moon", why="it is full", remedy="Wait.")

    def stumble(self, model, request):
        return {}["no such key"]
"""

TRAINING = """
import numpy as np, os

def train(data, factor):
    assert data["train"].label is not None
    return factor * float(data["train"].inputs["x"].max())

def crash(data):
    print("training", flush=True)
    os.abort()

def fail(data):
    return 1 / 0
"""


@pytest.fixture
def exporter(tmp_path: Path) -> IsolatedExporter:
    return make(tmp_path)


def make(root: Path, limits: ProcessLimits | None = None) -> IsolatedExporter:
    (root / "converter_of_mine.py").write_text(CONVERTER)
    (root / "training_of_mine.py").write_text(TRAINING)
    return IsolatedExporter(
        place="converter_of_mine:Converter",
        python=lambda: Path(sys.executable),
        root=root,
        limits=limits or ProcessLimits(timeout=60.0),
    )


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("converter_of_mine", None)


pytestmark = pytest.mark.usefixtures("importable")


def load(exporter: IsolatedExporter, folder: Path, text: str = "2.0") -> RemoteModel:
    folder.mkdir(exist_ok=True)
    (folder / "model.txt").write_text(text)
    model = exporter.load(folder)
    assert isinstance(model, RemoteModel)
    return model


def request(path: Path, do: str) -> ExportRequest:
    return ExportRequest(
        section=Export(framework=do), samples={"x": np.ones((3, 2), np.float32)}, path=path
    )


def test_isolated_exporter_trains_exports_saves_and_computes_references_of_model(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    assert isinstance(exporter, TrainingExporter)
    folder, path = tmp_path / "saved", tmp_path / "out.txt"
    folder.mkdir()
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    data = {"train": Dataset(inputs={"x": rows}, label=np.array(["a", "b", "a"]))}
    exporter.train("training_of_mine:train", data, {"factor": 2}, folder)
    model = exporter.load(folder)
    exporter.export(model, request(path, "write"))
    assert path.read_text() == "10.0 18 (3, 2)"
    answers = exporter.reference(model, {"x": rows}, "float32")
    assert answers is not None
    np.testing.assert_array_equal(answers["y"], rows * 10)
    assert answers["y"].dtype == np.float32
    assert exporter.reference(model, {"x": rows}, "float64") is None
    with pytest.raises(ValueError, match="no NaN, please"):
        exporter.reference(model, {"x": rows * np.nan}, "float32")
    copy = tmp_path / "copy"
    copy.mkdir()
    exporter.save(model, copy)
    assert (copy / "model.txt").read_text() == "10.0"


@pytest.mark.parametrize(
    ("do", "how"),
    [("segfault", "signal SIGSEGV"), ("abort", "signal SIGABRT"), ("leave", "exit code 3")],
)
def test_isolated_exporter_after_crash_reports_signal_or_exit_code_and_output(
    exporter: IsolatedExporter, tmp_path: Path, do: str, how: str
) -> None:
    with pytest.raises(StageError, match=f"ended with {how} before it could export") as failure:
        exporter.export(load(exporter, tmp_path / "m"), request(tmp_path / "o", do))
    assert f"about to {do}" in failure.value.why
    assert failure.value.remedy.startswith("Use a machine with more memory if ")
    if do == "segfault":
        # The traceback names the Python file that was running.
        assert "converter_of_mine.py" in failure.value.why


def test_isolated_exporter_after_crash_exports_next_model(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    model = load(exporter, tmp_path / "m")
    with pytest.raises(StageError):
        exporter.export(model, request(tmp_path / "o", "abort"))
    # The process of this model has ended, so the error is raised again.
    with pytest.raises(StageError):
        exporter.export(model, request(tmp_path / "o", "write"))
    exporter.export(load(exporter, tmp_path / "m"), request(tmp_path / "o", "write"))
    assert (tmp_path / "o").exists()


@pytest.mark.parametrize("do", ["hang", "hang_in_c"])
def test_isolated_exporter_after_timeout_stops_all_its_processes(tmp_path: Path, do: str) -> None:
    exporter = make(tmp_path, ProcessLimits(timeout=3.0))
    model = load(exporter, tmp_path / "m")
    pid = model.process._process.pid
    with pytest.raises(StageError, match="longer than 3 s to export") as failure:
        exporter.export(model, request(tmp_path / "o", do))
    assert f"in {do}" in failure.value.why
    assert "env.timeout" in failure.value.remedy
    until(lambda: not is_alive(pid))
    if do == "hang":
        until(lambda: not is_alive(int((tmp_path / "o").read_text())))


def test_isolated_exporter_above_memory_limit_raises_stage_error(tmp_path: Path) -> None:
    exporter = make(tmp_path, ProcessLimits(memory=700_000_000, timeout=60.0))
    with pytest.raises(StageError, match=r"more memory than its limit of 0\.7 GB") as failure:
        exporter.export(load(exporter, tmp_path / "m"), request(tmp_path / "o", "swallow"))
    assert "env.memory" in failure.value.remedy


@pytest.mark.parametrize(
    ("code", "timeout", "remedy"),
    [
        ("import time; time.sleep(60)", 0.1, "Fetch the data first."),
        (
            "raise SystemExit(3)",
            None,
            "Increase `env.memory` if the process needs more than 7.0 GB",
        ),
    ],
)
def test_isolated_process_failure_has_remedy_of_its_caller_or_limit(
    monkeypatch: pytest.MonkeyPatch, code: str, timeout: float | None, remedy: str
) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", 1.0)
    process = IsolatedProcess(
        lambda *_: [sys.executable, "-c", code],
        ProcessLimits(memory=7_000_000_000),
        "data",
        late_remedy="Fetch the data first.",
    )
    with pytest.raises(StageError) as failure:
        process.ask("fetch", timeout=timeout)
    assert failure.value.remedy.startswith(remedy)


def test_isolated_exporter_with_much_output_limits_memory_and_length_of_report(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    model = load(exporter, tmp_path / "m")
    before = psutil.Process().memory_info().rss
    exporter.export(model, request(tmp_path / "o", "babble_and_write"))
    with pytest.raises(StageError, match="SIGABRT") as failure:
        exporter.export(model, request(tmp_path / "p", "babble"))
    assert "the last word" in failure.value.why
    assert "200 MB of output" in failure.value.why
    assert len(failure.value.why.splitlines()) <= LAST_LINES + 1
    assert psutil.Process().memory_info().rss - before < 50e6


def test_isolated_exporter_keeps_own_errors_and_wraps_others_in_stage_error(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    model = load(exporter, tmp_path / "m")
    with pytest.raises(RefusedError) as refused:
        exporter.export(model, request(tmp_path / "o", "refuse"))
    assert (refused.value.where, refused.value.why, refused.value.remedy) == (
        "the moon",
        "it is full",
        "Wait.",
    )
    with pytest.raises(StageError, match="KeyError: 'no such key'") as failure:
        exporter.export(model, request(tmp_path / "o", "stumble"))
    assert "converter_of_mine.py" in failure.value.why
    exporter.export(model, request(tmp_path / "o", "write"))


def test_isolated_training_with_crash_or_failure_raises_error(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    with pytest.raises(StageError, match="SIGABRT before it could train"):
        exporter.train("training_of_mine:crash", {}, {}, tmp_path)
    with pytest.raises(UserError, match="ZeroDivisionError") as failure:
        exporter.train("training_of_mine:fail", {}, {}, tmp_path)
    assert "training_of_mine.py" in failure.value.where


def test_isolated_model_after_deletion_ends_its_process(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    model = load(exporter, tmp_path / "m")
    process, scratch = model.process._process.pid, model.process.folder
    del model
    until(lambda: not is_alive(process))
    assert not scratch.exists()


def test_isolated_process_after_owner_is_killed_ends(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.txt").write_text("2.0")
    script = f"""
import sys, os, signal
from pathlib import Path
sys.path.insert(0, {str(tmp_path)!r})
from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter
root, python = Path({str(tmp_path)!r}), Path(sys.executable)
exporter = IsolatedExporter(place="converter_of_mine:Converter", python=lambda: python, root=root)
model = exporter.load(Path({str(tmp_path / "m")!r}))
Path({str(tmp_path / "pid")!r}).write_text(str(model.process._process.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_isolated_process_does_not_inherit_python_path(
    exporter: IsolatedExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    (tmp_path / "training_of_mine.py").write_text(
        "import sys\ndef train(data):\n    return '|'.join(sys.path)\n"
    )
    folder = tmp_path / "saved"
    folder.mkdir()
    exporter.train("training_of_mine:train", {}, {}, folder)
    assert "elsewhere" not in (folder / "model.txt").read_text()


def test_isolated_save_of_missing_model_raises_not_found_error(
    exporter: IsolatedExporter, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="no such model"):
        exporter.save(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize(
    ("package", "reason"),
    [("onnx_ops_missing", "is not installed"), ("bare", "is a namespace package")],
)
def test_interpreter_command_for_package_without_file_raises_not_found_error(
    package: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = build_interpreter_command(Path(sys.executable), "module:function", [package])
    with pytest.raises(NotFoundError, match=f"package {package} {reason}") as caught:
        command(scratch, 3, 10**9)
    assert caught.value.remedy
