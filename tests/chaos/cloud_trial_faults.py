"""Random faults of a cloud's control plane and storage, from one seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from onnx_ops.testing.endpoints import Killed
from tests.support.clouds.in_process import FaultKind
from tests.support.clouds.virtual_time import VirtualTime

_READS = ("GET ", "HEAD ", "LIST ", "SageMaker.Describe", "SageMaker.List")
_MODES = ("none", "some", "some", "many", "every", "outages", "outages")
_RATES = {"some": 0.04, "many": 0.2}
_LATENCY_S = (0.05, 0.3)


def is_read(name: str) -> bool:
    """Return whether a request changes nothing."""
    return name.startswith(_READS) or ".Describe" in name


@dataclass(kw_only=True)
class FaultPlan:
    """When requests of the provider fail, and when its process is killed.

    With mode `every`, the first attempt of each request fails before its effect. The second one
    loses its connection after the effect, and the third one gets an error after the effect. The
    fourth one succeeds. With `outages`, all requests fail for a while, from time to time. In each
    mode, the process can be killed before or after the effect of a request. `is_dead` is then true
    until `restart`.
    """

    random: random.Random
    clock: VirtualTime
    mode: str = field(init=False)
    kills: int = field(init=False)
    has_shortages: bool = field(init=False)
    is_active: bool = True
    is_dead: bool = False
    requests: int = 0
    writes: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        draw = self.random
        self.mode = draw.choice(_MODES)
        self.kills = draw.choice((0, 0, 1, 2, 4)) if self.is_active else 0
        self.has_shortages = draw.random() < 0.3
        self._attempts: Counter[str] = Counter()
        self._kill_in = self._draw_kill()
        self._outage = (0.0, 0.0)
        self._outage_kind: FaultKind | None = None
        self._shortage = (0.0, 0.0)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return f"{self.mode}: {counts or 'none'}"

    @property
    def is_short(self) -> bool:
        """Whether the quota of instances is used up now."""
        if not (self.is_active and self.has_shortages):
            return False
        begin, end = self._shortage = self._renew(self._shortage, (60, 600), (30, 400))
        return begin <= self.clock.now() < end

    def disturb(self, name: str, is_after: bool) -> FaultKind | None:
        """Return the fault of a request at this moment, if any.

        Raises:
            Killed: the process ends here.
        """
        if self.is_dead:
            raise Killed(name)
        if not is_after:
            self.requests += 1
            if not is_read(name):
                self.writes.append(name)
            self.clock.advance(self.random.uniform(*_LATENCY_S))
        elif not is_read(name):
            self.clock.call_listeners()
        self._kill(name)
        if not self.is_active:
            return None
        kind = self._find_fault(name, is_after)
        if kind is not None:
            self.faults[f"{kind} {'after' if is_after else 'before'}"] += 1
        return kind

    def restart(self) -> None:
        """Let another process continue."""
        self.is_dead = False
        self._kill_in = self._draw_kill()

    def stop(self) -> None:
        """End all faults."""
        self.is_active, self.kills = False, 0
        self.restart()

    def _draw_kill(self) -> int | None:
        if not self.kills:
            return None
        self.kills -= 1
        return self.random.randrange(120)

    def _kill(self, name: str) -> None:
        if self._kill_in is None:
            return
        self._kill_in -= 1
        if self._kill_in < 0:
            self.is_dead, self._kill_in = True, None
            self.faults["kill"] += 1
            raise Killed(name)

    def _find_fault(self, name: str, is_after: bool) -> FaultKind | None:
        if self.mode == "every":
            return self._fail_once(name, is_after)
        if self.mode == "outages":
            return None if is_after else self._find_outage()
        if self.random.random() >= _RATES.get(self.mode, 0.0):
            return None
        # A throttled request has no effect.
        return self.random.choice(("error", "drop") if is_after else ("throttle", "error", "drop"))

    def disturb_instance(self, name: str, is_after: bool) -> FaultKind | None:
        """Return the fault of an instance's request to the object store."""
        is_out = self.is_active and self.mode == "outages" and not is_after
        return self._find_outage() if is_out else None

    def _find_outage(self) -> FaultKind | None:
        if self.clock.now() >= self._outage[1]:
            self._outage = self._renew(self._outage, (20, 300), (3, 120))
            self._outage_kind = self.random.choice(("throttle", "error", "drop"))
        return self._outage_kind if self.clock.now() >= self._outage[0] else None

    def _fail_once(self, name: str, is_after: bool) -> FaultKind | None:
        attempt = self._attempts[name]
        if attempt == 0 and not is_after:
            self._attempts[name] = 1
            return self.random.choice(("throttle", "error", "drop"))
        if attempt in (1, 2) and is_after:
            self._attempts[name] = attempt + 1
            return "drop" if attempt == 1 else "error"
        if attempt == 3 and is_after:
            self._attempts[name] = 0
        return None

    def _renew(
        self, window: tuple[float, float], pause: tuple[int, int], length: tuple[int, int]
    ) -> tuple[float, float]:
        """Return the window, or the next one if it is over."""
        if self.clock.now() < window[1]:
            return window
        begin = self.clock.now() + self.random.uniform(*pause)
        return begin, begin + self.random.uniform(*length)
