"""Files that are loaded while an attacker writes the registry or the ledger.

The attacker writes the registry, the ledger's storage, or both, without the gate's key. The
attacker has no key at all, or has stolen the key that signs only entries of the ledger.
The files of versions 2 and 3 failed their gates. The attacker knows every decision that was ever
signed, and the override that once let version 2 serve.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.ledgers.log import SNAPSHOT_EVERY, ObjectLedger
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.attestation import TrustedKeys, sign_record
from onnx_ops.domain.artifact import Digest, digest_bytes, digest_file
from onnx_ops.domain.attestation import Envelope, override_reason_tag, override_record_tag
from onnx_ops.domain.decision import SignedDecision, Verdict
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.ledger import (
    ActionOutcome,
    EndpointBound,
    EntryBody,
    Intent,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseState,
    RollbackRequested,
)
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, Roles, plan_rollback
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.ports import Context
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.serving.inference.integrity import ModelCopies, TrustPolicy
from onnx_ops.testing.endpoints import scaling_deployment
from onnx_ops.testing.fakes import FakeProvider, FakeSigner, FakeWorld, make_ledger_keys
from tests.release.release_parts import (
    CHALLENGER,
    CHAMPION,
    config_of,
    override_record,
    override_tags,
    publish_file,
    roll_back,
)
from tests.release.release_scenes import serving
from tests.support.chains import append_unsigned
from tests.support.must import must

ENDPOINT, MODEL, OTHER, TARGET, GPU = "digits", "digits", "faces", "cpu", "gpu"
THIEF = FakeSigner(b"has no trusted key")


class Loading(FakeProvider):
    """Provider that loads as the server does, up to the runtime.

    `loaded` contains the digests of the files that the runtime would open.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        self._trust = TrustPolicy(TrustedKeys((), encoded=FakeSigner().trusted_keys), folder)
        self._copies = ModelCopies(folder / "models", self._trust)
        self.loaded: list[str] = []

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        self._load(config, state)
        super().apply(config, state, generation=generation)
        self._trust.bind(state)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        self._load(config, state)
        super().roll_back(config, state, generation=generation)

    def _load(self, config: EndpointConfig, state: EndpointState) -> None:
        held = self.observe(config)
        for one in state.deployments:
            if held is None or one not in held.deployments:
                copy = self._copies.fetch(one)
                self.loaded += [
                    digest_file(copy / name) for name in ("model.onnx", *one.custom_ops)
                ]


