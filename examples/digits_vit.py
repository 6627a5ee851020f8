"""A tiny vision transformer on handwritten digits, with Hugging Face transformers. Nothing is asked of a hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification

from onnx_ops.ports import Dataset


def train(data: Mapping[str, Dataset], *, width: int = 32, layers: int = 2, epochs: int = 12, seed: int = 7) -> Any:
    """Made from a configuration and fitted on the set `train`, whose images have the shape (n, 1, 8, 8)."""
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
        attn_implementation="eager",
    )
    model = ViTForImageClassification(config)
    rows = data["train"]
    if rows.label is None:
        raise ValueError("the digits need their labels")
    images = torch.from_numpy(rows.inputs["pixel_values"])
    labels = torch.from_numpy(rows.label.astype(np.int64))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(64):
            loss = model(pixel_values=images[batch], labels=labels[batch]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()
