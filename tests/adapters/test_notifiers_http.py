"""Notifiers for a chat's webhook and GitHub's issues, against real HTTP servers.

The size of answers is bounded.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.http_json import MAX_ANSWER_BYTES, request_json
from onnx_ops.adapters.notifiers.github import GitHubNotifier
from onnx_ops.adapters.notifiers.webhook import WebhookNotifier, format_message
from onnx_ops.config.binding import OptionsError
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.ports import Notifier
from onnx_ops.testing.notifiers import (
    ROLLED_BACK,
    NotifierSuite,
    ReceivedRequest,
    Reply,
    WebhookSink,
)

MODELS: dict[str, Json] = {"repository": "acme/models"}
TOKEN = "ghp_0123456789"  # noqa: S105 (not a real secret)


@pytest.fixture(autouse=True)
def no_secrets_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ONNX_OPS_NOTIFY_WEBHOOK",
        "ONNX_OPS_NOTIFY_GITHUB_TOKEN",
        "GITHUB_TOKEN",
        "GITHUB_API_URL",
    ):
        monkeypatch.delenv(name, raising=False)


class TestWebhook(NotifierSuite):
    secret = "T0/B0/hidden"  # noqa: S105 (not a real secret)

    @pytest.fixture
    def notifier(
        self, inbox: WebhookSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Notifier:
        monkeypatch.setenv("ONNX_OPS_NOTIFY_WEBHOOK", f"{inbox.url}/services/{self.secret}")
        return WebhookNotifier({}, tmp_path)


class TestGitHub(NotifierSuite):
    secret = TOKEN

    @pytest.fixture
    def notifier(
        self, inbox: WebhookSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Notifier:
        monkeypatch.setenv("GITHUB_API_URL", inbox.url)
        monkeypatch.setenv("ONNX_OPS_NOTIFY_GITHUB_TOKEN", TOKEN)
        return GitHubNotifier(MODELS, tmp_path)

    def usual(self, letter: ReceivedRequest) -> Reply:
        return (
            Reply(document=[])
            if letter.method == "GET"
            else Reply(status=201, document={"number": 1})
        )


class Tracker:
    """The issues of a repository, with the part of GitHub's API that is used."""

    def __init__(self) -> None:
        self.issues: list[dict[str, object]] = []
        self.comments: list[tuple[str, str]] = []

    def __call__(self, letter: ReceivedRequest) -> Reply:
        assert letter.headers["authorization"] == f"Bearer {TOKEN}"
        path = letter.path.partition("?")[0]
        match letter.method, path.removeprefix("/repos/acme/models/").split("/"):
            case "GET", ["issues"]:
                page = int(letter.path.rpartition("page=")[2])
                shown = [one for one in reversed(self.issues) if one["open"]]
                return Reply(document=shown[100 * (page - 1) : 100 * page])
            case "POST", ["issues"]:
                number = len(self.issues) + 1
                self.issues.append({"number": number, "open": True, **letter.document})
                return Reply(status=201, document={"number": number})
            case "POST", ["issues", number, "comments"]:
                self.comments.append((number, letter.document["body"]))
                return Reply(status=201, document={})
            case _:
                return Reply(status=404)


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    found = Tracker()
    with WebhookSink(found).open() as inbox:
        monkeypatch.setenv("GITHUB_API_URL", inbox.url)
        monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
        yield found


def test_github_notifier_keeps_one_open_issue_per_endpoint(
    tracker: Tracker, tmp_path: Path
) -> None:
    notifier = GitHubNotifier(MODELS, tmp_path)
    faces = replace(ROLLED_BACK, endpoint="faces")
    for notice in (ROLLED_BACK, ROLLED_BACK, faces, ROLLED_BACK):
        notifier.send(notice)
    assert [issue["title"] for issue in tracker.issues] == [
        "onnx-ops: endpoint digits",
        "onnx-ops: endpoint faces",
    ]
    assert [number for number, _ in tracker.comments] == ["1", "1"]
    tracker.issues[0]["open"] = False
    notifier.send(ROLLED_BACK)
    assert len(tracker.issues) == 3
    assert tracker.issues[2]["labels"] == ["onnx-ops"]


def test_github_notifier_finds_issue_on_later_page_and_skips_pull_request(
    tracker: Tracker, tmp_path: Path
) -> None:
    notifier = GitHubNotifier(MODELS, tmp_path)
    notifier.send(ROLLED_BACK)
    mine = tracker.issues[0]["body"]
    tracker.issues += [{"number": n, "open": True, "body": None} for n in range(2, 121)]
    tracker.issues.append({"number": 121, "open": True, "body": mine, "pull_request": {}})
    notifier.send(ROLLED_BACK)
    assert [number for number, _ in tracker.comments] == ["1"]


def test_github_notifier_with_issue_number_comments_on_it(tracker: Tracker, tmp_path: Path) -> None:
    GitHubNotifier({**MODELS, "issue": 7}, tmp_path).send(ROLLED_BACK)
    assert [number for number, _ in tracker.comments] == ["7"]


