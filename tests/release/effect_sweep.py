"""Disturbance of every effect of a release operation, one effect at a time.

The process is killed at the effect, or the effect fails, or its answer is lost. An undisturbed run
counts the effects. A trial disturbs one of them. Then the operator and the reconciler continue. The
end is compared with that of the undisturbed run.
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
"""Kind of a disturbance.

The first three happen to a system call that changes a file, the others to a call of a port.
"""

OF_FILES: tuple[FaultKind, ...] = ("kill -9", "ENOSPC", "EACCES")
OF_CALLS: tuple[FaultKind, ...] = ("kill -9 at a call", "lost")

Point = tuple[FaultKind, int]


def comparable_end(scene: Scene) -> dict[str, Any]:
    """Return the end of a scene, without parts that legitimately differ.

    Roles are reduced to the files that are served in them: the times at which a rollout ended and
    an override was given differ. `unshown` are entries that the registry should show to people, and
    does not.
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
    """Yield the entries that the registry should show.

    They precede the last `AliasesWritten` entry of their endpoint. Entries about metrics, leases
    and notifications are left out.
    """
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
    """An operation that is disturbed.

    `act` is disturbed. It is repeated if a person sees that it is not `done`. `follow` comes
    afterwards. `end` returns everything that must equal the undisturbed run.
    """

    setup: Callable[[], Scene]
    act: Callable[[Scene], object]
    done: Callable[[Scene], bool] = lambda scene: False
    follow: Callable[[Scene], object] = Scene.reconcile_all
    end: Callable[[Scene], Mapping[str, Any]] = comparable_end
    kinds: tuple[FaultKind, ...] = OF_FILES


@dataclass
class Tally:
    """The points that were tried, and the inconsistencies at each."""

    tried: list[Point] = field(default_factory=list)
    inconsistent: dict[Point, list[str]] = field(default_factory=dict)


def sweep_effects(
    operation: Operation, root: Path, choose: Callable[[Iterable[Point]], Sequence[Point]] = list
) -> Tally:
    """Disturb an operation at those of its points that `choose` returns.

    Its files are below `root`.
    """
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
    """Try one point, and return the problems.

    A process that gets an error ends. A process that cannot write to the folder runs until its
    lease has expired.
    """
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
