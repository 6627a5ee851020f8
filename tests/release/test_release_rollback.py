"""Rollbacks during other operations, and their effects on other endpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.chain import Head
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.domain.ledger import Intent, OperatorCommandSent
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.errors import (
    MissingPackageError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
    StillPendingError,
    UserError,
)
from onnx_ops.release import rollback
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.reconcile import (
    reconcile_step,
    reconcile_until_stable,
    reconcile_with_retries,
)
from onnx_ops.release.rollback import roll_back_each, withdraw_request
from onnx_ops.testing.fakes import FakeWorld, make_ledger_keys
from tests.release.release_parts import (
    AT_ONCE,
    CANARY,
    CHALLENGER,
    CHAMPION,
    MODEL,
    PREVIOUS,
    Scene,
    config_of,
    effects,
    roll_back,
)
from tests.release.release_scenes import interrupted, request_while_down, serving
from tests.support.faults import Faults
from tests.support.must import must


@pytest.fixture
def scene() -> Scene:
    """Return a scene in which versions 1, 2 and 3 served in turn; 3 serves now."""
    return serving("a", "b", "c")


def test_roll_back_moves_traffic_to_previous_version(scene: Scene) -> None:
    rolled = scene.roll_back()
    assert (rolled.moved_from, rolled.moved_to, rolled.reason) == ("v3", "v2", "it is slow")
    assert set(rolled.pending_aliases) == {CHAMPION, CHALLENGER, PREVIOUS}
    assert scene.traffic() == {"v2": 100, "v3": 0}
    assert scene.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
    scene.reconcile()
    assert scene.traffic() == {"v2": 100}
    assert scene.aliases() == {CHAMPION: "2"}
    assert scene.state().pending_aliases == {}


def test_roll_back_to_named_version_moves_traffic_to_it(scene: Scene) -> None:
    assert scene.roll_back(to="v1").moved_to == "v1"
    assert scene.traffic() == {"v1": 100, "v3": 0, "v2": 0}


def test_roll_back_to_unknown_version_raises_not_found_error(scene: Scene) -> None:
    with pytest.raises(NotFoundError, match="v9 never served at this endpoint") as caught:
        scene.roll_back(to="9")
    assert "v1, v2, v3" in caught.value.remedy


def test_roll_back_to_rejected_version_requires_force(scene: Scene) -> None:
    scene.roll_back()
    with pytest.raises(RefusedError, match="v3 was itself rolled back before"):
        scene.roll_back(to="3")
    scene.roll_back(to="3", force=True)
    assert scene.traffic()["v3"] == 100
    scene.reconcile()
    assert scene.aliases()[CHAMPION] == "3"
    scene.serve(scene.publish("d"))
    assert scene.roll_back().moved_to == "v3"


@pytest.mark.parametrize("to", [None, "2", "v2"])
def test_repeated_roll_back_after_success_changes_nothing(scene: Scene, to: str | None) -> None:
    scene.roll_back(to=to)
    before = scene.world.ledger.read("digits")
    again = scene.roll_back(to=to)
    assert (again.already, again.moved_to) == (True, "v2")
    assert scene.world.ledger.read("digits") == before
    scene.serve(scene.publish("d"))
    assert not scene.roll_back().already


@pytest.mark.parametrize(("policy", "goal"), [(CANARY, "v3"), (None, "v2")])
def test_repeated_roll_back_of_unreachable_endpoint_keeps_version_to_restore(
    scene: Scene, policy: RolloutPolicy | None, goal: str
) -> None:
    if policy is not None:
        scene.bind(policy=policy)
        scene.promote(scene.publish("d"))
        scene.reconcile()
    scene.roll_back()
    for _ in range(2):
        request_while_down(scene)
    scene.reconcile()
    assert scene.traffic()[goal] == 100
    assert scene.state().find_rejection(scene.state().known[goal.removeprefix("v")]) is None
    assert scene.roll_back().already


def test_repeated_roll_back_during_open_intent_raises_still_pending_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each repetition began it again, a slow endpoint would never complete it."""
    monkeypatch.setattr(rollback, "COMMAND_TIMEOUT_S", 0.01)
    request_while_down(scene)
    pending = must(scene.state().pending_rollback)
    other = Journal.open(scene.world.context("other"), "digits")
    expires = scene.world.clock.now() + 120
    other.append(Intent(action=pending.action, holder="other", expires_at=expires))
    with pytest.raises(StillPendingError) as caught:
        scene.roll_back()
    assert "other is changing the endpoint" in caught.value.why
    assert scene.state().head == other.state.head
    scene.world.clock.advance(121.0)
    assert scene.roll_back().moved_to == "v2"
    assert scene.traffic()["v2"] == 100


