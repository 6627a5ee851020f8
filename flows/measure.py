"""Run a benchmark on this machine, for a target that names this worker's pool."""

from typing import Any

from prefect import State, flow
from prefect.states import Completed

from onnx_ops.app.execution import StageExecutor, answer
from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import ends_as_failed
from onnx_ops.orchestration.tasks import failed


@flow(name="measure", persist_result=False)
@ends_as_failed
def measure(request: dict[str, Any]) -> State[Any]:
    """Run one benchmark, one at a time on this machine; write its evidence to the shared store.

    Args:
        request: The request of onnx-ops; not written by hand.
    """
    with project_of(()) as project:
        performer = StageExecutor(settings=project.settings, ports=project.ports)
        error = answer(performer.here, project.ports.store, request)
    return Completed(message=f"measured: {request['attempt']}") if error is None else failed(error)
