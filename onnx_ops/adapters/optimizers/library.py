"""Options and calibration rows of optimizers, and calls of their libraries."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from onnx_ops.config.binding import bind_options
from onnx_ops.domain.artifact import ModelInfo
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantization import find_type_conflict
from onnx_ops.errors import OnnxOpsError, StageError, UserError, describe_error
from onnx_ops.onnx_graph.files import collect_constants, iterate_nodes
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports.data import Array, Tensors

Names = Annotated[tuple[str, ...], MinLen(1)]


CALIBRATION_REMEDY = (
    "Set `calibrate: {data: train, samples: 256}` in a pipeline, or --data FILE in a command."
)


def read_options(section: Quantize, kind: type) -> Mapping[str, Any]:
    """Return the given options after a check against the optimizer's dataclass.

    Raises:
        UserError: an option is unknown, or has a wrong type or value.
    """
    where = f"variant {section.name}, options"
    options: Any = bind_options(section.options, kind, where=where)
    if problem := find_type_conflict(section.options):
        raise UserError(problem, where=where)
    return {name: getattr(options, name) for name in section.options}


_DEFAULT_SEVERITY, _ERRORS_ONLY = 2, 3
_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gather", "Gemm", "MatMul"})
"""Operators with weights that quantizers can store in fewer bits."""

_QUANTIZED = frozenset(
    {
        "ConvInteger",
        "DequantizeLinear",
        "MatMulInteger",
        "MatMulNBits",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
"""Operators that quantizers write and that no float export contains."""


_INNER = "in a subgraph or function, which the quantizer did not rewrite"
_COMPUTED = "no constant weights"
_FLOAT32_ONLY = "only float32 is quantized"
KEEP_SOURCE = "Use the model as it is. In a pipeline, leave this variant out of `quantize`."


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress standard output and logs; restore the root logger afterwards.

    Critical messages, and errors of ONNX Runtime, are still logged.
    """
    ort = importlib.import_module("onnxruntime")
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    ort.set_default_logger_severity(_ERRORS_ONLY)
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
        ort.set_default_logger_severity(_DEFAULT_SEVERITY)


@contextlib.contextmanager
def convert_failures(what: str, variant: str, remedy: str) -> Iterator[None]:
    """Convert exceptions to StageError, except those of onnx-ops."""
    try:
        yield
    except OnnxOpsError:
        raise
    except Exception as error:
        raise StageError(
            what, where=f"variant {variant}", why=describe_error(error), remedy=remedy
        ) from error


def check_interface(source: Path, derived: Path, tool: str, where: str) -> None:
    """Raise StageError if a tool changed the specifications of inputs or outputs."""
    before, after = read_model_info(source), read_model_info(derived)
    for side, old, new in (
        ("inputs", before.inputs, after.inputs),
        ("outputs", before.outputs, after.outputs),
    ):
        if old != new:
            raise StageError(
                f"{tool} changed the model's {side}",
                where=where,
                why=f"the {side} changed from {list(map(str, old))} to {list(map(str, new))}",
                remedy=KEEP_SOURCE,
            )


def build_exclusion_error(section: Quantize, names: Iterable[str]) -> UserError:
    """Build the error for excluded nodes that are quantized or missing in the result."""
    return UserError(
        f"excluding {', '.join(names)} had no effect",
        where=f"variant {section.name}",
        why="these nodes are quantized or missing in the result",
        remedy="Exclude the node that has the weights, or leave the excluded node out of "
        "`exclude`.",
    )


def build_no_effect_error(
    section: Quantize, source: Any, op_types: frozenset[str], what: str = "nothing was quantized"
) -> UserError:
    """Build the error for a variant in which nothing was quantized.

    `op_types` are the types of operators that the quantizer changes.
    """
    where = f"variant {section.name}"
    if any(node.op_type in _QUANTIZED for node in iterate_nodes(source)):
        why, remedy = (
            "the model already contains quantized operators",
            "Use the float model from which it was made.",
        )
        return UserError(what, where=where, why=why, remedy=remedy)
    counts = _count_reasons(section, source, op_types)
    if counts:
        why = "; ".join(f"{count} {kind}: {reason}" for (kind, reason), count in counts.items())
    else:
        others = ", ".join(sorted({node.op_type for node in iterate_nodes(source)})[:8])
        types = ", ".join(sorted(op_types & _WEIGHTED))
        kind = f"of types {types}" if types else "with weights"
        why = f"the model has no operators {kind}; it has {others}"
    remedy = _choose_remedy({reason for _, reason in counts}, source)
    return UserError(what, where=where, why=why, remedy=remedy)


