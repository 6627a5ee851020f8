"""Find the champion of a target, with which a release is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import NotFoundError
from onnx_ops.ports import Context
from onnx_ops.release.journal import list_sibling_states
from onnx_ops.release.registry_sync import (
    fetch_files,
    find_serving_champion,
    restore_files,
)

HINT = "champion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Champion:
    """A champion; `location` is a verified local folder."""

    version: str
    manifest: Digest
    location: str


def find_champion(context: Context, model: str, target: str) -> Champion | None:
    """Return the champion of a target, or None.

    If endpoints serve the target, the champion is a version that one of them serves (see
    `find_serving_champion`). Otherwise, it is the version under the alias.

    Raises:
        NotFoundError: neither this machine nor the registry has the files of the version.
        InfrastructureError: the ledger or the registry cannot be read.
    """
    if not model:
        return None
    registry = context.registry()
    version = registry.aliases(model).get(format_alias("champion", target))
    states = list_sibling_states(context, model, target)
    if (serving := find_serving_champion(states, version)) is not None:
        location = _locate(context, serving, target)
        return Champion(version=serving.version, manifest=serving.manifest, location=location)
    if version is None:
        return None
    record = registry.version(model, version)
    return Champion(
        version=version, manifest=record.manifest, location=fetch_files(context, record)
    )


def _locate(context: Context, deployment: Deployment, target: str) -> str:
    """Return the folder with the files of the version that serves a target."""
    try:
        return restore_files(context, deployment)
    except NotFoundError as error:
        raise NotFoundError(
            "the version that serves has no files, so nothing can be compared with it",
            where=f"{deployment.model}/{deployment.version}",
            why=str(error),
            remedy="Serve a version that the registry has: `onnx-ops promote "
            f"{deployment.model}/VERSION --target {target}`.",
        ) from error


def attach_champion(stage: Stage, context: Context) -> Stage:
    """Return the benchmark stage with its champion as a hint.

    A stage that already has the hint is unchanged. The process of the stage then needs no registry
    client. The champion is a hint, since it is not part of the key.
    """
    settings: Mapping[str, Any] = stage.settings
    if HINT in stage.hints:
        return stage
    champion = find_champion(context, settings["model"], str(stage.target))
    return replace(stage, hints={**stage.hints, HINT: codec.to_json(champion)})


def read_champion(stage: Stage, context: Context) -> Champion | None:
    """Return the champion from the stage's hint; without a hint, from the registry."""
    settings: Mapping[str, Any] = stage.settings
    if HINT not in stage.hints:
        return find_champion(context, settings["model"], str(stage.target))
    hint = stage.hints[HINT]
    return None if hint is None else codec.from_json(hint, Champion, where=stage.id)
