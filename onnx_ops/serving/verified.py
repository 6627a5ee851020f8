"""Whether the files of a deployment are those that were approved. Loads nothing of the runtime."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.domain.artifact import Manifest, digest_file, short
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatch, EnvironmentFailure, NotFound


def verify(folder: Path, deployment: Deployment) -> None:
    """Compare every file below the folder with the deployment's manifest, which its libraries of operators must be in.

    Raises:
        NotFound: there is no such folder.
        DigestMismatch: the files are not those of the manifest, or a library is none of them.
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
    if strange := sorted(set(deployment.custom_ops) - set(files)):
        raise DigestMismatch(
            f"the library of operators {strange[0]} is not among the files of {deployment.name}",
            where=str(folder),
            why="only a library that was registered with the version is loaded",
            remedy="Run the pipeline again, so that the version holds the libraries of its target.",
        )
