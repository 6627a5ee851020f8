"""The registry in MLflow: one version per release and variant, one alias per target and role."""

from __future__ import annotations

import difflib
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from onnx_ops import codec
from onnx_ops.adapters.registries import mlflow_folder, mlflow_mirror
from onnx_ops.adapters.registries.mlflow_connection import Connection
from onnx_ops.adapters.registries.mlflow_download import Download
from onnx_ops.adapters.registries.mlflow_publication import Publisher
from onnx_ops.adapters.registries.mlflow_retention import listed_versions, remove_version
from onnx_ops.adapters.registries.mlflow_tags import DIGEST, MLMODEL_DIGEST, RELEASE, VARIANT, read_record
from onnx_ops.domain.artifact import Digest, Manifest, digest_file
from onnx_ops.domain.ledger import LedgerEntry
from onnx_ops.domain.release import ListedVersion, Publication, VersionRecord
from onnx_ops.errors import DigestMismatchError, NotFoundError, OnnxOpsError, RefusedError, UserError
from onnx_ops.reporting.description import KEPT
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}")
_MODEL_SOURCE = re.compile(r"models:/(m-[A-Za-z0-9]+)")
_PAGE = 1000
_log = logging.getLogger(__name__)


class MlflowRegistry:
    """Versions, evidence and aliases in MLflow.

    Args:
        tracking_uri: a tracking server's URL, or the URL of the database behind one.
        artifact_root: where files go when the database is used directly (a folder or `s3://…`); beside a SQLite
            database if it is left out. A tracking server decides for itself.
        public_url: where people open MLflow's pages, if that is not `tracking_uri`.

    Raises:
        UserError: `tracking_uri` is of a kind that MLflow no longer uses for registries, or `artifact_root` is missing.
    """

    def __init__(self, tracking_uri: str, *, artifact_root: str | None = None, public_url: str | None = None) -> None:
        self._mlflow = Connection(tracking_uri)
        self._public_url = public_url.rstrip("/") if public_url else None
        self._artifact_root = self._root(artifact_root) if self._mlflow.is_database else None

    def publish(self, publication: Publication) -> Mapping[str, str]:
        """One version per variant; returns version by variant. Publishing the same content again adds nothing.

        Killed anywhere, the next call completes the set. A version that is there keeps its content; its decisions,
        evidence and description become those of this publication.

        Raises:
            ServiceUnavailableError: MLflow does not answer.
            UserError: a name does not fit, or a variant does not hold exactly one ONNX file.
            DigestMismatchError: a file is not what its manifest says.
        """
        model = _valid_name(publication.model)
        for record in publication.variants:
            _valid_name(record.variant)
            mlflow_folder.check_record(record)
        with self._mlflow.session(f"model {model}") as client:
            publisher = Publisher(
                self._mlflow,
                client,
                publication,
                experiment=self._experiment(client, model),
                pages=f"{self._public_url}/" if self._public_url else "",
            )
            self._ensure_model(client, model, publication.about)
            return publisher.publish()

    def version(self, model: str, version: str) -> VersionRecord:
        """Raises NotFoundError if onnx-ops registered no such version; ServiceUnavailableError without a registry."""
        found = self._version(model, version)
        tags = {str(key): str(value) for key, value in found.tags.items()}
        record = read_record(model, str(found.version), tags)
        if record is None:
            raise NotFoundError(
                "this version was not registered by onnx-ops",
                where=f"{model} version {version}",
                why=f"its tags {RELEASE}, {VARIANT} and {DIGEST} do not say what it is",
                remedy="Register it with `onnx-ops run`",
            )
        return record

    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        """All versions that onnx-ops registered, oldest first; empty if the model does not exist."""
        with self._mlflow.session(f"model {model}") as client:
            return listed_versions(client, _valid_name(model))

    def delete_version(self, model: str, version: str) -> None:
        """Delete a version, its LoggedModel and its run. MLflow keeps their files until `mlflow gc`.

        Raises:
            RefusedError: an alias points at it.
            ServiceUnavailableError: MLflow does not answer.
        """
        if pointing := sorted(alias for alias, number in self.aliases(model).items() if number == version):
            raise RefusedError(f"alias {pointing[0]} points at it", where=f"{model} version {version}")
        try:
            found = self._version(model, version)
        except NotFoundError:
            return
        with self._mlflow.session(f"{model} version {version}") as client:
            remove_version(client, found)

    def aliases(self, model: str) -> Mapping[str, str]:
        """Version by alias; empty if the model does not exist."""
        with self._mlflow.session(f"model {model}") as client:
            found = client.search_registered_models(f"name = '{_valid_name(model)}'", max_results=1)
            return {alias: str(version) for entry in found for alias, version in sorted(entry.aliases.items())}

    def all_aliases(self) -> Mapping[str, Mapping[str, str]]:
        """Version by alias of every model, by model: one request for each 1,000 models, after the sign of life."""
        found: dict[str, dict[str, str]] = {}
        token = None
        with self._mlflow.session("all models") as client:
            while True:
                page = client.search_registered_models(max_results=_PAGE, page_token=token)
                found |= {entry.name: {alias: str(to) for alias, to in entry.aliases.items()} for entry in page}
                token = page.token
                if not token:
                    return found

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Raises NotFoundError, RefusedError (vetoed), UserError (not an alias name) or ServiceUnavailableError."""
        self._version(model, version)
        with self._mlflow.session(f"alias {alias} of {model}") as client:
            client.set_registered_model_alias(model, alias, version)

    def delete_alias(self, model: str, alias: str) -> None:
        """Deleting an alias that is not there is no error."""
        if alias not in self.aliases(model):
            return
        with self._mlflow.session(f"alias {alias} of {model}") as client:
            client.delete_registered_model_alias(model, alias)

    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version. Raises NotFoundError or ServiceUnavailableError."""
        found = self._version(model, version)
        with self._mlflow.session(f"{model} version {version}") as client:
            for key, value in sorted(tags.items()):
                if found.tags.get(key) != value:
                    client.set_model_version_tag(model, version, key, value)

    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        """Download the version's model files into an empty folder and return the digests of what came.

        The caller compares the manifest's digest with the one that was signed.

        Raises:
            DigestMismatchError: the manifest or MLmodel is not what was registered, or a file is missing.
            NotFoundError: there is no such version, or its files were not put there by onnx-ops.
            ServiceUnavailableError: MLflow does not answer.
        """
        where = f"{record.model} version {record.version}"
        source = _MODEL_SOURCE.fullmatch(str(self._version(record.model, record.version).source))
        if source is None:
            raise NotFoundError("the files of this version were not put there by onnx-ops", where=where)
        with self._mlflow.session(where) as client, Scratch() as aside:
            logged = client.get_logged_model(source[1])
            download = Download(self._mlflow, logged.artifact_location, where)
            mlmodel = download.file(mlflow_folder.MLMODEL, aside)
            download.expect(mlmodel, Digest(logged.tags.get(MLMODEL_DIGEST, "")))
            manifest = download.file(mlflow_folder.MANIFEST, aside)
            download.expect(manifest, record.manifest)
            names = codec.loads(manifest.read_bytes(), dict[str, str], where=where)
            if unsafe := sorted(name for name in names if not mlflow_folder.is_safe_name(name)):
                raise DigestMismatchError(f"{unsafe[0]!r} is no name for a model's file", where=where)
            return Manifest(files={name: digest_file(download.file(name, folder)) for name in names})

    def document(self, record: VersionRecord, name: str) -> bytes:
        """An evidence document of the version, by the path it was published under. Whoever reads it compares its
        digest with the signed one.

        Raises:
            NotFoundError: the version has no such document.
            ServiceUnavailableError: MLflow does not answer.
        """
        where = f"{record.model} version {record.version}"
        run_id = self._version(record.model, record.version).run_id
        with self._mlflow.session(where) as client, Scratch() as aside:
            if run_id and mlflow_folder.is_safe_name(name):
                download = Download(self._mlflow, client.get_run(run_id).info.artifact_uri, where)
                if download.has(name):
                    return download.file(name, aside).read_bytes()
        raise NotFoundError(f"there is no document {name!r}", where=where, remedy="Register the release again")

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        """Show a ledger entry as a run of experiment `releases/<endpoint>`. Nothing depends on it: a failure is logged
        and swallowed."""
        name = f"releases/{entry.endpoint}"
        try:
            with self._mlflow.session(name) as client:
                mlflow_mirror.mirror_entry(client, self._experiment(client, name), entry, model)
        except OnnxOpsError as error:
            _log.warning("entry %d of %s is not shown in MLflow: %s", entry.sequence, entry.endpoint, error)

    def where(self, model: str) -> str:
        """The page of the model, or the command that opens MLflow on this database."""
        if pages := self._pages():
            return f"{pages}/#/models/{quote(model, safe='')}"
        path = self._mlflow.sqlite_path()
        command = [
            _program(),
            "server",
            "--backend-store-uri",
            f"sqlite:///{path}" if path else self._mlflow.shown,
            "--default-artifact-root",
            str(self._artifact_root),
            "--host",
            "127.0.0.1",
            "--port",
            "5000",
        ]
        return shlex.join(command)

    def page(self, model: str, version: str, name: str) -> str:
        """The document among the artifacts of the version's run; empty on a database without `public_url`."""
        run_id = self._version(model, version).run_id
        if not (pages := self._pages()):
            return ""
        with self._mlflow.session(f"{model} version {version}") as client:
            experiment = client.get_run(run_id).info.experiment_id
        return f"{pages}/#/experiments/{experiment}/runs/{run_id}/artifacts/{quote(name)}"

    def _pages(self) -> str:
        return self._public_url or ("" if self._mlflow.is_database else self._mlflow.shown.rstrip("/"))

    def _root(self, given: str | None) -> str:
        if given is not None:
            return given if urlsplit(given).scheme else str(Path(given).absolute())
        database = self._mlflow.sqlite_path()
        if database is None:
            raise UserError(
                "a database needs an artifact root",
                where=self._mlflow.shown,
                why="it holds no files",
                remedy="Set artifact_root to a folder or s3://…, or use a tracking server",
            )
        return str(database.parent / "mlartifacts")

    def _experiment(self, client: MlflowClient, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(name)
        if found is None:
            location = f"{self._artifact_root}/{quote(name)}" if self._artifact_root else None
            try:
                return str(client.create_experiment(name, artifact_location=location))
            except MlflowException as error:
                found = client.get_experiment_by_name(name)
                if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise UserError(
                "the experiment was deleted in MLflow",
                where=f"experiment {name}",
                remedy=f"mlflow experiments restore --experiment-id {found.experiment_id}",
            )
        return str(found.experiment_id)

    def _ensure_model(self, client: MlflowClient, model: str, about: str) -> None:
        """Create the model, or bring its description up to date unless a person has written it."""
        from mlflow.exceptions import MlflowException

        if found := client.search_registered_models(f"name = '{model}'", max_results=1):
            there = found[0].description or ""
            if about and there != about and (not there or there.endswith(KEPT)):
                client.update_registered_model(model, about)
            return
        try:
            client.create_registered_model(model, description=about)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _version(self, model: str, version: str) -> Any:
        try:
            if not (_NAME.fullmatch(model) and version.isdecimal()):
                raise NotFoundError("no such version", where=f"{model} version {version}")
            with self._mlflow.session(f"{model} version {version}") as client:
                return client.get_model_version(model, version)
        except NotFoundError as error:
            raise self._unknown(model, version) from error

    def _unknown(self, model: str, version: str) -> NotFoundError:
        with self._mlflow.session(f"model {model}") as client:
            models = [entry.name for entry in client.search_registered_models(max_results=1000)]
            if model not in models:
                close = difflib.get_close_matches(model, models, n=1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Registered: {', '.join(models[:10]) or 'none'}"
                return NotFoundError(f"no model is called {model!r}", where=self._mlflow.shown, remedy=hint)
            found = client.search_model_versions(f"name = '{model}'", max_results=10)
            aliases = self.aliases(model)
            newest = ", ".join(str(entry.version) for entry in found) or "none"
            hint = f"{version!r} is an alias of {aliases[version]}" if version in aliases else f"Newest: {newest}"
            return NotFoundError(f"{model} has no version {version!r}", where=self._mlflow.shown, remedy=hint)


def _valid_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name for a registered model or variant",
            why="letters, digits, dots, dashes, underscores and spaces, at most 200",
        )
    return name


def _program() -> str:
    """MLflow's command: the one of this environment, by its short name where the shell finds that one."""
    ours = Path(sys.executable).parent / "mlflow"
    return str(ours) if ours.exists() and shutil.which("mlflow") != str(ours) else "mlflow"
