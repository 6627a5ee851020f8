"""Find the champion of a target, with which a release is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.rollout import format_alias
from onnx_ops.ports import Context
from onnx_ops.release.registry_sync import fetch_files

HINT = "champion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Champion:
    """A champion; `location` is a verified local folder."""

    version: str
    manifest: Digest
    location: str


def find_champion(context: Context, model: str, target: str) -> Champion | None:
    """Return the champion of a target, or None."""
    if not model:
        return None
    registry = context.registry()
    version = registry.aliases(model).get(format_alias("champion", target))
    if version is None:
        return None
    record = registry.version(model, version)
    return Champion(
        version=version, manifest=record.manifest, location=fetch_files(context, record)
    )


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
