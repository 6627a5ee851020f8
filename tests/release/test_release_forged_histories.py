"""Histories changed by an attacker without a key, and the reaction of processes.

Version 2 was rolled back. Version 4 failed its gates. Version 5 passed them and was never
requested. All other actions of the attacker are drawn at random.
"""

from __future__ import annotations

import copy
import json
import random
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from onnx_ops.adapters.ledgers.chain import LedgerKeys
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.endpoint import Deployment
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
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    VersionRefused,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    build_split_state,
    plan_rollback,
)
from onnx_ops.errors import ConflictError, OnnxOpsError
from onnx_ops.ports import Context
from onnx_ops.release.adoption import adopt, find_adoption
from onnx_ops.release.decision_policy import rolled_back_tag
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.rollback import withdraw_request
from onnx_ops.testing.fakes import FakeSigner, FakeWorld, make_ledger_keys
from tests.release.release_parts import (
    CANARY,
    CHALLENGER,
    CHAMPION,
    MODEL,
    Scene,
    config_of,
    roll_back,
)
from tests.support.chains import MemoryObjects, append_raw

ENDPOINT = "digits"
KEYS = make_ledger_keys()
KEYLESS = LedgerKeys(KEYS.verifier, lambda: None)
THIEF = make_ledger_keys(FakeSigner(b"has no trusted key"))
HISTORIES, NIGHTLY_HISTORIES = 60, 600
SERVED = {"1", "3"}
"""Versions that had all traffic and were not rolled back."""


