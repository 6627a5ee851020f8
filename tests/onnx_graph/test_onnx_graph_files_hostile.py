"""Malicious files: external data in every part of a model, and invalid types."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto

from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError, RefusedError, TooLargeError
from onnx_ops.onnx_graph.compatibility import explain_version_limits
from onnx_ops.onnx_graph.files import iterate_graphs, iterate_nodes, read_model, read_structure
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.testing.models import write_perceptron
from tests.support.graphs import parse_graph


def own_function(model: onnx.ModelProto) -> onnx.FunctionProto:
    function: onnx.FunctionProto = model.functions.add(name="f", domain="own")
    return function


def attribute(node: onnx.NodeProto, kind: Any = AttributeProto.TENSOR) -> onnx.AttributeProto:
    added: onnx.AttributeProto = node.attribute.add(name="value", type=kind)
    return added


PLACES: dict[str, Callable[[onnx.ModelProto], TensorProto]] = {
    "training": lambda m: m.training_info.add().algorithm.initializer.add(),
    "default of a function": lambda m: (
        own_function(m).attribute_proto.add(name="v", type=AttributeProto.TENSOR).t
    ),
    "branch of a function": lambda m: attribute(
        own_function(m).node.add(), AttributeProto.GRAPH
    ).g.initializer.add(),
    "sparse attribute": lambda m: (
        attribute(m.graph.node.add(), AttributeProto.SPARSE_TENSOR).sparse_tensor.values
    ),
    "attribute of a false type": lambda m: attribute(m.graph.node.add(), AttributeProto.INT).t,
    "list of graphs": lambda m: (
        attribute(m.graph.node.add(), AttributeProto.GRAPHS).graphs.add().initializer.add()
    ),
    "constant of a branch": lambda m: (
        attribute(
            attribute(m.graph.node.add(), AttributeProto.GRAPH).g.node.add(op_type="Constant")
        ).t
    ),
    "constant of a function": lambda m: attribute(own_function(m).node.add(op_type="Constant")).t,
    "sparse initializer": lambda m: m.graph.sparse_initializer.add().indices,
}


@pytest.mark.parametrize("place", PLACES)
def test_read_model_info_with_nested_external_data_outside_folder_raises_refused_error(
    place: str, perceptron: Path
) -> None:
    model = read_structure(perceptron)
    PLACES[place](model).CopyFrom(external(("location", "../secret"), size=1))
    perceptron.write_bytes(model.SerializeToString())
    with pytest.raises(RefusedError, match="inside the model's folder"):
        read_model_info(perceptron)


@pytest.mark.parametrize("location", ["zero\0byte", "long" * 2000, "circle"])
def test_read_structure_with_unusable_location_raises_refused_or_not_found_error(
    location: str, tmp_path: Path
) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises((RefusedError, NotFoundError)):
        read_structure(write_with(tmp_path, external(("location", location))))


def test_read_model_info_of_unknown_element_type_returns_undefined(perceptron: Path) -> None:
    model = read_structure(perceptron)
    model.graph.output[0].type.tensor_type.elem_type = 99
    perceptron.write_bytes(model.SerializeToString())
    assert read_model_info(perceptron).outputs[0].dtype == "undefined"


def test_read_model_info_with_ai_onnx_domain_returns_it_as_default_domain(tmp_path: Path) -> None:
    path = write_perceptron(tmp_path / "model.onnx", opset=22)
    model = read_structure(path)
    model.opset_import[0].domain = "ai.onnx"
    path.write_bytes(model.SerializeToString())
    assert read_model_info(path).opsets == {"": 22}
    assert "opset <= 21" in explain_version_limits(
        read_model_info(path), Target(name="old", max_opset=21)
    )


def test_iterate_nodes_and_graphs_visit_branches_once() -> None:
    branches = (
        "then_branch = then () => (a) { a = Relu(x) }, else_branch = else () => (b) { b = Neg(x) }"
    )
    model = parse_graph(f"(bool c, float x) => (float y) {{ y = If<{branches}>(c) }}")
    assert sorted(node.op_type for node in iterate_nodes(model)) == ["If", "Neg", "Relu"]
    assert sorted(graph.name for graph in iterate_graphs(model)) == ["else", "g", "then"]


def external(*entries: tuple[str, str], name: str = "factor", size: int = 2) -> TensorProto:
    tensor = TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=[size], data_location=TensorProto.EXTERNAL
    )
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    return tensor


def write_with(folder: Path, *weights: TensorProto) -> Path:
    """Write a model with those weights beside a file `w` of 64 bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "w").write_bytes(bytes(64))
    path = folder / "model.onnx"
    model = parse_graph("(float[batch,2] x) => (float[batch,2] y) { [scale] y = Mul(x, factor) }")
    model.graph.initializer.extend(weights)
    path.write_bytes(model.SerializeToString())
    return path


