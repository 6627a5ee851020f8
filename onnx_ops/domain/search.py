"""A search for variants under a budget: what is asked for, what was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, doc

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import Interval
from onnx_ops.domain.quantities import LATER, Bytes, Count, Fraction, Json, Seconds

AUTO = "auto"
"""The method that is no recipe but a search for one."""

SEARCH_FILE = "search.json"

Role: TypeAlias = Literal["fast", "small", "exact"]
ROLES: tuple[Role, ...] = ("fast", "small", "exact")
"""Places on the front that a search gives variants to: NAME-fast, NAME-small, NAME-exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """What a search looks at while it decides."""

    data: Annotated[str, doc("Which set of `data:`; never the one that is scored.")]
    samples: Annotated[int, Ge(1), doc("At most so many rows.")] = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a variant may cost, and what the search for it may."""

    metric_drop: Annotated[
        Fraction, doc("Largest loss of the task metric on the tuning rows, in points; of an error, its growth.")
    ] = 0.005
    size: Annotated[Bytes | None, doc("Largest model.")] = None
    p99: Annotated[Seconds | None, doc("Largest 99th percentile of the time of a request.")] = None
    max_minutes: Annotated[float, Gt(0), Le(1440), doc("Longest search, over all of its attempts.")] = 10.0
    max_builds: Annotated[Count, doc("Most models that it builds.")] = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to make a variant. `nodes` may stay in float, each by itself; none where that is not for it.

    A `late` one is for size, and is tried when the others are repaired.
    """

    name: str
    method: str
    options: Mapping[str, Json] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One model that was built and measured on the tuning rows.

    `drop` is what it loses of the task metric against fp32 (negative: it gains), `error` the root mean square distance
    of its outputs in units of their standard deviation. `ratios` are times of a request over those of fp32, `p99`
    seconds, both by target. `failure` says why there are no figures.
    """

    recipe: str
    excluded: tuple[str, ...] = ()
    why: str = ""
    drop: float | None = None
    error: float | None = None
    size_bytes: int = 0
    ratios: Mapping[str, Interval] = field(default_factory=dict)
    p99: Mapping[str, float] = field(default_factory=dict)
    model: Digest | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The error of the outputs if only this node were quantized; infinite counts as None with a `failure`."""

    recipe: str
    node: str
    error: float | None = None
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a search's journal."""

    trial: Trial | None = None
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bought:
    """What keeping one node in float bought, the other nodes kept being the same.

    `metric` is the part of the task metric that it saves (below 0: it costs some), `time` by which the time of a
    request grows, by target: 1.1 is a tenth more. `kept` is False where it was given back.
    """

    recipe: str
    node: str
    metric: float
    time: Mapping[str, float]
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place on the front: the number of its trial, or why it is empty."""

    role: Role
    trial: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """Everything that a search saw. `front` are numbers of trials; `stopped` says why it ended, and `timed_out` that
    there was more to try."""

    schema: int = 1
    name: str
    metric: str
    rows: int
    export_bytes: int
    targets: tuple[str, ...]
    budget: Budget
    recipes: tuple[Recipe, ...] = ()
    trials: tuple[Trial, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    bought: tuple[Bought, ...] = ()
    front: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    stopped: str = ""
    seconds: float = 0.0
    timed_out: bool = field(default=False, metadata=LATER)
