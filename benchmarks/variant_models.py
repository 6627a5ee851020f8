"""The models from which variants are made.

They are a CNN on digits, encoders with and without outlier channels, and an embedder.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.domain.gate import ACCURACY, MetricDefinition

FITTED, TUNED, TESTED = 512, 256, 384
"""Rows of the encoders: for the head, for decisions, and for the score."""

HINT = 0.1
"""Share of tokens that are set to a row's favoured kind.

It makes the task neither trivial nor hopeless.
"""


@dataclass(kw_only=True)
class Model:
    """A float model in a file, its rows, and its variants by tool.

    There are rows for ranges, for decisions and for the score.
    """

    name: str
    path: Path
    feed: str
    calibration: np.ndarray[Any, Any]
    tune: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    test: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    metric: MetricDefinition = ACCURACY
    variants: dict[str, Path] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    search: str = ""


def make(name: str, scratch: Path, width: int) -> Model:
    folder = scratch / name
    folder.mkdir()
    if name == "cnn":
        return cnn(folder)
    return embedder(folder) if name == "minilm" else encoder(name, folder, width)


def embedder(folder: Path) -> Model:
    """Return an encoder of MiniLM's shape whose mean state is the answer.

    It has 6 layers of width 384, 30,522 words, and random weights. It has no labels: answers are
    compared with those in float32, by cosine.
    """
    import torch

    torch.manual_seed(0)
    body = encoder_body(384, words=30522)
    # With the default standard deviation of 1, the token embeddings would be much larger than what
    # the layers add to them.
    torch.nn.init.normal_(body.tokens.weight, std=0.02)
    body.forward = body.features
    tokens = np.random.default_rng(0).integers(0, 30522, (64 + 64 + 128, 128))
    with torch.no_grad():
        states = torch.cat(
            [body.features(torch.from_numpy(part)) for part in np.array_split(tokens, 8)]
        ).numpy()
    path = exported(body.eval(), torch.from_numpy(tokens[:2]), folder / "model.onnx")
    return Model(
        name="minilm",
        path=path,
        feed="x",
        calibration=tokens[:64],
        tune=(tokens[64:128], states[64:128]),
        test=(tokens[128:], states[128:]),
        metric=MetricDefinition(name="cosine"),
    )


def cnn(folder: Path) -> Model:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order]

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.spread = nn.Conv2d(width, width, 3, padding=1, groups=width)
            self.mix = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.mix(torch.relu(self.spread(x))))

    model = nn.Sequential(
        nn.Conv2d(1, 128, 3, padding=1), nn.ReLU(), Block(128), Block(128), nn.MaxPool2d(2),
        nn.Conv2d(128, 192, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192 * 16, 10),
    )  # fmt: skip
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    x, y = torch.from_numpy(images[:800]), torch.from_numpy(labels[:800])
    for epoch in range(6):
        shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in shuffled.split(50):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    path = exported(model.eval(), x[:2], folder / "model.onnx")
    return Model(
        name="cnn",
        path=path,
        feed="x",
        calibration=images[:256],
        tune=(images[800:1200], labels[800:1200]),
        test=(images[1200:], labels[1200:]),
    )


def encoder(name: str, folder: Path, width: int) -> Model:
    """Return an encoder with six layers over 128 tokens.

    Its weights are random, and its head is fitted to its features. Outlier channels are made by
    scaling channels of a normalization up, and the columns of the products that read it down: the
    function in float is the same.
    """
    import torch

    body, tokens, labels = fitted(width)
    body = copy.deepcopy(body)
    if name.endswith("outliers"):
        with torch.no_grad():
            spread_outliers(body, width)
    path = exported(body.eval(), torch.from_numpy(tokens[:2]), folder / "model.onnx")
    return Model(
        name=name,
        path=path,
        feed="x",
        calibration=tokens[:64],
        tune=(tokens[FITTED : FITTED + TUNED], labels[FITTED : FITTED + TUNED]),
        test=(tokens[FITTED + TUNED :], labels[FITTED + TUNED :]),
    )


@functools.cache
def fitted(width: int) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the encoder, its tokens and its labels.

    The label of a row is its most common kind of token, of eight kinds.
    """
    import torch

    torch.manual_seed(0)
    body = encoder_body(width)
    rng = np.random.default_rng(0)
    favoured = rng.integers(0, 8, FITTED + TUNED + TESTED)
    tokens = rng.integers(0, 64, (len(favoured), 128))
    hinted = rng.random(tokens.shape) < HINT
    tokens = np.where(hinted, tokens // 8 * 8 + favoured[:, None], tokens)
    labels = np.stack([(tokens % 8 == kind).sum(axis=1) for kind in range(8)], axis=1).argmax(
        axis=1
    )
    with torch.no_grad():
        parts = [
            body.features(torch.from_numpy(tokens[at : at + 64])) for at in range(0, FITTED, 64)
        ]
        found = torch.cat(parts).double().numpy()
        middle, targets = found.mean(axis=0), np.eye(8)[labels[:FITTED]] - 0.125
        spread = (found - middle).T @ (found - middle)
        ridge = 1e-3 * np.trace(spread) / width * np.eye(width)
        solved = np.linalg.solve(spread + ridge, (found - middle).T @ targets)
        body.head.weight.copy_(torch.from_numpy(solved.T))
        body.head.bias.copy_(torch.from_numpy(0.125 - middle @ solved))
    return body, tokens, labels


def encoder_body(width: int, words: int = 64) -> Any:
    import torch
    from torch import nn

    heads = width // 64

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.read(self.before(x)).unflatten(2, (3, heads, 64)).permute(2, 0, 3, 1, 4)
            weights = torch.softmax(parts[0] @ parts[1].transpose(2, 3) / 8.0, dim=3)
            x = x + self.write((weights @ parts[2]).transpose(1, 2).flatten(2))
            y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.between(x))))
            return x + y

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(words, width)
            self.layers = nn.ModuleList([Layer() for _ in range(6)])
            self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 8)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x)
            for layer in self.layers:
                x = layer(x)
            y: torch.Tensor = self.last(x)
            return y.mean(dim=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.features(x))
            return scores

    return Encoder()


def spread_outliers(body: Any, width: int) -> None:
    channels = np.random.default_rng(1).choice(width, 4, replace=False)
    for layer in body.layers:
        for norm, reader in ((layer.before, layer.read), (layer.between, layer.up)):
            norm.weight[channels] *= 60
            norm.bias[channels] *= 60
            reader.weight[:, channels] /= 60


def exported(model: Any, example: Any, path: Path) -> Path:
    import torch

    shapes = ({0: torch.export.Dim("batch")},)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(
            model, (example,), str(path), dynamo=True, input_names=["x"], output_names=["scores"],
            dynamic_shapes=shapes, external_data=False, opset_version=18, verbose=False,
        )  # fmt: skip
    return path
