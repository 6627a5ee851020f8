"""The events of a release that programs receive, and their names."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.ledger import RollbackRequested
from onnx_ops.domain.notification import (
    EVENT_NAMES,
    Notification,
    NotificationKind,
    Severity,
    build_event,
    list_pending_notifications,
)
from onnx_ops.domain.rollout import ActionKind, plan_rollback
from tests.domain.test_domain_ledger import CONFIGURED, FINISH, START, log, version
from tests.domain.test_domain_notification import ALARM, ON_TRIAL, derive


def followed(*bodies: object) -> list[Notification]:
    return list(list_pending_notifications("digits", log(*bodies), progress=True))  # type: ignore[arg-type]


def test_events_of_rollout_include_steps_that_notifications_omit() -> None:
    step = replace(START, kind=ActionKind.ADVANCE, roles=replace(START.roles, step=1))
    bodies = (*ON_TRIAL, step, FINISH)
    found = [build_event(notice) for notice in followed(*bodies)]
    assert [event.event for event in found] == [
        "onnx-ops.rollout.finished",
        "onnx-ops.rollout.started",
        "onnx-ops.rollout.advanced",
        "onnx-ops.rollout.finished",
    ]
    assert {event.resource for event in found} == {"onnx-ops.endpoint.digits"}
    assert [(e.payload["version"], e.payload["serving"]) for e in found] == [
        ("1", "1"),
        ("2", "1"),
        ("2", "1"),
        ("2", "2"),
    ]
    assert found[2].payload["what"] == "v2 is at step 2"
    assert [notice.what for notice in derive(*bodies)] == [
        NotificationKind.FINISHED,
        NotificationKind.FINISHED,
    ], "people are spared the steps"


def test_build_event_of_rollback_names_version_and_reason() -> None:
    *_, found = followed(*ON_TRIAL, ALARM)
    event = build_event(found)
    assert event.event == "onnx-ops.rollout.rolled-back"
    assert (event.payload["version"], event.payload["serving"]) == ("2", "1")
    assert event.payload["why"] == ALARM.why
    assert event.labels == {"onnx-ops.severity": "critical"}
    back = plan_rollback(FINISH.roles, version(1), "cpu", why="wrong on sevens")
    requested = RollbackRequested(action=back, by_operator=True)
    *_, found = followed(CONFIGURED, FINISH, requested, back)
    event = build_event(found)
    assert event.event == "onnx-ops.rolled-back"
    assert (event.payload["version"], event.payload["serving"]) == ("2", "1")


def test_events_of_repeated_abort_within_hour_have_distinct_keys() -> None:
    once = (ALARM, START)
    bodies = (*ON_TRIAL, *once, ALARM, START)
    found = [build_event(notice) for notice in followed(*bodies)]
    assert [event.event.rpartition(".")[2] for event in found[1:]] == [
        "started",
        "rolled-back",
    ] * 2 + ["started"]
    assert len({event.key for event in found}) == len(found)


notices = st.builds(
    Notification,
    endpoint=st.text(min_size=1),
    sequence=st.integers(0, 9),
    at=st.floats(0, 2e9),
    actor=st.text(),
    what=st.sampled_from(NotificationKind),
    severity=st.sampled_from(Severity),
    headline=st.text(),
    why=st.text(),
    commands=st.dictionaries(st.text(), st.text()),
    model=st.text(),
)


@given(notices)
def test_build_event_of_any_notification_has_json_payload_and_stable_key(
    notice: Notification,
) -> None:
    event = build_event(notice)
    assert event.event == EVENT_NAMES[notice.what]
    assert json.loads(json.dumps(event.payload)) == event.payload
    assert build_event(notice).key == event.key
    assert (event.key is None) == (notice.sequence == 0)


def test_event_names_cover_each_notification_kind_once() -> None:
    assert set(EVENT_NAMES) == set(NotificationKind)
    assert len(set(EVENT_NAMES.values())) == len(EVENT_NAMES)
