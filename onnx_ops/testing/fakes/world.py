"""All services and the machine together, from which processes get their ports."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from onnx_ops.adapters.external_model import UserSuppliedModels
from onnx_ops.adapters.files import FileJournal
from onnx_ops.adapters.ledgers.log import MemoryLedger
from onnx_ops.adapters.objects import FsspecObjects
from onnx_ops.adapters.store.content import ContentStore
from onnx_ops.adapters.store.models import manifest_of
from onnx_ops.domain.artifact import Digest, Manifest, StoredObject
from onnx_ops.domain.notification import Notification
from onnx_ops.errors import DigestMismatchError, MissingPackageError, ServiceUnavailableError
from onnx_ops.ports import Ledger, Ports
from onnx_ops.testing.fakes.endpoints import FakeProvider
from onnx_ops.testing.fakes.process import FakeClock, FakeHost, FakeSigner
from onnx_ops.testing.fakes.registry import FakeRegistry


class FakeNotifier:
    """People who read what they get in `received`. While `down`, nothing reaches them."""

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
    """Model folders of which only the names exist."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._admitted: dict[Digest, float] = {}

    def location(self, manifest: Digest) -> str | None:
        return f"memory:{manifest}" if manifest in self._admitted else None

    def admit(self, folder: Path, manifest: Manifest) -> str:
        if manifest_of(folder) != manifest:
            raise DigestMismatchError("files are not what the manifest says")
        self._admitted.setdefault(manifest.digest(), self.clock.now())
        return f"memory:{manifest.digest()}"

    def kept(self) -> Sequence[StoredObject]:
        admitted = sorted(self._admitted.items())
        return tuple(StoredObject(name=digest, digest=digest, size_bytes=1000, at=at) for digest, at in admitted)

    def forget(self, manifest: Digest) -> None:
        self._admitted.pop(manifest, None)


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
        self.files.clock = self.clock
        self.provider.counted.clock = self.clock

    def ports(self, process: str = "process-1", root: Path = Path()) -> Ports:
        """The ports of a process. Those that only stages ask for are missing."""
        return Ports(
            root=root,
            store=ContentStore(FsspecObjects(f"memory://{self.place}"), root / "cache"),
            ledger=self.ledger,
            files=self.files,
            models=UserSuppliedModels(root=root, registered=lambda: _missing("models")),
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
    raise MissingPackageError(f"there is no fake called {name}")
