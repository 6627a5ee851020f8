"""The champion of a target: the version that a release is measured against, fetched and verified now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, short_digest
from onnx_ops.domain.pipeline import Stage
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import DigestMismatchError
from onnx_ops.ports import Ports
from onnx_ops.scratch import Scratch

HINT = "champion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Champion:
    """`location` is a verified folder of this machine."""

    version: str
    manifest: Digest
    location: str


def find_champion(ports: Ports, model: str, target: str) -> Champion | None:
    """None if the target has no champion yet, or the pipeline registers nothing.

    Raises:
        ServiceUnavailableError: the registry does not answer.
        DigestMismatchError: what came is not what was registered.
    """
    if not model:
        return None
    registry = ports.registry()
    version = registry.aliases(model).get(format_alias("champion", target))
    if version is None:
        return None
    record = registry.version(model, version)
    location = ports.files.location(record.manifest)
    if location is None:
        with Scratch() as folder:
            manifest = registry.fetch(record, folder)
            if manifest.digest() != record.manifest:
                raise DigestMismatchError(
                    f"version {version} holds {short_digest(manifest.digest())}, "
                    f"but {short_digest(record.manifest)} was registered",
                    where=f"{model}/{version}",
                    remedy="Its artifact was changed; roll back to a version that is intact.",
                )
            location = ports.files.admit(folder, manifest)
    return Champion(version=version, manifest=record.manifest, location=location)


def attach_champion(stage: Stage, ports: Ports) -> Stage:
    """A benchmark that knows its champion: asking here spares its own process the registry's client.

    The baseline is evidence and no part of the key, so it travels as a hint.
    """
    settings: Mapping[str, Any] = stage.settings
    champion = find_champion(ports, settings["model"], str(stage.target))
    return replace(stage, hints={**stage.hints, HINT: codec.to_json(champion)})


def read_champion(stage: Stage, ports: Ports) -> Champion | None:
    """The champion that the stage was told, or else what the registry says."""
    settings: Mapping[str, Any] = stage.settings
    if HINT not in stage.hints:
        return find_champion(ports, settings["model"], str(stage.target))
    told = stage.hints[HINT]
    return None if told is None else codec.from_json(told, Champion, where=stage.id)
