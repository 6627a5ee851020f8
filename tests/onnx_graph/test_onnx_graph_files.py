"""ONNX files: locations of their weights, their metadata, and refused files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from onnx_ops.domain.artifact import TensorSpec, digest_file
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError, OnnxOpsError, RefusedError, UserError
from onnx_ops.onnx_graph import files
from onnx_ops.onnx_graph.compatibility import (
    check_model,
    explain_incompatibility,
    explain_non_tensors,
    explain_version_limits,
    is_unsafe_without_rows,
    list_user_model_notes,
)
from onnx_ops.onnx_graph.files import (
    list_shape_nodes,
    read_model,
    read_structure,
    resolve_external_files,
    share_structure,
    write_model,
)
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.instrumentation import list_computed_values, write_with_outputs
from onnx_ops.onnx_graph.model_info import (
    count_operators,
    read_lineage,
    read_model_info,
    write_copy,
    write_lineage,
)
from onnx_ops.onnx_graph.model_kind import read_candidate_kind
from onnx_ops.onnx_graph.quantized_activations import find_bounded_values, find_folded_values
from onnx_ops.onnx_graph.rewrites import (
    flatten_biases,
    read_boundary_types,
    rename_values,
    renumber_names,
    restore_metadata,
    trace_nodes,
    write_with_boundary_casts,
)
from onnx_ops.onnx_graph.tree_ensembles import has_trees
from onnx_ops.testing.models import CLASSES, FEATURES, write_perceptron
from tests.support.external import write_external
from tests.support.graphs import parse_graph, write_graph


def test_read_model_info_returns_versions_inputs_outputs_and_size(perceptron: Path) -> None:
    found = read_model_info(perceptron)
    assert found.ir_version == 10
    assert found.opsets == {"": 18}
    assert found.inputs == (TensorSpec(name="x", dtype="float32", shape=("batch", FEATURES)),)
    assert found.outputs == (TensorSpec(name="scores", dtype="float32", shape=("batch", CLASSES)),)
    assert found.nodes == 6
    assert found.size_bytes == perceptron.stat().st_size


def test_read_model_info_and_read_model_of_external_weights_include_them(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_external(path, "weights.bin")
    assert read_model_info(path).size_bytes == path.stat().st_size + 8
    assert [entry.name for entry in resolve_external_files(read_structure(path), tmp_path)] == [
        "weights.bin"
    ]
    factor = read_model(path).graph.initializer[0]
    np.testing.assert_array_equal(numpy_helper.to_array(factor), np.array([2, 3], dtype=np.float32))


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../secret", "a/../../secret", "..", "", "..\\secret", "C:\\secret", "link"],
)
def test_read_of_external_weights_at_unsafe_location_raises_refused_error(
    tmp_path: Path, location: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"\0" * 8)
    (folder / "link").symlink_to(tmp_path / "secret")
    path = folder / "model.onnx"
    if location != "link":
        write_external(path, location)
    else:
        write_external(path, "weights.bin")
        path.write_bytes(path.read_bytes().replace(b"weights.bin", b"./././/link"))
    for read in (read_model_info, check_model, read_model, read_lineage):
        with pytest.raises(RefusedError, match="not a plain path inside the model's folder"):
            read(path)
    with pytest.raises(RefusedError, match="not a plain path inside the model's folder"):
        write_with_outputs(path, ["y"], path.with_name("copy.onnx"))


def test_share_structure_after_change_parses_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SETTLED_NS", 0)
    path = tmp_path / "model.onnx"
    write_external(path, "weights.bin")
    first = share_structure(path)
    assert share_structure(path) is first
    write_lineage(path, {"seed": "7"})
    assert {prop.key: prop.value for prop in share_structure(path).metadata_props} == {"seed": "7"}
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(NotFoundError, match=r"weights\.bin"):
        share_structure(path)


def test_share_structure_of_recently_written_file_parses_it_each_time(perceptron: Path) -> None:
    # A second write could have the same time as this write.
    write_lineage(perceptron, {"seed": "7"})
    assert share_structure(perceptron) is not share_structure(perceptron)


@pytest.mark.parametrize("settled_ns", [0, 10**18])
def test_share_structure_of_damaged_file_names_path_of_caller(
    settled_ns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SETTLED_NS", settled_ns)
    monkeypatch.chdir(tmp_path)
    Path("garbage.onnx").write_bytes(bytes(range(256)) * 20)
    with pytest.raises(UserError) as raised:
        share_structure(Path("garbage.onnx"))
    assert raised.value.where == "garbage.onnx"


SHARING: tuple[Callable[[Path], object], ...] = (
    explain_non_tensors,
    find_bounded_values,
    find_folded_values,
    has_trees,
    is_unsafe_without_rows,
    list_computed_values,
    list_user_model_notes,
    read_boundary_types,
    read_input_bounds,
    read_lineage,
    read_model_info,
    lambda path: count_operators(share_structure(path)),
    lambda path: explain_incompatibility(path, Target(name="cpu", providers=())),
    lambda path: list_shape_nodes(share_structure(path)),
    lambda path: read_candidate_kind(path, path),
    lambda path: write_with_boundary_casts(
        path, {"x": onnx.TensorProto.FLOAT16}, path.with_name("cast.onnx")
    ),
)


@pytest.mark.parametrize("read", SHARING)
def test_shared_structure_after_read_is_unchanged(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SETTLED_NS", 0)
    path = write_graph(
        tmp_path / "model.onnx",
        "(float[?, 4] x, int64[?] i) => (float[?, 4] y)"
        "{ r = Relu(x) t = Abs(table) e = Gather(t, i) s = Shape(x) f = Expand(r, s) "
        "y = Add(f, e) }",
        table=np.ones((3, 4), dtype=np.float32),
    )
    shared = share_structure(path)
    before = shared.SerializeToString(deterministic=True)
    read(path)
    assert share_structure(path) is shared
    assert shared.SerializeToString(deterministic=True) == before


def test_read_model_info_of_missing_file_or_weights_raises_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_model_info(tmp_path / "none.onnx")
    path = tmp_path / "model.onnx"
    write_external(path, "weights.bin")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(NotFoundError, match=r"weights\.bin"):
        read_model_info(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_read_of_damaged_file_raises_only_project_errors(
    perceptron: Path, data: st.DataObject
) -> None:
    good = perceptron.parent / "good.onnx"
    if not good.exists():
        good.write_bytes(perceptron.read_bytes())
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    perceptron.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    for read in (read_model_info, check_model):
        with contextlib.suppress(OnnxOpsError):
            read(perceptron)


def no_outputs(model: onnx.ModelProto) -> None:
    model.graph.ClearField("output")


def unknown_input(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nobody"


def unfit_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = FEATURES + 1


@pytest.mark.parametrize(
    ("change", "why"),
    [(no_outputs, "no outputs"), (unknown_input, "nobody"), (unfit_shape, "ShapeInferenceError")],
)
def test_check_model_of_invalid_graph_raises_user_error_with_reason(
    perceptron: Path, change: Callable[[onnx.ModelProto], None], why: str
) -> None:
    model = onnx.load(perceptron)
    change(model)
    perceptron.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=f"not valid ONNX.*{why}") as caught:
        check_model(perceptron)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("opset", "ir_version", "word"),
    [(18, 10, ""), (21, 10, "set export.opset: 18"), (18, 11, "set export.ir_version: 10")],
)
def test_explain_version_limits_names_remedy_only_beyond_limits(
    tmp_path: Path, opset: int, ir_version: int, word: str
) -> None:
    path = write_perceptron(tmp_path / "model.onnx", opset=opset, ir_version=ir_version)
    reason = explain_version_limits(
        read_model_info(path), Target(name="old", max_opset=18, max_ir_version=10)
    )
    assert word in reason
    assert bool(reason) is bool(word)


def test_write_lineage_with_entries_in_other_order_writes_same_bytes(
    perceptron: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(perceptron.read_bytes())
    write_lineage(perceptron, {"b": "2", "a": "1"})
    write_lineage(other, {"a": "0"})
    write_lineage(other, {"b": "2", "a": "1"})
    assert read_lineage(perceptron) == {"a": "1", "b": "2", "origin": "testing"}
    assert digest_file(perceptron) == digest_file(other)


def test_write_lineage_leaves_external_weights_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_external(path, "weights.bin")
    before = digest_file(tmp_path / "weights.bin")
    write_lineage(path, {"release": "r"})
    assert digest_file(tmp_path / "weights.bin") == before
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "weights.bin"]
    assert read_lineage(path) == {"release": "r"}


def test_write_model_with_large_weights_stores_them_externally(
    perceptron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "EXTERNAL_LIMIT", 500)
    model = read_model(perceptron)
    weights = [numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer]
    large = tmp_path / "large" / "model.onnx"
    large.parent.mkdir()
    write_model(model, large)
    assert "model.onnx.data" in os.listdir(large.parent)
    for tensor, expected in zip(read_model(large).graph.initializer, weights, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), expected)


def test_restore_metadata_of_derived_model_matches_source(perceptron: Path) -> None:
    source, derived = read_model(perceptron), read_model(perceptron)
    derived.ir_version = 13
    derived.metadata_props.add(key="tool", value="was here")
    derived.graph.value_info.add(name="first.sum")
    derived.opset_import.add(domain="unused", version=3)
    restore_metadata(derived, source)
    assert derived.SerializeToString(deterministic=True) == source.SerializeToString(
        deterministic=True
    )


def test_flatten_biases_makes_unshared_row_biases_vectors() -> None:
    rows: dict[str, Any] = {name: np.ones((1, 4), np.float32) for name in ("own", "shared")}
    nodes = "a = Gemm(x, w, own) b = Gemm(a, w, shared) y = Add(b, shared)"
    model = parse_graph(f"(float x) => (float y) {{ {nodes} }}", **rows)
    flatten_biases(model)
    assert [list(tensor.dims) for tensor in model.graph.initializer] == [[4], [1, 4]]


def test_renumber_names_numbers_and_orders_weights_by_first_use() -> None:
    made = []
    for first, second in (("w__7", "w__3"), ("w__3", "w__7")):
        weights: dict[str, Any] = dict(
            sorted({first: np.float32(1), second: np.float32(2)}.items())
        )
        text = f"(float x) => (float y) {{ h = Add(x, {first}) y = Mul(h, {second}) }}"
        made.append(parse_graph(text, **weights))
        renumber_names(made[-1], r"__(\d+)")
    assert made[0] == made[1]
    assert [weight.name for weight in made[0].graph.initializer] == ["w__0", "w__1"]
    assert [float(numpy_helper.to_array(weight)) for weight in made[0].graph.initializer] == [
        1.0,
        2.0,
    ]


def test_rename_values_in_branches_renames_captured_values_only() -> None:
    """The last branch defines a value whose name is also that of an input of the graph."""
    captured = "a () => (v) { v = Neg(x) }"
    nested = f"b () => (w) {{ w = If<then_branch = {captured}, else_branch = {captured}>(c) }}"
    defined = "d () => (z) { x = Relu(s) z = Neg(x) }"
    text = f"(float x, float s, bool c) => (float y) {{ y = If<then_branch = {nested}"
    model = parse_graph(f"{text}, else_branch = {defined}>(c) }}")
    rename_values(model.graph, {"x": "value", "c": "condition", "y": "result"})
    (outer,) = model.graph.node
    assert [*outer.input, *outer.output] == ["condition", "result"]
    then_branch, else_branch = (attribute.g for attribute in outer.attribute)
    (inner,) = then_branch.node
    assert list(inner.input) == ["condition"]
    assert [list(a.g.node[0].input) for a in inner.attribute] == [["value"], ["value"]]
    assert [list(node.input) for node in else_branch.node] == [["s"], ["x"]]


def test_renumber_names_in_branches_keeps_names_distinct() -> None:
    made = []
    for first in (3, 40):
        one, other, last = f"t_{first}", f"t_{first + 5}", f"t_{first + 9}"
        branch = f"a () => ({last}) {{ {last} = Identity({other}) }}"
        nodes = f"[t] {one} = Relu(x) [{one}_relu] {other} = Relu({one})"
        text = f"{nodes} y = If<then_branch = {branch}, else_branch = {branch}>(c)"
        made.append(parse_graph(f"(float x, bool c) => (float y) {{ {text} }}"))
        renumber_names(made[-1], r"t_(\d+)")
    assert made[0] == made[1]
    nodes = made[0].graph.node
    assert nodes[0].output[0] == nodes[1].input[0] != nodes[1].output[0]
    inner = nodes[2].attribute[0].g.node[0]
    assert inner.input[0] == nodes[1].output[0]
    assert inner.output[0] not in (nodes[0].output[0], nodes[1].output[0])


def test_count_operators_names_version_of_operator_definition() -> None:
    domains = {"com.microsoft": 1, "ai.onnx.ml": 3, "acme": 1}
    nodes = (
        "a = Relu(x) b = Relu(a) c = com.microsoft.Gelu(b) d = ai.onnx.ml.Scaler(c) y = acme.Own(d)"
    )
    function = '<domain: "acme", opset_import: ["" : 18]> Own (x) => (y) { y = Relu(x) }'
    model = parse_graph(
        f"(float[1] x) => (float[1] y) {{ {nodes} }} {function}", opset=13, domains=domains
    )
    counts = {"Relu-13": 3, "acme::Own": 1, "ai.onnx.ml::Scaler-1": 1, "com.microsoft::Gelu": 1}
    assert count_operators(model) == counts


@pytest.mark.parametrize(
    ("head", "remedy"),
    [
        (b"\x1f\x8b\x08", "gunzip"),
        (b"PK\x03\x04", "zip archive"),
        (b"\x80\x04\x95", "pickle"),
        (b"\x89HDF\r\n", "HDF5"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"", "is empty"),
        (b"\x08\x00 text", "copied completely"),
    ],
)
def test_read_structure_of_other_file_type_raises_user_error_with_remedy(
    tmp_path: Path, head: bytes, remedy: str
) -> None:
    (tmp_path / "model.onnx").write_bytes(head + bytes(40) * bool(head))
    with pytest.raises(UserError) as caught:
        read_structure(tmp_path / "model.onnx")
    assert remedy in caught.value.remedy


def test_write_model_writes_operator_sets_once_and_sorted(perceptron: Path) -> None:
    model = read_model(perceptron)
    model.opset_import.insert(0, helper.make_opsetid("own", 1))
    model.opset_import.add(domain="", version=18)
    write_model(model, perceptron)
    assert [(entry.domain, entry.version) for entry in read_model(perceptron).opset_import] == [
        ("", 18),
        ("own", 1),
    ]


def test_list_shape_nodes_returns_nodes_computed_from_shapes_only() -> None:
    model = parse_graph(
        """(float[batch, 4] x, int64[1] more) => (float[n, m] y, float[batch, 4] z) {
        shape = Shape(x) one = Constant<value_ints = [1]>() first = Slice(shape, zero, one)
        sizes = Concat<axis = 0>(first, rest) data = Concat<axis = 0>(first, more)
        y = Reshape(x, sizes) z = Add(x, x) w = Reshape(x, data) }""",
        zero=np.array([0]),
        rest=np.array([4]),
    )
    for node in model.graph.node:
        node.name = node.output[0]
    assert list_shape_nodes(model) == {"shape", "first", "sizes"}


def test_read_model_with_git_lfs_pointer_as_weights_raises_refused_error(tmp_path: Path) -> None:
    write_external(tmp_path / "m.onnx", "weights.bin")
    (tmp_path / "weights.bin").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9\n" * 99
    )
    with pytest.raises(RefusedError, match=r"'weights\.bin' is a pointer of Git LFS") as caught:
        read_model(tmp_path / "m.onnx")
    assert caught.value.remedy == "Run `git lfs install`, then `git lfs pull`."


@pytest.mark.parametrize(
    ("values", "option"),
    [({"license": "MIT"}, "--set version=1"), ({"version": "1.2"}, "--set release=1.2")],
)
def test_write_copy_with_invalid_version_names_option_that_helps(
    values: dict[str, str], option: str, tmp_path: Path
) -> None:
    model = read_model(write_perceptron(tmp_path / "model.onnx"))
    model.model_version = -1
    write_model(model, tmp_path / "model.onnx")
    with pytest.raises(UserError, match="is not a whole number") as caught:
        write_copy(tmp_path / "model.onnx", tmp_path / "copy.onnx", values)
    assert option in caught.value.remedy


@pytest.mark.parametrize(
    ("node", "remedy"),
    [("[own] y = Relu(x)", "--exclude` of `onnx-ops quantize"), ("y = Relu(x)", "name them first")],
)
def test_trace_nodes_of_unknown_name_names_remedy_that_helps(node: str, remedy: str) -> None:
    model = parse_graph(f"(float[N,2] x) => (float[N,2] y) {{ {node} }}")
    with pytest.raises(UserError, match=r"there are (own|none)") as caught:
        trace_nodes(["zzz"], model, model)
    assert remedy in caught.value.remedy
