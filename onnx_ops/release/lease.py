"""Keeps the lease of an effect for as long as the effect is under way: a cloud takes twenty minutes for an update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Clock

LEASE_SECONDS = 120.0
"""How long an intent keeps other drivers away. A holder that is seen to be dead loses it at once."""
LOOK_S = 1.0
"""How often the time is looked at, in seconds of this machine."""


@contextmanager
def kept(renew: Callable[[], bool], clock: Clock) -> Iterator[None]:
    """Renew a lease that was taken just now, each time that half of it is over, until the block ends.

    It is done beside the block, which may stand in a request of an SDK for long. So a process that was killed or
    stopped does not renew, and is overtaken after one lease.

    Args:
        renew: false once the lease is somebody else's; what it raises is tried again at the next look.
    """
    over = threading.Event()
    keeper = threading.Thread(target=_keep, args=(renew, clock, over), name="lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _keep(renew: Callable[[], bool], clock: Clock, over: threading.Event) -> None:
    due = clock.now() + LEASE_SECONDS / 2
    while not over.wait(LOOK_S):
        now = clock.now()
        if now < due:
            continue
        try:
            if not renew():
                return
        except OnnxOpsError:
            continue
        due = now + LEASE_SECONDS / 2
