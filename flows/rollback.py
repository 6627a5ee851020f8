"""Move all traffic of endpoints back, now: what `onnx-ops rollback` does, for those who work in Prefect."""

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
    all: bool = False,  # noqa: A002 (it is what the command calls it)
    model: str = "",
    target: str = "",
    blocks: tuple[str, ...] = (),
) -> State[Any]:
    """Back to the previous version, or to `to`. Needs no MLflow; the aliases follow when the registry answers.

    Args:
        endpoints: Names of endpoints.
        to: Version to go back to; the previous one by default.
        reason: Why; recorded in the ledger.
        force: Even onto a version that was rolled back itself.
        all: Instead of names: every endpoint of the model, and of the target if given.
        model: With all: a registered model.
        target: With all: a target.
        blocks: Blocks of Prefect's that say where services are, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        ports = project.ports
        names = select_endpoints(ports, endpoints, every=all, model=model, target=target)
        return aggregate_state(
            roll_back_endpoints(ports, names, to=to, reason=reason, by=actor(ports), force=force, pin=not all)
        )
