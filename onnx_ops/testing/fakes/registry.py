"""A registry in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops.adapters.store.models import manifest_of
from onnx_ops.domain.artifact import Digest, Manifest, digest_file
from onnx_ops.domain.ledger import LedgerEntry
from onnx_ops.domain.release import ListedVersion, Publication, VariantRecord, VersionRecord
from onnx_ops.errors import DigestMismatchError, NotFoundError, RefusedError, ServiceUnavailableError
from onnx_ops.testing.fakes.process import FakeClock


@dataclass(slots=True)
class _Version:
    record: VersionRecord
    files: dict[str, bytes]
    documents: dict[str, bytes]
    created_at: float
    evidence: Digest


@dataclass(slots=True)
class _Model:
    versions: dict[str, _Version] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


class FakeRegistry:
    """A registry that forgets nothing until the process ends. While `down`, every call is unanswered."""

    def __init__(self) -> None:
        self.down = False
        self.clock = FakeClock()
        self.mirrored: list[LedgerEntry] = []
        self._models: dict[str, _Model] = {}

    def publish(self, publication: Publication) -> Mapping[str, str]:
        self._answer()
        for variant in publication.variants:
            found = Manifest(files={name: digest_file(path) for name, path in variant.files.items()})
            if found != variant.manifest:
                raise DigestMismatchError("files are not what the manifest says", where=publication.model)
        model = self._models.setdefault(publication.model, _Model())
        return {variant.variant: self._publish(model, publication, variant) for variant in publication.variants}

    def version(self, model: str, version: str) -> VersionRecord:
        return self._version(model, version).record

    def aliases(self, model: str) -> Mapping[str, str]:
        self._answer()
        return dict(self._models[model].aliases) if model in self._models else {}

    def all_aliases(self) -> Mapping[str, Mapping[str, str]]:
        self._answer()
        return {name: dict(model.aliases) for name, model in self._models.items()}

    def set_alias(self, model: str, alias: str, version: str) -> None:
        self._version(model, version)
        self._models[model].aliases[alias] = version

    def delete_alias(self, model: str, alias: str) -> None:
        self._answer()
        if model in self._models:
            self._models[model].aliases.pop(alias, None)

    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        kept = self._version(model, version)
        kept.record = replace(kept.record, tags={**kept.record.tags, **tags})

    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        for name, content in self._version(record.model, record.version).files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return manifest_of(folder)

    def document(self, record: VersionRecord, name: str) -> bytes:
        documents = self._version(record.model, record.version).documents
        if name not in documents:
            raise NotFoundError(f"no document {name}", where=f"{record.model}/{record.version}")
        return documents[name]

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        del model
        self._answer()
        if entry not in self.mirrored:
            self.mirrored.append(entry)

    def where(self, model: str) -> str:
        return f"memory:{model}"

    def page(self, model: str, version: str, name: str) -> str:
        self._version(model, version)
        return ""

    def replace_record(self, record: VersionRecord) -> None:
        """What a forger would do: the version says from now on what `record` says."""
        self._version(record.model, record.version).record = record

    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        self._answer()
        kept = self._models[model].versions.values() if model in self._models else ()
        return tuple(
            ListedVersion(
                version=v.record.version,
                release=v.record.release,
                variant=v.record.variant,
                manifest=v.record.manifest,
                created_at=v.created_at,
                evidence=v.evidence,
            )
            for v in sorted(kept, key=lambda v: int(v.record.version))
        )

    def delete_version(self, model: str, version: str) -> None:
        self._answer()
        if version in self.aliases(model).values():
            raise RefusedError("an alias points at it", where=f"{model}/{version}")
        if model in self._models:
            self._models[model].versions.pop(version, None)

    def vanish(self, model: str, version: str) -> None:
        """What a person may do in the registry: the version goes, and its aliases with it."""
        self._version(model, version)
        kept = self._models[model]
        del kept.versions[version]
        kept.aliases = {alias: number for alias, number in kept.aliases.items() if number != version}

    def tamper(self, record: VersionRecord, name: str) -> None:
        """Change a stored file behind the registry's back."""
        files = self._version(record.model, record.version).files
        files[name] = bytes([files[name][0] ^ 1]) + files[name][1:]

    def _publish(self, model: _Model, publication: Publication, variant: VariantRecord) -> str:
        key = (publication.lineage.release, variant.variant, variant.manifest.digest())
        known = (v for v in model.versions.values() if (v.record.release, v.record.variant, v.record.manifest) == key)
        kept = next(known, None)
        record = VersionRecord(
            model=publication.model,
            version=kept.record.version if kept is not None else str(max(map(int, model.versions), default=0) + 1),
            release=publication.lineage.release,
            variant=variant.variant,
            manifest=variant.manifest.digest(),
            decisions=dict(variant.signed),
            tags=kept.record.tags if kept is not None else {},
        )
        model.versions[record.version] = _Version(
            record=record,
            files={name: path.read_bytes() for name, path in variant.files.items()},
            documents={name: path.read_bytes() for name, path in variant.evidence.items()},
            created_at=kept.created_at if kept is not None else self.clock.now(),
            evidence=variant.evidence_digest(),
        )
        return record.version

    def _version(self, model: str, version: str) -> _Version:
        self._answer()
        if model not in self._models or version not in self._models[model].versions:
            raise NotFoundError("no such version", where=f"{model}/{version}")
        return self._models[model].versions[version]

    def _answer(self) -> None:
        if self.down:
            raise ServiceUnavailableError("the registry does not answer", where="memory")
