"""ONNX Runtime as a runtime of targets, its plug-ins, and its cache folder.

`{cache}` stands for that folder.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.adapters.runtimes import onnxruntime as adapter
from onnx_ops.adapters.runtimes.hardware import read_conditions
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime, run_load_window
from onnx_ops.adapters.runtimes.onnxruntime_session import (
    build_session,
    list_devices,
    list_providers,
    resolve_provider_options,
)
from onnx_ops.domain.execution import Provider, SessionSettings
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import LoadSchedule, PairedBenchmarkSchedule
from onnx_ops.testing.models import rows, write_perceptron
from onnx_ops.testing.runtimes import RuntimeSuite
from tests.support.fixtures import fixed
from tests.support.golden import Golden

CPU = Target(name="cpu-1t")


class TestOnnxRuntime(RuntimeSuite):
    runtime = fixed(OnnxRuntime())
    target = fixed(CPU)


def test_onnxruntime_fingerprint_of_target_does_not_import_onnxruntime() -> None:
    code = """
import json, sys
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
found = OnnxRuntime().fingerprint(Target(name="cpu"))
print(json.dumps([found.runtime_version, sorted({m.partition(".")[0] for m in sys.modules})]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    version, modules = json.loads(done.stdout)
    assert version[0].isdecimal()
    assert not {"onnxruntime", "onnx", "numpy"} & set(modules)


def test_onnxruntime_facts_of_model_count_nodes_by_provider(file: Path) -> None:
    whole = OnnxRuntime().facts(file, replace(CPU, session=SessionSettings(graph_level="disabled")))
    assert whole.nodes == {"CPUExecutionProvider": 6}
    fused = OnnxRuntime().facts(file, CPU)
    assert 0 < fused.nodes["CPUExecutionProvider"] < 6
    assert fused.used == ("CPUExecutionProvider",)
    assert fused.version
    assert fused.build


def test_session_for_target_receives_its_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    made: list[tuple[Any, ...]] = []

    def session(path: str, options: object, *, providers: object, **others: object) -> object:
        made.append((path, options, providers))
        return original(path, options, providers=providers, **others)

    original = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    target = Target(
        name="cpu-2t",
        providers=(
            Provider(
                name="CPUExecutionProvider", options={"arena_extend_strategy": "kSameAsRequested"}
            ),
        ),
        session=SessionSettings(
            intra_op_threads=2,
            inter_op_threads=3,
            spinning=True,
            graph_level="basic",
            config={"session.set_denormal_as_zero": "1"},
        ),
    )
    OnnxRuntime().run(file, target, (rows(1),))
    ((_, options, providers),) = made
    assert options.intra_op_num_threads == 2
    assert options.inter_op_num_threads == 3
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.inter_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert providers == [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]


def test_onnxruntime_facts_with_missing_provider_raise_measurement_error(file: Path) -> None:
    target = replace(CPU, providers=(Provider(name="CUDAExecutionProvider"), *CPU.providers))
    if "CUDAExecutionProvider" in list_providers():
        target = replace(CPU, providers=(Provider(name="NoneExecutionProvider"),))
    with pytest.raises(MeasurementError, match="CPUExecutionProvider"):
        OnnxRuntime().facts(file, target)


@pytest.mark.parametrize("config", [{"": "1"}, {"session.intra_op_thread_affinities": "nowhere"}])
def test_onnxruntime_with_refused_session_setting_raises_measurement_error(
    file: Path, config: dict[str, str]
) -> None:
    target = replace(CPU, session=SessionSettings(intra_op_threads=2, config=config))
    with pytest.raises(MeasurementError):
        OnnxRuntime().run(file, target, (rows(1),))


def test_onnxruntime_facts_of_too_new_model_raise_measurement_error(tmp_path: Path) -> None:
    path = tmp_path / "future.onnx"
    write_perceptron(path, opset=18, ir_version=99)
    with pytest.raises(MeasurementError, match=r"future\.onnx"):
        OnnxRuntime().facts(path, CPU)


@pytest.mark.nightly
def test_onnxruntime_benchmark_builds_sessions_each_round_in_seeded_order(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.onnx"
    write_perceptron(other)
    built: list[str] = []
    build = build_session

    def spy(model: Path, *arguments: object, **settings: object) -> object:
        built.append(model.name)
        return build(model, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter, "build_session", spy)
    orders = []
    for seed in (1, 1, 2):
        built.clear()
        schedule = PairedBenchmarkSchedule(rounds=4, blocks=1, runs=1, warmup=0, seed=seed)
        OnnxRuntime().benchmark((file, other), CPU, rows(1), schedule)
        assert sorted(built) == ["model.onnx"] * 4 + ["other.onnx"] * 4
        assert all(set(built[i : i + 2]) == {"model.onnx", "other.onnx"} for i in range(0, 8, 2))
        orders.append(tuple(built))
    assert orders[0] == orders[1] != orders[2]
    assert {orders[0][i] for i in range(0, 8, 2)} == {"model.onnx", "other.onnx"}


def test_onnxruntime_benchmark_of_two_models_keeps_their_order_in_axis_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake clock distinguishes the models by the times of their runs."""
    for name in ("baseline", "candidate"):
        write_perceptron(tmp_path / f"{name}.onnx")
    times = {"baseline.onnx": 10, "candidate.onnx": 20}

    def fake(model: Path, *_: object, **__: object) -> str:
        return model.name

    monkeypatch.setattr(adapter, "build_session", fake)
    monkeypatch.setattr(
        adapter, "_timed", lambda session, _: lambda: (times[session], session == "candidate.onnx")
    )
    samples = OnnxRuntime().benchmark(
        (tmp_path / "baseline.onnx", tmp_path / "candidate.onnx"),
        CPU,
        rows(1),
        PairedBenchmarkSchedule(rounds=3, seed=4),
    )
    assert (samples.nanoseconds[:, :, 0] == 10).all()
    assert (samples.nanoseconds[:, :, 1] == 20).all()
    assert not samples.preempted[:, :, 0].any()
    assert samples.preempted[:, :, 1].all()


def test_onnxruntime_sample_disables_garbage_collection_while_timing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    make = adapter._timed

    def watched(session: object, feed: object) -> object:
        timed = make(session, feed)  # type: ignore[arg-type]

        def run() -> tuple[int, bool]:
            seen.append(gc.isenabled())
            return timed()

        return run

    monkeypatch.setattr(adapter, "_timed", watched)
    assert gc.isenabled()
    OnnxRuntime().sample(file, CPU, rows(1), runs=3, warmup=1)
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(MeasurementError):
        OnnxRuntime().sample(file, CPU, {"x": np.zeros((1, 2), np.float32)}, runs=3, warmup=1)
    assert gc.isenabled()


def test_read_conditions_of_machine_returns_strings() -> None:
    found = read_conditions()
    assert "load" in found
    assert len(found["load"].split()) == 3
    assert {type(value) for value in found.values()} == {str}
    assert all(found.values())


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 1), (1, 7), (4, 40), (5, 3)])
def test_run_load_window_answers_each_request_once(concurrency: int, requests: int) -> None:
    answered: list[int] = []
    with ThreadPoolExecutor(concurrency) as pool:
        assert run_load_window(lambda: answered.append(1), pool, concurrency, requests) > 0
    assert len(answered) == requests


def test_run_load_window_keeps_requested_concurrency() -> None:
    """Each call waits until enough others run at the same time.

    With fewer threads, the barrier breaks after 30 s.
    """
    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        run_load_window(lambda: together.wait(timeout=30), pool, 4, 12)


def test_run_load_window_ends_with_last_answer() -> None:
    delays_s = [0.02, 0.0]
    entered: list[int] = []
    answered: list[int] = []

    def call() -> None:
        entered.append(time.perf_counter_ns())
        time.sleep(delays_s.pop())
        answered.append(time.perf_counter_ns())

    with ThreadPoolExecutor(2) as pool:
        assert run_load_window(call, pool, 2, 2) >= max(answered) - min(entered)


def test_run_load_window_with_failing_call_raises_its_error() -> None:
    answered: list[int] = []

    def call() -> None:
        answered.append(1)
        if len(answered) == 3:
            raise ValueError("the third")

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="the third"):
        run_load_window(call, pool, 2, 10_000)
    assert len(answered) < 10_000


def test_run_load_window_with_too_few_threads_raises_measurement_error() -> None:
    with ThreadPoolExecutor(2) as pool:
        start = pool.submit
        left = [1]

        def limited(work: object) -> object:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            return start(work)  # type: ignore[arg-type]

        pool.submit = limited  # type: ignore[assignment, method-assign]
        with pytest.raises(MeasurementError, match="2 threads could not be started"):
            run_load_window(lambda: None, pool, 2, 10)


@pytest.mark.nightly
def test_onnxruntime_under_load_separates_models_and_seeds_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("baseline", "candidate"):
        write_perceptron(tmp_path / f"{name}.onnx")
    built: list[str] = []
    called: list[str] = []
    times = {"baseline.onnx": 10, "candidate.onnx": 20}

    def session(model: Path, *_: object) -> str:
        built.append(model.name)
        return model.name

    def spent(call: object, *_: object) -> int:
        called.append(str(call))
        return times[str(call)]

    monkeypatch.setattr(adapter, "build_session", session)
    monkeypatch.setattr(adapter, "_call", lambda session, _: session)
    monkeypatch.setattr(adapter, "run_load_window", spent)
    schedule = LoadSchedule(concurrency=2, requests=5, rounds=3, windows=4, seed=2)
    runs = []
    for _ in range(2):
        built.clear()
        called.clear()
        samples = OnnxRuntime().under_load(
            (tmp_path / "baseline.onnx", tmp_path / "candidate.onnx"), CPU, rows(1), schedule
        )
        runs.append((tuple(built), tuple(called)))
        assert samples.nanoseconds.shape == (3, 4, 2)
        np.testing.assert_array_equal(samples.nanoseconds[..., 0], 10)
        np.testing.assert_array_equal(samples.nanoseconds[..., 1], 20)
    assert runs[0] == runs[1]
    assert sorted(runs[0][0]) == ["baseline.onnx"] * 3 + ["candidate.onnx"] * 3
    assert len(runs[0][1]) == 3 * (4 + 1) * 2, "each session has one window that is not timed"
    assert {runs[0][1][i] for i in range(0, 30, 2)} == set(times), (
        "either side comes first now and then"
    )


def test_onnxruntime_facts_of_invalid_model_raise_measurement_error_without_fallback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime's fallback would print a message and continue with other providers."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(MeasurementError) as caught:
        OnnxRuntime().facts(path, CPU)
    assert "\n" not in str(caught.value)
    assert "Falling back" not in "".join(capfd.readouterr())


TENSORRT = Provider(
    name="TensorrtExecutionProvider", options={"device_id": "1", "trt_engine_cache_path": "{cache}"}
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Target]:
    """Return a function that makes a target whose provider comes with a package.

    The function takes the source of the package.
    """

    def write(source: str) -> Target:
        (tmp_path / "acme_provider.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_provider", raising=False)
        return Target(
            name="acme",
            providers=(Provider(name="AcmeExecutionProvider", package="acme_provider"),),
        )

    return write


def refused(file: Path, target: Target) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        OnnxRuntime().facts(file, target)
    assert caught.value.where == "target acme"
    return caught.value


def test_onnxruntime_with_missing_plugin_package_raises_measurement_error_with_remedy(
    file: Path,
) -> None:
    error = refused(
        file, Target(name="acme", providers=(Provider(name="Acme", package="no_such_provider"),))
    )
    assert error.what == "package no_such_provider is not installed"
    assert error.remedy.startswith("Run `pip install no-such-provider` ")
    assert "no-such-provider==VERSION to `env.requirements`" in error.remedy


def test_onnxruntime_with_package_without_plugin_raises_measurement_error(
    file: Path, package: Callable[[str], Target], golden: Golden
) -> None:
    golden("errors", refused(file, package("")).what)


@pytest.mark.parametrize("library", ["/nowhere/libacme.so", onnx.__file__])
def test_onnxruntime_with_unloadable_plugin_library_raises_measurement_error(
    file: Path, package: Callable[[str], Target], library: str
) -> None:
    error = refused(file, package(f"def get_library_path():\n    return {library!r}\n"))
    assert "AcmeExecutionProvider cannot be loaded" in error.what
    assert library in error.why


def test_onnxruntime_fingerprint_with_plugin_includes_its_version() -> None:
    plain = OnnxRuntime().fingerprint(Target(name="cpu-1t"))
    plugged = OnnxRuntime().fingerprint(
        Target(name="x", providers=(Provider(name="X", package="numpy"),))
    )
    assert plugged.runtime_version == f"{plain.runtime_version}, numpy {np.__version__}"
    assert plugged.digest() != plain.digest()


def test_list_devices_of_installed_build_includes_cpu() -> None:
    assert "CPUExecutionProvider" in list_providers()
    assert any(device.startswith("CPUExecutionProvider on CPU (") for device in list_devices())


class TestCache:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def folder(
        self, file: Path, machine: HardwareFingerprint, provider: Provider = TENSORRT
    ) -> Path:
        values = resolve_provider_options(provider, file, lambda: machine)
        assert values["device_id"] == provider.options["device_id"]
        return Path(values["trt_engine_cache_path"])

    def test_cache_folder_depends_on_model_machine_version_and_options(self, file: Path) -> None:
        here = OnnxRuntime().fingerprint(Target(name="cpu-1t"))
        first = self.folder(file, here)
        assert first.is_dir()
        assert self.folder(file, here) == first
        others = {
            self.folder(file, replace(here, runtime_version="0")),
            self.folder(file, replace(here, accelerators=("H100",), driver="550.54")),
            self.folder(
                file, here, replace(TENSORRT, options={**TENSORRT.options, "device_id": "0"})
            ),
        }
        proto = onnx.load(file)
        weight = proto.graph.initializer[0]
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 2, weight.name))
        onnx.save(proto, file)
        others.add(self.folder(file, here))
        assert len(others | {first}) == 5

    def test_cache_folder_depends_on_external_weights(self, tmp_path: Path, file: Path) -> None:
        here = OnnxRuntime().fingerprint(Target(name="cpu-1t"))
        proto = onnx.load(file)
        path = tmp_path / "large" / "model.onnx"
        path.parent.mkdir()
        onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
        first = self.folder(path, here)
        weights = path.with_name("weights")
        weights.write_bytes(bytes(len(weights.read_bytes())))
        assert self.folder(path, here) != first

    def test_resolve_provider_options_of_plain_values_creates_no_folder(
        self, tmp_path: Path, file: Path
    ) -> None:
        provider = Provider(name="X", options={"a": "b"})
        assert resolve_provider_options(provider, file, lambda: pytest.fail("not needed")) == {
            "a": "b"
        }
        assert not (tmp_path / "cache").exists()
