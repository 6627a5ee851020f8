"""Types of fields in files, such as quantities with units, and their metadata.

The unit is part of the type, so that the loader and the schema agree on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, TypeAlias

from annotated_types import Ge, Gt, MaxLen, Unit

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

OMIT_DEFAULT: Mapping[str, bool] = {"later": True}
"""Metadata of a field that was added after values were first stored.

Its default is not written. Older programs can therefore read the values, and the digests of
documents stay the same.
"""

COMPUTED: Mapping[str, bool] = {"found": True}
"""Metadata of a field that the reader of a file computes.

The field is not a key of the file.
"""


class Notation(Enum):
    """Shorter ways to write a field of a file.

    A notation is part of the field's annotation.
    """

    SINGLE_ENTRY = "a single entry can appear without its list"
    SHORT_FORM = "a string in place of the mapping sets this field"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that a string must match, and its description in messages.

    A pattern is part of a field's annotation.
    """

    regex: str
    description: str


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """The strings that a value can be, such as the keys of a table.

    An entry that is added to the table later is accepted too. `OneOf` is part of a field's
    annotation.
    """

    choices: Collection[str]


class TaggedFamily:
    """Base of dataclasses that are distinguished by the value of their key `kind`.

    Together, these dataclasses are a union of the members of a table. Readers of files and of JSON,
    and the schema, also accept an entry that is added to the table later.
    """

    __slots__ = ()

    @classmethod
    def members(cls) -> Mapping[str, type]:
        """Return the dataclasses of the family by the value of their key `kind`."""
        raise NotImplementedError


NAME_PATTERN = "[a-z0-9][a-z0-9-]*"
_NAME = Pattern(
    NAME_PATTERN,
    "a name: use lower-case letters, digits and hyphens, beginning with a letter or digit",
)

Name = Annotated[str, _NAME, MaxLen(63)]
"""A name of a pipeline, a variant, an endpoint or an analysis."""

ShortName = Annotated[str, _NAME, MaxLen(30)]
"""A name of a target.

The name is part of MLflow aliases, which MLflow's UI truncates.
"""

Seconds = Annotated[float, Unit("s"), Gt(0)]
"""A time in seconds, written with a unit in YAML: `5 ms`, `30 s`, `24h`."""

Fraction = Annotated[float, Unit("1"), Ge(0)]
"""A ratio, written as a percentage in YAML: `5%` is stored as 0.05."""

Bytes = Annotated[int, Unit("B"), Gt(0)]
"""A size in bytes, written with a unit in YAML: `2 MB` (10^6), `2 MiB` (2^20)."""

PerSecond = Annotated[float, Gt(0)]
"""A rate, written as a plain number of requests per second."""

Count = Annotated[int, Ge(1)]

Amount = Annotated[float, Gt(0)]
"""A plain number in a unit that onnx-ops does not define, such as a currency."""
