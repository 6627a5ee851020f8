"""What a run came to: decisions, choices, versions, endpoints, and one exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.decision import Decision, GateResult, TargetObjective, Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.pipeline import Pipeline, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.domain.release import Choice, Registration
from onnx_ops.errors import UserError
from onnx_ops.pipeline import RunResult
from onnx_ops.ports import Ports, Store
from onnx_ops.statistics.choice import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`awaiting` are targets whose choice waits for a person to promote it."""

    pipeline: str
    executed: tuple[str, ...]
    outcomes: tuple[StageOutcome, ...]
    decisions: tuple[Decision, ...]
    choices: tuple[Choice, ...]
    registration: Registration | None
    awaiting: tuple[str, ...]
    exit_code: int


_RELEASE = (StageKind.REGISTER, StageKind.PROMOTE, StageKind.DEPLOY)

_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE)
"""Which verdict names the exit code when several targets have no choice."""


def where_to_read(registration: Registration) -> str:
    """Address of the release's report, or the command that writes it out where the registry has no pages."""
    version = next(iter(registration.versions.values()))
    return registration.report or f"onnx-ops report {registration.model}/{version}"


def evidence_of(summary: Summary, store: Store) -> Mapping[Digest, Evidence]:
    """What was measured in a run, by the digest under which it is stored."""
    stored = [
        outcome.manifest["evidence.json"]
        for outcome in summary.outcomes
        if outcome.manifest is not None and "evidence.json" in outcome.manifest
    ]
    return {digest: codec.loads(store.read(digest), Evidence) for digest in stored}


def summarise(pipeline: Pipeline, result: RunResult, ports: Ports) -> Summary:
    """Everything a person or a machine wants to know about a finished run."""
    gates = [
        stage
        for stage in result.plan.stages
        if stage.kind is StageKind.GATE and _root(stage.id, result.outcomes).status is not StageStatus.SKIPPED
    ]
    decisions = tuple(_decision(stage, result.outcomes, ports) for stage in gates)
    choices = tuple(
        choose(tuple(d for d in decisions if d.target == target), _policy(result.plan.stages, target))
        for target in pipeline.benchmark.targets
        if any(d.target == target for d in decisions)
    )
    registration = _registration(result.outcomes, ports)
    manual = registration is not None and pipeline.register is not None and pipeline.register.promote == "manual"
    return Summary(
        pipeline=pipeline.pipeline,
        executed=result.executed(),
        outcomes=tuple(result.outcomes[stage.id] for stage in result.plan.stages),
        decisions=decisions,
        choices=choices,
        registration=registration,
        awaiting=tuple(c.target for c in choices if c.variant is not None) if manual else (),
        exit_code=_exit_code(result, choices),
    )


def _policy(stages: Sequence[Stage], target: str) -> TargetObjective:
    gates = (stage for stage in stages if stage.kind is StageKind.GATE and stage.target == target)
    hints = next(stage.hints for stage in gates)
    return codec.from_json(hints.get("policy", {}), TargetObjective)


def _decision(stage: Stage, outcomes: Mapping[str, StageOutcome], ports: Ports) -> Decision:
    """A pair that could not be measured has a decision too: ERROR, with the stage that failed."""
    manifest = outcomes[stage.id].manifest
    if manifest is not None:
        return codec.loads(ports.store.read(manifest["decision.json"]), Decision)
    reason = _cause(stage.id, outcomes)
    result = GateResult(gate="measurement", metric="", limit="", verdict=Verdict.ERROR, reason=reason)
    return Decision(variant=stage.variant or "", target=stage.target or "", results=(result,))


def _cause(stage_id: str, outcomes: Mapping[str, StageOutcome]) -> str:
    outcome = _root(stage_id, outcomes)
    return f"{outcome.stage}: {outcome.reason}"


def _root(stage_id: str, outcomes: Mapping[str, StageOutcome]) -> StageOutcome:
    """The outcome at the root of a chain of skipped stages: a failure, or a place that a search left empty."""
    outcome = outcomes[stage_id]
    while outcome.status is StageStatus.SKIPPED:
        needed = outcome.reason.removeprefix("needs ").partition(",")[0]
        if needed not in outcomes:
            break
        outcome = outcomes[needed]
    return outcome


def _registration(outcomes: Mapping[str, StageOutcome], ports: Ports) -> Registration | None:
    outcome = outcomes.get("register")
    if outcome is None or outcome.manifest is None:
        return None
    return codec.loads(ports.store.read(outcome.manifest["registration.json"]), Registration)


def _exit_code(result: RunResult, choices: tuple[Choice, ...]) -> int:
    """With a choice for every target only its release can fail; else a wrong input comes first, then the verdicts."""
    missing = [c.verdict for c in choices if c.variant is None]
    if choices and not missing:
        release = {stage.id for stage in result.plan.stages if stage.kind in _RELEASE}
        return max((error.exit_code for stage, error in result.errors.items() if stage in release), default=0)
    codes = [error.exit_code for error in result.errors.values()]
    if UserError.exit_code in codes:
        return UserError.exit_code
    for verdict in _ORDER:
        if verdict in missing:
            return verdict.exit_code
    return max(codes, default=0)
