"""Rows and requests of models with state, scalars and graph edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.onnx_graph.input_bounds import InputBounds, read_input_bounds
from onnx_ops.tools.compare import REFERENCE, ParityResult, compare
from onnx_ops.tools.generated_rows import generate_samples, settle_samples
from onnx_ops.tools.model_inputs import shared_inputs
from onnx_ops.tools.sample_rows import SampleRows, build_groups
from onnx_ops.tools.supplied_rows import check_samples
from tests.support.graphs import write_graph
from tests.support.voice import FAULTS, HIDDEN, RATES, make_voice_rows, write_voice_detector

CPU = TargetFiles(PROFILES).load("cpu-1t")
RUNTIME = OnnxRuntime()

GRAPH = """
(float[num_nodes,3] x, int64[2,num_edges] edges) => (float[n,3] y) {{
    source = Gather<axis = 0>(edges, zero)
    chosen = {chosen}
    messages = Gather<axis = 0>(x, chosen)
    y = Tanh(messages)
}}
"""

NETWORK = """
(float[{nodes},3] x, int64[2,{edges}] edge_index, float[{edges},1] edge_weight) => (float[n,2] y) {{
    {before}
    source = Gather<axis = 0>({index}, zero)
    target = Gather<axis = 0>({index}, one)
    values = MatMul({rows}, first)
    messages = Gather<axis = 0>(values, source)
    weighted = Mul(messages, {weight})
    shape = Shape(weighted)
    upright = Unsqueeze(target, axis)
    places = Expand(upright, shape)
    empty = Mul(values, nothing)
    sums = ScatterElements<axis = 0, reduction = "add">(empty, places, weighted)
    state = Tanh(sums)
    y = MatMul(state, second)
}}
"""
"""A network of message passing over a graph.

