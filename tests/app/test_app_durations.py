"""Durations of stages.

A stage has the duration of its last execution, without waiting. The file of durations may be
damaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from onnx_ops.app.context import build_context
from onnx_ops.app.execution import StageExecutor
from onnx_ops.app.running_stages import RunningStages
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.pool import EndedRun, PlacedStage
from onnx_ops.ports import Pools
from onnx_ops.scratch import Durations

KEY = digest_bytes(b"key")


def test_durations_record_keeps_last_duration_of_each_stage(tmp_path: Path) -> None:
    path = tmp_path / "durations" / "p.json"
    durations = Durations(path)
    assert durations.last == {}
    for name, seconds in (("export", 3.0), ("validate", 1.0), ("export", 2.0)):
        durations.record(name, seconds)
    # A duration of 0 is unknown, for example if the worker was killed after it stored the result.
    durations.record("validate", 0.0)
    assert Durations(path).last == {"export": 2.0, "validate": 1.0}
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    "damage", [b"", b'{"export": 1', b"[1]", b'{"export": null}', b'{"export": "x"}', b"\xff"]
)
def test_durations_of_damaged_file_are_empty(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(damage)
    durations = Durations(path)
    assert durations.last == {}
    durations.record("export", 2.0)
    assert durations.last == {"export": 2.0}


def test_durations_record_with_file_in_place_of_folder_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "durations").touch()
    Durations(tmp_path / "durations" / "p.json").record("export", 2.0)


def test_durations_measure_of_failed_stage_records_nothing(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "p.json")
    with pytest.raises(ZeroDivisionError), durations.measure("export"):
        raise ZeroDivisionError
    assert durations.last == {}
    with durations.measure("export"):
        pass
    assert json.loads((tmp_path / "p.json").read_bytes()).keys() == {"export"}


def test_durations_of_stage_in_pool_are_reported_by_its_worker(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {})
    context = build_context(settings)

    def run(placed: PlacedStage, is_done: Callable[[], bool]) -> EndedRun:
        assert not is_done()
        context.store.record(Digest(placed.key), Manifest(files={}))
        return EndedRun(run="1", seconds=7.5)

    pools = create_autospec(Pools, instance=True)
    pools.run.side_effect = run
    running = RunningStages()
    running._pools = pools
    durations = Durations(settings.durations / "p.json")
    executor = StageExecutor(
        settings=settings, context=context, running=running, durations=durations
    )
    executor(Stage(id="export", kind=StageKind.EXPORT, settings={}, hints={"pool": "gpu"}), KEY, {})
    assert durations.last == {"export": 7.5}
