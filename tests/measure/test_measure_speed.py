"""Speed measurements up to each interim analysis, with a scripted runtime."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.evidence import LatencySamples
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.gate import (
    ColdStartGate,
    LatencyGate,
    MeasurementRequest,
    MemoryGate,
    SizeGate,
    ThroughputGate,
    derive_measurement_request,
)
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.speed import (
    FEWEST_EACH,
    FEWEST_WINDOWS,
    MOST_REQUESTS,
    MOST_WINDOWS,
    SpeedMeasurements,
    measure_scheduling,
    measure_speed,
    measure_starts,
    measure_throughput,
)
from onnx_ops.measure.timing import BLOCKS, LONGEST_S, RUNS, SHORT, measure_latency, plan_schedule
from onnx_ops.ports import PairedBenchmarkSchedule, RunSamples
from onnx_ops.statistics.latency import FULL_RUN, LOOKS
from onnx_ops.testing.models import rows, write_perceptron
from tests.measure.scripted import Scripted

CPU = Target(name="cpu")
MODEL = Path("model.onnx")


COSTS = {"candidate": 1.2, "fp32": 1.0, "champion": 1.1}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    for name in COSTS:
        (tmp_path / name).write_text(name, encoding="utf-8")
    return {name: tmp_path / name for name in COSTS}


def scripted(models: dict[str, Path], *, noise: float = 0.001, **changes: Any) -> Scripted:
    return Scripted({path: COSTS[name] for name, path in models.items()}, noise=noise, **changes)


def measured(
    runtime: Scripted, models: dict[str, Path], asked: MeasurementRequest, *names: str
) -> SpeedMeasurements:
    baselines = {name: models[name] for name in names}
    return measure_speed(runtime, CPU, models["candidate"], baselines, rows(2), asked, seed=1)


EVERYTHING = MeasurementRequest(
    throughput=(2, 8), starts=True, tolerances={"latency": (0.05,), "throughput": (0.05,)}
)


def ratio(pairs: tuple[tuple[float, ...], ...]) -> float:
    return math.exp(float(np.median(np.array(pairs))))


def test_measure_speed_without_further_request_measures_latency_only(
    models: dict[str, Path],
) -> None:
    runtime = scripted(models)
    found = measured(runtime, models, MeasurementRequest(), "fp32")
    assert (found.throughput, found.starts, found.ratios) == ((), None, ())
    assert {type(schedule) for schedule in runtime.asked} == {PairedBenchmarkSchedule}
    assert found.latency.batch == 2


def test_measure_speed_with_two_baselines_compares_only_latency_with_both(
    models: dict[str, Path],
) -> None:
    found = measured(scripted(models), models, EVERYTHING, "fp32", "champion")
    assert [c.against for c in found.comparisons] == ["fp32", "champion"]
    assert [r.figure for r in found.ratios] == [
        "concurrency 2",
        "concurrency 8",
        "load",
        "first",
        "peak",
    ]
    for r in found.ratios:
        assert r.against == "champion"
        assert ratio(r.log_ratios) == pytest.approx(1.2 / 1.1, rel=0.01)
        assert ratio(r.self_log_ratios) == pytest.approx(1.0, rel=0.01)
    assert [t.concurrency for t in found.throughput] == [2, 8]
    assert found.throughput[0].per_second[0] == pytest.approx(1e9 / 1.2e6, rel=0.01)
    assert found.starts is not None
    assert len(found.starts.load_s) == len(found.starts.peak_bytes) == 10
    assert {
        "throughput/8/champion/nanoseconds",
        "starts/champion/peak",
        "starts/alone/load",
    } <= set(found.raw)


def test_measure_speed_with_incompatible_champion_omits_it_but_requires_export(
    models: dict[str, Path],
) -> None:
    found = measured(
        scripted(models, refused=(models["champion"],)), models, EVERYTHING, "fp32", "champion"
    )
    assert [c.against for c in found.comparisons] == ["fp32"]
    assert found.ratios == ()
    with pytest.raises(MeasurementError):
        measured(scripted(models, refused=(models["fp32"],)), models, EVERYTHING, "fp32")


def test_measure_speed_of_first_release_returns_values_without_comparisons(
    models: dict[str, Path],
) -> None:
    first_release = measured(scripted(models), models, EVERYTHING)
    assert (first_release.comparisons, first_release.ratios, len(first_release.throughput)) == (
        (),
        (),
        2,
    )
    assert first_release.starts is not None


def test_measure_speed_continues_until_limits_are_decided(models: dict[str, Path]) -> None:
    def pairs(runtime: Scripted, asked: MeasurementRequest) -> int:
        found = measured(runtime, models, asked, "fp32")
        return len(next(r for r in found.ratios if r.figure == "concurrency 4").log_ratios)

    asked = MeasurementRequest(throughput=(4,), tolerances={"throughput": (0.05,)})
    assert pairs(scripted(models), asked) == LOOKS[0]
    assert pairs(scripted(models, noise=2.0), asked) >= FULL_RUN
    assert pairs(scripted(models, noise=0.5), replace(asked, tolerances={})) == LOOKS[0], (
        "no limit, nothing to decide"
    )
    assert (
        pairs(scripted(models, noise=0.01), replace(asked, tolerances={"throughput": (0.2,)}))
        > LOOKS[0]
    )


def test_measure_speed_without_peak_memory_omits_it(models: dict[str, Path]) -> None:
    runtime = scripted(models, peak=False)
    asked = MeasurementRequest(starts=True, tolerances={"cold_start": (0.5,), "memory": (0.01,)})
    found = measured(runtime, models, asked, "fp32")
    assert [r.figure for r in found.ratios] == ["load", "first"]
    assert len(found.ratios[0].log_ratios) == LOOKS[0]
    assert found.starts is not None
    assert found.starts.peak_bytes == ()


@pytest.mark.parametrize(
    ("unit_ns", "concurrency"), [(1.0, 1), (1e3, 256), (5e3, 4), (1e6, 4), (5e8, 16)]
)
def test_measure_throughput_of_fast_and_slow_models_keeps_window_limits(
    unit_ns: float, concurrency: int
) -> None:
    runtime = Scripted({MODEL: 1.0}, unit_ns=unit_ns)
    measure_throughput(runtime, MODEL, CPU, rows(1), concurrency, 0)
    (schedule,) = runtime.asked
    assert (
        FEWEST_EACH * concurrency
        <= schedule.requests
        <= max(FEWEST_EACH * concurrency, MOST_REQUESTS)
    )
    assert FEWEST_WINDOWS <= schedule.windows <= MOST_WINDOWS


def test_measure_starts_and_throughput_without_duration_raise_measurement_error() -> None:
    with pytest.raises(MeasurementError, match="not above the resolution of the clock"):
        measure_starts(Scripted({MODEL: 0.0}), MODEL, CPU, rows(1), 0)
    with pytest.raises(MeasurementError, match="no measurable time"):
        measure_throughput(Scripted({MODEL: 0.0}), MODEL, CPU, rows(1), 4, 0)


@pytest.mark.parametrize(
    ("lost", "kept"),
    [((0, 3), (20, 30)), ((), (10, 20, 30, 1000)), ((0, 1, 2, 3), (10, 20, 30, 1000))],
)
def test_measure_latency_excludes_preempted_runs_unless_all_were_preempted(
    lost: tuple[int, ...], kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = RunSamples(
        nanoseconds=np.array([10, 30, 20, 1000]), preempted=np.isin(np.arange(4), lost)
    )
    monkeypatch.setattr(Scripted, "sample", lambda *_, **__: samples)
    latency, _ = measure_latency(Scripted({}), MODEL, CPU, rows(1))
    assert (latency.runs, latency.preempted, latency.sorted_ns) == (4, len(lost), kept)
    assert latency.quantiles_ns["p50"] == np.median(kept)


def test_derive_measurement_request_returns_measurements_and_tolerances_of_gates() -> None:
    assert (
        derive_measurement_request([SizeGate(max=1), LatencyGate(p99=0.1)]) == MeasurementRequest()
    )
    found = derive_measurement_request(
        [
            LatencyGate(max_regression=0.05, faster_than="fp32", min_speedup=0.25),
            ThroughputGate(concurrency=8, min=1.0),
            ThroughputGate(concurrency=2, max_regression=0.1),
            MemoryGate(max=1),
        ]
    )
    speedup: Any = pytest.approx(-0.2)
    assert found == MeasurementRequest(
        throughput=(2, 8),
        starts=True,
        tolerances={"latency": (0.05,), "speedup": (speedup,), "throughput": (0.1,)},
    )
    assert derive_measurement_request([ColdStartGate(load=1.0)]).starts


def test_plan_schedule_of_slow_model_reduces_blocks_and_runs() -> None:
    quick, slow, very_slow = (plan_schedule(run_s) for run_s in (1e-4, 5e-3, 1.0))
    assert (quick.blocks, quick.runs) == (BLOCKS[1], RUNS)
    assert (slow.blocks, slow.runs) == (BLOCKS[0], RUNS)
    assert (very_slow.blocks, very_slow.runs, very_slow.warmup) == (BLOCKS[0], SHORT, SHORT)


def test_measure_speed_beyond_time_limit_ends_at_second_interim_analysis(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, int(LONGEST_S * 0.6)))
    # Patch only this module: threads of other tests read the real clock.
    patched = SimpleNamespace(**{**vars(time), "monotonic": lambda: float(next(clock))})
    monkeypatch.setattr("onnx_ops.measure.timing.time", patched)
    asked = MeasurementRequest(
        throughput=(4,), tolerances={"latency": (0.05,), "throughput": (0.0,)}
    )
    found = measured(scripted(models, noise=2.0), models, asked, "fp32")
    assert len(found.ratios[0].log_ratios) == LOOKS[1]


def scheduled(
    folder: Path,
    *,
    run_s: float = 1e-3,
    cores: int = 4,
    batch: str | int = "batch",
    refused: bool = False,
    **target: Any,
) -> dict[tuple[int, int], float]:
    model = write_perceptron(folder / "model.onnx", batch=batch)
    runtime = Scripted({model: run_s}, unit_ns=1e9, noise=0.01, refused=[model] if refused else [])
    latency = LatencySamples(batch=1, runs=1, preempted=0, quantiles_ns={"p50": run_s * 1e9})
    ways = measure_scheduling(runtime, model, replace(CPU, **target), rows(32), latency, cores, 1)
    return {(way.threads, way.rows): way.rows_per_s for way in ways}


def test_measure_scheduling_divides_rows_among_threads(tmp_path: Path) -> None:
    rates = scheduled(tmp_path)
    assert list(rates) == [(1, 1), (1, 16), (2, 1), (2, 10), (4, 1), (4, 6)]
    assert all(rate == pytest.approx(rows * 1000, rel=0.05) for (_, rows), rate in rates.items())


@pytest.mark.parametrize(
    ("how", "ways"),
    [
        ({"run_s": 2e-4}, []),
        ({"run_s": 0.2}, []),
        ({"refused": True}, []),
        ({"runtime": "javascript"}, []),
        ({"cores": 1}, [(1, 1), (1, 16)]),
        (
            {"cores": 6, "session": SessionSettings(intra_op_threads=2)},
            [(1, 1), (1, 16), (2, 1), (2, 10), (3, 1), (3, 8)],
        ),
        ({"session": SessionSettings(intra_op_threads=0)}, [(1, 1), (1, 16)]),
        ({"cores": 2, "batch": 3}, [(1, 3), (2, 3)]),
    ],
    ids=[
        "on the event loop",
        "too slow",
        "refused",
        "no server",
        "one core",
        "two threads",
        "all threads",
        "fixed",
    ],
)
def test_measure_scheduling_measures_only_configurations_that_server_can_use(
    tmp_path: Path, how: dict[str, Any], ways: list[tuple[int, int]]
) -> None:
    assert list(scheduled(tmp_path, **how)) == ways
