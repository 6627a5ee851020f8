"""Access to one repository through GitHub's API."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onnx_ops.adapters.http_json import request_json, require_https
from onnx_ops.errors import ServiceUnavailableError, UserError

API = "GITHUB_API_URL"
REPOSITORY = re.compile(r"[A-Za-z0-9-]+/(?!\.\.?(?:#|$))[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GitHubRepository:
    """One repository, `owner/repository`, of GitHub or the API in GITHUB_API_URL."""

    name: str
    token: Callable[[], str]

    def request(self, method: str, path: str, document: object = None) -> Any:
        """Send a request about `path` below the repository; see `request_json`."""
        headers = {
            "Authorization": f"Bearer {self.token()}",
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
        }
        url = f"{_api()}/repos/{self.name}/{path}"
        return request_json(method, url, document, host=f"{self.host} {self.name}", headers=headers)

    def list_entries(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of a paginated API result, up to one thousand.

        Raises:
            ServiceUnavailableError: GitHub does not answer with a list.
            RefusedError: GitHub refuses the request.
            UserError: the address in GITHUB_API_URL is not a valid https address.
        """
        joined = "&" if "?" in path else "?"
        for page in range(1, 11):
            entries = self.request("GET", f"{path}{joined}per_page=100&page={page}")
            if not isinstance(entries, list):
                raise ServiceUnavailableError("GitHub did not answer with a list", where=self.name)
            yield from entries
            if len(entries) < 100:
                return

    @property
    def host(self) -> str:
        """Return the API's host."""
        return require_https(_api(), API)


def validate_token(token: str, where: str) -> str:
    """Return the token if it can be sent in a header.

    Raises:
        UserError: the token contains a space, a control character, or a character outside ASCII.
    """
    if token.isascii() and token.isprintable() and " " not in token:
        return token
    raise UserError(
        "the GitHub token contains a space, a control character or a character outside ASCII",
        where=where,
        remedy="Copy the token again, without spaces and line breaks.",
    )


def _api() -> str:
    return (os.environ.get(API) or "https://api.github.com").rstrip("/")