@dataclass
class Site:
    """An endpoint that serves version 1, and its history.

    The attacker knows the history. The site records what is loaded from now on.
    """

    root: Path
    real: bool = False
    has_release_key: bool = False
    world: FakeWorld = field(default_factory=FakeWorld)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = replace(config_of(ENDPOINT), provider="p")
        keys = self.root / "keys"
        keys.mkdir()
        self.fake = Loading(self.root / "server")
        self.local = LocalEndpoints(self.root / "endpoints", keys)
        if self.real:
            (keys / "signing.pub.pem").write_bytes(self.world.signer.public_pem())
        self.publish(1)
        bind_endpoint(self.context, self.config, RolloutPolicy())
        promote(self.context, MODEL, "1", TARGET)
        reconcile_until_stable(self.context, ENDPOINT)
        self.before = len(self.ledger().read(ENDPOINT))
        self.publish(2, Verdict.FAIL)
        promote(self.context, MODEL, "2", TARGET, override=True, reason="sure")
        reconcile_until_stable(self.context, ENDPOINT)
        roll_back(self.context, ENDPOINT, reason="it is slow")
        reconcile_until_stable(self.context, ENDPOINT)
        self.publish(3, Verdict.FAIL)
        self.publish(4, target=GPU)
        self.publish(1, model=OTHER, scale=9.0)
        self.fake.loaded.clear()
        assert self.serving() == {"v1": 100}

    def ledger(self) -> ObjectLedger:
        return ObjectLedger(LocalObjects(self.root / "ledger"), make_ledger_keys())

    @property
    def context(self) -> Context:
        """Return the context of a process that has just started."""
        context = replace(
            replace(self.world, ledger=self.ledger()).context(root=self.root),
            files=ModelFolders(self.root / "models"),
            clock=SystemClock(),
        )
        return replace(context, provider=lambda _: self.local if self.real else self.fake)

    def publish(
        self,
        number: int,
        verdict: Verdict = Verdict.PASS,
        *,
        model: str = MODEL,
        target: str = TARGET,
        scale: float | None = None,
    ) -> str:
        folder = self.root / "built" / model / str(number)
        scaling_deployment(
            folder, name="x", version=str(number), scale=scale or float(number), model=model
        )
        return publish_file(
            self.world,
            folder / "model.onnx",
            digest_bytes(f"{model} {number}".encode()),
            model=model,
            target=target,
            evidence=digest_bytes(f"evidence {number}".encode()),
            verdict=verdict,
            verdicts={"size": verdict},
            execution=Execution(),
            sequence=number,
        )

    def record(self, version: str, model: str = MODEL) -> VersionRecord:
        return self.world.registry.version(model, version)

    def state(self) -> ReleaseState:
        return self.ledger().state(ENDPOINT)

    def forge(self, version: str, **changes: Any) -> None:
        """Change the registry's record of a version."""
        self.world.registry.replace_record(replace(self.record(version), **changes))

    def ask_for(self, version: str) -> None:
        self.world.registry.set_alias(MODEL, CHALLENGER, version)
        self.world.registry.set_alias(MODEL, CHAMPION, version)

    def append(self, *bodies: EntryBody) -> None:
        """Append entries to the ledger's storage, each with the digest of its predecessor."""
        for body in bodies:
            if self.has_release_key:
                Journal.open(self.context, ENDPOINT, actor="alice").append(body)
            else:
                append_unsigned(self.root / "ledger", ENDPOINT, body)

    def rewrite(self, change: Callable[[Any], Any]) -> None:
        """Replace every document of the ledger by the result of `change`."""
        for path in sorted((self.root / "ledger" / ENDPOINT).iterdir()):
            path.write_text(
                "\n".join(
                    json.dumps(change(json.loads(line))) for line in path.read_text().splitlines()
                )
            )

    def deployment(self, version: str, **changes: Any) -> Deployment:
        """Return a deployment of a version as the ledger would contain it.

        Its authority is the one that the attacker gives it.
        """
        record = self.record(version)
        known = self.state().known["1"]
        there = {"location": str(self.root / "built" / MODEL / version), "authority": None}
        about = {
            name: getattr(record, name) for name in ("version", "release", "variant", "manifest")
        }
        return replace(known, name=f"v{version}", **{**about, **there, **changes})

    def drive(self) -> None:
        """Do everything that an unsuspecting operator does next."""
        for act in (
            lambda: self.messages.extend(
                r.why for r in reconcile_until_stable(self.context, ENDPOINT)
            ),
            lambda: promote(self.context, MODEL, "3", TARGET),
            lambda: self.messages.extend(
                r.why for r in reconcile_until_stable(self.context, ENDPOINT)
            ),
            lambda: roll_back(self.context, ENDPOINT, reason="what is this?"),
            lambda: self.messages.extend(
                r.why for r in reconcile_until_stable(self.context, ENDPOINT)
            ),
        ):
            try:
                act()
            except OnnxOpsError as error:
                self.messages.append(str(error))

    def serving(self) -> dict[str, int]:
        provider = self.local if self.real else self.fake
        seen = must(provider.observe(self.config))
        return {name: weight for name, weight in seen.split.weights.items() if weight}

    def held(self) -> set[Digest]:
        seen = (self.local if self.real else self.fake).observe(self.config)
        return set() if seen is None else {one.manifest for one in seen.deployments}


def all_to(deployment: Deployment) -> EndpointState:
    return EndpointState(
        deployments=(deployment,), split=TrafficSplit(weights={deployment.name: 100})
    )


def bringing(deployment: Deployment, kind: ActionKind = ActionKind.FINISH) -> Action:
    return Action(
        kind=kind, state=all_to(deployment), roles=Roles(stable=deployment), why="looks good"
    )


def begun(action: Action) -> Intent:
    return Intent(action=action, holder="a process that died", expires_at=0.0)


