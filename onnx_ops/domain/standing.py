"""How variants that pass their gates are told apart: what is preferred, and the figures that the choice rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from annotated_types import doc

from onnx_ops.domain.evidence import Interval

Preference: TypeAlias = Literal["latency", "size", "accuracy", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefer:
    """Which of the variants that pass is chosen. `prefer: size` is short for `prefer: {default: size}`."""

    default: Annotated[
        Preference, doc("latency, size (bytes of the file), accuracy (the task metric), or cost (of a request).")
    ] = "latency"
    targets: Annotated[Mapping[str, Preference], doc("Another preference for single targets.")] = field(
        default_factory=dict
    )

    def on(self, target: str) -> Preference:
        return self.targets.get(target, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is preferred on one target. `price` is what an hour of it costs, in any currency; None if not known."""

    prefer: Preference = "latency"
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The figures of one variant on one target by which it is chosen.

    `ratio` is the time of a request over that of the export. `change` is how much better than the export's the task
    metric `metric` is: a difference, or where lower is better the share by which the error fell. `seconds` is the
    median time of a request alone; `load` the time per request under the highest load that was measured.
    """

    size_bytes: int = 0
    ratio: Interval | None = None
    metric: str = ""
    change: Interval | None = None
    seconds: float | None = None
    load: Interval | None = None
