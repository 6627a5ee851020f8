"""A rollout as a flow run: its display in Prefect, and its end states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError
from onnx_ops.orchestration.notifier import PrefectNotifier
from onnx_ops.release.reconcile import RECORD_INTERVAL_S
from onnx_ops.testing.fakes import FakeNotifier
from onnx_ops.testing.notifiers import ROLLED_BACK, WebhookSink
from tests.orchestration.flow_runs import artifacts_of, in_flow, names_of_task_runs, run_of
from tests.release.release_parts import CANARY, Scene

if TYPE_CHECKING:
    from prefect import State


def promoted(policy: RolloutPolicy = CANARY) -> Scene:
    """Return a scene in which version 1 serves and version 2 is requested."""
    scene = Scene()
    scene.bind(policy=policy)
    scene.serve(scene.publish("a"))
    scene.promote(scene.publish("b"))
    return scene


def meanwhile(monkeypatch: pytest.MonkeyPatch, *deeds: Callable[[], object]) -> None:
    """Call one of `deeds` in each pause between two checks of the rollout.

    Pauses of other threads are not affected.
    """
    from onnx_ops.orchestration import rollouts

    left = list(deeds)
    monkeypatch.setattr(rollouts, "sleep", lambda _: left.pop(0)())


def driven(scene: Scene, limit: str = "1 d") -> State[Any]:
    from onnx_ops.orchestration import rollouts

    return in_flow(
        lambda: rollouts.run_rollout(
            scene.context, "digits", by="flow", limit=limit, interval="10 s"
        )
    )


def page_of(state: State[Any]) -> str:
    """Return the last page that the run published."""
    return str(artifacts_of(run_of(state))["digits-rollout"].data)


def test_rollout_flow_advanced_by_operator_to_full_traffic_completes(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = promoted()
    scene.world.notifiers["chat"] = chat = FakeNotifier()
    meanwhile(monkeypatch, *[lambda: scene.say(OperatorCommand.ADVANCE)] * 2)
    state = driven(scene)
    assert state.is_completed()
    assert scene.traffic()["v2"] == 100
    names = names_of_task_runs(state, "digits: finish")
    assert [name for name in names if "aliases" not in name] == [
        "digits: start",
        "digits: advance",
        "digits: finish",
    ]
    page = page_of(state)
    assert page.startswith("# digits: v2 has all traffic")
    assert "| start | 10 % | step 1 of 3: 10 % to v2 |" in page
    assert "`onnx-ops report digits/2`" in page
    assert chat.received[-1].headline == "v2 has all traffic"


def test_rollout_flow_after_abort_fails_and_shows_evidence(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = promoted(RolloutPolicy(steps=(0.1, 1.0), guardrails=(Guardrail(name="errors"),)))

    def count() -> None:
        scene.world.provider.counted.count("v1", requests=90)
        scene.world.provider.counted.count("v2", requests=10)
        scene.world.clock.advance(RECORD_INTERVAL_S)

    meanwhile(monkeypatch, count, count, count, scene.abort)
    state = driven(scene)
    assert (state.type.value, state.name) == ("FAILED", "RolledBack")
    assert state.message == "v2: aborted by an operator"
    page = page_of(state)
    assert page.startswith("# digits: v2 was aborted")
    assert "![Evidence against v2](data:image/svg+xml;base64," in page


def test_rollout_flow_past_time_limit_ends_without_aborting_rollout(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = promoted()
    meanwhile(monkeypatch, *[lambda: scene.world.clock.advance(10.0)] * 6)
    state = driven(scene, limit="1 min")
    assert (state.type.value, state.name) == ("COMPLETED", "TimeIsOver")
    assert scene.traffic() == {"v1": 90, "v2": 10}


def test_rollout_flow_with_provider_outage_shows_it_once_and_retries(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = promoted()
    provider = scene.world.provider
    provider.down = True

    def back() -> None:
        provider.down = False

    meanwhile(monkeypatch, lambda: None, back, *[lambda: scene.say(OperatorCommand.ADVANCE)] * 2)
    state = driven(scene)
    assert state.is_completed()
    assert names_of_task_runs(state, "digits: trouble").count("digits: trouble") == 1


@pytest.mark.parametrize(("limit", "error"), [("soon", UserError), ("1 d", NotFoundError)])
def test_run_rollout_with_invalid_limit_or_unknown_endpoint_raises_user_or_not_found_error(
    limit: str, error: type[Exception]
) -> None:
    from onnx_ops.orchestration import rollouts

    scene = promoted() if error is UserError else Scene()
    with pytest.raises(error):
        rollouts.run_rollout(scene.context, "digits", by="flow", limit=limit, interval="10 s")


def test_roll_back_endpoints_runs_one_task_run_per_endpoint(prefect_server: None) -> None:
    from onnx_ops.orchestration.flows import aggregate_state, roll_back_endpoints

    scene = promoted()
    scene.reconcile_some()

    def story() -> State[Any]:
        names = ("digits", "nowhere")
        states = roll_back_endpoints(
            scene.context, names, to=None, reason="slow", by="me", force=False, pin=True
        )
        return aggregate_state(states)

    state, expected = in_flow(story), {"rollback digits", "rollback nowhere"}
    assert state.name == "WrongInput"
    assert "digits: v2 -> v1, 100 % of traffic. Reason: slow" in (state.message or "")
    assert sorted(names_of_task_runs(state, *expected)) == sorted(expected)
    assert scene.traffic() == {"v1": 100}


@pytest.fixture
def block(prefect_server: None) -> Any:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    with WebhookSink().open() as inbox:
        made = CustomWebhookNotificationBlock(
            name="ops",
            url=inbox.url,
            json_data={"subject": "{{subject}}", "body": "{{body}}"},
            headers=None,
            cookies=None,
        )
        made.save("ops", overwrite=True)
        yield inbox


def test_prefect_notifier_sends_message_through_block(block: WebhookSink, tmp_path: Any) -> None:
    notifier = PrefectNotifier({"block": "custom-webhook/ops"}, tmp_path)
    assert notifier.check() == "through Prefect's block custom-webhook/ops"
    notifier.send(ROLLED_BACK)
    (letter,) = block.requests
    assert letter.document["subject"] == ROLLED_BACK.title
    assert ROLLED_BACK.why in letter.document["body"]
    assert "Undo: onnx-ops promote digits-mlp/3" in letter.document["body"]


def test_prefect_notifier_with_unknown_or_malformed_block_raises_user_error(
    prefect_server: None, tmp_path: Any
) -> None:
    with pytest.raises(UserError, match="the block does not exist"):
        PrefectNotifier({"block": "custom-webhook/missing"}, tmp_path).check()
    for name in ("slack", "slack/", "slack-webhook/ops/x"):
        with pytest.raises(UserError, match="is not a block, TYPE/NAME"):
            PrefectNotifier({"block": name}, tmp_path)


def test_prefect_notifier_with_failing_block_raises_service_unavailable_error_without_url(
    prefect_server: None, tmp_path: Any
) -> None:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    made = CustomWebhookNotificationBlock(
        name="gone",
        url="http://127.0.0.1:9/hidden",
        json_data={"a": "{{body}}"},
        headers=None,
        cookies=None,
    )
    made.save("gone", overwrite=True)
    with pytest.raises(ServiceUnavailableError) as caught:
        PrefectNotifier({"block": "custom-webhook/gone"}, tmp_path).send(ROLLED_BACK)
    assert "hidden" not in str(caught.value)
