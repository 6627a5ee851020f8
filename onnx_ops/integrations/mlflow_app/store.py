"""Access to the model registry of the MLflow server in this process.

The values are those in the registry, not those in the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops.adapters.registries.mlflow_connection import read_pages
from onnx_ops.adapters.registries.mlflow_tags import DIGEST, RELEASE, read_decisions
from onnx_ops.domain.decision import SignedDecision
from onnx_ops.domain.release import VersionRecord

_PLAIN = re.compile(r"[A-Za-z0-9._ -]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """One version as stored by the server.

    `model` and `version` have the stored spelling.
    """

    model: str
    version: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]
    description: str = ""


class ServerStore:
    """The versions in the MLflow server of this process."""

    def find(self, model: str, version: str) -> StoredVersion | None:
        """Return a version with its tags; None if it does not exist.

        The guard need not report a missing version, since MLflow's handler of the request does.
        """
        stored = _unless_absent(lambda: _store().get_model_version(model, version))
        if stored is None:
            return None
        return StoredVersion(
            model=str(stored.name),
            version=str(stored.version),
            tags={str(key): str(value) for key, value in stored.tags.items()},
            aliases=tuple(stored.aliases),
            description=stored.description or "",
        )

    def find_registered(self, model: str) -> str | None:
        """Return the stored name of a model if onnx-ops registered any version of it.

        The query needs the stored spelling: MLflow compares names with case in a query, even if its
        database ignores case. Only a name that matches `_PLAIN` can be part of the query.
        """
        stored = _unless_absent(lambda: _store().get_registered_model(model))
        name = "" if stored is None else str(stored.name)
        if not _PLAIN.fullmatch(name):
            return None
        query = f"name = '{name}' AND tags.{RELEASE} LIKE 'sha256:%'"
        return name if _store().search_model_versions(query, max_results=1) else None

    def aliases(self, model: str) -> Mapping[str, str]:
        """Return versions by alias; empty for an unknown model."""
        stored = _unless_absent(lambda: _store().get_registered_model(model))
        return (
            {}
            if stored is None
            else {str(alias): str(version) for alias, version in stored.aliases.items()}
        )

    def list_copies(self, record: VersionRecord, target: str) -> Iterator[SignedDecision]:
        """Yield decisions for the target on other versions of the same content.

        Versions of other models are left out.
        """
        query, search = f"tags.`{DIGEST}` = '{record.manifest}'", _store().search_model_versions
        for stored in read_pages(lambda token: search(query, max_results=100, page_token=token)):
            if str(stored.name) == record.model and str(stored.version) != record.version:
                signed = read_decisions(
                    {str(key): str(value) for key, value in stored.tags.items()}
                ).get(target)
                if signed is not None:
                    yield signed

    def annotate(self, stored: StoredVersion, key: str, value: str) -> None:
        """Set a tag of a version in the registry of this server."""
        from mlflow.entities.model_registry import ModelVersionTag

        _store().set_model_version_tag(stored.model, stored.version, ModelVersionTag(key, value))  # type: ignore[no-untyped-call]


def _store() -> Any:
    from mlflow.server import handlers

    return handlers._get_model_registry_store()  # noqa: SLF001 (MLflow has no public way to the store it serves)


def _unless_absent(ask: Any) -> Any:
    """Return the result of a call, or None if the server has no such entry.

    The result is also None if a name is invalid.
    """
    from mlflow.exceptions import MlflowException

    try:
        return ask()
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
