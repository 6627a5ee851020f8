"""A sample of the onnx package's test models, those that once were trouble among them; the whole is a nightly test."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.backend_models import Outcome, hold_against_itself, look, outcomes, write_models
from tests.support.suite import Sweep

TROUBLE = {
    "node/test_stft": ("MeasurementError", signal.SIGFPE.name),
    "node/test_constantofshape_int_zeros": ("UserError", "has another shape for other rows"),
    "node/test_nonzero_example": ("UserError", "has another shape for other rows"),
}


SAMPLE = {
    name: operator
    for line in (Path(__file__).parent / "backend_sample.txt").read_text(encoding="utf-8").splitlines()
    for name, _, operator in [line.partition(" ")]
}
"""Forty models that chance has chosen, and those of `TROUBLE`; with the module of the onnx package that makes them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = write_models(tmp_path_factory.mktemp("models"), sorted(set(SAMPLE.values()) - {""}))
    return {"/".join(path.parts[-3:-1]): path for path in found}


def test_a_sample_ends_in_verdicts_and_typed_errors(models: dict[str, Path], sweep: Sweep) -> None:
    found = tuple(outcomes([models[name] for name in sweep(name for name in SAMPLE if name not in TROUBLE)]))
    assert [one for one in found if one.fault] == []
    assert {one.tool for one in found} == {"inspect", "judge"}
    assert {"pass", "valid"} <= {one.kind for one in found}


@pytest.mark.parametrize("name", TROUBLE)
def test_what_once_was_trouble_is_told(name: str, models: dict[str, Path]) -> None:
    kind, said = TROUBLE[name]
    assert look(models[name]).kind == "valid"
    found = hold_against_itself(models[name])
    assert found.kind == kind
    assert said in found.text


def test_a_process_that_dies_is_told_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every process dies at once, since its interpreter ends with 3."""
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nread line\nexit 3\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    paths = [tmp_path / "node" / name / "model.onnx" for name in ("a", "b")]
    assert list(outcomes(paths)) == [
        Outcome(model=f"node/{name}", tool="inspect", kind="crashed", text="exit 3") for name in ("a", "b")
    ]