def test_notifiers_escape_mentions_in_quoted_text(tracker: Tracker, tmp_path: Path) -> None:
    notice = replace(ROLLED_BACK, why="``` @everyone <!channel> <https://evil|x>", actor="`@team`")
    GitHubNotifier({**MODELS, "issue": 7}, tmp_path).send(notice)
    (_, body) = tracker.comments[0]
    assert "````\n``` @everyone" in body
    assert "`` ′@team′ ``" in body
    text = str(format_message(notice))
    assert "&lt;!channel&gt; &lt;https://evil|x&gt;" in text
    assert "<!channel>" not in text


def test_format_message_text_from_user_has_no_automatic_links_or_mentions() -> None:
    notice = replace(ROLLED_BACK, why="@everyone see https://evil and #general", actor="@channel")
    message = format_message(notice)
    section, context = message["blocks"]
    assert section["text"]["verbatim"] is True
    assert all(element["verbatim"] is True for element in context["elements"])
    assert re.search(r"@\w", message["text"]) is None


def test_format_message_with_long_reason_cuts_it() -> None:
    block = format_message(replace(ROLLED_BACK, why="&" * 5000))["blocks"][0]
    assert len(block["text"]["text"]) <= 3000


def test_github_notifier_with_invalid_issue_list_raises_service_unavailable_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WebhookSink().open() as inbox:
        monkeypatch.setenv("GITHUB_API_URL", inbox.url)
        monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
        with pytest.raises(ServiceUnavailableError, match="with a list"):
            GitHubNotifier(MODELS, tmp_path).send(ROLLED_BACK)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/x",
        "ftp://hooks.example",
        "hooks.example",
        "",
        "https://",
        "https://a:b:c/",
        "https://ä/\n",
    ],
)
def test_webhook_notifier_with_invalid_or_insecure_url_raises_user_error_without_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_OPS_NOTIFY_WEBHOOK", url)
    with pytest.raises(UserError) as caught:
        WebhookNotifier({}, tmp_path).send(ROLLED_BACK)
    assert "hooks" not in str(caught.value)
    assert url in ("", "https://") or url.strip() not in str(caught.value)


def test_webhook_notifier_with_unreachable_server_raises_error_without_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_OPS_NOTIFY_WEBHOOK", "http://127.0.0.1:9/hidden")
    with pytest.raises(ServiceUnavailableError) as caught:
        WebhookNotifier({}, tmp_path).send(ROLLED_BACK)
    assert "hidden" not in str(caught.value)


def test_webhook_notifier_check_reads_url_from_private_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no address"):
        WebhookNotifier({}, tmp_path).check()
    file = tmp_path / "notify.webhook"
    file.write_text("https://hooks.example/hidden\n")
    file.chmod(0o640)
    with pytest.raises(RefusedError, match="0640"):
        WebhookNotifier({}, tmp_path).check()
    file.chmod(0o600)
    assert WebhookNotifier({}, tmp_path).check() == "to hooks.example"


def test_github_notifier_check_reads_token_from_private_file(tmp_path: Path) -> None:
    notifier = GitHubNotifier(MODELS, tmp_path)
    with pytest.raises(NotFoundError, match="no GitHub token"):
        notifier.check()
    file = tmp_path / "notify.github"
    file.write_text("a token\n")
    file.chmod(0o600)
    with pytest.raises(UserError, match="the GitHub token contains"):
        notifier.check()
    file.write_text(f"{TOKEN}\n")
    assert notifier.check() == "to acme/models issues at api.github.com"


@pytest.mark.parametrize(
    "repository",
    ["", "acme", "acme/models#1", "acme/models/x", "acme models", "../user", "acme/..", "acme/é"],
)
def test_github_notifier_with_invalid_repository_raises_options_error(
    repository: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionsError, match="is not a repository, owner/repository"):
        GitHubNotifier({"repository": repository}, tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "missing key 'repository'"),
        ({**MODELS, "isue": 7}, "unknown key 'isue'; did you mean 'issue'?"),
        ({**MODELS, "issue": 0}, "issue: must be at least 1"),
    ],
)
def test_github_notifier_with_wrong_options_raises_options_error(
    options: dict[str, Json], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionsError, match=re.escape(expected)):
        GitHubNotifier(options, tmp_path)


def test_webhook_notifier_with_options_raises_options_error(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="unknown key 'url'") as caught:
        WebhookNotifier({"url": "https://hooks.example/hidden"}, tmp_path)
    assert "hidden" not in repr(caught.value.as_document())


def test_request_json_above_size_limit_raises_service_unavailable_error() -> None:
    text = "x" * (MAX_ANSWER_BYTES - len('""'))
    inbox = WebhookSink(
        lambda letter: Reply(document=text if letter.path == "/largest" else text + "x")
    )
    with inbox.open():
        assert request_json("GET", f"{inbox.url}/largest", host="here") == text
        with pytest.raises(ServiceUnavailableError, match="has more than"):
            request_json("GET", f"{inbox.url}/larger", host="here")
        larger = request_json(
            "GET", f"{inbox.url}/larger", host="here", max_bytes=MAX_ANSWER_BYTES + 1
        )
        assert larger == text + "x"