`before` computes the value that is read in place of an input.
"""

NETWORK_FAULTS = {
    "indices up to 1": ("index", "Min(edge_index, one)"),
    "indices up to 4": ("index", "Min(edge_index, four)"),
    "direction of edges": ("index", "Slice(edge_index, last, beyond, first_axis, last)"),
    "edges of node 0": ("index", "Mul(edge_index, zero)"),
    "nodes in another order": ("rows", "Slice(x, last, beyond, first_axis, last)"),
    "weight of edge 0": ("weight", "Gather<axis = 0>(edge_weight, first_axis)"),
    "weights in another order": ("weight", "Slice(edge_weight, last, beyond, first_axis, last)"),
}


def write_network(
    path: Path,
    fault: str = "",
    *,
    opset: int = 18,
    nodes: str = "num_nodes",
    edges: str = "num_edges",
) -> Path:
    """Write the graph network of a fixed seed, with one fault."""
    draw = np.random.default_rng(7)
    readers = {"index": "edge_index", "rows": "x", "weight": "edge_weight", "before": ""}
    if fault:
        reader, change = NETWORK_FAULTS[fault]
        readers |= {reader: "changed", "before": f"changed = {change}"}
    numbers = {
        "zero": 0,
        "one": 1,
        "four": 4,
        "axis": [1],
        "last": [-1],
        "beyond": [-(1 << 30)],
        "first_axis": [0],
    }
    weights = {
        "first": draw.standard_normal((3, 5)),
        "second": draw.standard_normal((5, 2)),
        "nothing": 0,
    }
    constants: dict[str, Any] = {name: np.array(value, np.int64) for name, value in numbers.items()}
    constants |= {name: np.array(value, np.float32) for name, value in weights.items()}
    return write_graph(
        path, NETWORK.format(**readers, nodes=nodes, edges=edges), opset=opset, **constants
    )


def samples_of(model: Path, **options: Any) -> SampleRows:
    return generate_samples(
        shared_inputs(model), count=40, dims={}, bounds=read_input_bounds(model), **options
    )


def compared(a: Path, b: Path, samples: SampleRows | None = None) -> ParityResult:
    samples = samples or settle_samples(RUNTIME, REFERENCE, a, samples_of(a))
    return compare(RUNTIME, CPU, a, b, samples)


@pytest.fixture
def voice(tmp_path: Path) -> Path:
    return write_voice_detector(tmp_path / "voice.onnx")


@pytest.mark.parametrize(
    "names", [("N", "N"), ("unk__1", "unk__2")], ids=["one name", "generated names"]
)
@pytest.mark.parametrize("fault", ["", *FAULTS, "other branch"])
def test_compare_of_voice_detector_fails_for_each_fault_and_passes_for_copy(
    fault: str, names: tuple[str, str], tmp_path: Path
) -> None:
    rows, state_rows = names
    a = write_voice_detector(tmp_path / "a.onnx", rows=rows, state_rows=state_rows)
    b = write_voice_detector(tmp_path / "b.onnx", fault, other_slow_branch=fault == "other branch")
    assert compared(a, b).verdict is (Verdict.FAIL if fault else Verdict.PASS)


def test_generate_samples_varies_state_and_groups_set_scalar_to_each_constant(voice: Path) -> None:
    samples = samples_of(voice)
    assert samples.axes == {"input": 0, "state": 1}
    assert samples.rows["state"].shape == (40, 2, HIDDEN)
    assert len(np.unique(samples.rows["state"], axis=0)) == 40
    assert samples.fixed["sr"] == RATES[0]
    runs = {group.name: group.runs[0] for group in build_groups(samples)}
    assert runs["values:sr=8000"]["sr"] == RATES[1]


def test_check_samples_reads_rows_from_axis_named_by_model(voice: Path) -> None:
    rows = make_voice_rows(60)
    samples = check_samples(
        shared_inputs(voice), rows, where="rows.npz", limit=50, fix={"sr": 8000}
    )
    np.testing.assert_array_equal(samples.rows["state"], np.moveaxis(rows["state"], 1, 0)[:50])
    assert samples.fixed == {"sr": 8000}
    assert compared(voice, voice, samples).verdict is Verdict.PASS
    with_scalar = check_samples(
        shared_inputs(voice), {**rows, "sr": np.array(8000)}, where="rows.npz", limit=50
    )
    assert with_scalar.fixed["sr"].shape == ()
    assert with_scalar.fixed == samples.fixed


def test_check_samples_without_dimension_names_infers_row_axis(tmp_path: Path) -> None:
    path = write_voice_detector(tmp_path / "m.onnx", rows="unk__1", state_rows="unk__2")
    samples = check_samples(
        shared_inputs(path), make_voice_rows(40), where="rows.npz", limit=30, fix={"sr": 8000}
    )
    assert (samples.axes, len(samples)) == ({"input": 0, "state": 1}, 30)
    assert compared(path, path, samples).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"sr": np.array(8000), "state": np.zeros((2, 59, HIDDEN), np.float32)},
            "different numbers of rows",
        ),
        ({"state": np.zeros((60, 2, HIDDEN), np.float32)}, "has shape"),
        ({}, "no array 'sr'"),
    ],
    ids=["fewer rows", "rows first", "no rate"],
)
def test_check_samples_with_wrong_rows_or_missing_scalar_raises_user_error(
    voice: Path, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        check_samples(
            shared_inputs(voice), {**make_voice_rows(60), **change}, where="rows.npz", limit=50
        )
    if not change:
        assert "--fix sr=VALUE" in caught.value.remedy


def test_generate_samples_with_value_for_unknown_input_raises_user_error(voice: Path) -> None:
    with pytest.raises(UserError, match="no input is called 'rate'") as caught:
        samples_of(voice, fix={"rate": 8000})
    assert caught.value.where == "--fix"


def test_settle_samples_without_accepted_values_raises_measurement_error(tmp_path: Path) -> None:
    text = (
        "(float[n,4] x, int64 parts) => (float[n,m] y) {{ shape = Mul(parts, five) "
        "y = Reshape(x, shape) }}"
    )
    path = write_graph(tmp_path / "m.onnx", text.replace("{{", "{").replace("}}", "}"), five=[0, 7])
    with pytest.raises(MeasurementError, match="refuses the generated inputs") as caught:
        settle_samples(RUNTIME, REFERENCE, path, samples_of(path))
    assert "--fix parts=VALUE" in caught.value.remedy


@pytest.mark.parametrize("chosen", ["Min(source, one)", "Min(source, six)", "Identity(source)"])
def test_generated_indices_reach_each_node_of_graph(chosen: str, tmp_path: Path) -> None:
    constants = {"zero": np.int64(0), "one": np.int64(1), "six": np.int64(6)}
    a = write_graph(tmp_path / "a.onnx", GRAPH.format(chosen="Identity(source)"), **constants)
    b = write_graph(tmp_path / "b.onnx", GRAPH.format(chosen=chosen), **constants)
    assert read_input_bounds(a)["edges"].tables == ("num_nodes",)
    assert compared(a, b).verdict is (Verdict.PASS if "Identity" in chosen else Verdict.FAIL)


def test_generate_samples_varies_size_of_free_dimension_unless_it_is_given(tmp_path: Path) -> None:
    path = write_graph(
        tmp_path / "m.onnx", "(float[batch,seq,4] x) => (float[batch,seq,4] y) { y = Relu(x) }"
    )
    runs = {group.name: group.runs[0] for group in build_groups(samples_of(path))}
    sizes = {name: run["x"].shape[1] for name, run in runs.items() if name.startswith("lengths:")}
    assert sizes == {f"lengths:seq={size}": size for size in (1, 2, 3, 17)}
    asked = generate_samples(shared_inputs(path), count=4, dims={"seq": 5})
    assert (asked.further, asked.rows["x"].shape) == ({}, (4, 5, 4))


def test_generate_samples_with_batch_dimension_uses_given_size(tmp_path: Path) -> None:
    text = "(float[batch,seq,4] x, float[1,batch,8] h) => (float[batch,seq,4] y) { y = Relu(x) }"
    samples = generate_samples(
        shared_inputs(write_graph(tmp_path / "m.onnx", text)), count=10, dims={"batch": 3, "seq": 2}
    )
    assert (samples.batch, samples.rows["h"].shape) == (3, (10, 1, 8))


def test_generate_samples_with_unnamed_rows_uses_equal_and_different_sizes() -> None:
    specs = [TensorSpec(name=name, dtype="float32", shape=("?", 2)) for name in ("a", "b")]
    samples = generate_samples(specs, count=8, dims={})
    apart = samples.further["lengths:a[0]=3,b[0]=17"]
    assert {name: len(array) for name, array in samples.rows.items()} == {"a": 8, "b": 8}
    assert {name: len(array) for name, array in apart.items()} == {"a": 3, "b": 17}


def test_check_samples_of_independent_sizes_returns_single_request() -> None:
    specs = [
        TensorSpec(name=name, dtype="float32", shape=(f"num_{name}", 2)) for name in ("a", "b")
    ]
    arrays = {"a": np.zeros((5, 2)), "b": np.zeros((9, 2))}
    samples = check_samples(specs, arrays, where="rows.npz", limit=100)
    assert (samples.rows, {name: len(array) for name, array in samples.fixed.items()}) == (
        {},
        {"a": 5, "b": 9},
    )


@pytest.mark.parametrize("fault", NETWORK_FAULTS)
def test_compare_of_graph_network_with_fault_fails(fault: str, tmp_path: Path) -> None:
    a, b = write_network(tmp_path / "a.onnx"), write_network(tmp_path / "b.onnx", fault)
    assert compared(a, b).verdict is Verdict.FAIL


def test_compare_of_graph_network_with_equivalent_copies_passes(tmp_path: Path) -> None:
    a = write_network(tmp_path / "a.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(a), options, providers=["CPUExecutionProvider"])
    copies = (
        write_network(tmp_path / "names.onnx", nodes="unk__1", edges="unk__2"),
        write_network(tmp_path / "opset.onnx", opset=20),
        Path(options.optimized_model_filepath),
    )
    assert [compared(a, copy).verdict for copy in copies] == [Verdict.PASS] * 3


def test_settle_samples_finds_dimension_that_is_sum_of_others(tmp_path: Path) -> None:
    text = """
        (float[batch,seq,4] x, float[batch,past,4] cache, float[batch,total] mask) => (float[a,b,4] y)
        { keys = Concat<axis = 1>(cache, x) weights = Unsqueeze(mask, last) y = Mul(keys, weights) }
    """  # noqa: E501
    a = write_graph(tmp_path / "a.onnx", text, last=[2])
    samples = settle_samples(RUNTIME, REFERENCE, a, samples_of(a))
    sizes = {name: array.shape[1] for name, array in samples.rows.items()}
    assert sizes["mask"] == sizes["x"] + sizes["cache"]
    found = compared(a, a, samples)
    assert found.verdict is Verdict.PASS
    assert "lengths:" in found.notes[0]


@pytest.mark.parametrize("table", ["x[1]", "?"])
def test_generate_samples_with_indices_into_unnamed_rows_uses_range_of_that_dimension(
    table: str,
) -> None:
    inputs = (
        TensorSpec(name="x", dtype="float32", shape=("?", "?", 4)),
        TensorSpec(name="place", dtype="int64", shape=("?",)),
    )
    samples = generate_samples(
        inputs, count=64, dims={}, bounds={"place": InputBounds(tables=(table,))}
    )
    runs = [samples.rows, *samples.further.values()]
    assert all(run["place"].max() < run["x"].shape[1] for run in runs)
    assert max(run["place"].max() for run in runs) > 4


@pytest.mark.parametrize(
    ("dims", "fewest"), [({"E": 17}, 1), ({"E": 17, "N": 9}, 9), ({"N": 3, "E": 1}, 3)]
)
def test_generate_samples_keeps_indices_of_rows_valid_in_each_run(
    dims: dict[str, int], fewest: int
) -> None:
    inputs = (
        TensorSpec(name="x", dtype="float32", shape=("N", 4)),
        TensorSpec(name="edges", dtype="int64", shape=(2, "E")),
    )
    samples = generate_samples(
        inputs, count=64, dims=dims, bounds={"edges": InputBounds(tables=("N",))}
    )
    assert samples.fixed["edges"].shape == (2, dims["E"])
    assert samples.fixed["edges"].max() < fewest
    assert all(run["edges"].max() < len(run["x"]) for run in samples.further.values())
    assert max(run["edges"].max() for run in samples.further.values()) > 0
