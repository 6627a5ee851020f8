"""Small networks of the kinds that people export, with rows for each.

A correct export of them must pass. They are neither trained nor chosen by how they export. They
cover most layer families of PyTorch that use only tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from benchmarks.truth.draws import derive_seed, make_generator

AnyArray = npt.NDArray[Any]
T = torch.Tensor

ROWS, WORDS, LENGTH, WIDTH = 192, 50, 10, 16


class Net(nn.Module):
    """A module of named parts, and a function of the parts and the inputs."""

    def __init__(self, parts: Mapping[str, nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.run = run

    def forward(self, *inputs: T) -> Any:
        return self.run(self.parts, *inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One network with its rows.

    `dynamic` holds the free axes other than the batch, by input.
    """

    name: str
    module: nn.Module
    samples: Mapping[str, AnyArray]
    dynamic: Mapping[str, Mapping[int, str]]


Make = Callable[[], nn.Module]
_CASES: dict[str, tuple[Make, tuple[str, ...]]] = {}


def cases(step: int = 1) -> Iterator[Case]:
    """Yield every `step`-th case."""
    for number, (name, (make, kinds)) in list(enumerate(_CASES.items()))[::step]:
        torch.manual_seed(derive_seed(number))
        draw = make_generator(number)
        samples: dict[str, AnyArray] = {}
        dynamic: dict[str, dict[int, str]] = {}
        for index, kind in enumerate(kinds):
            key = f"{kind}{index}"
            samples[key] = _INPUTS[kind.removesuffix("*")](draw)
            dynamic[key] = {0: "batch", **({1: "length"} if kind.endswith("*") else {})}
        module = make().eval()
        samples = {name.replace("*", ""): array for name, array in samples.items()}
        dynamic = {name.replace("*", ""): axes for name, axes in dynamic.items()}
        yield Case(name=name, module=module, samples=samples, dynamic=dynamic)


_INPUTS: dict[str, Callable[[np.random.Generator], AnyArray]] = {
    "x": lambda d: d.standard_normal((ROWS, 12)).astype(np.float32),
    "y": lambda d: d.standard_normal((ROWS, 12)).astype(np.float32),
    "positive": lambda d: d.lognormal(0, 1, (ROWS, 12)).astype(np.float32),
    "table": lambda d: (
        d.standard_normal((ROWS, 6)) * [1, 10, 1e3, 0.1, 5, 1] + [0, 50, 1e4, 0, 0, 3]
    ).astype(np.float32),
    "image": lambda d: d.random((ROWS, 3, 16, 16)).astype(np.float32),
    "digit": lambda d: d.random((ROWS, 1, 8, 8)).astype(np.float32),
    "wave": lambda d: np.cumsum(d.standard_normal((ROWS, 2, 24)), axis=2).astype(np.float32) / 4,
    "volume": lambda d: d.random((ROWS, 1, 6, 6, 6)).astype(np.float32),
    "series": lambda d: d.standard_normal((ROWS, LENGTH, 6)).astype(np.float32),
    "memory": lambda d: d.standard_normal((ROWS, 7, 6)).astype(np.float32),
    "tokens": lambda d: d.integers(0, WORDS, (ROWS, LENGTH)),
    "target": lambda d: d.integers(0, WORDS, (ROWS, 6)),
    "mask": lambda d: (np.arange(LENGTH) < d.integers(2, LENGTH + 1, (ROWS, 1))).astype(np.int64),
    "category": lambda d: d.integers(0, 8, (ROWS, 3)),
    "count": lambda d: d.integers(0, 1000, (ROWS, 4)),
}


