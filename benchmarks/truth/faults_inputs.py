"""Kinds of faults in tables of words, whole numbers, recurrent layers and norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.truth.faults import (
    Change,
    after_input,
    attribute,
    fault,
    nodes_of,
    pick,
    set_attribute,
)

_RECURRENT = ("LSTM", "GRU", "RNN")


def _table_fault(name: str, change: Change) -> None:
    @fault(name)
    def inject(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
        tables = {node.input[0] for node in nodes_of(model, "Gather")}
        found = [
            t
            for t in model.graph.initializer
            if t.name in tables and len(t.dims) == 2 and t.data_type == 1
        ]
        return bool(found) and _changed(found[0], change, draw)


def _changed(tensor: onnx.TensorProto, change: Change, draw: np.random.Generator) -> bool:
    after = change(numpy_helper.to_array(tensor).copy(), draw)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(after), tensor.name))
    return True


def _zeroed(array: Any, rows: Any) -> Any:
    array[rows] = 0
    return array


_table_fault("table of words rolled by one", lambda a, _: np.roll(a, 1, axis=0))
_table_fault("a third of the words zero", lambda a, _: _zeroed(a, slice(len(a) * 2 // 3, None)))
_table_fault("last word zero", lambda a, _: _zeroed(a, -1))
_table_fault("first word zero", lambda a, _: _zeroed(a, 0))
_table_fault("two words swapped", lambda a, d: a[_swapped(len(a), d)])


def _swapped(count: int, draw: np.random.Generator) -> Any:
    order = np.arange(count)
    one, two = draw.choice(count, 2, replace=False)
    order[[one, two]] = order[[two, one]]
    return order


def _cast_fault(name: str, kind: int) -> None:
    @fault(name)
    def inject(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
        del draw
        value = model.graph.input[0]
        if value.type.tensor_type.elem_type != TensorProto.INT64:
            return False
        narrow = helper.make_node("Cast", [value.name], ["narrow.in"], to=kind)
        wide = helper.make_node("Cast", ["narrow.in"], ["narrow.out"], to=TensorProto.INT64)
        after_input(model, [narrow, wide], "narrow.out")
        return True


_cast_fault("whole numbers cut to 8 bits", TensorProto.INT8)
_cast_fault("whole numbers cut to 32 bits", TensorProto.INT32)
_cast_fault("whole numbers through float32", TensorProto.FLOAT)


@fault("whole numbers clipped at zero")
def _clipped(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    value = model.graph.input[0]
    if value.type.tensor_type.elem_type != TensorProto.INT64:
        return False
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, dtype=np.int64), "zero.low"))
    after_input(
        model, [helper.make_node("Max", [value.name, "zero.low"], ["clipped.out"])], "clipped.out"
    )
    return True


@fault("remainder with the dividend's sign")
def _remainder(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, "Mod")
    for node in found:
        set_attribute(node, "fmod", 1)
    return bool(found)


@fault("rows of recurrent input weights rolled")
def _input_weights(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _recurrent(
        model, draw, 1, lambda a, _: np.roll(a, a.shape[1] // (3 if a.shape[1] % 4 else 4), axis=1)
    )


@fault("recurrent weight rows swapped")
def _hidden(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _recurrent(model, draw, 2, lambda a, d: a[:, _swapped(a.shape[1], d)])


@fault("recurrent bias dropped")
def _bias(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _recurrent(model, draw, 3, lambda a, _: np.zeros_like(a))


def _recurrent(
    model: onnx.ModelProto, draw: np.random.Generator, place: int, change: Change
) -> bool:
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    found = [
        node
        for node in nodes_of(model, *_RECURRENT)
        if len(node.input) > place and node.input[place] in stored
    ]
    return bool(found) and _changed(stored[pick(draw, found).input[place]], change, draw)


@fault("sequence read backwards")
def _backwards(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, *_RECURRENT)
    for node in found:
        set_attribute(node, "direction", "reverse")
    return bool(found)


@fault("recurrent activation clipped")
def _activation(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, *_RECURRENT)
    for node in found:
        set_attribute(node, "clip", 0.5)
    return bool(found)


@fault("reset gate applied elsewhere")
def _reset(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, "GRU")
    for node in found:
        before = attribute(node, "linear_before_reset")
        set_attribute(node, "linear_before_reset", 0 if before is not None and before.i else 1)
    return bool(found)


@fault("epsilon of a normalization changed")
def _epsilon(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, "InstanceNormalization", "GroupNormalization", "LayerNormalization")
    for node in found:
        before = attribute(node, "epsilon")
        set_attribute(node, "epsilon", 1e-2 if before is None or before.f < 1e-3 else 1e-5)
    return bool(found)
