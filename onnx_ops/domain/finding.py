"""What a look at the surroundings has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if that is wrong.

    `absent` is something optional that is not installed: no fault, and not ready for use.
    """

    check: str
    ok: bool
    found: str
    remedy: str = ""
    absent: bool = False
