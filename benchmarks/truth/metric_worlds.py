"""Populations of rows on which two models are compared by a metric.

A population is finite, so that the true values are exact: they are those of all of its rows.
`WORLDS` has the metrics of texts, rankings, probabilities and numbers; `vision_worlds` has those of
images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.metric_formulas.calibration import apply_softmax
from onnx_ops.statistics.scores import CANDIDATE

BASELINE = "baseline"
ROWS, GROUP_ROWS = 6000, 2
"""Rows of a population, and rows of each of its groups."""

WORDS = np.array([f"{first}{second}" for first in "bcdfghklmnprst" for second in "aeiou"])
ITEMS, CLASSES = 10, 4

Random = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """All rows of a world: labels, answers of both models, and the group of each row."""

    label: Any
    answers: Mapping[str, Any]
    group: Any = None

    def draw(self, random: Random, rows: int) -> Population:
        """Return rows, or whole groups of rows, that are drawn with replacement."""
        if self.group is None:
            chosen, group = random.integers(0, len(self.label), rows), None
        else:
            groups = random.integers(0, len(self.label) // GROUP_ROWS, rows // GROUP_ROWS)
            chosen = (groups[:, None] * GROUP_ROWS + np.arange(GROUP_ROWS)).ravel()
            group = np.repeat(np.arange(len(groups)), GROUP_ROWS)
        answers = {name: array[chosen] for name, array in self.answers.items()}
        return Population(label=self.label[chosen], answers=answers, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A metric, and what draws a population for it.

    `populate` takes the random numbers and the effect of each row's group, which is 0 for all rows
    of a population without groups.
    """

    definition: MetricDefinition
    populate: Callable[[Random, Any], tuple[Any, Mapping[str, Any]]]

    def make_population(self, random: Random, *, grouped: bool) -> Population:
        """Return a population, in whose groups rows are alike if `grouped` is set."""
        effect = np.zeros(ROWS)
        if grouped:
            effect = np.repeat(random.standard_normal(ROWS // GROUP_ROWS), GROUP_ROWS)
        label, answers = self.populate(random, effect)
        group = np.repeat(np.arange(ROWS // GROUP_ROWS), GROUP_ROWS) if grouped else None
        return Population(label=label, answers=answers, group=group)


def populate_texts(random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw sentences; some rows are difficult for both models, with several errors."""
    texts: list[str] = []
    answers: dict[str, list[str]] = {CANDIDATE: [], BASELINE: []}
    difficult = 1 / (1 + np.exp(2.5 - effect - random.standard_normal(ROWS)))
    for share in difficult:
        words = WORDS[random.zipf(1.6, random.integers(4, 13)) % len(WORDS)]
        texts.append(" ".join(words))
        before = _change_words(random, words, share)
        answers[BASELINE].append(before)
        # Most rows of a variant do not change.
        after = before if random.random() < 0.8 else _change_words(random, words, 1.2 * share)
        answers[CANDIDATE].append(after)
    return np.array(texts), {name: np.array(said) for name, said in answers.items()}


def _change_words(random: Random, words: Any, share: float) -> str:
    """Replace, leave out or repeat each word with the total probability `share`."""
    chance = random.random(len(words))
    kind = random.integers(0, 4, len(words))
    said: list[str] = []
    for word, change in zip(words, np.where(chance < share, kind, -1), strict=True):
        if change in (0, 1):
            said.append(str(random.choice(WORDS)))
        elif change != 2:
            said += [str(word)] * (2 if change == 3 else 1)
    return " ".join(said)


def populate_rankings(random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw queries with one to three relevant items; models differ by noise."""
    grades = np.zeros((ROWS, ITEMS))
    for number in range(3):
        chosen = random.random(ROWS) < (1, 0.4, 0.2)[number]
        item = random.integers(0, ITEMS, ROWS)
        rows = np.flatnonzero(chosen)
        grades[rows, item[rows]] = random.integers(1, 4, len(rows))
    signal = np.exp(0.7 * effect)[:, None] * grades
    scores = signal + 1.2 * random.standard_normal((ROWS, ITEMS))
    changed = scores + 0.3 * random.standard_normal((ROWS, ITEMS))
    return grades, {CANDIDATE: changed, BASELINE: scores}


def populate_probabilities(random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw classes by their probabilities; the models are overconfident."""
    true = 2 * random.standard_normal((ROWS, CLASSES)) * np.exp(0.5 * effect)[:, None]
    below = np.cumsum(apply_softmax(true), axis=1)
    label = (random.random((ROWS, 1)) > below[:, :-1]).sum(axis=1)
    before = 1.3 * true + 0.3 * random.standard_normal(true.shape)
    after = 1.1 * before + 0.2 * random.standard_normal(true.shape)
    return label, {CANDIDATE: apply_softmax(after), BASELINE: apply_softmax(before)}


def populate_numbers(random: Random, effect: Any) -> tuple[Any, Mapping[str, Any]]:
    """Draw positive labels; errors are a share of the label, with heavy tails."""
    label = np.exp(0.5 * random.standard_normal(ROWS))
    size = label * np.exp(0.5 * effect)
    before = label + 0.2 * size * random.standard_t(5, ROWS)
    after = before + 0.05 * size * random.standard_t(5, ROWS)
    return label, {CANDIDATE: after, BASELINE: before}


def _define(name: str, **options: Any) -> MetricDefinition:
    return MetricGate(name=name, **options).definition()


WORLDS: dict[str, World] = {
    **{
        name: World(definition=_define(name), populate=populate_texts)
        for name in ("wer", "cer", "bleu", "chrf")
    },
    **{
        name: World(definition=_define(name, k=k), populate=populate_rankings)
        for name, k in (("recall_at_k", 3), ("ndcg", 5), ("mrr", 10))
    },
    **{
        name: World(definition=_define(name), populate=populate_probabilities)
        for name in ("brier", "log_loss", "ece")
    },
    "quantile_loss": World(definition=_define("quantile_loss", q=0.9), populate=populate_numbers),
    "mape": World(definition=_define("mape"), populate=populate_numbers),
}
"""The worlds by the name of their metric, in the order of the table."""
