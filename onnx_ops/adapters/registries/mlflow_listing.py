"""Versions of a model, read from MLflow's database or server without MLflow.

Importing MLflow takes longer than reading the versions. This module is for runs that only check
which versions are registered. MLflow must read the versions if this module does not support the
database, its tables, the certificate or the authentication, or if its request fails.
"""

from __future__ import annotations

import base64
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from onnx_ops.adapters.http_json import request_json
from onnx_ops.errors import OnnxOpsError

VersionTags = tuple[str, int, Mapping[str, str]]
"""Version number, creation time in milliseconds since the Unix epoch, and tags."""

_ONLY_MLFLOW = (
    "MLFLOW_TRACKING_AUTH",
    "MLFLOW_TRACKING_AWS_SIGV4",
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    "MLFLOW_TRACKING_INSECURE_TLS",
    "MLFLOW_TRACKING_SERVER_CERT_PATH",
    "MLFLOW_WORKSPACE",
)
"""Settings of MLflow's own client that this module does not support."""

_MOST_BYTES = 64 << 20
_PAGE = 1000

_VERSIONS = """
SELECT v.version, v.creation_time, t.key, t.value
FROM model_versions v JOIN model_version_tags t \
ON t.name = v.name AND t.version = v.version{and_workspace}
WHERE v.name = ? AND v.current_stage != 'Deleted_Internal'{where_workspace}
"""


def list_version_tags(uri: str, database: Path | None, model: str) -> list[VersionTags] | None:
    """Return the versions of a model with their tags; None if MLflow must read them.

    The oldest version is first. From a database, only versions with tags are returned.

    Args:
        uri: address of the tracking server or database.
        database: path of a SQLite database; None for other databases and servers.
        model: name of the registered model.
    """
    if any(os.environ.get(name) for name in _ONLY_MLFLOW):
        return None
    if database is not None:
        return _read_database(database, model)
    return _read_server(uri, model) if urlsplit(uri).scheme in ("http", "https") else None


def _read_database(database: Path, model: str) -> list[VersionTags] | None:
    if not database.is_file():
        return None
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)
        ) as connection:
            columns = {row[1] for row in connection.execute("PRAGMA table_info(model_versions)")}
            has_workspaces = "workspace" in columns
            query = _VERSIONS.format(
                and_workspace=" AND t.workspace = v.workspace" if has_workspaces else "",
                where_workspace=" AND v.workspace = 'default'" if has_workspaces else "",
            )
            rows = connection.execute(query, (model,)).fetchall()
    except sqlite3.Error:
        return None
    created: dict[int, int] = {}
    tags: dict[int, dict[str, str]] = {}
    for version, created_ms, key, value in rows:
        created[version] = int(created_ms)
        tags.setdefault(version, {})[str(key)] = str(value)
    return [(str(version), created[version], tags[version]) for version in sorted(tags)]


def _read_server(uri: str, model: str) -> list[VersionTags] | None:
    parts = urlsplit(uri)
    base = f"{uri.rstrip('/')}/api/2.0/mlflow/model-versions/search?max_results={_PAGE}"
    wanted = quote(f"name = '{model}'")
    base += f"&filter={wanted}"
    listed: list[VersionTags] = []
    token = ""
    while True:
        url = f"{base}&page_token={quote(token)}" if token else base
        try:
            page = request_json(
                "GET", url, host=parts.hostname or "", headers=_authorize(), max_bytes=_MOST_BYTES
            )
            listed += [_read_entry(entry) for entry in page.get("model_versions", ())]
            token = page.get("next_page_token") or ""
        except (
            OnnxOpsError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ):
            # The request failed, or the server did not return MLflow's JSON. MLflow itself must
            # report the error.
            return None
        if not token:
            return sorted(listed, key=lambda entry: int(entry[0]))


def _read_entry(entry: Mapping[str, Any]) -> VersionTags:
    tags = {str(tag["key"]): str(tag["value"]) for tag in entry.get("tags", ())}
    return str(entry["version"]), int(entry["creation_timestamp"]), tags


def _authorize() -> dict[str, str]:
    """Return the header with the credentials from MLflow's environment variables.

    As in MLflow, user name and password take precedence over a token.
    """
    name, password, token = (
        os.environ.get(f"MLFLOW_TRACKING_{part}") for part in ("USERNAME", "PASSWORD", "TOKEN")
    )
    if name and password:
        credentials = base64.b64encode(f"{name}:{password}".encode()).decode()
        return {"Authorization": f"Basic {credentials}"}
    return {"Authorization": f"Bearer {token}"} if token else {}
