"""Training functions of models with two inputs, in their frameworks' environments.

All return sum(user - 2 item) over the three values of a row, so that exchanged inputs change the
output.
"""

from __future__ import annotations

import importlib
from typing import Any


def tensorflow_signature(data: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    specs = [tf.TensorSpec([None, 3], name=name) for name in ("user", "item")]

    class Module(tf.Module):  # type: ignore[misc,name-defined,unused-ignore]
        @tf.function(input_signature=specs)  # type: ignore[untyped-decorator,unused-ignore]
        def __call__(self, user: Any, item: Any) -> Any:
            return tf.reduce_sum(user - 2.0 * item, axis=1, keepdims=True)

    return Module()


def tensorflow_call(data: Any) -> Any:
    """Return a SavedModel without a signature, whose `__call__` names its parameters."""
    tf = importlib.import_module("tensorflow")

    class Module(tf.Module):  # type: ignore[misc,name-defined,unused-ignore]
        @tf.function  # type: ignore[untyped-decorator,unused-ignore]
        def __call__(self, user: Any, item: Any) -> Any:
            return tf.reduce_sum(user - 2.0 * item, axis=1, keepdims=True)

    module = Module()
    module.__call__.get_concrete_function(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3]))
    return module


def keras_functional(data: Any) -> Any:
    keras = importlib.import_module("keras")
    user, item = keras.Input((3,), name="user"), keras.Input((3,), name="item")
    summed = keras.layers.Dense(1, kernel_initializer="ones")(user - 2.0 * item)
    return keras.Model([user, item], summed)


def tflite(data: Any) -> bytes:
    tf = importlib.import_module("tensorflow")
    written: bytes = tf.lite.TFLiteConverter.from_keras_model(keras_functional(data)).convert()
    return written


def tflite_without_signature(data: Any) -> bytes:
    """Return a file of the converter's older API.

    Its tensors have the names of the placeholders.
    """
    tf = importlib.import_module("tensorflow")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        user, item = (
            v1.placeholder("float32", [None, 3], "user"),
            v1.placeholder("float32", [None, 3], "item"),
        )
        answer = tf.reduce_sum(user - 2.0 * item, axis=1, keepdims=True)
        written: bytes = v1.lite.TFLiteConverter.from_session(
            session, [user, item], [answer]
        ).convert()
    return written


def paddle(data: Any) -> Any:
    paddle = importlib.import_module("paddle")
    spec = importlib.import_module("paddle.static").InputSpec

    class Layer(paddle.nn.Layer):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            ones = paddle.nn.initializer.Constant(1.0)
            self.last = paddle.nn.Linear(3, 1, weight_attr=ones)

        def forward(self, user: Any, item: Any) -> Any:
            return self.last(user - 2.0 * item)

    specs = [spec([None, 3], "float32", "user"), spec([None, 3], "float32", "item")]
    return paddle.jit.to_static(Layer(), input_spec=specs, full_graph=True)
