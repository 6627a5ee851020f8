"""ONNX Runtime in Node and in a headless browser, with real packages and programs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper

from onnx_ops.adapters.isolation.environments import NpmPackages
from onnx_ops.adapters.runtimes.javascript.runtime import DRIVER, WEB, BrowserRuntime, NodeRuntime
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.execution import Environment, Provider, SessionSettings
from onnx_ops.domain.target import CustomOps, OrtFormat, Target
from onnx_ops.errors import MeasurementError, StageError, UserError
from onnx_ops.onnx_graph.files import iterate_nodes, read_structure
from onnx_ops.ports import PairedBenchmarkSchedule, Runtime
from onnx_ops.testing.models import rows
from onnx_ops.testing.runtimes import RuntimeSuite
from tests.adapters.model_runs import run
from tests.adapters.runtime_places import ended_in_the_middle, environments, require, write_identity
from tests.support.external import write_external
from tests.support.fixtures import fixed

NODE = Target(name="node", runtime="node", providers=(Provider(name="cpu"),))
NODE_WASM = Target(name="node-wasm", runtime="node", providers=(Provider(name="wasm"),))
WASM = Target(name="browser-wasm", runtime="browser", providers=(Provider(name="wasm"),))
WEBGPU = Target(name="webgpu", runtime="browser", providers=(Provider(name="webgpu"),))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> NodeRuntime:
    """Return a runtime for the target `NODE` only.

    A runtime keeps one process for one target, so the next two fixtures serve other targets.
    """
    require("node", "npm")
    return NodeRuntime(folder=environments(tmp_path_factory))


@pytest.fixture(scope="module")
def wasm(tmp_path_factory: pytest.TempPathFactory) -> NodeRuntime:
    require("node", "npm")
    return NodeRuntime(folder=environments(tmp_path_factory))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> BrowserRuntime:
    require("node", "npm", "chromium")
    return BrowserRuntime(folder=environments(tmp_path_factory))


@pytest.fixture
def other_node(node: NodeRuntime) -> Iterator[NodeRuntime]:
    """Yield a runtime for other targets, so that the module's processes stay."""
    assert node.folder is not None
    runtime = node.with_environments(node.folder)
    yield runtime
    runtime._held.stop()


@pytest.fixture
def other_browser(browser: BrowserRuntime) -> Iterator[NodeRuntime]:
    assert browser.folder is not None
    runtime = browser.with_environments(browser.folder)
    yield runtime
    runtime._held.stop()


@pytest.fixture(params=["node", "wasm", pytest.param("browser", marks=pytest.mark.nightly)])
def place(request: pytest.FixtureRequest) -> tuple[NodeRuntime, Target]:
    """Return each of the three runtimes with its target."""
    target = {"node": NODE, "wasm": NODE_WASM, "browser": WASM}[request.param]
    return request.getfixturevalue(request.param), target


class TestNode(RuntimeSuite):
    @pytest.fixture
    def runtime(self, node: NodeRuntime) -> NodeRuntime:
        return node

    target = fixed(NODE)