def decision_of(
    site: Site, version: str = "1", target: str = TARGET, model: str = MODEL
) -> SignedDecision:
    return site.record(version, model).decisions[target]


def stolen(site: Site, version: str) -> SignedDecision:
    """Return a passing decision about the version, signed with an untrusted key."""
    record = replace(decision_of(site, version).record, verdict=Verdict.PASS)
    return sign_record(record, THIEF)


def override_of(site: Site, version: str) -> Envelope:
    """Return an override of the version, signed with an untrusted key."""
    return sign_record(override_record(site.record(version)), THIEF).envelope


def past_override(site: Site) -> OverrideRecorded:
    (given,) = [
        e.body for e in site.ledger().read(ENDPOINT) if isinstance(e.body, OverrideRecorded)
    ]
    return given


def copied_decision(site: Site) -> None:
    site.forge("3", decisions=site.record("1").decisions)
    site.ask_for("3")


def edited_decision(site: Site) -> None:
    genuine, mine = decision_of(site, "3").envelope, stolen(site, "3")
    envelope = replace(mine.envelope, signatures=genuine.signatures)
    site.forge("3", decisions={TARGET: replace(mine, envelope=envelope)})
    site.ask_for("3")


def self_signed_decision(site: Site) -> None:
    site.forge("3", decisions={TARGET: stolen(site, "3")})
    site.ask_for("3")


def decision_of_another_target(site: Site) -> None:
    site.forge("4", decisions={TARGET: decision_of(site, "4", GPU)})
    site.ask_for("4")


def decision_of_another_model(site: Site) -> None:
    site.forge("3", decisions=site.record("1", OTHER).decisions)
    site.ask_for("3")


def renamed_into_another_model(site: Site) -> None:
    """Put everything of the other model's version except its files on this version."""
    other = site.record("1", OTHER)
    site.forge("3", release=other.release, manifest=other.manifest, decisions=other.decisions)
    site.ask_for("3")


def release_of_the_overridden(site: Site) -> None:
    site.forge("3", release=site.record("2").release)
    site.ask_for("3")


def tags_of_the_overridden(site: Site) -> None:
    two = site.record("2")
    site.forge(
        "3",
        tags={
            tag: two.tags[tag] for tag in (override_reason_tag(TARGET), override_record_tag(TARGET))
        },
    )
    site.ask_for("3")


def identity_of_the_approved(site: Site) -> None:
    """Give version 3 all fields of version 1, but keep its own files."""
    one = site.record("1")
    site.forge("3", release=one.release, manifest=one.manifest, decisions=one.decisions)
    site.world.registry.set_alias(MODEL, CHALLENGER, "3")
    shutil.rmtree(site.root / "models")


def replaced_artifact(site: Site) -> None:
    site.world.registry.tamper(site.record("4"), "model.onnx")
    decision = sign_record(
        replace(decision_of(site, "4", GPU).record, target=TARGET), site.world.signer
    )
    site.forge("4", decisions={TARGET: decision})
    site.ask_for("4")


def self_signed_override(site: Site) -> None:
    site.forge("3", tags=override_tags(override_of(site, "3")))
    site.ask_for("3")


def known_override_after_the_rollback(site: Site) -> None:
    site.forge("2", tags={t: v for t, v in site.record("2").tags.items() if "rolled-back" not in t})
    site.ask_for("2")


def begun_rollout(site: Site) -> None:
    site.append(begun(bringing(site.deployment("3"))))


def begun_rollout_with_the_authority_of_another(site: Site) -> None:
    one = site.state().known["1"]
    site.append(
        begun(bringing(site.deployment("3", authority=one.authority, evidence=one.evidence)))
    )


def other_files_under_an_approved_name(site: Site) -> None:
    """Keep all approved fields, and replace only the files."""
    one = site.state().known["1"]
    site.append(
        begun(bringing(replace(one, name="v7", location=str(site.root / "built" / MODEL / "3"))))
    )


