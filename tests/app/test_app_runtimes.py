"""One pipeline on targets of several runtimes.

The tests cover the measurements on each runtime, and on the others when one is killed.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from onnx_ops import codec
from onnx_ops.adapters.isolation.environments import MARKER, PythonEnvironments, find_uv
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import summarize
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.plan import StageKind, StageStatus
from tests.support.checkout import copy_parts
from tests.support.extras import require_programs
from tests.support.suite import Sweep

KEPT = "ONNX_OPS_TEST_ENVIRONMENTS"
"""Variable with the folder for environments that later test runs reuse."""

HERE = f"onnxruntime=={version('onnxruntime')}"
LIMITS = "gates=[{kind: parity}, {kind: metric, name: accuracy, min: 85%}]"
"""Gates without latency.

It is measured, but not judged, because tests share their machine with each other.
"""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ[KEPT]) if KEPT in os.environ else tmp_path_factory.mktemp("environments")


@pytest.fixture
def root(tmp_path: Path, environments: Path) -> Path:
    require_programs("node", "npm", "chromium", packages="nodejs npm chromium")
    copy_parts(tmp_path, "configs", "examples")
    (tmp_path / "onnx-ops.toml").write_text("signing = 'auto'\n")
    (tmp_path / ".onnx-ops").mkdir()
    (tmp_path / ".onnx-ops/environments").symlink_to(environments)
    (tmp_path / "configs/targets/apart.yaml").write_text(
        f"name: apart\nenv: {{requirements: [{HERE}]}}\n"
    )
    lend_this_interpreter(environments)
    return tmp_path


def lend_this_interpreter(environments: Path) -> None:
    """Create an environment that is already complete, with this interpreter.

    The installation of packages is not tested here.
    """
    place = PythonEnvironments(folder=environments, uv=find_uv()).place(
        Environment(requirements=(HERE,))
    )
    (place / "bin").mkdir(parents=True, exist_ok=True)
    python = place / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (place / MARKER).write_text("{}")


def run(root: Path, pipeline: str, *targets: str) -> tuple[Project, Any, Any]:
    project = open_project(root)
    overrides = [f"benchmark.targets=[{', '.join(targets)}]", LIMITS]
    file = root / f"configs/pipelines/{pipeline}.yaml"
    prepared = prepare(project, file, overrides=overrides, until=StageKind.GATE)
    result = execute(project, prepared)
    return project, result, summarize(prepared.pipeline, result, project.context)


def evidence(project: Project, result: Any, target: str) -> Evidence:
    manifest = result.outcomes[f"benchmark/fp32@{target}"].manifest
    return codec.loads(project.context.store.read(manifest["evidence.json"]), Evidence)


def measured(root: Path, pipeline: str, *targets: str) -> dict[str, str | None]:
    """Run a pipeline on several targets, and return the choices.

    Every target must have verdicts and a choice, and its evidence must name its origin.
    """
    project, result, summary = run(root, pipeline, *targets)
    assert [
        (o.stage, o.reason) for o in result.outcomes.values() if o.status is StageStatus.FAILED
    ] == []
    assert {decision.target for decision in summary.decisions if decision.results} == set(targets)
    found = {target: evidence(project, result, target) for target in targets}
    assert len({e.target_digest for e in found.values()}) == len(targets)
    for e in found.values():
        assert e.runtime is not None
        assert sum(e.runtime.nodes.values()) > 0
        assert set(e.runtime.nodes) == {e.runtime.asked[0]}
        assert e.runtime.clock_resolution_ns
        assert e.hardware.runtime_version.startswith(e.runtime.version)
        assert e.latency is not None
        assert e.latency.quantiles_ns["p50"] > 0
    again = run(root, pipeline, *targets)[1]
    assert {o.status for o in again.outcomes.values()} == {StageStatus.CACHED}
    return {choice.target: choice.variant for choice in summary.choices}


@pytest.mark.nightly
def test_pipeline_with_several_runtimes_is_measured_on_each(root: Path) -> None:
    targets = ("cpu-1t", "node", "browser-wasm", "apart")
    assert measured(root, "iris-onnx", *targets) == dict.fromkeys(targets, "fp32")


@pytest.mark.nightly
def test_pipeline_on_openvino_differs_only_for_inputs_outside_data_and_is_accepted(
    root: Path,
) -> None:
    targets = ("cpu-1t", "cpu-all", "node", "browser-wasm")
    assert all(measured(root, "digits-cnn", *targets, "openvino-cpu").values())
    project, result, _ = run(root, "digits-cnn", *targets, "openvino-cpu")
    found = {
        target: differing(evidence(project, result, target))
        for target in (*targets, "openvino-cpu")
    }
    # OpenVINO computes other values for NaN. The data do not contain NaN, so all variants are
    # accepted.
    openvino = found.pop("openvino-cpu")
    assert ("missing", False) in openvino
    assert not any(inside for _, inside in openvino)
    assert not any(found.values())


def differing(evidence: Evidence) -> set[tuple[str, bool]]:
    """Return the groups of inputs that the gate's own limit does not allow.

    Each group comes with whether a caller could send its inputs.
    """
    limit = ParityGate().noise_factor
    return {(m.group, m.inside) for m in evidence.parity if m.mismatch or m.ratio > limit}


Victim = Callable[[psutil.Process], bool]


def of_node(process: psutil.Process) -> bool:
    command = process.cmdline()
    return "node" in command[1:] and any(part.endswith("worker.mjs") for part in command)


def of_browser(process: psutil.Process) -> bool:
    """Return whether a process is the browser's main process with an open page."""
    command = process.cmdline()
    if (
        "--headless" not in command
        or "chrom" not in command[0]
        or any("--type=" in part for part in command)
    ):
        return False
    return any("--type=renderer" in child.cmdline() for child in process.children(recursive=True))


