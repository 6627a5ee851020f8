"""A small perceptron on handwritten digits, with TensorFlow's Keras.

It runs in TensorFlow's own environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from onnx_ops.ports import Dataset


def train(data: Mapping[str, Dataset], *, width: int = 64, epochs: int = 15, seed: int = 7) -> Any:
    """Fit one hidden layer on the set `train`, whose pixels are from 0 to 16."""
    keras.utils.set_random_seed(seed)
    rows = data["train"]
    model = keras.Sequential(
        [
            keras.Input((64,), name="x"),
            keras.layers.Rescaling(1 / 16),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    model.fit(rows.inputs["x"], rows.label, epochs=epochs, batch_size=32, verbose=0)
    return model
