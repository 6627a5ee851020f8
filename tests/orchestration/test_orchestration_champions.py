"""The measurement of champions as a flow run: task runs, table, state, messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from onnx_ops.domain.notification import NotificationKind
from onnx_ops.testing.fakes import FakeNotifier, FakeWorld
from tests.app.champion_parts import SLOWER, ChampionScene
from tests.orchestration.flow_runs import artifacts_of, in_flow, names_of_task_runs, run_of

if TYPE_CHECKING:
    from prefect import State


def watched(scene: ChampionScene) -> State[Any]:
    from onnx_ops.orchestration.champions import check_champions

    return in_flow(lambda: check_champions(scene.context, scene.perform, (), by="flow"))


def table(state: State[Any]) -> list[dict[str, str]]:
    """Return the rows of the run's tables."""
    return [
        row
        for artifact in artifacts_of(run_of(state)).values()
        for row in yaml.safe_load(str(artifact.data))
    ]


def test_champions_flow_with_failed_recheck_fails_and_notifies(
    prefect_server: None, tmp_path: Path
) -> None:
    scene = ChampionScene(tmp_path, now=(SLOWER,)).remembered()
    scene.world.notifiers["chat"] = chat = FakeNotifier()
    state = watched(scene)
    assert (state.type.value, state.name) == ("FAILED", "RecheckFailed")
    assert "digits v1 @ cpu: failed. latency: " in (state.message or "")
    assert [notice.what for notice in chat.received] == [NotificationKind.RECHECK_FAILED]
    (row,) = table(state)
    assert (row["pipeline"], row["version"], row["verdict"]) == ("p", "1", "failed")
    assert row["changed"] == "runtime onnxruntime 2, was onnxruntime 1"
    assert names_of_task_runs(state, "digits v1 @ cpu") == ["digits v1 @ cpu"]


@pytest.mark.parametrize(
    ("remembered", "kind", "name", "word"),
    [
        (True, "COMPLETED", "Completed", "as it was"),
        (False, "FAILED", "EnvironmentFailed", "not measured"),
    ],
)
def test_champions_flow_with_passed_or_impossible_recheck_sends_no_notification(
    prefect_server: None, remembered: bool, kind: str, name: str, word: str, tmp_path: Path
) -> None:
    scene = ChampionScene(tmp_path).remembered() if remembered else ChampionScene(tmp_path)
    scene.world.notifiers["chat"] = chat = FakeNotifier()
    state = watched(scene)
    assert (state.type.value, state.name) == (kind, name)
    assert chat.received == []
    assert [row["verdict"] for row in table(state)] == [word]


def test_champions_flow_without_champions_completes(prefect_server: None, tmp_path: Path) -> None:
    scene = ChampionScene(tmp_path)
    scene.context = FakeWorld().context()
    state = watched(scene)
    assert state.is_completed()
    assert "no champions yet" in (state.message or "")
    assert table(state) == []
