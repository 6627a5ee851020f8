"""Downloads of files from MLflow's artifact storage.

Other clients can change these files.
"""

from __future__ import annotations

import re
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.registries import mlflow_folder
from onnx_ops.adapters.registries.mlflow_connection import MlflowConnection
from onnx_ops.domain.artifact import Digest, Manifest, digest_file
from onnx_ops.errors import DigestMismatchError, RefusedError, quoted
from onnx_ops.scratch import Scratch

REGISTER_AGAIN = (
    "Delete the version in MLflow, then register its release again with `onnx-ops run FILE`"
)
_ARTIFACT_REMEDY = f"Check who can change artifacts in MLflow. {REGISTER_AGAIN}."

_ARTIFACT_SCHEMES = frozenset(
    (
        "",
        "file",
        "s3",
        "r2",
        "gs",
        "wasb",
        "wasbs",
        "abfs",
        "abfss",
        "azureml",
        "hdfs",
        "mlflow-artifacts",
    )
)
"""Schemes of artifact locations from which onnx-ops downloads.

Other schemes, such as `http`, could make onnx-ops send requests to any host.
"""


class ArtifactDownload:
    """Files of one LoggedModel or run; other clients can change them.

    Requests raise the errors of `MlflowConnection.artifact_errors`. Errors of MLflow and of the
    system are converted by `MlflowConnection.session`, which must be active.
    """

    def __init__(self, connection: MlflowConnection, location: str, where: str) -> None:
        """Prepare downloads from a location.

        Raises:
            RefusedError: onnx-ops does not download from locations with this scheme.
            ServiceUnavailableError: the client of the storage cannot be created.
        """
        if _get_scheme(location) not in _ARTIFACT_SCHEMES:
            raise RefusedError(
                "onnx-ops does not fetch files from the artifact location of this version",
                where=where,
                why=f"the location is {quoted(location)}",
                remedy=f"{REGISTER_AGAIN}, or move the alias to another version.",
            )
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        self._connection, self._where = connection, where
        with self._connection.artifact_errors(self._where):
            self._files = get_artifact_repository(location, tracking_uri=connection.uri)

    def has(self, name: str) -> bool:
        """Return whether a file with that name exists."""
        parent = name.rpartition("/")[0]
        with self._connection.artifact_errors(self._where):
            return any(
                info.path == name and not info.is_dir
                for info in self._files.list_artifacts(parent or None)
            )

    def file(self, name: str, folder: Path) -> Path:
        """Download one file into `folder`; raise DigestMismatchError if it is missing."""
        if not self.has(name):
            what = f"{name} is missing from the artifacts"
            raise DigestMismatchError(what, where=self._where, remedy=_ARTIFACT_REMEDY)
        with self._connection.artifact_errors(self._where):
            self._files.download_artifacts(name, str(folder))  # type: ignore[no-untyped-call]
        return folder / name

    def fetch_model(self, mlmodel: Digest, manifest: Digest, folder: Path) -> Manifest:
        """Download the files of a model into an empty folder; return their manifest.

        Args:
            mlmodel: expected digest of the file MLmodel.
            manifest: expected digest of the list of files.

        Raises:
            DigestMismatchError: the MLmodel or the list was changed, or a file is missing. Or the
                list has a name that is not safe. The caller compares the digests of the other
                files.
        """
        with Scratch() as aside:
            self._verify(self.file(mlflow_folder.MLMODEL, aside), mlmodel)
            listed = self.file(mlflow_folder.MANIFEST, aside)
            self._verify(listed, manifest)
            names = codec.loads(listed.read_bytes(), dict[str, str], where=self._where)
        if unsafe := sorted(name for name in names if not mlflow_folder.is_safe_name(name)):
            raise DigestMismatchError(
                f"{unsafe[0]!r} is not a valid name of a model's file", where=self._where
            )
        return Manifest(files={name: digest_file(self.file(name, folder)) for name in names})

    def _verify(self, path: Path, digest: Digest) -> None:
        """Raise DigestMismatchError if a downloaded file differs from the registered file."""
        if digest_file(path) != digest:
            what = f"{path.name} differs from the registered file"
            raise DigestMismatchError(what, where=self._where, remedy=_ARTIFACT_REMEDY)


def _get_scheme(location: str) -> str:
    return (
        location.partition(":")[0].lower()
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", location)
        else ""
    )
