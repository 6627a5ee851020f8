"""Formulas of task metrics as pure functions of arrays.

Other modules apply limits, compute intervals and run models.

`statistic(weights)` maps weights of shape (resamples, rows) to values of shape (resamples,). A
value is NaN if the weighted rows do not define it.

Formulas that need SciPy or a library of an extra import it when they compute.
"""

from __future__ import annotations

from onnx_ops.metric_formulas.rows import auc as auc
from onnx_ops.metric_formulas.rows import cosine_rows as cosine_rows
from onnx_ops.metric_formulas.rows import f1 as f1
from onnx_ops.metric_formulas.rows import f1_step as f1_step
from onnx_ops.metric_formulas.rows import make_auc_statistic as make_auc_statistic
from onnx_ops.metric_formulas.rows import make_f1_statistic as make_f1_statistic
from onnx_ops.metric_formulas.rows import r2 as r2
from onnx_ops.metric_formulas.rows import token_rows as token_rows
from onnx_ops.metric_formulas.rows import top_k_rows as top_k_rows
from onnx_ops.metric_formulas.statistic import Array as Array
from onnx_ops.metric_formulas.statistic import MetricStatistic as MetricStatistic
from onnx_ops.metric_formulas.statistic import Statistic as Statistic
from onnx_ops.metric_formulas.statistic import Weights as Weights
from onnx_ops.metric_formulas.statistic import make_mean_statistic as make_mean_statistic
from onnx_ops.metric_formulas.statistic import mean as mean
