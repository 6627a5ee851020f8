"""kill -9 of the reconciler between any two of its effects.

A child process is really killed, and another process continues. Only registry, endpoints, ledger
and model folders remain, as they were when the child was killed.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    Intent,
    LedgerEntry,
    MetricsRecorded,
    VersionRefused,
)
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchEventKind, WatchLoop
from tests.release.release_parts import Scene
from tests.release.release_scenes import copies_of, end_of
from tests.release.test_release_faults import SCENARIOS
from tests.support.faults import Faults
from tests.support.suite import Sweep

UNHURT = 3
"""Exit status of a child that was not killed."""
RECONCILED = [name for name in SCENARIOS if name != "without endpoint"]


def asked(name: str) -> Callable[[], Scene]:
    """Return copies of a scenario with a request that no reconciler has read yet."""

    def setup() -> Scene:
        scene = SCENARIOS[name].setup()
        SCENARIOS[name].ask(scene)
        return scene

    return copies_of(setup)


def reconcile(scene: Scene) -> None:
    """Reconcile everything until a pass does nothing."""
    did: list[WatchEvent] = []
    watcher = WatchLoop(scene.context, ReconcileQueue(), interval_s=1.0, on_event=did.append)
    for _ in range(10):
        before = sum(bool(report.did) for report in did)
        watcher.reconcile_all()
        if sum(bool(report.did) for report in did) == before:
            assert not [report for report in did if report.kind is WatchEventKind.TROUBLE]
            return
    raise AssertionError(did)


def moments_of_effects(scene: Scene) -> list[int]:
    """Return the moments of a reconciler at which the world has changed."""
    moments: list[int] = []
    seen = b""

    def look(moment: int) -> None:
        nonlocal seen
        if (now := pickle.dumps(scene.world)) != seen:
            moments.append(moment)
            seen = now

    scene.faults = Faults(between=look)
    reconcile(scene)
    scene.faults = None
    return moments


def reconcile_and_die(scene: Scene, file: Path, at: int) -> tuple[Scene, bool]:
    """Reconcile in a child that is killed at a moment.

    Return the scene that it leaves to the next process, and whether it was killed.
    """

    def die(moment: int) -> None:
        if moment == at:
            file.write_bytes(pickle.dumps(scene.world))
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            scene.faults = Faults(between=die)
            reconcile(scene)
            file.write_bytes(pickle.dumps(scene.world))
        finally:
            os._exit(UNHURT)
    _, status = os.waitpid(child, 0)
    after = Scene(world=pickle.loads(file.read_bytes()), processes=scene.processes)  # noqa: S301 (our own)
    after.restart()
    return after, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def entries(scene: Scene) -> dict[str, list[str]]:
    """Return the ledgers' entries without metrics and intents; outcomes are included."""
    return {
        name: [_line(e) for e in _lasting(scene, name)] for name in scene.world.ledger.endpoints()
    }


def _lasting(scene: Scene, name: str) -> list[LedgerEntry]:
    return [
        entry
        for entry in scene.world.ledger.read(name)
        if not isinstance(entry.body, Intent | MetricsRecorded)
    ]


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


@pytest.mark.parametrize("name", RECONCILED)
def test_reconcile_killed_between_effects_is_completed_by_next_process(
    name: str, tmp_path: Path, sweep: Sweep
) -> None:
    copies = asked(name)
    whole = copies()
    moments = moments_of_effects(whole)
    assert len(moments) >= 3
    for at in sweep(moments):
        scene, died = reconcile_and_die(copies(), tmp_path / "world", at)
        assert died
        reconcile(scene)
        assert end_of(scene) == end_of(whole), f"killed at moment {at} of {moments}"
        assert entries(scene) == entries(whole), f"killed at moment {at} of {moments}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECONCILED)
def test_reconcile_killed_twice_is_completed_by_third_process(
    name: str, tmp_path: Path, sweep: Sweep
) -> None:
    copies = asked(name)
    whole = copies()
    moments = moments_of_effects(whole)
    deaths = 0
    for first, second in sweep(itertools.product(moments[::2], moments[1::3])):
        scene, died = reconcile_and_die(copies(), tmp_path / "world", first)
        assert died
        # The second process can complete the operation before this moment.
        scene, died = reconcile_and_die(scene, tmp_path / "world", second)
        deaths += died
        reconcile(scene)
        assert end_of(scene) == end_of(whole), f"killed at moments {first} and {second}"
        assert entries(scene) == entries(whole), f"killed at moments {first} and {second}"
    assert deaths > 0
