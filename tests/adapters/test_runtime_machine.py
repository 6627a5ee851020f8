"""What a machine lacks for a target is told before anything is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.runtimes.hardware import lacking_flags
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure
from onnx_ops.ports.models import LoadSchedule, RaceSchedule, StartSchedule
from onnx_ops.testing.models import rows, write_perceptron

TARGET = Target(name="cpu-1t")


def test_a_cpu_without_the_features_of_a_target_measures_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    runtime, elsewhere = OnnxRuntime(), replace(TARGET, requires_cpu_flags=("no_such_flag",))
    for measure in (
        lambda: runtime.facts(path, elsewhere),
        lambda: runtime.run(path, elsewhere, (rows(1),)),
        lambda: runtime.sample(path, elsewhere, rows(1), runs=1, warmup=0),
        lambda: runtime.race((path, path), elsewhere, rows(1), RaceSchedule(heats=1)),
        lambda: runtime.under_load((path, path), elsewhere, rows(1), LoadSchedule(concurrency=1, requests=1, heats=1)),
        lambda: runtime.starts((path, path), elsewhere, rows(1), StartSchedule(heats=1)),
    ):
        with pytest.raises(MeasurementFailure, match="lacks no_such_flag") as caught:
            measure()
        assert "\n" not in str(caught.value)
        assert "cpu-1t" in caught.value.where


def test_features_that_the_machine_has_are_not_lacking(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    present = OnnxRuntime().fingerprint(TARGET).cpu_flags
    assert lacking_flags((*present, "no_such_flag")) == ("no_such_flag",)
    target = replace(TARGET, requires_cpu_flags=present)
    assert OnnxRuntime().run(path, target, (rows(1),))[0]["scores"].shape == (1, 3)


def test_a_provider_that_fails_is_not_replaced_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime's own fallback prints, and goes on with other providers."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(MeasurementFailure) as caught:
        OnnxRuntime().facts(path, TARGET)
    assert "\n" not in str(caught.value)
    assert "Falling back" not in "".join(capfd.readouterr())