def added_library(site: Site) -> None:
    one = site.state().known["1"]
    folder = site.root / "mixed"
    shutil.copytree(site.context.files.place(one.manifest), folder)
    (folder / "custom_ops" / TARGET).mkdir(parents=True)
    (folder / "custom_ops" / TARGET / "evil.so").write_bytes(b"\x7fELF")
    library = f"custom_ops/{TARGET}/evil.so"
    site.append(
        begun(bringing(replace(one, name="v7", location=str(folder), custom_ops=(library,))))
    )


def finished_rollout(site: Site) -> None:
    """Make the ledger claim that version 3 serves.

    The endpoint then differs from its expected state.
    """
    head = site.state().head
    site.append(begun(bringing(site.deployment("3"))), ActionOutcome(of=head + 1, ok=True))


def begun_canary(site: Site) -> None:
    one = site.state().known["1"]
    mixed = EndpointState(
        deployments=(one, site.deployment("3")), split=TrafficSplit(weights={"v1": 50, "v3": 50})
    )
    roles = Roles(stable=one, candidate=site.deployment("3"))
    site.append(begun(Action(kind=ActionKind.START, state=mixed, roles=roles, why="step 1")))


def roll_back_to_other_files(site: Site) -> None:
    one = site.state().known["1"]
    back = plan_rollback(Roles(stable=one), site.deployment("3"), TARGET, why="back")
    site.append(RollbackRequested(action=back))


def previous_version_replaced(site: Site) -> None:
    """Replace the previous version.

    The operator's own rollback then loads the files.
    """
    head, one = site.state().head, site.state().known["1"]
    roles = Roles(stable=one, previous=site.deployment("3"), finished_at=1.0)
    keeping = Action(kind=ActionKind.CLEAN_UP, state=all_to(one), roles=roles, why="kept")
    site.append(begun(keeping), ActionOutcome(of=head + 1, ok=True))


def forged_override_in_the_ledger(site: Site) -> None:
    record = site.record("3")
    given = OverrideRecorded(
        release=record.release,
        manifest=record.manifest,
        version="3",
        reason="sure",
        signed=override_of(site, "3"),
    )
    site.append(given)
    site.ask_for("3")


def known_override_on_other_files(site: Site) -> None:
    record, given = site.record("3"), past_override(site)
    site.append(replace(given, release=record.release, manifest=record.manifest, version="3"))
    site.ask_for("3")


def known_override_again(site: Site) -> None:
    site.append(past_override(site))
    site.ask_for("2")


def ledger_of_before_the_rollback(site: Site) -> None:
    """Remove the newer entries of the ledger, and lose the endpoint's server."""
    folder = site.root / "ledger" / ENDPOINT
    for path in folder.iterdir():
        if not path.stem.isdecimal() or int(path.stem) > site.before:
            path.unlink()
    site.fake = Loading(site.root / "another machine")
    site.ask_for("2")


def snapshot_with_other_files(site: Site) -> None:
    """Forge a snapshot in which version 3 serves and nothing was ever rejected."""
    three = codec.to_json(site.deployment("3"))
    while site.state().head % SNAPSHOT_EVERY != 1:
        Journal.open(site.context, ENDPOINT).append(
            OperatorCommandSent(command=OperatorCommand.ADVANCE)
        )
    folder = site.root / "ledger" / ENDPOINT
    snapshot = json.loads((folder / "snapshot.json").read_text())
    state = snapshot["state"]
    state["roles"]["stable"], state["known"]["3"] = three, three
    state["rejected"], state["used_overrides"] = {}, []
    (folder / "snapshot.json").write_text(json.dumps(snapshot))


def bound_to_another_target(site: Site) -> None:
    config = replace(site.config, target=GPU)
    one = site.deployment("4", authority=decision_of(site, "4", GPU).envelope)
    one = replace(one, evidence=decision_of(site, "4", GPU).record.evidence)
    site.append(EndpointBound(config=config, policy=RolloutPolicy()), begun(bringing(one)))


def bound_to_trust_nobody(site: Site) -> None:
    config = replace(site.config, options={"trusted_keys": ""})
    site.append(
        EndpointBound(config=config, policy=RolloutPolicy()), begun(bringing(site.deployment("3")))
    )


