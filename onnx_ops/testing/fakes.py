"""Fakes of the ports, such as the clock, the signer and the registry."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from onnx_ops.adapters.external_model import UserSuppliedModels
from onnx_ops.adapters.files import FileJournal, FsspecObjects
from onnx_ops.adapters.ledgers.chain import LedgerKeys
from onnx_ops.adapters.ledgers.log import MemoryLedger
from onnx_ops.adapters.pinned_files import PinnedFiles
from onnx_ops.adapters.store import ContentStore
from onnx_ops.attestation import TrustedKeys, compute_key_digest
from onnx_ops.domain.artifact import Digest, Manifest, StoredObject, digest_file, digest_folder
from onnx_ops.domain.endpoint import (
    EndpointConfig,
    EndpointState,
    OrphanedResource,
    build_rollback_state,
)
from onnx_ops.domain.ledger import LedgerEntry
from onnx_ops.domain.notification import Notification
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.release import ListedVersion, Publication, VersionRecord
from onnx_ops.domain.rollout_observations import (
    BADNESS_EDGES,
    EpochUnits,
    GenerationCounts,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
    UnitCounts,
)
from onnx_ops.domain.target import Target
from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    MissingPackageError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.ports import Context, EndpointProvider, Ledger, MetricsSource, Notifier


class FakeClock:
    """A clock that advances only on request.

    It starts at `now`, in seconds since the epoch.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    monotonic = now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class FakeHost:
    """One process of a machine.

    The machine's processes share `dead`, which names the processes that have ended.
    """

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
    """A signer with a real ECDSA P-256 key, derived from a seed.

    As a verifier, it trusts only its own key.
    """

    def __init__(self, seed: bytes = b"trusted") -> None:
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self.is_local = True
        self._seed = seed
        self._private = derive_private_key(int.from_bytes(seed[:31], "big"), SECP256R1())
        public = self._private.public_key()
        self.key = compute_key_digest(public)
        self.trusted_keys = base64.b64encode(
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).decode()
        """The public key as the endpoint server takes it: SubjectPublicKeyInfo in base64."""
        self._trusted = TrustedKeys((), encoded=self.trusted_keys)

    def public_pem(self) -> bytes:
        """Return the public key, SubjectPublicKeyInfo in PEM."""
        return (
            f"-----BEGIN PUBLIC KEY-----\n{self.trusted_keys}\n-----END PUBLIC KEY-----\n".encode()
        )

    def private_pem(self) -> bytes:
        """Return the private key, PKCS 8 in PEM.

        Use it for projects whose commands sign with this key.
        """
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def __reduce__(self) -> tuple[type[FakeSigner], tuple[bytes]]:
        return type(self), (self._seed,)

    def sign(self, data: bytes) -> str:
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA256

        return base64.b64encode(
            self._private.sign(data, ECDSA(SHA256(), deterministic_signing=True))
        ).decode()

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        self._trusted.verify(data, signature, key)


def make_ledger_keys(signer: FakeSigner | None = None) -> LedgerKeys:
    """Return the keys of a ledger whose entries one signer signs and verifies.

    By default, the signer is a `FakeSigner` of the default seed.
    """
    signer = signer or FakeSigner()
    use = partial(_get_signer, signer)
    return LedgerKeys(use, use, partial(dict, {signer.key: signer.trusted_keys}))


def _get_signer(signer: FakeSigner) -> FakeSigner:
    return signer


