"""Quantities with units. The unit stands in the type, so that the loader, the schema and the reader agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from annotated_types import Ge, Gt, Unit

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

LATER: Mapping[str, bool] = {"later": True}
"""Metadata of a field that values got after they were first stored: while it has its default it is not written, so that
older programs read what they know, and digests of documents stay."""

FOUND: Mapping[str, bool] = {"found": True}
"""Metadata of a field that is no key of a file: whoever reads the file fills it."""

Seconds = Annotated[float, Unit("s"), Gt(0)]
"""Written with a unit in YAML: `5 ms`, `30 s`, `24h`."""

Fraction = Annotated[float, Unit("1"), Ge(0)]
"""Written as a percentage in YAML: `5%`; stored as 0.05."""

Bytes = Annotated[int, Unit("B"), Gt(0)]
"""Written with a unit in YAML: `2 MB` (10^6), `2 MiB` (2^20)."""

PerSecond = Annotated[float, Gt(0)]
"""A rate: a plain number of requests per second."""

Count = Annotated[int, Ge(1)]

Amount = Annotated[float, Gt(0)]
"""A plain number, in a unit that onnx-ops does not know."""
