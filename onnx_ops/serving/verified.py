"""Whether the files of a deployment are those that were approved. Loads nothing of the runtime."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.domain.artifact import Manifest, digest_file, short
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatch, EnvironmentFailure, NotFound


def verify(folder: Path, deployment: Deployment) -> None:
    """Compare every file below the folder with the deployment's manifest.

    Raises:
        NotFound: there is no such folder.
        DigestMismatch: the files are not those of the manifest.
        EnvironmentFailure: a file cannot be read.
    """
    if not folder.is_dir():
        raise NotFound("the model folder is not there", where=str(folder))
    try:
        files = {p.relative_to(folder).as_posix(): digest_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    except OSError as error:
        raise EnvironmentFailure("the model's files cannot be read", where=str(folder), why=str(error)) from error
    found = Manifest(files=files).digest()
    if found != deployment.manifest:
        raise DigestMismatch(
            f"digest mismatch: the manifest of {deployment.name} is {short(deployment.manifest)}",
            where=str(folder),
            why=f"the files there have {short(found)}",
            remedy="Fetch the version again; its files were changed after they were registered.",
        )
