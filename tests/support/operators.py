"""A custom operator to test with: a model that uses one, its library built from C, and a release of both."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.target import CustomOps
from onnx_ops.onnx_graph.compatibility import copy_libraries

DOMAIN = "acme.ops"


def write_softsign(path: Path, *, scale: float = 2.0, as_function: bool = False) -> None:
    """`y = scale * x / (1 + |x|)` on float32 (batch, 3), by the custom operator; or by a function of its name."""
    shape: list[str | int | None] = ["batch", 3]
    domain = "own" if as_function else DOMAIN
    node = helper.make_node("ScaledSoftsign", ["x"], ["y"], domain=domain, name="sign")
    if not as_function:
        node.attribute.append(helper.make_attribute("scale", scale))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    functions = []
    if as_function:
        body = [
            helper.make_node("Softsign", ["a"], ["c"]),
            helper.make_node("Constant", [], ["s"], value_float=scale),
            helper.make_node("Mul", ["c", "s"], ["b"]),
        ]
        functions = [helper.make_function("own", "ScaledSoftsign", ["a"], ["b"], body, opsets[:1])]
    graph = helper.make_graph(
        [node],
        "softsign",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    onnx.save(helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10), path)


def build_library(source: Path, path: Path) -> CustomOps:
    """Compile a library of operators. A test without a C compiler is skipped, or fails where services are required."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        reason = "NOT TESTED: there is no C compiler, so no library of custom operators can be built"
        if os.environ.get("ONNX_OPS_TEST_SERVICES") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(path), str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return CustomOps(path=str(path), digest=digest_file(path), domains=(DOMAIN,))


def released(
    folder: Path, libraries: Mapping[str, tuple[CustomOps, ...]], *, target: str, scale: float = 2.0, version: str = "1"
) -> Deployment:
    """A version of the model for one target, as a release leaves it in an empty folder."""
    folder.mkdir(parents=True)
    write_softsign(folder / "model.onnx", scale=scale)
    copy_libraries(folder / "model.onnx", libraries)
    files = {p.relative_to(folder).as_posix(): digest_file(p) for p in folder.rglob("*") if p.is_file()}
    return Deployment(
        name=f"v{version}",
        model="softsign",
        version=version,
        variant="fp32",
        release=digest_bytes(version.encode()),
        manifest=Manifest(files=files).digest(),
        location=str(folder),
        custom_ops=tuple(sorted(name for name in files if name.startswith(f"custom_ops/{target}/"))),
    )