def everything_rewritten(site: Site) -> None:
    """Replace every digest of version 1 by that of version 3.

    This happens in the registry and in the ledger.
    """
    one, three = site.record("1"), site.record("3")
    swap: dict[str, str] = {one.manifest: three.manifest, one.release: three.release}

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {swap.get(k, k): change(v) for k, v in value.items()}
        if isinstance(value, list):
            return [change(v) for v in value]
        return swap.get(value, value) if isinstance(value, str) else value

    site.rewrite(change)
    site.forge("1", manifest=three.manifest, release=three.release)
    shutil.rmtree(site.root / "models")


REGISTRY: dict[Callable[[Site], None], str] = {
    copied_decision: "about another model, version or target",
    edited_decision: "is not valid",
    self_signed_decision: "is not trusted",
    decision_of_another_target: "about another model, version or target",
    decision_of_another_model: "about another model, version or target",
    renamed_into_another_model: "about another model, version or target",
    release_of_the_overridden: "rolled this release back",
    tags_of_the_overridden: "is FAIL",
    identity_of_the_approved: "the registry contains",
    replaced_artifact: "the registry contains",
    self_signed_override: "is FAIL",
    known_override_after_the_rollback: "rolled this release back",
}
LEDGER: dict[Callable[[Site], None], str] = {
    begun_rollout: "no signed decision names the files of this version",
    begun_rollout_with_the_authority_of_another: "is not about this version",
    # v7 serves the server's copy of the approved files.
    other_files_under_an_approved_name: "v7 serves all traffic",
    added_library: "is not among the files of v7",
    finished_rollout: "no signed decision names the files of this version",
    begun_canary: "no signed decision names the files of this version",
    roll_back_to_other_files: "no signed decision names the files of this version",
    previous_version_replaced: "no signed decision names the files of this version",
    snapshot_with_other_files: "v1 serves all traffic",
    bound_to_another_target: "serves only digits on cpu",
    bound_to_trust_nobody: "no signed decision names the files of this version",
}
BOTH: dict[Callable[[Site], None], str] = {
    forged_override_in_the_ledger: "is FAIL",
    known_override_on_other_files: "is FAIL",
    known_override_again: "rolled this release back",
    ledger_of_before_the_rollback: "rolled this release back|the endpoint has applied entry",
    everything_rewritten: "is not valid",
}
ATTACKS = {**REGISTRY, **LEDGER, **BOTH}


UNSIGNED = "has no signature|does not follow|is not valid|v1 serves all traffic"
"""Pattern of additional reports about changes by an attacker without a key."""


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize(
    "has_release_key", [False, True], ids=["without a key", "with the release key"]
)
def test_endpoint_under_attack_loads_only_approved_files(
    attack: Callable[[Site], None], has_release_key: bool, tmp_path: Path
) -> None:
    site = Site(tmp_path, has_release_key=has_release_key)
    approved = {site.record("1").manifest}
    files = {digest_file(tmp_path / "built" / MODEL / "1" / "model.onnx")}
    attack(site)
    site.drive()
    assert set(site.fake.loaded) <= files
    assert site.held() <= approved
    expected = ATTACKS[attack] if has_release_key else f"{ATTACKS[attack]}|{UNSIGNED}"
    assert any(re.search(expected, message) for message in site.messages), site.messages


@pytest.mark.nightly
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_real_server_under_attack_loads_only_approved_files(
    attack: Callable[[Site], None], tmp_path: Path
) -> None:
    site = Site(tmp_path, real=True, has_release_key=True)
    try:
        approved = {site.record("1").manifest}
        attack(site)
        site.drive()
        assert site.held() <= approved
        assert any(re.search(ATTACKS[attack], message) for message in site.messages), site.messages
    finally:
        site.local.stop(site.config)


def test_ledger_entry_without_signed_decision_is_refused_and_keeps_traffic() -> None:
    """The process refuses the entry before the server does.

    Not every provider has a server that verifies decisions.
    """
    scene = serving("a")
    forged = replace(scene.state().known["1"], name="v9", authority=None)
    Journal.open(scene.context, ENDPOINT).append(begun(bringing(forged)))
    with pytest.raises(RefusedError, match="no signed decision names the files of this version"):
        reconcile_until_stable(scene.context, ENDPOINT)
    assert scene.traffic() == {"v1": 100}
