"""Which targets an endpoint's server can serve as they were measured."""

from __future__ import annotations

import pytest

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.environment import Environment
from onnx_ops.domain.execution import CPU, Provider, SessionSettings
from onnx_ops.domain.target import OrtFormat, Target
from onnx_ops.protocol.execution import unservable

CUDA = Provider(name="CUDAExecutionProvider")
ON_CUDA = Target(name="cuda", providers=(CUDA, Provider(name=CPU)))
PROVIDERS = (LocalEndpoints, SageMakerEndpoints, AzureEndpoints)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Target(name="node", runtime="javascript"), "the server runs 'onnxruntime'"),
        (Target(name="own", env=Environment(requirements=("onnxruntime==1.20",))), "an environment of its own"),
        (Target(name="phone", ort_format=OrtFormat()), ".ort files"),
        (Target(name="npu", providers=(Provider(name="QNNExecutionProvider", package="onnxruntime_qnn"),)), "plug-in"),
        (ON_CUDA, "has no CUDAExecutionProvider; it has CPUExecutionProvider"),
    ],
    ids=lambda value: value.name if isinstance(value, Target) else "",
)
def test_a_target_that_the_server_would_run_otherwise_is_named_with_the_reason(target: Target, why: str) -> None:
    assert why in unservable(target, [CPU])


def test_threads_are_the_servers_to_set_and_providers_are_if_its_build_has_them() -> None:
    threads = Target(name="cpu-all", session=SessionSettings(intra_op_threads=0, spinning=True))
    assert unservable(threads, [CPU]) == ""
    assert unservable(ON_CUDA, [CUDA.name, CPU]) == ""


@pytest.mark.parametrize("kind", PROVIDERS)
def test_no_provider_takes_what_its_build_of_the_runtime_cannot_run(kind: type, tmp_path: object) -> None:
    provider = kind(tmp_path)
    assert provider.unservable(Target(name="cpu-1t")) == ""
    assert CUDA.name in provider.unservable(ON_CUDA)
