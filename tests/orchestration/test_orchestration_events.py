"""Events at a real server.

Each arrives once, from any process. The tests also cover a missing server.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from onnx_ops.domain.notification import Notification, NotificationKind, build_test_notification
from onnx_ops.domain.plan import StageOutcome, StageStatus
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.orchestration.events import (
    NAME,
    PrefectEvents,
    emit_run_events,
    post,
    run_events,
    with_events,
)
from onnx_ops.ports import Notifier
from onnx_ops.release.notify import send_pending, send_pending_each, send_test_message
from onnx_ops.testing.fakes import FakeNotifier
from tests.orchestration.flow_runs import in_flow, run_of
from tests.orchestration.test_orchestration_flows import SERVED, UNSERVED, summary
from tests.pipeline.plan_parts import PIPELINE
from tests.release.release_parts import CANARY, Scene, roll_back

assert PIPELINE.register is not None
PIPE = replace(PIPELINE, register=replace(PIPELINE.register, model="digits-mlp"))
DONE = tuple(
    StageOutcome(stage=stage, status=StageStatus.DONE)
    for stage in ("gate/fp32@cpu-1t", "gate/int8@cpu-1t", "register")
)


def events(
    resource: str, *, sequel: Notification | None = None, kinds: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return the events of a resource, in the ledger's order.

    The server stores events a moment after it has accepted them.

    All events sent before the sequel are stored once the sequel is. Without a sequel, the function
    waits for an event of each of these kinds.
    """
    from prefect.client.orchestration import get_client

    if sequel is not None:
        PrefectEvents().send(sequel)
    since = {"since": "1970-01-01T00:00:00Z"}
    wanted = {"filter": {"resource": {"id": [resource]}, "occurred": since}, "limit": 50}
    with get_client(sync_client=True) as client:
        for _ in range(300):
            found = client.request("POST", "/events/filter", json=wanted).json()["events"]
            if (
                found
                and kinds <= {event["event"] for event in found}
                and (sequel is None or any(event["event"] == "onnx-ops.test" for event in found))
            ):
                others = [
                    event for event in found if sequel is None or event["event"] != "onnx-ops.test"
                ]
                return sorted(others, key=lambda event: int(event["payload"].get("sequence", 0)))
            threading.Event().wait(0.1)
    raise AssertionError(f"no events of {resource}")


def rolled_out(endpoint: str) -> Scene:
    """Return a scene in which version 2 went from its first step to the end."""
    scene = Scene()
    scene.bind(endpoint, policy=CANARY)
    scene.serve(scene.publish("a"), endpoint)
    scene.serve(scene.publish("b"), endpoint)
    return scene


def test_rollout_events_are_sent_in_order_and_once(prefect_server: None) -> None:
    scene = rolled_out("told")
    context = with_events(scene.context)
    for _ in range(3):
        assert all(not deliveries.error for deliveries in send_pending_each(context, ("told",)))
    roll_back(scene.context, "told", reason="wrong on sevens")
    scene.restart()
    send_pending_each(with_events(scene.context), ("told",))
    found = events(
        "onnx-ops.endpoint.told", sequel=build_test_notification("told", at=1.0, actor="me")
    )
    assert [event["event"] for event in found if not event["event"].endswith("waiting")] == [
        "onnx-ops.rollout.finished",
        "onnx-ops.rollout.started",
        "onnx-ops.rollout.advanced",
        "onnx-ops.rollout.finished",
        "onnx-ops.rolled-back",
    ]
    last = found[-1]["payload"]
    assert (last["version"], last["serving"], last["model"]) == ("2", "1", "digits")
    assert last["why"].startswith("wrong on sevens")
    assert {
        "prefect.resource.id": "onnx-ops.model.digits",
        "prefect.resource.role": "model",
    } in found[0]["related"]


def test_event_sent_twice_is_stored_once(prefect_server: None) -> None:
    scene = rolled_out("twice")
    kept: list[Any] = []

    class Copying(PrefectEvents):
        def send(self, notification: Any) -> None:
            kept.append(notification)
            super().send(notification)

    send_pending(replace(scene.context, notifiers=lambda: {NAME: Copying()}), "twice")
    for notice in kept:
        PrefectEvents().send(notice)
    found = events(
        "onnx-ops.endpoint.twice", sequel=build_test_notification("twice", at=1.0, actor="me")
    )
    assert len(found) == len(kept) > 3


