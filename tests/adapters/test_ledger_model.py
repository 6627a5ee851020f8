"""Ledgers as a state machine.

Honest writers work with and without keys, and crash. An attacker can write the storage.

After every attack, a reader gets an error or a state. Every grant in that state stands in an entry
that an honest owner of the key has signed. A machine that records what it has read loses no
rejection.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from onnx_ops.adapters.ledgers.chain import ChainedEntry, LedgerKeys, decode, encode
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Envelope
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerAdopted,
    LedgerEntry,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    ThresholdsFixed,
    VersionRefused,
    fold,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    build_split_state,
    choose_next_action,
    plan_abort,
    plan_rollback,
)
from onnx_ops.domain.rollout_observations import LatencyThresholds
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import CorruptStateError, LedgerConflictError, MissingKeyError, StorageError
from onnx_ops.testing.fakes import FakeSigner, make_ledger_keys
from tests.support.chains import MemoryObjects
from tests.support.endpoints import endpoint_config, fileless_deployment

ENDPOINT, OTHER = "digits", "faces"
VERSIONS = tuple(fileless_deployment(f"v{number}") for number in range(1, 5))
POLICIES = (RolloutPolicy(steps=(0.1, 0.5, 1.0)), RolloutPolicy(steps=(1.0,)))
EVIL = fileless_deployment("v9")
ALTERED = replace(VERSIONS[0], threads=9)
"""Version 1 with another setting than the granted one."""
KEYS = make_ledger_keys()
SECOND = replace(KEYS, signer=partial(FakeSigner, b"a second machine"))
"""A machine that trusts the first key and signs with its own.

