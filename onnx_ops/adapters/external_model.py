"""Models that users supply with `model:`.

A model is a path in the project, a version in MLflow (`models:/…`), a pinned address (`https://…`,
`hf://…`), or a URL for fsspec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from onnx_ops.adapters.pinned_files import PinnedFiles
from onnx_ops.domain.artifact import Digest, digest_file, digest_folder, digest_json
from onnx_ops.domain.pinned_address import hide_secrets, is_pinned_address
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError, describe_error
from onnx_ops.plugins import imported, missing_package

if TYPE_CHECKING:
    from onnx_ops.adapters.registries.mlflow_connection import MlflowModels

REGISTERED = "models:/"

_VERSION_OF_A_FILE = (
    "ETag",
    "etag",
    "size",
    "LastModified",
    "last_modified",
    "mtime",
    "checksum",
    "sha",
)
"""Attributes that show a change of a file; each file system has some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSuppliedModels:
    """Resolver of `model:` in pipelines.

    Paths are relative to the project's folder `root`. `registered` opens the registry.
    """

    root: Path
    pinned: PinnedFiles
    registered: Callable[[], MlflowModels]

    def digest(self, place: str) -> Digest:
        """Return a digest that changes with the model, without downloading remote models.

        The digest of a local ONNX file includes the files with its external data. That of a file
        behind a URL for fsspec does not, since such a file is downloaded alone.

        Raises:
            NotFoundError: the model, or a file with its external data, does not exist.
            UserError: the address or the URI of a version is not valid, or its scheme is unknown.
            RefusedError: MLflow does not permit the request.
            ServiceUnavailableError: the model cannot be read from its server now.
            MissingPackageError: fsspec requires another package for this kind of URL.
        """
        if place.startswith(REGISTERED):
            return digest_json([place, self.registered().fingerprint(place)])
        if is_pinned_address(place):
            return self.pinned.digest(place)
        if "://" in place:
            system, remote = _open(place)
            with _file_system_errors(place):
                infos = (
                    system.find(remote, detail=True)
                    if system.isdir(remote)
                    else {remote: system.info(remote)}
                )
            versions = {
                name: {
                    key: str(info[key]) for key in _VERSION_OF_A_FILE if info.get(key) is not None
                }
                for name, info in sorted(infos.items())
            }
            return digest_json([place, versions])
        path = self._path(place)
        if path.is_dir():
            return digest_folder(path).digest()
        if path.suffix != ".onnx":
            return digest_file(path)
        # Most commands import this module, and few of them read models.
        from onnx_ops.onnx_graph.files import digest_model

        return digest_model(path)

    def path(self, place: str, scratch: Path) -> Path:
        """Return the model as a local path.

        The content of a pinned address is downloaded into the cache, and another remote model into
        the new folder `scratch`. Raises the errors of `digest` and of `PinnedFiles.fetch`.
        """
        if place.startswith(REGISTERED):
            scratch.mkdir(parents=True)
            self.registered().fetch(place, scratch)
            return scratch
        if is_pinned_address(place):
            return self.pinned.fetch(place)
        if "://" not in place:
            return self._path(place)
        system, remote = _open(place)
        target = scratch / (Path(urlsplit(place).path).name or "model")
        with _file_system_errors(place):
            if system.isdir(remote):
                system.get(remote.rstrip("/") + "/", str(target) + "/", recursive=True)
            else:
                scratch.mkdir(parents=True)
                system.get_file(remote, str(target))
        return target

    def _path(self, place: str) -> Path:
        path = self.root / place
        if not path.exists():
            raise NotFoundError(
                "no such model",
                where=str(path),
                remedy="Write `model:` relative to the project's root.",
            )
        return path


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    # `::` joins the addresses of file systems that are chained, such as an archive in a bucket.
    schemes = {part.partition("://")[0] for part in url.split("::")}
    if unknown := sorted(schemes.difference(fsspec.available_protocols())):
        raise UserError(
            f"no file system is known for addresses that begin with {unknown[0]}://",
            where=hide_secrets(url),
            remedy="Use an address such as s3://, gs://, abfs:// or https://.",
        )
    with _file_system_errors(url):
        system, path = fsspec.core.url_to_fs(url)
        if system.exists(path):
            return system, path
    raise NotFoundError(
        "no such model",
        where=hide_secrets(url),
        remedy="Check `model:`, and your permissions on its location.",
    )


@contextmanager
def _file_system_errors(url: str) -> Iterator[None]:
    """Raise errors of a file system of fsspec as errors of this package."""
    try:
        yield
    except ImportError as error:
        raise missing_package(
            imported(error), where=f"model {hide_secrets(url)}", why=str(error)
        ) from error
    except Exception as error:  # Each fsspec file system raises its own types of exceptions.
        raise ServiceUnavailableError(
            "the model cannot be read now", where=hide_secrets(url), why=describe_error(error)
        ) from error
