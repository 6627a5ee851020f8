"""Architectures whose inputs are not all rows, drawn at random, with requests and wrong changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.foreign_graphs import (
    Change,
    Draw,
    Inputs,
    Sketch,
    always,
    at_most,
    cut,
    exchange,
    first_row,
    flip,
    ignore,
    ignore_index,
    next_row,
    tamper,
)

Feed = dict[str, Any]


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