def of_isolated(process: psutil.Process) -> bool:
    return any("onnx_ops.adapters.runtimes.isolated" in part for part in process.cmdline())


VICTIMS = {"node": of_node, "browser-wasm": of_browser, "apart": of_isolated}
LONG_ENOUGH_S = 1.0
"""Seconds from the stop of a process to its kill, so that a request waits for it."""


@pytest.mark.nightly
def test_run_with_killed_runtimes_reports_errors_and_continues(root: Path, sweep: Sweep) -> None:
    victims = sweep(VICTIMS)
    with killed(*(VICTIMS[target] for target in victims)):
        _, result, summary = run(root, "iris-onnx", *victims, "cpu-1t")
    failed = {o.stage: o.reason for o in result.outcomes.values() if o.status is StageStatus.FAILED}
    assert list(failed) == [f"benchmark/fp32@{target}" for target in victims]
    words = {
        "node": "signal SIGKILL before it could",
        "browser-wasm": "the browser (ended before it|does not start)",
        "apart": "signal SIGKILL before it could",
    }
    for target in victims:
        assert re.search(words[target], failed[f"benchmark/fp32@{target}"])
    verdicts = {decision.target: decision.verdict for decision in summary.decisions}
    assert verdicts == dict.fromkeys(victims, Verdict.ERROR) | {"cpu-1t": Verdict.PASS}
    assert {choice.target: choice.variant for choice in summary.choices} == dict.fromkeys(
        victims
    ) | {"cpu-1t": "fp32"}
    assert summary.exit_code == 4


@contextmanager
def killed(*victims: Victim) -> Iterator[None]:
    """Stop and kill a process of each kind of victim below this one.

    A process is stopped when it is found, and killed while a request waits for it. A process that
    is killed between two requests is replaced silently, so the next one is killed too.
    """
    done = threading.Event()
    hit: set[Victim] = set()

    def watch() -> None:
        while not done.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                try:
                    for victim in [one for one in victims if one(process)]:
                        process.suspend()
                        time.sleep(LONG_ENOUGH_S)
                        process.kill()
                        hit.add(victim)
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert hit == set(victims)
