"""Downloads of pinned addresses into a cache of this machine.

A pinned address (see `domain.pinned_address`) always means the same content. It is therefore
downloaded once; later runs need no network. Files are checked whenever they are taken from the
cache. A file of a web server is checked against the pinned digest. Files of the hub and of archives
are checked against the digest of what was downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.artifact import Digest, digest_file, digest_folder, digest_json, hex_digits
from onnx_ops.domain.pinned_address import (
    HubAddress,
    PinnedAddress,
    WebAddress,
    hide_secrets,
    parse_pinned_address,
)
from onnx_ops.errors import (
    DigestMismatchError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
    describe_error,
)
from onnx_ops.file_locks import hold_lock
from onnx_ops.plugins import missing_package

PINNED = "pinned"
"""Name of the cache's folder in the state of a project."""

_FILES, _RECORD = "files", "digest"
"""Parts of a cached folder: the downloaded files, and their digest."""

_TIMEOUT_S = 30.0
"""Seconds to wait for the next bytes of a download."""

_CHUNK_BYTES = 1 << 20

_HUB_LIBRARY = "huggingface_hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFiles:
    """Files of pinned addresses.

    `cache` is the folder of the downloads. Several processes can use it at the same time.
    """

    cache: Path

    def digest(self, place: str) -> Digest:
        """Return a digest that changes with the content; nothing is downloaded.

        Raises:
            UserError: the address is not pinned.
        """
        parse_pinned_address(place)
        return digest_json(["pinned", hide_secrets(place)])

    def find(self, place: str) -> Path | None:
        """Return the cached file or folder of an address; download nothing.

        The result is None if the cache lacks the whole, unchanged content.

        Raises:
            UserError: the address is not pinned.
        """
        address = parse_pinned_address(place)
        folder = self._folder(place)
        return _file_of(address, folder) if _is_intact(address, folder) else None

    def fetch(self, place: str) -> Path:
        """Return the file or folder of an address; download it if the cache lacks it.

        Raises:
            UserError: the address lacks a pin, or an archive cannot be unpacked.
            NotFoundError: the server has no such file.
            RefusedError: the server refuses the request, or sends content with another digest.
            ServiceUnavailableError: the download fails, for example without an answer.
            MissingPackageError: `hf://` needs the extra `hub`.
        """
        address = parse_pinned_address(place)
        folder = self._folder(place)
        download = folder.with_name(f"{folder.name}.part")
        with hold_lock(folder.with_name(f"{folder.name}.lock")):
            if not _is_intact(address, folder):
                shutil.rmtree(folder, ignore_errors=True)
                # A killed process leaves an unfinished download.
                shutil.rmtree(download, ignore_errors=True)
                files = download / _FILES
                files.mkdir(parents=True)
                if isinstance(address, WebAddress):
                    _download_file(address, files)
                else:
                    _download_repository(address, files)
                (download / _RECORD).write_text(digest_folder(files).digest())
                download.replace(folder)
        return _file_of(address, folder)

    def _folder(self, place: str) -> Path:
        return self.cache / hex_digits(self.digest(place))[:32]


def _file_of(address: PinnedAddress, folder: Path) -> Path:
    """Return the path of an address's file or folder in its cached folder.

    An archive with one folder at the top stands for this folder.
    """
    files = folder / _FILES
    if isinstance(address, HubAddress):
        return files / address.path
    if not address.is_archive:
        return files / address.name
    below = list(files.iterdir())
    return below[0] if len(below) == 1 and below[0].is_dir() else files


def _is_intact(address: PinnedAddress, folder: Path) -> bool:
    """Return whether a cached folder has the whole content of an address."""
    try:
        if isinstance(address, WebAddress) and not address.is_archive:
            return hex_digits(digest_file(_file_of(address, folder))) == address.sha256
        return (folder / _RECORD).read_text() == digest_folder(folder / _FILES).digest()
    except OSError:
        return False


