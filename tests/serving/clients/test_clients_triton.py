"""`tritonclient.http`, as its users call it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.serving.serving_process import VALUES, Server

if TYPE_CHECKING:
    import tritonclient.http as triton

JSON_REFUSED = ("fp16",)
"""Types that the client cannot send as JSON."""


@pytest.fixture
def client(types: Server) -> Iterator[triton.InferenceServerClient]:
    import tritonclient.http as triton

    with triton.InferenceServerClient(f"127.0.0.1:{types.port}") as client:
        yield client


def read_output(answer: triton.InferResult, name: str) -> np.ndarray:
    """Return the array of an output; text is `str` in either form of the response."""
    array: np.ndarray = answer.as_numpy(name)
    if array.dtype != object:
        return array
    return np.array(
        [[v.decode() if isinstance(v, bytes) else v for v in row] for row in array], object
    )


def test_triton_client_reads_health_metadata_config_statistics_and_index(
    client: triton.InferenceServerClient,
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", "1")
    assert not client.is_model_ready("other")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("m", "1")
    assert {"name": "text", "datatype": "BYTES", "shape": [-1, 2]} in metadata["inputs"]
    assert metadata["versions"] == ["1"]
    assert client.get_model_config("m", "1")["input"][0] == {
        "name": "fp32",
        "data_type": "TYPE_FP32",
        "dims": [-1, 2],
    }
    assert client.get_inference_statistics("m", "1")["model_stats"][0]["version"] == "1"
    assert client.get_model_repository_index() == [{"name": "m", "version": "1", "state": "READY"}]


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False, None])
def test_triton_client_with_json_or_binary_tensors_preserves_values_of_eight_types(
    client: triton.InferenceServerClient, binary_input: bool, binary_output: bool | None
) -> None:
    import tritonclient.http as triton

    inputs = []
    for name, (datatype, array) in VALUES.items():
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary_input or name in JSON_REFUSED)
        inputs.append(tensor)
    outputs = None
    if binary_output is not None:
        outputs = [
            triton.InferRequestedOutput(f"{name}_out", binary_data=binary_output) for name in VALUES
        ]
    answer = client.infer("m", inputs, outputs=outputs, request_id="7")
    assert answer.get_response()["id"] == "7"
    for name, (_, array) in VALUES.items():
        np.testing.assert_array_equal(read_output(answer, f"{name}_out"), array)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_triton_client_with_compression_returns_same_tensors(
    client: triton.InferenceServerClient, algorithm: str, binary: bool
) -> None:
    import tritonclient.http as triton

    sent = {
        name: (datatype, np.repeat(array, 500, axis=0))
        for name, (datatype, array) in VALUES.items()
    }
    inputs = []
    for name, (datatype, array) in sent.items():
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary or name in JSON_REFUSED)
        inputs.append(tensor)
    outputs = [triton.InferRequestedOutput(f"{name}_out", binary_data=binary) for name in VALUES]
    for answered in (algorithm, None):
        answer = client.infer(
            "m",
            inputs,
            outputs=outputs,
            request_compression_algorithm=algorithm,
            response_compression_algorithm=answered,
        )
        for name, (_, array) in sent.items():
            np.testing.assert_array_equal(read_output(answer, f"{name}_out"), array)
