"""Eight small networks, trained on the digits of scikit-learn, that quantizers get as ONNX files."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A trained model in a file; `calibration` and `scored` are rows of `image`, `labels` those of `scored`."""

    name: str
    path: Path
    calibration: Any
    scored: Any
    labels: Any

    def answers(self, path: Path) -> Any:
        """Return the scores that a file gives to the scored rows."""
        return _answers(path, self.scored)


def _answers(path: Path, rows: Any) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: rows})[0]


def networks(folder: Path, seed: int, names: Collection[str]) -> Iterator[Network]:
    """Train and export the networks of those names; all if there are none."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order], digits.target[order]
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    for name, build in _networks().items():
        if names and name not in names:
            continue
        net = build()
        _train(net, images[:900], labels[:900])
        path = folder / name / "model.onnx"
        path.parent.mkdir()
        net.eval()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net, (torch.zeros(2, 1, 8, 8),), path, input_names=["image"], output_names=["scores"],
                dynamic_axes={"image": {0: "batch"}, "scores": {0: "batch"}}, opset_version=18, dynamo=False,
                do_constant_folding=name != "cnn-norm",
            )  # fmt: skip
        yield Network(
            name=name,
            path=path,
            calibration=images[:256],
            scored=_enlarge(images[900:], seed),
            labels=_again(labels[900:]),
        )


_TIMES = 4


def _enlarge(images: Any, seed: int) -> Any:
    """Repeat rows with a little noise, for as many rows as an interval of a third of the limit needs."""
    draw = np.random.default_rng(seed)
    copies = [np.clip(images + draw.normal(0, 0.03, images.shape), 0, 1) for _ in range(_TIMES)]
    return np.concatenate(copies).astype(np.float32)


def _again(labels: Any) -> Any:
    return np.concatenate([labels] * _TIMES)


def _networks() -> dict[str, Callable[[], Any]]:
    import torch
    from torch import nn

    class Tokens(nn.Module):
        """The rows of an image as tokens, through `body`, and their mean to the classes."""

        def __init__(self, body: Any, width: int) -> None:
            super().__init__()
            self.inner, self.body, self.head = nn.Linear(8, width), body, nn.Linear(width, 10)

        def forward(self, image: torch.Tensor) -> Any:
            answer = self.body(self.inner(image.flatten(1, 2)))
            return self.head((answer[0] if isinstance(answer, tuple) else answer).mean(1))

    def mlp(*sizes: int, act: Any = nn.ReLU) -> Any:
        parts: list[Any] = [nn.Flatten()]
        for before, after in zip((64, *sizes), sizes, strict=False):
            parts += [nn.Linear(before, after), act()]
        return nn.Sequential(*parts, nn.Linear(sizes[-1], 10))

    def block(before: int, after: int, *, norm: bool) -> list[Any]:
        return [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU()]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(*block(1, 16, norm=True))
            self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1), nn.ReLU())
            self.head = nn.Linear(16 * 16, 10)

        def forward(self, image: torch.Tensor) -> Any:
            held = self.first(image)
            return self.head(nn.functional.max_pool2d(held + self.deep(held), 2).flatten(1))

    tail = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4, 10)]
    return {
        "mlp": lambda: mlp(96, 64),
        "cnn": lambda: nn.Sequential(*block(1, 16, norm=False), nn.MaxPool2d(2), *block(16, 32, norm=False), *tail),
        "cnn-norm": lambda: nn.Sequential(*block(1, 16, norm=True), nn.MaxPool2d(2), *block(16, 32, norm=True), *tail),
        "mlp-gelu": lambda: mlp(128, 128, 64, act=nn.GELU),
        "residual": Residual,
        "encoder": lambda: Tokens(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True), 2), 64
        ),
        "lstm": lambda: Tokens(nn.LSTM(64, 64, batch_first=True), 64),
        "mixer": lambda: Tokens(
            nn.Sequential(nn.Conv1d(8, 32, 1), nn.ReLU(), nn.Conv1d(32, 8, 1), nn.LayerNorm(64), nn.Linear(64, 64)), 64
        ),
    }


def _train(net: Any, images: Any, labels: Any) -> None:
    import torch

    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    taken: Any = torch.from_numpy(images)
    wanted: Any = torch.from_numpy(labels)
    order: Any
    loss: Any
    for _ in range(40):
        order = torch.randperm(len(taken))
        for part in order.split(64):
            optimizer.zero_grad()
            noisy = taken[part] + 0.05 * torch.randn_like(taken[part])
            loss = torch.nn.functional.cross_entropy(net(noisy), wanted[part])
            loss.backward()
            optimizer.step()
