"""What stands in the tables of a run and its model: parameters, metrics, and the data they were measured on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.release import Lineage

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput

_BATCH = 100
_ATTEMPTS = 5
_DIGEST_CHARACTERS = 36
"""MLflow takes no longer digest of a data set; the tags `data.<name>` hold the whole one."""

T = TypeVar("T")


def dataset(name: str, digest: Digest, origin: Mapping[str, str] | None = None) -> Dataset:
    """A data set of the pipeline as MLflow names it; `origin` is what its source tells of where it came from."""
    from mlflow.entities import Dataset

    short = digest.removeprefix("sha256:")[:_DIGEST_CHARACTERS]
    kind = (origin or {}).get("kind", "onnx-ops")
    told = {key: value for key, value in (origin or {}).items() if key != "kind"}
    return Dataset(name=name, digest=short, source_type=kind, source=json.dumps({"digest": digest, **told}))


def log_parameters(client: MlflowClient, run_id: str, parameters: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    for batch in _batches([Param(key, value) for key, value in sorted(parameters.items())]):
        client.log_batch(run_id, params=batch)


def log_datasets(client: MlflowClient, run_id: str, lineage: Lineage, *, measured_on: str) -> None:
    """The data that the run used; the set that its figures were measured on is marked as `evaluation`."""
    from mlflow.entities import DatasetInput, InputTag

    inputs = []
    for name, digest in sorted(lineage.data.items()):
        origin = lineage.origins.get(name, {})
        kind = origin.get("kind", "")
        tags = {f"{kind}.{fact}": value for fact, value in sorted(origin.items()) if fact != "kind"}
        if name == measured_on:
            tags["mlflow.data.context"] = "evaluation"
        found = [InputTag(key, value) for key, value in tags.items()]
        inputs.append(DatasetInput(dataset(name, digest, origin), found))
    if inputs:
        _log_inputs(client, run_id, inputs)


def _log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[DatasetInput]) -> None:
    """MLflow looks which data sets it knows and then adds the others: of two publishers that do so at once, one fails,
    and finds them when it tries again."""
    from mlflow.exceptions import MlflowException

    for attempt in range(_ATTEMPTS):
        try:
            client.log_inputs(run_id, inputs)
        except MlflowException as error:
            if attempt == _ATTEMPTS - 1 or "unique" not in str(error).lower():
                raise
        else:
            return


def log_metrics(
    client: MlflowClient,
    run_id: str,
    model_id: str,
    metrics: Mapping[str, float],
    timestamp: int,
    measured_on: Dataset | None,
) -> None:
    """Metrics of run and model; without the model's id only the first model of a run would get them."""
    from mlflow.entities import Metric

    name, digest = (measured_on.name, measured_on.digest) if measured_on is not None else (None, None)
    entries = [
        Metric(key, value, timestamp, step=0, model_id=model_id, dataset_name=name, dataset_digest=digest)
        for key, value in sorted(metrics.items())
    ]
    for batch in _batches(entries):
        client.log_batch(run_id, metrics=batch)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
