"""The audit trail: the actor, action, endpoint, time and versions of each entry."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from onnx_ops.domain.ledger import ActionOutcome, Intent
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import NotFoundError
from onnx_ops.ports import Context
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import delete_endpoint, promote
from onnx_ops.release.status import HistoryFilter, HistoryLine, filter_endpoints, read_history
from tests.release.release_parts import MODEL, TARGET, Scene, roll_back


def history(context: Context, *endpoints: str, **selection: Any) -> tuple[HistoryLine, ...]:
    lines, errors = read_history(context, HistoryFilter(endpoints=endpoints, **selection))
    assert errors == {}
    return lines


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    for endpoint in ("digits", "digits-eu"):
        scene.bind(endpoint)
    scene.promote(scene.publish("a"))
    scene.reconcile_all()
    return scene


def test_history_of_several_endpoints_is_sorted_by_time(scene: Scene) -> None:
    lines = history(scene.context)
    assert {line.endpoint for line in lines} == {"digits", "digits-eu"}
    assert lines == tuple(sorted(lines, key=lambda line: (line.at, line.endpoint, line.sequence)))
    assert history(scene.context, "digits-eu") == tuple(
        line for line in lines if line.endpoint == "digits-eu"
    )


def test_history_line_of_change_names_stable_version(scene: Scene) -> None:
    (first,) = (
        line for line in history(scene.context, "digits") if line.kind == "first-deployment"
    )
    stable = first.versions["stable"]
    record = scene.record("1")
    assert (stable.version, stable.release, stable.manifest) == (
        "1",
        record.release,
        record.manifest,
    )


def test_history_with_traffic_filter_lists_only_traffic_changes(scene: Scene) -> None:
    promote(scene.context, MODEL, scene.publish("b"), TARGET)
    scene.reconcile_all()
    moves = history(scene.context, "digits", traffic=True)
    assert moves == tuple(line for line in history(scene.context, "digits") if line.traffic)
    assert [dict(line.traffic) for line in moves] == [{"v1": 100}, {"v1": 0, "v2": 100}]


def test_history_with_traffic_filter_omits_action_that_keeps_traffic(scene: Scene) -> None:
    before = history(scene.context, "digits", traffic=True)
    (begun,) = (
        entry.body for entry in scene.world.ledger.read("digits") if isinstance(entry.body, Intent)
    )
    Journal.open(scene.context, "digits").append(begun)
    assert len(history(scene.context, "digits")) > len(before)
    assert history(scene.context, "digits", traffic=True, limit=1) == before


def test_history_line_of_failed_action_has_no_traffic(scene: Scene) -> None:
    journal = Journal.open(scene.context, "digits")
    (begun,) = (
        entry.body for entry in scene.world.ledger.read("digits") if isinstance(entry.body, Intent)
    )
    again = journal.append(begun)
    journal.append(ActionOutcome(of=again, ok=False, detail="refused"))
    lines = history(scene.context, "digits")
    assert [
        (line.sequence == again, dict(line.traffic))
        for line in lines
        if line.kind == "first-deployment"
    ] == [
        (False, {"v1": 100}),
        (True, {}),
    ]


def test_history_with_since_actor_and_limit_returns_matching_lines(scene: Scene) -> None:
    scene.world.clock.advance(DAY)
    promote(scene.context, MODEL, scene.publish("b"), TARGET)
    scene.reconcile_all()
    moment = scene.world.clock.now()
    late = history(scene.context, since=moment)
    assert late
    lines = history(scene.context)
    assert late == tuple(
        line for line in lines if datetime.fromisoformat(line.at).timestamp() >= moment
    )
    assert len(late) < len(lines)
    assert history(scene.context, limit=2) == lines[-2:]
    assert history(scene.context, actor="other") == ()
    roll_back(scene.context, "digits", reason="slow", actor="alice")
    assert {line.actor for line in history(scene.context, actor="alice")} == {"alice"}


def test_history_with_model_and_target_returns_matching_lines(scene: Scene) -> None:
    assert history(scene.context, model=MODEL, target=TARGET) == history(scene.context)
    assert history(scene.context, model="other") == ()
    assert filter_endpoints(scene.context, HistoryFilter(target=TARGET)) == ("digits", "digits-eu")
    assert filter_endpoints(scene.context, HistoryFilter(target="other")) == ()


def test_history_of_model_without_endpoint_lists_alias_changes() -> None:
    scene = Scene()
    scene.promote(scene.publish("a"))
    assert [line.kind for line in history(scene.context, model=MODEL, target=TARGET)] == [
        "aliases-written"
    ]
    assert history(scene.context, target="other") == ()


def test_history_of_deleted_endpoint_remains_readable(scene: Scene) -> None:
    delete_endpoint(scene.context, "digits", reason="moved")
    lines = history(scene.context, "digits", model=MODEL)
    assert [(line.kind, line.why) for line in lines][-2:] == [
        ("endpoint-deleted", "moved"),
        ("endpoint-deleted", "moved"),
    ]
    with pytest.raises(NotFoundError):
        filter_endpoints(scene.context, HistoryFilter(endpoints=("digits",)))
    with pytest.raises(NotFoundError):
        history(scene.context, "nothing")
