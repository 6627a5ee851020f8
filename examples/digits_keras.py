"""A small convolutional network on handwritten digits, with Keras.

Keras runs on its PyTorch backend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from onnx_ops.ports import Dataset

# Keras chooses its backend when it is first imported.
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras


def train(data: Mapping[str, Dataset], *, filters: int = 8, epochs: int = 6, seed: int = 7) -> Any:
    """Fit one convolution and one dense layer on the set `train`.

    Its images have the shape (n, 1, 8, 8).
    """
    keras.utils.set_random_seed(seed)
    rows = data["train"]
    model = keras.Sequential(
        [
            keras.Input((1, 8, 8), name="image"),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(filters, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    model.fit(rows.inputs["image"], rows.label, epochs=epochs, batch_size=32, verbose=0)
    return model
