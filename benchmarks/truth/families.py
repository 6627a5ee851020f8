"""Families of models into which faults are injected.

The product's own exporters export each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from benchmarks.truth.draws import derive_seed
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.domain.evidence import SourceLimits
from onnx_ops.domain.pipeline import Export
from onnx_ops.measure.reference_outputs import ReferenceGroup, collect_reference_outputs
from onnx_ops.ports import Exporter, ExportRequest, Tensors, Tree, TreeExporter

torch.set_num_threads(1)  # On busy cores, the threads of a tiny model only wait for each other.

ROWS = 256
"""Number of real rows on which the export is validated."""

TOKENS, WIDTH, CLASSES = 12, 32, 10
VOCABULARY = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A correct export, and the answers, limits and trees of its source.

    `unseen` holds further rows, on which the export is not validated.
    """

    family: str
    seed: int
    path: Path
    groups: list[ReferenceGroup]
    limits: SourceLimits
    trees: tuple[Tree, ...] | None
    samples: Tensors
    unseen: Tensors


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(64, 32),
            nn.Linear(32, 32),
            nn.Linear(32, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(torch.tanh(self.second(torch.relu(self.first(x)))))
        return scores


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 16, 3, padding=1), nn.Linear(16 * 4, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        wide = torch.max_pool2d(torch.relu(self.norm(self.first(image))), 2)
        deep = torch.nn.functional.avg_pool2d(torch.relu(self.second(wide)), 2)
        scores: torch.Tensor = self.last(torch.flatten(deep, 1))
        return scores


class Transformer(nn.Module):
    """One transformer block over float tokens.

    It has positions, attention of two heads and a GELU layer, both of the latter with residuals.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.place = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.last = (
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens) + self.place
        y = self.norm1(x)
        q, k, v = (self._heads(part(y)) for part in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // 2) ** 0.5, dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))
        return torch.softmax(self.last(x.mean(dim=1)), dim=-1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(-1, (2, WIDTH // 2))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cells, self.last = kind(8, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.cells(series)[0].mean(dim=1))
        return scores


class Words(nn.Module):
    """A bag of words with attention to the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = (
            nn.Embedding(VOCABULARY, 16),
            nn.LayerNorm(16),
            nn.Linear(16, CLASSES),
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        weights = torch.softmax((x * x[:, :1]).sum(-1, keepdim=True), dim=1)
        scores: torch.Tensor = self.last(self.norm((weights * x).sum(dim=1)))
        return scores


class Clock(nn.Module):
    """A net that reads the hour and the weekday of times in milliseconds.

    Some of the times are before 1970.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, CLASSES)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        day = 86_400_000
        parts = torch.cat([times.remainder(day) * 7, times.remainder(7 * day)], 1)
        scores: torch.Tensor = self.last(
            torch.relu(self.first(parts.to(self.first.weight.dtype) / day))
        )
        return scores


def exports(folder: Path, seeds: int) -> Iterator[Exported]:
    """Yield an export of every family with every seed."""
    for seed in map(derive_seed, range(seeds)):
        for family, make in FAMILIES.items():
            yield make(family, folder / f"{family}-{seed}.onnx", seed)


def trained(module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, steps: int) -> nn.Module:
    """Train the module with a few steps of Adam on all rows, and return it."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    module.train()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module.eval()


def _torch(
    kind: Callable[[], nn.Module],
    name: str,
    shape: tuple[int, ...],
    whole: tuple[int, int] | None = None,
) -> Callable[[str, Path, int], Exported]:
    """Return a maker of exports of a torch module.

    The rows are standard normal, or whole numbers between two bounds.
    """

    def make(family: str, path: Path, seed: int) -> Exported:
        torch.manual_seed(seed)
        draw = np.random.default_rng(seed)
        rows: Any = draw.standard_normal((2 * ROWS, *shape)).astype(np.float32)
        if whole is not None:
            rows = draw.integers(*whole, (2 * ROWS, *shape))
        labels = torch.from_numpy(draw.integers(0, CLASSES, len(rows)))
        module = trained(kind(), torch.from_numpy(rows), labels, steps=20)
        return _exported(family, path, seed, TorchExporter(), module, name, rows)

    return make


def _sklearn(
    estimator: Callable[[int], Any], *, holes: float = 0
) -> Callable[[str, Path, int], Exported]:
    def make(family: str, path: Path, seed: int) -> Exported:
        features, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(features))
        noisy = features + np.random.default_rng(seed).normal(0, 0.5, features.shape)
        rows = noisy[order].astype(np.float32)
        rows[np.random.default_rng(seed).random(rows.shape) < holes] = np.nan
        model = estimator(seed).fit(rows[2 * ROWS :], labels[order][2 * ROWS :])
        return _exported(family, path, seed, SklearnExporter(), model, "x", rows[: 2 * ROWS])

    return make


def _exported(
    family: str, path: Path, seed: int, exporter: Exporter, model: object, name: str, rows: Any
) -> Exported:
    samples, unseen = {name: rows[:ROWS]}, {name: rows[ROWS:]}
    framework = "torch" if isinstance(model, nn.Module) else "sklearn"
    section = Export(framework=framework, dynamic={name: {0: "batch"}})
    exporter.export(model, ExportRequest(section=section, samples=samples, path=path))
    asked = collect_reference_outputs(exporter, model, path, samples)
    return Exported(
        family=family,
        seed=seed,
        path=path,
        groups=asked.groups,
        limits=asked.limits,
        trees=exporter.trees(model) if isinstance(exporter, TreeExporter) else None,
        samples=samples,
        unseen=unseen,
    )


FAMILIES: dict[str, Callable[[str, Path, int], Exported]] = {
    "mlp": _torch(Mlp, "x", (64,)),
    "cnn": _torch(Cnn, "image", (1, 8, 8)),
    "transformer": _torch(Transformer, "tokens", (TOKENS, 8)),
    "lstm": _torch(lambda: Recurrent(nn.LSTM), "series", (TOKENS, 8)),
    "gru": _torch(lambda: Recurrent(nn.GRU), "series", (TOKENS, 8)),
    "words": _torch(Words, "words", (TOKENS,), (0, VOCABULARY)),
    "clock": _torch(Clock, "times", (2,), (-(10**11), 2 * 10**12)),
    "trees": _sklearn(
        lambda seed: RandomForestClassifier(n_estimators=12, max_depth=7, random_state=seed)
    ),
    "boosted+holes": _sklearn(
        lambda seed: HistGradientBoostingClassifier(max_iter=8, random_state=seed), holes=0.1
    ),
    "scaler+linear": _sklearn(
        lambda seed: make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    ),
    "scaler+trees": _sklearn(
        lambda seed: make_pipeline(
            StandardScaler(),
            RandomForestClassifier(n_estimators=12, max_depth=7, random_state=seed),
        )
    ),
}
