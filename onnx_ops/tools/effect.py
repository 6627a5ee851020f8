"""What a float variant does to time: a first look, side by side. Whether it is faster, `judge` and gates decide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.timing import ratios_of
from onnx_ops.ports import RaceSchedule, Runtime
from onnx_ops.statistics.latency import ALPHA, LOOKS, session_interval
from onnx_ops.tools.probing import made_up, shared_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Time of the variant over that of its source, with 95 % bounds; `why` instead where that cannot be known."""

    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    why: str = ""

    def words(self) -> str:
        if self.why:
            return f"not timed: {self.why}"
        return f"{self.ratio:.2f} times the time ({self.low:.2f} to {self.high:.2f}); `judge` decides"


def time_effect(runtime: Runtime, target: Target, source: Path, variant: Path) -> Effect:
    """A few fresh session pairs on one made-up row."""
    try:
        feed = made_up(shared_inputs(source, variant), count=1, dims={}).feed(1)
        samples = runtime.race((source, variant), target, feed, RaceSchedule(heats=LOOKS[0]))
    except (MeasurementError, UserError) as error:
        return Effect(why=str(error))
    estimate, low, high = session_interval(ratios_of(samples), ALPHA / 2)
    return Effect(ratio=math.exp(estimate), low=math.exp(low), high=math.exp(min(high, 700)))