@pytest.mark.sweep
class TestNodeWasm(RuntimeSuite):
    @pytest.fixture
    def runtime(self, wasm: NodeRuntime) -> NodeRuntime:
        return wasm

    target = fixed(NODE_WASM)

    @pytest.mark.nightly
    def test_starts_return_positive_durations_and_peak_memory_or_unknown(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        """Each start takes seconds, so the tests of each commit use `cpu` in Node only."""
        super().test_starts_return_positive_durations_and_peak_memory_or_unknown(
            runtime, target, file
        )

    @pytest.mark.nightly
    def test_runtime_with_invalid_file_or_feed_raises_measurement_error(
        self, runtime: Runtime, target: Target, file: Path, tmp_path: Path
    ) -> None:
        """The tests of each commit use only `cpu` in Node; this test adds `wasm`."""
        super().test_runtime_with_invalid_file_or_feed_raises_measurement_error(
            runtime, target, file, tmp_path
        )


@pytest.mark.nightly
class TestBrowser(RuntimeSuite):
    @pytest.fixture
    def runtime(self, browser: BrowserRuntime) -> BrowserRuntime:
        return browser

    target = fixed(WASM)

    @pytest.mark.nightly
    def test_starts_return_positive_durations_and_peak_memory_or_unknown(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        """Each start takes seconds, so the tests of each commit use `cpu` in Node only."""
        super().test_starts_return_positive_durations_and_peak_memory_or_unknown(
            runtime, target, file
        )


VALUES = {
    "float32": [[0.5, -np.inf], [np.nan, 3e38]],
    "float64": [[0.1, -0.0], [np.inf, 5e-324]],
    "float16": [[0.5, -0.0], [np.inf, 6e-8]],
    "int64": [[-(2**63), 2**63 - 1], [0, -1]],
    "uint64": [[2**64 - 1, 0], [1, 2]],
    "int32": [[-(2**31), 2**31 - 1], [0, -1]],
    "uint32": [[2**32 - 1, 0], [1, 2]],
    "int16": [[-(2**15), 2**15 - 1], [0, -1]],
    "uint16": [[2**16 - 1, 0], [1, 2]],
    "int8": [[-128, 127], [0, -1]],
    "uint8": [[255, 0], [1, 2]],
    "bool": [[True, False], [False, True]],
    "object": [["", "größe"], ['a\n"b"', "日本"]],
}


@pytest.mark.parametrize("name", VALUES)
def test_javascript_runtime_returns_each_type_unchanged(
    place: tuple[NodeRuntime, Target], tmp_path: Path, name: str
) -> None:
    runtime, target = place
    array = np.array(VALUES[name], dtype=name)
    path = write_identity(
        tmp_path / "identity.onnx", helper.np_dtype_to_tensor_dtype(array.dtype), ("n", 2)
    )
    answers = runtime.run(path, target, ({"x": array}, {"x": array[:0]}))
    assert answers[0]["y"].dtype == array.dtype
    assert answers[0]["y"].shape == (2, 2)
    assert answers[1]["y"].shape == (0, 2)
    if name == "object":
        assert answers[0]["y"].tolist() == array.tolist()
    else:
        assert answers[0]["y"].tobytes() == array.tobytes()


def test_node_runtime_with_complex_type_raises_measurement_error(
    node: NodeRuntime, file: Path
) -> None:
    with pytest.raises(MeasurementError, match="complex64"):
        node.run(file, NODE, ({"x": np.zeros((1, 2), np.complex64)},))


def test_javascript_runtime_returns_same_outputs_as_onnxruntime(
    place: tuple[NodeRuntime, Target], file: Path, tmp_path: Path
) -> None:
    runtime, target = place
    write_external(tmp_path / "external.onnx", "weights.bin")
    for path, feed in (
        (file, rows(64)),
        (tmp_path / "external.onnx", {"x": np.ones((3, 2), np.float32)}),
    ):
        there = run(path, feed, target, runtime)
        for name, expected in run(path, feed).items():
            np.testing.assert_allclose(there[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_javascript_benchmark_with_coarse_clock_times_several_calls(
    node: NodeRuntime, browser: BrowserRuntime, file: Path
) -> None:
    schedule = PairedBenchmarkSchedule(rounds=1, blocks=2, runs=3)
    fine, coarse = (
        node.facts(file, NODE).clock_resolution_ns,
        browser.facts(file, WASM).clock_resolution_ns,
    )
    assert fine
    assert coarse
    assert fine < 1000 <= coarse < 200_000
    fast = node.benchmark((file, file), NODE, rows(1), schedule)
    assert fast.calls == 1
    assert fast.probe is not None
    assert (fast.probe.astype(np.int64) > 0).all()
    slow = browser.benchmark((file, file), WASM, rows(1), replace(schedule, warmup=300))
    assert slow.calls > 1
    assert slow.probe is None
    steps = slow.nanoseconds.astype(np.float64) * slow.calls / coarse
    np.testing.assert_allclose(steps, np.round(steps), atol=0.01 * slow.calls)
    # Several calls are timed together, so a time has at least five steps of the clock. One call
    # takes two to six steps.
    assert np.median(steps) >= 5
    assert not slow.preempted.any()


def test_node_rewritten_writes_optimized_graph_but_raises_error_for_wasm(
    node: NodeRuntime, wasm: NodeRuntime, other_node: NodeRuntime, file: Path, tmp_path: Path
) -> None:
    node.rewritten(file, NODE, tmp_path / "copy.onnx")
    kinds = [one.op_type for one in iterate_nodes(read_structure(tmp_path / "copy.onnx"))]
    assert len(kinds) == sum(node.facts(file, NODE).nodes.values()) < 6
    plain = replace(NODE, session=SessionSettings(graph_level="disabled"))
    assert other_node.facts(file, plain).nodes == {"cpu": 6}
    with pytest.raises(MeasurementError, match="cannot write the graph"):
        wasm.rewritten(file, NODE_WASM, tmp_path / "other.onnx")


@pytest.mark.nightly
def test_javascript_runtime_with_ort_format_returns_outputs_of_source(
    node: NodeRuntime, other_node: NodeRuntime, other_browser: NodeRuntime, file: Path
) -> None:
    before = run(file, rows(17), NODE, node)["scores"]
    for runtime, target in ((other_node, NODE), (other_node, NODE_WASM), (other_browser, WASM)):
        phone = replace(target, ort_format=OrtFormat())
        np.testing.assert_allclose(
            run(file, rows(17), phone, runtime)["scores"], before, rtol=1e-5, atol=1e-6
        )
        assert runtime.sample(file, phone, rows(1), runs=2, warmup=1).nanoseconds.shape == (2,)


def test_node_runtime_after_kill_raises_stage_error_and_restarts(
    node: NodeRuntime, file: Path
) -> None:
    with ended_in_the_middle(lambda: os.kill(pid(node), signal.SIGKILL)) as measure:
        node.run(file, NODE, (rows(1),))
        with pytest.raises(StageError, match="signal SIGKILL before it could benchmark") as killed:
            measure(node, "benchmark", file, NODE)
    assert killed.value.where == "target node"
    assert node.run(file, NODE, (rows(2),))[0]["scores"].shape[0] == 2


def test_node_facts_after_kill_of_session_process_raises_stage_error(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is replaced by one that ends the process which builds the session."""
    require("node")
    library = tmp_path / "node_modules" / "onnxruntime-node" / "index.js"
    library.parent.mkdir(parents=True)
    library.write_text(
        'exports.listSupportedBackends = () => [{ name: "cpu" }];\n'
        'exports.InferenceSession = { create: () => process.kill(process.pid, "SIGKILL") };\n'
    )
    monkeypatch.setattr(NpmPackages, "installed", lambda *_: tmp_path)
    runtime = NodeRuntime(folder=tmp_path)
    with pytest.raises(StageError, match="builds the session ended with signal SIGKILL"):
        runtime.facts(file, NODE)
    runtime._held.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["", "renderer"])
def test_browser_runtime_after_kill_raises_stage_error_and_restarts(
    browser: BrowserRuntime, file: Path, role: str
) -> None:
    with ended_in_the_middle(lambda: kill_chromium(browser, role)) as measure:
        browser.run(file, WASM, (rows(1),))
        with pytest.raises(StageError, match="before it could sample") as killed:
            measure(browser, "sample", file, WASM)
    assert ("the page crashed" if role else "the browser ended") in killed.value.what
    assert browser.run(file, WASM, (rows(2),))[0]["scores"].shape[0] == 2


@pytest.mark.nightly
def test_node_runtime_after_timeout_raises_stage_error(other_node: NodeRuntime, file: Path) -> None:
    hasty = replace(NODE, env=Environment(timeout=2.0))
    with pytest.raises(StageError, match="longer than 2 s to sample"):
        other_node.sample(file, hasty, rows(1), runs=100_000_000, warmup=0)


@pytest.mark.nightly
def test_browser_runtime_stop_ends_all_processes(
    tmp_path_factory: pytest.TempPathFactory, file: Path
) -> None:
    require("node", "npm", "chromium")
    runtime = BrowserRuntime(folder=environments(tmp_path_factory))
    runtime.facts(file, WASM)
    scratch = runtime._held._kept[1].folder  # type: ignore[index]
    processes = psutil.Process(pid(runtime)).children(recursive=True)
    assert any("chrom" in process.name() for process in processes)
    runtime._held.stop()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    assert not scratch.exists()


@pytest.mark.nightly
def test_webgpu_computes_but_refuses_timing_if_adapter_is_software(
    other_browser: NodeRuntime, file: Path
) -> None:
    facts = other_browser.facts(file, WEBGPU)
    assert facts.nodes["webgpu"] > 0
    answer = run(file, rows(5), WEBGPU, other_browser)["scores"]
    np.testing.assert_allclose(answer, run(file, rows(5))["scores"], rtol=1e-4, atol=1e-4)
    if "(software)" in facts.build:
        # On a machine with a GPU, the browser uses the GPU, and its times are valid.
        with pytest.raises(MeasurementError, match="software adapter") as refused:
            other_browser.sample(file, WEBGPU, rows(1), runs=1, warmup=0)
        assert "onnx-ops judge" in refused.value.remedy


def test_javascript_runtime_without_programs_reports_packages_to_install(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MeasurementError, match="node is not installed") as missing:
        NodeRuntime(folder=tmp_path).run(file, NODE, (rows(1),))
    assert "apt-get install nodejs" in missing.value.remedy
    assert "not installed" in NodeRuntime(folder=tmp_path).fingerprint(NODE).runtime_version
    for runtime in (NodeRuntime(), BrowserRuntime()):
        (finding,) = runtime.diagnose()
        assert finding.ok
        assert finding.found.startswith("not installed: node, npm")


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        (("onnxruntime-node",), "not name an exact version"),
        (("onnxruntime-node@^1.30.0",), "not name an exact version"),
        (("../elsewhere",), "not name an exact version"),
        (("onnxruntime-web@1.30.0",), "lacks onnxruntime-node"),
    ],
)
def test_node_fingerprint_with_wrong_requirements_raises_user_error(
    requirements: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        NodeRuntime().fingerprint(replace(NODE, env=Environment(requirements=requirements)))


def test_browser_fingerprint_without_default_packages_names_each_missing_one() -> None:
    with pytest.raises(UserError) as refused:
        BrowserRuntime().fingerprint(replace(NODE, env=Environment(requirements=("other@1.0.0",))))
    assert refused.value.remedy == f"Add each package with its version, such as {WEB}, {DRIVER}."


@pytest.mark.parametrize(
    "env", [Environment(memory=10**9), Environment(python="3.12"), Environment(isolated=False)]
)
def test_node_fingerprint_with_unsupported_settings_raises_user_error(env: Environment) -> None:
    with pytest.raises(UserError, match="Leave out"):
        NodeRuntime().fingerprint(replace(NODE, env=env))


def test_node_runtime_with_custom_operators_raises_measurement_error(
    other_node: NodeRuntime, file: Path
) -> None:
    library = CustomOps(path="x.so", digest=digest_bytes(b""), domains=("acme",))
    with pytest.raises(MeasurementError, match="custom operators"):
        other_node.run(file, replace(NODE, custom_ops=(library,)), (rows(1),))


def pid(runtime: NodeRuntime) -> int:
    return int(runtime._held._kept[1]._process.pid)  # type: ignore[index]


def kill_chromium(runtime: BrowserRuntime, role: str) -> None:
    """Kill the browser's main process, or the process of its pages."""
    processes = psutil.Process(pid(runtime)).children(recursive=True)
    for process in processes:
        # A helper process of the browser can end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if "chrom" in process.name() and (
                f"--type={role}" in command if role else "--type=" not in command
            ):
                process.kill()
