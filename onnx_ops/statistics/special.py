"""scipy.special, imported at its first use, which takes 0.15 s."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from scipy import special

    return getattr(special, name)
