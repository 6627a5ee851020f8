"""Releases, endpoints and operators over fakes, for tests of release operations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes, digest_file
from onnx_ops.domain.attestation import (
    Envelope,
    OverrideRecord,
    override_reason_tag,
    override_record_tag,
)
from onnx_ops.domain.decision import DecisionRecord, Verdict
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.execution import Execution, SessionSettings
from onnx_ops.domain.ledger import ActionOutcome, Intent, LedgerEntry, ReleaseState, fold
from onnx_ops.domain.release import Lineage, Publication, VariantRecord, VersionRecord
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.ports import Context
from onnx_ops.release.promote import PromotionResult, bind_endpoint, promote
from onnx_ops.release.reconcile import StepReport, reconcile_until_stable
from onnx_ops.release.rollback import RollbackResult, roll_back_each, send_command
from onnx_ops.testing.fakes import FakeSigner, FakeWorld
from tests.support.endpoints import endpoint_config
from tests.support.faults import Faults

MODEL, TARGET = "digits", "cpu"
CHAMPION, CHALLENGER, PREVIOUS = f"champion-{TARGET}", f"challenger-{TARGET}", f"previous-{TARGET}"
AT_ONCE = RolloutPolicy()
CANARY = RolloutPolicy(steps=(0.1, 0.5, 1.0))
TARGET_DIGEST = digest_bytes(b"cpu as it is")
EXECUTION = Execution(session=SessionSettings(intra_op_threads=3))


def config_of(endpoint: str) -> EndpointConfig:
    return endpoint_config(endpoint, provider="fake", model=MODEL, target_digest=TARGET_DIGEST)


def decision_record(release: Digest, variant: str, manifest: Digest) -> DecisionRecord:
    """Return a decision that lets a version serve."""
    return DecisionRecord(
        model=MODEL,
        release=release,
        variant=variant,
        target=TARGET,
        manifest=manifest,
        target_digest=TARGET_DIGEST,
        gates_digest=digest_bytes(b"gates"),
        evidence=digest_bytes(b"evidence"),
        verdict=Verdict.PASS,
        verdicts={"size": Verdict.PASS},
        execution=EXECUTION,
        decided_at="2026-01-01T00:00:00Z",
        sequence=1,
    )


def publish_file(
    world: FakeWorld, file: Path, release: Digest, *, variant: str = "fp32", **about: Any
) -> str:
    """Register a model file as a version with a signed decision.

    `about` replaces the defaults of the decision.
    """
    manifest = Manifest(files={"model.onnx": digest_file(file)})
    decided = replace(decision_record(release, variant, manifest.digest()), **about)
    record = VariantRecord(
        variant=variant,
        files={"model.onnx": file},
        manifest=manifest,
        signed={decided.target: sign_record(decided, world.signer)},
    )
    lineage = Lineage(pipeline="p", release=release)
    return world.registry.publish(
        Publication(model=decided.model, lineage=lineage, variants=(record,))
    )[variant]


def override_record(record: VersionRecord | Deployment, **changes: Any) -> OverrideRecord:
    """Return an override of exactly this version by alice.

    `changes` replace the defaults.
    """
    about = {
        name: getattr(record, name)
        for name in ("model", "version", "release", "variant", "manifest")
    }
    given = {"target": TARGET, "reason": "sure", "by": "alice", "at": "2026-01-01T00:00:00+00:00"}
    return OverrideRecord(**{**about, **given, **changes})


def override_tags(envelope: Envelope, reason: str = "sure") -> dict[str, str]:
    """Return the tags of a version that contain an override."""
    return {
        override_reason_tag(TARGET): reason,
        override_record_tag(TARGET): codec.dumps(envelope).decode(),
    }


new_world: ContextVar[Callable[[], FakeWorld]] = ContextVar("new_world", default=FakeWorld)
"""Function that makes the world of a scene; in memory by default."""


def make_world() -> FakeWorld:
    return new_world.get()()


def roll_back(context: Context, endpoint: str, **options: Any) -> RollbackResult:
    """Roll back one endpoint as the command does, with enough time for a slow machine."""
    results, errors = roll_back_each(context, (endpoint,), timeout_s=60.0, **options)
    for error in errors.values():
        raise error
    return results[endpoint]


@dataclass
class Scene:
    """A world with one process.

    `restart` simulates a kill of the process and a start of another one. `faults` wrap everything
    that the process does.
    """

    world: FakeWorld = field(default_factory=make_world)
    processes: int = 1
    faults: Faults | None = None

    @property
    def process(self) -> str:
        return f"process-{self.processes}"

    @property
    def context(self) -> Context:
        context = self.world.context(self.process)
        return context if self.faults is None else self.faults.around(context)

    def restart(self) -> None:
        self.world.dead.add(self.process)
        self.processes += 1
        self.faults = None

    def publish(
        self, seed: str, *, variant: str = "fp32", verdict: Verdict = Verdict.PASS, **decided: Any
    ) -> str:
        """Publish a version of release `seed` with a signed decision.

        Versions count from 1.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            file.write_text(f"{seed} {variant}")
            about = {"verdict": verdict, "verdicts": {"size": verdict}, **decided}
            return publish_file(
                self.world, file, digest_bytes(seed.encode()), variant=variant, **about
            )

    def forge(self, version: str, **changes: object) -> VersionRecord:
        """Change the registry's record of a version."""
        record = replace(self.record(version), **changes)  # type: ignore[arg-type]
        self.world.registry.replace_record(record)
        return record

    def record(self, version: str) -> VersionRecord:
        return self.world.registry.version(MODEL, version)

    def bind(self, endpoint: str = "digits", policy: RolloutPolicy = AT_ONCE) -> None:
        bind_endpoint(self.context, config_of(endpoint), policy)

    def promote(
        self, version: str, *, override: bool = False, reason: str = "", actor: str = ""
    ) -> PromotionResult:
        return promote(
            self.context, MODEL, version, TARGET, override=override, reason=reason, actor=actor
        )

    def reconcile(self, endpoint: str = "digits") -> list[StepReport]:
        reports = reconcile_until_stable(self.context, endpoint)
        assert reports[-1].stable, reports
        return reports

    def reconcile_some(self, endpoint: str = "digits") -> None:
        """Reconcile as far as possible without a command of an operator."""
        reconcile_until_stable(self.context, endpoint)

    def reconcile_all(self) -> None:
        """Reconcile all endpoints twice.

        An endpoint may have to wait with aliases until the others have followed.
        """
        names = [name for name in self.world.ledger.endpoints() if "@" not in name]
        for name in (*names, *names):
            self.reconcile(name)

    def serve(self, version: str, endpoint: str = "digits") -> None:
        """Promote a version, and advance the endpoint until it has all traffic."""
        self.promote(version)
        self.reconcile(endpoint)
        while self.state(endpoint).roles.candidate is not None:
            self.say(OperatorCommand.ADVANCE, endpoint)
            self.reconcile(endpoint)
        assert self.traffic(endpoint)[f"v{version}"] == 100

    def say(self, word: OperatorCommand, endpoint: str = "digits") -> None:
        send_command(self.context, endpoint, word)

    def abort(self, endpoint: str = "digits") -> RollbackResult:
        """Abort a rollout, as an operator does."""
        return roll_back(
            self.context, endpoint, reason="aborted by an operator", candidate_only=True
        )

    def roll_back(
        self, endpoint: str = "digits", *, to: str | None = None, force: bool = False
    ) -> RollbackResult:
        return roll_back(self.context, endpoint, to=to, reason="it is slow", force=force)

    def give_override(
        self, version: str, reason: str, *, by: str = "alice", signer: FakeSigner | None = None
    ) -> None:
        """Write an override, as the registry's server does.

        The server does so when a person with the permission sets the tag.
        """
        signed = sign_record(
            override_record(self.record(version), reason=reason, by=by), signer or self.world.signer
        )
        self.world.registry.annotate(MODEL, version, override_tags(signed.envelope, reason))

    def set_alias(self, alias: str, version: str) -> None:
        """Set an alias, as a person does in the registry's pages."""
        self.world.registry.set_alias(MODEL, alias, version)

    def aliases(self) -> Mapping[str, str]:
        return self.world.registry.aliases(MODEL)

    def state(self, endpoint: str = "digits") -> ReleaseState:
        return fold(endpoint, self.world.ledger.read(endpoint))

    def traffic(self, endpoint: str = "digits") -> Mapping[str, int]:
        """Return the traffic that the endpoint itself reports."""
        state = self.world.provider.observe(config_of(endpoint))
        return {} if state is None else dict(state.split.weights)


def effects(entries: tuple[LedgerEntry, ...]) -> list[str]:
    """Return the kinds of the completed actions.

    The outcome of such an action reports success, and no other action has overtaken it.
    """
    done: list[str] = []
    intents: dict[int, str] = {}
    last = 0
    for entry in entries:
        if isinstance(entry.body, Intent):
            intents[entry.sequence], last = entry.body.action.kind.value, entry.sequence
        elif isinstance(entry.body, ActionOutcome) and entry.body.ok and entry.body.of == last:
            done.append(intents[last])
            last = 0
    return done