@dataclass
class Attack:
    """The access of one attacker.

    The attacker can write the storage of the ledger, and in some attacks the registry.
    """

    scene: Scene
    objects: MemoryObjects
    draw: random.Random

    def forge_entries(self) -> None:
        """Append chained entries of any kind, about any version."""
        version = self.deployment(self.draw.choice("12345"))
        other = self.deployment(self.draw.choice("12345"))
        percent = self.draw.choice((0, 10, 50, 100))
        given = self.draw.choice((None, other))
        action = Action(
            kind=self.draw.choice(list(ActionKind)),
            state=build_split_state(version, given, 0 if given is None else percent),
            roles=Roles(stable=version, candidate=given, step=self.draw.choice((0, 1))),
            why="forged",
            aliases=self.draw.choice(
                ({}, {CHAMPION: version.version}, {CHALLENGER: "5"}, {"payments": None})
            ),
            reject=self.draw.choice(((), (other.release,))),
        )
        intent = Intent(action=action, holder="alice", expires_at=0.0)
        head = len(self.names())
        bodies: list[tuple[EntryBody, ...]] = [
            (intent,),
            (intent, ActionOutcome(of=head + 1, ok=True)),
            (RollbackRequested(action=action),),
            (
                RollbackRequested(action=action),
                replace(intent),
                ActionOutcome(of=head + 2, ok=True),
            ),
            (
                RollbackRequested(
                    action=plan_rollback(
                        Roles(stable=self.deployment("3")), version, "cpu", why="back"
                    )
                ),
            ),
            (
                EndpointBound(
                    config=replace(config_of(ENDPOINT), options={"region": "evil"}), policy=CANARY
                ),
            ),
            (RequestWithdrawn(reason="forged"),),
            (OperatorCommandSent(command=self.draw.choice(list(OperatorCommand))),),
            (EndpointDeleted(reason="forged"), EndpointDeleted(done=True)),
            (EndpointAbandoned(reason="forged", place="memory"),),
            (AliasesWritten(aliases={CHAMPION: version.version}),),
            (
                VersionRefused(
                    alias=CHAMPION, version="3", reason="forged", restored_to=version.version
                ),
            ),
            (LeaseRenewed(of=head, expires_at=1e12),),
            (self.override(version),),
            (LedgerAdopted(keys=self.draw.choice(({}, THIEF.public()))), intent),
            (LedgerAdopted(keys=KEYS.public(), state=self.lifted_state()),),
        ]
        for body in self.draw.choice(bodies):
            append_raw(self.objects, ENDPOINT, body)

    def disturb_entries(self) -> None:
        """Cut, remove, exchange, repeat, edit or copy stored entries."""
        names, stored = self.names(), self.objects.data
        if not names:
            return
        one, other = self.draw.choice(names), self.draw.choice(names)
        match self.draw.choice(
            (
                "cut",
                "remove",
                "exchange",
                "repeat",
                "edit",
                "foreign",
                "unsign",
                "pointer",
                "snapshot",
            )
        ):
            case "cut":
                for name in names[self.draw.randrange(1, len(names) + 1) :]:
                    del stored[name]
            case "remove":
                del stored[one]
            case "exchange":
                stored[one], stored[other] = stored[other], stored[one]
            case "repeat":
                stored[f"{ENDPOINT}/{len(names) + 1:08d}.jsonl"] = stored[one]
            case "edit":
                stored[one] = (
                    stored[one]
                    .replace(b'"version":"3"', b'"version":"5"')
                    .replace(b'"v1"', b'"v2"')
                )
            case "foreign":
                stored[one] = stored[
                    self.draw.choice([name for name in stored if name.startswith("faces/0")])
                ]
            case "unsign":
                stored[one] = stored[one].partition(b"\n")[0]
            case "pointer":
                stored[one] = b"damaged"
                stored[f"{ENDPOINT}/adopted.json"] = str(int(other[-14:-6])).encode()
            case _:
                document = json.loads(stored[f"{ENDPOINT}/snapshot.json"])
                document["state"]["rejected"] = {}
                stored[f"{ENDPOINT}/snapshot.json"] = json.dumps(document).encode()

    def write_registry(self) -> None:
        """Move aliases, and remove the tag of the rollback of version 2."""
        registry = self.scene.world.registry
        registry.set_alias(
            MODEL, self.draw.choice((CHAMPION, CHALLENGER)), self.draw.choice("12345")
        )
        if self.draw.random() < 0.5:
            registry.annotate(MODEL, "2", {rolled_back_tag(ENDPOINT): ""})

    def names(self) -> list[str]:
        return sorted(name for name in self.objects.data if name.startswith(f"{ENDPOINT}/0"))

    def deployment(self, version: str) -> Deployment:
        """Return a version as the ledger would contain it, with its own decision."""
        known = ObjectLedger(MemoryObjects(dict(make_base()[1].data)), KEYS).state(ENDPOINT).known
        if version in known:
            return known[version]
        record = self.scene.record(version)
        about = {
            name: getattr(record, name) for name in ("version", "release", "variant", "manifest")
        }
        return replace(
            known["1"], name=f"v{version}", authority=record.decisions["cpu"].envelope, **about
        )

    def lifted_state(self) -> ReleaseState:
        """Return the state before the attack, without its rejections."""
        return replace(
            ObjectLedger(MemoryObjects(dict(make_base()[1].data)), KEYS).state(ENDPOINT),
            rejected={},
        )

    def override(self, version: Deployment) -> OverrideRecorded:
        assert version.authority is not None
        return OverrideRecorded(
            release=version.release,
            manifest=version.manifest,
            version=version.version,
            reason="forged",
            signed=version.authority,
        )


@cache
def make_base() -> tuple[Scene, MemoryObjects]:
    """Return the scene before the attack, and the storage of its ledger."""
    objects = MemoryObjects()
    scene = Scene(world=FakeWorld(ledger=ObjectLedger(objects, KEYS)))
    scene.bind("faces")
    scene.bind()
    scene.serve(scene.publish("a"))
    scene.serve(scene.publish("b"))
    scene.roll_back()
    scene.reconcile()
    adopt(scene.context, find_adoption(scene.context, ENDPOINT), reason="an owner looked at it")
    scene = Scene(world=replace(scene.world, ledger=ObjectLedger(objects, KEYS)))
    scene.serve(scene.publish("c"))
    scene.reconcile_some()
    scene.publish("d", verdict=Verdict.FAIL)
    scene.publish("e")
    return scene, objects


