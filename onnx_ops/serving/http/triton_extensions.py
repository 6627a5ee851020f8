"""Documents of Triton's extensions.

The extensions are model configuration, statistics and model repository:
https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.serving.inference.deployments import LoadedDeployment, TableSnapshot
from onnx_ops.serving.inference.service import MAX_BATCH_ROWS
from onnx_ops.serving.inference.tensors import DATATYPE_OF
from onnx_ops.serving.metrics import (
    FAILED_NANOSECONDS,
    OTHER_STATUS,
    RUNS,
    get_column,
    get_request_latency,
)

PLATFORM = "onnxruntime_onnx"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")


def build_config(loaded: LoadedDeployment) -> Mapping[str, object]:
    """Return the configuration of a model.

    As in Triton, the shapes of a model with a batch size do not include axis 0. Other models have
    batch size 0.
    """
    signature = loaded.signature
    specs = (*signature.inputs.values(), *signature.outputs.values())
    is_batched = (
        loaded.deployment.batchable
        and not signature.images
        and not any(s.shape == () or isinstance(s.shape[0], int) for s in specs)
    )

    def describe(spec: TensorSpec) -> dict[str, object]:
        datatype = DATATYPE_OF[spec.dtype]
        dims = [d if isinstance(d, int) else -1 for d in spec.shape[is_batched:]]
        name = "STRING" if datatype == "BYTES" else datatype
        tensor: dict[str, object] = {"name": spec.name, "data_type": f"TYPE_{name}", "dims": dims}
        return {**tensor, "optional": True} if spec.name in signature.optional else tensor

    return {
        "name": loaded.deployment.model,
        "platform": PLATFORM,
        "backend": "onnxruntime",
        "max_batch_size": MAX_BATCH_ROWS if is_batched else 0,
        "input": [describe(spec) for spec in signature.inputs.values()],
        "output": [describe(spec) for spec in signature.outputs.values()],
    }


def build_statistics(
    model: str, version: str, rows: Iterable[Sequence[int]]
) -> Mapping[str, object]:
    """Return the statistics of a version from the counters of its slots.

    Triton's other fields are omitted, because their values are not recorded. They are the numbers
    of rows, the times of the parts of a request, and the time of the last request.
    """
    row = [sum(column) for column in zip(*rows, strict=True)]
    successes = row[get_column(200)]
    failed_ns = row[FAILED_NANOSECONDS]
    # The difference can be below 0, because the workers write their counters during the sum.
    success_ns = max(0, get_request_latency(row).nanoseconds - failed_ns)
    return {
        "name": model,
        "version": version,
        "execution_count": row[RUNS],
        "inference_stats": {
            "success": {"count": successes, "ns": success_ns},
            "fail": {"count": sum(row[: OTHER_STATUS + 1]) - successes, "ns": failed_ns},
        },
    }


def list_models(
    snapshot: TableSnapshot, out_of_service: int = 0, *, only_ready: bool
) -> Sequence[Mapping[str, str]]:
    """Return the name, version and state of each version in a routing table.

    `out_of_service` is a bit mask of the slots that get no requests. With `only_ready`, versions
    that are not loaded or are out of service are omitted.
    """
    models: dict[str, Mapping[str, str]] = {}
    for deployment in snapshot.table.state.deployments:
        index = {"name": deployment.model, "version": deployment.version}
        loaded = snapshot.deployments.get(deployment.name)
        is_out = loaded is not None and out_of_service >> loaded.slot & 1
        if loaded is not None and not is_out:
            models.setdefault(deployment.version, {**index, "state": "READY"})
        elif not only_ready:
            reason = (
                "the deployment is out of service"
                if is_out
                else snapshot.failed.get(deployment.name, "")
            )
            models.setdefault(
                deployment.version, {**index, "state": "UNAVAILABLE", "reason": reason}
            )
    return [models[version] for version in sorted(models)]
