"""A program that calls a server by KServe's client: kserve_calls.py URL.

The interpreter of KServe's isolated environment runs it. It fails with a traceback, or prints `ok`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
from httpx import HTTPStatusError
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

ARRAYS: dict[str, tuple[str, np.ndarray[Any, Any]]] = {
    "fp32": ("FP32", np.array([[1.5, -2]], np.float32)),
    "fp16": ("FP16", np.array([[1.5, -2]], np.float16)),
    "fp64": ("FP64", np.array([[1.5, 0.1]])),
    "int64": ("INT64", np.array([[2**62 + 1, -2]])),
    "int8": ("INT8", np.array([[127, -128]], np.int8)),
    "uint64": ("UINT64", np.array([[2**64 - 1, 2]], np.uint64)),
    "bool": ("BOOL", np.array([[True, False]])),
    "text": ("BYTES", np.array([["é", "b"]], object)),
}


async def main(url: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "m")
    for binary_in in (True, False):
        for binary_out in (True, False):
            await infer(client, url, binary_in, binary_out)
    wrong = InferInput("fp32", [1, 3], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 3), np.float32))
    answer = ""
    try:
        await client.infer(url, InferRequest("m", [wrong]), model_name="m")
    except HTTPStatusError as error:
        answer = str(error)
    assert "tensor 'fp32' must have shape" in answer
    await client.close()


async def infer(client: InferenceRESTClient, url: str, binary_in: bool, binary_out: bool) -> None:
    inputs, outputs = [], []
    for name, (datatype, array) in ARRAYS.items():
        tensor = InferInput(name, list(array.shape), datatype)
        # The client cannot send this type as JSON.
        only_binary = name == "fp16"
        tensor.set_data_from_numpy(array, binary_data=binary_in or only_binary)
        inputs.append(tensor)
        outputs.append(RequestedOutput(f"{name}_out", {"binary_data": binary_out or only_binary}))
    answer = await client.infer(
        url, InferRequest("m", inputs, request_outputs=outputs), model_name="m"
    )
    found = {output.name: output for output in answer.outputs}
    for name, (_, array) in ARRAYS.items():
        value = found[f"{name}_out"].as_numpy()
        if value.dtype == object or value.dtype.kind == "S":
            value = np.array(
                [v.decode() if isinstance(v, bytes) else v for v in value.reshape(-1)], object
            )
        np.testing.assert_array_equal(value.reshape(array.shape), array, err_msg=name)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    sys.stdout.write("ok")
