"""A custom operator for tests.

It provides a model that uses the operator, its library built from C, and a release of both.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.target import CustomOps
from onnx_ops.onnx_graph.compatibility import copy_libraries
from tests.support.extras import skip_or_fail
from tests.support.graphs import write_graph

DOMAIN = "acme.ops"


def write_softsign(path: Path, *, scale: float = 2.0, as_function: bool = False) -> None:
    """Write the model `y = scale * x / (1 + |x|)` on float32 (batch, 3).

    It uses the custom operator, or with `as_function` a function of the same name.
    """
    domain, attribute = ("own", "") if as_function else (DOMAIN, f"<scale = {float(scale)}>")
    text = (
        "(float[batch,3] x) => (float[batch,3] y) "
        f"{{ [sign] y = {domain}.ScaledSoftsign{attribute}(x) }}"
    )
    if as_function:
        body = f"c = Softsign(a) s = Constant<value_float = {float(scale)}>() b = Mul(c, s)"
        text += f' <domain: "own", opset_import: ["" : 18]> ScaledSoftsign (a) => (b) {{ {body} }}'
    write_graph(path, text, domains={domain: 1})


def build_library(source: Path, path: Path) -> CustomOps:
    """Compile a library of operators.

    A test without a C compiler is skipped, or fails if services are required.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        skip_or_fail("there is no C compiler, so no library of custom operators can be built")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(path), str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return CustomOps(path=str(path), digest=digest_file(path), domains=(DOMAIN,))


def released(
    folder: Path,
    libraries: Mapping[str, tuple[CustomOps, ...]],
    *,
    target: str,
    scale: float = 2.0,
    version: str = "1",
) -> Deployment:
    """Return a version of the model for one target.

    Its files are written to an empty folder, as a release writes them.
    """
    folder.mkdir(parents=True)
    write_softsign(folder / "model.onnx", scale=scale)
    copy_libraries(folder / "model.onnx", libraries)
    files = {
        p.relative_to(folder).as_posix(): digest_file(p) for p in folder.rglob("*") if p.is_file()
    }
    return Deployment(
        name=f"v{version}",
        model="softsign",
        version=version,
        variant="fp32",
        release=digest_bytes(version.encode()),
        manifest=Manifest(files=files).digest(),
        location=str(folder),
        custom_ops=tuple(
            sorted(name for name in files if name.startswith(f"custom_ops/{target}/"))
        ),
    )
