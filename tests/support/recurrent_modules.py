"""Torch modules over sequences.

They are recurrent layers in all forms, and modules that fix the length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from onnx_ops.ports import Tensors

FEATURES, HIDDEN = 3, 5


class Recurrent(nn.Module):
    """A recurrent layer and a head over all steps.

    `layer` is LSTM, GRU or RNN; `nonlinearity="relu"` is possible for RNN. Inputs and outputs have
    the batch first, even if the layer has the steps first. This includes the state of each layer.
    """

    def __init__(self, layer: str, *, steps_first: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.steps_first = steps_first
        self.layer = getattr(nn, layer)(FEATURES, HIDDEN, batch_first=not steps_first, **settings)
        self.head = nn.Linear(HIDDEN * (2 if self.layer.bidirectional else 1), 2)

    def answer(self, x: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
        steps, last = self.layer(x.transpose(0, 1) if self.steps_first else x, state)
        scores = self.head(steps.transpose(0, 1) if self.steps_first else steps)
        states = last if isinstance(last, tuple) else (last,)
        return {"scores": scores} | {
            f"state_{place}": part.transpose(0, 1) for place, part in enumerate(states)
        }

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.answer(x, None)


class Stateful(Recurrent):
    """Module that takes the hidden state of a GRU or RNN.

    The state has shape (batch, layers * directions, hidden).
    """

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self.answer(x, h.transpose(0, 1).contiguous())


class StatefulLstm(Recurrent):
    """Module that takes both states of an LSTM.

    Each has shape (batch, layers * directions, hidden).
    """

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self.answer(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))


def sequences(module: nn.Module, batch: int, length: int, *, seed: int = 0) -> Tensors:
    """Return inputs of a module over sequences: `x`, and its states, if any."""
    draw = np.random.default_rng(seed)
    inputs = {"x": draw.standard_normal((batch, length, FEATURES)).astype(np.float32)}
    if isinstance(module, Stateful | StatefulLstm):
        shape = batch, module.layer.num_layers * (2 if module.layer.bidirectional else 1), HIDDEN
        names = ("h", "c") if isinstance(module, StatefulLstm) else ("h",)
        inputs |= {name: draw.standard_normal(shape).astype(np.float32) for name in names}
    return inputs


class Masked(nn.Module):
    """Attention over a recurrent layer's steps, with a second input of equal length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.score = nn.GRU(FEATURES, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        steps, _ = self.layer(x)
        scores = self.score(steps).squeeze(-1).masked_fill(mask == 0, -1e9)
        return (torch.softmax(scores, 1).unsqueeze(-1) * steps).sum(1)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = (
            nn.Conv1d(FEATURES, HIDDEN, 3, stride=2),
            nn.LSTM(HIDDEN, HIDDEN, bidirectional=True),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.conv(x.transpose(1, 2)).permute(2, 0, 1))[1][0].transpose(0, 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.widen, self.encoder = nn.Linear(FEATURES, 6), nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.encoder(self.widen(x))


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class Banded(nn.Module):
    """Attention of each step to the steps before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        return torch.softmax(x @ x.transpose(1, 2) + later, -1) @ x


class Padded(nn.Module):
    """Module that pads its input to a multiple of 8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))


class Mixing(nn.Module):
    """A layer as wide as the sequence is long, inside another layer."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Tanh(), nn.Linear(length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(x.transpose(1, 2))
        return mixed.transpose(1, 2)


class Unrolled(nn.Module):
    """A cell in a loop over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], HIDDEN)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(FEATURES, HIDDEN, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.layer(packed)[1][-1]


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, HIDDEN, batch_first=True, proj_size=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]