def test_event_in_flow_run_is_related_to_it(prefect_server: None) -> None:
    context = replace(Scene().context, notifiers=lambda: {NAME: PrefectEvents()})
    run = run_of(in_flow(lambda: bool(send_test_message(context))))
    (found,) = events("onnx-ops.endpoint.onnx-ops")
    assert found["event"] == "onnx-ops.test"
    assert found["related"] == [
        {"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}
    ]


def test_run_events_report_failed_gate_and_new_release() -> None:
    found = {
        event.event: event for event in run_events(PIPE, summary(UNSERVED, 1, outcomes=DONE), 5.0)
    }
    gate = found["onnx-ops.gate.failed"]
    assert gate.resource == "onnx-ops.model.digits-mlp"
    assert gate.labels == {"onnx-ops.target": "cpu-1t", "onnx-ops.served": "no"}
    assert gate.payload["why"] == "latency: 21% slower"
    assert (gate.payload["variant"], gate.payload["version"], gate.payload["gates"]) == (
        "fp32",
        "4",
        ["latency"],
    )
    release = found["onnx-ops.release.registered"]
    assert release.payload["versions"] == {"fp32": "4", "int8": "5"}


def test_run_events_of_failed_gate_with_other_choice_are_labelled_served() -> None:
    gate, _ = run_events(PIPE, summary(SERVED, 0, outcomes=DONE), 5.0)
    assert gate.labels["onnx-ops.served"] == "yes"
    assert gate.payload["chosen"] == "int8"


def test_run_events_of_cached_stages_are_empty() -> None:
    known = tuple(replace(outcome, status=StageStatus.CACHED) for outcome in DONE)
    assert list(run_events(PIPE, summary(UNSERVED, 1, outcomes=known), 5.0)) == []


def test_emit_run_events_sends_gate_and_release_events(prefect_server: None) -> None:
    emit_run_events(Scene().context, PIPE, summary(UNSERVED, 1, outcomes=DONE))
    kinds = frozenset({"onnx-ops.gate.failed", "onnx-ops.release.registered"})
    assert {event["event"] for event in events("onnx-ops.model.digits-mlp", kinds=kinds)} == kinds


@pytest.fixture
def unset() -> Any:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


@pytest.mark.nightly
def test_rollout_events_during_server_outage_are_sent_later(prefect_server: None) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    scene, chat = rolled_out("late"), FakeNotifier()
    context = replace(scene.context, notifiers=lambda: {NAME: PrefectEvents(), "chat": chat})
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        deliveries = {one.notifier: one for one in send_pending_each(context, ("late",))}
        assert "did not accept the events" in deliveries[NAME].error
        assert [
            notice.what for notice in chat.received if notice.what is not NotificationKind.WAITING
        ] == [NotificationKind.FINISHED] * 2
        emit_run_events(scene.context, PIPE, summary(UNSERVED, 1, outcomes=DONE))
        with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:9"):
            post(list(run_events(PIPE, summary(UNSERVED, 1, outcomes=DONE), 5.0)))
    later = {one.notifier: one for one in send_pending_each(context, ("late",))}
    assert not later["chat"].sent
    assert len(later[NAME].sent) == len(chat.received) + 2, (
        "the events include a start and an advance"
    )


def test_events_without_configured_server_are_skipped_and_check_raises_user_error(
    unset: None,
) -> None:
    context = Scene().context
    assert with_events(context) is context
    emit_run_events(context, PIPE, summary(UNSERVED, 1, outcomes=DONE))
    with pytest.raises(UserError, match="none is configured"):
        PrefectEvents().check()


def test_prefect_events_notifier_wants_steps_and_check_names_server(prefect_server: None) -> None:
    notifier: Notifier = PrefectEvents()
    assert notifier.wants_steps
    assert not FakeNotifier().wants_steps
    assert notifier.check().startswith("as events, to Prefect's server at http")


def test_prefect_events_notifier_with_options_raises_user_error(prefect_server: None) -> None:
    with pytest.raises(UserError, match="prefect-events has no options"):
        PrefectEvents({"name": "ops"})
