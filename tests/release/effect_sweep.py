"""Every effect of a release operation, one at a time: killed at it, or it fails, or its answer is lost.

The effects are counted by a run that nothing disturbs. A trial disturbs one of them, lets follow
what an operator and the reconciler do next, and compares the end with that of the undisturbed run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from onnx_ops.domain.ledger import (
    AliasesWritten,
    LeaseRenewed,
    LedgerEntry,
    MetricsRecorded,
    NotificationSent,
)
from onnx_ops.domain.rollout import Roles
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, StillPendingError
from onnx_ops.release.effects import LEASE_S
from tests.release.disk_scenes import damage, disk_copies_of
from tests.release.release_parts import Scene
from tests.release.release_scenes import end_of
from tests.support.faults import Faults, Killed

FaultKind = Literal["kill -9", "ENOSPC", "EACCES", "kill -9 at a call", "lost"]
"""The first three happen to a call of the system that changes a file, the others to a call of a
port.
"""

OF_FILES: tuple[FaultKind, ...] = ("kill -9", "ENOSPC", "EACCES")
OF_CALLS: tuple[FaultKind, ...] = ("kill -9 at a call", "lost")

Point = tuple[FaultKind, int]


def comparable_end(scene: Scene) -> dict[str, Any]:
    """Return the end of a scene, whose roles are reduced to the bytes that are served in them: when a rollout ended and
    when an override was given differ. `unshown` are entries that the registry should show to
    people, and does not.
    """
    end, shown = end_of(scene), scene.world.registry.mirrored
    roles = {
        name: {
            role: one.manifest
            for role in ("stable", "previous", "candidate")
            if (one := getattr(found, role))
        }
        for name, found in cast("Mapping[str, Roles]", end["roles"]).items()
    }
    return {
        **end,
        "roles": roles,
        "unshown": [entry for entry in _to_show(scene) if entry not in shown],
    }


def _to_show(scene: Scene) -> Iterator[LedgerEntry]:
    """The entries before the last note of each endpoint that the registry says what the ledger says."""
    for name in scene.world.ledger.endpoints():
        entries = scene.world.ledger.read(name)
        last = max(
            (entry.sequence for entry in entries if isinstance(entry.body, AliasesWritten)),
            default=0,
        )
        for entry in entries[: last - 1] if last else ():
            if not isinstance(entry.body, MetricsRecorded | NotificationSent | LeaseRenewed):
                yield entry


@dataclass(frozen=True)
class Operation:
    """`act` is disturbed; then again, if a person sees that it is not `done`. `follow` is what comes afterwards, and
    `end` returns all that must be as if nothing had happened."""

    setup: Callable[[], Scene]
    act: Callable[[Scene], object]
    done: Callable[[Scene], bool] = lambda scene: False
    follow: Callable[[Scene], object] = Scene.reconcile_all
    end: Callable[[Scene], Mapping[str, Any]] = comparable_end
    kinds: tuple[FaultKind, ...] = OF_FILES


@dataclass
class Tally:
    """What was tried, and what was inconsistent in it."""

    tried: list[Point] = field(default_factory=list)
    inconsistent: dict[Point, list[str]] = field(default_factory=dict)


def sweep_effects(
    operation: Operation, root: Path, choose: Callable[[Iterable[Point]], Sequence[Point]] = list
) -> Tally:
    """Disturb the chosen ones of all points of an operation whose files lie below `root`."""
    copies = disk_copies_of(operation.setup, root)
    points: list[Point] = []
    for kinds in (OF_FILES, OF_CALLS):
        counted, scene = Faults(), copies()
        with _disturbed(scene, root, counted, kinds[0]):
            operation.act(scene)
        points += [
            (one, at) for one in kinds if one in operation.kinds for at in range(counted.moments)
        ]
    whole = copies()
    operation.act(whole)
    operation.follow(whole)
    assert not damage(root)
    expected, tally = operation.end(whole), Tally()
    for point in choose(points):
        tally.tried.append(point)
        if problems := _try(operation, copies(), root, point, expected):
            tally.inconsistent[point] = problems
    return tally


def _disturbed(
    scene: Scene, root: Path, faults: Faults, kind: FaultKind
) -> AbstractContextManager[None]:
    if kind in OF_FILES:
        return faults.in_folder(root)
    scene.faults = faults
    return nullcontext()


def _faults(kind: FaultKind, moment: int) -> Faults:
    if kind.startswith("kill"):
        return Faults(at=moment)
    if kind == "lost":
        return Faults(at=moment, error=ServiceUnavailableError("injected"))
    number = getattr(errno, kind)
    return Faults(at=moment, error=OSError(number, os.strerror(number)))


def _try(
    operation: Operation, scene: Scene, root: Path, point: Point, expected: Mapping[str, Any]
) -> list[str]:
    """A process that meets an error has ended; one that meets a closed folder lives until its lease has expired."""
    kind, moment = point
    repeat = True
    try:
        with _disturbed(scene, root, _faults(kind, moment), kind):
            operation.act(scene)
            repeat = False
    except StillPendingError:
        repeat = False
    except (Killed, OnnxOpsError):
        pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES):
            return [f"a traceback: {error!r}"]
    except Exception as error:
        return [f"a traceback: {error!r}"]
    scene.faults = None
    if kind == "EACCES":
        scene.world.clock.advance(LEASE_S + 1)
    else:
        scene.restart()
    try:
        if repeat and not operation.done(scene):
            operation.act(scene)
        operation.follow(scene)
    except Exception as error:
        return [f"what followed failed: {error!r}", *damage(root)]
    end = operation.end(scene)
    return [
        f"{key}: {end[key]} instead of {expected[key]}"
        for key in expected
        if end[key] != expected[key]
    ] + damage(root)
