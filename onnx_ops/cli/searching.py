"""`onnx-ops quantize --method auto`: its options, and the search behind it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from onnx_ops.errors import NotFoundError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnx_ops.domain.gate import MetricDefinition
    from onnx_ops.domain.pipeline import Quantize
    from onnx_ops.domain.quantization import Budget
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Dataset, Ports, Tensors
    from onnx_ops.tools.quantize import QuantizedFile

ROWS = 512
"""Most rows that it decides by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The options of a search as they were given."""

    tune: Path | None
    label: str
    metric: str
    budget: tuple[str, ...]
    keep: str
    data: Path | None


def quantize_by_search(
    ports: Ports,
    section: Quantize,
    model: Path,
    out: Path,
    targets: list[Target],
    calibration: Tensors | None,
    tuning: Tuning,
    tell: Callable[[str], None],
) -> QuantizedFile:
    """Find the variant, write it, and beside it everything that was tried."""
    from onnx_ops.domain.artifact import digest_file
    from onnx_ops.domain.quantization import AUTO, ROLES
    from onnx_ops.tools.quantize import VariantSearch, search_variant

    if section.exclude or section.options:
        raise UserError(f"method {AUTO} finds its own", where="--exclude, --option", remedy="Leave them out.")
    role = next((role for role in ROLES if role == tuning.keep), None)
    if role is None:
        raise UserError(
            f"there is no {tuning.keep!r} on the front", where="--keep", why=f"there are {', '.join(ROLES)}"
        )
    metric = _metric(tuning.metric)
    order = VariantSearch(
        section=replace(section, keep=(role,), budget=_budget(tuning.budget)),
        source=model,
        path=out,
        targets=tuple(targets),
        tune=_tune(ports, model, tuning, needed=not metric.label_free),
        metric=metric,
        calibration=calibration,
        data={str(use): digest_file(path) for use, path in (("tune", tuning.tune), ("data", tuning.data)) if path},
    )
    return search_variant(ports, order, tell=tell)


def _metric(name: str) -> MetricDefinition:
    from onnx_ops.domain.gate import METRICS, MetricGate

    found = next((known for known in METRICS if known == name), None)
    if found is None:
        raise UserError(f"no metric is called {name!r}", where="--metric", why=f"there are {', '.join(METRICS)}")
    return MetricGate(name=found).definition()


def _budget(texts: tuple[str, ...]) -> Budget:
    from annotated_types import Unit

    from onnx_ops.config.quantities import parse_quantity
    from onnx_ops.domain.quantization import Budget

    hints = get_type_hints(Budget, include_extras=True)
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in hints:
            known = ", ".join(f.name for f in fields(Budget))
            raise UserError(f"a budget has no {name!r}", where="--budget", why=f"it has {known}")
        unit = next((one.unit for one in _parts(hints[name]) if isinstance(one, Unit)), None)
        try:
            found[name] = parse_quantity(value, unit) if unit else (int if name == "max_builds" else float)(value)
        except ValueError as error:
            raise UserError(str(error), where=f"--budget {text}") from error
        if not found[name] > 0 and name != "metric_drop":
            raise UserError("it must be above 0", where=f"--budget {text}")
    return Budget(**found)


def _parts(hint: Any) -> list[Any]:
    """A hint and everything that it is made of."""
    return [hint, *(part for one in get_args(hint) for part in _parts(one))]


def _tune(ports: Ports, model: Path, tuning: Tuning, *, needed: bool) -> Dataset:
    from onnx_ops.domain.pipeline import FileData
    from onnx_ops.onnx_graph.model_info import read_model_info
    from onnx_ops.ports import Dataset
    from onnx_ops.tools.probing import check_samples

    path = tuning.tune
    if path is None:
        raise UserError(
            "a search needs rows that it decides by",
            where="--tune",
            remedy="For example: --tune tune.npz, with the model's inputs and an array 'label'.",
        )
    if not path.is_file():
        raise NotFoundError("no such file", where=str(path))
    inputs = read_model_info(model).inputs
    section = FileData(file=path.name, inputs={spec.name: spec.name for spec in inputs})
    arrays = ports.source("file").load(section, path.resolve().parent)
    if needed and tuning.label not in arrays:
        raise UserError(
            f"it has no array {tuning.label!r}",
            where=str(path),
            why=f"{tuning.metric} needs labels; the file has {', '.join(arrays)}",
            remedy="Name the array of the labels: --label NAME.",
        )
    label = arrays.get(tuning.label)
    return Dataset(
        inputs=check_samples(inputs, arrays, where=str(path), limit=ROWS).rows,
        label=None if label is None else label[:ROWS],
    )
