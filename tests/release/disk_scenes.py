"""Scenes whose ledger, model folders and content store are files.

The module also checks these files for damage.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.ledgers.log import ObjectLedger
from onnx_ops.adapters.store import ContentStore, ModelFolders
from onnx_ops.domain.ledger import fold
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Context
from onnx_ops.testing.fakes import FakeWorld, make_ledger_keys
from tests.release.release_parts import Scene, new_world

STATE = ".onnx-ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWorld(FakeWorld):
    """A world whose ledger, model folders and store are below `root`, as in a project.

    The registry and the endpoints are in memory, and remain when a process ends.
    """

    root: Path
    alive: dict[str, Context] = field(default_factory=dict)

    def context(self, process: str = "process-1", root: Path | None = None) -> Context:
        if process not in self.alive:
            store, ledger = store_of(self.root), ledger_of(self.root)
            self.alive[process] = replace(
                FakeWorld.context(self, process, root or self.root),
                open_ledger=lambda: ledger,
                files=models_of(self.root),
                open_store=lambda: store,
            )
        return self.alive[process]


def ledger_of(root: Path) -> ObjectLedger:
    return ObjectLedger(LocalObjects(root / STATE / "ledger"), make_ledger_keys())


def models_of(root: Path) -> ModelFolders:
    return ModelFolders(root / STATE / "models")


def store_of(root: Path) -> ContentStore:
    place = root / STATE / "store"
    return ContentStore(LocalObjects(place), place)


def disk_world(root: Path) -> DiskWorld:
    return DiskWorld(root=root, ledger=ledger_of(root), files=models_of(root))  # type: ignore[arg-type]


@contextmanager
def on_disk(root: Path) -> Iterator[None]:
    """Create the scenes of this block below a folder."""
    token = new_world.set(lambda: disk_world(root))
    try:
        yield
    finally:
        new_world.reset(token)


def disk_copies_of(setup: Callable[[], Scene], root: Path) -> Callable[[], Scene]:
    """Return a function that copies the scene that `setup` returns.

    Each call of the function also restores the files below `root`.
    """
    with on_disk(root):
        first = setup()
    assert isinstance(first.world, DiskWorld)
    kept = pickle.dumps(replace(first, world=replace(first.world, alive={})))
    aside = root.with_name(f"{root.name}-kept")
    root.mkdir(exist_ok=True)
    shutil.copytree(root, aside)

    def copy() -> Scene:
        shutil.rmtree(root)
        shutil.copytree(aside, root)
        scene: Scene = pickle.loads(kept)  # noqa: S301 (our own)
        world = replace(scene.world, ledger=ledger_of(root), files=models_of(root))  # type: ignore[arg-type]
        return replace(scene, world=world)

    return copy


def damage(root: Path) -> list[str]:
    """Return the damage below a world's folder, as a newly started process reads it."""
    found: list[str] = []
    ledger, models, store = ledger_of(root), models_of(root), store_of(root)
    for endpoint in ledger.endpoints():
        try:
            if ledger.state(endpoint) != fold(endpoint, ledger.read(endpoint)):
                found.append(f"the snapshot of {endpoint} differs from its entries")
        except OnnxOpsError as error:
            found.append(str(error))
    folders = [one.digest for one in models.list_folders() if one.digest is not None]
    found += [
        f"model folder {digest} is damaged" for digest in folders if models.location(digest) is None
    ]
    for one in store.contents():
        try:
            if one.digest is not None:
                store.path(one.digest)
        except OnnxOpsError as error:
            found.append(str(error))
    return found
