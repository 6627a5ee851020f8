"""The perceptron of `digits_tensorflow` as a LiteRT file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from examples import digits_tensorflow
from onnx_ops.ports import Dataset


def train(data: Mapping[str, Dataset], **settings: Any) -> bytes:
    """Return the bytes of the file, with weights in float32."""
    return bytes(
        tf.lite.TFLiteConverter.from_keras_model(
            digits_tensorflow.train(data, **settings)
        ).convert()
    )
