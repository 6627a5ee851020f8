"""Registry of versions, aliases and ledger entries in MLflow.

The tags of a version contain its release and variant, and the name of an alias contains the target.
Ledger entries are also shown as runs.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never
from urllib.parse import quote, urlsplit

from onnx_ops import codec
from onnx_ops.adapters.registries import mlflow_folder
from onnx_ops.adapters.registries.mlflow_artifacts import REGISTER_AGAIN, ArtifactDownload
from onnx_ops.adapters.registries.mlflow_connection import (
    MlflowConnection,
    read_pages,
    suppress_codes,
)
from onnx_ops.adapters.registries.mlflow_listing import VersionTags, list_version_tags
from onnx_ops.adapters.registries.mlflow_publication import ReleasePublisher
from onnx_ops.adapters.registries.mlflow_relocation import relocate_artifacts
from onnx_ops.adapters.registries.mlflow_tags import (
    DIGEST,
    EVIDENCE_DIGEST,
    MLMODEL_DIGEST,
    RELEASE,
    VARIANT,
    read_record,
)
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerAdopted,
    LedgerEntry,
    MetricsRecorded,
    NotificationSent,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseLeft,
    RequestWithdrawn,
    RollbackRequested,
    RolloutPaused,
    ServerWrittenOff,
    ThresholdsFixed,
    VersionRefused,
    VersionSelected,
)
from onnx_ops.domain.release import ListedVersion, Publication, VersionRecord
from onnx_ops.errors import (
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    UserError,
    suggest,
)
from onnx_ops.printable import show_controls
from onnx_ops.reporting.description import is_unchanged
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}")
_MODEL_SOURCE = re.compile(r"models:/(m-[A-Za-z0-9]+)")
_PAGE = 1000
_RUN_TAG_LIMIT = 5000
"""Number of characters after which the value of a run's tag is cut."""
_EXISTS = "RESOURCE_ALREADY_EXISTS"
_GONE = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "INVALID_STATE")
"""Error codes for a run or model that was already deleted."""
_log = logging.getLogger(__name__)