def test_repeated_roll_back_during_clean_up_keeps_version_to_restore(trial: Scene) -> None:
    trial.roll_back()
    interrupted(trial, lambda: reconcile_until_stable(trial.context, "digits"), reaches=True)
    assert trial.state().open_intent is not None
    assert trial.roll_back().moved_to == "v3"


def test_roll_back_each_with_hanging_endpoint_returns_after_timeout(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.roll_back()
    answers = threading.Event()
    observe = scene.world.provider.observe
    monkeypatch.setattr(rollback, "OBSERVE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(
        scene.world.provider, "observe", lambda config: answers.wait() and observe(config)
    )
    try:
        assert not roll_back_each(scene.context, ("digits",), timeout_s=0.01)[0]
    finally:
        answers.set()
    assert scene.state().pending_rollback is not None


def test_repeated_roll_back_of_externally_changed_endpoint_repairs_it(scene: Scene) -> None:
    scene.roll_back()
    serving = must(scene.world.provider.observe(config_of("digits")))
    scene.world.provider.interfere(
        "digits", replace(serving, split=TrafficSplit(weights={"v3": 100, "v2": 0}))
    )
    assert not scene.roll_back(to="2").already
    assert scene.traffic()["v2"] == 100


def test_roll_back_to_unloaded_previous_version_succeeds(scene: Scene) -> None:
    scene.world.clock.advance(DAY)
    scene.reconcile()
    assert scene.traffic() == {"v3": 100}
    assert scene.roll_back().moved_to == "v2"


def test_roll_back_without_previous_version_raises_not_found_error() -> None:
    with pytest.raises(NotFoundError, match="no previous version") as caught:
        serving("a").roll_back()
    assert "onnx-ops promote" in caught.value.remedy


def test_roll_back_after_rollback_to_first_version_names_other_versions(trial: Scene) -> None:
    trial.roll_back(to="1")
    trial.reconcile()
    with pytest.raises(NotFoundError, match="no previous version") as caught:
        trial.roll_back(force=True)
    assert "v2, v3, v4" in caught.value.remedy


@pytest.fixture
def trial(scene: Scene) -> Scene:
    """Return a scene in which version 4 has 10 % of the traffic, version 3 the rest."""
    scene.bind(policy=CANARY)
    scene.promote(scene.publish("d"))
    scene.reconcile()
    assert scene.traffic() == {"v4": 10, "v3": 90}
    return scene


def test_roll_back_during_rollout_removes_candidate(trial: Scene) -> None:
    rolled = trial.roll_back()
    assert (rolled.moved_from, rolled.moved_to) == ("v4", "v3")
    assert trial.traffic() == {"v3": 100, "v4": 0}
    trial.reconcile()
    assert trial.traffic() == {"v3": 100}
    assert trial.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
    with pytest.raises(RefusedError):
        trial.promote("4")


def test_roll_back_after_aborted_rollout_can_reach_named_version(trial: Scene) -> None:
    trial.roll_back()
    trial.reconcile()
    assert trial.roll_back().already
    assert trial.roll_back(to="2").moved_to == "v2"


def test_roll_back_past_stable_version_rejects_candidate_and_stable(trial: Scene) -> None:
    trial.roll_back(to="1")
    trial.reconcile()
    assert trial.traffic()["v1"] == 100
    for bad in ("3", "4"):
        with pytest.raises(RefusedError):
            trial.promote(bad)


def test_roll_back_without_registry_moves_traffic_and_keeps_aliases_pending(scene: Scene) -> None:
    scene.world.registry.down = True
    scene.roll_back()
    assert scene.traffic() == {"v2": 100, "v3": 0}
    assert scene.reconcile()[-1].registry_down
    assert scene.state().pending_aliases == {CHAMPION: "2", CHALLENGER: None, PREVIOUS: None}
    scene.world.registry.down = False
    scene.reconcile()
    assert scene.aliases()[CHAMPION] == "2"
    assert scene.traffic()["v2"] == 100


def test_rollback_to_version_deleted_in_registry_moves_traffic_and_keeps_champion_alias(
    scene: Scene,
) -> None:
    scene.world.registry.vanish(MODEL, "2")
    scene.roll_back()
    scene.reconcile()
    assert scene.traffic()["v2"] == 100
    assert scene.state().pending_aliases == {}
    assert scene.aliases()[CHAMPION] == "3"
    scene.serve(scene.publish("d"))
    assert scene.aliases()[CHAMPION] == "4"


@pytest.mark.parametrize("alias", [CHAMPION, CHALLENGER])
def test_alias_set_after_rollback_outranks_pending_aliases(scene: Scene, alias: str) -> None:
    """A rollback's pending alias changes only concern its own versions."""
    version = scene.publish("d")
    scene.world.registry.down = True
    scene.roll_back()
    scene.world.registry.down = False
    scene.set_alias(alias, version)
    scene.reconcile()
    assert scene.traffic()["v4"] == 100
    assert scene.aliases()[CHAMPION] == "4"


def test_rolled_back_version_set_by_promote_or_alias_is_refused(scene: Scene) -> None:
    scene.roll_back()
    scene.reconcile()
    with pytest.raises(RefusedError, match="rolled this release back") as caught:
        scene.promote("3")
    assert caught.value.why == "it is slow"
    for alias in (CHALLENGER, CHAMPION):
        scene.set_alias(alias, "3")
        assert scene.reconcile()[0].refused
        assert scene.traffic()["v2"] == 100
        assert scene.aliases()[CHAMPION] == "2"
        assert CHALLENGER not in scene.aliases()


def test_promote_with_override_serves_rolled_back_version(scene: Scene) -> None:
    scene.roll_back()
    scene.reconcile()
    scene.promote("3", override=True, reason="it was the network")
    scene.reconcile()
    assert scene.traffic()["v3"] == 100
    scene.roll_back()
    scene.reconcile()
    with pytest.raises(RefusedError):
        scene.promote("3")


def test_pending_rollback_runs_before_later_promotion(scene: Scene) -> None:
    scene.world.provider.down = True
    with pytest.raises(StillPendingError) as caught:
        scene.roll_back()
    assert caught.value.exit_code == 4
    state = scene.state()
    assert set(state.rejected.values()) == {"it is slow"}
    assert state.pending_rollback is not None
    assert (state.pending_rollback.attempts, bool(state.pending_rollback.error)) == (1, True)
    scene.promote(scene.publish("d"))
    with pytest.raises(ServiceUnavailableError):
        scene.reconcile()
    scene.world.provider.down = False
    assert scene.reconcile()[0].did == "rollback"
    assert scene.traffic()["v4"] == 100
    assert [
        effect for effect in effects(scene.world.ledger.read("digits")) if effect != "clean-up"
    ][-2:] == [
        "rollback",
        "finish",
    ]


def test_roll_back_with_lost_response_observes_effect_and_succeeds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, roll_back = scene.world.provider, scene.world.provider.roll_back

    def lose(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        roll_back(config, state, generation=generation)
        raise ServiceUnavailableError("the answer was lost")

    monkeypatch.setattr(provider, "roll_back", lose)
    assert scene.roll_back().moved_to == "v2"
    assert scene.state().pending_rollback is None


def test_roll_back_without_observed_effect_raises_still_pending_error(scene: Scene) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scene.world.provider, "roll_back", lambda *_, generation: None)
        with pytest.raises(StillPendingError):
            scene.roll_back()
    assert scene.traffic()["v3"] == 100
    scene.reconcile()
    assert scene.traffic() == {"v2": 100}


def test_pending_roll_back_to_stable_version_names_no_rejected_version(scene: Scene) -> None:
    scene.world.provider.down = True
    with pytest.raises(StillPendingError) as caught:
        scene.roll_back(to="v3")
    assert "rejected" not in caught.value.remedy
    assert "Withdraw the rollback" in caught.value.remedy


def test_roll_back_with_lost_model_files_downloads_them_again(scene: Scene) -> None:
    provider, roll_back = scene.world.provider, scene.world.provider.roll_back
    manifest = scene.state().known["2"].manifest
    scene.world.files.forget(manifest)

    def load(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        if scene.world.files.location(manifest) is None:
            raise NotFoundError("the files are not there")
        roll_back(config, state, generation=generation)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(provider, "roll_back", load)
        scene.world.registry.down = True
        with pytest.raises(StillPendingError):
            scene.roll_back()
        scene.world.registry.down = False
        assert scene.reconcile()[0].did == "rollback"
    assert scene.traffic()["v2"] == 100


def test_withdraw_request_removes_pending_rollback_only_with_reason(scene: Scene) -> None:
    request_while_down(scene)
    with pytest.raises(UserError):
        withdraw_request(scene.context, "digits", reason=" ")
    withdraw_request(scene.context, "digits", reason="wrong endpoint")
    scene.reconcile()
    assert scene.traffic()["v3"] == 100
    assert scene.state().rejected == {}
    with pytest.raises(NotFoundError):
        withdraw_request(scene.context, "digits", reason="again")


@pytest.mark.parametrize("reaches", [True, False])
@pytest.mark.parametrize("dead", [True, False])
def test_roll_back_during_open_intent_of_reconciler_outranks_it(
    scene: Scene, reaches: bool, dead: bool
) -> None:
    scene.promote(scene.publish("d"))
    interrupted(scene, lambda: reconcile_until_stable(scene.context, "digits"), reaches=reaches)
    if dead:
        scene.restart()
    rolled = scene.roll_back()
    assert (rolled.moved_from, rolled.moved_to) == ("v4", "v3")
    scene.reconcile()
    assert scene.traffic()["v3"] == 100
    assert scene.aliases()[CHAMPION] == "3"
    assert CHALLENGER not in scene.aliases()
    with pytest.raises(RefusedError):
        scene.promote("4")


@pytest.mark.parametrize("reaches", [True, False])
@pytest.mark.parametrize("to", [None, "2", "v2"])
def test_repeated_roll_back_after_kill_finishes_it(
    scene: Scene, reaches: bool, to: str | None
) -> None:
    interrupted(scene, scene.roll_back, reaches=reaches)
    scene.restart()
    rolled = scene.roll_back(to=to)
    assert (rolled.moved_from, rolled.moved_to) == ("v3", "v2")
    scene.reconcile()
    assert scene.traffic() == {"v2": 100}
    assert effects(scene.world.ledger.read("digits"))[-2:] == ["rollback", "clean-up"]


def test_roll_back_to_other_version_after_kill_moves_traffic_to_it(scene: Scene) -> None:
    interrupted(scene, scene.roll_back, reaches=True)
    scene.restart()
    assert scene.roll_back(to="1").moved_to == "v1"
    scene.reconcile()
    assert scene.traffic()["v1"] == 100
    for bad in ("2", "3"):
        with pytest.raises(RefusedError):
            scene.promote(bad)


@pytest.mark.parametrize("reaches", [True, False])
def test_roll_back_after_killed_abort_rejects_candidate(trial: Scene, reaches: bool) -> None:
    trial.world.registry.delete_alias("digits", CHALLENGER)
    interrupted(trial, lambda: reconcile_until_stable(trial.context, "digits"), reaches=reaches)
    trial.restart()
    rolled = trial.roll_back()
    assert (rolled.moved_from, rolled.moved_to) == ("v4", "v3")
    with pytest.raises(RefusedError):
        trial.promote("4")


@pytest.mark.parametrize(
    "end", [Scene.restart, lambda scene: scene.world.clock.advance(121.0)], ids=["death", "time"]
)
def test_reconcile_after_end_of_holder_or_lease_finishes_killed_rollback(
    scene: Scene, end: Callable[[Scene], object]
) -> None:
    interrupted(scene, scene.roll_back)
    assert "is changing the endpoint" in reconcile_step(scene.context, "digits").why
    end(scene)
    assert scene.reconcile()[0].did == "rollback"
    assert scene.traffic() == {"v2": 100}


def test_roll_back_with_policy_change_before_outcome_succeeds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment of the pipeline changes the policy after the effect.

    The outcome of the effect is not recorded yet.
    """
    apply = scene.world.provider.apply

    def and_configure(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        apply(config, state, generation=generation)
        bind_endpoint(
            scene.world.context("process-9"),
            config_of("digits"),
            RolloutPolicy(scale_down_delay=60.0),
        )

    monkeypatch.setattr(scene.world.provider, "roll_back", and_configure)
    assert scene.roll_back().moved_to == "v2"
    scene.reconcile()
    assert scene.traffic() == {"v2": 100}
    assert effects(scene.world.ledger.read("digits"))[-2:] == ["rollback", "clean-up"]


def test_roll_back_after_ledger_conflict_succeeds(scene: Scene) -> None:
    other, head = scene.world.context("another process"), scene.state().head

    def change_policy(moment: int) -> None:
        if moment == 1:
            # The rollback has read the ledger, and has not written to it yet.
            bind_endpoint(other, config_of("digits"), CANARY)

    scene.faults = Faults(between=change_policy)
    assert scene.roll_back().moved_to == "v2"
    written = [entry.body.kind for entry in scene.world.ledger.read("digits")[head:]]
    assert written == ["endpoint-bound", "rollback-requested", "intent", "outcome"]
    assert scene.traffic() == {"v2": 100, "v3": 0}


PAIR = ("digits-a", "digits-b")


@pytest.fixture
def pair() -> Scene:
    """Return a scene with two endpoints of one model and target.

    Version 2 has replaced version 1 on both.
    """
    scene = Scene()
    for name in PAIR:
        scene.bind(name, AT_ONCE)
    for seed in "ab":
        scene.promote(scene.publish(seed))
        scene.reconcile_all()
    assert [scene.traffic(name)["v2"] for name in PAIR] == [100, 100]
    assert scene.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    return scene


def test_champion_alias_moves_after_all_endpoints_serve_version(pair: Scene) -> None:
    pair.promote(pair.publish("c"))
    pair.reconcile(PAIR[0])
    assert pair.traffic(PAIR[0])["v3"] == 100
    assert pair.aliases()[CHAMPION] == "2"
    pair.reconcile(PAIR[1])
    assert pair.aliases()[CHAMPION] == "3"
    pair.reconcile_all()
    assert pair.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
    assert all(not pair.state(name).pending_aliases for name in PAIR)


def test_rollback_of_one_endpoint_pins_it_to_previous_version(pair: Scene) -> None:
    pair.roll_back(PAIR[1])
    pair.reconcile_all()
    assert pair.traffic(PAIR[0])["v2"] == 100
    assert pair.traffic(PAIR[1])["v1"] == 100
    assert pair.aliases() == {CHAMPION: "2", PREVIOUS: "1"}


def test_reconcile_of_pair_after_deletion_of_champion_alias_sets_common_version(
    pair: Scene,
) -> None:
    pair.roll_back(PAIR[0])
    pair.world.registry.delete_alias(MODEL, CHAMPION)
    pair.reconcile(PAIR[0])
    assert CHAMPION not in pair.aliases()
    pair.reconcile(PAIR[1])
    assert pair.aliases()[CHAMPION] == "2"


def test_rollback_of_all_endpoints_without_pin_moves_champion_alias(pair: Scene) -> None:
    roll_back(pair.context, PAIR[0], reason="slow", pin=False)
    pair.reconcile(PAIR[0])
    assert pair.aliases()[CHAMPION] == "2"
    roll_back(pair.context, PAIR[1], reason="slow", pin=False)
    pair.reconcile_all()
    assert pair.aliases()[CHAMPION] == "1"
    assert [(pair.traffic(name)["v1"], pair.state(name).pending_aliases) for name in PAIR] == [
        (100, {})
    ] * 2


@pytest.mark.parametrize("moved", [False, True])
def test_pinned_endpoint_follows_next_release(pair: Scene, moved: bool) -> None:
    """This is also true after a person moved the champion to the version that it serves."""
    pair.roll_back(PAIR[1])
    pair.reconcile_all()
    if moved:
        pair.set_alias(CHAMPION, "1")
        pair.reconcile_all()
        assert [pair.traffic(name)["v1"] for name in PAIR] == [100, 100]
    pair.promote(pair.publish("c"))
    for name in (*PAIR, *PAIR[::-1]):
        pair.reconcile(name)
    assert [pair.traffic(name)["v3"] for name in PAIR] == [100, 100]
    assert pair.aliases()[CHAMPION] == "3"


@pytest.fixture
def trials(pair: Scene) -> Scene:
    """Return a scene in which version 3 is rolled out in steps on both endpoints."""
    for name in PAIR:
        pair.bind(name, CANARY)
    pair.promote(pair.publish("c"))
    return pair


@pytest.mark.parametrize("take_back", [Scene.abort, Scene.roll_back])
def test_rollout_aborted_on_one_endpoint_continues_on_other(
    trials: Scene, take_back: Callable[[Scene, str], object]
) -> None:
    trials.reconcile_all()
    assert [trials.traffic(name)["v3"] for name in PAIR] == [10, 10]
    take_back(trials, PAIR[1])
    trials.reconcile_all()
    assert trials.traffic(PAIR[1]) == {"v2": 100}
    assert trials.traffic(PAIR[0]) == {"v3": 10, "v2": 90}
    for _ in range(2):
        trials.say(OperatorCommand.ADVANCE, PAIR[0])
        trials.reconcile_all()
    assert trials.traffic(PAIR[0]) == {"v3": 100, "v2": 0}
    assert trials.traffic(PAIR[1])["v2"] == 100
    assert trials.aliases()[CHAMPION] == "2"


def test_rollback_during_open_intent_keeps_rollout_of_other_endpoint(trials: Scene) -> None:
    trials.reconcile(PAIR[0])
    interrupted(trials, lambda: reconcile_until_stable(trials.context, PAIR[1]), reaches=True)
    trials.roll_back(PAIR[1])
    trials.reconcile_all()
    assert trials.traffic(PAIR[1]) == {"v2": 100}
    assert trials.traffic(PAIR[0]) == {"v3": 10, "v2": 90}


class CountedObjects(LocalObjects):
    """Objects in memory that count how often they are read."""

    def __init__(self, data: dict[str, bytes]) -> None:
        super().__init__(Path("/nowhere"))
        self.data = data
        self.reads = 0

    def read(self, name: str) -> bytes | None:
        self.reads += 1
        return self.data.get(name)

    def list_names(self, prefix: str) -> list[str]:
        self.reads += 1
        below = f"{prefix}/" if prefix else ""
        return sorted(
            {
                name.removeprefix(below).partition("/")[0]
                for name in self.data
                if name.startswith(below)
            }
        )

    def write(self, name: str, data: bytes) -> None:
        self.data[name] = data

    def create(self, name: str, data: bytes) -> bool:
        return self.data.setdefault(name, data) is data


def test_roll_back_after_10_000_entries_reads_at_most_ten_objects() -> None:
    """The first 9,995 entries do not even exist.

    A snapshot is taken after every fourth entry.
    """
    objects = CountedObjects({})
    writer = ObjectLedger(objects, make_ledger_keys())
    scene = serving("a", "b", world=FakeWorld(ledger=writer))
    writer._heads["digits"] = Head(replace(scene.state(), head=9_995), digest_bytes(b"entry 9,995"))
    objects.data.clear()
    for sequence in range(9_996, 10_005):
        Journal.open(scene.context, "digits").append(
            OperatorCommandSent(command=OperatorCommand.PAUSE)
        )
        if sequence >= 10_000:
            counted = CountedObjects(dict(objects.data))
            roll_back(
                replace(scene.world, ledger=ObjectLedger(counted, make_ledger_keys())).context(),
                "digits",
            )
            assert counted.reads <= 10, sequence
            assert ObjectLedger(counted, make_ledger_keys()).state("digits").head == sequence + 3


def no_client(*_: object) -> NoReturn:
    raise MissingPackageError("package mlflow is not installed", where="registry")


def test_roll_back_without_registry_client_keeps_aliases_pending(scene: Scene) -> None:
    context = replace(scene.context, registry=no_client)
    assert roll_back(context, "digits").pending_aliases
    assert scene.traffic() == {"v2": 100, "v3": 0}
    last = reconcile_until_stable(context, "digits")[-1]
    assert (last.stable, "mlflow" in last.registry_down) == (True, True)
    assert scene.state().pending_aliases
    scene.reconcile()
    assert scene.aliases()[CHAMPION] == "2"


def test_reconcile_with_missing_package_is_not_retried(scene: Scene) -> None:
    tries: list[str] = []

    def no_provider(name: str) -> NoReturn:
        tries.append(name)
        no_client()

    context = replace(scene.context, provider=no_provider)
    with pytest.raises(StillPendingError, match="mlflow is not installed"):
        roll_back(context, "digits")
    tries.clear()
    with pytest.raises(MissingPackageError):
        reconcile_until_stable(context, "digits")
    once = len(tries)
    _, errors = reconcile_with_retries(context, ("digits",), for_s=2.5)
    assert isinstance(errors["digits"], MissingPackageError)
    assert len(tries) == 2 * once


def test_reconcile_of_champion_and_challenger_set_by_user_serves_each_version_once(
    pair: Scene,
) -> None:
    pair.publish("c")
    pair.publish("d")
    pair.set_alias(CHAMPION, "3")
    pair.set_alias(CHALLENGER, "4")
    reports = pair.reconcile(PAIR[0])
    assert [report.did for report in reports].count("finish") == 2
    assert pair.traffic(PAIR[0])["v4"] == 100
    assert pair.aliases()[CHAMPION] == "3"
    pair.reconcile_all()
    assert [pair.traffic(name)["v4"] for name in PAIR] == [100, 100]
    assert pair.aliases() == {CHAMPION: "4", PREVIOUS: "3"}
