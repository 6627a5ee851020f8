"""Compare the cost of a request on the wire with that of the tutorials' snippet.

    python -m benchmarks.wire

The snippet uses `json` and pydantic lists in FastAPI. Only the conversions between bytes and arrays
are measured, in one process, without HTTP and model. Each value is the minimum of many interleaved
rounds. The second table shows from which size simdjson is faster than orjson (`LARGE_BODY_BYTES` in
serving/inference/tensors.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.serving.inference import tensors
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.responses import encode_outputs
from onnx_ops.serving.inference.signature import ModelSignature


class Features(BaseModel):
    """The request body of the snippet."""

    data: list[float]


def snippet(body: bytes, shape: tuple[int, ...], answer: np.ndarray[Any, Any]) -> bytes:
    np.array(Features.model_validate(json.loads(body)).data, np.float32).reshape(shape)
    return json.dumps({"prediction": answer.tolist()}).encode()


def wire(
    body: bytes, length: int | None, model: ModelSignature, answer: np.ndarray[Any, Any]
) -> bytes:
    call = read_infer(body, length, model)
    return encode_outputs(call, model, [answer])[0]


def least(cases: Mapping[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Return the microseconds of a call, the minimum of the rounds."""
    best = dict.fromkeys(cases, math.inf)
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            for _ in range(repeats):
                case()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats * 1e6)
    return best


def compare(shape: tuple[int, ...], answers: int, rounds: int, repeats: int) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=shape).astype(np.float32)
    y = draw.normal(size=(shape[0], answers)).astype(np.float32)
    dims: tuple[int | str, ...] = ("batch", *shape[1:])
    model = ModelSignature(
        model="m",
        version="1",
        inputs={"x": TensorSpec(name="x", dtype="float32", shape=dims)},
        outputs={"y": TensorSpec(name="y", dtype="float32", shape=("batch", answers))},
    )
    tensor = {"name": "x", "datatype": "FP32", "shape": list(shape)}
    option = orjson.OPT_SERIALIZE_NUMPY
    flat = orjson.dumps({"inputs": [{**tensor, "data": x.reshape(-1)}]}, option=option)
    nested = orjson.dumps({"inputs": [{**tensor, "data": x}]}, option=option)
    parameters = {"binary_data_size": x.nbytes}
    head = orjson.dumps(
        {
            "inputs": [{**tensor, "parameters": parameters}],
            "parameters": {"binary_data_output": True},
        }
    )
    body = orjson.dumps({"data": x.reshape(-1)}, option=option)
    found = least(
        {
            "snippet": lambda: snippet(body, shape, y),
            "orjson.loads alone": lambda: orjson.loads(flat),
            "JSON flat": lambda: wire(flat, None, model, y),
            "JSON nested": lambda: wire(nested, None, model, y),
            "binary": lambda: wire(head + x.tobytes(), len(head), model, y),
        },
        rounds,
        repeats,
    )
    for name, cost in found.items():
        print(
            f"{shape!s:20} {name:20} {cost:10.1f} us   snippet / this = "
            f"{found['snippet'] / cost:7.1f}"
        )


def threshold() -> None:
    draw = np.random.default_rng(0)
    for count in (32, 64, 128, 256, 512, 4096):
        model = ModelSignature(
            model="m",
            version="1",
            inputs={"x": TensorSpec(name="x", dtype="float32", shape=("n",))},
            outputs={"y": TensorSpec(name="y", dtype="float32", shape=("n",))},
        )
        tensor = {
            "name": "x",
            "datatype": "FP32",
            "shape": [count],
            "data": draw.normal(size=count).astype(np.float32),
        }
        body = orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)
        found: dict[str, float] = {}
        for _ in range(20):
            for name, large in (("orjson", 1 << 40), ("simdjson", 0)):
                tensors.LARGE_BODY_BYTES = large
                cost = least({name: lambda b=body, m=model: read_infer(b, None, m)}, 5, 100)[name]  # type: ignore[misc]
                found[name] = min(found.get(name, math.inf), cost)
        print(
            f"{len(body):8} bytes  orjson {found['orjson']:8.1f} us  simdjson "
            f"{found['simdjson']:8.1f} us"
        )


if __name__ == "__main__":
    compare((1, 16), 10, 300, 100)
    compare((1, 64), 10, 300, 100)
    compare((1, 3, 224, 224), 1000, 15, 2)
    threshold()