class MlflowRegistry:
    """Registry of versions, evidence and aliases in MLflow.

    Args:
        tracking_uri: a tracking server's URL, or the URL of the database behind one.
        artifact_root: location of files if the database is used directly (a folder or `s3://…`).
            The default is the folder `mlartifacts` beside a SQLite database. Other databases need
            a value. For a tracking server, which has its own location, the value is ignored.
        public_url: address of MLflow's web pages, if it differs from `tracking_uri`.

    Raises:
        UserError: the URI is not supported, or a database needs `artifact_root`.
        MissingPackageError: MLflow is not installed.
        ServiceUnavailableError: the locations in the SQLite database cannot be changed now.

    Except `mirror` and `where`, all methods also raise the errors of `MlflowConnection.session`.
    """

    def __init__(
        self, tracking_uri: str, *, artifact_root: str | None = None, public_url: str | None = None
    ) -> None:
        self._mlflow = MlflowConnection(tracking_uri)
        self._public_url = public_url.rstrip("/") if public_url else None
        self._artifact_root: str | None = None
        if self._mlflow.is_database and artifact_root is not None:
            is_url = urlsplit(artifact_root).scheme
            self._artifact_root = artifact_root if is_url else str(Path(artifact_root).absolute())
        elif self._mlflow.is_database:
            database = self._mlflow.sqlite_path()
            if database is None:
                raise UserError(
                    "this database needs an artifact root",
                    where=self._mlflow.shown,
                    why="a database stores no files",
                    remedy="Set the argument artifact_root (setting `artifacts`) to a folder or "
                    "s3://…, or use a tracking server.",
                )
            self._artifact_root = str(database.parent / "mlartifacts")
        if (
            self._artifact_root
            and not urlsplit(self._artifact_root).scheme
            and (path := self._mlflow.sqlite_path())
        ):
            relocate_artifacts(path, Path(self._artifact_root))

    def publish(self, publication: Publication) -> Mapping[str, str]:
        """Register one version per new variant; return the versions of all variants.

        After a crash, the next call completes the versions. The content of an existing version does
        not change, but the publication replaces its decisions, evidence and description.

        Raises:
            UserError: a name is invalid, or a variant does not have exactly one ONNX file. Or a
                signed decision is too long, or the experiment was deleted in MLflow.
            RefusedError: a model's weights are not all among the files.
            DigestMismatchError: the files do not match the manifest.
            ServiceUnavailableError: MLflow or its artifact storage cannot serve the request.
        """
        model, about = _valid_name(publication.model), publication.about
        for record in publication.variants:
            _valid_name(record.variant)
            mlflow_folder.validate_record(record)
        with self._mlflow.session(f"model {model}") as client:
            publisher = ReleasePublisher(
                self._mlflow,
                client,
                publication,
                experiment=self._ensure_experiment(client, model),
                pages=f"{self._public_url}/" if self._public_url else "",
            )
            models = client.search_registered_models(f"name = '{model}'", max_results=1)
            description = (models[0].description if models else None) or ""
            with suppress_codes(_EXISTS):
                if not models:
                    client.create_registered_model(model, description=about)
                elif about not in ("", description) and (
                    not description or is_unchanged(description)
                ):
                    client.update_registered_model(model, about)
            return publisher.publish()

    def version(self, model: str, version: str) -> VersionRecord:
        """Return the record of a version.

        Raises:
            NotFoundError: the version is missing, or onnx-ops did not register it.
        """
        entry = self._version(model, version)
        tags = {str(key): str(value) for key, value in entry.tags.items()}
        record = read_record(model, str(entry.version), tags)
        if record is None:
            raise NotFoundError(
                "this version was not registered by onnx-ops",
                where=f"{model} version {version}",
                why=f"one of its tags {RELEASE}, {VARIANT} and {DIGEST} is missing or not valid",
                remedy="Register the model with `onnx-ops run FILE`.",
            )
        return record

    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        """Return all versions that onnx-ops registered, oldest first."""
        name = _valid_name(model)
        entries = list_version_tags(self._mlflow.uri, self._mlflow.sqlite_path(), name)
        if entries is None:
            entries = self._list_by_mlflow(name)
        return tuple(
            ListedVersion(
                version=version,
                release=Digest(tags[RELEASE]),
                variant=tags[VARIANT],
                manifest=Digest(tags[DIGEST]),
                created_at=created_ms / 1000,
                evidence=Digest(tags[EVIDENCE_DIGEST]) if EVIDENCE_DIGEST in tags else None,
            )
            for version, created_ms, tags in entries
            if {RELEASE, VARIANT, DIGEST} <= set(tags)
        )

    def _list_by_mlflow(self, model: str) -> list[VersionTags]:
        """Return the versions of a model with their tags, oldest first."""
        wanted = f"name = '{model}'"
        with self._mlflow.session(f"model {model}") as client:
            found = list(
                read_pages(
                    lambda token: client.search_model_versions(
                        wanted, max_results=_PAGE, page_token=token
                    )
                )
            )
        entries = [
            (str(entry.version), int(entry.creation_timestamp), dict(entry.tags)) for entry in found
        ]
        return sorted(entries, key=lambda entry: int(entry[0]))

    def delete_version(self, model: str, version: str) -> None:
        """Delete a version, its LoggedModel and its run; `mlflow gc` deletes the files.

        A missing version causes no error.

        Raises:
            RefusedError: an alias points to the version.
            ServiceUnavailableError: MLflow cannot serve the request.
        """
        if pointing := sorted(
            alias for alias, number in self.aliases(model).items() if number == version
        ):
            raise RefusedError(
                f"alias {pointing[0]} points to this version",
                where=f"{model} version {version}",
                remedy="Move or delete the alias first.",
            )
        try:
            entry = self._version(model, version)
        except NotFoundError:
            return
        with self._mlflow.session(f"{model} version {version}") as client:
            # The version is deleted last. After a crash, it is still listed, and a later call
            # deletes it.
            with suppress_codes(*_GONE):
                client.delete_run(str(entry.run_id))
            with suppress_codes(*_GONE):
                client.delete_logged_model(str(entry.source).removeprefix("models:/"))
            client.delete_model_version(entry.name, str(entry.version))

    def aliases(self, model: str) -> Mapping[str, str]:
        """Return the version of each alias; empty if the model does not exist."""
        with self._mlflow.session(f"model {model}") as client:
            models = client.search_registered_models(
                f"name = '{_valid_name(model)}'", max_results=1
            )
            return {
                alias: str(version)
                for entry in models
                for alias, version in sorted(entry.aliases.items())
            }

    def all_aliases(self) -> Mapping[str, Mapping[str, str]]:
        """Return the aliases of every model with their versions.

        One request reads at most 1,000 models.
        """
        with self._mlflow.session("all models") as client:
            models = read_pages(
                lambda token: client.search_registered_models(max_results=_PAGE, page_token=token)
            )
            return {
                model.name: {alias: str(to) for alias, to in model.aliases.items()}
                for model in models
            }

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point an alias at a version.

        Raises:
            NotFoundError: the version does not exist.
            ServiceUnavailableError: MLflow cannot serve the request.
        """
        self._version(model, version)
        with self._mlflow.session(f"alias {alias} of {model}") as client:
            client.set_registered_model_alias(model, alias, version)

    def delete_alias(self, model: str, alias: str) -> None:
        """Delete an alias, if it exists."""
        if alias not in self.aliases(model):
            return
        with self._mlflow.session(f"alias {alias} of {model}") as client:
            client.delete_registered_model_alias(model, alias)

    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version.

        Raises:
            NotFoundError: the version does not exist.
            ServiceUnavailableError: MLflow cannot serve the request.
        """
        entry = self._version(model, version)
        with self._mlflow.session(f"{model} version {version}") as client:
            for key, value in sorted(tags.items()):
                if entry.tags.get(key) != value:
                    client.set_model_version_tag(model, version, key, show_controls(value))

    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        """Download the version's model files into an empty folder; return their manifest.

        The caller must compare the digest of the manifest with the signed digest.

        Raises:
            NotFoundError: the version is missing, or onnx-ops did not register its files.
            DigestMismatchError: the MLmodel or the list of files was changed, or a file is missing.
            RefusedError: onnx-ops does not download from the artifact location of the version.
            ServiceUnavailableError: MLflow or its artifact storage cannot serve the request.
        """
        where = f"{record.model} version {record.version}"
        source = _MODEL_SOURCE.fullmatch(str(self._version(record.model, record.version).source))
        if source is None:
            raise NotFoundError(
                "the files of this version were not registered by onnx-ops",
                where=where,
                remedy=f"{REGISTER_AGAIN}.",
            )
        with self._mlflow.session(where) as client:
            logged = client.get_logged_model(source[1])
            download = ArtifactDownload(self._mlflow, logged.artifact_location, where)
            mlmodel = Digest(logged.tags.get(MLMODEL_DIGEST, ""))
            return download.fetch_model(mlmodel, record.manifest, folder)

    def document(self, record: VersionRecord, name: str) -> bytes:
        """Return the evidence document with this path.

        The caller must verify the signed digest of the document.

        Raises:
            NotFoundError: the version, its run or the document does not exist.
            RefusedError: onnx-ops does not download from the artifact location of the run.
            ServiceUnavailableError: MLflow or its artifact storage cannot serve the request.
        """
        where = f"{record.model} version {record.version}"
        run_id = self._version(record.model, record.version).run_id
        with self._mlflow.session(where) as client, Scratch() as aside:
            if run_id and mlflow_folder.is_safe_name(name):
                download = ArtifactDownload(
                    self._mlflow, client.get_run(run_id).info.artifact_uri, where
                )
                if download.has(name):
                    return download.file(name, aside).read_bytes()
        raise NotFoundError(
            f"there is no document {name!r}",
            where=where,
            remedy=f"{REGISTER_AGAIN}.",
        )

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        """Show a ledger entry as a run of MLflow; a failure is only logged."""
        name = f"releases/{entry.endpoint}"
        try:
            with self._mlflow.session(name) as client:
                _show_entry(client, self._ensure_experiment(client, name), entry, model)
        except OnnxOpsError as error:
            _log.warning(
                "entry %d of %s is not shown in MLflow: %s", entry.sequence, entry.endpoint, error
            )

    def where(self, model: str) -> str:
        """Return the URL of the model's page.

        For a database without `public_url`, return the command that starts MLflow's server.
        """
        if pages := self._pages():
            return f"{pages}/#/models/{quote(model, safe='')}"
        path = self._mlflow.sqlite_path()
        options = {
            "--backend-store-uri": f"sqlite:///{path}" if path else self._mlflow.shown,
            "--default-artifact-root": str(self._artifact_root),
            "--host": "127.0.0.1",
            "--port": "5000",
        }
        # The command must be the one of this Python environment. The short name is enough if the
        # shell finds this command first.
        installed = Path(sys.executable).parent / "mlflow"
        program = (
            str(installed)
            if installed.exists() and shutil.which("mlflow") != str(installed)
            else "mlflow"
        )
        return shlex.join(
            [program, "server", *(word for option in options.items() for word in option)]
        )

    def page(self, model: str, version: str, name: str) -> str:
        """Return the URL of an evidence document.

        The result is empty for a database without `public_url`.
        """
        run_id = self._version(model, version).run_id
        if not (pages := self._pages()):
            return ""
        with self._mlflow.session(f"{model} version {version}") as client:
            experiment = client.get_run(run_id).info.experiment_id
        return f"{pages}/#/experiments/{experiment}/runs/{run_id}/artifacts/{quote(name)}"

    def _pages(self) -> str:
        return self._public_url or (
            "" if self._mlflow.is_database else self._mlflow.shown.rstrip("/")
        )

    def _ensure_experiment(self, client: MlflowClient, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            location = f"{self._artifact_root}/{quote(name)}" if self._artifact_root else None
            try:
                return str(client.create_experiment(name, artifact_location=location))
            except MlflowException as error:
                experiment = client.get_experiment_by_name(name)
                if error.error_code != _EXISTS or experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            uri = self._mlflow.shown
            password = "" if uri == self._mlflow.uri else " Replace *** by the password."
            remedy = (
                f"Run `MLFLOW_TRACKING_URI={shlex.quote(uri)} mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}`.{password}"
            )
            raise UserError(
                "the experiment was deleted in MLflow", where=f"experiment {name}", remedy=remedy
            )
        return str(experiment.experiment_id)

    def _version(self, model: str, version: str) -> Any:
        try:
            if not (_NAME.fullmatch(model) and version.isdecimal()):
                raise NotFoundError("no such version", where=f"{model} version {version}")
            with self._mlflow.session(f"{model} version {version}") as client:
                return client.get_model_version(model, version)
        except NotFoundError as error:
            what = f"{model} has no version {version!r}"
            models = self.all_aliases()
            if model not in models:
                what = f"no model is called {model!r}"
                registered = ", ".join(list(models)[:10]) or "none"
                remedy = suggest(model, models, f"Registered: {registered}")
            elif version in (aliases := models[model]):
                remedy = f"{version!r} is an alias: name its version {aliases[version]} instead"
            else:
                with self._mlflow.session(f"model {model}") as client:
                    newest = client.search_model_versions(f"name = '{model}'", max_results=10)
                    shown = ", ".join(str(entry.version) for entry in newest) or "none"
                remedy = f"Newest: {shown}"
            raise NotFoundError(what, where=self._mlflow.shown, remedy=remedy) from error


def _valid_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid name of a registered model or variant",
            remedy="Use at most 200 letters, digits, dots, dashes, underscores and spaces. Begin "
            "with a letter or digit.",
        )
    return name