def net(name: str, *kinds: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        assert name not in _CASES, name
        _CASES[name] = (make, kinds)
        return make

    return register


def stack(name: str, kind: str, *layers: Callable[[], nn.Module]) -> None:
    _CASES[name] = (lambda: nn.Sequential(*(layer() for layer in layers)), (kind,))


def function(
    name: str, run: Callable[..., Any], *kinds: str, **parts: Callable[[], nn.Module]
) -> None:
    _CASES[name] = (lambda: Net({key: make() for key, make in parts.items()}, run), kinds)


def linear(a: int, b: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(a, b)


def conv(a: int, b: int, size: int = 3, **how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(a, b, size, padding=how.pop("padding", size // 2), **how)


def act(kind: type[nn.Module], *args: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*args)


# The following networks consist of plain layers, activations and functions of tensors.

stack("linear", "x", linear(12, 3))
for _kind in (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Mish,
    nn.Softplus,
    nn.Softsign,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.ReLU6,
    nn.LogSigmoid,
    nn.Hardtanh,
    nn.Tanhshrink,
):
    stack(f"mlp-{_kind.__name__.lower()}", "x", linear(12, 24), act(_kind), linear(24, 3))
stack(
    "mlp-batchnorm",
    "x",
    linear(12, 24),
    act(nn.BatchNorm1d, 24),
    act(nn.ReLU),
    act(nn.Dropout),
    linear(24, 3),
)
stack(
    "mlp-layernorm",
    "table",
    act(nn.BatchNorm1d, 6),
    linear(6, 24),
    act(nn.LayerNorm, 24),
    act(nn.GELU),
    linear(24, 2),
)
stack("mlp-softmax", "x", linear(12, 24), act(nn.ReLU), linear(24, 5), act(nn.Softmax, 1))
stack("mlp-logsoftmax", "x", linear(12, 24), act(nn.ReLU), linear(24, 5), act(nn.LogSoftmax, 1))
function(
    "rmsnorm",
    lambda p, x: p["a"](x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "x",
    a=linear(12, 3),
)
function("normalize", lambda p, x: functional.normalize(p["a"](x), dim=1), "x", a=linear(12, 8))
function("log1p", lambda p, x: p["a"](torch.log1p(x)), "positive", a=linear(12, 3))
function("exp", lambda p, x: torch.exp(p["a"](x)), "x", a=linear(12, 3))
function("sqrt", lambda p, x: p["a"](torch.sqrt(x)).pow(2), "positive", a=linear(12, 3))
function(
    "clamp-where",
    lambda p, x: torch.where(x > 0, p["a"](x), p["b"](x.clamp(-1, 1))),
    "x",
    a=linear(12, 12),
    b=linear(12, 12),
)
function(
    "siamese",
    lambda p, x, y: functional.cosine_similarity(p["a"](x), p["a"](y), dim=1),
    "x",
    "y",
    a=linear(12, 8),
)
function(
    "cdist",
    lambda p, x: torch.cdist(p["a"](x), p["b"].weight, compute_mode="donot_use_mm_for_euclid_dist"),
    "x",
    a=linear(12, 8),
    b=linear(8, 5),
)
function("bilinear", lambda p, x, y: p["a"](x, y), "x", "y", a=lambda: nn.Bilinear(12, 12, 4))
function(
    "einsum",
    lambda p, x: torch.einsum("bi,bj->bij", p["a"](x), p["b"](x)),
    "x",
    a=linear(12, 4),
    b=linear(12, 4),
)
function(
    "experts",
    lambda p, x: (
        torch.softmax(p["g"](x), 1)[:, :, None] * torch.stack([p["a"](x), p["b"](x)], 1)
    ).sum(1),
    "x",
    g=linear(12, 2),
    a=linear(12, 6),
    b=linear(12, 6),
)
function("top-k", lambda p, x: torch.topk(p["a"](x), 3, dim=1), "x", a=linear(12, 9))
function("argmax", lambda p, x: (p["a"](x), p["a"](x).argmax(1)), "x", a=linear(12, 9))
function("sort", lambda p, x: torch.sort(p["a"](x), dim=1).values, "x", a=linear(12, 9))
function("cumsum", lambda p, x: torch.cumsum(p["a"](x), dim=1), "x", a=linear(12, 9))
function(
    "median-max",
    lambda p, x: torch.cat([x.amax(1, keepdim=True), x.amin(1, keepdim=True), p["a"](x)], 1),
    "x",
    a=linear(12, 2),
)
function("whole-numbers", lambda p, n: p["a"](torch.log1p(n.float())), "count", a=linear(4, 3))
function("remainder", lambda p, n: torch.stack([n.remainder(7), n // 10, n % 60], -1), "count")
function(
    "one-hot",
    lambda p, c: p["a"](functional.one_hot(c, 8).float().flatten(1)),
    "category",
    a=linear(24, 3),
)

# Most of the following networks contain convolutions; all take images, waves or volumes.


def _by_cell(x: T, parts: int) -> T:
    """Return the values of a grid as (rows, cells x anchors, parts).

    The grid has the shape (rows, anchors x parts, height, width).
    """
    return x.reshape(len(x), 2, parts, -1).permute(0, 1, 3, 2).flatten(1, 2)


def _detect(p: Any, x: T) -> Any:
    """Decode boxes by cell and anchor, and return the best of them with their scores."""
    y = functional.relu(p["a"](x))
    boxes = _by_cell(p["box"](y), 4)
    scores = torch.sigmoid(_by_cell(p["score"](y), 3))
    centre, size = boxes[..., :2].sigmoid() * 16, boxes[..., 2:].exp()
    best, where = scores.amax(2).topk(5, dim=1)
    corners = torch.cat([centre - size / 2, centre + size / 2], -1)
    return corners.gather(1, where[..., None].expand(-1, -1, 4)), best


stack(
    "cnn-maxpool",
    "digit",
    conv(1, 8),
    act(nn.ReLU),
    act(nn.MaxPool2d, 2),
    act(nn.Flatten),
    linear(128, 5),
)
stack(
    "cnn-avgpool",
    "digit",
    conv(1, 8),
    act(nn.ReLU),
    act(nn.AvgPool2d, 2),
    act(nn.Flatten),
    linear(128, 5),
)
stack(
    "cnn-global",
    "image",
    conv(3, 8),
    act(nn.BatchNorm2d, 8),
    act(nn.ReLU),
    act(nn.AdaptiveAvgPool2d, 1),
    act(nn.Flatten),
    linear(8, 5),
)
stack(
    "cnn-global-max",
    "image",
    conv(3, 8),
    act(nn.ReLU),
    act(nn.AdaptiveMaxPool2d, 1),
    act(nn.Flatten),
    linear(8, 5),
)
stack(
    "cnn-groupnorm",
    "image",
    conv(3, 8),
    act(nn.GroupNorm, 2, 8),
    act(nn.SiLU),
    conv(8, 4, stride=2),
    act(nn.Flatten),
    linear(256, 5),
)
stack(
    "cnn-instancenorm",
    "image",
    conv(3, 8),
    act(nn.InstanceNorm2d, 8),
    act(nn.ReLU),
    act(nn.AdaptiveAvgPool2d, 1),
    act(nn.Flatten),
)
stack(
    "cnn-depthwise",
    "image",
    conv(3, 6, groups=3),
    act(nn.ReLU6),
    conv(6, 8, 1),
    act(nn.AdaptiveAvgPool2d, 1),
    act(nn.Flatten),
)
stack("cnn-dilated", "image", conv(3, 6, dilation=2, padding=2), act(nn.ReLU), conv(6, 2, 1))
stack(
    "cnn-1d",
    "wave",
    lambda: nn.Conv1d(2, 8, 5, padding=2),
    act(nn.ReLU),
    act(nn.MaxPool1d, 2),
    act(nn.Flatten),
    linear(96, 3),
)
stack(
    "cnn-3d",
    "volume",
    lambda: nn.Conv3d(1, 4, 3),
    act(nn.ReLU),
    act(nn.MaxPool3d, 2),
    act(nn.Flatten),
    linear(32, 3),
)
stack(
    "cnn-transposed",
    "digit",
    conv(1, 4, stride=2),
    act(nn.ReLU),
    lambda: nn.ConvTranspose2d(4, 1, 2, stride=2),
    act(nn.Sigmoid),
)
stack("cnn-pixelshuffle", "digit", conv(1, 4), act(nn.PixelShuffle, 2))
stack(
    "cnn-upsample",
    "digit",
    conv(1, 4),
    lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    conv(4, 1),
)
stack(
    "cnn-bilinear",
    "digit",
    conv(1, 4),
    lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    conv(4, 1),
)
stack(
    "cnn-reflect",
    "digit",
    act(nn.ReflectionPad2d, 1),
    conv(1, 4, padding=0),
    act(nn.ReLU),
    act(nn.Flatten),
    linear(256, 3),
)
stack(
    "cnn-lrn",
    "image",
    conv(3, 8),
    act(nn.LocalResponseNorm, 3),
    act(nn.ReLU),
    act(nn.AdaptiveAvgPool2d, 2),
    act(nn.Flatten),
)
function(
    "resnet",
    lambda p, x: p["last"](
        p["pool"](
            functional.relu(p["b"](functional.relu(p["a"](p["stem"](x)))) + p["stem"](x))
        ).mean((2, 3))
    ),
    "image",
    stem=lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ),
    a=conv(8, 8),
    b=conv(8, 8),
    pool=act(nn.MaxPool2d, 2),
    last=linear(8, 5),
)
function(
    "u-net",
    lambda p, x: p["out"](
        torch.cat(
            [
                functional.interpolate(
                    functional.relu(
                        p["mid"](functional.max_pool2d(functional.relu(p["down"](x)), 2))
                    ),
                    scale_factor=2,
                ),
                p["down"](x),
            ],
            1,
        )
    ),
    "image",
    down=conv(3, 6),
    mid=conv(6, 6),
    out=conv(12, 2),
)
function(
    "squeeze-excite",
    lambda p, x: (
        p["a"](x)
        * torch.sigmoid(p["c"](functional.relu(p["b"](p["a"](x).mean((2, 3), keepdim=True)))))
    ),
    "image",
    a=conv(3, 8),
    b=conv(8, 2, 1),
    c=conv(2, 8, 1),
)
function(
    "inverted-residual",
    lambda p, x: x + p["c"](functional.hardswish(p["b"](functional.hardswish(p["a"](x))))),
    "image",
    a=conv(3, 9, 1),
    b=conv(9, 9, groups=9),
    c=conv(9, 3, 1),
)
function(
    "dense-block",
    lambda p, x: p["b"](functional.relu(torch.cat([x, p["a"](x)], 1))),
    "image",
    a=conv(3, 5),
    b=conv(8, 4),
)
function(
    "channel-shuffle",
    lambda p, x: p["b"](functional.channel_shuffle(p["a"](x), 2)),
    "image",
    a=conv(3, 8, 1),
    b=conv(8, 2, 1),
)
function(
    "autoencoder",
    lambda p, x: torch.sigmoid(
        p["d"](functional.relu(p["c"](p["b"](functional.relu(p["a"](x.flatten(1)))))))
    ).view(-1, 1, 8, 8),
    "digit",
    a=linear(64, 16),
    b=linear(16, 4),
    c=linear(4, 16),
    d=linear(16, 64),
)
function(
    "detection", _detect, "image", a=conv(3, 8, stride=2), box=conv(8, 8, 1), score=conv(8, 6, 1)
)
function(
    "segmentation",
    lambda p, x: (p["b"](functional.relu(p["a"](x))), p["b"](functional.relu(p["a"](x))).argmax(1)),
    "image",
    a=conv(3, 8),
    b=conv(8, 4, 1),
)


# The following networks read sequences, most of them with recurrent layers.

function(
    "lstm",
    lambda p, s: p["b"](p["a"](s)[0][:, -1]),
    "series*",
    a=lambda: nn.LSTM(6, 12, batch_first=True),
    b=linear(12, 3),
)
function(
    "lstm-two-ways",
    lambda p, s: p["b"](p["a"](s)[0]),
    "series*",
    b=linear(24, 3),
    a=lambda: nn.LSTM(6, 12, batch_first=True, bidirectional=True),
)
function(
    "lstm-stacked",
    lambda p, s: p["a"](s)[1][0][-1],
    "series*",
    a=lambda: nn.LSTM(6, 12, 2, batch_first=True),
)
function(
    "lstm-words",
    lambda p, t: p["b"](p["a"](p["e"](t))[0].mean(1)),
    "tokens*",
    e=lambda: nn.Embedding(WORDS, WIDTH),
    a=lambda: nn.LSTM(WIDTH, 12, batch_first=True),
    b=linear(12, 3),
)
function(
    "gru",
    lambda p, s: p["b"](p["a"](s)[0][:, -1]),
    "series*",
    a=lambda: nn.GRU(6, 12, batch_first=True),
    b=linear(12, 3),
)
function(
    "gru-two-ways",
    lambda p, s: p["a"](s)[0],
    "series*",
    a=lambda: nn.GRU(6, 8, batch_first=True, bidirectional=True),
)
function(
    "gru-words",
    lambda p, t: p["b"](p["a"](p["e"](t))[1][0]),
    "tokens*",
    e=lambda: nn.Embedding(WORDS, WIDTH),
    a=lambda: nn.GRU(WIDTH, 12, batch_first=True),
    b=linear(12, 3),
)
function(
    "rnn",
    lambda p, s: p["b"](p["a"](s)[0][:, -1]),
    "series*",
    a=lambda: nn.RNN(6, 12, batch_first=True),
    b=linear(12, 3),
)
function(
    "cnn-gru",
    lambda p, w: p["b"](p["a"](p["c"](w).transpose(1, 2))[0][:, -1]),
    "wave",
    c=lambda: nn.Conv1d(2, 6, 3, padding=1),
    a=lambda: nn.GRU(6, 8, batch_first=True),
    b=linear(8, 2),
)
function(
    "tcn",
    lambda p, w: p["b"](functional.relu(p["a"](functional.pad(w, (4, 0))))).mean(2),
    "wave",
    a=lambda: nn.Conv1d(2, 8, 3, dilation=2),
    b=lambda: nn.Conv1d(8, 3, 1),
)

# Most of the following networks contain attention. The others mask, rotate or mix tokens.


def encoder_layer(**how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, **how)


function(
    "attention",
    lambda p, s: p["a"](*[p["e"](s)] * 3, need_weights=False)[0],
    "series*",
    e=linear(6, WIDTH),
    a=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
)
function(
    "cross-attention",
    lambda p, s, m: p["a"](p["e"](s), p["f"](m), p["f"](m), need_weights=False)[0],
    "series",
    "memory",
    e=linear(6, WIDTH),
    f=linear(6, WIDTH),
    a=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
)
function(
    "transformer-encoder",
    lambda p, s: p["b"](p["a"](p["e"](s)).mean(1)),
    "series*",
    e=linear(6, WIDTH),
    a=encoder_layer,
    b=linear(WIDTH, 3),
)
function(
    "transformer-prenorm",
    lambda p, s: p["a"](p["e"](s)),
    "series",
    e=linear(6, WIDTH),
    a=lambda: encoder_layer(norm_first=True, activation="gelu"),
)
function(
    "transformer-words",
    lambda p, t: p["b"](p["a"](p["e"](t) + p["w"](torch.arange(LENGTH)[None])).mean(1)),
    "tokens",
    e=lambda: nn.Embedding(WORDS, WIDTH),
    w=lambda: nn.Embedding(LENGTH, WIDTH),
    a=encoder_layer,
    b=linear(WIDTH, 3),
)
function(
    "masked-words",
    lambda p, t, m: p["b"]((p["e"](t) * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp(min=1)),
    "tokens*",
    "mask*",
    e=lambda: nn.Embedding(WORDS, WIDTH),
    b=linear(WIDTH, 3),
)
function(
    "masked-attention",
    lambda p, t, m: _attend(p, p["e"](t), (m == 0)[:, None, None, :]),
    "tokens",
    "mask",
    e=lambda: nn.Embedding(WORDS, WIDTH),
    qkv=linear(WIDTH, 3 * WIDTH),
)
function(
    "causal-attention",
    lambda p, s: _attend(p, p["e"](s), torch.ones(LENGTH, LENGTH).triu(1).bool()),
    "series",
    e=linear(6, WIDTH),
    qkv=linear(WIDTH, 3 * WIDTH),
)
function(
    "decoder",
    lambda p, t, s: p["b"](p["a"](p["e"](t), p["f"](s))),
    "target",
    "series",
    e=lambda: nn.Embedding(WORDS, WIDTH),
    f=linear(6, WIDTH),
    a=lambda: nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True),
    b=linear(WIDTH, WORDS),
)
function(
    "sdpa",
    lambda p, s: functional.scaled_dot_product_attention(p["q"](s), p["k"](s), p["v"](s)),
    "series",
    q=linear(6, 8),
    k=linear(6, 8),
    v=linear(6, 8),
)
function("rotary", lambda p, s: _rotate(p["a"](s)), "series", a=linear(6, 8))
function(
    "mixer",
    lambda p, s: p["b"](functional.gelu(p["a"](s.transpose(1, 2))).transpose(1, 2)) + s,
    "series",
    a=linear(LENGTH, LENGTH),
    b=linear(6, 6),
)
function(
    "vision-transformer",
    lambda p, x: p["b"](p["a"](p["patch"](x).flatten(2).transpose(1, 2)).mean(1)),
    "image",
    patch=lambda: nn.Conv2d(3, WIDTH, 4, stride=4),
    a=encoder_layer,
    b=linear(WIDTH, 5),
)


def _attend(p: Any, x: T, hidden: T) -> T:
    q, k, v = p["qkv"](x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (
        (q @ k.transpose(-1, -2) / (WIDTH // 2) ** 0.5)
        .masked_fill(hidden, float("-inf"))
        .softmax(-1)
    )
    answer: T = (weights @ v).transpose(1, 2).flatten(2)
    return answer


def _rotate(x: T) -> T:
    angle = torch.arange(LENGTH, dtype=x.dtype)[:, None] / 10 ** torch.arange(4, dtype=x.dtype)
    one, two = x[..., :4], x[..., 4:]
    return torch.cat(
        [one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1
    )


# The following networks take words, categories or tables.

function("embedding", lambda p, t: p["e"](t), "tokens*", e=lambda: nn.Embedding(WORDS, WIDTH))
function(
    "embedding-bag",
    lambda p, t: p["b"](p["e"](t).sum(1)),
    "tokens*",
    e=lambda: nn.Embedding(WORDS, WIDTH, padding_idx=0),
    b=linear(WIDTH, 3),
)
function(
    "wide-and-deep",
    lambda p, x, c: p["b"](torch.cat([x, p["e"](c).flatten(1)], 1)),
    "table",
    "category",
    e=lambda: nn.Embedding(8, 4),
    b=lambda: nn.Sequential(nn.BatchNorm1d(18), nn.Linear(18, 12), nn.ReLU(), nn.Linear(12, 1)),
)
function(
    "factorization-machine",
    lambda p, c: (
        p["w"](c).sum((1, 2)) + (p["e"](c).sum(1).pow(2) - p["e"](c).pow(2).sum(1)).sum(1) / 2
    ),
    "category",
    w=lambda: nn.Embedding(8, 1),
    e=lambda: nn.Embedding(8, 4),
)
function(
    "two-towers",
    lambda p, t, c: (p["e"](t).mean(1) * p["f"](c).mean(1)).sum(1),
    "tokens",
    "category",
    e=lambda: nn.Embedding(WORDS, 8),
    f=lambda: nn.Embedding(8, 8),
)
