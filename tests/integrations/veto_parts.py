"""Versions with real signatures, in memory or published to a server.

The tests of the guard use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.registries.mlflow_tags import (
    DECISION,
    DIGEST,
    RELEASE,
    VARIANT,
    read_decisions,
)
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.attestation import TrustedKeys, sign_record
from onnx_ops.config.loader import load_policy
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Decision, DecisionRecord, GateResult, SignedDecision, Verdict
from onnx_ops.domain.release import Publication, VersionRecord
from onnx_ops.integrations.mlflow_app.guard import Configuration, Guard
from onnx_ops.integrations.mlflow_app.store import ServerStore, StoredVersion
from onnx_ops.ports import Signer
from onnx_ops.reporting.description import version_description
from onnx_ops.testing.fakes import FakeClock

MODEL, TARGET = "digits", "cpu-1t"
CHAMPION, CHALLENGER, PREVIOUS = f"champion-{TARGET}", f"challenger-{TARGET}", f"previous-{TARGET}"
SLOW = "p50 is 1.31 times the champion's, at most 1.05 is allowed"

POLICY = """\
schema: 1
rules:
  - {aliases: "champion-*", users: [alice, release-bot]}
  - {aliases: "challenger-*", users: [alice, bob, release-bot]}
  - {aliases: "previous-*", users: [release-bot]}
overrides: [alice]
"""


def decision_record(
    seed: str, verdict: Verdict = Verdict.PASS, *, sequence: int = 10
) -> DecisionRecord:
    """Return a decision about the content that `seed` names."""
    return DecisionRecord(
        model=MODEL,
        release=digest_bytes(b"release " + seed.encode()),
        variant="fp32",
        target=TARGET,
        manifest=digest_bytes(b"manifest " + seed.encode()),
        target_digest=digest_bytes(b"target"),
        gates_digest=digest_bytes(b"gates"),
        evidence=digest_bytes(b"evidence"),
        verdict=verdict,
        verdicts={"parity": Verdict.PASS, "latency": verdict},
        decided_at="2026-01-01T00:00:00+00:00",
        sequence=sequence,
    )


def tags_of(signed: SignedDecision) -> dict[str, str]:
    about = signed.record
    return {
        RELEASE: about.release,
        VARIANT: about.variant,
        DIGEST: about.manifest,
        f"{DECISION}{about.target}": codec.dumps(signed.envelope).decode(),
    }


def judged(
    release: Publication, signer: Signer, verdict: Verdict, *, sequence: int = 10
) -> Publication:
    """Return the same release with real signatures and a latency gate of this verdict."""
    records = []
    for variant in release.variants:
        results = (
            GateResult(
                gate="parity",
                metric="",
                limit="",
                verdict=Verdict.PASS,
                reason="as close as float32",
            ),
            GateResult(
                gate="latency",
                metric="p50",
                limit="+5 %",
                verdict=verdict,
                reason=SLOW,
                estimate=1.31,
            ),
        )
        decision = Decision(variant=variant.variant, target=TARGET, results=results)
        about = replace(
            variant.signed[TARGET].record,
            verdict=verdict,
            verdicts=decision.verdicts,
            sequence=sequence,
        )
        records.append(
            replace(
                variant,
                decisions={TARGET: decision},
                signed={TARGET: sign_record(about, signer)},
                description=version_description(
                    variant.variant, {TARGET: decision}, release.lineage
                ),
            )
        )
    return replace(release, variants=tuple(records))


@dataclass
class MemoryVersions(ServerStore):
    """The store of a server, in memory; as in MySQL, names of models are found without case."""

    kept: dict[tuple[str, str], StoredVersion] = field(default_factory=dict)

    def find(self, model: str, version: str) -> StoredVersion | None:
        return self.kept.get((model, version))

    def find_registered(self, model: str) -> str | None:
        names = (name for (name, _), found in self.kept.items() if RELEASE in found.tags)
        return next((name for name in names if name.casefold() == model.casefold()), None)

    def aliases(self, model: str) -> Mapping[str, str]:
        return {
            alias: v
            for (name, v), found in self.kept.items()
            if name == model
            for alias in found.aliases
        }

    def list_copies(self, record: VersionRecord, target: str) -> Iterator[SignedDecision]:
        for (name, version), found in self.kept.items():
            if (
                name == record.model
                and version != record.version
                and found.tags.get(DIGEST) == record.manifest
            ):
                signed = read_decisions(found.tags).get(target)
                if signed is not None:
                    yield signed

    def annotate(self, found: StoredVersion, key: str, value: str) -> None:
        self.change(found.version, **{key: value})

    def put(
        self,
        version: str,
        tags: Mapping[str, str],
        *,
        model: str = MODEL,
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.kept[model, version] = StoredVersion(
            model=model, version=version, tags=dict(tags), aliases=aliases
        )

    def change(self, version: str, **tags: str) -> None:
        found = self.kept[MODEL, version]
        self.kept[MODEL, version] = replace(found, tags={**found.tags, **tags})


@dataclass
class Guarded:
    """A guard over versions in memory: 1 passed, 2 failed, 3 was registered by hand."""

    folder: Path
    policy: str = ""
    signs_overrides: bool = False
    trusts: bool = True

    def __post_init__(self) -> None:
        self.signer = create_key(self.folder / "keys" / "signing.pem")
        self.clock = FakeClock()
        self.versions = MemoryVersions()
        self.versions.put("1", tags_of(sign_record(decision_record("a"), self.signer)))
        self.versions.put(
            "2", tags_of(sign_record(decision_record("b", Verdict.FAIL), self.signer))
        )
        self.versions.put("3", {})
        located = None
        if self.policy:
            path = self.folder / "policy.yaml"
            path.write_text(self.policy, encoding="utf-8")
            located = load_policy(path)
        configuration = Configuration(
            keys=TrustedKeys(self.folder / "keys") if self.trusts else None,
            policy=located,
            signer=self.signer if self.signs_overrides else None,
        )
        self.guard = Guard(configuration, self.versions, self.clock)

    def set_alias(self, alias: str, version: str, *, user: str = "", model: str = MODEL) -> None:
        self.guard.set_alias(user, model, alias, version)

    def set_tag(self, version: str, key: str, value: str, *, user: str = "") -> None:
        """Set a tag as the server does: check the request, then store the tag."""
        self.guard.set_tag(user, MODEL, version, key, value)
        self.versions.change(version, **{key: value})
