"""Models whose inputs are not all rows: state, scalars, graph edges, independent sizes; their right and wrong copies.

Each model is drawn anew: its architecture, sizes, weights, and the names of its free dimensions. `judge` compares it
with copies that compute the same (renamed, optimized by ONNX Runtime, of another opset, with other names of dimensions)
and with wrong ones: a state of another row, exchanged inputs, indices that are cut off, a length that is, a scalar that
is ignored, another branch. A wrong copy counts if its answers differ by more than 1 % on requests that the architecture
itself makes, which the judge does not see.

    python -m benchmarks.foreign_requests --models 60

The seed is new in each run and printed. The script ends with 1 if a wrong copy passes, or more than 2 % of the right
copies do not.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.foreign_copies import differ, run_model
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.targets import PROFILES, TargetFiles
from onnx_ops.errors import OnnxOpsError
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.tools.compare import REFERENCE, compare
from onnx_ops.tools.generated_rows import generate_samples, settle_samples
from onnx_ops.tools.model_inputs import shared_inputs

Draw = np.random.Generator
Feed = dict[str, Any]
Inputs = dict[str, tuple[int, Sequence[int | str]]]
Change = Callable[[onnx.ModelProto], None]

_RUNTIME, _TARGET = OnnxRuntime(), TargetFiles(PROFILES).load("cpu-1t")
_MOST_REFUSED = 0.02
_REQUESTS = 6
"""Requests on which a wrong copy must differ from the model."""


@dataclass(slots=True)
class Sketch:
    """A graph under construction, with its weights."""

    draw: Draw
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    def weight(self, *shape: int, scale: float = 0.5) -> str:
        """Return the name of new random weights."""
        return self.constant((self.draw.standard_normal(shape) * scale).astype(np.float32))

    def constant(self, value: Any) -> str:
        """Return the name of a new constant."""
        name = f"constant_{len(self.weights)}"
        self.weights[name] = np.asarray(value)
        return name

    def add(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node and return its first output."""
        names = list(outputs) or [f"value_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0]

    def model(self, inputs: Inputs, outputs: Mapping[str, int]) -> onnx.ModelProto:
        """Return the model; its outputs have a rank, and no names of dimensions, as many exporters write them."""
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in outputs.items()],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model)
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A model, what makes requests that it takes, and wrong changes by name."""

    kind: str
    model: onnx.ModelProto
    feed: Callable[[Draw], Feed]
    wrong: Mapping[str, Change]


def _floats(draw: Draw, *shape: int) -> Any:
    return draw.standard_normal(shape).astype(np.float32)


def _names(draw: Draw, *symbols: str) -> list[str]:
    """Return the symbols as exporters write them: as they are, without a name, or generated one by one."""
    style = draw.choice(["named", "named", "named", "unnamed", "generated"])
    if style == "unnamed":
        return ["" for _ in symbols]
    return list(symbols) if style == "named" else [f"unk__{draw.integers(1000)}" for _ in symbols]


def tamper(name: str, make: Callable[[Sketch, str], str]) -> Change:
    """Return a change after which all readers of an input get what `make` computes from it."""

    def change(model: onnx.ModelProto) -> None:
        sketch = Sketch(np.random.default_rng(0))
        given = f"{name}_given"
        value = make(sketch, given)
        for node in _all_nodes(model.graph):
            node.input[:] = [f"tampered_{value}" if one == name else one for one in node.input]
        prefix = "tampered_"
        for node in sketch.nodes:
            node.input[:] = [one if one == given else prefix + one for one in node.input]
            node.output[:] = [prefix + one for one in node.output]
        for node in sketch.nodes:
            node.input[:] = [name if one == given else one for one in node.input]
        for number, node in enumerate(sketch.nodes):
            model.graph.node.insert(number, node)
        model.graph.initializer.extend(numpy_helper.from_array(v, prefix + n) for n, v in sketch.weights.items())

    return change


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g)


def first_row(name: str, axis: int) -> Change:
    """Every row gets the input of row 0."""

    def make(sketch: Sketch, value: str) -> str:
        first = _cut(sketch, value, axis, 1)
        return sketch.add("Expand", first, sketch.add("Shape", value))

    return tamper(name, make)


def next_row(name: str, axis: int) -> Change:
    """Every row gets the input of the next one."""

    def make(sketch: Sketch, value: str) -> str:
        ends = [sketch.constant(np.array([one], np.int64)) for one in (1, 1 << 30, axis)]
        later = sketch.add("Slice", value, *ends)
        return sketch.add("Concat", later, _cut(sketch, value, axis, 1), axis=axis)

    return tamper(name, make)


def cut(name: str, axis: int, size: int) -> Change:
    """Entries from `size` on are lost."""
    return tamper(name, lambda sketch, value: _cut(sketch, value, axis, size))


def _cut(sketch: Sketch, value: str, axis: int, size: int) -> str:
    return sketch.add("Slice", value, *(sketch.constant(np.array([one], np.int64)) for one in (0, size, axis)))


def flip(name: str, axis: int) -> Change:
    """The entries of an axis are read backwards."""
    ends = (-1, -(1 << 30), axis, -1)
    return tamper(
        name,
        lambda sketch, value: sketch.add("Slice", value, *(sketch.constant(np.array([one], np.int64)) for one in ends)),
    )


def ignore(name: str) -> Change:
    """The input is taken for zeros."""
    return tamper(name, lambda sketch, value: sketch.add("Mul", value, sketch.constant(np.float32(0))))


def at_most(name: str, limit: int) -> Change:
    """Indices above a limit are cut off."""
    return tamper(name, lambda sketch, value: sketch.add("Min", value, sketch.constant(np.int64(limit))))


def always(name: str, value: Any) -> Change:
    """A scalar is taken for a constant."""
    return tamper(name, lambda sketch, _: sketch.constant(value))


def exchange(first: str, second: str) -> Change:
    """Two inputs are taken for each other."""

    def change(model: onnx.ModelProto) -> None:
        other = {first: second, second: first}
        for node in _all_nodes(model.graph):
            node.input[:] = [other.get(one, one) for one in node.input]

    return change


def _lstm(draw: Draw) -> Specimen:
    """A recurrent layer with its state as inputs: x [batch, seq, d], h0 and c0 [1, batch, h]."""
    width, hidden = (int(draw.integers(3, 9)) for _ in range(2))
    time_first = bool(draw.integers(2))
    s = Sketch(draw)
    x = "x" if time_first else s.add("Transpose", "x", perm=[1, 0, 2])
    weights = s.weight(1, 4 * hidden, width), s.weight(1, 4 * hidden, hidden), s.weight(1, 8 * hidden)
    s.add("LSTM", x, *weights, "", "h0", "c0", outputs=["ys", "hn", "cn"], hidden_size=hidden)
    s.add("Tanh", s.add("MatMul", "hn", s.weight(hidden, 2)), outputs=["y"])
    batch, length, again, other = _names(draw, "batch", "seq", "batch", "batch")
    shape = (length, batch, width) if time_first else (batch, length, width)
    kind, rows, time = TensorProto.FLOAT, int(time_first), 1 - int(time_first)
    inputs: Inputs = {"x": (kind, shape), "h0": (kind, (1, again, hidden)), "c0": (kind, (1, other, hidden))}

    def feed(r: Draw) -> Feed:
        n, t = int(r.integers(2, 9)), int(r.integers(2, 30))
        sizes = (t, n, width) if time_first else (n, t, width)
        return {"x": _floats(r, *sizes), "h0": _floats(r, 1, n, hidden), "c0": _floats(r, 1, n, hidden)}

    wrong = {
        "state of row 0": first_row("h0", 1),
        "state of the next row": next_row("c0", 1),
        "states exchanged": exchange("h0", "c0"),
        "state ignored": ignore("c0"),
        "length cut at 16": cut("x", time, 16),
        "length cut at 2": cut("x", time, 2),
        "read backwards": flip("x", time),
        "rows exchanged": next_row("x", rows),
    }
    return Specimen(kind="LSTM with state", model=s.model(inputs, {"y": 3, "hn": 3, "cn": 3}), feed=feed, wrong=wrong)


def _gru(draw: Draw) -> Specimen:
    """Both directions of a recurrent layer: x [N, T, d], state [2, N, h]."""
    width, hidden = (int(draw.integers(3, 9)) for _ in range(2))
    s = Sketch(draw)
    weights = s.weight(2, 3 * hidden, width), s.weight(2, 3 * hidden, hidden), s.weight(2, 6 * hidden)
    x = s.add("Transpose", "x", perm=[1, 0, 2])
    s.add("GRU", x, *weights, "", "state", outputs=["ys", "next"], hidden_size=hidden, direction="bidirectional")
    s.add("ReduceMean", "ys", s.constant(np.array([0], np.int64)), outputs=["y"], keepdims=0)
    rows, length, again = _names(draw, "N", "T", "N")
    inputs: Inputs = {
        "x": (TensorProto.FLOAT, (rows, length, width)),
        "state": (TensorProto.FLOAT, (2, again, hidden)),
    }

    def feed(r: Draw) -> Feed:
        n, t = int(r.integers(2, 9)), int(r.integers(2, 30))
        return {"x": _floats(r, n, t, width), "state": _floats(r, 2, n, hidden)}

    wrong = {
        "state of row 0": first_row("state", 1),
        "state of the next row": next_row("state", 1),
        "directions exchanged": flip("state", 0),
        "state ignored": ignore("state"),
        "length cut at 3": cut("x", 1, 3),
        "read backwards": flip("x", 1),
    }
    return Specimen(kind="GRU in both directions", model=s.model(inputs, {"y": 3, "next": 3}), feed=feed, wrong=wrong)


def _voice(draw: Draw) -> Specimen:
    """Like a voice activity detector: input [N, d], state [2, N, h], and a rate that chooses a branch."""
    width, hidden = int(draw.integers(8, 40)), int(draw.integers(4, 16))
    s = Sketch(draw)
    first, second = s.weight(width, hidden), s.weight(width, hidden)

    def branch(name: str, weight: str) -> onnx.GraphProto:
        node = helper.make_node("MatMul", ["input", weight], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    rate = s.add("Equal", "sr", s.constant(np.int64(16000)))
    features = s.add("If", rate, then_branch=branch("fast", first), else_branch=branch("slow", second))
    h, c = (s.add("Gather", "state", s.constant(np.int64(place)), axis=0) for place in (0, 1))
    candidate = s.add("Tanh", s.add("Add", features, s.add("MatMul", h, s.weight(hidden, hidden))))
    gate = s.add("Sigmoid", c)
    new = s.add("Mul", candidate, gate)
    axis = s.constant(np.array([0], np.int64))
    parts = s.add("Unsqueeze", new, axis), s.add("Unsqueeze", s.add("Add", c, new), axis)
    s.add("Concat", *parts, outputs=["next"], axis=0)
    s.add("Sigmoid", s.add("MatMul", new, s.weight(hidden, 1)), outputs=["output"])
    rows, again = _names(draw, "N", "N")
    shape = (1,) * int(draw.integers(2))
    inputs: Inputs = {
        "input": (TensorProto.FLOAT, (rows, width)),
        "state": (TensorProto.FLOAT, (2, again, hidden)),
        "sr": (TensorProto.INT64, shape),
    }
    if shape:  # a condition is one value, of any rank
        s.nodes[0].output[0] = "rate_by_row"
        s.nodes.insert(1, helper.make_node("Squeeze", ["rate_by_row"], [rate]))

    def feed(r: Draw) -> Feed:
        n, sr = int(r.integers(2, 9)), np.full(shape, r.choice([8000, 16000]), np.int64)
        return {"input": _floats(r, n, width), "state": _floats(r, 2, n, hidden), "sr": sr}

    wrong = {
        "state of row 0": first_row("state", 1),
        "state of the next row": next_row("state", 1),
        "states exchanged": flip("state", 0),
        "always the rate of 16 kHz": always("sr", np.full(shape, 16000, np.int64)),
        "always the rate of 8 kHz": always("sr", np.full(shape, 8000, np.int64)),
        "state ignored": ignore("state"),
    }
    return Specimen(kind="voice activity", model=s.model(inputs, {"output": 2, "next": 3}), feed=feed, wrong=wrong)


def _graph_net(draw: Draw) -> Specimen:
    """Message passing: x [num_nodes, d], edge_index [2, num_edges], and often edge weights [num_edges, 1]."""
    width, hidden = int(draw.integers(2, 6)), int(draw.integers(3, 8))
    weighted = bool(draw.integers(2))
    s = Sketch(draw)
    source, target = (s.add("Gather", "edge_index", s.constant(np.int64(one)), axis=0) for one in (0, 1))
    values = s.add("MatMul", "x", s.weight(width, hidden))
    messages = s.add("Gather", values, source, axis=0)
    if weighted:
        messages = s.add("Mul", messages, "edge_weight")
    places = s.add("Unsqueeze", target, s.constant(np.array([1], np.int64)))
    places = s.add("Expand", places, s.add("Shape", messages))
    empty = s.add("Mul", values, s.constant(np.float32(0)))
    sums = s.add("ScatterElements", empty, places, messages, axis=0, reduction="add")
    s.add("MatMul", s.add("Tanh", sums), s.weight(hidden, 2), outputs=["y"])
    nodes, edges, again = _names(draw, "num_nodes", "num_edges", "num_edges")
    inputs: Inputs = {
        "x": (TensorProto.FLOAT, (nodes, width)),
        "edge_index": (TensorProto.INT64, (2, edges)),
    }
    if weighted:
        inputs["edge_weight"] = (TensorProto.FLOAT, (again, 1))

    def feed(r: Draw) -> Feed:
        n, e = int(r.integers(3, 20)), int(r.integers(5, 40))
        request = {"x": _floats(r, n, width), "edge_index": r.integers(0, n, (2, e))}
        return {**request, "edge_weight": _floats(r, e, 1)} if weighted else request

    wrong = {
        "indices up to 1": at_most("edge_index", 1),
        "indices up to 4": at_most("edge_index", 4),
        "direction of edges": flip("edge_index", 0),
        "edges of node 0": ignore_index("edge_index"),
        "nodes in another order": next_row("x", 0),
    }
    if weighted:
        wrong |= {"weight of edge 0": first_row("edge_weight", 0), "weights moved": next_row("edge_weight", 0)}
    else:
        wrong["edges cut at 12"] = cut("edge_index", 1, 12)
    return Specimen(kind="graph", model=s.model(inputs, {"y": 2}), feed=feed, wrong=wrong)


def ignore_index(name: str) -> Change:
    """All indices are 0."""
    return tamper(name, lambda sketch, value: sketch.add("Mul", value, sketch.constant(np.int64(0))))


def _cache(draw: Draw) -> Specimen:
    """Attention over a cache: x [batch, seq, d], past keys and values [batch, heads, past, d]."""
    heads, width = int(draw.integers(1, 4)), int(draw.integers(3, 7))
    s = Sketch(draw)
    inner = heads * width
    split = s.constant(np.array([0, 0, heads, width], np.int64))

    def project() -> str:
        flat = s.add("MatMul", "x", s.weight(inner, inner))
        return s.add("Transpose", s.add("Reshape", flat, split), perm=[0, 2, 1, 3])

    query, key, value = project(), project(), project()
    keys = s.add("Concat", "past_key", key, outputs=["present_key"], axis=2)
    values = s.add("Concat", "past_value", value, outputs=["present_value"], axis=2)
    scores = s.add("MatMul", query, s.add("Transpose", keys, perm=[0, 1, 3, 2]))
    attended = s.add("MatMul", s.add("Softmax", scores, axis=-1), values)
    s.add("ReduceMean", attended, s.constant(np.array([2], np.int64)), outputs=["y"], keepdims=0)
    batch, length, again, past, third, fourth = _names(draw, "batch", "seq", "batch", "past", "batch", "past")
    kind = TensorProto.FLOAT
    inputs: Inputs = {
        "x": (kind, (batch, length, inner)),
        "past_key": (kind, (again, heads, past, width)),
        "past_value": (kind, (third, heads, fourth, width)),
    }

    def feed(r: Draw) -> Feed:
        n, t, p = int(r.integers(2, 6)), int(r.integers(1, 9)), int(r.integers(2, 30))
        pasts = {name: _floats(r, n, heads, p, width) for name in ("past_key", "past_value")}
        return {"x": _floats(r, n, t, inner), **pasts}

    wrong = {
        "cache of row 0": first_row("past_key", 0),
        "cache exchanged": exchange("past_key", "past_value"),
        "keys of the cache backwards": flip("past_key", 2),
        "values ignored": ignore("past_value"),
        "values of the next row": next_row("past_value", 0),
    }
    outputs = {"y": 3, "present_key": 4, "present_value": 4}
    return Specimen(kind="attention with a cache", model=s.model(inputs, outputs), feed=feed, wrong=wrong)


def _scalars(draw: Draw) -> Specimen:
    """A head with a temperature, a number of a mode and a flag."""
    width, classes = int(draw.integers(3, 9)), int(draw.integers(3, 7))
    s = Sketch(draw)
    logits = s.add("MatMul", "x", s.weight(width, classes))
    table = s.constant(_floats(draw, 3, classes))
    limit = int(draw.integers(2, 9))
    shifted = s.add("Add", logits, s.add("Gather", table, "mode", axis=0))
    large = s.add("Greater", "steps", s.constant(np.int64(limit)))
    chosen = s.add("Where", large, shifted, s.add("Neg", shifted))
    scaled = s.add("Mul", chosen, s.add("Add", s.add("Abs", "gain"), s.constant(np.float32(0.1))))
    s.add("Where", "normalize", s.add("Softmax", scaled, axis=-1), scaled, outputs=["y"])
    (batch,) = _names(draw, "batch")
    inputs: Inputs = {
        "x": (TensorProto.FLOAT, (batch, width)),
        "gain": (TensorProto.FLOAT, ()),
        "mode": (TensorProto.INT64, ()),
        "steps": (TensorProto.INT64, ()),
        "normalize": (TensorProto.BOOL, ()),
    }

    def feed(r: Draw) -> Feed:
        return {
            "x": _floats(r, int(r.integers(2, 9)), width),
            "gain": np.float32(r.standard_normal() * 2),
            "mode": np.int64(r.integers(0, 3)),
            "steps": np.int64(r.integers(0, 2 * limit)),
            "normalize": np.bool_(r.integers(2)),
        }

    wrong = {
        "gain of 1": always("gain", np.float32(1)),
        "mode 0": always("mode", np.int64(0)),
        "mode 2": always("mode", np.int64(2)),
        "few steps": always("steps", np.int64(0)),
        "many steps": always("steps", np.int64(1 << 20)),
        "steps by one too few": tamper("steps", lambda k, v: k.add("Sub", v, k.constant(np.int64(1)))),
        "always normalized": always("normalize", np.bool_(True)),
        "never normalized": always("normalize", np.bool_(False)),
    }
    return Specimen(kind="scalars", model=s.model(inputs, {"y": 2}), feed=feed, wrong=wrong)


def _towers(draw: Draw) -> Specimen:
    """Two inputs of independent sizes: scores of queries [n, d] and documents [m, d]."""
    width, inner = int(draw.integers(3, 9)), int(draw.integers(3, 9))
    s = Sketch(draw)
    queries = s.add("Tanh", s.add("MatMul", "queries", s.weight(width, inner)))
    documents = s.add("Tanh", s.add("MatMul", "documents", s.weight(width, inner)))
    s.add("MatMul", queries, s.add("Transpose", documents, perm=[1, 0]), outputs=["scores"])
    some, others = _names(draw, "num_queries", "num_documents")
    kind = TensorProto.FLOAT
    inputs: Inputs = {"queries": (kind, (some, width)), "documents": (kind, (others, width))}

    def feed(r: Draw) -> Feed:
        sizes = (int(r.integers(2, 30)) for _ in range(2))
        return {name: _floats(r, size, width) for name, size in zip(inputs, sizes, strict=True)}

    wrong = {
        "document 0": first_row("documents", 0),
        "other documents": next_row("documents", 0),
        "documents cut at 16": cut("documents", 0, 16),
        "queries cut at 5": cut("queries", 0, 5),
        "inputs exchanged": exchange("queries", "documents"),
    }
    return Specimen(kind="independent sizes", model=s.model(inputs, {"scores": 2}), feed=feed, wrong=wrong)


def _columns(draw: Draw) -> Specimen:
    """Inputs of one batch, whose dimensions often have no name: a number, a code and an embedded index."""
    width, entries = int(draw.integers(2, 6)), int(draw.integers(5, 40))
    s = Sketch(draw)
    looked_up = s.add("Gather", s.weight(entries, 3), "item", axis=0)
    looked_up = s.add("Reshape", looked_up, s.constant(np.array([0, 3], np.int64)))
    joined = s.add("Concat", "numbers", looked_up, "other", axis=1)
    s.add("Softmax", s.add("MatMul", joined, s.weight(width + 5, 4)), outputs=["y"], axis=-1)
    first, second, third = _names(draw, "batch", "batch", "batch")
    inputs: Inputs = {
        "numbers": (TensorProto.FLOAT, (first, width)),
        "item": (TensorProto.INT64, (second, 1)),
        "other": (TensorProto.FLOAT, (third, 2)),
    }

    def feed(r: Draw) -> Feed:
        n = int(r.integers(2, 20))
        return {
            "numbers": _floats(r, n, width),
            "item": r.integers(0, entries, (n, 1)),
            "other": _floats(r, n, 2),
        }

    wrong = {
        "numbers of row 0": first_row("numbers", 0),
        "items of the next row": next_row("item", 0),
        "items up to 3": at_most("item", 3),
        "columns ignored": ignore("other"),
    }
    return Specimen(kind="one batch in several inputs", model=s.model(inputs, {"y": 2}), feed=feed, wrong=wrong)


def _stream(draw: Draw) -> Specimen:
    """A fixed batch of 1 with a state and the number of the step, an index into a table."""
    width, hidden, steps = (int(draw.integers(low, high)) for low, high in ((3, 9), (3, 9), (6, 30)))
    s = Sketch(draw)
    place = s.add("Gather", s.weight(steps, hidden, scale=1.0), "step", axis=0)
    h, c = (s.add("Gather", "state", s.constant(np.int64(one)), axis=0) for one in (0, 1))
    values = s.add("Add", s.add("MatMul", "x", s.weight(width, hidden)), s.add("Mul", h, s.add("Sigmoid", c)))
    s.add("Tanh", s.add("Add", values, place), outputs=["y"])
    inputs: Inputs = {
        "x": (TensorProto.FLOAT, (1, width)),
        "state": (TensorProto.FLOAT, (2, 1, hidden)),
        "step": (TensorProto.INT64, ()),
    }

    def feed(r: Draw) -> Feed:
        return {
            "x": _floats(r, 1, width),
            "state": _floats(r, 2, 1, hidden),
            "step": np.int64(r.integers(0, steps)),
        }

    wrong = {
        "states exchanged": flip("state", 0),
        "state ignored": ignore("state"),
        "steps up to 1": at_most("step", 1),
        "always step 0": always("step", np.int64(0)),
    }
    return Specimen(kind="fixed batch with state", model=s.model(inputs, {"y": 2}), feed=feed, wrong=wrong)


def _pointer(draw: Draw) -> Specimen:
    """Picks a place of each sequence: x [batch, seq, d], place [batch]."""
    width = int(draw.integers(3, 8))
    s = Sketch(draw)
    values = s.add("Tanh", s.add("MatMul", "x", s.weight(width, width)))
    index = s.add("Unsqueeze", "place", s.constant(np.array([1], np.int64)))
    s.add("GatherND", values, index, outputs=["y"], batch_dims=1)
    batch, length, again = _names(draw, "batch", "seq", "batch")
    inputs: Inputs = {"x": (TensorProto.FLOAT, (batch, length, width)), "place": (TensorProto.INT64, (again,))}

    def feed(r: Draw) -> Feed:
        n, t = int(r.integers(2, 9)), int(r.integers(4, 30))
        return {"x": _floats(r, n, t, width), "place": r.integers(0, t, n)}

    wrong = {
        "places up to 1": at_most("place", 1),
        "places up to 4": at_most("place", 4),
        "place of the next row": next_row("place", 0),
        "read backwards": flip("x", 1),
    }
    return Specimen(kind="index into a sequence", model=s.model(inputs, {"y": 2}), feed=feed, wrong=wrong)


KINDS: tuple[Callable[[Draw], Specimen], ...] = (
    _lstm,
    _gru,
    _voice,
    _graph_net,
    _cache,
    _scalars,
    _towers,
    _columns,
    _stream,
    _pointer,
)


def _rename(model: onnx.ModelProto) -> None:
    """Give all inner values, weights and nodes other names."""
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return name if name in kept else names.setdefault(name, f"t{len(names)}")

    for node in _all_nodes(model.graph):
        node.name = ""
        node.input[:] = map(new, node.input)
        node.output[:] = map(new, node.output)
        for attribute in node.attribute:
            for value in attribute.g.output if attribute.HasField("g") else ():
                value.name = new(value.name)
    for tensor in model.graph.initializer:
        tensor.name = new(tensor.name)


def _rename_dimensions(model: onnx.ModelProto) -> None:
    """Give each free dimension a name of its own."""
    for value in model.graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if not dimension.HasField("dim_value"):
                dimension.dim_param = f"{value.name}_{axis}"


def right_copies(model: onnx.ModelProto, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies that compute the same."""
    import onnxruntime as ort

    source = folder / "model.onnx"
    for name, change in {"other names": _rename, "other names of dimensions": _rename_dimensions}.items():
        copy = onnx.ModelProto.FromString(model.SerializeToString())
        change(copy)
        yield name, _save(copy, folder / f"{name}.onnx")
    for level in ("BASIC", "EXTENDED"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(folder / f"{level.lower()}.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        yield f"optimized by ONNX Runtime, {level.lower()}", Path(options.optimized_model_filepath)
    yield "opset 20", _save(onnx.version_converter.convert_version(model, 20), folder / "opset.onnx")


def wrong_copies(specimen: Specimen, folder: Path, draw: Draw) -> Iterator[tuple[str, Path]]:
    """Yield copies with one change each whose answers differ."""
    requests = [specimen.feed(draw) for _ in range(_REQUESTS)]
    right = [run_model(folder / "model.onnx", request) for request in requests]
    for name, change in specimen.wrong.items():
        copy = onnx.ModelProto.FromString(specimen.model.SerializeToString())
        change(copy)
        path = _save(copy, folder / f"{name}.onnx")
        answers = [run_model(path, request) for request in requests]
        if any(one and differ(known, one) for known, one in zip(right, answers, strict=True)):
            yield name, path


def _save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save_model(model, path)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One verdict. `wrong` is whether the copy is."""

    kind: str
    number: int
    copy: str
    wrong: bool
    verdict: str
    reason: str

    @property
    def is_fault(self) -> bool:
        """Return whether the verdict contradicts the truth, or a right copy has none."""
        return self.verdict == "pass" if self.wrong else self.verdict != "pass"


def measure(models: int, seed: int, folder: Path, only: str = "") -> Iterator[Outcome]:
    """Judge all copies of so many models."""
    for number in range(models):
        draw = np.random.default_rng((seed, number))
        specimen = KINDS[number % len(KINDS)](draw)
        if only not in specimen.kind:
            continue
        place = folder / str(number)
        place.mkdir()
        source = _save(specimen.model, place / "model.onnx")
        if not all(run_model(source, specimen.feed(draw)) for _ in range(_REQUESTS)):
            raise ValueError(f"{specimen.kind} {number} does not take its own requests")
        copies = [(name, path, False) for name, path in right_copies(specimen.model, place)]
        copies += [(name, path, True) for name, path in wrong_copies(specimen, place, draw)]
        for name, path, wrong in copies:
            verdict, reason = _judge(source, path)
            yield Outcome(kind=specimen.kind, number=number, copy=name, wrong=wrong, verdict=verdict, reason=reason)


def _judge(a: Path, b: Path) -> tuple[str, str]:
    """Compare two files as `judge --only parity --rows 64` does, but in this process, and return verdict and reason."""
    try:
        samples = generate_samples(shared_inputs(a, b), count=64, dims={}, bounds=read_input_bounds(a))
        samples = settle_samples(_RUNTIME, REFERENCE, a, samples)
        result = compare(_RUNTIME, _TARGET, a, b, samples)
    except OnnxOpsError as error:
        return "refused", str(error)
    return result.verdict.value, result.reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--seed", type=int, help="default: new in each run")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(measure(arguments.models, seed, Path(folder), arguments.only))
    for one in outcomes:
        if one.is_fault:
            print(f"{one.kind} {one.number}, {one.copy}: {one.verdict}: {one.reason}")
    counts = Counter((one.kind, one.wrong, one.verdict) for one in outcomes)
    for (kind, wrong, verdict), count in sorted(counts.items()):
        print(f"{kind:28} {'wrong' if wrong else 'right'} {verdict:12} {count}")
    right = [one for one in outcomes if not one.wrong]
    refused, passed = sum(one.is_fault for one in right), sum(one.is_fault for one in outcomes if one.wrong)
    print(f"{len(outcomes) - len(right)} wrong copies: {passed} PASS; {len(right)} right copies: {refused} refused")
    print(f"{time.perf_counter() - began:.0f} s")
    return int(passed > 0 or refused > _MOST_REFUSED * len(right))


if __name__ == "__main__":
    sys.exit(main())
