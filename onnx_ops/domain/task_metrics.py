"""The table of task metrics: all properties of a metric, and what computes it.

Checks of files, and commands that measure nothing, read the table too. Entries therefore import
NumPy and the formulas only when they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from onnx_ops.domain.quantities import OneOf

if TYPE_CHECKING:
    from onnx_ops.metric_formulas import Array, MetricStatistic

Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"]

TOP_K = 5
BEST_ITEMS, BINS = 10, 15
"""Default numbers of ranked items, and of bins of a calibration error."""

IGNORED_TOKEN = -100
"""Value by which training code marks a token of the label as ignored."""

IGNORED_PIXEL = 255
"""Value by which data sets mark a pixel of the label as ignored."""

MAX_DETECTIONS, MAX_POSES = 100, 20
"""Numbers of best detections per image and class that count, as in COCO."""

Options: TypeAlias = Mapping[str, Any]
"""The keys of a gate that shape a metric, with their values."""

AnswerKind: TypeAlias = Literal[
    "classes",
    "ranking",
    "positive",
    "probabilities",
    "numbers",
    "embeddings",
    "tokens",
    "texts",
    "relevance",
    "detections",
    "keypoints",
    "masks",
]
"""What a metric reads from outputs and labels.

- `classes`: one class per row; of scores per class, the class with the best score is read.
- `ranking`: the scores of all classes, and the column of each row's label.
- `positive`: the score of the positive class, and whether each row is positive.
- `probabilities`: the probability of each class, and the column of each row's label.
- `numbers`: one number per row.
- `embeddings`, `tokens`: arrays of shape (rows, dimensions) or (rows, length), of the same shape as
  the label.
- `texts`: one text per row; the label has one text or several per row.
- `relevance`: the scores of items, and the grade of each item. If each row is a query, the shape is
  (rows, items). Otherwise, each row is an item, and the groups of the data set are the queries.
- `detections`: boxes of each image with scores and classes, (rows, detections, 6): x1, y1, x2, y2,
  score, class. The label has objects, (rows, objects, 5 or 6): x1, y1, x2, y2, class[, crowd].
  Empty places have the class -1.
- `keypoints`: detections with keypoints, (rows, detections, 6 + 3 * keypoints). The label has
  x1, y1, x2, y2, class, crowd, area and the keypoints of each object.
