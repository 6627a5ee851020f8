"""Any model of MLflow's registry, whoever registered it: `models:/NAME/VERSION` or `models:/NAME@ALIAS`."""

from __future__ import annotations

import re
from pathlib import Path

from onnx_ops.adapters.registries.mlflow_connection import Connection
from onnx_ops.errors import UserError

_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))")


class MlflowModels:
    """Files of registered versions, read only."""

    def __init__(self, tracking_uri: str) -> None:
        self._mlflow = Connection(tracking_uri)

    def fingerprint(self, uri: str) -> str:
        """The version that is meant and where its files are: neither changes once it is registered.

        Raises:
            UserError: it is no such URI.
            NotFoundError: there is no such version or alias.
            ServiceUnavailableError: MLflow does not answer.
        """
        name, version, source = self._version(uri)
        return f"{name}/{version} {source}"

    def fetch(self, uri: str, folder: Path) -> None:
        """Download the version's files into an empty folder; raises as `fingerprint` does."""
        name, version, _ = self._version(uri)
        with self._mlflow.session(uri), self._mlflow.as_default():
            from mlflow.artifacts import download_artifacts

            download_artifacts(
                artifact_uri=f"models:/{name}/{version}", dst_path=str(folder), tracking_uri=self._mlflow.uri
            )

    def _version(self, uri: str) -> tuple[str, str, str]:
        match = _URI.fullmatch(uri)
        if match is None:
            raise UserError(
                f"{uri!r} names no version", where="model", remedy="Write models:/NAME/VERSION or models:/NAME@ALIAS."
            )
        with self._mlflow.session(uri) as client:
            if match["alias"]:
                found = client.get_model_version_by_alias(match["name"], match["alias"])
            else:
                found = client.get_model_version(match["name"], match["version"])
        return str(found.name), str(found.version), str(found.source)
