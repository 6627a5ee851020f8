"""Values that a registry receives and returns, and the promotion policy.

The policy defines which user can move which alias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen, doc

from onnx_ops.domain.artifact import Digest, Manifest, digest_file, digest_json
from onnx_ops.domain.decision import Decision, Preference, SignedDecision, Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.quantities import OMIT_DEFAULT

ANYONE = "*"
"""Pattern that matches every user, even a user whom the server cannot identify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRule:
    """One rule of a promotion policy."""

    aliases: Annotated[
        str, MinLen(1), doc("Aliases that the rule covers; `*` and `?` are wildcards.")
    ]
    users: Annotated[
        tuple[str, ...],
        MinLen(1),
        doc("Users who may set or delete these aliases; `*` means everyone."),
    ]
    models: Annotated[
        str, MinLen(1), doc("Registered models that the rule covers; `*` and `?` are wildcards.")
    ] = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionPolicy:
    """Rules from top to bottom: the first that matches a model and alias decides."""

    schema: int = 1
    rules: Annotated[
        tuple[AliasRule, ...], MinLen(1), doc("Rules; the first one that covers an alias applies.")
    ]
    overrides: Annotated[
        tuple[str, ...], doc("Users who may override a gate, with a reason; `*` means everyone.")
    ] = ()

    def rule(self, model: str, alias: str) -> int | None:
        """Return the index of the rule that decides; None if no rule matches."""
        rules = enumerate(self.rules)
        return next(
            (i for i, r in rules if fnmatchcase(model, r.models) and fnmatchcase(alias, r.aliases)),
            None,
        )

    def names(self) -> frozenset[str]:
        """Return every user whom the policy names."""
        return frozenset(self.overrides).union(*(rule.users for rule in self.rules)) - {ANYONE}


def is_among(user: str, users: tuple[str, ...]) -> bool:
    """Return whether these users include the user; an empty user is unidentified."""
    return ANYONE in users or (user != "" and user in users)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a release comes from.

    `data` maps a data set's name to its digest. `origins` maps it to facts such as the repository,
    commit and path, for sources that record them.
    """

    pipeline: str
    release: Digest
    git_sha: str = ""
    data: Mapping[str, Digest] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, metadata=OMIT_DEFAULT)


def flatten_origins(lineage: Lineage) -> dict[str, str]:
    """Return every fact of `origins` as `<data set>.<fact>`."""
    origins = sorted(lineage.origins.items())
    return {
        f"{name}.{fact}": value for name, facts in origins for fact, value in sorted(facts.items())
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The author, time and commit of a report; unknown fields are empty.

    `at` is a time in UTC, to the minute. `changed`: whether tracked files differed from the commit.
    """

    at: str = ""
    author: str = ""
    commit: str = ""
    branch: str = ""
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRelease:
    """The record of the branch that a release is compared with.

    The record has the choices and the evidence of one of the branch's commits. If there is no
    record, `why` gives the reason in one line.
    """

    branch: str
    commit: str = ""
    choices: tuple[Choice, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRecord:
    """One variant to publish in the registry.

    `files` are the model's files by their relative path in the version's folder, and `manifest` has
    their digests. `evidence` are further documents by artifact path. `metrics` are plain numbers
    for the registry's tables. `decisions` and `signed` are by target: the unsigned decisions are
    shown to users, and only the signed ones permit a promotion. `measured_on` names the data set of
    the lineage on which the variant was measured. `example` is a request, JSON
    `{"inputs": {name: rows}}`.
    """

    variant: str
    files: Mapping[str, Path]
    manifest: Manifest
    evidence: Mapping[str, Path] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    signed: Mapping[str, SignedDecision] = field(default_factory=dict)
    description: str = ""
    measured_on: str = ""
    example: bytes = b""

    def evidence_digest(self) -> Digest:
        """Return the digest of all documents in `evidence`."""
        return digest_json({name: digest_file(path) for name, path in self.evidence.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The versions of one pipeline run.

    `about` is Markdown that describes the registered model.
    """

    model: str
    lineage: Lineage
    variants: tuple[VariantRecord, ...]
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One registered version, as read from the registry.

    `decisions` are by target; their signatures are not verified.
    """

    model: str
    version: str
    release: Digest
    variant: str
    manifest: Digest
    decisions: Mapping[str, SignedDecision]
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedVersion:
    """A registered version in a list.

    `created_at` is in seconds since the epoch. `evidence` is the digest over the documents that
    were published with the version last (`VariantRecord.evidence_digest`), if the registry records
    it.
    """

    version: str
    release: Digest
    variant: str
    manifest: Digest
    created_at: float
    evidence: Digest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The variant that a release serves on one target, or why there is none.

    `objective` is the preference that was applied. `tied` names variants that the measurements of
    this preference do not distinguish from the chosen variant.
    """

    target: str
    variant: str | None
    verdict: Verdict
    reason: str
    objective: Preference = "latency"
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The result of the register stage.

    The result has the version of each variant, and the choice of each target.

    `run` is the stage's key; `report` the address of the release's report, if the registry has
    pages. `evidence` maps a variant to the digest of the documents that were published with its
    version.
    """

    run: Digest
    model: str
    release: Digest
    versions: Mapping[str, str]
    choices: tuple[Choice, ...]
    where: str
    report: str = ""
    evidence: Mapping[str, Digest] = field(default_factory=dict, metadata=OMIT_DEFAULT)
