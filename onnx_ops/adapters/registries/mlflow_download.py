"""Files of a LoggedModel or run, which anybody who can write to the artifact store may have changed."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.adapters.registries.mlflow_connection import Connection
from onnx_ops.domain.artifact import Digest, digest_file
from onnx_ops.errors import DigestMismatchError

_REMEDY = "Find out who changed MLflow's artifacts, and register the release again"


class Download:
    """Files of one LoggedModel or run.

    Args:
        connection: where MLflow is.
        location: its artifact location, as MLflow says it.
        where: names the version in errors.
    """

    def __init__(self, connection: Connection, location: str, where: str) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        self._files = get_artifact_repository(location, tracking_uri=connection.uri)
        self._where = where

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        parent = name.rpartition("/")[0]
        return any(info.path == name and not info.is_dir for info in self._files.list_artifacts(parent or None))

    def file(self, name: str, folder: Path) -> Path:
        """Download one file, under its name, into `folder`.

        Raises:
            DigestMismatchError: there is no such file.
        """
        if not self.has(name):
            raise DigestMismatchError(f"{name} is missing from the artifacts", where=self._where, remedy=_REMEDY)
        self._files.download_artifacts(name, str(folder))  # type: ignore[no-untyped-call]
        return folder / name

    def expect(self, path: Path, digest: Digest) -> None:
        """Raises DigestMismatchError if the downloaded file is not what was registered."""
        if digest_file(path) != digest:
            raise DigestMismatchError(f"{path.name} is not what was registered", where=self._where, remedy=_REMEDY)
