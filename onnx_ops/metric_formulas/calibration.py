"""Formulas of metrics of probabilities.

Probabilities have shape (rows, classes). Labels are the columns of the true classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_ops.metric_formulas.statistic import Array, MetricStatistic, Weights


def compute_brier_losses(label: Array, probabilities: Array) -> npt.NDArray[np.float64]:
    """Return the squared error of the probabilities of each row, from 0.

    It is the sum over the classes. For two classes, it is half of this sum, as in scikit-learn, and
    therefore at most 1.
    """
    true = np.arange(probabilities.shape[1]) == label[:, None]
    losses = np.square(probabilities - true).sum(axis=1)
    return np.asarray(losses / 2 if probabilities.shape[1] == 2 else losses)


def compute_log_losses(label: Array, probabilities: Array) -> npt.NDArray[np.float64]:
    """Return the negative logarithm of the probability of the true class of each row.

    The probability is limited as scikit-learn limits float64, so that the loss is finite.
    """
    least = np.finfo(np.float64).eps
    own = np.take_along_axis(probabilities, label[:, None], axis=1)[:, 0]
    return np.asarray(-np.log(np.clip(own, least, 1 - least)))


def make_calibration_error(label: Array, probabilities: Array, bins: int) -> MetricStatistic:
    """Return the expected calibration error of the class with the highest probability.

    Guo et al. 2017, ICML, https://proceedings.mlr.press/v70/guo17a.html: the rows are divided by
    their highest probability into bins of equal width. Each bin has the absolute difference of its
    mean probability and its share of right rows. The error is the mean of these differences,
    weighted by the numbers of rows.
    """
    highest = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == label
    # A bin contains its upper edge.
    number = np.clip(np.ceil(highest * bins).astype(np.intp) - 1, 0, bins - 1)
    table = np.zeros((len(label), bins))
    table[np.arange(len(label)), number] = highest - right

    def statistic(weights: Weights) -> npt.NDArray[np.float64]:
        return np.asarray(np.abs(weights @ table).sum(axis=1) / weights.sum(axis=1))

    # Chance raises the absolute difference of a bin, and raises it most if the true difference is
    # 0. The difference is then |x| of a normal x with mean 0. Its mean is sqrt(2 / pi) standard
    # errors.
    errors = table.std(axis=0) / np.sqrt(len(label))
    return MetricStatistic(
        statistic=statistic,
        reads=probabilities,
        step=1 / len(label),
        bias=float(np.sqrt(2 / np.pi) * errors.sum()),
    )


def apply_softmax(scores: Array) -> npt.NDArray[np.float64]:
    """Return the probabilities of scores with shape (rows, classes)."""
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
