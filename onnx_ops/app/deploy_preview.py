"""Preview what a run would do to its endpoints after its gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx_ops.app.handler import RELEASE, StageHandler, binding
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.pipeline import Deploy
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import OnnxOpsError
from onnx_ops.pipeline.run import collect_inputs
from onnx_ops.ports import Context
from onnx_ops.release.promote import bind_endpoint, require_no_orphans

_NO_KEY: Digest = digest_bytes(b"")
"""Key of release stages, whose results are not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployPreview:
    """What a run would do to its endpoints.

    `notes` describe deployments of versions that are not registered yet. `errors` are the errors of
    stages by id, and an error about endpoints without a pipeline by the name of the pipeline.
    """

    notes: tuple[str, ...] = ()
    errors: Mapping[str, OnnxOpsError] = field(default_factory=dict)


def preview_deployments(
    handler: StageHandler,
    plan: Plan,
    outcomes: Mapping[str, StageOutcome | None],
    *,
    abandon: str = "",
) -> DeployPreview:
    """Execute the release stages of a plan in the handler's dry run.

    If the release is registered, its promotion and deployment are executed. Otherwise only the
    endpoints are bound, and notes describe what a release that passes its gates would do.

    Args:
        handler: handler whose context is that of a dry run.
        outcomes: the outcomes of the stages that need no work; None for the others.
        abandon: the reason for leaving endpoints without a pipeline.
    """
    due = [s for s in plan.stages if s.kind in RELEASE and outcomes[s.id] is None]
    if not due:
        return DeployPreview()
    configs = [binding(stage)[0] for stage in plan.stages if stage.kind is StageKind.DEPLOY]
    try:
        require_no_orphans(handler.context, plan.pipeline, configs, abandon=abandon)
    except OnnxOpsError as error:
        return DeployPreview(errors={plan.pipeline: error})
    known = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
    if any(s.kind is StageKind.REGISTER and s.id not in known for s in plan.stages):
        return _preview_unregistered(handler.context, due, abandon)
    return _preview_registered(handler, due, known)


def _preview_registered(
    handler: StageHandler, due: list[Stage], known: Mapping[str, StageOutcome]
) -> DeployPreview:
    """Promote and deploy a registered release in the handler's dry run."""
    errors: dict[str, OnnxOpsError] = {}
    for stage in due:
        if errors.keys() & set(stage.needs):
            continue
        inputs = {name: outcome for name, outcome in known.items() if name not in errors}
        try:
            handler.execute(stage, _NO_KEY, collect_inputs(stage, inputs))
        except OnnxOpsError as error:
            errors[stage.id] = error
    return DeployPreview(errors=errors)


def _preview_unregistered(context: Context, due: list[Stage], abandon: str) -> DeployPreview:
    """Bind the endpoints, and describe the deployment of an unregistered release."""
    notes: list[str] = []
    errors: dict[str, OnnxOpsError] = {}
    for stage in due:
        if stage.kind is not StageKind.DEPLOY:
            continue
        config, section = binding(stage)
        before = context.ledger.state(config.endpoint)
        try:
            bind_endpoint(context, config, section.rollout, abandon=abandon)
        except OnnxOpsError as error:
            errors[stage.id] = error
        else:
            settings: Mapping[str, Any] = stage.settings
            is_manual = not settings["auto"]
            notes.append(describe_release(before, section, is_manual=is_manual))
    return DeployPreview(notes=tuple(notes), errors=errors)


def describe_release(state: ReleaseState, section: Deploy, *, is_manual: bool) -> str:
    """Return what a new release that passes its gates would do to an endpoint.

    With `is_manual`, the run does not promote the release.
    """
    name, roles = section.endpoint, state.roles
    if is_manual:
        return f"{name}: a release that passes waits for `onnx-ops promote`"
    if roles.stable is None:
        return f"{name}: a release that passes is deployed first, with 100 % of traffic"
    begin = f"{name}: {roles.stable.name} serves; a release that passes"
    if roles.candidate is not None:
        begin += f" replaces {roles.candidate.name}, the candidate of the current rollout, and"
    return f"{begin} {_describe_first_step(section.rollout, roles.stable.name)}"


def _describe_first_step(policy: RolloutPolicy, stable: str) -> str:
    steps = policy.planned()
    first = steps[0]
    if first.kind == "shadow":
        return f"begins with copies of {first.mirror_percent} % of requests"
    if len(steps) == 1:
        return "gets 100 % of traffic immediately"
    rest = 100 - first.percent
    return (
        f"begins with {first.percent} % of traffic, and {stable} keeps {rest} % "
        f"(step 1 of {len(steps)})"
    )
