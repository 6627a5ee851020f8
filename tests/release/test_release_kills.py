"""kill -9 of the reconciler between any two of its effects: a child process that really dies, and one that follows it.

What outlives the child is what stood in a file when it died: registry, endpoints, ledger. Each effect is in the file
before the next begins.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from onnx_ops.domain.ledger import ActionOutcome, AliasesWritten, Intent, LedgerEntry, MetricsRecorded, VersionRefused
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.ports import Context, EndpointProvider, Ledger, ModelFiles, Registry
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop
from onnx_ops.testing.fakes import FakeWorld
from tests.release.release_parts import CHALLENGER, Scene
from tests.release.release_scenes import copies_of, end_of, on_trial, serving, with_candidate
from tests.release.test_release_faults import SCENARIOS
from tests.support.suite import Sweep

EFFECTS = frozenset({"append", "apply", "roll_back", "admit", "set_alias", "delete_alias", "annotate", "mirror"})
"""Everything by which a reconciler changes ledger, endpoints, model folders and registry."""


def asked(scene: Scene, version: str) -> Scene:
    """A person has set the challenger alias in the registry's pages."""
    scene.set_alias(CHALLENGER, version)
    return scene


def with_command(scene: Scene, word: OperatorCommand) -> Scene:
    """An operator has said something that no reconciler has read yet."""
    scene.say(word)
    return scene


UNHURT = 3
"""Exit status of a child that lived to the end, whatever it met there."""

SCENES: Mapping[str, Callable[[], Scene]] = {
    "first deployment": lambda: asked(with_candidate(serving()), "1"),
    "all at once": lambda: asked(with_candidate(serving("a")), "2"),
    "start": lambda: asked(with_candidate(on_trial(OperatorCommand.ADVANCE, OperatorCommand.ADVANCE)), "4"),
    "advance": lambda: with_command(on_trial(), OperatorCommand.ADVANCE),
    "finish": lambda: with_command(on_trial(OperatorCommand.ADVANCE), OperatorCommand.ADVANCE),
    "replace a candidate": lambda: asked(with_candidate(on_trial()), "4"),
    **{name: one.setup for name, one in SCENARIOS.items() if one.act is Scene.reconcile_all},
}


class Deadly:
    """Stands around a port of a process that dies after its `at`-th effect; 0 is before the first."""

    def __init__(self, life: Life, inner: object) -> None:
        self._life = life
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in EFFECTS:
            return method

        def effect(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            self._life.one_more()
            return result

        return effect


class Life:
    """The effects of one process, each kept in `file` once it was made."""

    def __init__(self, world: FakeWorld, file: Path, at: int | None) -> None:
        self.world, self.file, self.at, self.effects = world, file, at, 0

    def context(self, context: Context) -> Context:
        return replace(
            context,
            ledger=cast("Ledger", Deadly(self, context.ledger)),
            files=cast("ModelFiles", Deadly(self, context.files)),
            registry=lambda: cast("Registry", Deadly(self, context.registry())),
            provider=lambda name: cast("EndpointProvider", Deadly(self, context.provider(name))),
        )

    def one_more(self) -> None:
        self.effects += 1
        keep(self.world, self.file)
        self.die_if_it_is_time()

    def die_if_it_is_time(self) -> None:
        if self.effects == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def keep(world: FakeWorld, file: Path) -> None:
    aside = file.with_suffix(".new")
    aside.write_bytes(
        pickle.dumps((world.registry, world.provider, world.ledger, world.files, world.clock, world.dead))
    )
    aside.replace(file)


def kept(file: Path) -> FakeWorld:
    registry, provider, ledger, files, clock, dead = pickle.loads(file.read_bytes())  # noqa: S301 (our own)
    return FakeWorld(registry=registry, provider=provider, ledger=ledger, files=files, clock=clock, dead=dead)


def reconcile(context: Context) -> None:
    """Passes over everything until one has done nothing."""
    did: list[WatchEvent] = []
    watcher = WatchLoop(context, ReconcileQueue(), interval_s=1.0, on_event=did.append)
    for _ in range(10):
        before = sum(bool(report.did) for report in did)
        watcher.reconcile_all()
        if sum(bool(report.did) for report in did) == before:
            assert not [report for report in did if report.kind is WatchEventKind.TROUBLE]
            return
    raise AssertionError(did)


def reconcile_and_die(scene: Scene, file: Path, at: int) -> tuple[Scene, bool]:
    """A child reconciles and is killed after its `at`-th effect: what it leaves to the next process, and if it died."""
    keep(scene.world, file)
    child = os.fork()
    if child == 0:
        try:
            life = Life(scene.world, file, at)
            life.die_if_it_is_time()
            reconcile(life.context(scene.context))
        finally:
            os._exit(UNHURT)
    _, status = os.waitpid(child, 0)
    after = Scene(world=kept(file), processes=scene.processes)
    after.restart()
    return after, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def count_effects(scene: Scene, file: Path) -> int:
    life = Life(scene.world, file, None)
    reconcile(life.context(scene.context))
    return life.effects


def entries(scene: Scene) -> dict[str, list[str]]:
    """What the ledgers say, but for readings, and for intents: of them, the outcomes."""
    return {name: [_line(e) for e in _lasting(scene, name)] for name in scene.world.ledger.endpoints()}


def _lasting(scene: Scene, name: str) -> list[LedgerEntry]:
    return [entry for entry in scene.world.ledger.read(name) if not isinstance(entry.body, Intent | MetricsRecorded)]


def _line(entry: LedgerEntry) -> str:
    match entry.body:
        case ActionOutcome(ok=ok):
            return f"outcome {ok}"
        case AliasesWritten(aliases=aliases):
            return f"mirrored {sorted(aliases.items(), key=str)}"
        case VersionRefused(alias=alias, version=version):
            return f"refused {alias} {version}"
        case body:
            return body.kind


@pytest.mark.parametrize("name", SCENES)
def test_killed_between_any_two_effects(name: str, tmp_path: Path, sweep: Sweep) -> None:
    file, copies = tmp_path / "world", copies_of(SCENES[name])
    whole = copies()
    count = count_effects(whole, file)
    assert count >= 3
    for at in sweep(range(count + 1)):
        scene, died = reconcile_and_die(copies(), file, at)
        assert died
        reconcile(scene.context)
        assert end_of(scene) == end_of(whole), f"killed after effect {at} of {count}"
        assert entries(scene) == entries(whole), f"killed after effect {at} of {count}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCENES)
def test_killed_again_while_it_makes_good(name: str, tmp_path: Path, sweep: Sweep) -> None:
    file, copies = tmp_path / "world", copies_of(SCENES[name])
    whole = copies()
    count = count_effects(whole, file)
    for first, second in sweep(itertools.product(range(0, count, 2), range(1, count, 3))):
        scene, _ = reconcile_and_die(copies(), file, first)
        scene, _ = reconcile_and_die(scene, file, second)
        reconcile(scene.context)
        assert end_of(scene) == end_of(whole), f"killed after effects {first} and {second}"
        assert entries(scene) == entries(whole), f"killed after effects {first} and {second}"
