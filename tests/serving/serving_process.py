"""Small models, and a real server process that serves them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper

from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.protocol import server_process
from onnx_ops.serving.inference.integrity import ModelCopies
from onnx_ops.serving.inference.models import LoadedModel, PackedModelCache, load_model
from onnx_ops.testing.endpoints import state_of
from tests.support.processes import until
from tests.support.server import MAIN, Answer, ServerFamily, scaled

INFER = "/v2/models/m/infer"
X: Mapping[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
ODD = {"x-odd": "1\r\nx-odd: 2"}
"""A header without meaning that is sent twice.

It makes the request unusual, so that the server takes its slow path.
"""
TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "fp64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
    "text": TensorProto.STRING,
}
"""Element types by the name of an input of `build_identity_model`."""
VALUES: dict[str, tuple[str, np.ndarray[Any, Any]]] = {
    "fp32": ("FP32", np.array([[1.5, -2], [3, 0.1]], np.float32)),
    "fp16": ("FP16", np.array([[1.5, -2], [3, 0.25]], np.float16)),
    "fp64": ("FP64", np.array([[1.5, -2], [3, 0.1]])),
    "int64": ("INT64", np.array([[2**62 + 1, -2], [3, 4]])),
    "int8": ("INT8", np.array([[127, -128], [3, 4]], np.int8)),
    "uint64": ("UINT64", np.array([[2**64 - 1, 2], [3, 4]], np.uint64)),
    "bool": ("BOOL", np.array([[True, False], [False, True]])),
    "text": ("BYTES", np.array([["é", ""], ["a,b", "日本"]], object)),
}
"""Datatype and tensor for each input of `build_identity_model`."""
Tensor = tuple[str, int, Sequence[Any]]
wait_until = partial(until, pause_s=0.002)


def save_graph(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Tensor | onnx.ValueInfoProto],
    outputs: Sequence[Tensor | onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
) -> Path:
    """Write a model into its folder, which is made if needed; return its file."""
    given, found = (
        [
            helper.make_tensor_value_info(*tensor) if isinstance(tensor, tuple) else tensor
            for tensor in tensors
        ]
        for tensors in (inputs, outputs)
    )
    graph = helper.make_graph(nodes, "m", given, found, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def deploy(folder: Path, *, name: str = "blue", version: str = "1", model: str = "m") -> Deployment:
    """Return the deployment of the files in a folder."""
    files = {
        p.relative_to(folder).as_posix(): digest_file(p) for p in folder.rglob("*") if p.is_file()
    }
    return Deployment(
        name=name,
        model=model,
        version=version,
        variant="fp32",
        release=digest_bytes(b"release"),
        manifest=Manifest(files=files).digest(),
        location=str(folder),
    )


def load_once(deployment: Deployment, cache: PackedModelCache | None = None) -> LoadedModel:
    """Load a model from a copy that no other load uses."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(deployment, ModelCopies(Path(folder)), cache)


def build_identity_model() -> onnx.ModelProto:
    """Return a model of many types that returns each input as `<name>_out`."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in TYPES],
        "m",
        [helper.make_tensor_value_info(name, kind, ["n", 2]) for name, kind in TYPES.items()],
        [
            helper.make_tensor_value_info(f"{name}_out", kind, ["n", 2])
            for name, kind in TYPES.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def mirrored(serving: Deployment, *shadows: Deployment, **split: Any) -> EndpointState:
    """Return a state with all traffic on one deployment, mirrored to the others."""
    shadow = {shadow.name: 100 for shadow in shadows}
    return EndpointState(
        deployments=(serving, *shadows),
        split=TrafficSplit(weights={serving.name: 100}, shadow=shadow, **split),
    )


def deploy_loop(
    folder: Path, *, name: str = "blue", version: str = "1", factor: int = 1
) -> Deployment:
    """Return the deployment of a model that adds one to `x`, `n * factor` times."""
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    m (int64[1] n, float[b, 2] x) => (float[b, 2] y) {{
      zero = Constant<value = int64[1] {{0}}>()
      factor = Constant<value = int64 {{{factor}}}>()
      once = Squeeze(n, zero)
      trips = Mul(once, factor)
      goes = Constant<value = bool {{1}}>()
      y = Loop(trips, goes, x) <body = b (int64 i, bool c, float[b, 2] v) => (bool d, float[b, 2] w) {{
        d = Identity(c)
        one = Constant<value = float {{1.0}}>()
        w = Add(v, one)
      }}>
    }}"""  # noqa: E501
    folder.mkdir()
    onnx.save_model(onnx.parser.parse_model(text), folder / "model.onnx")
    return deploy(folder, name=name, version=version)


def loop_body(n: int) -> bytes:
    """Return a v2 request for a row of ones and `n` iterations."""
    trips = {"name": "n", "datatype": "INT64", "shape": [1], "data": [n]}
    return json.dumps({"inputs": [trips, {**X, "data": [1, 1]}]}).encode()


FOREVER = 1 << 40
"""Iterations of a loop that take days."""


def infer_body(*rows: Sequence[object]) -> bytes:
    """Return a v2 request for rows of two numbers."""
    data = [value for row in rows for value in row]
    return json.dumps({"inputs": [{**X, "shape": [len(rows), 2], "data": data}]}).encode()


@dataclass(slots=True, kw_only=True)
class Server(ServerFamily):
    """A server of model `m`, called as its clients call it."""

    def workers(self) -> list[int]:
        """Return all registered workers, including those of a killed supervisor."""
        return list(server_process.list_workers(self.folder))

    def infer(
        self, x: Sequence[object], headers: Mapping[str, str] | None = None, path: str = INFER
    ) -> Answer:
        return self.call("POST", path, infer_body(x), headers)

    def generation(self) -> int:
        """Return the published generation; 0 before the first publication."""
        state = self.state()
        return 0 if state is None else state.generation

    def who_answers(self, headers: Mapping[str, str] | None = None, path: str = INFER) -> str:
        return self.infer([1, 2], headers, path).headers["x-onnx-ops-deployment"]


@contextmanager
def serving(
    root: Path, *options: str, program: Sequence[str] = MAIN, **weights: int
) -> Iterator[Server]:
    """Yield a server below `root` that has published deployments with these weights."""
    with Server(folder=root / "state", options=options, program=program) as server:
        deployments = [scaled(root, name) for name in weights]
        assert server.publish(state_of(*deployments, **weights), 1).status == 200
        yield server


@contextmanager
def serving_model(root: Path, model: onnx.ModelProto, *options: str) -> Iterator[Server]:
    """Yield a server below `root` that has published one model."""
    (root / "model").mkdir()
    onnx.save_model(model, root / "model" / "model.onnx")
    with Server(folder=root / "state", options=options) as server:
        assert server.publish(state_of(deploy(root / "model"), blue=100), 1).status == 200
        yield server


def after(preamble: str) -> Sequence[str]:
    """Return the command of a server in whose process this code runs first."""
    return "-c", f"{preamble}\nimport sys\nfrom onnx_ops.serving.main import main\nsys.exit(main())"