W = ("location", "w")
FAR = str((1 << 63) - 8)
WRONG_PLACES = {
    "beyond the end": ([external(W, ("offset", "60"), ("length", "8"))], "beyond the end"),
    "shape beyond the end": ([external(W, ("offset", "60"))], "beyond the end"),
    "far away": ([external(W, ("offset", FAR), ("length", "8"))], "beyond the end"),
    "sum that overflows": (
        [external(W, ("offset", FAR), ("length", FAR), size=1 << 61)],
        "bytes, but its shape needs",
    ),
    "enormous": ([external(W, ("length", FAR), size=1 << 61)], "bytes, but its shape needs"),
    "enormous shape": ([external(W, size=1 << 61)], "beyond the end"),
    "negative offset": ([external(W, ("offset", "-8"))], "not a number"),
    "negative length": ([external(W, ("length", "-8"))], "not a number"),
    "no digits": ([external(W, ("offset", "abc"))], "not a number"),
    "other digits": ([external(W, ("offset", "٣"))], "not a number"),
    "more than 64 bits": ([external(W, ("offset", "9" * 30))], "not a number"),
    "too short": ([external(W, ("length", "4"))], "its shape needs 8"),
    "too long": ([external(W, ("length", "16"))], "its shape needs 8"),
    "negative shape": ([external(W, size=-2)], "shape has a negative size"),
    "two files": ([external(W, ("location", "../secret"))], "more than once"),
    "no file": ([external(("offset", "0"))], "without the name of a file"),
    "nothing at all": ([external()], "without the name of a file"),
    "overlap": (
        [external(W, ("length", "8")), external(W, ("offset", "4"), name="b")],
        "overlaps that of tensor",
    ),
    "within another": (
        [external(W, size=8), external(W, ("offset", "8"), name="b")],
        "overlaps that of tensor",
    ),
    "the model itself": ([external(("location", "model.onnx"))], "to the model file itself"),
    "the model itself by a detour": (
        [external(("location", "./model.onnx"))],
        "to the model file itself",
    ),
}


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_read_structure_with_invalid_external_data_raises_refused_error(
    case: str, tmp_path: Path
) -> None:
    weights, said = WRONG_PLACES[case]
    with pytest.raises(RefusedError, match=said):
        read_structure(write_with(tmp_path, *weights))


def test_read_model_with_tied_or_adjacent_weights_reads_them(tmp_path: Path) -> None:
    weights = [
        external(W, size=2),
        external(W, name="tied"),
        external(W, ("offset", "8"), name="next"),
    ]
    empty = external(W, ("offset", "4"), name="empty", size=0)
    model = read_model(write_with(tmp_path, *weights, empty))
    assert [len(tensor.raw_data) for tensor in model.graph.initializer] == [8, 8, 8, 0]


def test_read_model_with_linked_weights_raises_refused_error(tmp_path: Path) -> None:
    """The onnx package refuses every link, even a hard link or one inside the folder."""
    path = write_with(tmp_path / "model", external(("location", "w2")))
    (path.parent / "w2").symlink_to(path.parent / "w")
    read_structure(path)
    with pytest.raises(RefusedError, match=r"not read.*symbolic link"):
        read_model(path)
    (path.parent / "w2").unlink()
    (path.parent / "w2").hardlink_to(path.parent / "w")
    with pytest.raises(RefusedError, match=r"not read.*hard links"):
        read_model(path)


def test_read_structure_of_file_of_2_gib_raises_too_large_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as stream:
        stream.truncate(1 << 31)
    with pytest.raises(TooLargeError, match="2 GiB"):
        read_structure(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    spans=st.lists(
        st.tuples(st.integers(-4, 80), st.one_of(st.none(), st.integers(-4, 80))),
        min_size=1,
        max_size=4,
    )
)
def test_read_structure_accepts_only_equal_or_disjoint_ranges_within_file(
    tmp_path: Path, spans: list[tuple[int, int | None]]
) -> None:
    weights = [
        external(
            W,
            ("offset", str(start)),
            *([("length", str(size))] if size is not None else []),
            name=f"t{i}",
        )
        for i, (start, size) in enumerate(spans)
    ]
    path = write_with(tmp_path, *weights)
    try:
        read_structure(path)
    except RefusedError:
        return
    starts = sorted(start for start, _ in spans)
    assert all(0 <= start <= 56 for start in starts)
    assert all(size in (None, 8) for _, size in spans)
    assert all(
        after == before or after >= before + 8 for before, after in itertools.pairwise(starts)
    )


def test_summarize_model_of_large_external_weights_uses_little_memory(tmp_path: Path) -> None:
    """Three gigabytes of weights are a sparse file, which takes no space on the disk.

    Python uses less than 32 MB for it.
    """
    weights = external(W, ("length", str(3 << 30)), size=3 << 28)
    path = write_with(tmp_path, weights)
    with (tmp_path / "w").open("r+b") as stream:
        stream.truncate(3 << 30)
    code = (
        "import resource, sys; from pathlib import Path; from onnx_ops.onnx_graph.model_summary "
        "import summarize_model;"
        "import onnx.checker, onnx.shape_inference; "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); found = summarize_model(Path(sys.argv[1])); "
        "print(found.info.size_bytes, peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    size, kilobytes = map(int, done.stdout.split())
    assert size > 3 << 30
    assert kilobytes < 32 << 10
