"""Conformance suite for runtimes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.domain.execution import Provider
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports.runtime import LoadSchedule, PairedBenchmarkSchedule, Runtime, StartSchedule
from onnx_ops.testing.models import CLASSES, rows, write_perceptron

ONE_WINDOW = LoadSchedule(concurrency=2, requests=4, rounds=1, windows=1)


class RuntimeSuite:
    """Conformance of a runtime.

    Subclass it, and define the fixtures `runtime` and `target` (which this machine can measure).
    """

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.onnx"
        write_perceptron(path)
        return path

    def test_fingerprint_of_machine_is_stable(self, runtime: Runtime, target: Target) -> None:
        fingerprint = runtime.fingerprint(target)
        assert fingerprint == runtime.fingerprint(target)
        assert fingerprint.runtime == target.runtime
        assert fingerprint.cores > 0
        assert fingerprint.memory_bytes > 0
        assert any(map(str.isdecimal, fingerprint.runtime_version))

    def test_facts_name_providers_that_ran_nodes(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        facts = runtime.facts(file, target)
        assert facts.asked == tuple(provider.name for provider in target.providers)
        assert set(facts.asked) <= set(facts.used)
        assert sum(facts.nodes.values()) > 0
        assert set(facts.nodes) <= set(facts.used)
        assert facts.version[0].isdecimal()
        assert facts.clock_resolution_ns is not None
        assert 0 < facts.clock_resolution_ns < 1e6

    def test_run_of_batches_returns_ordered_outputs_by_name(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        feeds = (rows(1), rows(5), rows(0), rows(17))
        answers = runtime.run(file, target, feeds)
        assert [answer["scores"].shape for answer in answers] == [
            (len(feed["x"]), CLASSES) for feed in feeds
        ]
        assert {answer["scores"].dtype for answer in answers} == {np.dtype(np.float32)}
        alone = runtime.run(file, target, (feeds[1],))[0]["scores"]
        np.testing.assert_array_equal(answers[1]["scores"], alone)

    def test_sample_returns_positive_duration_of_each_run(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        samples = runtime.sample(file, target, rows(1), runs=7, warmup=2)
        assert samples.nanoseconds.shape == samples.preempted.shape == (7,)
        assert samples.nanoseconds.dtype == np.int64
        assert samples.preempted.dtype == np.bool_
        assert int(samples.nanoseconds.astype(np.int64).min()) > 0

    def test_benchmark_returns_positive_durations_by_each_axis_of_schedule(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        schedule = PairedBenchmarkSchedule(rounds=2, blocks=3, runs=4, warmup=1, seed=5)
        samples = runtime.benchmark((file, file, file), target, rows(1), schedule)
        assert samples.nanoseconds.shape == samples.preempted.shape == (2, 3, 3, 4)
        assert samples.probe is None or samples.probe.shape == (2, 3, 3, 4)
        assert samples.calls >= 1
        assert int(samples.nanoseconds.astype(np.int64).min()) > 0

    def test_under_load_times_windows_of_each_model(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        schedule = LoadSchedule(concurrency=3, requests=20, rounds=2, windows=3, seed=5)
        samples = runtime.under_load((file, file, file), target, rows(1), schedule)
        assert samples.nanoseconds.shape == (2, 3, 3)
        assert samples.requests == 20
        assert int(samples.nanoseconds.astype(np.int64).min()) > 0

    def test_starts_return_positive_durations_and_peak_memory_or_unknown(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        samples = runtime.starts(
            (file, file), target, rows(1), StartSchedule(rounds=2, requests=3, seed=5)
        )
        for figure in (samples.load_ns, samples.first_ns, samples.peak_bytes):
            assert figure.shape == (2, 2)
        assert int(samples.load_ns.astype(np.int64).min()) > 0
        assert int(samples.first_ns.astype(np.int64).min()) > 0
        peak = samples.peak_bytes.astype(np.int64)
        assert ((peak > 0) | (peak == -1)).all()

    def test_target_with_missing_provider_raises_measurement_error(
        self, runtime: Runtime, target: Target, file: Path
    ) -> None:
        elsewhere = replace(target, providers=(Provider(name="NoSuchExecutionProvider"),))
        for measure in (
            lambda: runtime.facts(file, elsewhere),
            lambda: runtime.run(file, elsewhere, (rows(1),)),
            lambda: runtime.sample(file, elsewhere, rows(1), runs=1, warmup=0),
            lambda: runtime.benchmark(
                (file, file), elsewhere, rows(1), PairedBenchmarkSchedule(rounds=1)
            ),
            lambda: runtime.under_load((file, file), elsewhere, rows(1), ONE_WINDOW),
            lambda: runtime.starts((file, file), elsewhere, rows(1), StartSchedule(rounds=1)),
        ):
            with pytest.raises(MeasurementError, match="NoSuchExecutionProvider"):
                measure()

    def test_runtime_with_invalid_file_or_feed_raises_measurement_error(
        self, runtime: Runtime, target: Target, file: Path, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken.onnx"
        broken.write_bytes(file.read_bytes()[:100])
        wrong = {"x": np.zeros((1, 3), dtype=np.float32)}
        benchmark, start = PairedBenchmarkSchedule(rounds=1), StartSchedule(rounds=1)
        for measure in (
            lambda: runtime.run(broken, target, (rows(1),)),
            lambda: runtime.run(file, target, (wrong,)),
            lambda: runtime.sample(file, target, {"y": rows(1)["x"]}, runs=1, warmup=0),
            lambda: runtime.facts(broken, target),
            lambda: runtime.benchmark((file, broken), target, rows(1), benchmark),
            lambda: runtime.under_load((file, file), target, wrong, ONE_WINDOW),
            lambda: runtime.starts((broken, file), target, rows(1), start),
            lambda: runtime.starts((file, file), target, wrong, start),
        ):
            with pytest.raises(MeasurementError):
                measure()
        # The refused call must not have a side effect on later calls.
        assert len(runtime.run(file, target, (rows(1),))) == 1