def _download_file(address: WebAddress, folder: Path) -> None:
    """Download a file into a folder.

    A redirect is followed to any address, since the digest authenticates the content.

    Raises:
        DigestMismatchError: the content has another digest.
        NotFoundError: the server has no such file.
        RefusedError: the server refuses the request.
        ServiceUnavailableError: the download fails.
        UserError: the archive cannot be unpacked.
    """
    import ssl

    import httpx

    digest = hashlib.sha256()
    with (
        _web_errors(address.host),
        httpx.stream(
            "GET",
            address.url,
            headers={"User-Agent": "onnx-ops", "Accept-Encoding": "identity"},
            timeout=_TIMEOUT_S,
            follow_redirects=True,
            verify=ssl.create_default_context() if address.url.startswith("https:") else False,
        ) as response,
        (folder / address.name).open("wb") as stream,
    ):
        if not response.is_success:
            raise _explain_status(response.status_code, address)
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            digest.update(chunk)
            stream.write(chunk)
    if digest.hexdigest() != address.sha256:
        raise DigestMismatchError(
            "the server sent content that differs from the pinned content",
            where=f"{address.host}: {address.name}",
            why=f"its sha256 is {digest.hexdigest()}, and {address.sha256} is pinned",
            remedy="If the new content is right, pin its digest.",
        )
    if address.is_archive:
        _unpack(folder / address.name, address)


def _unpack(archive: Path, address: WebAddress) -> None:
    """Replace an archive by its files, none of which can be outside of its folder.

    Raises:
        UserError: the file is not a whole archive, or is an encrypted one. Or it is a tar archive
            with a path outside its folder.
    """
    try:
        # The filter refuses links and paths that lead out of the folder. From a zip file, shutil
        # unpacks no links, and leaves out absolute paths and paths with `..`.
        is_zip = archive.suffix == ".zip"
        shutil.unpack_archive(archive, archive.parent, filter=None if is_zip else "data")
    except Exception as error:
        # For damaged archives, the standard library raises many types of exceptions, such as
        # BadZipFile, LZMAError, NotImplementedError and RuntimeError.
        raise UserError(
            "the archive cannot be unpacked",
            where=f"{address.host}: {address.name}",
            why=describe_error(error),
        ) from error
    archive.unlink()


@contextmanager
def _web_errors(host: str) -> Iterator[None]:
    """Raise errors of the HTTP client as errors of the service.

    The client's messages are left out, since they can contain the address and its signature.
    """
    import httpx

    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceUnavailableError(
            "the file could not be downloaded",
            where=host,
            why=type(error).__name__,
            remedy="Check the address and the network.",
        ) from None


def _explain_status(status: int, address: WebAddress) -> OnnxOpsError:
    where = f"{address.host}: {address.name}"
    if status in (404, 410):
        return NotFoundError(
            "the server has no such file", where=where, remedy="Check the address."
        )
    if status >= 500 or status == 429:
        return ServiceUnavailableError(f"the server answers with HTTP {status}", where=where)
    return RefusedError(
        f"the server refuses the file with HTTP {status}",
        where=where,
        remedy="Check the address, and whether access to the file requires credentials.",
    )


def _download_repository(address: HubAddress, folder: Path) -> None:
    """Download a file or a folder of a repository, or the whole repository.

    The external data of an ONNX file is downloaded with it. The name of the data must begin with
    that of the file, followed by `_data` or `.data`.

    Raises:
        MissingPackageError: the package of the hub is not installed.
        NotFoundError: the hub has no such repository, commit or file.
        RefusedError: access to the repository is restricted.
        ServiceUnavailableError: the download fails.
    """
    try:
        library = importlib.import_module(_HUB_LIBRARY)
    except ImportError as error:
        raise missing_package(_HUB_LIBRARY, where=address.shown) from error
    # The patterns of huggingface_hub are those of fnmatch, in which brackets quote a character.
    name = re.sub(r"([*?[])", r"[\1]", address.path)
    patterns = [name, f"{name}_data*", f"{name}.data*", f"{name}/*"] if name else None
    with _hub_errors(address):
        library.snapshot_download(
            address.repository,
            repo_type="dataset" if address.is_dataset else "model",
            revision=address.commit,
            local_dir=folder,
            allow_patterns=patterns,
        )
    # The records of huggingface_hub about the download are not part of the content.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not (folder / address.path).exists():
        raise NotFoundError(
            f"the repository has no {address.path!r} at this commit",
            where=address.shown,
            remedy="Correct the path or the commit of the address.",
        )


@contextmanager
def _hub_errors(address: HubAddress) -> Iterator[None]:
    """Raise errors of the hub's library as errors of this package."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise RefusedError(
            "access to the repository is restricted",
            where=address.shown,
            remedy="Accept its terms on the hub, and set HF_TOKEN.",
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise NotFoundError(
            "the hub has no such repository or commit",
            where=address.shown,
            remedy="Check the address. For a private repository, set HF_TOKEN.",
        ) from error
    except Exception as error:
        # huggingface_hub passes on errors of its HTTP client and of the file system.
        raise ServiceUnavailableError(
            "the files could not be downloaded",
            where=address.shown,
            why=describe_error(error),
            remedy="Check the network and the free disk space.",
        ) from error
