"""Roll endpoints back as `onnx-ops rollback` does."""

from typing import Any

from prefect import State, flow

from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import actor, aggregate_state, ends_as_failed, roll_back_endpoints
from onnx_ops.release.rollback import select_endpoints


@flow(name="rollback", persist_result=False)
@ends_as_failed
def rollback(
    endpoints: tuple[str, ...] = (),
    to: str | None = None,
    reason: str = "",
    force: bool = False,
    all: bool = False,  # noqa: A002 (the option's name)
    model: str = "",
    target: str = "",
    blocks: tuple[str, ...] = (),
) -> State[Any]:
    """Move all traffic back to one version, by default the stable or the previous one.

    This needs MLflow only if model files are lost. Aliases follow when the registry answers.

    Args:
        endpoints: Names of endpoints.
        to: Version to restore; by default the stable one in a rollout, else the previous one.
        reason: Why; recorded in the ledger.
        force: Allow a version that was itself rolled back, and roll back further after a rollback.
        all: Roll back the endpoints of the model, and of the target if given, instead of named
            ones. Without `to`, only endpoints that serve the latest release are rolled back.
        model: With all: a registered model.
        target: With all: a target.
        blocks: Prefect blocks with the addresses of services, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        context = project.context
        names = select_endpoints(context, endpoints, every=all, model=model, target=target, to=to)
        return aggregate_state(
            roll_back_endpoints(
                context, names, to=to, reason=reason, by=actor(context), force=force, pin=not all
            )
        )