- `masks`: the class of each pixel, (rows, height, width), as the label.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRows:
    """The share of rows that are right, with intervals for the share and its change.

    The share has the exact interval of Clopper and Pearson, its change the score interval of Tango.

    `is_right` takes (label, answers, options) and returns one boolean per row.
    """

    is_right: Callable[[Array, Array, Options], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoss:
    """The mean of one loss per row, with an interval by Student's t.

    Args:
        loss: takes (label, answers, options) and returns numbers of at least 0.
        root: the metric is the root of the mean.
        explained: the metric is 1 minus the loss as a share of the label's variance.
        of_errors: the loss depends on `answers - label` only. A run then stores these errors,
            without labels, and later runs compare theirs with them row by row.
    """

    loss: Callable[[Array, Array, Options], Array]
    root: bool = False
    explained: bool = False
    of_errors: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """Any other function of the rows, with an interval by the bootstrap (BCa).

    Args:
        make: takes (label, answers, options) and returns the metric as a function of row weights.
        of_decisions: the metric reads classes, tokens or texts. Equal decisions on all rows do not
            show that two models are equal: rare decisions may still differ.
        row_effect: the least effect of one more wrong row, times the number of rows; 0 if it is
            unknown. It determines how many rows a limit needs at least.
    """

    make: Callable[[Array, Array, Options], MetricStatistic]
    of_decisions: bool = False
    row_effect: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetric:
    """One task metric.

    Args:
        reads: the kind of outputs and labels.
        method: what computes the metric, and its interval.
        higher_is_better: the direction: limits are `max_drop` and `min`, else `max_increase` and
            `max`.
        options: the keys of a gate that shape the metric, with their defaults. None: without a
            fixed default.
        label_free: without labels, the candidate is compared with the baseline itself.
        unit: `1` for a share, empty for a plain number, such as one in the label's unit. By
            default, a metric whose lower values are better is a plain number; any other metric is a
            share.
        display: the metric's name in evidence and tables, with options in braces. By default, the
            name in the table of metrics.
        extra: the extra of onnx-ops whose packages compute the metric; empty if none is needed.
        min_rows: the number of rows, or of groups, below which intervals do not have their level.
            A gate is then INCONCLUSIVE.
        find_label_problem: takes (label, options) and returns why the metric is not defined on
            these labels; empty if it is.
    """

    reads: AnswerKind
    method: CountedRows | MeanLoss | Resampled
    higher_is_better: bool = True
    options: Options = field(default_factory=dict)
    label_free: bool = False
    unit: Literal["1", ""] | None = None
    display: str = ""
    extra: str = ""
    min_rows: int = 0
    find_label_problem: Callable[[Array, Options], str] = lambda label, options: ""

    @property
    def is_share(self) -> bool:
        """Return whether values are shares, which are written as percentages."""
        return self.unit == "1" if self.unit is not None else self.higher_is_better


def _is_in_top_k(label: Array, answers: Array, options: Options) -> Array:
    from onnx_ops.metric_formulas import top_k_rows

    return top_k_rows(label, answers, options["k"])


def _make_f1(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import make_f1_statistic

    return make_f1_statistic(label, answers, options["average"] or "macro")


def _make_auc(label: Array, answers: Array, _: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import make_auc_statistic

    return make_auc_statistic(label, answers)


def _make_cosine(label: Array, answers: Array, _: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import cosine_rows, make_mean_statistic

    return make_mean_statistic(cosine_rows(answers, label))


def _make_token_agreement(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import make_mean_statistic, token_rows

    return make_mean_statistic(token_rows(answers, label, options["ignore"]))


def _make_word_errors(label: Array, answers: Array, _: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.texts import make_word_errors

    return make_word_errors(label, answers)


def _make_character_errors(label: Array, answers: Array, _: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.texts import make_character_errors

    return make_character_errors(label, answers)


def _make_bleu(label: Array, answers: Array, _: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.texts import make_bleu

    return make_bleu(label, answers)


def _make_chrf(label: Array, answers: Array, _: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.texts import make_chrf

    return make_chrf(label, answers)


def _make_recall(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import make_mean_statistic
    from onnx_ops.metric_formulas.ranking import compute_recall

    return make_mean_statistic(compute_recall(label, answers, options["k"]))


def _make_ndcg(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import make_mean_statistic
    from onnx_ops.metric_formulas.ranking import compute_ndcg

    return make_mean_statistic(compute_ndcg(label, answers, options["k"]))


def _make_reciprocal_rank(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas import make_mean_statistic
    from onnx_ops.metric_formulas.ranking import compute_reciprocal_rank

    return make_mean_statistic(compute_reciprocal_rank(label, answers, options["k"]))


def _make_calibration_error(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.calibration import make_calibration_error

    return make_calibration_error(label, answers, options["bins"])


def _brier(label: Array, answers: Array, _: Options) -> Array:
    from onnx_ops.metric_formulas.calibration import compute_brier_losses

    return compute_brier_losses(label, answers)


def _log_loss(label: Array, answers: Array, _: Options) -> Array:
    from onnx_ops.metric_formulas.calibration import compute_log_losses

    return compute_log_losses(label, answers)


def _make_map(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.detection import make_precision_statistic, match_boxes

    matches = match_boxes(label, answers, options["iou"], options["max_detections"])
    return make_precision_statistic(matches, answers)


def _make_ar(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.detection import make_recall_statistic, match_boxes

    matches = match_boxes(label, answers, options["iou"], options["max_detections"])
    return make_recall_statistic(matches, answers)


def _make_keypoints_ap(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.detection import (
        COCO_SIGMAS,
        make_precision_statistic,
        match_keypoints,
    )

    sigmas = options["sigmas"] or COCO_SIGMAS
    limits = options["iou"], options["max_detections"]
    return make_precision_statistic(match_keypoints(label, answers, *limits, sigmas), answers)


def _make_iou(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.masks import make_overlap_statistic

    return make_overlap_statistic(label, answers, "iou", **options)


def _make_dice(label: Array, answers: Array, options: Options) -> MetricStatistic:
    from onnx_ops.metric_formulas.masks import make_overlap_statistic

    return make_overlap_statistic(label, answers, "dice", **options)


def _find_no_object(label: Array, _: Options) -> str:
    return "" if (label[..., 4] >= 0).any() else "the label has no object in any image"


def _absolute(label: Array, answers: Array, _: Options) -> Array:
    return abs(label - answers)


def _squared(label: Array, answers: Array, _: Options) -> Array:
    return (label - answers) ** 2


def _relative(label: Array, answers: Array, _: Options) -> Array:
    return abs((label - answers) / label)


def _pinball(label: Array, answers: Array, options: Options) -> Array:
    """Return the pinball loss.

    Each unit by which a prediction is too low costs q; each unit too high costs 1 - q.
    """
    difference: Array = label - answers
    losses: Array = difference * (options["q"] - (difference < 0))
    return losses


def _find_zeros(label: Array, _: Options) -> str:
    zeros = int((label == 0).sum())
    if not zeros:
        return ""
    return f"{zeros} of {len(label)} labels are 0, for which a relative error is not defined"


def _find_no_text(label: Array, _: Options) -> str:
    return "" if any(map(str.strip, label.ravel().tolist())) else "all texts of the label are empty"


def _find_several_references(label: Array, options: Options) -> str:
    if label.ndim > 1:
        return f"the label has {label.shape[1]} texts per row, and this metric takes one"
    return _find_no_text(label, options)


def _find_irrelevant(label: Array, _: Options) -> str:
    found = [grade > 0 for grade in label.max(axis=1).tolist()]
    if all(found):
        return ""
    count = f"{found.count(False)} of {len(found)} queries have no item with a grade above 0"
    return f"{count}; the first is query {found.index(False)}"


def _find_useless_recall(label: Array, options: Options) -> str:
    most = int((label >= 0).sum(axis=1).max())
    if options["k"] >= most:
        return f"k is {options['k']}, but a query has at most {most} items: recall is always 100%"
    return _find_irrelevant(label, options)


METRICS: dict[str, TaskMetric] = {
    "accuracy": TaskMetric(
        reads="classes", method=CountedRows(is_right=lambda label, answers, _: answers == label)
    ),
    "top_k": TaskMetric(
        reads="ranking",
        method=CountedRows(is_right=_is_in_top_k),
        options={"k": TOP_K},
        display="top_{k}",
    ),
    "f1": TaskMetric(
        reads="classes",
        method=Resampled(make=_make_f1, of_decisions=True),
        options={"average": None, "positive": None},
    ),
    "auc": TaskMetric(
        reads="positive", method=Resampled(make=_make_auc, row_effect=1), options={"positive": None}
    ),
    "mae": TaskMetric(reads="numbers", method=MeanLoss(loss=_absolute), higher_is_better=False),
    "rmse": TaskMetric(
        reads="numbers", method=MeanLoss(loss=_squared, root=True), higher_is_better=False
    ),
    "r2": TaskMetric(
        reads="numbers", method=MeanLoss(loss=_squared, explained=True, of_errors=False)
    ),
    "cosine": TaskMetric(
        reads="embeddings", method=Resampled(make=_make_cosine, row_effect=1), label_free=True
    ),
    "token_agreement": TaskMetric(
        reads="tokens",
        method=Resampled(make=_make_token_agreement, of_decisions=True, row_effect=1),
        options={"ignore": IGNORED_TOKEN},
        label_free=True,
    ),
    "wer": TaskMetric(
        reads="texts",
        method=Resampled(make=_make_word_errors, of_decisions=True, row_effect=1),
        higher_is_better=False,
        unit="1",
        extra="text-metrics",
        find_label_problem=_find_several_references,
    ),
    "cer": TaskMetric(
        reads="texts",
        method=Resampled(make=_make_character_errors, of_decisions=True, row_effect=1),
        higher_is_better=False,
        unit="1",
        extra="text-metrics",
        find_label_problem=_find_several_references,
    ),
    "bleu": TaskMetric(
        reads="texts",
        method=Resampled(make=_make_bleu, of_decisions=True),
        extra="text-metrics",
        find_label_problem=_find_no_text,
    ),
    "chrf": TaskMetric(
        reads="texts",
        method=Resampled(make=_make_chrf, of_decisions=True),
        extra="text-metrics",
        find_label_problem=_find_no_text,
    ),
    "brier": TaskMetric(
        reads="probabilities",
        method=MeanLoss(loss=_brier, of_errors=False),
        higher_is_better=False,
        options={"logits": False},
    ),
    "log_loss": TaskMetric(
        reads="probabilities",
        method=MeanLoss(loss=_log_loss, of_errors=False),
        higher_is_better=False,
        options={"logits": False},
    ),
    "ece": TaskMetric(
        reads="probabilities",
        method=Resampled(make=_make_calibration_error, row_effect=1),
        higher_is_better=False,
        options={"bins": BINS, "logits": False},
        unit="1",
        display="ece_{bins}",
    ),
    "quantile_loss": TaskMetric(
        reads="numbers",
        method=MeanLoss(loss=_pinball, of_errors=False),
        higher_is_better=False,
        options={"q": 0.5},
        display="quantile_loss_{q}",
    ),
    "mape": TaskMetric(
        reads="numbers",
        method=MeanLoss(loss=_relative, of_errors=False),
        higher_is_better=False,
        unit="1",
        find_label_problem=_find_zeros,
    ),
    "recall_at_k": TaskMetric(
        reads="relevance",
        method=Resampled(make=_make_recall, row_effect=1),
        options={"k": BEST_ITEMS},
        display="recall_at_{k}",
        find_label_problem=_find_useless_recall,
    ),
    "ndcg": TaskMetric(
        reads="relevance",
        method=Resampled(make=_make_ndcg, row_effect=1),
        options={"k": BEST_ITEMS},
        display="ndcg_at_{k}",
        find_label_problem=_find_irrelevant,
    ),
    "mrr": TaskMetric(
        reads="relevance",
        method=Resampled(make=_make_reciprocal_rank, row_effect=1),
        options={"k": BEST_ITEMS},
        display="mrr_at_{k}",
        find_label_problem=_find_irrelevant,
    ),
    "map": TaskMetric(
        reads="detections",
        method=Resampled(make=_make_map, row_effect=1),
        options={"iou": None, "max_detections": MAX_DETECTIONS},
        extra="vision-metrics",
        find_label_problem=_find_no_object,
    ),
    "ar": TaskMetric(
        reads="detections",
        method=Resampled(make=_make_ar, row_effect=1),
        options={"iou": None, "max_detections": MAX_DETECTIONS},
        extra="vision-metrics",
        find_label_problem=_find_no_object,
    ),
    "keypoints_ap": TaskMetric(
        reads="keypoints",
        method=Resampled(make=_make_keypoints_ap, row_effect=1),
        options={"iou": None, "max_detections": MAX_POSES, "sigmas": None},
        extra="vision-metrics",
        find_label_problem=_find_no_object,
    ),
    "iou": TaskMetric(
        reads="masks",
        method=Resampled(make=_make_iou, of_decisions=True, row_effect=1),
        options={"average": None, "positive": None, "ignore": IGNORED_PIXEL},
    ),
    "dice": TaskMetric(
        reads="masks",
        method=Resampled(make=_make_dice, of_decisions=True, row_effect=1),
        options={"average": None, "positive": None, "ignore": IGNORED_PIXEL},
    ),
}
"""The metrics by name, in the order of schemas and messages."""

DEFAULT_FOR_CLASSES = "accuracy"
"""The metric of a gate without the keys `name` and `use`.

It is measured wherever labels allow it.
"""

DEFAULT_FOR_NUMBERS = "rmse"
"""The default metric of `onnx-ops judge` where labels have fractions.

A pipeline with numbers as labels also measures it if no gate has a metric of numbers.
"""

_OTHER_KIND: Mapping[AnswerKind, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("classes", "ranking", "positive", "probabilities"),
            "requires classes; for numbers use rmse, mae or r2.",
        ),
        "numbers": "requires numbers; for classes use accuracy, f1 or auc.",
        "texts": "requires texts; `decode` names a function that converts other outputs to texts.",
    }
)


def suggest_other_kind(name: str) -> str:
    """Return what outputs a metric requires, and what to use for other outputs.

    The sentence is empty for an unknown metric, or if `_OTHER_KIND` has no entry for its kind.
    """
    text = _OTHER_KIND.get(METRICS[name].reads, "") if name in METRICS else ""
    return text and f"{name} {text}"


def list_errors() -> str:
    """Return the names of the metrics whose lower values are better.

    The descriptions of keys in files list these names.
    """
    return ", ".join(name for name, metric in METRICS.items() if not metric.higher_is_better)


MetricName: TypeAlias = Annotated[str, OneOf(METRICS)]
