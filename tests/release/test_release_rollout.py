"""Promotion and the reconciler.

The tests show how a version gets traffic, and which versions cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

import pytest

from onnx_ops.attestation import sign_record
from onnx_ops.cli.endpoints import status_document
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.domain.ledger import VersionRefused
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import OperatorCommand, build_split_state
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.errors import (
    AlarmRollbackError,
    InfrastructureError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    StorageError,
    UserError,
)
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_step, reconcile_until_stable
from onnx_ops.release.status import HistoryFilter, read_history, read_rollout_view, read_status
from onnx_ops.testing.fakes import FakeProvider, FakeRegistry, FakeWorld
from tests.release.release_parts import (
    AT_ONCE,
    CANARY,
    CHALLENGER,
    CHAMPION,
    EXECUTION,
    MODEL,
    PREVIOUS,
    TARGET,
    Scene,
    config_of,
    effects,
)
from tests.release.release_scenes import (
    counted_out,
    interrupted,
    on_trial,
    request_while_down,
    serving,
)
from tests.support.golden import Golden
from tests.support.must import must


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.bind()
    return scene


def test_first_deployment_reaches_full_traffic_and_is_mirrored_in_registry(scene: Scene) -> None:
    assert scene.promote(scene.publish("a")).did == "challenger"
    scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    assert scene.aliases() == {CHAMPION: "1"}
    assert scene.promote("1").did == "serves already"
    assert [entry.body.kind for entry in scene.world.registry.mirrored] == [
        "endpoint-bound",
        "intent",
        "outcome",
        "aliases-written",
    ]


@pytest.mark.parametrize("batchable", [True, False])
def test_deployment_uses_settings_of_signed_decision(scene: Scene, batchable: bool) -> None:
    scene.serve(scene.publish("a", batchable=batchable, threads=3))
    state = must(scene.world.provider.observe(config_of("digits")))
    assert [(d.batchable, d.threads, d.execution) for d in state.deployments] == [
        (batchable, 3, EXECUTION)
    ]


def test_reconcile_during_rollout_confirms_it() -> None:
    scene = on_trial()
    scene.world.provider.confirmed.clear()
    scene.reconcile()
    assert scene.world.provider.confirmed == ["digits"]


def test_reconcile_after_first_deployment_confirms_no_rollout() -> None:
    scene = serving("a")
    scene.reconcile()
    assert scene.world.provider.confirmed == []


def test_reconcile_with_pending_rollback_confirms_nothing() -> None:
    scene = on_trial()
    request_while_down(scene)
    scene.world.provider.confirmed.clear()
    scene.reconcile()
    assert scene.world.provider.confirmed == []
    assert scene.state().pending_rollback is None


def test_reconcile_of_endpoint_in_desired_state_changes_nothing(scene: Scene) -> None:
    scene.serve(scene.publish("a"))
    before = scene.state()
    (report,) = scene.reconcile()
    assert report.did == ""
    assert scene.state() == before
    assert len(scene.world.provider.applied) == 1


def test_rollout_in_one_step_moves_full_traffic_and_retires_previous_after_a_day(
    scene: Scene,
) -> None:
    scene.serve(scene.publish("a"))
    scene.serve(scene.publish("b"))
    assert scene.traffic() == {"v2": 100, "v1": 0}
    assert scene.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    scene.world.clock.advance(DAY)
    scene.reconcile()
    assert scene.traffic() == {"v2": 100}


def test_canary_advances_one_step_per_operator_command() -> None:
    scene = Scene()
    scene.bind(policy=CANARY)
    scene.serve(scene.publish("a"))
    scene.promote(scene.publish("b"))
    for share in (10, 50):
        scene.reconcile()
        assert scene.traffic() == {"v2": share, "v1": 100 - share}
        assert scene.aliases() == {CHAMPION: "1", CHALLENGER: "2"}
        scene.say(OperatorCommand.ADVANCE)
    scene.reconcile()
    assert scene.traffic() == {"v2": 100, "v1": 0}
    assert scene.aliases() == {CHAMPION: "2", PREVIOUS: "1"}


def test_pause_or_abort_without_rollout_raises_user_error() -> None:
    scene = serving("a", "b")
    for ask in (lambda: scene.say(OperatorCommand.PAUSE), scene.abort):
        with pytest.raises(UserError, match="no rollout"):
            ask()


@pytest.fixture
def trial() -> Scene:
    """Return a scene in which version 2 has 10 % of the traffic, version 1 the rest."""
    scene = serving("a")
    scene.bind(policy=CANARY)
    scene.promote(scene.publish("b"))
    scene.reconcile()
    assert scene.traffic() == {"v2": 10, "v1": 90}
    return scene


def test_paused_rollout_stays_at_step_until_advance_command(trial: Scene) -> None:
    trial.say(OperatorCommand.PAUSE)
    assert "paused" in trial.reconcile()[-1].why
    assert trial.traffic()["v2"] == 10
    trial.say(OperatorCommand.ADVANCE)
    trial.reconcile()
    assert trial.traffic()["v2"] == 50


def test_resumed_rollout_waits_for_approval_at_its_step(trial: Scene) -> None:
    with pytest.raises(UserError, match="no operator has paused"):
        trial.say(OperatorCommand.RESUME)
    trial.say(OperatorCommand.PAUSE)
    trial.say(OperatorCommand.RESUME)
    assert trial.reconcile()[-1].why == "v2 has 10 % of traffic and waits for approval"
    assert trial.traffic() == {"v2": 10, "v1": 90}
    with pytest.raises(UserError, match="no operator has paused"):
        trial.say(OperatorCommand.RESUME)


def test_operator_command_is_executed_after_endpoint_restore(trial: Scene) -> None:
    trial.say(OperatorCommand.ADVANCE)
    trial.world.provider.interfere("digits", None)
    assert [report.did for report in trial.reconcile()] == ["restore", "advance", ""]
    assert trial.traffic() == {"v2": 50, "v1": 50}


def test_abort_during_open_intent_of_dead_process_moves_traffic_back(trial: Scene) -> None:
    trial.say(OperatorCommand.ADVANCE)
    interrupted(trial, trial.reconcile)
    trial.restart()
    trial.abort()
    assert trial.traffic() == {"v1": 100, "v2": 0}
    trial.reconcile()
    assert trial.traffic() == {"v1": 100}


def test_removal_of_challenger_alias_aborts_without_rejection(trial: Scene) -> None:
    trial.world.registry.delete_alias(MODEL, CHALLENGER)
    trial.reconcile()
    assert trial.traffic() == {"v1": 100}
    trial.promote("2")
    trial.reconcile()
    assert trial.traffic()["v2"] == 10


def test_new_challenger_during_rollout_replaces_candidate(trial: Scene) -> None:
    trial.promote(trial.publish("c"))
    assert [report.did for report in trial.reconcile()][:2] == ["abort", "start"]
    assert trial.traffic() == {"v3": 10, "v1": 90}


def test_reconcile_of_lost_or_externally_changed_endpoint_restores_it(trial: Scene) -> None:
    trial.world.provider.interfere("digits", None)
    trial.reconcile()
    assert trial.traffic() == {"v2": 10, "v1": 90}
    stable = must(trial.state().roles.stable)
    trial.world.provider.interfere("digits", build_split_state(stable, None, 0))
    trial.reconcile()
    assert trial.traffic() == {"v2": 10, "v1": 90}


def test_abort_of_one_variant_does_not_reject_stable_variant_of_release() -> None:
    scene = Scene()
    scene.bind(policy=CANARY)
    scene.serve(scene.publish("a"))
    scene.promote(scene.publish("a", variant="int8"))
    scene.reconcile()
    scene.abort()
    scene.reconcile()
    assert scene.aliases() == {CHAMPION: "1"}
    with pytest.raises(RefusedError):
        scene.promote("2")
    scene.serve(scene.publish("c"))
    assert scene.roll_back().moved_to == "v1"


def unsigned(scene: Scene, record: VersionRecord) -> dict[str, object]:
    return {"decisions": {}}


def decided(**changes: object) -> Callable[[Scene, VersionRecord], dict[str, object]]:
    """Return a function that makes changed, signed decisions."""

    def spoil(scene: Scene, record: VersionRecord) -> dict[str, object]:
        about = replace(record.decisions[TARGET].record, **changes)  # type: ignore[arg-type]
        return {"decisions": {TARGET: sign_record(about, scene.world.signer)}}

    return spoil


def tampered(scene: Scene, record: VersionRecord) -> dict[str, object]:
    scene.world.registry.tamper(record, "model.onnx")
    return {}


SPOILT = {
    "no signed decision": unsigned,
    "is FAIL": decided(verdict=Verdict.FAIL),
    "about another model, version or target": decided(model="faces"),
    "has changed since": decided(target_digest=digest_bytes(b"as it was")),
    "the registry contains": tampered,
}
"""One decision for each kind of reason.

