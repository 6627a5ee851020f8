"""What the figures of a rollout say at one moment, and what follows for its present step. Nothing here counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from onnx_ops.domain.rollout_policy import PlannedStep, RolloutPolicy

_WORTH_TELLING = 1.5
"""Design effect from which the line of a guardrail mentions it."""


class WaitKind(StrEnum):
    """Why nothing is done now."""

    IDLE = "idle"
    WATCHING = "watching"
    WORD = "waits-for-a-word"
    PAUSED = "paused"
    HELD = "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do now, and why. A rollout that is paused or held goes on by an operator's word only."""

    why: str
    settled: bool
    kind: WaitKind = WaitKind.IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One guardrail: events among requests of either version, and the evidence (log10) that the candidate has more.

    `low` and `high` bound the odds ratio at any time; None where it was not computed. `seen` counts what the evidence
    rests on during the present step, of which `needed` are needed before the step may be left. `effect` is how many
    requests are worth one independent request. Where it `holds`, the candidate stays at its step. `rule` is told where
    the counts are not what was judged. `place` is where in a distribution the counts speak most against the candidate.
    """

    name: str
    place: str = ""
    canary: tuple[int, int] = (0, 0)
    stable: tuple[int, int] = (0, 0)
    evidence: float = 0.0
    limit: float
    low: float | None = None
    high: float | None = None
    effect: float = 1.0
    holds: bool = False
    seen: int = 0
    needed: int = 0
    rule: str = ""

    @property
    def fired(self) -> bool:
        return self.evidence >= self.limit

    @property
    def line(self) -> str:
        """One line for a person."""
        where = f"above {self.place} " if self.place else ""
        counts = self.rule or f"{where}canary {_share(*self.canary)} vs stable {_share(*self.stable)}"
        between = "" if self.low is None or self.high is None else f"odds ratio {_bounds(self.low, self.high)}, "
        worth = f"{self.effect:.2g} requests count as one, " if self.effect >= _WORTH_TELLING else ""
        told = f"{self.name}: {counts}; {between}{worth}evidence {_to_one(self.evidence)} (limit {_to_one(self.limit)})"
        return f"{told} -> {'HOLD' if self.holds else 'ROLL BACK'}" if self.fired else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """All that is known about a rollout now. Every text is empty where there is nothing to say.

    `began` is when the step took effect, `requests` counts the candidate's since then (copies, while it is a shadow).
    `short` says which figure is not good enough to go on, `mismatch` that traffic is not split as it should be,
    `broken` that the candidate fails grossly. `outcome` is the A/B test's, with its `outcome_line`.
    """

    began: float
    requests: int = 0
    guards: tuple[Guard, ...] = ()
    short: str = ""
    mismatch: str = ""
    broken: str = ""
    outcome: Literal["better", "worse", "undecided"] = "undecided"
    outcome_line: str = ""

    @property
    def alarm(self) -> str:
        """Why the candidate must go, in one line; empty if nothing says so."""
        worst = self._worst(holds=False)
        return self.broken or worst or (self.outcome_line if self.outcome == "worse" else "")

    @property
    def held(self) -> str:
        """Why the candidate may not get more traffic, in one line; empty if nothing says so."""
        return self._worst(holds=True)

    def _worst(self, *, holds: bool) -> str:
        fired = [guard for guard in self.guards if guard.fired and guard.holds is holds]
        return max(fired, key=lambda guard: guard.evidence - guard.limit).line if fired else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """The step is done; `why` in one line."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The candidate must go; `why` in one line."""

    why: str


def advise(name: str, step: PlannedStep, policy: RolloutPolicy, judged: Judged | None, now: float) -> Go | Stop | Wait:
    """What follows for the present step from what is known. Without figures nothing ever moves.

    Args:
        name: of the candidate.
        step: where the rollout is.
        policy: what has to be shown.
        judged: what is known; None if nothing was counted yet.
        now: seconds since the epoch.
    """
    held = f"{name} holds {step.percent} %" if step.kind != "shadow" else f"{name} gets a copy of {step.copied} %"
    if judged is None:
        return Wait(why=f"{held}; nothing was counted yet", settled=False, kind=WaitKind.WATCHING)
    if judged.alarm:
        return Stop(why=judged.alarm)
    if why := judged.mismatch or judged.held:
        why = f"{held} and is paused: {why}"
        return Wait(why=why, settled=False, kind=WaitKind.PAUSED)
    spent = now - judged.began
    missing = _missing(step, policy, judged, spent)
    if step.kind == "ab" and policy.ab is not None and judged.outcome != "better":
        if spent >= policy.ab.duration:
            return _time_is_over(held, policy.ab.undecided, judged, missing)
        missing = missing or judged.outcome_line or "no outcome was reported"
    elif missing and spent >= policy.step_timeout:
        why = f"{held} and is held for an operator: step_timeout is over and {missing}"
        return Wait(why=why, settled=False, kind=WaitKind.HELD)
    if missing:
        return Wait(why=f"{held}: {missing}", settled=False, kind=WaitKind.WATCHING)
    if step.approval:
        why = f"{held}, nothing speaks against it, and it waits for an operator's word"
        return Wait(why=why, settled=False, kind=WaitKind.WORD)
    shown = judged.guards[-1].line if step.kind == "cold" else judged.outcome_line
    return Go(why=shown or f"nothing against it in {judged.requests} requests")


def _missing(step: PlannedStep, policy: RolloutPolicy, judged: Judged, spent: float) -> str:
    """What keeps a step from being left; empty if nothing does. Only what was shown counts as shown."""
    if not judged.requests >= step.minimum:
        return f"{judged.requests} of {step.minimum} requests"
    for guard in judged.guards:
        if not guard.seen >= guard.needed:
            return f"{guard.name} could be compared {guard.seen} times of {guard.needed}"
    if judged.short:
        return judged.short
    if policy.bake is not None and step.kind != "cold" and not spent >= policy.bake:
        return f"{spent:.0f} s of {policy.bake:g} s"
    return ""


def _time_is_over(held: str, undecided: str, judged: Judged, missing: str) -> Go | Stop | Wait:
    why = f"the A/B test is over and undecided: {judged.outcome_line or 'no outcome was reported'}"
    if undecided == "abort":
        return Stop(why=why)
    if undecided == "finish" and judged.outcome_line and not missing:
        return Go(why=why)
    return Wait(why=f"{held} and is held for an operator: {why}", settled=False, kind=WaitKind.HELD)


def _share(events: int, requests: int) -> str:
    return f"{events}/{requests}" + (f" ({100 * events / requests:.2f}%)" if requests else "")


def _bounds(low: float, high: float) -> str:
    return f"{low:.3g}-{high:.3g}"


def _to_one(log10: float) -> str:
    """`60:1`, or a power of ten where the number is long."""
    return (
        f"{10**log10:.0f}:1"
        if 0 <= log10 < 7
        else f"1e{log10:.0f}:1"
        if log10 >= 7
        else f"{10 ** max(log10, -99):.2g}:1"
    )