Its signatures count after its key is admitted.
"""
ADMITTED = {key.key: key.trusted_keys for key in (FakeSigner(), FakeSigner(b"a second machine"))}
THIEF = make_ledger_keys(FakeSigner(b"has no trusted key"))
KEYLESS = LedgerKeys(KEYS.verifier, lambda: None)


@dataclass
class Granted:
    """Everything that an honest owner of the key has signed."""

    bound: list[tuple[EndpointConfig, RolloutPolicy]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    overrides: set[Digest] = field(default_factory=set)
    commands: set[OperatorCommand] = field(default_factory=set)

    def add(self, body: EntryBody) -> None:
        match body:
            case EndpointBound():
                self.bound.append((body.config, body.policy))
            case Intent():
                self.actions.append(body.action)
            case RollbackRequested():
                self.actions.append(body.action)
            case OverrideRecorded():
                self.overrides.add(body.manifest)
            case OperatorCommandSent():
                self.commands.add(body.command)
            case _:
                pass

    def list_stables(self) -> set[Digest]:
        return {a.roles.stable.manifest for a in self.actions if a.roles.stable is not None}

    def list_candidates(self) -> set[Digest]:
        return {a.roles.candidate.manifest for a in self.actions if a.roles.candidate is not None}


def override(version: Deployment) -> OverrideRecorded:
    envelope = Envelope(payload=version.name, payloadType="x", signatures=())
    return OverrideRecorded(
        release=version.release,
        manifest=version.manifest,
        version=version.version,
        reason="sure",
        signed=envelope,
    )


def rollback(roles: Roles, goal: Deployment) -> Action:
    if roles.candidate is not None and roles.stable is not None and goal == roles.stable:
        return plan_abort(roles, "cpu", why="bad", reject=True)
    return plan_rollback(roles, goal, "cpu", why="bad")


versions = st.sampled_from(VERSIONS)
targets = st.sampled_from([*VERSIONS, EVIL, ALTERED])
places = st.integers(0, 40)


class ForgedLedgers(RuleBasedStateMachine):
    """One ledger, its honest users, and an attacker."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = MemoryObjects()
        self.folder = Path(tempfile.mkdtemp())
        self.granted = Granted()
        self.rejected: set[Digest] = set()
        self.backup: dict[str, bytes] = {}
        self.old_snapshot = b""
        self.now = 1000.0
        other = ObjectLedger(self.objects, KEYS)
        for sequence in range(1, 10):
            body = EndpointBound(config=endpoint_config(OTHER), policy=POLICIES[sequence % 2])
            other.append(
                LedgerEntry(endpoint=OTHER, sequence=sequence, at=1.0, actor="o", body=body)
            )
        self.intact: dict[str, bytes] = {}
        self.bind(0)
        for version in VERSIONS[:3]:
            for _ in range(3):
                self.move_on(version)
                self.conclude(ok=True, keys=KEYS)
        self.roll_back(VERSIONS[1], KEYS)
        self.carry_out(KEYS)
        self.conclude(ok=True, keys=KEYS)
        self.move_on(VERSIONS[3])
        self.conclude(ok=True, keys=KEYS)
        self.intact = dict(self.objects.data)

    def recover(self) -> None:
        """Restore the last readable storage, so that an attack does not end the history."""
        if self.read(self.machine) is None:
            self.objects.data = dict(self.intact)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # The following methods are actions of honest users.

    @property
    def machine(self) -> ObjectLedger:
        """Return the ledger as a process on the machine that records what it has read."""
        return ObjectLedger(self.objects, KEYS, self.folder)

    def read(self, ledger: ObjectLedger) -> ReleaseState | None:
        try:
            return ledger.state(ENDPOINT)
        except CorruptStateError:
            return None

    def is_complete(self) -> bool:
        """Return whether the ledger can be read without a snapshot."""
        copy = MemoryObjects()
        copy.data = {
            name: data for name, data in self.objects.data.items() if "snapshot" not in name
        }
        return self.read(ObjectLedger(copy, KEYS)) is not None

    def append(
        self, make: Callable[[ReleaseState], EntryBody | None], keys: LedgerKeys = KEYS
    ) -> None:
        """Append what an honest process decides after it has read the ledger.

        It runs on the machine that records what it has read.
        """
        self.recover()
        ledger = ObjectLedger(self.objects, keys, self.folder)
        state = self.read(ledger)
        body = None if state is None else make(state)
        if state is None or body is None:
            return
        self.now += 1.0
        entry = LedgerEntry(
            endpoint=ENDPOINT, sequence=state.head + 1, at=self.now, actor="h", body=body
        )
        if is_granting := keys is KEYS or (keys is SECOND and len(state.keys) > 1):
            # The body is signed even if the process is killed before it is stored.
            self.granted.add(body)
        is_stored = False
        with suppress(LedgerConflictError, MissingKeyError, StorageError):
            ledger.append(entry)
            is_stored = True
        after = self.read(self.machine)
        if after is None:
            # While a snapshot replaces the entries before it, an attack on them has no effect. The
            # next snapshot can be one that this machine does not trust.
            assert not self.is_complete()
            return
        assert not is_stored or after.head == entry.sequence
        if is_granting:
            # This also applies if the process was killed after the entry was stored.
            self.rejected = set(after.rejected)
        self.intact = dict(self.objects.data)

    @rule(policy=st.sampled_from([0, 1]))
    def bind(self, policy: int) -> None:
        self.append(
            lambda _: EndpointBound(config=endpoint_config(ENDPOINT), policy=POLICIES[policy])
        )

    @rule(both=st.booleans(), sets_state=st.booleans())
    def change_keys(self, both: bool, sets_state: bool) -> None:
        """Admit the second machine, or withdraw its key."""
        keys = ADMITTED if both else dict(KEYS.public())
        self.append(lambda state: LedgerAdopted(keys=keys, state=state if sets_state else None))

    @rule()
    def adopt_damaged(self) -> None:
        """Accept, as an operator, the last intact state of a damaged ledger."""
        if self.read(self.machine) is not None:
            return
        ledger = self.machine
        state = fold(ENDPOINT, ledger.read_intact(ENDPOINT))
        body = LedgerAdopted(keys=KEYS.public(), state=state)
        entry = LedgerEntry(
            endpoint=ENDPOINT,
            sequence=ledger.count(ENDPOINT) + 1,
            at=self.now,
            actor="operator",
            body=body,
        )
        with suppress(StorageError):
            ledger.append(entry)
        if (after := self.read(self.machine)) is not None:
            assert (after.adopted, after.roles) == (entry.sequence, state.roles)
            self.rejected = set(after.rejected)
            self.intact = dict(self.objects.data)

    @rule(version=versions, keys=st.sampled_from([KEYS, SECOND]))
    def move_on(self, version: Deployment, keys: LedgerKeys = KEYS) -> None:
        """Begin the next action towards a version, as an operator commands it."""

        def choose(state: ReleaseState) -> EntryBody | None:
            if state.config is None or state.pending_rollback is not None:
                return None
            wanted = state.roles.candidate or version
            if state.find_rejection(wanted) is not None and wanted.manifest not in state.overrides:
                return None
            roles = state.roles
            percent = 0 if roles.candidate is None else 10 if roles.step == 0 else 50
            seen = (
                None
                if roles.stable is None
                else build_split_state(roles.stable, roles.candidate, percent)
            )
            action = choose_next_action(
                desired=wanted, observed=seen, roles=roles, policy=state.policy, target="cpu",
                command=OperatorCommand.ADVANCE, now=self.now,
            )  # fmt: skip
            return (
                Intent(action=action, holder="h", expires_at=self.now)
                if isinstance(action, Action)
                else None
            )

        self.append(choose, keys)

    @rule(ok=st.booleans(), keys=st.sampled_from([KEYS, KEYLESS]))
    def conclude(self, ok: bool, keys: LedgerKeys) -> None:
        self.append(
            lambda s: None if s.open_intent is None else ActionOutcome(of=s.generation, ok=ok), keys
        )

    @rule(goal=versions, keys=st.sampled_from([KEYS, KEYLESS]))
    def roll_back(self, goal: Deployment, keys: LedgerKeys) -> None:
        self.append(
            lambda s: (
                None
                if s.roles.stable is None
                else RollbackRequested(action=rollback(s.roles, goal))
            ),
            keys,
        )

    @rule(keys=st.sampled_from([KEYS, KEYLESS]))
    def carry_out(self, keys: LedgerKeys) -> None:
        self.append(
            lambda s: (
                None
                if s.pending_rollback is None
                else Intent(action=s.pending_rollback.action, holder="h", expires_at=self.now)
            ),
            keys,
        )

    @rule(keys=st.sampled_from([KEYS, SECOND]))
    def withdraw(self, keys: LedgerKeys) -> None:
        self.append(
            lambda s: None if s.pending_rollback is None else RequestWithdrawn(reason="wrong"), keys
        )

    @rule(version=versions)
    def allow(self, version: Deployment) -> None:
        self.append(lambda _: override(version))

    @rule(command=st.sampled_from(list(OperatorCommand)))
    def order(self, command: OperatorCommand) -> None:
        self.append(lambda _: OperatorCommandSent(command=command))

    @rule(point=st.sampled_from(["before", "after", "snapshot"]))
    def crash_next(self, point: str) -> None:
        self.objects.crash = point

    # The following methods are actions of an attacker.

    def names(self) -> list[str]:
        return sorted(name for name in self.objects.data if name.startswith(f"{ENDPOINT}/0"))

    def forge(self, *bodies: EntryBody, keys: LedgerKeys | None = None) -> None:
        """Append entries in sequence, unsigned or with the signature of a stranger."""
        for body in bodies:
            names = self.names()
            last = decode(ENDPOINT, len(names), self.objects.data[names[-1]]) if names else None
            entry = LedgerEntry(
                endpoint=ENDPOINT, sequence=len(names) + 1, at=self.now, actor="alice", body=body
            )
            chained = ChainedEntry(
                previous=None if last is None else last.digest, snapshot=None, entry=entry
            )
            signatures = () if keys is None else keys.sign(encode(chained), "", "", {})
            self.objects.data[f"{ENDPOINT}/{entry.sequence:08d}.jsonl"] = encode(
                chained, signatures
            )

    def attempt(self, attack: Callable[[], None]) -> None:
        self.recover()
        try:
            attack()
        except (CorruptStateError, IndexError):
            return

    @rule(
        version=targets,
        kind=st.sampled_from(list(ActionKind)),
        candidate=st.none() | targets,
        data=st.data(),
    )
    def forge_action(
        self,
        version: Deployment,
        kind: ActionKind,
        candidate: Deployment | None,
        data: st.DataObject,
    ) -> None:
        percent = 0 if candidate is None else data.draw(st.sampled_from([0, 10, 50, 100]))
        leads_to = data.draw(st.sampled_from([version, *VERSIONS]))
        action = Action(
            kind=kind,
            state=build_split_state(version, candidate, percent),
            roles=Roles(
                stable=leads_to, candidate=candidate, step=data.draw(st.sampled_from([0, 1]))
            ),
            why="forged",
            aliases=data.draw(
                st.sampled_from([{}, {"champion-cpu": version.version}, {"payments": None}])
            ),
        )
        begun = Intent(action=action, holder="alice", expires_at=0.0)
        done = ActionOutcome(of=len(self.names()) + 1, ok=True)
        keys = data.draw(st.sampled_from([None, THIEF]))
        request = RollbackRequested(action=action)
        bodies = data.draw(st.sampled_from([(begun,), (begun, done), (request,), (request, begun)]))
        self.attempt(lambda: self.forge(*bodies, keys=keys))

    @rule(goal=targets, previous=st.none() | targets)
    def forge_rollback(self, goal: Deployment, previous: Deployment | None) -> None:
        self.recover()
        state = self.read(ObjectLedger(self.objects, KEYS))
        if state is None:
            return
        action = rollback(state.roles, goal)
        action = replace(action, roles=replace(action.roles, previous=previous))
        self.attempt(lambda: self.forge(RollbackRequested(action=action)))

    @rule(version=targets, data=st.data())
    def forge_other(self, version: Deployment, data: st.DataObject) -> None:
        limits = LatencyThresholds(p50_s=9.0, p99_s=9.0, requests=4000)
        lifted = replace(
            self.read(ObjectLedger(self.objects, KEYS)) or ReleaseState(endpoint=ENDPOINT),
            rejected={},
        )
        bodies: list[EntryBody] = [
            EndpointBound(
                config=replace(endpoint_config(ENDPOINT), provider="evil"), policy=POLICIES[0]
            ),
            RequestWithdrawn(reason="forged"),
            override(version),
            EndpointDeleted(reason="forged"),
            EndpointDeleted(done=True),
            EndpointAbandoned(reason="forged", place="x"),
            ThresholdsFixed(candidate=version.manifest, thresholds=limits),
            OperatorCommandSent(command=OperatorCommand.ADVANCE),
            OperatorCommandSent(command=OperatorCommand.RESUME),
            AliasesWritten(aliases={"champion-cpu": version.version}),
            AliasesWritten(aliases={"payments": version.version}),
            VersionRefused(
                alias="champion-cpu", version="1", reason="forged", restored_to=version.version
            ),
            VersionRefused(alias="payments", version="1", reason="forged", restored_to=None),
            LeaseRenewed(of=len(self.names()), expires_at=1e12),
            ActionOutcome(of=len(self.names()), ok=True),
            LedgerAdopted(keys=THIEF.public()),
            LedgerAdopted(keys=THIEF.public(), state=lifted),
            LedgerAdopted(keys=KEYS.public(), state=lifted),
        ]
        body = data.draw(st.sampled_from(bodies))
        self.attempt(lambda: self.forge(body, keys=data.draw(st.sampled_from([None, THIEF]))))

    @rule(first=places, second=places, data=st.data())
    def disturb(self, first: int, second: int, data: st.DataObject) -> None:
        """Change, remove, exchange or repeat what is stored."""
        self.recover()
        names = self.names()
        if not names:
            return
        one, other = (names[place % len(names)] for place in (first, second))
        stored = self.objects.data
        how = data.draw(
            st.sampled_from(
                [
                    "cut",
                    "remove",
                    "exchange",
                    "repeat",
                    "unsign",
                    "edit",
                    "foreign",
                    "borrow",
                    "renumber",
                ]
            )
        )
        if how == "cut":
            for name in names[max(1, first % len(names)) :]:
                del stored[name]
        elif how == "remove":
            del stored[one]
        elif how == "exchange":
            stored[one], stored[other] = stored[other], stored[one]
        elif how == "repeat":
            stored[f"{ENDPOINT}/{len(names) + 1:08d}.jsonl"] = stored[one]
        elif how == "unsign":
            stored[one] = stored[one].partition(b"\n")[0]
        elif how == "edit":
            stored[one] = (
                stored[one].replace(b'"v1"', b'"v2"').replace(b'"version":"1"', b'"version":"2"')
            )
        elif how == "foreign":
            stored[one] = stored[f"{OTHER}/{1 + second % 9:08d}.jsonl"]
        elif how == "borrow":
            # The entry gets the signature of another entry.
            stored[one] = (
                stored[one].partition(b"\n")[0] + b"\n" + stored[other].partition(b"\n")[2]
            )
        else:
            signed, _, rest = stored[one].partition(b"\n")
            document = json.loads(signed)
            document["entry"]["sequence"] = len(names) + 1
            text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
            stored[f"{ENDPOINT}/{len(names) + 1:08d}.jsonl"] = text + b"\n" + rest

    @rule(sequence=places, damaged=places)
    def forge_pointer(self, sequence: int, damaged: int) -> None:
        """Damage an entry, and forge the pointer to the entry that set the state."""
        self.recover()
        names = self.names()
        self.objects.data[names[damaged % len(names)]] = b"damaged"
        self.objects.data[f"{ENDPOINT}/adopted.json"] = str(1 + sequence % len(names)).encode()
        self.objects.data.pop(f"{ENDPOINT}/snapshot.json", None)

    @rule(how=st.sampled_from(["edit", "keep", "restore", "remove", "foreign"]))
    def disturb_snapshot(self, how: str) -> None:
        self.recover()
        stored, name = self.objects.data, f"{ENDPOINT}/snapshot.json"
        present = stored.get(name, b"")
        if how == "edit" and present:
            document = json.loads(present)
            document["state"]["rejected"], document["state"]["pending_rollback"] = {}, None
            stored[name] = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        elif how == "keep":
            self.old_snapshot = present
        elif how == "restore" and self.old_snapshot:
            stored[name] = self.old_snapshot
        elif how == "remove":
            stored.pop(name, None)
        elif how == "foreign":
            stored[name] = stored[f"{OTHER}/snapshot.json"]

    @rule()
    def back_up(self) -> None:
        self.backup = dict(self.objects.data)

    @rule()
    def rewind(self) -> None:
        if self.backup:
            self.objects.data = dict(self.backup)

    # The following methods check the invariants.

    @invariant()
    def everything_was_granted(self) -> None:
        state = self.read(ObjectLedger(self.objects, KEYS))
        if state is None:
            return
        granted, roles = self.granted, state.roles
        assert set(state.keys) <= set(ADMITTED)
        assert state.config is None or (state.config, state.policy) in granted.bound
        assert state.stables <= granted.list_stables()
        assert roles.stable is None or roles.stable.manifest in granted.list_stables()
        pending = (
            None if state.pending_rollback is None else state.pending_rollback.action.roles.stable
        )
        assert pending is None or pending.manifest in granted.list_stables()
        assert roles.candidate is None or roles.candidate.manifest in granted.list_candidates()
        assert all(d in VERSIONS for d in state.known.values())
        assert roles.previous is None or roles.previous in VERSIONS
        assert set(state.overrides) <= granted.overrides
        assert (state.deleting, state.thresholds) == (False, None)
        assert state.command in (None, OperatorCommand.PAUSE, *granted.commands)
        assert "payments" not in {**state.aliases, **state.pending_aliases}
        shown = {
            version
            for version in {**state.aliases, **state.pending_aliases}.values()
            if version is not None
        }
        assert shown <= {d.version for d in VERSIONS if d.manifest in granted.list_stables()}
        refusal = state.open_refusal
        assert refusal is None or (
            refusal.alias != "payments" and refusal.restored_to in (None, *shown)
        )

    @invariant()
    def no_rejection_is_lost(self) -> None:
        """Only an honest owner of the key lifts rejections that this machine has read.

        An override permits a rollback to the version, which lifts its rejection.
        """
        state = self.read(self.machine)
        if state is not None:
            assert self.rejected - set(state.rejected) <= self.granted.overrides
            self.rejected = set(state.rejected)


def make_test(machine: type[ForgedLedgers], examples: int) -> Any:
    """Return a test case of the machine with this number of examples."""
    case: Any = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


class ManyForgedLedgers(ForgedLedgers):
    """The same machine, for the nightly tier."""


TestForgedLedgers = make_test(ForgedLedgers, 20)
TestManyForgedLedgers = pytest.mark.nightly(make_test(ManyForgedLedgers, 100))
