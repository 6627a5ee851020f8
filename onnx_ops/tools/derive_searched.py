"""Derive by search: the best variant of one ONNX file under a budget, without a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, digest_file, digest_json
from onnx_ops.domain.metric import MetricDefinition
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.search import SEARCH_FILE, Budget
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.search import Tell, recipe_notes, search
from onnx_ops.measure.trying import Ground
from onnx_ops.onnx_graph.files import copy_model
from onnx_ops.ports import Dataset, Ports, Tensors
from onnx_ops.scratch import Scratch
from onnx_ops.tools.derive import Derived, check_places, delivered, machines_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be found. `section.keep` is the one role that is wanted; `data` are digests of the rows, by use."""

    section: Quantize
    source: Path
    path: Path
    targets: tuple[Target, ...]
    tune: Dataset
    metric: MetricDefinition
    calibration: Tensors | None = None
    data: Mapping[str, Digest] = field(default_factory=dict)


def derive_searched(ports: Ports, order: Order, *, tell: Tell) -> Derived:
    """Search, and write the variant of the wanted role to its path; the same order goes on where it was stopped.

    Everything that was tried is written beside it, `PATH.search.json`, whatever comes of it.

    Raises:
        UserError: a file is not valid or exists already, or nothing keeps the budget.
        StageError: a library failed.
    """
    check_places(order.source, order.path)
    key = _key(ports, order)
    with Scratch() as folder:
        source = folder / "source" / MODEL_FILE
        source.parent.mkdir()
        copy_model(order.source, source)
        ground = Ground(
            ports=ports,
            section=order.section,
            source=source,
            folder=folder / "trials",
            targets=order.targets,
            machines=machines_of(ports, order.targets),
            tune=order.tune,
            calibration=order.calibration,
            metric=order.metric,
            lower=order.metric.higher_is_better is False,
            batch=1,
            budget=order.section.budget or Budget(),
            seed=int(key[-8:], 16),
        )
        found = search(ground, ports.journal(key), tell)
        tried = order.path.with_name(f"{order.path.name}.{SEARCH_FILE}")
        tried.write_bytes(codec.dumps(found.record))
        if not found.models:
            raise UserError(
                "nothing keeps the budget",
                where=order.path.name,
                why="; ".join(slot.reason for slot in found.record.slots),
                remedy=(
                    f"Allow more time with `--budget max_minutes=…`; {tried.name} holds what was tried."
                    if found.record.timed_out
                    else "Allow more with `--budget metric_drop=…`, or keep the float model; "
                    f"{tried.name} holds what was tried."
                ),
            )
        ((made, trial),) = found.models.values()
        return delivered(
            ports,
            made,
            source,
            order.path,
            targets=order.targets,
            recipe=tuple(recipe_notes(found.record, trial)),
            excluded=trial.excluded,
        )


def _key(ports: Ports, order: Order) -> Digest:
    return digest_json(
        {
            "section": codec.to_json(order.section),
            "model": digest_file(order.source),
            "data": dict(order.data),
            "metric": codec.to_json(order.metric),
            "targets": [target.digest() for target in order.targets],
            "hardware": [ports.runtime(target.runtime).fingerprint(target).digest() for target in order.targets],
        }
    )
