"""What the figures of a rollout say at one moment, and what follows for its present step. Nothing here counts.

How traffic moves from champion to challenger: the roles, and the one pure function that decides.

`choose_next_action` takes the desired state, the ledger's state, the metrics and the time, and returns the one thing to
do next. It knows nothing of providers, registries or processes; drivers apply its answer and write
it down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
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
class GuardrailResult:
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
class AnalysisResult:
    """All that is known about a rollout now. Every text is empty where there is nothing to say.

    `began` is when the step took effect, `requests` counts the candidate's since then (copies, while it is a shadow).
    `short` says which figure is not good enough to go on, `mismatch` that traffic is not split as it should be,
    `broken` that the candidate fails grossly. `outcome` is the A/B test's, with its `outcome_line`.
    """

    began: float
    requests: int = 0
    guards: tuple[GuardrailResult, ...] = ()
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
class Advance:
    """The step is done; `why` in one line."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The candidate must go; `why` in one line."""

    why: str


def evaluate_step(
    name: str, step: PlannedStep, policy: RolloutPolicy, judged: AnalysisResult | None, now: float
) -> Advance | Abort | Wait:
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
        return Abort(why=judged.alarm)
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
    return Advance(why=shown or f"nothing against it in {judged.requests} requests")


def _missing(step: PlannedStep, policy: RolloutPolicy, judged: AnalysisResult, spent: float) -> str:
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


def _time_is_over(held: str, undecided: str, judged: AnalysisResult, missing: str) -> Advance | Abort | Wait:
    why = f"the A/B test is over and undecided: {judged.outcome_line or 'no outcome was reported'}"
    if undecided == "abort":
        return Abort(why=why)
    if undecided == "finish" and judged.outcome_line and not missing:
        return Advance(why=why)
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


_NO_TRAFFIC = PlannedStep(kind="canary", percent=0)
_WITHDRAWN = "no longer wanted by the registry"


