"""PyTorch modules that tests export.

Tests import this file where they need it, because torch takes long to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Convolution(nn.Module):
    """Module with layers that differ between training and inference.

    They are batch normalisation and dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(144, 3),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(image)
        return scores


class Pooled(nn.Module):
    """Module that takes images of any height and width, at least 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 4, 2), nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(torch.relu(self.conv(image)).mean(dim=(2, 3)))
        return scores


class FixedBatch(nn.Module):
    """Module with a loop over the rows, which fixes the size of a batch."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.sum() for row in image.unbind(0)])


class TwoInputs(nn.Module):
    def forward(self, left: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left + index[:, None], "twice": 2 * index}


class Difference(nn.Module):
    """Module that gives other answers if its inputs are exchanged."""

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (user - 2 * item).sum(1, keepdim=True)


class Exchanged(nn.Module):
    """Module that passes two inputs to another module by position, in the wrong order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> Any:
        return self.inner(item, user)


class Optionals(nn.Module):
    """Module with optional inputs and a keyword-only input.

    Callers omit some of the optional inputs.
    """

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        masked = x if mask is None else x * (mask > 0)
        moved = masked if bias is None else masked + 3 * bias
        return (moved if scale is None else moved * (1 + scale)).sum(1, keepdim=True)


class AnyInputs(nn.Module):
    """Module that takes its inputs by position only."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        first, second = inputs
        return (first - 2 * second).sum(1, keepdim=True)


class Swallowing(nn.Module):
    """Module that ignores inputs that it does not name."""

    def forward(self, user: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return user.sum(1, keepdim=True)


class AnyNames(nn.Module):
    """Module that names none of its inputs."""

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return inputs["user"] - 2 * inputs["item"]


class Mixed(nn.Module):
    """Module that takes one input by name and the others by position."""

    def forward(self, user: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return user - 2 * others[0]


class Ignoring(nn.Module):
    """Module with an input on which no answer depends."""

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return user.sum(1, keepdim=True) + (item - item).sum(1, keepdim=True)


class Outputs(nn.Module):
    def forward(self, user: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"difference": user - 2 * item, "sum": user + item, "product": user * item}


class Tuple(nn.Module):
    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return image.mean((1, 2, 3)), image.amax((1, 2, 3))


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> list[object]:
        return [x, {"inner": x}]


class Single(nn.Module):
    """Module that creates a float32 tensor, so that it does not run in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, torch.ones(8, 2))


class Guarded(nn.Module):
    """Module that converts a tensor to a number in order to branch on it."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image if float(image.sum()) > 0 else -image


class Counted(nn.Module):
    """Module that makes a plain number of the batch size.

    torch.export keeps the batch size dynamic only in strict mode.
    """

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.reshape(len(image), -1)


class Branching(nn.Module):
    """Module that branches on a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Conditional(nn.Module):
    """Module that branches with torch's operator for conditions."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() * 2, (x,))


class Casting(nn.Module):
    """Module that converts its input to another type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind: torch.dtype = getattr(torch, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.kind)


@torch.library.custom_op("onnx_ops_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """Return twice the input, by an operator that torch cannot translate to ONNX."""
    return 2 * x


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = torch.ops.onnx_ops_tests.twice(image)
        return doubled + 1


def twice_in_onnx(x: Any) -> Any:
    from onnxscript import opset18

    return opset18.Add(x, x)


TRANSLATIONS = {torch.ops.onnx_ops_tests.twice.default: twice_in_onnx}
NO_TRANSLATIONS = [twice_in_onnx]


class Attention(nn.Module):
    """Attention without an axis of heads."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(x), value=self.value(x), is_causal=self.causal
        )
        return answer


class MaskedAttention(Attention):
    """Attention whose mask has one matrix for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x[:, :, :1] > x[:, None, :, 0]).float()
        answer: torch.Tensor = nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x), mask
        )
        return answer


class Encoder(nn.Module):
    """Module that encodes the lines of an image with self-attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.layer(image[:, 0])
        return encoded.mean(1)


class GraphNodes(nn.Module):
    """Module over the nodes of one graph, whose edges are numbers of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x + x[edges[1]][: x.shape[0]])
        return answer
