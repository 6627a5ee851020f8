"""One repository through GitHub's API."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onnx_ops.adapters.exchange import exchange, host_of
from onnx_ops.errors import ServiceUnavailableError, UserError

API = "GITHUB_API_URL"
REPOSITORY = re.compile(r"[A-Za-z0-9-]+/(?!\.\.?(?:#|$))[\w.-]+", re.ASCII)
_PAGES = 10
"""Pages of a hundred entries that are looked through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """`name` is `owner/repository`. The API's address comes from GITHUB_API_URL, as in GitHub's own runners."""

    name: str
    token: Callable[[], str]

    def ask(self, method: str, path: str, document: object = None) -> Any:
        """One exchange about `path` below the repository.

        Raises:
            ServiceUnavailableError, RefusedError: as for `exchange`.
        """
        headers = {
            "Authorization": f"Bearer {self.token()}",
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
        }
        url = f"{_api()}/repos/{self.name}/{path}"
        return exchange(method, url, document, host=f"{self.host} {self.name}", headers=headers)

    def listed(self, path: str) -> Iterator[dict[str, Any]]:
        """The entries of a list, page by page as they are looked at; the first thousand.

        Raises:
            ServiceUnavailableError: the answer is no list.
        """
        joined = "&" if "?" in path else "?"
        for page in range(1, _PAGES + 1):
            found = self.ask("GET", f"{path}{joined}per_page=100&page={page}")
            if not isinstance(found, list):
                raise ServiceUnavailableError("answers something that is no list", where=self.name)
            yield from found
            if len(found) < 100:
                return

    @property
    def host(self) -> str:
        return host_of(_api(), API)


def plain(token: str, where: str) -> str:
    """The token, if it can be one.

    Raises:
        UserError: it cannot.
    """
    if token.isascii() and token.isprintable() and " " not in token:
        return token
    raise UserError("that is no GitHub token", where=where, remedy="It has letters, digits and underscores only.")


def _api() -> str:
    return (os.environ.get(API) or "https://api.github.com").rstrip("/")