def _count_reasons(
    section: Quantize, source: Any, op_types: frozenset[str]
) -> Counter[tuple[str, str]]:
    """Count the nodes with weights that stayed in float, by their type and the reason."""
    stored = collect_constants(source)
    outer = {node.output[0] for node in source.graph.node if node.output}
    counts: Counter[tuple[str, str]] = Counter()
    for node in iterate_nodes(source):
        # Gather has its weights as input 0, and the other operators have them as input 1.
        place = 0 if node.op_type == "Gather" else 1
        if node.op_type not in {*op_types, *_WEIGHTED} or len(node.input) <= place:
            continue
        if node.op_type not in op_types:
            reason = f"{section.method} does not quantize this type of operator"
        elif node.name in section.exclude:
            reason = "excluded"
        elif node.output[0] not in outer:
            reason = _INNER
        else:
            reason = _explain_weight(stored.get(node.input[place]))
        counts[node.op_type, reason] += 1
    return counts


def _explain_weight(weight: Any) -> str:
    """Return the reason why a node with this weight was not quantized.

    `weight` is None if other nodes compute the weight.
    """
    from onnx import TensorProto

    if weight is None:
        return _COMPUTED
    if weight.data_type != TensorProto.FLOAT:
        kind = TensorProto.DataType.Name(weight.data_type).lower()
        return f"weights in {'float64' if kind == 'double' else kind}, and {_FLOAT32_ONLY}"
    return "the quantizer left this operator in float"


def _choose_remedy(reasons: Set[str], source: Any) -> str:
    if any(reason.endswith(_FLOAT32_ONLY) for reason in reasons):
        return "Quantize the float32 version of the model."
    if source.functions and reasons <= {_COMPUTED, _INNER}:
        return (
            "Quantizers ignore weights in functions; "
            "inline the functions: onnx.inliner.inline_local_functions(model)."
        )
    return KEEP_SOURCE


BATCH = 16
"""Number of rows of one calibration run of a model with a free batch axis.

All activations of these rows are in memory during the run.
"""


class BatchReader:
    """Reader of calibration batches in the order of the rows.

    Rows are on axis 0. The model gets them on its own batch axis, together with `values`, the
    inputs that have no rows. If the model has a fixed batch size, each batch has that size, and the
    remaining rows are unused. The quantizer requests ranges of batches (`set_range`), so that only
    the activations of one range are in memory.

    Raises:
        UserError: the rows do not fit the model's inputs, are too few, or contain NaN or infinity.
    """

    def __init__(self, rows: Tensors, info: ModelInfo, values: Tensors | None = None) -> None:
        import numpy as np

        from onnx_ops.measure.row_layout import read_layout

        self._layout = read_layout(info, values)
        where, wanted = (
            "quantize.calibrate",
            {spec.name for spec in info.inputs} - set(values or {}),
        )
        if wanted != set(rows):
            what = (
                f"calibration data has inputs {sorted(rows)}, but the model needs {sorted(wanted)}"
            )
            raise UserError(
                what,
                where=where,
                remedy="Map the arrays to the model's inputs in `data.<set>.inputs`.",
            )
        for name, array in rows.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                what = (
                    f"calibration rows of input {name} contain NaN or infinity: "
                    "no range can be computed from them"
                )
                raise UserError(what, where=where, remedy="Calibrate with clean rows.")
        fixed, count = info.fixed_batch, len(next(iter(rows.values())))
        self._rows = rows
        self._size = fixed or BATCH
        self._batches = count // self._size if fixed else -(-count // self._size)
        if not self._batches:
            what = f"{count} calibration rows do not fill one batch of {self._size} rows"
            remedy = f"Raise `samples`, or use a data set with at least {self._size} rows."
            raise UserError(what, where=where, remedy=remedy)
        self._queue: Iterator[int] = iter(range(self._batches))

    def __len__(self) -> int:
        return self._batches

    def slice(self, number: int, count: int) -> dict[str, Array]:
        """Return the rows of part `number` of `count` parts of the batches.

        The result is empty if the part has no batches.
        """
        start, stop = (self._batches * n // count * self._size for n in (number, number + 1))
        return {name: rows[start:stop] for name, rows in self._rows.items()} if start < stop else {}

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return iter(self.get_next, None)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Make `get_next` read the batches from `start_index` up to before `end_index`."""
        self._queue = iter(range(start_index, min(end_index, self._batches)))

    def get_next(self) -> dict[str, Array] | None:
        """Return the next batch of the range; None after the last."""
        index = next(self._queue, None)
        if index is None:
            return None
        rows = slice(index * self._size, (index + 1) * self._size)
        return self._layout.arrange({name: array[rows] for name, array in self._rows.items()})
