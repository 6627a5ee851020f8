"""A small convolutional network on handwritten digits, with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from onnx_ops.ports import Dataset

BATCH = 64


class DigitsCnn(nn.Module):
    """A network from images (batch, 1, 8, 8) in [0, 1] to scores (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.features(image).flatten(1))
        return scores


def train(
    data: Mapping[str, Dataset], *, epochs: int = 12, lr: float = 0.002, seed: int = 7
) -> nn.Module:
    """Fit the network on the set `train`.

    The same seed gives the same weights on the same machine.
    """
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    images = torch.from_numpy(np.asarray(data["train"].inputs["image"]))
    labels = torch.from_numpy(np.asarray(data["train"].label))
    model = DigitsCnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loss = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for rows in np.array_split(order.permutation(len(images)), len(images) // BATCH):
            optimizer.zero_grad()
            loss(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()
