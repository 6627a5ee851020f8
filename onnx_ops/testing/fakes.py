"""Ports in memory, which keep the promises of their protocols: for tests of whatever stands on the ports.

`FakeRegistry` and `FakeProvider` outlive the `Ports` that are made over them, as servers outlive their clients: make
new ports over the same fakes to play a process that was killed and started again.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from onnx_ops.adapters.brought import BroughtModels
from onnx_ops.adapters.journals import FileJournal
from onnx_ops.adapters.ledgers.log import MemoryLedger
from onnx_ops.adapters.objects import FsspecObjects
from onnx_ops.adapters.store.content import ContentStore
from onnx_ops.adapters.store.models import manifest_of
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, Leftover
from onnx_ops.domain.ledger import LedgerEntry
from onnx_ops.domain.notification import Notification
from onnx_ops.domain.release import ListedVersion, Publication, VariantRecord, VersionRecord
from onnx_ops.domain.rollout_observed import Reading, ShadowTally, Tally, Thresholds
from onnx_ops.errors import (
    Conflict,
    DigestMismatch,
    MissingPackage,
    NotFound,
    Refused,
    ServiceUnavailable,
    SignatureInvalid,
)
from onnx_ops.ports import Ledger, Ports


class FakeClock:
    """Time that moves only when it is told to; starts at `now` seconds since the epoch."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class FakeHost:
    """One process of a machine. `dead` is shared by the machine's processes: who is in it no longer runs."""

    def __init__(self, name: str = "process-1", dead: set[str] | None = None) -> None:
        self._name = name
        self.dead: set[str] = set() if dead is None else dead

    def holder(self) -> str:
        return self._name

    def alive(self, holder: str) -> bool:
        return holder not in self.dead

    def actor(self) -> str:
        return f"tester@{self._name}"


class FakeSigner:
    """A real Ed25519 key that is derived from a seed. It verifies what it signed itself and trusts nobody else."""

    def __init__(self, seed: bytes = b"trusted") -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._private = Ed25519PrivateKey.from_private_bytes(seed.ljust(32, b"\0")[:32])
        self._public = self._private.public_key()

    @property
    def key(self) -> Digest:
        return digest_bytes(self._public.public_bytes_raw())

    def sign(self, data: bytes) -> str:
        return base64.b64encode(self._private.sign(data)).decode()

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        from cryptography.exceptions import InvalidSignature

        if key != self.key:
            raise SignatureInvalid("signed by a key that nobody trusts")
        try:
            self._public.verify(base64.b64decode(signature), data)
        except (InvalidSignature, ValueError) as error:
            raise SignatureInvalid("the signature does not fit") from error


@dataclass(slots=True)
class _Version:
    record: VersionRecord
    files: dict[str, bytes]
    documents: dict[str, bytes]
    created_at: float


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
                raise DigestMismatch("files are not what the manifest says", where=publication.model)
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
            raise NotFound(f"no document {name}", where=f"{record.model}/{record.version}")
        return documents[name]

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        del model
        self._answer()
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
            )
            for v in sorted(kept, key=lambda v: int(v.record.version))
        )

    def delete_version(self, model: str, version: str) -> None:
        self._answer()
        if version in self.aliases(model).values():
            raise Refused("an alias points at it", where=f"{model}/{version}")
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
        )
        return record.version

    def _version(self, model: str, version: str) -> _Version:
        self._answer()
        if model not in self._models or version not in self._models[model].versions:
            raise NotFound("no such version", where=f"{model}/{version}")
        return self._models[model].versions[version]

    def _answer(self) -> None:
        if self.down:
            raise ServiceUnavailable("the registry does not answer", where="memory")


class FakeProvider:
    """Endpoints that exist in memory and take effects in the order of their generations.

    While `down`, `apply` cannot reach them and `observe` sees nothing. `applied` lists every change of every endpoint.
    `left` are leftovers of endpoints, each named by the manifest that it is a part of.
    """

    def __init__(self) -> None:
        self.down = False
        self.applied: list[tuple[str, EndpointState]] = []
        self.counted = FakeMetrics()
        self.left: dict[str, list[Leftover]] = {}
        self._states: dict[str, EndpointState] = {}
        self._generations: dict[str, int] = {}

    def capabilities(self, settings: Mapping[str, str | int | float | bool] | None = None) -> frozenset[str]:
        return frozenset({"split"})

    def check(self, settings: Mapping[str, str | int | float | bool]) -> None:
        """Endpoints in memory have no settings of their own, and take any."""

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        return None if self.down else self._states.get(config.endpoint)

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        if self.down:
            raise ServiceUnavailable("the endpoint cannot be reached", where=config.endpoint)
        name, state = config.endpoint, replace(state, generation=generation)
        last = self._generations.get(name, -1)
        current = self._states.get(name)
        if generation < last or (generation == last and current is not None and current != state):
            raise Conflict(f"generation {last} was applied already", where=name)
        if current is None or not current.same_as(state):
            self.applied.append((name, state))
        self._states[name], self._generations[name] = state, generation

    def address(self, config: EndpointConfig) -> str | None:
        return f"memory:{config.endpoint}" if config.endpoint in self._states else None

    def metrics(self) -> FakeMetrics:
        return self.counted

    def remove(self, config: EndpointConfig) -> None:
        if self.down:
            raise ServiceUnavailable("the endpoint cannot be reached", where=config.endpoint)
        self._states.pop(config.endpoint, None)
        self._generations.pop(config.endpoint, None)

    def leftovers(self, config: EndpointConfig, needed: frozenset[Digest]) -> Sequence[Leftover]:
        if self.down:
            raise ServiceUnavailable("the endpoint cannot be reached", where=config.endpoint)
        return [one for one in self.left.get(config.endpoint, ()) if one.name not in needed]

    def discard(self, config: EndpointConfig, leftover: Leftover) -> None:
        if self.down:
            raise ServiceUnavailable("the endpoint cannot be reached", where=config.endpoint)
        self.left[config.endpoint] = [one for one in self.left.get(config.endpoint, ()) if one != leftover]

    def interfere(self, endpoint: str, state: EndpointState | None) -> None:
        """The endpoint becomes this, or is lost, and nobody told the ledger. Its generation stays."""
        self._states.pop(endpoint, None)
        if state is not None:
            self._states[endpoint] = state


