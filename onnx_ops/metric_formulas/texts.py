"""Formulas of metrics of texts, from counts by jiwer and sacrebleu for each row.

A corpus score is a function of sums over the rows. The libraries count for each row, and a
statistic adds the counts by the weights of the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_ops.metric_formulas.statistic import Array, MetricStatistic, Weights

_CHRF_ORDER, _CHRF_BETA = 6, 2
"""Longest n-gram and weight of recall of chrF2, the defaults of sacrebleu."""


def make_word_errors(label: Array, answers: Array) -> MetricStatistic:
    """Return the word error rate: wrong words as a share of the references' words."""
    import jiwer

    return _make_error_rate(jiwer.process_words(label.tolist(), answers.tolist()), answers)


def make_character_errors(label: Array, answers: Array) -> MetricStatistic:
    """Return the character error rate, which includes spaces between words."""
    import jiwer

    return _make_error_rate(jiwer.process_characters(label.tolist(), answers.tolist()), answers)


def _make_error_rate(counted: Any, answers: Array) -> MetricStatistic:
    """Return an error rate from jiwer's alignments of all rows."""
    errors = np.array([_count_errors(chunks) for chunks in counted.alignments], dtype=np.float64)
    units = np.array([len(reference) for reference in counted.references], dtype=np.float64)

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        with np.errstate(all="ignore"):
            total = weights @ units
            return np.where(total > 0, weights @ errors / total, np.nan)

    # If a row of average length becomes wrong, the error rate rises by 1 / rows.
    return MetricStatistic(statistic=statistic, reads=answers, step=1 / len(answers))


def _count_errors(chunks: Sequence[Any]) -> int:
    """Return the substitutions, deletions and insertions of one row."""
    return sum(
        max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
        for chunk in chunks
        if chunk.type != "equal"
    )


def list_references(label: Array) -> list[list[str]]:
    """Return the references of each row.

    Args:
        label: texts of shape (rows,) or (rows, references). An empty text is a reference only if
            all texts of the row are empty; it then counts once.
    """
    table = label.reshape(len(label), -1).tolist()
    return [[text for text in texts if text] or texts[:1] for texts in table]


def make_bleu(label: Array, answers: Array) -> MetricStatistic:
    """Return BLEU of the corpus as a share of 1, as sacrebleu computes it by default."""
    from sacrebleu.metrics.bleu import BLEU

    # Without `effective_order`, sacrebleu logs a warning. The option changes only the scores of
    # single rows, which are not used.
    bleu = BLEU(effective_order=True)
    scores = [
        bleu.sentence_score(answer, references)
        for answer, references in zip(answers.tolist(), list_references(label), strict=True)
    ]
    counts = np.array(
        [[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in scores], dtype=np.float64
    )
    orders = bleu.max_ngram_order

    def compute(sums: Array) -> float:
        correct, total = sums[2 : 2 + orders].tolist(), sums[2 + orders :].tolist()
        lengths = round(sums[0]), round(sums[1])
        score = BLEU.compute_bleu(correct, total, *lengths, smooth_method="exp")
        return score.score / 100

    return _make_corpus_score(
        lambda sums: np.array([compute(one) for one in sums]),
        counts,
        slice(2, 2 + orders),
        answers,
    )


def make_chrf(label: Array, answers: Array) -> MetricStatistic:
    """Return chrF2 of the corpus as a share of 1, as sacrebleu computes it by default."""
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    def count(answer: str, references: list[str]) -> Array:
        found = extract_all_char_ngrams(answer, _CHRF_ORDER)
        tables = [
            _match_ngrams(found, extract_all_char_ngrams(reference, _CHRF_ORDER))
            for reference in references
        ]
        return max(tables, key=lambda table: float(_compute_chrf(table[None])[0]))

    counts = np.array(
        [
            count(answer, references).ravel()
            for answer, references in zip(answers.tolist(), list_references(label), strict=True)
        ]
    )

    return _make_corpus_score(
        lambda sums: _compute_chrf(sums.reshape(-1, 3, _CHRF_ORDER)),
        counts,
        slice(2 * _CHRF_ORDER, None),
        answers,
    )


def _match_ngrams(found: Sequence[Counter[str]], wanted: Sequence[Counter[str]]) -> Array:
    """Count the n-grams of an answer, of a reference and of both, by order.

    Where the reference has no n-grams of an order, those of the answer count as 0, as in sacrebleu.
    """
    return np.array(
        [
            [one.total() if other else 0 for one, other in zip(found, wanted, strict=True)],
            [other.total() for other in wanted],
            [(one & other).total() for one, other in zip(found, wanted, strict=True)],
        ],
        dtype=np.float64,
    )


def _compute_chrf(sums: Array) -> npt.NDArray[np.float64]:
    """Return chrF of sums of n-grams with shape (scores, 3, orders).

    Popović 2015, WMT, https://aclanthology.org/W15-3049. Orders without n-grams in the answers or
    in the references are left out.
    """
    answers, references, both = sums[:, 0], sums[:, 1], sums[:, 2]
    counted = (answers > 0) & (references > 0)
    orders = np.maximum(counted.sum(axis=1), 1)
    precision, recall = (
        np.divide(both, totals, out=np.zeros_like(both), where=counted).sum(axis=1) / orders
        for totals in (answers, references)
    )
    below = _CHRF_BETA**2 * precision + recall
    above = (1 + _CHRF_BETA**2) * precision * recall
    return np.asarray(np.divide(above, below, out=np.zeros_like(above), where=below > 0))


def _make_corpus_score(
    compute: Callable[[Array], npt.NDArray[np.float64]],
    counts: Array,
    matches: slice,
    answers: Array,
) -> MetricStatistic:
    """Return the score of a corpus.

    Its step is the effect of a row of average length in which no n-gram matches.

    Args:
        compute: takes sums of counts, of shape (scores, columns), and returns scores.
        counts: the counts of each row.
        matches: the columns of n-grams that an answer shares with its references.
    """
    total = counts.sum(axis=0)
    wrong = total.copy()
    wrong[matches] *= 1 - 1 / len(counts)
    step = compute(total[None])[0] - compute(wrong[None])[0]
    return MetricStatistic(
        statistic=lambda weights: compute(weights @ counts), reads=answers, step=float(step)
    )
