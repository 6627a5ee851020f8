"""This machine: its clock and its vendor."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


class SystemClock:
    """The clock of this machine."""

    now = staticmethod(time.time)  # noqa: TID251 (this is the Clock)
    monotonic = staticmethod(time.monotonic)


def machine_vendor() -> str:
    """Return the vendor of this machine from its firmware; empty if unknown.

    Virtual machines of a cloud report the cloud's vendor, such as "Amazon EC2".
    """
    with suppress(OSError):
        return Path("/sys/class/dmi/id/sys_vendor").read_text(encoding="utf-8").strip()
    return ""
