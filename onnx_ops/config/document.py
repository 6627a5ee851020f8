"""A YAML document as plain values, with the source position of each value and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from onnx_ops.errors import Problem

Loc = tuple[str | int, ...]
"""Path from the root to a value: keys of mappings and indices of lists."""


class _Broken:
    """Placeholder for a value that cannot be read.

    An issue at its location gives the reason.
    """

    def __repr__(self) -> str:
        return "BROKEN"


BROKEN: Final = _Broken()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a source.

    Lines and columns count from 1. Line 0 is the source as a whole.
    """

    source: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Issue:
    """A problem at a location.

    Attributes:
        on_key: The key itself, or its absence, is wrong, not the value under it.
        place: The position, if the location does not determine it, as for the second of two equal
            keys.
        environment: The file is valid, but this machine lacks a requirement.
    """

    loc: Loc
    message: str
    on_key: bool = False
    place: Place | None = None
    environment: bool = False

    @property
    def shown(self) -> Loc:
        """The location that is printed.

        If the key itself is wrong, this is the location of the mapping.
        """
        return self.loc[:-1] if self.on_key else self.loc


@dataclass(slots=True, kw_only=True)
class Document:
    """One file as plain values.

    Overrides and substitutions change it in place before it is bound to types.

    Attributes:
        places: Positions of the values; `keys` has the positions of the keys.
        issues: Problems of its values.
        refused: Problems of overrides that were not applied.
    """

    source: str
    value: Any
    places: dict[Loc, Place]
    keys: dict[Loc, Place]
    issues: list[Issue] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)

    def at(self, loc: Loc) -> Any:
        """Return the plain value at a location, or None if there is none."""
        value = self.value
        for part in loc:
            value = child(value, part)
        return value

    def written(self, loc: Loc) -> Loc:
        """Return the location as written in the file.

        A file can contain a single entry without its list; its location then has no index. If a
        part is missing from the file, the result ends with this part.
        """
        value, parts = self.value, []
        for part in loc:
            if isinstance(part, int) and isinstance(value, dict) and part not in value:
                continue
            if not isinstance(value, dict | list):
                break
            parts.append(part)
            value = child(value, part)
        return tuple(parts)

    def problem(self, issue: Issue) -> Problem:
        """Return an issue with its position.

        The position is the issue's place, or else that of the value or key. If the file does not
        have the value or key, it is the position of the nearest mapping or list around it.
        """
        place = issue.place or (self.keys.get(issue.loc) if issue.on_key else None)
        nearest = issue.loc
        while place is None:
            place = self.places.get(nearest)
            nearest = nearest[:-1]
        return Problem(
            file=place.source,
            line=place.line,
            column=place.column,
            path=path_text(issue.shown),
            message=issue.message,
            environment=issue.environment,
        )

    def problems(self) -> list[Problem]:
        """Return every problem of the document, with its position."""
        return [*self.refused, *(self.problem(issue) for issue in self.issues)]

    def replace(
        self, loc: Loc, value: Any, places: Mapping[Loc, Place], keys: Mapping[Loc, Place]
    ) -> None:
        """Replace the value at `loc`, and the positions of its parts; drop their issues.

        The mapping or list that contains the value must exist. `places` and `keys` have locations
        relative to `loc`.
        """
        for table in (self.places, self.keys):
            for old in [known for known in table if known[: len(loc)] == loc]:
                del table[old]
        self.issues = [
            issue
            for issue in self.issues
            if issue.loc[: len(loc)] != loc or (issue.loc == loc and issue.on_key)
        ]
        self.places.update({loc + below: place for below, place in places.items()})
        self.keys.update({loc + below: place for below, place in keys.items()})
        if loc:
            self.keys[loc] = places[()]
            self.at(loc[:-1])[loc[-1]] = value
        else:
            self.value = value


def child(value: Any, part: str | int) -> Any:
    """Return the element of a mapping or list, or None."""
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
        return value[part]
    return None


def path_text(loc: Loc) -> str:
    """Return a location as it is printed: `gates[1].max_drop`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