class FakeProvider(EndpointProvider):
    """In-memory endpoints that apply states in the order of their generations.

    While `down`, `observe` returns None, and methods that change endpoints or list orphaned
    resources raise an error. `applied` lists each state that changed an endpoint. `left` lists
    orphaned resources by endpoint, each named by its manifest. `confirmed` lists the endpoints
    whose rollouts were confirmed.
    """

    def __init__(self) -> None:
        self.down = False
        self.confirmed: list[str] = []
        self.applied: list[tuple[str, EndpointState]] = []
        self.left: dict[str, list[OrphanedResource]] = {}
        self._states: dict[str, EndpointState] = {}
        self._generations: dict[str, int] = {}
        self.counted = FakeMetrics(self._generations)
        self._options: dict[str, Mapping[str, Json]] = {}

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        return frozenset({"split", "epochs"})

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Accept any options."""

    def explain_unservable(self, target: Target) -> str:
        """Return an empty string: every target can be served."""
        return ""

    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's name and its option `region`, by default `memory`."""
        return f"{config.endpoint} in {config.options.get('region', 'memory')}"

    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Allow every change except a change of `auth`."""
        if before.options.get("auth") != after.options.get("auth"):
            raise UserError("auth cannot be changed", where=after.endpoint)

    def confirm_rollout(self, config: EndpointConfig) -> None:
        """Record that the rollout of the endpoint was confirmed."""
        self.confirmed.append(config.endpoint)

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise ServiceUnavailableError while `down`."""
        self._reach(config)

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change, as the base class does.

        In a rollback without a present state, idle deployments remain, unlike in the base class.
        """
        if is_rollback and current is None:
            return state
        return super().preview(config, state, current, is_rollback=is_rollback)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        state = None if self.down else self._states.get(config.endpoint)
        made = self._options.get(config.endpoint, {})
        if state is None or made == config.options:
            return state
        names = sorted({*made, *config.options})
        differs = [
            f"{n}: {made.get(n)}, not {config.options.get(n)}"
            for n in names
            if made.get(n) != config.options.get(n)
        ]
        return replace(state, drift=tuple(differs))

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        self._reach(config)
        name, state = config.endpoint, replace(state, generation=generation)
        last = self._generations.get(name, -1)
        current = self._states.get(name)
        if generation < last or (generation == last and current is not None and current != state):
            raise ConflictError(f"generation {last} was applied already", where=name)
        if (
            current is None
            or not current.is_equivalent(state)
            or self._options[name] != config.options
        ):
            self.applied.append((name, state))
        self._states[name], self._generations[name], self._options[name] = (
            state,
            generation,
            config.options,
        )

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        current, made = (
            self._states.get(config.endpoint),
            self._options.get(config.endpoint, config.options),
        )
        target = state if current is None else build_rollback_state(current, state)
        self.apply(replace(config, options=made), target, generation=generation)

    def address(self, config: EndpointConfig) -> str | None:
        return f"memory:{config.endpoint}" if config.endpoint in self._states else None

    def metrics(self, options: Mapping[str, Json] | None = None) -> FakeMetrics:
        return self.counted

    def remove(self, config: EndpointConfig) -> None:
        self._reach(config)
        self._states.pop(config.endpoint, None)
        self._generations.pop(config.endpoint, None)

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> Sequence[OrphanedResource]:
        self._reach(config)
        return [one for one in self.left.get(config.endpoint, ()) if one.name not in needed]

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        self._reach(config)
        self.left[config.endpoint] = [
            one for one in self.left.get(config.endpoint, ()) if one != orphan
        ]

    def _reach(self, config: EndpointConfig) -> None:
        if self.down:
            raise ServiceUnavailableError("the endpoint cannot be reached", where=config.endpoint)

    def interfere(self, endpoint: str, state: EndpointState | None) -> None:
        """Replace the endpoint's state without an entry in the ledger.

        With None, the endpoint is removed. Its generation does not change.
        """
        self._states.pop(endpoint, None)
        if state is not None:
            self._states[endpoint] = state


class FakeMetrics(MetricsSource):
    """Counts that a test writes, of requests without keys.

    While `down`, the counts cannot be read. Readings have the time of `clock`. Requests since the
    last reading belong to the present generation of the endpoint. If there are such requests and
    two deployments are read, the requests form a closed epoch.
    """

    def __init__(self, generations: Mapping[str, int]) -> None:
        self.down = False
        self.clock = FakeClock()
        self.origin = "first"
        self.tallies: dict[str, RequestCounts] = {}
        self.shadow = ShadowCounts()
        self.histogram: tuple[tuple[float, ...], tuple[int, ...]] | None = (
            (0.001, 0.002),
            (500, 490, 10),
        )
        self._generations = generations
        self._last: dict[tuple[str, str], GenerationCounts] = {}
        self._counts: dict[tuple[str, str, int], GenerationCounts] = {}
        self._epochs: dict[str, list[EpochUnits]] = {}

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances", "shadow", "feedback"})

    def latencies(
        self, config: EndpointConfig, deployment: str
    ) -> tuple[Sequence[float], Sequence[int]] | None:
        self._answer(config)
        return self.histogram

    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        self._answer(config)
        name, generation = config.endpoint, self._generations.get(config.endpoint, 0)
        now = GenerationCounts(
            origin=self.origin,
            generation=generation,
            tallies=dict(self.tallies),
            shadow=self.shadow,
        )
        none = GenerationCounts(origin=self.origin, generation=generation, tallies={})
        before = self._last.get((name, self.origin), none)
        self._last[name, self.origin] = now
        new = {
            deployment: more
            for deployment, tally in now.tallies.items()
            if (more := tally.minus(before.tallies.get(deployment))) is not None and more.requests
        }
        key = (name, self.origin, generation)
        added = replace(none, tallies=new, shadow=now.shadow.minus(before.shadow))
        self._counts[key] = self._counts.get(key, none).plus(added)
        epochs = self._epochs.setdefault(name, [])
        if new and len(deployments) == 2:
            candidate, stable = (
                new.get(each, RequestCounts(over_p50=0, over_p99=0)) for each in deployments
            )
            units = _count_requests_as_units(candidate, stable)
            epochs.append(EpochUnits(generation=generation, epoch=len(epochs), units=units))
        counts = tuple(each for (endpoint, *_), each in self._counts.items() if endpoint == name)
        return MetricsReading(at=self.clock.now(), counts=counts, epochs=tuple(epochs))

    def count(self, deployment: str, **more: int) -> None:
        """Add to the counts of a deployment: requests, errors and others by name."""
        before = self.tallies.get(deployment, RequestCounts(over_p50=0, over_p99=0))
        added: dict[str, Any] = {
            name: (getattr(before, name) or 0) + number for name, number in more.items()
        }
        self.tallies[deployment] = replace(before, **added)

    def _answer(self, config: EndpointConfig) -> None:
        if self.down:
            what = "the metrics source does not answer"
            raise ServiceUnavailableError(what, where=config.endpoint)


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
    """An in-memory registry. While `down`, every call except `where` fails."""

    def __init__(self) -> None:
        self.down = False
        self.clock = FakeClock()
        self.mirrored: list[LedgerEntry] = []
        self._models: dict[str, _Model] = {}

    def publish(self, publication: Publication) -> Mapping[str, str]:
        self._answer()
        for variant in publication.variants:
            manifest = Manifest(
                files={name: digest_file(path) for name, path in variant.files.items()}
            )
            if manifest != variant.manifest:
                raise DigestMismatchError(
                    "files do not match the manifest", where=publication.model
                )
        model, release, versions = (
            self._models.setdefault(publication.model, _Model()),
            publication.lineage.release,
            {},
        )
        for variant in publication.variants:
            key = (release, variant.variant, variant.manifest.digest())
            records = [(stored, stored.record) for stored in model.versions.values()]
            known = (
                stored
                for stored, record in records
                if (record.release, record.variant, record.manifest) == key
            )
            stored = next(known, None)
            record = VersionRecord(
                model=publication.model,
                version=stored.record.version
                if stored
                else str(max(map(int, model.versions), default=0) + 1),
                release=release,
                variant=variant.variant,
                manifest=variant.manifest.digest(),
                decisions=dict(variant.signed),
                tags=stored.record.tags if stored else {},
            )
            model.versions[record.version] = _Version(
                record=record,
                files={name: path.read_bytes() for name, path in variant.files.items()},
                documents={name: path.read_bytes() for name, path in variant.evidence.items()},
                created_at=stored.created_at if stored else self.clock.now(),
                evidence=variant.evidence_digest(),
            )
            versions[variant.variant] = record.version
        return versions

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
        stored = self._version(model, version)
        stored.record = replace(stored.record, tags={**stored.record.tags, **tags})

    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        for name, content in self._version(record.model, record.version).files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return digest_folder(folder)

    def document(self, record: VersionRecord, name: str) -> bytes:
        documents = self._version(record.model, record.version).documents
        if name not in documents:
            raise NotFoundError(f"no document {name}", where=f"{record.model}/{record.version}")
        return documents[name]

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        self._answer()
        if entry not in self.mirrored:
            self.mirrored.append(entry)

    def where(self, model: str) -> str:
        return f"memory:{model}"

    def page(self, model: str, version: str, name: str) -> str:
        self._version(model, version)
        return ""

    def replace_record(self, record: VersionRecord) -> None:
        """Replace the record of a version, as an attacker could."""
        self._version(record.model, record.version).record = record

    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        self._answer()
        stored = self._models[model].versions.values() if model in self._models else ()
        return tuple(
            ListedVersion(
                version=v.record.version,
                release=v.record.release,
                variant=v.record.variant,
                manifest=v.record.manifest,
                created_at=v.created_at,
                evidence=v.evidence,
            )
            for v in sorted(stored, key=lambda v: int(v.record.version))
        )

    def delete_version(self, model: str, version: str) -> None:
        self._answer()
        if version in self.aliases(model).values():
            raise RefusedError("an alias points at it", where=f"{model}/{version}")
        if model in self._models:
            self._models[model].versions.pop(version, None)

    def vanish(self, model: str, version: str) -> None:
        """Delete a version and its aliases, as a person can in the registry."""
        self._version(model, version)
        stored = self._models[model]
        del stored.versions[version]
        stored.aliases = {
            alias: number for alias, number in stored.aliases.items() if number != version
        }

    def tamper(self, record: VersionRecord, name: str) -> None:
        """Change a stored file, bypassing the registry."""
        files = self._version(record.model, record.version).files
        files[name] = bytes([files[name][0] ^ 1]) + files[name][1:]

    def _version(self, model: str, version: str) -> _Version:
        self._answer()
        if model not in self._models or version not in self._models[model].versions:
            raise NotFoundError("no such version", where=f"{model}/{version}")
        return self._models[model].versions[version]

    def _answer(self) -> None:
        if self.down:
            raise ServiceUnavailableError("the registry does not answer", where="memory")


class FakeNotifier(Notifier):
    """A notifier that appends to `received`. While `down`, it cannot send."""

    def __init__(self) -> None:
        self.down = False
        self.received: list[Notification] = []

    def send(self, notification: Notification) -> None:
        if self.down:
            raise ServiceUnavailableError("the chat does not answer", where="memory")
        self.received.append(notification)

    def check(self) -> str:
        return "memory"


class FakeModelFiles:
    """Model folders that exist only by name."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._admitted: dict[Digest, float] = {}

    def place(self, manifest: Digest) -> str:
        return f"memory:{manifest}"

    def location(self, manifest: Digest) -> str | None:
        return f"memory:{manifest}" if manifest in self._admitted else None

    def admit(self, folder: Path, manifest: Manifest) -> str:
        if digest_folder(folder) != manifest:
            raise DigestMismatchError("files do not match the manifest")
        self._admitted.setdefault(manifest.digest(), self.clock.now())
        return f"memory:{manifest.digest()}"

    def list_folders(self) -> Sequence[StoredObject]:
        admitted = sorted(self._admitted.items())
        return tuple(
            StoredObject(name=digest, digest=digest, size_bytes=1000, at=at)
            for digest, at in admitted
        )

    def forget(self, manifest: Digest) -> None:
        self._admitted.pop(manifest, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWorld:
    """Services and machine that remain after a process ends.

    `context` gives a process its view of them.
    """

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
        self.files.clock = self.clock
        self.provider.counted.clock = self.clock

    def context(self, process: str = "process-1", root: Path = Path()) -> Context:
        """Return the context of a process, without the ports that only stages use."""
        store = ContentStore(FsspecObjects(f"memory://{self.place}"), root / ".onnx-ops" / "cache")
        return Context(
            root=root,
            open_store=lambda: store,
            open_ledger=lambda: self.ledger,
            files=self.files,
            models=UserSuppliedModels(
                root=root,
                pinned=PinnedFiles(cache=root / "pinned"),
                registered=lambda: _missing("models"),
            ),
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
    raise MissingPackageError(f"there is no fake called {name}")


def _count_requests_as_units(
    candidate: RequestCounts, stable: RequestCounts
) -> Mapping[str, UnitCounts]:
    def bins(events: int, requests: int) -> tuple[int, ...]:
        return (requests - events, *[0] * (len(BADNESS_EDGES) - 2), events)

    units = {
        "errors": UnitCounts(
            candidate=bins(candidate.errors, candidate.requests),
            stable=bins(stable.errors, stable.requests),
        ),
        "refused": UnitCounts(
            candidate=bins(candidate.refused, candidate.requests),
            stable=bins(stable.refused, stable.requests),
        ),
    }
    for place, over in candidate.over().items():
        units[place] = UnitCounts(
            candidate=bins(over, candidate.measured),
            stable=bins(stable.over()[place], stable.measured),
        )
    return units