def _show_entry(client: MlflowClient, experiment: str, entry: LedgerEntry, model: str) -> None:
    """Write the entry as a run of experiment `releases/<endpoint>`.

    The run has the time of the entry. If an earlier attempt only started the run, it is completed.
    """
    runs = client.search_runs([experiment], f"tags.sequence = '{entry.sequence}'", max_results=1)
    if runs and runs[0].info.status != "RUNNING":
        return
    body = entry.body
    at = round(entry.at * 1000)
    title, details = _describe_entry(body)
    tags = {
        "sequence": str(entry.sequence),
        "endpoint": entry.endpoint,
        "model": model,
        "actor": entry.actor,
        "kind": body.kind,
        "mlflow.user": entry.actor,
        **details,
        "entry": codec.dumps(entry).decode(),
    }
    run = (
        runs[0]
        if runs
        else client.create_run(
            experiment,
            start_time=at,
            run_name=f"{entry.sequence:05d} {title}",
            tags={
                key: show_controls(value)[:_RUN_TAG_LIMIT] for key, value in tags.items() if value
            },
        )
    )
    if isinstance(body, Intent):
        from mlflow.entities import Metric

        split = body.action.state.split.weights
        metrics = [
            Metric(f"percent/{name}", float(weight), at, step=0)
            for name, weight in sorted(split.items())
        ]
        client.log_batch(run.info.run_id, metrics=metrics)
    failed = isinstance(body, ActionOutcome) and not body.ok
    client.set_terminated(run.info.run_id, "FAILED" if failed else "FINISHED", end_time=at)


