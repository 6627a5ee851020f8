"""Publication of a release: a run, a LoggedModel and a version per variant.

The version is the commit point. It is created last, with all its tags, so an existing version is
complete. If an attempt was killed before this point, its finished parts are reused, and its
unfinished parts are marked FAILED.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from onnx_ops.adapters.registries import mlflow_folder
from onnx_ops.adapters.registries.mlflow_artifacts import ArtifactDownload
from onnx_ops.adapters.registries.mlflow_connection import (
    MlflowConnection,
    read_pages,
    suppress_codes,
)
from onnx_ops.adapters.registries.mlflow_tags import (
    DATA_REV,
    DECISION,
    DIGEST,
    EVIDENCE_DIGEST,
    GATE,
    GIT_SHA,
    MLMODEL_DIGEST,
    RELEASE,
    VARIANT,
    build_decision_tags,
)
from onnx_ops.adapters.retry import retry
from onnx_ops.domain.artifact import Digest, hex_digits, short_digest
from onnx_ops.domain.release import Publication, VariantRecord, flatten_origins
from onnx_ops.errors import DigestMismatchError, RefusedError
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

DESCRIPTION_LIMIT = 5000
"""Maximum number of characters of a description; PostgreSQL refuses more."""

_KIND = "onnx_ops.kind"
_BATCH = 100
"""Number of parameters or metrics in one request: MLflow's limit for parameters."""

_CONFLICT_ATTEMPTS = 5

T = TypeVar("T")