`test_release_decided` tests decisions in detail, and `…_attacks` tests attackers.
"""


@pytest.mark.parametrize("reason", SPOILT)
@pytest.mark.parametrize("alias", [CHALLENGER, CHAMPION])
def test_alias_on_unapproved_version_is_refused_and_restored(
    scene: Scene, alias: str, reason: str
) -> None:
    scene.serve(scene.publish("a"))
    version = scene.publish("b")
    scene.forge(version, **SPOILT[reason](scene, scene.record(version)))
    scene.set_alias(alias, version)
    reports = scene.reconcile()
    assert reports[0].refused
    assert reason in reports[0].why
    assert scene.aliases() == {CHAMPION: "1"}
    assert scene.traffic() == {"v1": 100}
    assert reason in scene.record(version).tags[f"onnxops.rejected.{alias}"]
    (entry,) = [e for e in scene.world.ledger.read("digits") if isinstance(e.body, VersionRefused)]
    assert isinstance(entry.body, VersionRefused)
    assert entry.body.restored_to == ("1" if alias == CHAMPION else None)


@pytest.mark.parametrize(
    "reason", [reason for reason in SPOILT if reason != "the registry contains"]
)
def test_promote_of_unapproved_version_raises_refused_error(scene: Scene, reason: str) -> None:
    version = scene.publish("b")
    scene.forge(version, **SPOILT[reason](scene, scene.record(version)))
    with pytest.raises(RefusedError, match=reason):
        scene.promote(version)
    assert scene.aliases() == {}


def test_promote_after_change_of_target_names_run_and_override_commands(scene: Scene) -> None:
    version = scene.publish("b")
    scene.forge(version, **SPOILT["has changed since"](scene, scene.record(version)))
    with pytest.raises(RefusedError) as caught:
        scene.promote(version)
    assert "`onnx-ops run FILE --until register`" in caught.value.remedy
    assert f"onnx-ops promote {MODEL}/{version} --target {TARGET} --override" in caught.value.remedy
    scene.promote(version, override=True, reason="the target's limit was raised")
    scene.reconcile()
    assert scene.traffic() == {f"v{version}": 100}


def test_rollout_of_candidate_that_loses_approval_is_aborted(trial: Scene) -> None:
    trial.forge("2", decisions={})
    reports = trial.reconcile()
    assert [report.did for report in reports][1:] == ["abort", "clean-up", ""]
    assert trial.traffic() == {"v1": 100}


def test_promote_with_override_serves_version_with_failed_gates(scene: Scene) -> None:
    scene.serve(scene.publish("a"))
    version = scene.publish("b", verdict=Verdict.FAIL)
    with pytest.raises(UserError, match="needs a reason"):
        scene.promote(version, override=True)
    scene.promote(version, override=True, reason="the old one is worse")
    scene.reconcile()
    assert scene.traffic()["v2"] == 100
    assert scene.record(version).tags["override.cpu"] == "the old one is worse"


def test_champion_alias_set_by_hand_is_treated_as_challenger(trial: Scene) -> None:
    trial.world.registry.delete_alias(MODEL, CHALLENGER)
    trial.set_alias(CHAMPION, trial.publish("c"))
    trial.reconcile()
    assert trial.traffic() == {"v3": 10, "v1": 90}
    for _ in range(2):
        trial.say(OperatorCommand.ADVANCE)
        trial.reconcile()
    assert trial.traffic() == {"v3": 100, "v1": 0}
    assert trial.aliases()[CHAMPION] == "3"


def test_reconcile_after_deletion_of_champion_alias_sets_it_once() -> None:
    scene = serving("a", "b")
    scene.world.registry.delete_alias(MODEL, CHAMPION)
    first, *others = scene.reconcile()
    assert (first.did, first.stable) == ("wrote aliases", False)
    assert first.why == "the champion alias was deleted in the registry; it is set again"
    assert [report.did for report in others] == [""]
    assert scene.aliases()[CHAMPION] == "2"
    head = scene.state().head
    assert [report.did for report in scene.reconcile()] == [""]
    assert scene.state().head == head


def test_champion_alias_deleted_during_rollout_is_set_after_it(trial: Scene) -> None:
    """A registry that cannot be written must not delay the judgement of a rollout."""
    trial.world.registry.delete_alias(MODEL, CHAMPION)
    trial.reconcile()
    assert CHAMPION not in trial.aliases()
    trial.say(OperatorCommand.ADVANCE)
    trial.reconcile()
    assert trial.traffic() == {"v2": 50, "v1": 50}
    trial.roll_back()
    trial.reconcile()
    assert trial.aliases()[CHAMPION] == "1"


def refuse_aliases(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> NoReturn:
        raise RefusedError("this user must not move the alias")

    patch.setattr(scene.world.registry, "set_alias", refuse)


def delete_champion(scene: Scene, _: pytest.MonkeyPatch) -> None:
    scene.world.registry.vanish(MODEL, "1")


def replace_champion(scene: Scene, _: pytest.MonkeyPatch) -> None:
    scene.forge("1", manifest=scene.record("2").manifest)


@pytest.mark.parametrize("obstacle", [refuse_aliases, delete_champion, replace_champion])
def test_reconcile_without_possible_champion_alias_serves_next_release(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    obstacle: Callable[[Scene, pytest.MonkeyPatch], None],
) -> None:
    scene.serve(scene.publish("a"))
    following = scene.publish("b")
    scene.world.registry.delete_alias(MODEL, CHAMPION)
    with monkeypatch.context() as patch:
        obstacle(scene, patch)
        assert [report.did for report in scene.reconcile()] == [""]
        assert CHAMPION not in scene.aliases()
    scene.serve(following)
    assert scene.aliases()[CHAMPION] == "2"


def test_promote_without_endpoint_sets_champion_immediately() -> None:
    scene = Scene()
    assert scene.promote(scene.publish("a")).did == "champion"
    assert scene.promote(scene.publish("b"), reason="a better one").did == "champion"
    assert scene.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    record = scene.context.registry().version(MODEL, "2")
    assert record.tags[f"promoted.{TARGET}"] == "a better one"
    assert fold_of(scene) == {CHAMPION: "2", PREVIOUS: "1"}


def fold_of(scene: Scene) -> dict[str, str | None]:
    return dict(scene.state(f"{MODEL}@{TARGET}").aliases)


def test_promote_of_champion_missing_from_ledger_records_its_alias_once() -> None:
    scene = Scene()
    scene.set_alias(CHAMPION, scene.publish("a"))
    scene.promote("1")
    assert fold_of(scene)[CHAMPION] == "1"
    scene.promote("1")
    assert scene.state(f"{MODEL}@{TARGET}").head == 1


def test_promote_with_expected_endpoint_sets_challenger() -> None:
    scene = Scene()
    done = promote(scene.context, MODEL, scene.publish("a"), TARGET, expects=("digits",))
    assert done.did == "challenger"
    assert scene.aliases() == {CHALLENGER: "1"}


def test_new_endpoint_of_model_with_champion_serves_champion() -> None:
    scene = Scene()
    scene.promote(scene.publish("a"))
    scene.bind()
    scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    assert scene.aliases() == {CHAMPION: "1"}


def test_changed_options_are_applied_before_rollout_and_not_during_it(scene: Scene) -> None:
    scene.bind(policy=CANARY)
    scene.serve(scene.publish("a"))
    scene.promote(scene.publish("b"))
    changed = replace(config_of("digits"), options={"instance_count": 2})
    bind_endpoint(scene.context, changed, CANARY)
    reports = scene.reconcile()
    assert [report.did for report in reports] == ["reconfigure", "start", ""]
    assert reports[0].why == "the endpoint does not match its options: instance_count: None, not 2"
    assert scene.traffic() == {"v1": 90, "v2": 10}
    bind_endpoint(scene.context, replace(changed, options={"instance_count": 3}), CANARY)
    assert [report.did for report in scene.reconcile()] == [""]
    scene.roll_back()
    assert [report.did for report in scene.reconcile()][-2:] == ["reconfigure", ""]


class FleetProvider(FakeProvider):
    """Endpoints whose instances change separately from the traffic.

    `replacements` are the changes in progress.
    """

    replacements: tuple[str, ...] = ()

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        return super().capabilities(options) | {"fleet"}

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        state = super().observe(config)
        return None if state is None else replace(state, replacements=self.replacements)


def test_rollout_while_cloud_replaces_instances_waits_and_keeps_command() -> None:
    provider = FleetProvider()
    scene = Scene(world=FakeWorld(provider=provider))
    scene.bind(policy=CANARY)
    scene.serve(scene.publish("a"))
    scene.promote(scene.publish("b"))
    scene.reconcile()
    scene.say(OperatorCommand.ADVANCE)
    changed = replace(config_of("digits"), options={"instance_type": "large"})
    bind_endpoint(scene.context, changed, CANARY)
    provider.replacements = ("status Updating",)
    why = "the cloud is changing the instances: status Updating"
    assert [(one.did, one.why) for one in scene.reconcile()] == [("", why)]
    assert must(read_rollout_view(scene.context, "digits")).next == why
    document = status_document(read_status(scene.context, "digits"))
    assert document["replacements"] == ["status Updating"]
    assert scene.traffic() == {"v1": 90, "v2": 10}
    provider.replacements = ()
    assert [one.did for one in scene.reconcile()] == ["reconfigure", "advance", ""]
    provider.replacements = ("status Updating",)
    scene.roll_back()
    assert scene.traffic() == {"v1": 100, "v2": 0}


def test_reconcile_with_options_that_provider_cannot_apply_reports_error_and_tries_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.serve(scene.publish("a"))
    changed = replace(config_of("digits"), options={"instance_count": 2})
    bind_endpoint(scene.context, changed, AT_ONCE)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InfrastructureError("there is not enough quota")

    with monkeypatch.context() as patched:
        patched.setattr(scene.world.provider, "apply", refuse)
        head = scene.state().head
        with pytest.raises(InfrastructureError, match="quota"):
            scene.reconcile()
        # The two new entries are the intent and its failure.
        assert scene.state().head == head + 2
        assert scene.traffic() == {"v1": 100}
    assert [report.did for report in scene.reconcile()] == ["reconfigure", ""]


def test_bind_endpoint_with_changed_policy_returns_true_and_with_same_policy_false(
    scene: Scene,
) -> None:
    assert bind_endpoint(scene.context, config_of("digits"), CANARY)
    assert not bind_endpoint(scene.context, config_of("digits"), CANARY)


def test_bind_endpoint_with_other_model_or_target_raises_user_error(scene: Scene) -> None:
    for changes in ({"model": "faces"}, {"target": "edge"}):
        with pytest.raises(UserError, match="serves digits on cpu"):
            bind_endpoint(scene.context, replace(config_of("digits"), **changes), CANARY)  # type: ignore[arg-type]


def test_unknown_endpoint_or_version_raises_not_found_error(scene: Scene) -> None:
    for call in (
        reconcile_step,
        read_status,
        lambda context, name: read_history(context, HistoryFilter(endpoints=(name,))),
    ):
        with pytest.raises(NotFoundError) as caught:
            call(scene.context, "faces")
        assert "digits" in caught.value.remedy
    with pytest.raises(NotFoundError):
        scene.promote("9")


def test_reconcile_without_registry_restores_endpoint_and_reports_outage(trial: Scene) -> None:
    trial.world.registry.down = True
    trial.world.provider.interfere("digits", None)
    reports = trial.reconcile()
    assert reports[0].did == "restore"
    # A restoration does not read the registry, so only later reports show the outage.
    assert {report.registry_down for report in reports[1:]} == {
        "memory: the registry does not answer"
    }
    assert trial.traffic() == {"v2": 10, "v1": 90}


@pytest.mark.parametrize(
    "error", [StorageError("the disk is full"), ServiceUnavailableError("silence")], ids=str
)
def test_reconcile_with_failing_download_of_next_version_rolls_back_failing_candidate(
    monkeypatch: pytest.MonkeyPatch, error: OnnxOpsError
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    scene = counted_out(bad=True)
    scene.promote(scene.publish("c"))
    monkeypatch.setattr(FakeRegistry, "fetch", fail)
    reports = scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    assert {report.registry_down for report in reports} == {str(error)}


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug of its client"), UserError("no such thing")], ids=["bug", "error"]
)
def test_reconcile_of_lost_endpoint_with_registry_error_restores_it(
    trial: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    trial.world.provider.interfere("digits", None)
    monkeypatch.setattr(trial.world.registry, "aliases", fail)
    with pytest.raises(type(error)):
        trial.reconcile()
    assert trial.traffic() == {"v2": 10, "v1": 90}


def test_reconcile_of_unreachable_endpoint_records_failed_outcome(scene: Scene) -> None:
    scene.promote(scene.publish("a"))
    scene.world.provider.down = True
    with pytest.raises(ServiceUnavailableError):
        reconcile_until_stable(scene.context, "digits")
    assert scene.state().open_intent is None
    assert [
        line.what for line in read_history(scene.context, HistoryFilter(endpoints=("digits",)))[0]
    ][-1].startswith("failed")
    scene.world.provider.down = False
    scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    assert effects(scene.world.ledger.read("digits")) == ["first-deployment"]


def test_status_and_history_follow_loss_and_restore_of_endpoint(
    trial: Scene, golden: Golden
) -> None:
    trial.world.provider.interfere("digits", None)
    seen = read_status(trial.context, "digits")
    assert (seen.actual, seen.address) == (None, None)
    trial.reconcile()
    seen = read_status(trial.context, "digits")
    assert seen.actual is not None
    assert seen.address == "memory:digits"
    lines, _ = read_history(trial.context, HistoryFilter(endpoints=("digits",)))
    assert [line.sequence for line in lines] == list(range(1, len(lines) + 1))
    golden("tables", lines[0].what)
    assert lines[0].at.startswith("2023-11-14T22:13:20")
    assert any(line.what.startswith("start:") for line in lines)
    assert any(line.what.startswith("restore:") for line in lines)


def test_reconcile_of_foreign_state_with_same_generation_replaces_it(trial: Scene) -> None:
    stable = must(trial.state().roles.stable)
    foreign = EndpointState(
        deployments=(stable,),
        split=TrafficSplit(weights={"v1": 100}),
        generation=trial.state().generation,
    )
    trial.world.provider.interfere("digits", foreign)
    assert trial.reconcile()[0].did == "restore"


@pytest.mark.parametrize("policy", [AT_ONCE, CANARY], ids=["at once", "canary"])
@pytest.mark.parametrize("left_open", [False, True], ids=["now", "by a driver that died"])
def test_rollback_by_provider_alarm_rejects_version(
    policy: RolloutPolicy, left_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    scene.bind(policy=policy)
    scene.serve(scene.publish("a"))
    bad = scene.publish("b")
    scene.promote(bad)
    provider, applied = scene.world.provider, 0
    plain = provider.apply

    def apply(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        nonlocal applied
        if not state.split.weights.get("v2"):
            return plain(config, state, generation=generation)
        applied += 1
        if left_open and applied == 1:
            raise KeyboardInterrupt
        raise AlarmRollbackError("the alarm fired", where=config.endpoint)

    monkeypatch.setattr(provider, "apply", apply)
    if left_open:
        with pytest.raises(KeyboardInterrupt):
            scene.reconcile()
        scene.restart()
    report = scene.reconcile()[0]
    assert report.did in ("rollback", "abort")
    assert report.why == "digits: the alarm fired"
    assert applied == 1 + left_open
    state = scene.state()
    assert (state.pending_rollback, state.open_intent, state.roles.candidate) == (None, None, None)
    assert "the alarm fired" in str(state.find_rejection(scene.record(bad)))
    assert (scene.traffic()["v1"], CHALLENGER in scene.aliases()) == (100, False)
    with pytest.raises(RefusedError):
        scene.promote(bad)
    scene.reconcile()
    assert applied == 1 + left_open


def test_provider_alarm_during_restore_rejects_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.serve(scene.publish("a"))
    scene.world.provider.interfere("digits", None)

    def apply(*_: object, **__: object) -> None:
        raise AlarmRollbackError("the alarm fired")

    monkeypatch.setattr(scene.world.provider, "apply", apply)
    with pytest.raises(AlarmRollbackError):
        scene.reconcile()
    assert scene.state().rejected == {}
