"""ONNX Runtime in an isolated interpreter.

Its outputs are those of the current process. Its process is killed or exceeds its time limit.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnx_ops.adapters.isolation.process import IsolatedProcess
from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes, read_runtime_build
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.placement import GuardedRuntime, TargetedRuntime, guard_runtime
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, StageError, UserError
from onnx_ops.testing.models import rows
from onnx_ops.testing.runtimes import RuntimeSuite
from tests.adapters.runtime_places import ended_in_the_middle, write_identity
from tests.support.fixtures import fixed
from tests.support.must import must

PINNED = Environment(requirements=("onnxruntime==1.31.1",))
APART = Target(name="apart", env=PINNED)


@pytest.fixture
def runtime() -> TargetedRuntime:
    """Return a runtime that uses this interpreter.

    These tests are about the process, not about the installation of packages.
    """
    return TargetedRuntime(elsewhere=IsolatedRuntimes(python=lambda _: Path(sys.executable)))


@pytest.fixture(scope="module")
def kept() -> TargetedRuntime:
    return TargetedRuntime(elsewhere=IsolatedRuntimes(python=lambda _: Path(sys.executable)))


def process_of(runtime: TargetedRuntime) -> IsolatedProcess | None:
    assert runtime.elsewhere is not None
    kept = runtime.elsewhere.held._kept
    return None if kept is None else kept[1]


class TestIsolatedRuntime(RuntimeSuite):
    @pytest.fixture
    def runtime(self, kept: TargetedRuntime) -> TargetedRuntime:
        return kept

    target = fixed(APART)


def test_isolated_runtime_run_matches_current_process_and_graph_and_facts_are_available(
    runtime: TargetedRuntime, file: Path, tmp_path: Path
) -> None:
    batches = (rows(1), rows(0), rows(9, seed=2))
    here = OnnxRuntime().run(file, replace(APART, env=None), batches)
    for a, b in zip(here, runtime.run(file, APART, batches), strict=True):
        np.testing.assert_array_equal(a["scores"], b["scores"])
        assert a["scores"].dtype == b["scores"].dtype
    runtime.rewritten(file, APART, tmp_path / "copy.onnx")
    assert (tmp_path / "copy.onnx").stat().st_size > 0
    assert runtime.facts(file, APART).clock_resolution_ns


@pytest.mark.parametrize("do", ["benchmark", "sample", "under_load"])
def test_isolated_runtime_after_kill_raises_stage_error_and_restarts(
    runtime: TargetedRuntime, file: Path, do: str
) -> None:
    def kill() -> None:
        os.kill(must(process_of(runtime))._process.pid, signal.SIGKILL)

    with ended_in_the_middle(kill) as measure:
        runtime.run(file, APART, (rows(1),))
        with pytest.raises(StageError, match=f"signal SIGKILL before it could {do}") as killed:
            measure(runtime, do, file, APART)
    # A MeasurementError would mean that the runtime refuses the model.
    assert not isinstance(killed.value, MeasurementError)
    assert killed.value.where == "target apart"
    assert runtime.run(file, APART, (rows(2),))[0]["scores"].shape[0] == 2


def test_isolated_runtime_after_timeout_raises_stage_error(
    runtime: TargetedRuntime, file: Path
) -> None:
    hasty = replace(APART, env=replace(PINNED, timeout=2.0))
    with pytest.raises(StageError, match="longer than 2 s to sample") as late:
        runtime.sample(file, hasty, rows(1), runs=100_000_000, warmup=0)
    assert "env.timeout" in late.value.remedy


def test_isolated_runtime_fingerprint_returns_build_without_starting_process(
    runtime: TargetedRuntime,
) -> None:
    openvino = replace(
        APART, env=Environment(requirements=("numpy==2.4.6", "onnxruntime-openvino == 1.24.1"))
    )
    assert read_runtime_build(openvino) == ("onnxruntime-openvino", "1.24.1")
    assert runtime.fingerprint(openvino).runtime_version == "1.24.1 (onnxruntime-openvino)"
    assert process_of(runtime) is None
    assert openvino.digest() != APART.digest() != replace(APART, env=None).digest()


@pytest.mark.parametrize(
    "requirements", [(), ("onnxruntime",), ("onnxruntime>=1.24",), ("numpy==2.4.6",)]
)
def test_isolated_fingerprint_without_exact_build_raises_user_error(
    runtime: TargetedRuntime, requirements: tuple[str, ...]
) -> None:
    with pytest.raises(UserError, match="the build") as caught:
        runtime.fingerprint(replace(APART, env=Environment(requirements=requirements)))
    assert "==" in caught.value.remedy


def test_targeted_runtime_fingerprint_depends_on_environment_and_unisolated_target_runs(
    tmp_path: Path, file: Path
) -> None:
    runtime = TargetedRuntime().with_environments(tmp_path)
    here = replace(APART, env=None)
    assert runtime.fingerprint(here) == OnnxRuntime().fingerprint(here)
    assert runtime.fingerprint(APART).runtime_version == "1.31.1 (onnxruntime)"
    assert runtime.run(file, replace(APART, env=Environment(isolated=False)), (rows(1),))


def test_targeted_runtime_with_requirements_without_isolation_or_folder_raises_user_error(
    tmp_path: Path, file: Path
) -> None:
    runtime = TargetedRuntime().with_environments(tmp_path)
    with pytest.raises(UserError, match="installs nothing"):
        runtime.run(file, replace(APART, env=replace(PINNED, isolated=False)), (rows(1),))
    with pytest.raises(UserError, match="no folder"):
        TargetedRuntime().run(file, APART, (rows(1),))


def test_guard_runtime_of_targeted_runtime_guards_current_process_and_keeps_folder(
    tmp_path: Path,
) -> None:
    safe = guard_runtime(TargetedRuntime().with_environments(tmp_path))
    assert isinstance(safe, TargetedRuntime)
    assert type(safe.here) is GuardedRuntime
    assert safe.folder == tmp_path


@pytest.mark.parametrize("code", [1, 2])
def test_isolated_runtime_returns_strings_unchanged(
    runtime: TargetedRuntime, tmp_path: Path, code: int
) -> None:
    path = write_identity(tmp_path / "texts.onnx", TensorProto.STRING)
    texts = np.array(["", "größe"] * code, dtype=object)
    answer = runtime.run(path, APART, ({"x": texts},))[0]["y"]
    assert answer.dtype == object
    assert answer.tolist() == texts.tolist()