class ReleasePublisher:
    """Publisher of one release in MLflow.

    The experiment and the registered model must exist, and the records must be valid. `pages` is
    the URL of MLflow's UI; it is empty if links can only be relative to the UI.
    """

    def __init__(
        self,
        connection: MlflowConnection,
        client: MlflowClient,
        publication: Publication,
        *,
        experiment: str,
        pages: str,
    ) -> None:
        self._connection = connection
        self._client = client
        self._publication = publication
        self._experiment = experiment
        self._pages = pages
        lineage = publication.lineage
        self._common = {
            GIT_SHA: lineage.git_sha,
            DATA_REV: " ".join(
                f"{name}:{short_digest(digest)}" for name, digest in sorted(lineage.data.items())
            ),
            RELEASE: str(lineage.release),
        }
        self._common = {key: value for key, value in self._common.items() if value}

    def publish(self) -> dict[str, str]:
        """Create or update the version of each variant; return the version numbers.

        Raises:
            UserError: a signed decision is too long for a tag of MLflow.
        """
        lineage = self._publication.lineage
        query = f"tags.{RELEASE} = '{lineage.release}' and tags.`{_KIND}` = "
        order = ["attributes.start_time ASC"]
        runs = self._client.search_runs(
            [self._experiment], f"{query}'release'", max_results=1, order_by=order
        )
        parent = runs[0] if runs else None
        is_finished = parent is not None and parent.info.status == "FINISHED"
        if parent is not None and not is_finished:
            variants = f"{query}'variant' and attributes.status = 'RUNNING'"
            for run in self._client.search_runs([self._experiment], variants):
                self._client.set_terminated(run.info.run_id, "FAILED")
            for model in self._models():
                if str(model.status) == "PENDING":
                    self._client.finalize_logged_model(model.model_id, "FAILED")
        versions: dict[str, str] = {}
        missing: list[VariantRecord] = []
        for record in self._publication.variants:
            version = self._find_version(record)
            if version is None:
                missing.append(record)
            else:
                self._refresh(version, record)
                versions[record.variant] = str(version.version)
        if missing or not is_finished:
            if parent is None:
                tags = {**self._run_tags("release", None), **self._common}
                name = f"release {short_digest(lineage.release)}"
                parent = self._client.create_run(self._experiment, run_name=name, tags=tags)
                _log_parameters(self._client, parent.info.run_id, lineage.parameters)
            with self._running(parent) as parent_id:
                for record in missing:
                    versions[record.variant] = self._create(record, parent_id)
        return {record.variant: versions[record.variant] for record in self._publication.variants}

    def _find_version(self, record: VariantRecord) -> ModelVersion | None:
        """Return the version of this release, variant and content; None if it is missing.

        If two publishers have created the same version at the same time, the lower version number
        is used. The higher version is deleted unless it has an alias. The same variant with
        other files, for example after a change of quantization settings, is a different version.
        """
        name = self._publication.model
        versions = sorted(
            self._client.search_model_versions(
                f"name = '{name}' and tags.{RELEASE} = '{self._publication.lineage.release}' and "
                f"tags.{VARIANT} = '{record.variant}' and tags.`{DIGEST}` = "
                f"'{record.manifest.digest()}'"
            ),
            key=lambda version: int(version.version),
        )
        for duplicate in versions[1:]:
            number = str(duplicate.version)
            # The deletion fails if the other publisher has already deleted this version.
            with suppress_codes("RESOURCE_DOES_NOT_EXIST"):
                if not self._client.get_model_version(name, number).aliases:
                    self._client.delete_model_version(name, number)
        return versions[0] if versions else None

    def _create(self, record: VariantRecord, parent_id: str) -> str:
        # An attempt that was killed before it created the version can leave a complete model. A
        # deleted version also leaves its model, whose files may be damaged.
        models = self._models(
            f"tags.{VARIANT} = '{record.variant}' and tags.`{DIGEST}` = "
            f"'{record.manifest.digest()}'"
        )
        ready = (model for model in models if str(model.status) == "READY")
        whole = next(
            (model for model in ready if model.source_run_id and self._is_intact(model, record)),
            None,
        )
        model = whole or self._log_model(record, parent_id)
        run_id = str(model.source_run_id)
        self._upload_evidence(run_id, record)
        decisions = build_decision_tags(record)
        with self._connection.as_default():
            created = self._client.create_model_version(
                self._publication.model,
                source=f"models:/{model.model_id}",
                run_id=run_id,
                model_id=model.model_id,
                tags={
                    VARIANT: record.variant,
                    **{key: value for key, value in decisions.items() if key.startswith(GATE)},
                    **self._common,
                    **self._identity(record),
                    **decisions,
                },
                description=self._description(record, run_id),
            )
        return str((self._find_version(record) or created).version)

    def _is_intact(self, model: LoggedModel, record: VariantRecord) -> bool:
        """Return whether a logged model still has all files of a variant, unchanged."""
        if MLMODEL_DIGEST not in model.tags:
            return False
        with Scratch() as folder:
            try:
                download = ArtifactDownload(
                    self._connection, model.artifact_location, record.variant
                )
                found = download.fetch_model(
                    Digest(model.tags[MLMODEL_DIGEST]), record.manifest.digest(), folder
                )
            except (DigestMismatchError, RefusedError):
                return False
        return found == record.manifest

    def _log_model(self, record: VariantRecord, parent_id: str) -> LoggedModel:
        from mlflow.entities import LoggedModelOutput

        client, tags = self._client, {**self._common, **self._identity(record)}
        parameters = dict(self._publication.lineage.parameters)
        child = client.create_run(
            self._experiment,
            run_name=record.variant,
            tags={**self._run_tags("variant", parent_id), **tags},
        )
        with self._running(child) as run_id:
            model = client.create_logged_model(
                self._experiment,
                name=record.variant,
                source_run_id=run_id,
                tags=tags,
                params=parameters,
            )
            _log_parameters(client, run_id, parameters)
            with Scratch() as built:
                digest = mlflow_folder.build_folder(
                    record, built, model_id=model.model_id, run_id=run_id
                )
                client.set_logged_model_tags(model.model_id, {MLMODEL_DIGEST: str(digest)})
                client.log_model_artifacts(model.model_id, str(built))
            self._log_metrics(run_id, model.model_id, record, child.info.start_time)
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
            client.finalize_logged_model(model.model_id, "READY")
        return client.get_logged_model(model.model_id)

    def _refresh(self, entry: ModelVersion, record: VariantRecord) -> None:
        """Update an existing version to this publication's decisions.

        The gates of the targets may have changed since the version was created.
        """
        name, version, run_id = self._publication.model, str(entry.version), str(entry.run_id)
        changed = {
            key: value
            for key, value in build_decision_tags(record).items()
            if entry.tags.get(key) != value
        }
        description = self._description(record, run_id)
        if EVIDENCE_DIGEST in changed:
            self._upload_evidence(run_id, record)
            run = self._client.get_run(run_id)
            if run.data.metrics != dict(record.metrics):
                # For a model, MLflow stores one value per metric, timestamp and step. With a
                # timestamp one millisecond later, the new values do not collide with the present
                # values.
                model_id = str(entry.source).removeprefix("models:/")
                times = [
                    metric.timestamp
                    for metric in self._client.get_logged_model(model_id).metrics or ()
                ]
                self._log_metrics(
                    run_id, model_id, record, max(times, default=run.info.start_time) + 1
                )
        for target in record.decisions:
            # The stored signature belongs to an earlier decision, so it would not match the present
            # one.
            if target not in record.signed and f"{DECISION}{target}" in entry.tags:
                self._client.delete_model_version_tag(name, version, f"{DECISION}{target}")
        if entry.description != description:
            self._client.update_model_version(name, version, description)
        for key, value in sorted(changed.items(), key=lambda item: item[0] == EVIDENCE_DIGEST):
            self._client.set_model_version_tag(name, version, key, value)

    def _models(self, *conditions: str) -> Iterator[LoggedModel]:
        """Yield this release's models of any status that meet `conditions`.

        The conditions are in the syntax of MLflow's `search_logged_models`. The query does not
        contain the status. MLflow 3.17 compares its integer column with the text of the query,
        which PostgreSQL refuses.
        """
        query = " and ".join(
            [f"tags.{RELEASE} = '{self._publication.lineage.release}'", *conditions]
        )
        return read_pages(
            lambda token: self._client.search_logged_models(
                [self._experiment], query, page_token=token
            )
        )

    @contextmanager
    def _running(self, run: Run) -> Iterator[str]:
        """Set a run to RUNNING within the context.

        Afterwards the run is FINISHED, or FAILED after an error.
        """
        run_id = run.info.run_id
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        try:
            yield run_id
        except Exception as error:
            try:
                self._client.set_terminated(run_id, "FAILED")
            except Exception as second:
                error.add_note(f"the run {run_id} could not be marked as failed: {second}")
            raise
        self._client.set_terminated(run_id, "FINISHED")

    def _upload_evidence(self, run_id: str, record: VariantRecord) -> None:
        if not record.evidence:
            return
        with Scratch() as folder:
            for name, path in record.evidence.items():
                link = Path(folder, name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.absolute())
            self._client.log_artifacts(run_id, str(folder))

    def _log_metrics(
        self, run_id: str, model_id: str, record: VariantRecord, timestamp: int
    ) -> None:
        """Log the run's data sets, and the metrics of both the run and the model.

        Each metric has the model's id. MLflow would attach metrics without an id only to the run.
        `timestamp` is that of the metrics, in milliseconds since the Unix epoch.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric
        from mlflow.exceptions import MlflowException

        lineage, inputs = self._publication.lineage, []
        measured_on: dict[str, str] = {}
        for name, digest in sorted(lineage.data.items()):
            origin = dict(lineage.origins.get(name, {}))
            kind = origin.pop("kind", None)
            # MLflow limits a digest to 36 characters. The tags `data.<name>` have the whole digest.
            dataset = Dataset(
                name=name,
                digest=hex_digits(digest)[:36],
                source_type="onnx-ops" if kind is None else kind,
                source=json.dumps({"digest": digest, **origin}),
            )
            tags = {f"{kind or ''}.{fact}": value for fact, value in sorted(origin.items())}
            if name == record.measured_on:
                tags["mlflow.data.context"] = "evaluation"
                measured_on = {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
            inputs.append(
                DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()])
            )

        def is_duplicate(error: Exception) -> bool:
            """Return whether another publisher created a data set at the same time.

            MLflow checks whether a data set exists before it inserts the data set, so two
            publishers can both try to insert it.
            """
            return isinstance(error, MlflowException) and "unique" in str(error).lower()

        if inputs:
            retry(lambda: self._client.log_inputs(run_id, inputs), is_duplicate, _CONFLICT_ATTEMPTS)
        metrics = [
            Metric(key, value, timestamp, step=0, model_id=model_id, **measured_on)
            for key, value in sorted(record.metrics.items())
        ]
        for batch in _batches(metrics):
            self._client.log_batch(run_id, metrics=batch)

    def _identity(self, record: VariantRecord) -> dict[str, str]:
        return {VARIANT: record.variant, DIGEST: str(record.manifest.digest())}

    def _run_tags(self, kind: str, parent_id: str | None) -> dict[str, str]:
        lineage = self._publication.lineage
        tags = {
            _KIND: kind,
            "mlflow.parentRunId": parent_id or "",
            "mlflow.source.git.commit": lineage.git_sha,
            "onnx_ops.run": lineage.run,
            **{f"data.{name}": str(digest) for name, digest in lineage.data.items()},
            **{f"origin.{key}": value for key, value in flatten_origins(lineage).items()},
        }
        return {key: value for key, value in tags.items() if value}

    def _description(self, record: VariantRecord, run_id: str) -> str:
        run = f"{self._pages}#/experiments/{self._experiment}/runs/{run_id}/artifacts"
        reports = [
            f"[Report]({run}/{name}) · "
            for name in sorted(record.evidence)
            if name.endswith(".html")
        ]
        link = f"\n\n{''.join(reports)}[Evidence run]({run})"
        note = "\n\nCut here; the evidence contains the whole text."
        text = record.description
        if len(text) + len(link) > DESCRIPTION_LIMIT:
            text = text[: DESCRIPTION_LIMIT - len(link) - len(note)] + note
        return text + link


def _log_parameters(client: MlflowClient, run_id: str, parameters: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    for batch in _batches([Param(key, value) for key, value in sorted(parameters.items())]):
        client.log_batch(run_id, params=batch)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