class FakeMetrics:
    """Counts that a test writes. While `down`, they cannot be read; `clock` says when they were."""

    def __init__(self) -> None:
        self.down = False
        self.clock = FakeClock()
        self.origin = "first"
        self.tallies: dict[str, Tally] = {}
        self.shadow = ShadowTally()
        self.histogram: tuple[tuple[float, ...], tuple[int, ...]] | None = ((0.001, 0.002), (500, 490, 10))

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances", "shadow", "outcomes"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        del deployment
        self._answer(config)
        return self.histogram

    def read(self, config: EndpointConfig, deployments: Mapping[str, Thresholds | None]) -> Reading:
        self._answer(config)
        ours = {name: self.tallies[name] for name in deployments if name in self.tallies}
        return Reading(origin=self.origin, at=self.clock.now(), tallies=ours, shadow=self.shadow)

    def count(self, deployment: str, **more: int) -> None:
        """So many more requests of a deployment, and of them so many errors, and so on."""
        before = self.tallies.get(deployment, Tally(over_p50=0, over_p99=0))
        added = {name: (getattr(before, name) or 0) + number for name, number in more.items()}
        self.tallies[deployment] = replace(before, **added)

    def _answer(self, config: EndpointConfig) -> None:
        if self.down:
            raise ServiceUnavailable("the metrics do not answer", where=config.endpoint)


class FakeNotifier:
    """People who read what they get in `received`. While `down`, nothing reaches them."""

    def __init__(self) -> None:
        self.down = False
        self.received: list[Notification] = []

    def send(self, notification: Notification) -> None:
        if self.down:
            raise ServiceUnavailable("the chat does not answer", where="memory")
        self.received.append(notification)

    def check(self) -> str:
        return "memory"


class FakeModelFiles:
    """Model folders of which only the names exist."""

    def __init__(self) -> None:
        self._admitted: set[Digest] = set()

    def location(self, manifest: Digest) -> str | None:
        return f"memory:{manifest}" if manifest in self._admitted else None

    def admit(self, folder: Path, manifest: Manifest) -> str:
        if manifest_of(folder) != manifest:
            raise DigestMismatch("files are not what the manifest says")
        self._admitted.add(manifest.digest())
        return f"memory:{manifest.digest()}"

    def kept(self) -> Mapping[Digest, int]:
        return dict.fromkeys(sorted(self._admitted), 1000)

    def forget(self, manifest: Digest) -> None:
        self._admitted.discard(manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWorld:
    """What outlives a process: the services and the machine. `ports` gives a process its view of them."""

    registry: FakeRegistry = field(default_factory=FakeRegistry)
    provider: FakeProvider = field(default_factory=FakeProvider)
    ledger: Ledger = field(default_factory=MemoryLedger)
    files: FakeModelFiles = field(default_factory=FakeModelFiles)
    clock: FakeClock = field(default_factory=FakeClock)
    signer: FakeSigner = field(default_factory=FakeSigner)
    dead: set[str] = field(default_factory=set)
    notifiers: dict[str, FakeNotifier] = field(default_factory=dict)
    place: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.registry.clock = self.clock
        self.provider.counted.clock = self.clock

    def ports(self, process: str = "process-1", root: Path = Path()) -> Ports:
        """The ports of a process. Those that only stages ask for are missing."""
        return Ports(
            root=root,
            store=ContentStore(FsspecObjects(f"memory://{self.place}"), root / "cache"),
            ledger=self.ledger,
            files=self.files,
            models=BroughtModels(root=root, registered=lambda: _missing("models")),
            clock=self.clock,
            host=FakeHost(process, self.dead),
            registry=lambda: self.registry,
            verifier=lambda: self.signer,
            signer=lambda: self.signer,
            provider=lambda _: self.provider,
            metrics=lambda _: self.provider.metrics(),
            exporter=_missing,
            optimizer=_missing,
            runtime=_missing,
            source=_missing,
            notifiers=lambda: self.notifiers,
            git_sha=lambda: "",
            conditions=dict,
            journal=lambda key: FileJournal(root / "search" / f"{key[-16:]}.jsonl"),
        )


def _missing(name: str, env: object = None, /) -> NoReturn:
    del env
    raise MissingPackage(f"there is no fake called {name}")
