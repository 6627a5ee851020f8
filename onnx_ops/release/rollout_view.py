"""What a person sees of a rollout: where it is, what the figures say, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_ops.domain.rollout import Action, Judged
from onnx_ops.domain.rollout_policy import PlannedStep
from onnx_ops.ports import Ports
from onnx_ops.release.desired import Desired
from onnx_ops.release.journal import Journal
from onnx_ops.release.observe import look, next_move
from onnx_ops.statistics.rollout.judge import EvidencePath, judge, trace_guardrails


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout in progress. `step` indexes `steps`; `seconds` is how long it has been there.

    `judged` and `evidence` are None and empty where no figures decide, or none could be read. `next` says in one line
    what the next step of a driver would do, or what is waited for.
    """

    endpoint: str
    stable: str
    candidate: str
    step: int
    steps: tuple[PlannedStep, ...]
    seconds: float
    next: str
    judged: Judged | None = None
    evidence: tuple[EvidencePath, ...] = ()


def view(ports: Ports, endpoint: str) -> RolloutView | None:
    """None if no rollout is in progress. Asks the endpoint and its metrics, never the registry.

    Raises:
        NotFoundError: no pipeline has bound this endpoint.
    """
    journal = Journal.open(ports, endpoint)
    config, state = journal.config, journal.state
    stable, candidate = state.roles.stable, state.roles.candidate
    if stable is None or candidate is None:
        return None
    seen = look(journal)
    actual = ports.provider(config.provider).observe(config)
    move = next_move(journal, Desired(wanted=candidate), actual, seen)
    found = seen.observations
    began = state.trial.began if state.trial is not None else ports.clock.now()
    return RolloutView(
        endpoint=endpoint,
        stable=stable.name,
        candidate=candidate.name,
        step=state.roles.step,
        steps=state.policy.planned(),
        seconds=max(0.0, ports.clock.now() - began),
        next=f"next: {move.why}" if isinstance(move, Action) else move.why,
        judged=None if found is None else judge(found, state.policy),
        evidence=() if found is None else trace_guardrails(found, state.policy),
    )