def _describe_action(body: Intent | RollbackRequested) -> tuple[str, dict[str, str]]:
    """Return the title of a begun or requested action, and its tags.

    The tags contain the reason, and the version of each role; also the alias of a selected version.
    """
    title: str = body.action.kind.value
    roles = body.action.roles
    serving = {"stable": roles.stable, "previous": roles.previous, "candidate": roles.candidate}
    versions = {role: deployment.version for role, deployment in serving.items() if deployment}
    details = {"why": body.action.why, **versions}
    if isinstance(body, RollbackRequested):
        title = f"requested: {title}"
    elif body.selected is not None:
        details["alias"] = body.selected.alias
    return title, details


def _describe_entry(body: EntryBody) -> tuple[str, dict[str, str]]:
    """Return the title of an entry's run, and its tags."""
    title: str = body.kind
    details: dict[str, str] = {}
    match body:
        case Intent() | RollbackRequested():
            title, details = _describe_action(body)
        case VersionSelected():
            details = {"alias": body.selected.alias, "version": body.selected.version}
        case ActionOutcome():
            title = f"{'done' if body.ok else 'failed'}: entry {body.of}"
            details = {"of": str(body.of), "why": body.detail}
        case EndpointBound():
            details = {"provider": body.config.provider, "target": body.config.target}
        case AliasesWritten():
            details = {
                "aliases": " ".join(
                    f"{alias}={to or '-'}" for alias, to in sorted(body.aliases.items())
                )
            }
        case VersionRefused():
            details = {"alias": body.alias, "version": body.version, "why": body.reason}
        case ReleaseLeft():
            details = {"version": body.version, "serving": body.serving}
        case OverrideRecorded():
            details = {"version": body.version, "why": body.reason}
        case OperatorCommandSent():
            title, details = f"command: {body.command.value}", {"why": body.reason}
        case (
            EndpointDeleted()
            | EndpointAbandoned()
            | RequestWithdrawn()
            | LedgerAdopted()
            | ServerWrittenOff()
        ):
            details = {"why": body.reason}
        case RolloutPaused():
            details = {"why": body.why}
        case ThresholdsFixed() | MetricsRecorded() | NotificationSent() | LeaseRenewed():
            pass
        case _:
            assert_never(body)
    return title, details
