"""Python source that builds a model anew, run as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.python_source import write_python_source
from onnx_ops.testing.models import write_convolution, write_perceptron
from tests.support.external import write_external
from tests.support.graphs import parse_graph, write_graph


def rebuilt(path: Path) -> tuple[list[str], onnx.ModelProto]:
    """Return the files of the model's source, and the model that the source builds."""
    files = write_python_source(path, path.with_name("source.py"))
    subprocess.run([sys.executable, files[0], path.with_name("n.onnx")], check=True, timeout=60)
    return [file.name for file in files], onnx.load(
        path.with_name("n.onnx"), load_external_data=False
    )


@pytest.mark.parametrize("write", [write_perceptron, write_convolution])
def test_write_python_source_rebuilds_same_model(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.onnx")
    assert rebuilt(path) == (["source.py", "source.py.weights"], onnx.load(path))
    assert "op_type='Relu'" in (tmp_path / "source.py").read_text()


def test_write_python_source_of_external_weights_keeps_their_file(tmp_path: Path) -> None:
    write_external(tmp_path / "m.onnx", "weights.bin")
    assert rebuilt(tmp_path / "m.onnx") == (
        ["source.py"],
        onnx.load(tmp_path / "m.onnx", load_external_data=False),
    )


def test_write_python_source_keeps_branches_functions_and_special_numbers(tmp_path: Path) -> None:
    branches = "then_branch = a () => (a) { a = Relu(x) }, else_branch = b () => (b) { b = Neg(x) }"
    text = (
        f'(bool c, float x) => (float y) {{ y = If<{branches}>(c) }} <domain: "own"> F (a) '
        "=> (b) { b = Neg(a) }"
    )
    odd = helper.make_tensor(
        "odd", TensorProto.FLOAT, [4], [float("nan"), float("inf"), -float("inf"), 1e-45]
    )
    path = write_graph(tmp_path / "m.onnx", text, odd=odd)
    assert rebuilt(path)[1].SerializeToString() == onnx.load(path).SerializeToString()


def test_write_python_source_escapes_names_that_contain_code(tmp_path: Path) -> None:
    """Names of the file, of nodes and of the domain would end a string literal.

    They must be escaped.
    """
    evil = '"""\nopen("owned", "w")\n\'\'\'{0}'
    model = parse_graph("(float x) => (float y) { y = Relu(x) }")
    node = model.graph.node[0]
    node.name = node.domain = node.doc_string = model.graph.name = model.graph.doc_string = (
        model.producer_name
    ) = evil
    path = tmp_path / 'm"""\nopen("owned", "w")\n.onnx'.replace("/", "")
    onnx.save(model, path)
    assert rebuilt(path)[1] == model
    assert not (tmp_path / "owned").exists()
    assert not Path("owned").exists()


def test_write_python_source_of_invalid_file_raises_user_error(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no")
    with pytest.raises(UserError):
        write_python_source(tmp_path / "m.onnx", tmp_path / "s.py")
    assert not (tmp_path / "s.py").exists()
