"""What stands in the registry, and how a version leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_ops.adapters.registries.mlflow_tags import DIGEST, EVIDENCE_DIGEST, RELEASE, VARIANT
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.release import ListedVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_PAGE = 1000
_GONE = frozenset({"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "INVALID_STATE"})


def listed_versions(client: MlflowClient, model: str) -> tuple[ListedVersion, ...]:
    """Those that carry the tags of onnx-ops, oldest first."""
    found: list[ListedVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name = '{model}'", max_results=_PAGE, page_token=token)
        for entry in page:
            if {RELEASE, VARIANT, DIGEST} <= set(entry.tags):
                listed = ListedVersion(
                    version=str(entry.version),
                    release=Digest(entry.tags[RELEASE]),
                    variant=entry.tags[VARIANT],
                    manifest=Digest(entry.tags[DIGEST]),
                    created_at=entry.creation_timestamp / 1000,
                    evidence=Digest(entry.tags[EVIDENCE_DIGEST]) if EVIDENCE_DIGEST in entry.tags else None,
                )
                found.append(listed)
        if not (token := page.token):
            return tuple(sorted(found, key=lambda entry: int(entry.version)))


def remove_version(client: MlflowClient, found: ModelVersion) -> None:
    """The version goes last: cut short before, it is still listed and can be removed again."""
    from mlflow.exceptions import MlflowException

    model_id = str(found.source).removeprefix("models:/")
    for remove, name in ((client.delete_run, str(found.run_id)), (client.delete_logged_model, model_id)):
        try:
            remove(name)
        except MlflowException as error:
            if error.error_code not in _GONE:
                raise
    client.delete_model_version(found.name, str(found.version))
