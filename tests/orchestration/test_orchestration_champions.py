"""The watch over champions as a flow run: task runs, table, state, messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import yaml

from onnx_ops.domain.notification import NotificationKind
from onnx_ops.testing.fakes import FakeNotifier, FakeWorld
from tests.app.champion_parts import SLOWER, Throne
from tests.orchestration.test_orchestration_rollouts import run_of, task_runs

if TYPE_CHECKING:
    from prefect import State


def watched(throne: Throne) -> State[Any]:
    from prefect import flow

    from onnx_ops.orchestration.champions import check_champions

    @flow(name="watched", persist_result=False)
    def story() -> State[Any]:
        return check_champions(throne.ports, throne.perform, (), by="flow")

    return story(return_state=True)


def table(state: State[Any]) -> list[dict[str, str]]:
    """Rows of the run's tables. Prefect's client writes one again whose answer was long in coming."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(str(run_of(state)))]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=wanted)
    by_key = {artifact.key: artifact for artifact in found}
    return [row for artifact in by_key.values() for row in yaml.safe_load(str(artifact.data))]


def test_one_that_has_drifted_fails_the_run_and_is_told(prefect_server: None, tmp_path: Path) -> None:
    throne = Throne(tmp_path, now=(SLOWER,)).remembered()
    throne.world.notifiers["chat"] = chat = FakeNotifier()
    state = watched(throne)
    assert (state.type.value, state.name) == ("FAILED", "Drifted")
    assert "digits v1 @ cpu: drifted. latency: " in (state.message or "")
    assert [notice.what for notice in chat.received] == [NotificationKind.DRIFTED]
    (row,) = table(state)
    assert (row["pipeline"], row["version"], row["verdict"]) == ("p", "1", "drifted")
    assert row["changed"] == "runtime onnxruntime 2, was onnxruntime 1"
    assert task_runs(state, "digits v1 @ cpu") == ["digits v1 @ cpu"]


@pytest.mark.parametrize(
    ("remembered", "kind", "name", "word"),
    [(True, "COMPLETED", "Completed", "as it was"), (False, "FAILED", "EnvironmentFailed", "not measured")],
)
def test_others_wake_nobody(
    prefect_server: None, remembered: bool, kind: str, name: str, word: str, tmp_path: Path
) -> None:
    throne = Throne(tmp_path).remembered() if remembered else Throne(tmp_path)
    throne.world.notifiers["chat"] = chat = FakeNotifier()
    state = watched(throne)
    assert (state.type.value, state.name) == (kind, name)
    assert chat.received == []
    assert [row["verdict"] for row in table(state)] == [word]


def test_no_champions_are_no_failure(prefect_server: None, tmp_path: Path) -> None:
    throne = Throne(tmp_path)
    throne.ports = FakeWorld().ports()
    state = watched(throne)
    assert state.is_completed()
    assert "no champions yet" in (state.message or "")
    assert table(state) == []
