"""Task metrics: what can be measured, and what shapes each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

MetricName: TypeAlias = Literal["accuracy", "top_k", "f1", "auc", "mae", "rmse", "r2", "cosine", "token_agreement"]
Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"]

TOP_K = 5
IGNORED_TOKEN = -100
"""What training code writes where a token of the label does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTraits:
    """What one metric is like.

    `options` are the keys of a gate that shape it; `label_free` says that, without labels, the candidate is compared
    with the baseline itself.
    """

    higher_is_better: bool = True
    options: frozenset[str] = frozenset()
    label_free: bool = False


METRICS: Mapping[MetricName, MetricTraits] = {
    "accuracy": MetricTraits(),
    "top_k": MetricTraits(options=frozenset({"k"})),
    "f1": MetricTraits(options=frozenset({"average", "positive"})),
    "auc": MetricTraits(options=frozenset({"positive"})),
    "mae": MetricTraits(higher_is_better=False),
    "rmse": MetricTraits(higher_is_better=False),
    "r2": MetricTraits(),
    "cosine": MetricTraits(label_free=True),
    "token_agreement": MetricTraits(options=frozenset({"ignore"}), label_free=True),
}


_CLASSES: frozenset[MetricName] = frozenset({"accuracy", "top_k", "f1", "auc"})
_NUMBERS: frozenset[MetricName] = frozenset({"mae", "rmse", "r2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDefinition:
    """Everything that shapes a metric's value, and no limit. `name` is None for an own metric, which has `use`.

    Two definitions that measure the same are equal: what a gate leaves out has been filled in.
    """

    name: MetricName | None = None
    use: str = ""
    k: int | None = None
    average: Average | None = None
    positive: str | int | None = None
    output: str | None = None
    ignore: int | None = None

    @property
    def label(self) -> str:
        """Its name in evidence and tables; no two definitions share one."""
        first = f"top_{self.k}" if self.name == "top_k" else self.name or self.use
        parts = [first, self.average or ""]
        parts += [
            f"{key}:{value}"
            for key, value in (("positive", self.positive), ("output", self.output), ("ignore", self.ignore))
            if value is not None and (key, value) != ("ignore", IGNORED_TOKEN)
        ]
        return " ".join(part for part in parts if part)

    @property
    def label_free(self) -> bool:
        """Whether models can be compared with each other where there are no labels."""
        return self.name is not None and METRICS[self.name].label_free

    @property
    def other_kind(self) -> str:
        """What the metric is of, and which metrics are of the other kind; empty for those that have none."""
        if self.name in _CLASSES:
            return f"{self.name} is of classes; for numbers use rmse, mae or r2."
        return f"{self.name} is of numbers; for classes use accuracy, f1 or auc." if self.name in _NUMBERS else ""

    @property
    def higher_is_better(self) -> bool | None:
        """None for an own metric: its gate says it."""
        return None if self.name is None else METRICS[self.name].higher_is_better


ACCURACY = MetricDefinition(name="accuracy")
