"""How long a model runs, and whether it is run on the event loop or in a lane.

The same model is some 50 µs slower in a lane. Two versions of a model whose runs take about as long as the limit would
be held against each other for that alone, so only one deployment's run time counts: the leader's, which all others
follow unless they are far slower than it can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

INLINE_S = 250e-6
"""A model that runs faster than this is run on the event loop: handing over to a thread would cost as much."""
_LEAVES_S = 1.25 * INLINE_S
"""It leaves when it takes this long, so that one at the limit does not go to and fro."""
_FAR_S = 4 * INLINE_S
_STALLED = 4
_CERTAIN_S = 100e-3
_WEIGHT = 1 / 8


@dataclass(slots=True, eq=False)
class RunTime:
    """Exponentially weighted mean of a model's run times in seconds, each counting for an eighth.

    A run of a fast model in which the system took the processor away looks like a slow one. It counts as 1 ms or four
    times the mean, so that one alone does not move the model off the event loop; what took more than 100 ms counts in
    full.
    """

    seconds: float = 0.0
    fast: bool = field(init=False)
    """Whether the event loop is the place for its runs. One that is between the limits stays where it is."""

    def __post_init__(self) -> None:
        self.fast = self.seconds < INLINE_S

    def observe(self, seconds: float) -> None:
        before = self.seconds
        if _FAR_S < seconds < _CERTAIN_S and before < _FAR_S:
            seconds = min(seconds, max(_FAR_S, _STALLED * before))
        self.seconds = mean = before + (seconds - before) * _WEIGHT
        self.fast = mean < (_LEAVES_S if self.fast else INLINE_S)

    def follows(self, leader: RunTime) -> bool:
        """Whether the event loop is the place for its runs, beside the leader's."""
        return leader.fast and (leader is self or self.seconds < _FAR_S)
