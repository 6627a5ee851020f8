"""A tiny vision transformer on handwritten digits, with Hugging Face transformers.

Nothing is downloaded from a hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification

from onnx_ops.ports import Dataset

BATCH = 32
SPREAD = 0.15
"""Standard deviation of the first weights.

The library's 0.02 is made for wide models. With it, so narrow a model learns next to nothing in
this time.
"""

WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


def train(
    data: Mapping[str, Dataset],
    *,
    width: int = 48,
    layers: int = 2,
    epochs: int = 60,
    rate: float = 2e-3,
    seed: int = 7,
) -> Any:
    """Build the model from a configuration, and fit it on the set `train`.

    Its images have the shape (n, 1, 8, 8). Each batch is shifted by up to a pixel: a transformer
    does not know that a shifted digit is the same.
    """
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        num_labels=10,
        initializer_range=SPREAD,
        attn_implementation="eager",
    )
    model = ViTForImageClassification(config)
    rows = data["train"]
    if rows.label is None:
        raise ValueError("the digits need their labels")
    images = torch.from_numpy(rows.inputs["pixel_values"])
    labels = torch.from_numpy(rows.label.astype(np.int64))
    steps = epochs * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=steps, pct_start=WARM_UP
    )
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            loss = model(pixel_values=shifted(images[batch], order), labels=labels[batch]).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


def shifted(images: torch.Tensor, order: torch.Generator) -> torch.Tensor:
    """Return a batch moved by -1, 0 or 1 pixels in each direction, filled with black."""
    down, right = (int(torch.randint(0, 3, (), generator=order)) for _ in range(2))
    framed = torch.nn.functional.pad(images, (1, 1, 1, 1))
    return framed[:, :, down : down + 8, right : right + 8]
