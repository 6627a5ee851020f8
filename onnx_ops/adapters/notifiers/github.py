"""Notifications by GitHub issues.

Each endpoint has one open issue, unless option `issue` names one issue for all endpoints. The first
message opens the issue of an endpoint, and further messages are comments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from annotated_types import Ge, doc

from onnx_ops.adapters.files import read_private
from onnx_ops.adapters.github import REPOSITORY, GitHubRepository, validate_token
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.notification import Notification
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.errors import NotFoundError
from onnx_ops.ports import Notifier

VARIABLES = ("ONNX_OPS_NOTIFY_GITHUB_TOKEN", "GITHUB_TOKEN")
LABEL = "onnx-ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class GitHubOptions:
    """Options of the notifier `github`."""

    repository: Annotated[
        str,
        Pattern(f"(?a:{REPOSITORY.pattern})", "a repository, owner/repository"),
        doc("Repository whose issues get the messages."),
    ]
    issue: Annotated[
        int | None, Ge(1), doc("Issue that gets all messages; default: one issue per endpoint.")
    ] = None


class GitHubNotifier(Notifier):
    """Notifier that writes into a repository's issues.

    The token comes from ONNX_OPS_NOTIFY_GITHUB_TOKEN or GITHUB_TOKEN, or from the file
    `notify.github` of the state folder. The token needs "Issues: write" in the repository. The
    API's address comes from GITHUB_API_URL, as in GitHub's own runners.

    Args:
        options: `GitHubOptions`.
        state: the state folder.
    """

    def __init__(self, options: Mapping[str, Json], state: Path) -> None:
        read = bind_options(
            options,
            GitHubOptions,
            where="notifier github",
            remedy='Write the entry like {notifier = "github", options = {repository = '
            '"acme/models"}}.',
        )
        self._issue = read.issue
        self._repository = GitHubRepository(name=read.repository, token=self._token)
        self._file = state / "notify.github"

    def send(self, notification: Notification) -> None:
        """Write a comment on the newest open issue of the endpoint, or open an issue.

        An issue of the endpoint has the label and the hidden comment of onnx-ops. If the options
        name an issue, the comment is always written there.
        """
        endpoint, text = notification.endpoint, format_body(notification)
        open_issues = (
            int(issue["number"])
            for issue in self._repository.list_entries(f"issues?state=open&labels={quote(LABEL)}")
            if "pull_request" not in issue and _mark(endpoint) in (issue.get("body") or "")
        )
        issue = self._issue or next(open_issues, None)
        if issue is not None:
            self._repository.request("POST", f"issues/{issue}/comments", {"body": text})
            return
        title, body = f"{LABEL}: endpoint {endpoint}", f"{_mark(endpoint)}\n{text}"
        self._repository.request(
            "POST", "issues", {"title": title, "body": body, "labels": [LABEL]}
        )

    def check(self) -> str:
        """Return the repository and the host; raise an error without a token."""
        self._token()
        issue = f" issue {self._issue}" if self._issue else " issues"
        return f"to {self._repository.name}{issue} at {self._repository.host}"

    def _token(self) -> str:
        for variable in VARIABLES:
            if token := os.environ.get(variable, "").strip():
                return validate_token(token, variable)
        try:
            return validate_token(read_private(self._file, "the GitHub token"), str(self._file))
        except FileNotFoundError as error:
            raise NotFoundError(
                "there is no GitHub token for notifications",
                where=str(self._file),
                remedy=f"Put a token with write access to issues into {VARIABLES[0]}, "
                f"or into {self._file} with mode 0600.",
            ) from error


def format_body(notification: Notification) -> str:
    """Return the notification as Markdown.

    Texts that onnx-ops did not write are in code blocks or inline code.
    """
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`{2,}", notification.why)), default=2))
    lines = [f"**{notification.severity.value}**: {_inline(notification.title)}", ""]
    lines += [fence, notification.why, fence, ""] if notification.why else []
    for purpose, command in notification.commands.items():
        lines += [f"{purpose}:", "```sh", command, "```", ""]
    lines += [f"[Open the registry]({notification.link})", ""] if notification.link else []
    sequence = notification.sequence
    origin = f"Entry {sequence} of the ledger, by" if sequence else "By"
    lines.append(f"{origin} {_inline(notification.actor)}")
    return "\n".join(lines)


def _inline(text: str) -> str:
    return f"`` {text.replace('`', '′')} ``"


def _mark(endpoint: str) -> str:
    """Return the hidden comment that identifies the issue of an endpoint.

    The issue's title can be changed.
    """
    return f"<!-- onnx-ops endpoint={endpoint} -->"