class ActionKind(StrEnum):
    FIRST = "first-deployment"
    START = "start"
    ADVANCE = "advance"
    FINISH = "finish"
    ABORT = "abort"
    ROLLBACK = "rollback"
    RETIRE = "retire-previous"
    RESTORE = "restore"
    CLEAN_UP = "clean-up"
    RECONFIGURE = "reconfigure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who is who behind one endpoint. `step` is the index of the candidate's step in the policy."""

    stable: Deployment | None = None
    previous: Deployment | None = None
    candidate: Deployment | None = None
    step: int = 0
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One effect on an endpoint: the state to apply, and the roles once it has been applied.

    `aliases` are the registry writes that follow (None deletes the alias); `reject` are releases that must not
    come back by themselves, or manifests of single versions where their release stays in service.
    """

    kind: ActionKind
    state: EndpointState
    roles: Roles
    why: str
    aliases: Mapping[str, str | None] = field(default_factory=dict)
    reject: tuple[Digest, ...] = ()

    @property
    def is_rollback(self) -> bool:
        """Whether it moves all traffic back to one version."""
        return self.kind in (ActionKind.ABORT, ActionKind.ROLLBACK)


class OperatorCommand(StrEnum):
    """What an operator may say about a rollout that waits."""

    ADVANCE = "advance"
    PAUSE = "pause"


def format_alias(role: str, target: str) -> str:
    return f"{role}-{target}"


def build_split_state(
    stable: Deployment | None,
    candidate: Deployment | None,
    percent: int,
    *extra: Deployment,
    copied: int = 0,
    tolerance: float | None = None,
) -> EndpointState:
    """The state in which `candidate` receives `percent` of the traffic and `stable` the rest.

    `copied` is the percentage of requests of which the candidate gets a copy, whose answers may be off by `tolerance`.

    Raises:
        ValueError: the only deployment present would not receive all traffic.
    """
    weights: dict[str, int] = {}
    deployments: dict[str, Deployment] = {}
    for deployment, weight in ((candidate, percent), (stable, 100 - percent)):
        if deployment is not None:
            deployments[deployment.name] = deployment
            weights[deployment.name] = weights.get(deployment.name, 0) + weight
    for deployment in extra:
        deployments.setdefault(deployment.name, deployment)
        weights.setdefault(deployment.name, 0)
    shadow = {candidate.name: copied} if candidate is not None and copied else {}
    split = TrafficSplit(weights=weights, shadow=shadow)
    if shadow and tolerance is not None:
        split = replace(split, shadow_tolerance=tolerance)
    return EndpointState(deployments=tuple(deployments.values()), split=split)


def choose_next_action(
    *,
    wanted: Deployment | None,
    actual: EndpointState | None,
    roles: Roles,
    policy: RolloutPolicy,
    target: str,
    word: OperatorCommand | None,
    now: float,
    judged: AnalysisResult | None = None,
) -> Action | Wait:
    """The one thing to do next.

    A policy that says nothing of how to judge waits for the operator's word at each step. Under any other, steps follow
    from `judged`; then a word to advance moves one step whatever is still to be shown, and no word keeps a candidate
    that the figures speak against.

    Args:
        wanted: what the registry asks for, already verified; None if it asks for nothing.
        actual: what the provider observed; None if the endpoint does not exist or does not answer.
        roles: the fold of the ledger.
        policy: the steps of the rollout.
        target: names the aliases.
        word: the operator's last word that has not been acted upon.
        now: seconds since the epoch.
        judged: what the figures of the rollout in progress say.
    """
    candidate, stable = roles.candidate, roles.stable
    if stable is None:
        return _first(wanted, target, now)
    if candidate is not None and (why := _must_go(wanted, candidate, stable, policy, judged)):
        return plan_abort(roles, target, why=why, reject=why != _WITHDRAWN)
    believed = _believed(roles, policy)
    if actual is None or not actual.covers(believed):
        return Action(kind=ActionKind.RESTORE, state=believed, roles=roles, why="the endpoint is not what it should be")
    if word is OperatorCommand.PAUSE and candidate is None:
        return Wait(why="paused by an operator", settled=True)
    if candidate is not None:
        return _continue(roles, stable, candidate, policy, target, word, now, judged)
    if actual.drift:  # before a rollout begins, so that both of its versions run alike
        why = f"it does not run by its settings: {'; '.join(actual.drift)}"
        return Action(kind=ActionKind.RECONFIGURE, state=believed, roles=roles, why=why)
    if wanted is not None and wanted.manifest != stable.manifest:
        return _start(roles, stable, wanted, policy, target, now)
    return _tidy(roles, stable, actual, believed, policy, now)


def plan_abort(roles: Roles, target: str, *, why: str, reject: bool) -> Action:
    """The stable version gets all traffic back. The candidate stays loaded, so that weights alone change.

    Raises:
        ValueError: there is no rollout to abort.
    """
    if roles.candidate is None or roles.stable is None:
        raise ValueError("no rollout is in progress")
    return Action(
        kind=ActionKind.ABORT,
        state=build_split_state(roles.stable, roles.candidate, 0),
        roles=replace(roles, candidate=None, step=0),
        why=why,
        aliases={format_alias("challenger", target): None} if reject else {},
        reject=_rejected((roles.candidate,), roles.stable) if reject else (),
    )


def plan_reversal(roles: Roles, begun: Action, target: str, *, why: str) -> Action | None:
    """The way back from an action that was begun at these roles; None if it brings nothing that could be rejected."""
    if roles.stable is None or begun.kind not in (ActionKind.START, ActionKind.ADVANCE, ActionKind.FINISH):
        return None
    if roles.candidate is not None:
        return plan_abort(roles, target, why=why, reject=True)
    return plan_rollback(begun.roles, roles.stable, target, why=why)


def plan_rollback(roles: Roles, to: Deployment, target: str, *, why: str) -> Action:
    """All traffic to `to`. What took traffic until now is rejected; it stays loaded, so that weights alone change."""
    left = [d for d in (roles.candidate, roles.stable) if d is not None and d.manifest != to.manifest]
    return Action(
        kind=ActionKind.ROLLBACK,
        state=build_split_state(to, None, 0, *left),
        roles=Roles(stable=to),
        why=why,
        aliases={
            format_alias("champion", target): to.version,
            format_alias("previous", target): None,
            format_alias("challenger", target): None,
        },
        reject=_rejected(left, to),
    )


def _rejected(bad: Iterable[Deployment], good: Deployment) -> tuple[Digest, ...]:
    """A release is bad as a whole, unless the good version belongs to it too: then only this version is."""
    return tuple(dict.fromkeys(d.manifest if d.release == good.release else d.release for d in bad))


def _first(wanted: Deployment | None, target: str, now: float) -> Action | Wait:
    if wanted is None:
        return Wait(why=f"no approved version: set alias challenger-{target} on one", settled=True)
    return Action(
        kind=ActionKind.FIRST,
        state=build_split_state(None, wanted, 100),
        roles=Roles(stable=wanted),
        why="first deployment goes straight to 100 %",
        aliases={format_alias("champion", target): wanted.version, format_alias("challenger", target): None},
    )


def _withdrawn(wanted: Deployment | None, candidate: Deployment, stable: Deployment) -> bool:
    return wanted is None or wanted.manifest not in (candidate.manifest, stable.manifest)


def _tidy(
    roles: Roles, stable: Deployment, actual: EndpointState, believed: EndpointState, policy: RolloutPolicy, now: float
) -> Action | Wait:
    """Let go of what is needed no more, where nothing else is to do."""
    if roles.previous is not None and roles.finished_at and now >= roles.finished_at + policy.keep_previous:
        return Action(
            kind=ActionKind.RETIRE,
            state=build_split_state(stable, None, 0),
            roles=replace(roles, finished_at=0.0),
            why="the previous version was kept for as long as the policy says",
        )
    if not actual.is_equivalent(believed):
        why = "the endpoint holds what gets no traffic any more"
        return Action(kind=ActionKind.CLEAN_UP, state=believed, roles=roles, why=why)
    return Wait(why=f"{stable.name} serves all traffic", settled=True)


def _must_go(
    wanted: Deployment | None,
    candidate: Deployment,
    stable: Deployment,
    policy: RolloutPolicy,
    judged: AnalysisResult | None,
) -> str:
    """Why the candidate must go whatever else is asked for; empty if nothing says so."""
    if _withdrawn(wanted, candidate, stable):
        return _WITHDRAWN
    return judged.alarm if policy.judged and judged is not None else ""


def _believed(roles: Roles, policy: RolloutPolicy) -> EndpointState:
    """The state that the roles imply; what must be true if nobody interfered."""
    kept = [d for d in (roles.previous,) if d is not None and roles.finished_at]
    if roles.candidate is None:
        return build_split_state(roles.stable, None, 0, *kept)
    step = _step(policy, roles.step)
    return _trial_state(roles.stable, roles.candidate, step, policy, *kept)


def _trial_state(
    stable: Deployment | None, candidate: Deployment, step: PlannedStep, policy: RolloutPolicy, *kept: Deployment
) -> EndpointState:
    tolerance = None if policy.shadow is None else policy.shadow.tolerance
    return build_split_state(stable, candidate, step.percent, *kept, copied=step.copied, tolerance=tolerance)


def _step(policy: RolloutPolicy, index: int) -> PlannedStep:
    """The step of a candidate on trial, which is never 100 %. Where the policy was shortened meanwhile, that is its
    last one before, or no traffic where there is none."""
    before = policy.planned()[:-1] or (_NO_TRAFFIC,)
    return before[min(index, len(before) - 1)]


def _start(
    roles: Roles, stable: Deployment, wanted: Deployment, policy: RolloutPolicy, target: str, now: float
) -> Action:
    if len(policy.planned()) == 1:
        return _finish(stable, wanted, target, now, why="all at once")
    roles = replace(roles, candidate=wanted, finished_at=0.0)
    return _move(ActionKind.START, roles, stable, wanted, policy, 0)


def _move(
    kind: ActionKind,
    roles: Roles,
    stable: Deployment,
    candidate: Deployment,
    policy: RolloutPolicy,
    index: int,
    because: str = "",
) -> Action:
    step = _step(policy, index)
    share = f"a copy of {step.copied} %" if step.kind == "shadow" else f"{step.percent} %"
    return Action(
        kind=kind,
        state=_trial_state(stable, candidate, step, policy),
        roles=replace(roles, step=index),
        why=f"step {index + 1} of {len(policy.planned())}: {share} to {candidate.name}{because}",
    )


def _continue(
    roles: Roles,
    stable: Deployment,
    candidate: Deployment,
    policy: RolloutPolicy,
    target: str,
    word: OperatorCommand | None,
    now: float,
    judged: AnalysisResult | None,
) -> Action | Wait:
    if word is OperatorCommand.PAUSE:
        return Wait(why="paused by an operator", settled=False, kind=WaitKind.PAUSED)
    step = _step(policy, roles.step)
    because = ""
    if word is not OperatorCommand.ADVANCE:
        if not policy.judged:
            why = f"{candidate.name} holds {step.percent} % and waits for an operator's word"
            return Wait(why=why, settled=False, kind=WaitKind.WORD)
        advice = evaluate_step(candidate.name, step, policy, judged, now)
        if isinstance(advice, Wait):
            return advice
        if isinstance(advice, Abort):
            return plan_abort(roles, target, why=advice.why, reject=True)
        because = f"; {advice.why}"
    index, last = roles.step + 1, len(policy.planned()) - 1
    if index >= last:
        return _finish(stable, candidate, target, now, why=f"step {last + 1} of {last + 1}", because=because)
    return _move(ActionKind.ADVANCE, roles, stable, candidate, policy, index, because)


def _finish(
    stable: Deployment, candidate: Deployment, target: str, now: float, *, why: str, because: str = ""
) -> Action:
    return Action(
        kind=ActionKind.FINISH,
        state=build_split_state(candidate, None, 0, stable),
        roles=Roles(stable=candidate, previous=stable, finished_at=now),
        why=f"{why}: 100 % to {candidate.name}{because}",
        aliases={
            format_alias("champion", target): candidate.version,
            format_alias("previous", target): stable.version,
            format_alias("challenger", target): None,
        },
    )
