"""Random histories of an endpoint.

Requests, failures, kills and concurrent processes come in any order. A version that was rolled back
begins, finishes or is restored only with an override. The override must be signed later, for
exactly its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from onnx_ops.attestation import verify_envelope
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import OverrideRecord, override_reason_tag, override_record_tag
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.ledger import (
    ActionOutcome,
    EndpointDeleted,
    Intent,
    LedgerEntry,
    OverrideRecorded,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
)
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import InvalidSignatureError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import Context
from onnx_ops.release.promote import delete_endpoint
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.rollback import withdraw_request
from onnx_ops.testing.fakes import FakeClock, FakeHost, FakeSigner
from tests.release.release_parts import AT_ONCE, CANARY, CHALLENGER, CHAMPION, TARGET, Scene
from tests.support.faults import Faults, Killed

BRINGS = frozenset(
    {ActionKind.FIRST, ActionKind.START, ActionKind.ADVANCE, ActionKind.FINISH, ActionKind.RESTORE}
)
VERSIONS = ("1", "2", "3", "4", "5")
"""Version 3 has the same release as version 2. Version 5 has failed its gates."""
MOST_MOMENTS = 40
Fault: TypeAlias = tuple[str, int] | None

versions = st.sampled_from(VERSIONS)
faults: st.SearchStrategy[Fault] = st.none() | st.tuples(
    st.sampled_from(["kill", "error", "overtake"]), st.integers(0, MOST_MOMENTS)
)


@dataclass
class Judge:
    """A reader of the ledger that tracks rejected and pending versions.

    It shares no code with the ledger's fold.
    """

    signer: FakeSigner
    rejected: set[Digest] = field(default_factory=set)
    before: set[Digest] = field(default_factory=set)
    overridden: set[Digest] = field(default_factory=set)
    used: set[Digest] = field(default_factory=set)
    owed: bool = False
    deleting: bool = False
    open: dict[int, Action] = field(default_factory=dict)
    read: int = 0
    known: dict[Digest, Deployment] = field(default_factory=dict)

    def read_on(self, entries: Iterable[LedgerEntry]) -> list[str]:
        """Read the new entries, and return the rejected versions that they bring."""
        return [wrong for entry in entries for wrong in self._read(entry)]

    def may_serve(self, deployment: Deployment) -> bool:
        bad = {deployment.release, deployment.manifest} & self.rejected
        return not bad or deployment.manifest in self.overridden

    def _read(self, entry: LedgerEntry) -> list[str]:
        self.read = entry.sequence
        match entry.body:
            case RollbackRequested(action=action):
                self.before = self.before if self.owed else set(self.rejected)
                self.owed, self.open = True, {}
                self._reject(action)
            case OverrideRecorded() as given:
                self._take(given)
            case EndpointDeleted(done=False):
                self.deleting = True
            case RequestWithdrawn() if self.deleting:
                self.deleting = False
            case RequestWithdrawn() if self.owed:
                self.rejected, self.owed = set(self.before), False
            case Intent(action=action):
                self.open = {entry.sequence: action}
                self.known |= {d.manifest: d for d in action.state.deployments}
                if action.kind in BRINGS:
                    return [
                        f"entry {entry.sequence} {action.kind} {d.name}"
                        for d in _served(action)
                        if not self.may_serve(d)
                    ]
            case EndpointDeleted():
                self.overridden, self.open, self.owed, self.deleting = set(), {}, False, False
            case ActionOutcome(of=of, ok=True) if of in self.open:
                self._reject(self.open.pop(of))
                self.owed = False
            case _:
                pass
        return []

    def _reject(self, action: Action) -> None:
        self.rejected |= set(action.reject)
        self.overridden -= {
            d.manifest for d in self.known.values() if {d.release, d.manifest} & set(action.reject)
        }
        if (stable := action.roles.stable) is not None:
            self.rejected -= {stable.release, stable.manifest}

    def _take(self, given: OverrideRecorded) -> None:
        try:
            about = verify_envelope(given.signed, OverrideRecord, self.signer)
        except InvalidSignatureError:
            return
        if about.manifest == given.manifest and given.signed.digest() not in self.used:
            self.overridden.add(about.manifest)
        self.used.add(given.signed.digest())


def _served(action: Action) -> list[Deployment]:
    weights = {
        **action.state.split.weights,
        **{k: v for k, v in action.state.split.shadow.items() if v},
    }
    named = [d for d in action.state.deployments if weights.get(d.name)]
    return [*named, *(d for d in (action.roles.stable, action.roles.candidate) if d is not None)]


class Histories(RuleBasedStateMachine):
    """An endpoint with its registry, operators and drivers.

    Drivers can be killed, and a person can write into the registry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.judge = Judge(self.scene.world.signer)
        self.wrong: list[str] = []
        self.ahead_s = 0.0
        self.scene.bind()
        for seed, variant, verdict in (
            ("a", "fp32", Verdict.PASS),
            ("b", "fp32", Verdict.PASS),
            ("b", "int8", Verdict.PASS),
            ("c", "fp32", Verdict.PASS),
            ("d", "fp32", Verdict.FAIL),
        ):
            self.scene.publish(seed, variant=variant, verdict=verdict)
        self.scene.serve("1")
        self.scene.serve("2")

    def act(self, call: Callable[[], object], fault: Fault = None) -> None:
        """Call a function that may be refused.

        With a fault, one of its calls fails, or the process is killed or overtaken. This happens
        before or after the call.
        """
        scene = self.scene
        if fault is not None:
            kind, moment = fault
            other = self.other_machine()

            def drive(at: int) -> None:
                if at == moment:
                    self.act(lambda: reconcile_until_stable(other, "digits"))

            scene.faults = {
                "kill": lambda: Faults(at=moment),
                "error": lambda: Faults(at=moment, error=ServiceUnavailableError("injected")),
                "overtake": lambda: Faults(between=drive),
            }[kind]()
        try:
            call()
        except OnnxOpsError:
            pass
        except Killed:
            scene.restart()
        scene.faults = None

    def other_machine(self) -> Context:
        """Return a driver on another machine.

        Its clock is wrong, and it cannot detect which processes have ended on this machine.
        """
        context, clock = self.scene.world.context("another machine"), self.scene.world.clock
        host = FakeHost("another machine", dead=set())
        return replace(context, host=host, clock=FakeClock(clock.now() + self.ahead_s))

    @rule(ahead_s=st.sampled_from([-300.0, 0.0, 300.0]))
    def adjust_the_other_clock(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    @rule()
    def reconcile_elsewhere(self) -> None:
        self.act(lambda: reconcile_until_stable(self.other_machine(), "digits"))

    @rule(version=versions, override=st.booleans(), fault=faults)
    def promote(self, version: str, override: bool, fault: Fault) -> None:
        self.act(lambda: self.scene.promote(version, override=override, reason="sure"), fault)

    @rule(version=versions, name=st.sampled_from([CHAMPION, CHALLENGER]))
    def set_alias(self, version: str, name: str) -> None:
        self.act(lambda: self.scene.set_alias(name, version))

    @rule(version=versions, stranger=st.booleans(), reason=st.sampled_from(["sure", "really"]))
    def give_override(self, version: str, stranger: bool, reason: str) -> None:
        self.act(
            lambda: self.scene.give_override(
                version, reason, signer=FakeSigner(b"stranger") if stranger else None
            )
        )

    @rule(version=versions, other=versions)
    def copy_override(self, version: str, other: str) -> None:
        """Copy the tags of one version to another, as a person without a key does."""

        def copy() -> None:
            tags = self.scene.record(other).tags
            names = (override_reason_tag(TARGET), override_record_tag(TARGET))
            self.scene.world.registry.annotate(
                "digits", version, {name: tags[name] for name in names if name in tags}
            )

        self.act(copy)

    @rule(to=st.none() | versions, force=st.booleans(), fault=faults)
    def roll_back(self, to: str | None, force: bool, fault: Fault) -> None:
        self.act(lambda: self.scene.roll_back(to=to, force=force), fault)

    @rule(fault=faults)
    def abort(self, fault: Fault) -> None:
        self.act(self.scene.abort, fault)

    @rule(word=st.sampled_from(OperatorCommand), fault=faults)
    def say(self, word: OperatorCommand, fault: Fault) -> None:
        self.act(lambda: self.scene.say(word), fault)

    @rule(fault=faults)
    def reconcile(self, fault: Fault) -> None:
        self.act(lambda: reconcile_until_stable(self.scene.context, "digits"), fault)

    @rule(seconds=st.sampled_from([1.0, 200.0, 100_000.0]))
    def wait(self, seconds: float) -> None:
        self.scene.world.clock.advance(seconds)

    @rule(policy=st.sampled_from([AT_ONCE, CANARY]))
    def configure(self, policy: RolloutPolicy) -> None:
        self.act(lambda: self.scene.bind(policy=policy))

    @rule(endpoint_is=st.booleans(), registry_is=st.booleans())
    def break_down(self, endpoint_is: bool, registry_is: bool) -> None:
        self.scene.world.provider.down, self.scene.world.registry.down = endpoint_is, registry_is

    @rule(version=st.none() | versions)
    def interfere(self, version: str | None) -> None:
        """Lose the endpoint, or give its traffic to a version without the ledger."""
        known = self.scene.state().known
        state = None
        if version is not None and version in known:
            deployment = known[version]
            state = EndpointState(
                deployments=(deployment,), split=TrafficSplit(weights={deployment.name: 100})
            )
        self.scene.world.provider.interfere("digits", state)

    @rule(fault=faults)
    def withdraw(self, fault: Fault) -> None:
        self.act(lambda: withdraw_request(self.scene.context, "digits", reason="a mistake"), fault)

    @rule(fault=faults)
    def delete(self, fault: Fault) -> None:
        self.act(lambda: delete_endpoint(self.scene.context, "digits"), fault)

    @invariant()
    def nothing_rejected_is_brought(self) -> None:
        self.wrong += self.judge.read_on(
            self.scene.world.ledger.read("digits", after=self.judge.read)
        )
        assert not self.wrong

    @invariant()
    def pending_rollback_is_known(self) -> None:
        """A rollback stays pending until it took effect or was withdrawn."""
        state = self.scene.state()
        assert (state.pending_rollback is not None) == self.judge.owed
        for deployment in state.known.values():
            if not self.judge.may_serve(deployment):
                assert state.find_rejection(deployment) is not None

    def teardown(self) -> None:
        """Check the traffic once everything answers and no process is at work."""
        self.break_down(endpoint_is=False, registry_is=False)
        self.scene.restart()
        self.wait(1000.0)
        for _ in range(3):
            self.act(lambda: reconcile_until_stable(self.scene.context, "digits"))
        self.nothing_rejected_is_brought()
        self.pending_rollback_is_known()
        assert not self.judge.owed
        state = self.scene.state()
        bad = [
            name
            for name, weight in self.scene.traffic().items()
            if weight and not self._may_serve(state, name)
        ]
        assert not bad

    def _may_serve(self, state: ReleaseState, name: str) -> bool:
        return self.judge.may_serve(state.known[name.removeprefix("v")])


@pytest.mark.parametrize("examples", [8, pytest.param(2000, marks=pytest.mark.nightly)])
def test_random_history_serves_rejected_version_only_with_later_override(examples: int) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