def drive(attack: Attack, seen: Path | None) -> None:
    """Do what unsuspecting processes and operators do next, with and without a key."""
    world = attack.scene.world

    def context(keys: LedgerKeys) -> Context:
        attack.scene.restart()
        ledger = ObjectLedger(attack.objects, keys, seen)
        made = replace(world, ledger=ledger).context(attack.scene.process)
        return made if keys is KEYS else replace(made, signer=lambda: None)

    acts: tuple[Callable[[], object], ...] = (
        lambda: reconcile_until_stable(context(KEYS), ENDPOINT),
        lambda: reconcile_until_stable(context(KEYLESS), ENDPOINT),
        lambda: roll_back(
            context(attack.draw.choice((KEYS, KEYLESS))), ENDPOINT, reason="what is this?"
        ),
        lambda: reconcile_until_stable(context(KEYS), ENDPOINT),
        lambda: withdraw_request(context(KEYLESS), ENDPOINT, reason="no"),
        lambda: reconcile_until_stable(context(KEYS), ENDPOINT),
    )
    for act in acts:
        world.clock.advance(1000.0)
        try:
            act()
        except (OnnxOpsError, ConflictError):
            continue


def list_seen_traffic(scene: Scene, before: int) -> set[str]:
    """Return the versions that got traffic since `before`."""
    changes = [
        state for endpoint, state in scene.world.provider.applied[before:] if endpoint == ENDPOINT
    ]
    return {
        name.removeprefix("v")
        for state in changes
        for name, weight in state.split.weights.items()
        if weight
    }


def list_loaded(scene: Scene, before: int) -> set[Digest]:
    return {
        d.manifest for _, state in scene.world.provider.applied[before:] for d in state.deployments
    }


def try_histories(count: int, *, registry: bool, ledger: bool, folder: Path) -> None:
    """Try drawn attacks.

    With access to the ledger alone, traffic only returns to earlier versions. With access to the
    registry, versions can get traffic that have a passing decision and were never rolled back.
    """
    first = secrets.randbelow(1 << 32)
    sys.stdout.write(f"seeds {first} to {first + count - 1}\n")
    for seed in range(first, first + count):
        scene, objects = copy.deepcopy(make_base())
        attack = Attack(scene, objects, random.Random(seed))  # noqa: S311 (it draws tests)
        seen = folder / str(seed)
        ObjectLedger(objects, KEYS, seen).state(ENDPOINT)
        before = len(scene.world.provider.applied)
        for _ in range(attack.draw.randrange(1, 5)):
            moves = [attack.write_registry] * registry + [
                attack.forge_entries,
                attack.disturb_entries,
            ] * ledger
            attack.draw.choice(moves)()
        drive(attack, seen if registry or attack.draw.random() < 0.5 else None)
        allowed = SERVED | {"5"} if registry else SERVED
        assert list_seen_traffic(scene, before) <= allowed, seed
        assert list_loaded(scene, before) <= {
            scene.record(version).manifest for version in "1235"
        }, seed
        options = scene.world.provider._options[ENDPOINT]
        assert options == config_of(ENDPOINT).options, seed
        if not registry:
            assert scene.record("2").tags[rolled_back_tag(ENDPOINT)], seed
            assert set(scene.aliases().values()) <= SERVED, seed


@pytest.mark.parametrize(("registry", "ledger"), [(False, True), (True, False), (True, True)])
def test_forged_histories_move_traffic_only_to_approved_versions(
    registry: bool, ledger: bool, tmp_path: Path
) -> None:
    try_histories(HISTORIES, registry=registry, ledger=ledger, folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("registry", "ledger"), [(False, True), (True, False), (True, True)])
def test_forged_histories_at_nightly_scale_move_traffic_only_to_approved_versions(
    registry: bool, ledger: bool, tmp_path: Path
) -> None:
    try_histories(NIGHTLY_HISTORIES, registry=registry, ledger=ledger, folder=tmp_path)
