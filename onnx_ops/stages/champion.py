"""The champion of a target: the version that a release is measured against, fetched and verified now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.artifact import Digest, short
from onnx_ops.domain.rollout import alias
from onnx_ops.errors import DigestMismatch
from onnx_ops.ports import Ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Champion:
    version: str
    manifest: Digest
    folder: Path


def fetch_champion(ports: Ports, model: str, target: str, scratch: Path) -> Champion | None:
    """None if the target has no champion yet, or the pipeline registers nothing.

    Raises:
        ServiceUnavailable: the registry does not answer.
        DigestMismatch: what came is not what was registered.
    """
    if not model:
        return None
    registry = ports.registry()
    version = registry.aliases(model).get(alias("champion", target))
    if version is None:
        return None
    record = registry.version(model, version)
    location = ports.files.location(record.manifest)
    if location is None:
        folder = scratch / "champion"
        folder.mkdir()
        if (found := registry.fetch(record, folder).digest()) != record.manifest:
            raise DigestMismatch(
                f"version {version} holds {short(found)}, but {short(record.manifest)} was registered",
                where=f"{model}/{version}",
                remedy="Its artifact was changed; roll back to a version that is intact.",
            )
        location = str(folder)
    return Champion(version=version, manifest=record.manifest, folder=Path(location))
