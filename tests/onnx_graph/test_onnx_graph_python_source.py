"""Python source that builds a model anew, run as a person would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.python_source import write_python_source
from onnx_ops.testing.models import write_convolution, write_perceptron
from tests.support.external import write_external


def rebuilt(source: Path, output: Path) -> onnx.ModelProto:
    subprocess.run([sys.executable, source, output], check=True, timeout=60)
    return onnx.load(output, load_external_data=False)


@pytest.mark.parametrize("write", [write_perceptron, write_convolution])
def test_it_builds_the_same_model(write: object, tmp_path: Path) -> None:
    assert callable(write)
    write(tmp_path / "m.onnx")
    files = write_python_source(tmp_path / "m.onnx", tmp_path / "source.py")
    assert [file.name for file in files] == ["source.py", "source.py.weights"]
    assert rebuilt(files[0], tmp_path / "n.onnx") == onnx.load(tmp_path / "m.onnx")
    assert "op_type='Relu'" in files[0].read_text()


def test_external_weights_stay_where_they_are(tmp_path: Path) -> None:
    write_external(tmp_path / "m.onnx", "weights.bin")
    files = write_python_source(tmp_path / "m.onnx", tmp_path / "source.py")
    assert [file.name for file in files] == ["source.py"]
    assert rebuilt(files[0], tmp_path / "n.onnx") == onnx.load(tmp_path / "m.onnx", load_external_data=False)


def test_branches_functions_and_odd_numbers_survive(tmp_path: Path) -> None:
    then = helper.make_graph([helper.make_node("Relu", ["x"], ["a"])], "then", [], [])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=then)
    odd = helper.make_tensor("odd", TensorProto.FLOAT, [4], [float("nan"), float("inf"), -float("inf"), 1e-45])
    function = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], [])
    model = helper.make_model(helper.make_graph([node], "g", [], [], [odd]), functions=[function])
    onnx.save(model, tmp_path / "m.onnx")
    assert write_python_source(tmp_path / "m.onnx", tmp_path / "s.py")
    assert rebuilt(tmp_path / "s.py", tmp_path / "n.onnx").SerializeToString() == model.SerializeToString()


def test_names_are_data_and_never_code(tmp_path: Path) -> None:
    """Names of the file, of nodes and of the domain that would end a literal, were they not escaped."""
    evil = '"""\nopen("owned", "w")\n\'\'\'{0}'
    node = helper.make_node("Relu", ["x"], ["y"], name=evil, domain=evil, doc_string=evil)
    graph = helper.make_graph([node], evil, [], [], doc_string=evil)
    model = helper.make_model(graph, producer_name=evil)
    model.graph.output.add(name="y")
    path = tmp_path / 'm"""\nopen("owned", "w")\n.onnx'.replace("/", "")
    onnx.save(model, path)
    write_python_source(path, tmp_path / "s.py")
    assert rebuilt(tmp_path / "s.py", tmp_path / "n.onnx") == model
    assert not (tmp_path / "owned").exists()
    assert not Path("owned").exists()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no")
    with pytest.raises(UserError):
        write_python_source(tmp_path / "m.onnx", tmp_path / "s.py")
    assert not (tmp_path / "s.py").exists()
