"""Which aliases and tags are guarded, however they are spelled.

Some databases hold `Champion-cpu` and `champion-cpu` for the same key, and letters with and without accents too. So
names are compared in a folded form, and a guarded name in another spelling than onnx-ops's own is refused.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from onnx_ops.domain.quantities import NAME_PATTERN

PREVIOUS = "previous"

_GUARDED = re.compile(rf"(champion|challenger|{PREVIOUS})-({NAME_PATTERN})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedAlias:
    """`name` is the alias as onnx-ops writes it."""

    name: str
    role: str
    target: str


def guarded(alias: str) -> GuardedAlias | None:
    """The alias of a target that this is, or that a database may take it for; None for any other alias."""
    match = _GUARDED.fullmatch(folded(alias))
    return None if match is None else GuardedAlias(name=match[0], role=match[1], target=match[2])


def folded(text: str) -> str:
    """Without case, accents, compatibility forms and white space around."""
    plain = unicodedata.normalize("NFKD", text)
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold().strip()
