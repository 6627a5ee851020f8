"""Addresses of public files that are pinned to their content.

- `https://HOST/FILE#sha256=DIGEST`: one file with this SHA-256 digest; an archive stands for the
  files in it.
- `hf://OWNER/NAME@COMMIT/PATH`: a file or folder of a model repository at a commit of the Hugging
  Face hub; `hf://datasets/OWNER/NAME@COMMIT/PATH` names a file or folder of a data set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from onnx_ops.errors import UserError

HUB = "hf://"
_SCHEMES = ("https://", "http://", HUB)
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_PIN = re.compile(r"sha256=([0-9a-f]{64})")
_HUB_ADDRESS = re.compile(
    r"hf://(?P<datasets>datasets/)?(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<commit>[^/#]+))?(?:/(?P<path>[^#]*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebAddress:
    """A file of a web server, pinned by its digest; `name` is the file's name."""

    url: str
    host: str
    name: str
    sha256: str

    @property
    def is_archive(self) -> bool:
        """Whether the file is an archive, which stands for the files in it."""
        return self.name.endswith(_ARCHIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """A file or folder of a repository on the Hugging Face hub, pinned by a commit.

    `path` is empty for all files of the repository.
    """

    repository: str
    is_dataset: bool
    commit: str
    path: str

    @property
    def shown(self) -> str:
        """The repository and its commit, as errors show them."""
        return f"{HUB}{'datasets/' if self.is_dataset else ''}{self.repository}@{self.commit[:12]}"


PinnedAddress = WebAddress | HubAddress


def is_pinned_address(place: str) -> bool:
    """Return whether a place has a scheme that requires a pin; the pin can be missing."""
    return place.startswith(_SCHEMES)


def parse_pinned_address(place: str) -> PinnedAddress:
    """Return the parts of an address.

    Raises:
        UserError: the address has no pin, or is invalid.
    """
    return _parse_hub_address(place) if place.startswith(HUB) else _parse_url(place)


def find_pin_problem(place: str) -> str:
    """Return why an address has no pin or is invalid.

    The result is empty for a valid pinned address, and for a place that needs no pin.
    """
    if is_pinned_address(place):
        try:
            parse_pinned_address(place)
        except UserError as error:
            return error.without_place()
    return ""


def hide_secrets(place: str) -> str:
    """Return an address without its query, user and password.

    The query can contain a signature.
    """
    if place.startswith(HUB):
        return place
    try:
        parts = urlsplit(place)
        return parts._replace(query="", netloc=parts.netloc.rpartition("@")[2]).geturl()
    except ValueError:
        # For example, a bracket around the host is not closed.
        return place.partition("?")[0].rpartition("@")[2]


def _parse_url(place: str) -> WebAddress:
    shown = hide_secrets(place)
    try:
        parts = urlsplit(place)
        host = parts.hostname or ""
    except ValueError as error:
        raise UserError("the address is not valid", where=shown, why=str(error)) from error
    if not host or (parts.scheme == "http" and host not in _LOOPBACK):
        raise UserError(
            "the address of a file must begin with https:// and name a host",
            where=shown,
            remedy="http:// is allowed only for servers of this machine.",
        )
    name = PurePosixPath(unquote(parts.path)).name
    if name in ("", ".", ".."):
        raise UserError("the address names no file", where=shown)
    pin = _PIN.fullmatch(parts.fragment)
    if pin is None:
        raise UserError(
            "the address does not pin the content of the file",
            where=shown,
            why=f"it ends with {parts.fragment!r}" if parts.fragment else "",
            remedy="End the address with #sha256= and the digest of the file, in place of any "
            "other fragment. `sha256sum FILE` prints the digest.",
        )
    url = parts._replace(fragment="").geturl()
    return WebAddress(url=url, host=host, name=name, sha256=pin[1])


def _parse_hub_address(place: str) -> HubAddress:
    match = _HUB_ADDRESS.fullmatch(place)
    path = (match["path"] or "").strip("/") if match else ""
    if match is None or not {".", ".."}.isdisjoint(path.split("/")):
        raise UserError(
            "the address of the Hugging Face hub is not valid",
            where=place,
            remedy="Write hf://OWNER/NAME@COMMIT/PATH, or hf://datasets/OWNER/NAME@COMMIT/PATH.",
        )
    commit = match["commit"] or ""
    if not _COMMIT.fullmatch(commit):
        pinned = f"{HUB}{match['datasets'] or ''}{match['repository']}@COMMIT/{path}"
        raise UserError(
            "the address is not pinned to a commit",
            where=place,
            why=f"the content of revision {commit!r} can change" if commit else "",
            remedy=f"Write the 40 digits of a commit: {pinned.rstrip('/')}",
        )
    return HubAddress(
        repository=match["repository"],
        is_dataset=bool(match["datasets"]),
        commit=commit,
        path=path,
    )
