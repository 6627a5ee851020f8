"""Ledger, registry, model files and store in a dry run.

They read from the real ports, and record the changes instead of making them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, StoredObject, digest_bytes, short_digest
from onnx_ops.domain.ledger import (
    EntryBody,
    LedgerAdopted,
    LedgerEntry,
    ReleaseState,
    apply_entry,
)
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.domain.release import ListedVersion, Publication, VersionRecord
from onnx_ops.errors import LedgerConflictError, NotFoundError, RefusedError
from onnx_ops.ports import Ledger, ModelFiles, Registry, Store
from onnx_ops.release.changes import NOTHING, Change, ChangeKind, ChangeLog
from onnx_ops.release.status import describe_entry


class LedgerOverlay(Ledger):
    """A ledger whose new entries stay in memory."""

    def __init__(self, inner: Ledger, log: ChangeLog) -> None:
        self._inner = inner
        self._log = log
        self._states: dict[str, ReleaseState] = {}
        self._entries: dict[str, list[LedgerEntry]] = {}

    @property
    @override
    def place(self) -> str:
        return self._inner.place

    @property
    @override
    def release_keys(self) -> Mapping[Digest, str]:
        return self._inner.release_keys

    def list_changed(self) -> tuple[str, ...]:
        """Return the ledgers that have new entries."""
        return tuple(self._entries)

    def list_new(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        """Return the new entries of a ledger."""
        return self._new(endpoint, 0)

    @override
    def endpoints(self) -> tuple[str, ...]:
        return tuple(sorted({*self._inner.endpoints(), *self._entries}))

    @override
    def state(self, endpoint: str) -> ReleaseState:
        known = self._states.get(endpoint)
        return self._inner.state(endpoint) if known is None else known

    @override
    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        entries = self._inner.read(endpoint, after=after)
        return (*self._before(endpoint, entries), *self._new(endpoint, after))

    @override
    def read_intact(self, endpoint: str, *, signed: bool = True) -> tuple[LedgerEntry, ...]:
        entries = self._inner.read_intact(endpoint, signed=signed)
        return (*self._before(endpoint, entries), *self._new(endpoint, 0))

    @override
    def count(self, endpoint: str) -> int:
        new = self._new(endpoint, 0)
        return new[-1].sequence if new else self._inner.count(endpoint)

    @override
    def require_signer(self, state: ReleaseState, body: EntryBody) -> None:
        self._inner.require_signer(state, body)

    @override
    def append(self, entry: LedgerEntry) -> None:
        state, body = self.state(entry.endpoint), entry.body
        is_adoption = isinstance(body, LedgerAdopted) and body.state is not None
        if entry.sequence != state.head + 1 and not is_adoption:
            raise LedgerConflictError(
                f"another writer appended entry {entry.sequence} first",
                where=f"ledger {entry.endpoint}",
            )
        self.require_signer(state, body)
        self._states[entry.endpoint] = apply_entry(state, entry)
        self._entries.setdefault(entry.endpoint, []).append(entry)
        self._log.add(_describe_new(entry, self.place, explain_grant(state, body)))

    def _new(self, endpoint: str, after: int) -> tuple[LedgerEntry, ...]:
        return tuple(e for e in self._entries.get(endpoint, ()) if e.sequence > after)

    def _before(self, endpoint: str, entries: Sequence[LedgerEntry]) -> tuple[LedgerEntry, ...]:
        """Return the stored entries before the first new entry.

        Later stored entries are those that another process appended during the dry run.
        """
        new = self._new(endpoint, 0)
        return tuple(e for e in entries if not new or e.sequence < new[0].sequence)


class RegistryOverlay(Registry):
    """A registry whose aliases, tags and deletions stay in memory.

    Whether the registry's server permits a change is not known in advance.
    """

    def __init__(self, inner: Registry, log: ChangeLog) -> None:
        self._inner = inner
        self._log = log
        self._aliases: dict[str, dict[str, str]] = {}
        self._tags: dict[tuple[str, str], dict[str, str]] = {}
        self._deleted: set[tuple[str, str]] = set()

    @override
    def publish(self, publication: Publication) -> Mapping[str, str]:
        raise RefusedError("a dry run registers no versions", where=publication.model)

    @override
    def version(self, model: str, version: str) -> VersionRecord:
        if (model, version) in self._deleted:
            raise NotFoundError("there is no such version", where=f"{model}/{version}")
        record = self._inner.version(model, version)
        new = self._tags.get((model, version), {})
        return replace(record, tags={**record.tags, **new}) if new else record

    @override
    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        listed = self._inner.versions(model)
        return tuple(one for one in listed if (model, one.version) not in self._deleted)

    @override
    def delete_version(self, model: str, version: str) -> None:
        aliases = self.aliases(model)
        if pointing := sorted(name for name, number in aliases.items() if number == version):
            raise RefusedError(
                f"alias {pointing[0]} points to this version", where=f"{model} version {version}"
            )
        self._deleted.add((model, version))
        self._record(ChangeKind.VERSION, model, f"delete version {version} of {model}")

    @override
    def aliases(self, model: str) -> Mapping[str, str]:
        known = self._aliases.get(model)
        return dict(self._inner.aliases(model) if known is None else known)

    @override
    def all_aliases(self) -> Mapping[str, Mapping[str, str]]:
        return {**self._inner.all_aliases(), **self._aliases}

    @override
    def set_alias(self, model: str, alias: str, version: str) -> None:
        self._require_version(model, version)
        self._move_alias(model, alias, version)

    @override
    def delete_alias(self, model: str, alias: str) -> None:
        self._move_alias(model, alias, None)

    def _move_alias(self, model: str, alias: str, version: str | None) -> None:
        aliases = dict(self.aliases(model))
        before = aliases.pop(alias, None)
        if version is not None:
            aliases[alias] = version
        self._aliases[model] = aliases
        if before != version:
            verb = "delete" if version is None else "set"
            what = f"{verb} alias {alias} of {model}"
            self._record(ChangeKind.ALIAS, model, what, before or NOTHING, version or NOTHING)

    @override
    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        self._require_version(model, version)
        known = self._read_tags(model, version)
        for name, value in sorted(tags.items()):
            before = known.get(name, "")
            if name not in known or before != value:
                what = f"set tag {name} of {model}/{version}"
                self._record(ChangeKind.TAG, model, what, before, value or NOTHING)
        self._tags.setdefault((model, version), {}).update(tags)

    @override
    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        return self._inner.fetch(record, folder)

    @override
    def document(self, record: VersionRecord, name: str) -> bytes:
        return self._inner.document(record, name)

    @override
    def mirror(self, entry: LedgerEntry, model: str) -> None:
        """Do nothing, since the ledger has recorded the entry."""

    @override
    def where(self, model: str) -> str:
        return self._inner.where(model)

    @override
    def page(self, model: str, version: str, name: str) -> str:
        return self._inner.page(model, version, name)

    def _read_tags(self, model: str, version: str) -> Mapping[str, str]:
        """Return the tags of a version.

        If onnx-ops did not register the version, they are only those that the dry run has set.
        """
        try:
            return self.version(model, version).tags
        except NotFoundError:
            return self._tags.get((model, version), {})

    def _require_version(self, model: str, version: str) -> None:
        """Raise NotFoundError if the version does not exist.

        A version exists if an alias points to it, even if onnx-ops did not register it.
        """
        if version not in self._inner.aliases(model).values():
            self.version(model, version)

    def _record(
        self, kind: ChangeKind, model: str, what: str, before: str = "", after: str = ""
    ) -> None:
        needs = (f"the right to change {model} in the registry",)
        self._log.add(
            Change(kind=kind, subject=model, what=what, before=before, after=after, needs=needs)
        )


class ModelFilesOverlay(ModelFiles):
    """Model folders; new ones are stored in a temporary place, and none is removed."""

    def __init__(self, inner: ModelFiles, temporary: ModelFiles, log: ChangeLog) -> None:
        self._inner = inner
        self._temporary = temporary
        self._log = log
        self._admitted: set[Digest] = set()
        self._forgotten: set[Digest] = set()

    @override
    def place(self, manifest: Digest) -> str:
        return self._select(manifest).place(manifest)

    @override
    def location(self, manifest: Digest) -> str | None:
        if manifest in self._forgotten:
            return None
        return self._select(manifest).location(manifest)

    @override
    def admit(self, folder: Path, manifest: Manifest) -> str:
        location = self._temporary.admit(folder, manifest)
        digest = manifest.digest()
        self._admitted.add(digest)
        self._forgotten.discard(digest)
        self._record(digest, "store the verified files of model")
        return location

    @override
    def list_folders(self) -> Sequence[StoredObject]:
        known = [one for one in self._inner.list_folders() if one.digest not in self._forgotten]
        present = {one.digest for one in known}
        new = self._temporary.list_folders()
        return (*known, *(one for one in new if one.digest not in present | self._forgotten))

    @override
    def forget(self, manifest: Digest) -> None:
        self._forgotten.add(manifest)
        self._record(manifest, "remove the local folder of model")

    def _select(self, manifest: Digest) -> ModelFiles:
        return self._temporary if manifest in self._admitted else self._inner

    def _record(self, manifest: Digest, what: str) -> None:
        name = short_digest(manifest)
        self._log.add(
            Change(kind=ChangeKind.MODEL_FOLDER, subject=name, what=f"{what} {name} here")
        )


class StoreOverlay(Store):
    """A store whose new content and results stay in memory."""

    def __init__(self, inner: Store, log: ChangeLog) -> None:
        self._inner = inner
        self._log = log
        self._contents: dict[Digest, bytes] = {}
        self._results: dict[Digest, Manifest] = {}
        self._forgotten: set[str] = set()

    @override
    def put_bytes(self, data: bytes) -> Digest:
        digest = digest_bytes(data)
        self._contents[digest] = data
        return digest

    @override
    def put_file(self, path: Path) -> Digest:
        return self.put_bytes(path.read_bytes())

    @override
    def path(self, digest: Digest) -> Path:
        return self._inner.path(digest)

    @override
    def read(self, digest: Digest) -> bytes:
        known = self._contents.get(digest)
        return self._inner.read(digest) if known is None else known

    @override
    def record(self, key: Digest, manifest: Manifest) -> None:
        self._results[key] = manifest

    @override
    def lookup(self, key: Digest) -> Manifest | None:
        return self._results.get(key) or self._inner.lookup(key)

    @override
    def results(self) -> Iterator[Manifest]:
        yield from self._inner.results()
        yield from self._results.values()

    @override
    def contents(self) -> tuple[StoredObject, ...]:
        return tuple(one for one in self._inner.contents() if one.name not in self._forgotten)

    @override
    def forget(self, stored: StoredObject) -> bool:
        self._forgotten.add(stored.name)
        change = Change(
            kind=ChangeKind.STORED_OBJECT,
            subject=stored.name,
            what=f"remove {stored.name} from the store",
        )
        self._log.add(change)
        return True


def _describe_new(entry: LedgerEntry, place: str, grant: str) -> Change:
    """Return the change of a new ledger entry, and the rights that it needs."""
    # Storing an entry sorts its keys. The entry is encoded here, so that its description is the
    # same before and after it is stored.
    what, why = describe_entry(codec.loads(codec.dumps(entry), LedgerEntry).body)
    needs = [f"the right to write the ledger in {place}"]
    if grant:
        needs.append(f"a release key that the ledger of {entry.endpoint} accepts")
    return Change(
        kind=ChangeKind.LEDGER_ENTRY,
        subject=entry.endpoint,
        what=f"write entry {entry.sequence} of the ledger of {entry.endpoint}",
        after=f"{what} ({why})" if why else what,
        needs=tuple(needs),
    )
