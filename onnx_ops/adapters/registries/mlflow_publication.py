"""Publishing a release: one parent run, a nested run and a LoggedModel per variant, and one version of each.

The version is the commit point. It is created last, with all its tags, so a version that exists is complete; what a
killed attempt left before that point is taken up if it is finished, and marked FAILED if it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.adapters.registries import mlflow_folder
from onnx_ops.adapters.registries.mlflow_connection import Connection
from onnx_ops.adapters.registries.mlflow_figures import dataset, log_datasets, log_metrics, log_parameters
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
    judgement,
)
from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.release import Publication, VariantRecord, flatten_origins
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

DESCRIPTION_LIMIT = 5000
"""Characters; PostgreSQL refuses more."""

_KIND = "onnx_ops.kind"


class Publisher:
    """Publishes one publication into an experiment and a registered model that exist.

    Args:
        connection: for the process-wide default that creating a version looks up.
        client: MLflow's own.
        publication: what to publish; its records have been checked.
        experiment: id of the model's experiment.
        pages: address of MLflow's UI, or empty where links can only be relative to it.
    """

    def __init__(
        self, connection: Connection, client: MlflowClient, publication: Publication, *, experiment: str, pages: str
    ) -> None:
        self._connection = connection
        self._client = client
        self._publication = publication
        self._experiment = experiment
        self._pages = pages
        lineage = publication.lineage
        self._common = {
            GIT_SHA: lineage.git_sha,
            DATA_REV: " ".join(f"{name}:{short_digest(digest)}" for name, digest in sorted(lineage.data.items())),
            RELEASE: str(lineage.release),
        }
        self._common = {key: value for key, value in self._common.items() if value}

    def publish(self) -> dict[str, str]:
        """Version by variant, all of them complete."""
        parent = self._find_parent()
        if parent is not None and parent.info.status != "FINISHED":
            self._fail_leftovers()
        versions: dict[str, str] = {}
        missing: list[VariantRecord] = []
        for record in self._publication.variants:
            found = self._settled(record)
            if found is None:
                missing.append(record)
            else:
                self._refresh(found, record)
                versions[record.variant] = str(found.version)
        if missing or parent is None or parent.info.status != "FINISHED":
            with self._running(parent or self._create_parent()) as parent_id:
                for record in missing:
                    versions[record.variant] = self._create(record, parent_id)
        return {record.variant: versions[record.variant] for record in self._publication.variants}

    def _settled(self, record: VariantRecord) -> ModelVersion | None:
        """The version of this release, variant and content. Where two publishers raced, the lower number counts and the
        higher is taken away, unless somebody has pointed an alias at it.

        A variant made anew from the same export (another recipe of quantization) is another version.
        """
        name = self._publication.model
        found = sorted(
            self._client.search_model_versions(
                f"name = '{name}' and tags.{RELEASE} = '{self._publication.lineage.release}' "
                f"and tags.{VARIANT} = '{record.variant}' and tags.`{DIGEST}` = '{record.manifest.digest()}'"
            ),
            key=lambda version: int(version.version),
        )
        if not found:
            return None
        for twin in found[1:]:
            self._remove(name, str(twin.version))
        return found[0]

    def _remove(self, name: str, version: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            if not self._client.get_model_version(name, version).aliases:
                self._client.delete_model_version(name, version)
        except MlflowException as error:
            # The other publisher has taken its version away itself.
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise

    def _create(self, record: VariantRecord, parent_id: str) -> str:
        model = self._finished_model(record) or self._log_model(record, parent_id)
        run_id = str(model.source_run_id)
        self._upload_evidence(run_id, record)
        judged = judgement(record)
        with self._connection.as_default():
            created = self._client.create_model_version(
                self._publication.model,
                source=f"models:/{model.model_id}",
                run_id=run_id,
                model_id=model.model_id,
                tags={
                    VARIANT: record.variant,
                    **{key: value for key, value in judged.items() if key.startswith(GATE)},
                    **self._common,
                    **self._identity(record),
                    **judged,
                },
                description=self._description(record, run_id),
            )
        settled = self._settled(record)
        return str((settled or created).version)

    def _finished_model(self, record: VariantRecord) -> LoggedModel | None:
        """A model that was uploaded whole by an attempt that ended before its version was created."""
        found = self._models(f"tags.{VARIANT} = '{record.variant}' and tags.`{DIGEST}` = '{record.manifest.digest()}'")
        whole = (model for model in found if str(model.status) == "READY")
        return next((model for model in whole if MLMODEL_DIGEST in model.tags and model.source_run_id), None)

    def _log_model(self, record: VariantRecord, parent_id: str) -> LoggedModel:
        from mlflow.entities import LoggedModelOutput

        client, tags = self._client, {**self._common, **self._identity(record)}
        parameters = dict(self._publication.lineage.parameters)
        child = client.create_run(
            self._experiment, run_name=record.variant, tags={**self._run_tags("variant", parent_id), **tags}
        )
        with self._running(child) as run_id:
            model = client.create_logged_model(
                self._experiment, name=record.variant, source_run_id=run_id, tags=tags, params=parameters
            )
            log_parameters(client, run_id, parameters)
            with Scratch() as built:
                digest = mlflow_folder.build_folder(record, built, model_id=model.model_id, run_id=run_id)
                client.set_logged_model_tags(model.model_id, {MLMODEL_DIGEST: str(digest)})
                client.log_model_artifacts(model.model_id, str(built))
            self._log_figures(run_id, model.model_id, record, child.info.start_time)
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
            client.finalize_logged_model(model.model_id, "READY")
        return client.get_logged_model(model.model_id)

    def _refresh(self, found: ModelVersion, record: VariantRecord) -> None:
        """Bring an existing version up to this publication's decisions: its gates may have changed since."""
        name, version, run_id = self._publication.model, str(found.version), str(found.run_id)
        wanted = judgement(record)
        changed = {key: value for key, value in wanted.items() if found.tags.get(key) != value}
        description = self._description(record, run_id)
        if EVIDENCE_DIGEST in changed:
            self._upload_evidence(run_id, record)
            self._log_figures_anew(run_id, _model_id(found), record)
        for target in record.decisions:
            # What was signed earlier is not what has been decided now.
            if target not in record.signed and f"{DECISION}{target}" in found.tags:
                self._client.delete_model_version_tag(name, version, f"{DECISION}{target}")
        if found.description != description:
            self._client.update_model_version(name, version, description)
        for key, value in sorted(changed.items(), key=lambda item: item[0] == EVIDENCE_DIGEST):
            self._client.set_model_version_tag(name, version, key, value)

    def _find_parent(self) -> Run | None:
        release = self._publication.lineage.release
        found = self._client.search_runs(
            [self._experiment],
            f"tags.{RELEASE} = '{release}' and tags.`{_KIND}` = 'release'",
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        return found[0] if found else None

    def _create_parent(self) -> Run:
        lineage = self._publication.lineage
        run = self._client.create_run(
            self._experiment,
            run_name=f"release {short_digest(lineage.release)}",
            tags={**self._run_tags("release", None), **self._common},
        )
        log_parameters(self._client, run.info.run_id, lineage.parameters)
        return run

    def _fail_leftovers(self) -> None:
        release = self._publication.lineage.release
        runs = self._client.search_runs(
            [self._experiment],
            f"tags.{RELEASE} = '{release}' and tags.`{_KIND}` = 'variant' and attributes.status = 'RUNNING'",
        )
        for run in runs:
            self._client.set_terminated(run.info.run_id, "FAILED")
        for model in self._models():
            if str(model.status) == "PENDING":
                self._client.finalize_logged_model(model.model_id, "FAILED")

    def _models(self, *conditions: str) -> Iterator[LoggedModel]:
        """This release's models. Their status is looked at here: MLflow compares a number with a word, which
        PostgreSQL refuses."""
        wanted = " and ".join([f"tags.{RELEASE} = '{self._publication.lineage.release}'", *conditions])
        token: str | None = None
        while True:
            page = self._client.search_logged_models([self._experiment], wanted, page_token=token)
            yield from page
            if not (token := page.token):
                return

    @contextmanager
    def _running(self, run: Run) -> Iterator[str]:
        """A run that is RUNNING inside, FINISHED afterwards, and FAILED if an error came out."""
        run_id = run.info.run_id
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        try:
            yield run_id
        except Exception as error:
            try:
                self._client.set_terminated(run_id, "FAILED")
            except Exception as second:
                error.add_note(f"and its run could not be marked as failed: {second}")
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

    def _log_figures(self, run_id: str, model_id: str, record: VariantRecord, timestamp: int) -> None:
        lineage, name = self._publication.lineage, record.measured_on
        log_datasets(self._client, run_id, lineage, measured_on=name)
        known = name in lineage.data
        measured_on = dataset(name, lineage.data[name], lineage.origins.get(name)) if known else None
        log_metrics(self._client, run_id, model_id, record.metrics, timestamp, measured_on)

    def _log_figures_anew(self, run_id: str, model_id: str, record: VariantRecord) -> None:
        """What was measured again, one millisecond after what stands there: MLflow takes one figure a name and time."""
        run = self._client.get_run(run_id)
        if run.data.metrics != dict(record.metrics):
            times = [metric.timestamp for metric in self._client.get_logged_model(model_id).metrics or ()]
            self._log_figures(run_id, model_id, record, max(times, default=run.info.start_time) + 1)

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
        reports = [f"[Report]({run}/{name}) · " for name in sorted(record.evidence) if name.endswith(".html")]
        link = f"\n\n{''.join(reports)}[Evidence run]({run})"
        note = "\n\nCut here; the evidence holds the whole."
        text = record.description
        if len(text) + len(link) > DESCRIPTION_LIMIT:
            text = text[: DESCRIPTION_LIMIT - len(link) - len(note)] + note
        return text + link


def _model_id(found: ModelVersion) -> str:
    return str(found.source).removeprefix("models:/")
