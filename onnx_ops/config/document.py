"""A YAML document as plain values, with the place of each value and key in the file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from onnx_ops.errors import Problem

Loc = tuple[str | int, ...]
"""The way from the root to a value: keys of mappings and indices of lists."""


class _Broken:
    """Stands for a value that cannot be read; a finding at its location says why."""

    def __repr__(self) -> str:
        return "BROKEN"


BROKEN: Final = _Broken()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a source; lines and columns count from 1. Line 0 is the source as a whole."""

    source: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong at a location.

    `on_key` blames the key itself (or its absence), not the value under it. `place` is given where the document
    cannot know it from the location, as for the second of two equal keys. `environment` is that of `Problem`.
    """

    loc: Loc
    message: str
    on_key: bool = False
    place: Place | None = None
    environment: bool = False

    @property
    def shown(self) -> Loc:
        """The location that is printed: that of the mapping where a key is wrong."""
        return self.loc[:-1] if self.on_key else self.loc


@dataclass(slots=True, kw_only=True)
class Document:
    """One file, read. Overrides and substitutions change it in place before it is bound to types.

    `findings` are about its values; `refused` are overrides that led nowhere.
    """

    source: str
    value: Any
    places: dict[Loc, Place]
    keys: dict[Loc, Place]
    findings: list[Finding] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)

    def at(self, loc: Loc) -> Any:
        """The plain value at a location, or None if there is none."""
        value = self.value
        for part in loc:
            value = child(value, part)
        return value

    def written(self, loc: Loc) -> Loc:
        """The location as it stands in the file.

        A lone mapping may stand for a list of one, and a text for a mapping; parts that exist only in the binding
        are dropped. A last part that is missing from the file is kept.
        """
        value, found = self.value, []
        for part in loc:
            if isinstance(part, int) and isinstance(value, dict) and part not in value:
                continue
            if not isinstance(value, dict | list):
                break
            found.append(part)
            value = child(value, part)
        return tuple(found)

    def problem(self, finding: Finding) -> Problem:
        """The finding with its position: that of the value or key, else of what would contain it."""
        place = finding.place or (self.keys.get(finding.loc) if finding.on_key else None)
        nearest = finding.loc
        while place is None:
            place = self.places.get(nearest)
            nearest = nearest[:-1]
        return Problem(
            file=place.source,
            line=place.line,
            column=place.column,
            path=path_text(finding.shown),
            message=finding.message,
            environment=finding.environment,
        )

    def problems(self) -> list[Problem]:
        """Every problem of the document, with its position."""
        return [*self.refused, *(self.problem(finding) for finding in self.findings)]

    def replace(self, loc: Loc, value: Any, places: Mapping[Loc, Place], keys: Mapping[Loc, Place]) -> None:
        """Put another value, with its own places, where `loc` leads; its container must exist."""
        for table in (self.places, self.keys):
            for old in [known for known in table if known[: len(loc)] == loc]:
                del table[old]
        self.findings = [f for f in self.findings if f.loc[: len(loc)] != loc or (f.loc == loc and f.on_key)]
        self.places.update({loc + below: place for below, place in places.items()})
        self.keys.update({loc + below: place for below, place in keys.items()})
        if loc:
            self.keys[loc] = places[()]
            self.at(loc[:-1])[loc[-1]] = value
        else:
            self.value = value


def child(value: Any, part: str | int) -> Any:
    """What a mapping or list holds there, or None."""
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
        return value[part]
    return None


def path_text(loc: Loc) -> str:
    """`gates[1].max_drop`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
