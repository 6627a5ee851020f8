"""Tokens of answers: their content, and the table that they belong to.

At each server of an endpoint, a token counts at most once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    DEPLOYMENT_HEADER,
    FEEDBACK_HEADER,
    KEYLESS_CELL,
    PIN_HEADERS,
    TABLE_PATH,
)
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.serving import metrics
from onnx_ops.serving.inference.feedback_tokens import FeedbackTokens
from onnx_ops.serving.metrics import BUCKET_TOKENS, MetricsPage
from onnx_ops.testing.endpoints import state_of
from tests.serving.inference.feedback_server import (
    KEY,
    OTHER_KEY,
    FeedbackServer,
    find_cell,
    make_table,
)
from tests.serving.serving_process import INFER, infer_body
from tests.support.must import must
from tests.support.server import Answer, ServerFamily


def change_files(table: RoutingTable, name: str) -> RoutingTable:
    """Return the table with other files of a deployment."""
    deployments = tuple(
        replace(d, manifest=digest_bytes(b"other files")) if d.name == name else d
        for d in table.state.deployments
    )
    return replace(table, state=replace(table.state, deployments=deployments))


TOKENS = FeedbackTokens(make_table())


@given(st.sampled_from(["old", "new"]), st.integers(0, KEYLESS_CELL))
def test_open_of_sealed_token_returns_deployment_and_cell(deployment: str, cell: int) -> None:
    token = must(FeedbackTokens(make_table()).open(TOKENS.seal(deployment, cell).decode()))
    assert (token.deployment, token.cell, token.is_current) == (deployment, cell, True)


@given(
    st.one_of(
        st.text(),
        st.text(st.characters(codec="ascii"), min_size=56, max_size=56),
        st.binary().map(repr),
    )
)
def test_open_of_arbitrary_string_returns_none(text: str) -> None:
    assert TOKENS.open(text) is None


@given(st.data())
def test_open_of_changed_token_returns_none(data: st.DataObject) -> None:
    text = TOKENS.seal("new", 7).decode()
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(
        st.text(max_size=3).filter(lambda other: other.translate({43: "-", 47: "_"}) != text[place])
    )
    assert TOKENS.open(text[:place] + other + text[place + 1 :]) is None
    assert TOKENS.open(text[:place]) is None
    assert TOKENS.open(text + text[:place] + "A") is None


def test_seal_of_same_answer_returns_distinct_tokens_of_equal_length() -> None:
    tokens = {TOKENS.seal("new", 7) for _ in range(1000)}
    assert len(tokens) == 1000
    assert len({token[20:] for token in tokens}) == 1000, "the sealed part does not repeat either"
    assert {len(token) for token in (*tokens, TOKENS.seal("old", KEYLESS_CELL))} == {56}


def test_token_stamps_with_stopped_clock_increase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    tokens = FeedbackTokens(make_table())
    stamps = [must(tokens.open(tokens.seal("new", 7).decode())).stamp for _ in range(5)]
    assert stamps == list(range(now, now + 5))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        pytest.param(make_table(generation=9), True, id="published again"),
        pytest.param(make_table(old=40, new=60), False, id="another weight"),
        pytest.param(make_table(epoch_s=60.0), False, id="with epochs"),
        pytest.param(make_table(old=50, new=0, newest=50), False, id="another candidate"),
        pytest.param(
            change_files(make_table(), "old"), True, id="other files of the other deployment"
        ),
        pytest.param(change_files(make_table(), "new"), None, id="other files"),
        pytest.param(make_table(old=100), None, id="without the deployment"),
        pytest.param(make_table(key=OTHER_KEY), None, id="another key"),
    ],
)
def test_open_under_changed_table_reports_whether_token_is_current(
    table: RoutingTable, expected: bool | None
) -> None:
    token = FeedbackTokens(table).open(TOKENS.seal("new", 7).decode())
    assert (None if token is None else token.is_current) == expected


def test_token_reported_at_other_server_counts_for_deployment_and_cell() -> None:
    table = make_table()
    first, second = FeedbackServer(table), FeedbackServer(make_table(1, oldest=0, old=100), table)
    cells = {name: find_cell(table, name) for name in ("old", "new")}
    assert second.report([first.answer("new", cells["new"]), first.answer("new")]) == (2, 0)
    assert second.report([first.answer("old", cells["old"])], success=False) == (1, 0)
    assert second.read_feedback() == {"old": (1, 0), "new": (2, 2)}
    assert second.read_cells("new") == {cells["new"]: (1, 1), KEYLESS_CELL: (1, 1)}
    assert second.read_cells("old") == {cells["old"]: (1, 0)}
    assert first.read_feedback() == {"old": (0, 0), "new": (0, 0)}


def test_token_reported_to_several_workers_is_counted_once_per_server() -> None:
    servers = FeedbackServer(make_table()), FeedbackServer(make_table())
    token = servers[0].answer("new")
    for server in servers:
        assert server.report([token, token]) == (1, 1)
        assert server.report([token], worker=1) == (0, 1)
        assert server.read_feedback()["new"] == (1, 1)
        assert server.shared.sum_slot(0)[metrics.UNKNOWN_FEEDBACK] == 2


def test_token_of_unpublished_deployment_is_counted_after_publication() -> None:
    first, second = FeedbackServer(make_table()), FeedbackServer(make_table(1, old=100))
    token = first.answer("new")
    assert second.report([token]) == (0, 1)
    second.publish(make_table())
    assert second.report([token]) == (1, 0)


def test_repeated_token_after_memory_overflow_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client must not be able to repeat tokens until the memory has dropped them.

    Repeated tokens do not count in any order.
    """
    monkeypatch.setattr(metrics, "TOKEN_BUCKETS", 1)
    server = FeedbackServer(make_table())
    tokens = [server.answer("new") for _ in range(3 * BUCKET_TOKENS)]
    assert server.report(tokens[BUCKET_TOKENS:]) == (2 * BUCKET_TOKENS, 0)
    for again in (tokens, tokens[::-1], tokens[1::2] + tokens[::2]):
        assert server.report(again) == (0, len(tokens))
    assert server.report([server.answer("new")]) == (1, 0)


def test_tokens_reported_after_99_000_others_are_mostly_counted() -> None:
    server = FeedbackServer(make_table(), workers=1)
    tokens = [server.answer("new") for _ in range(100_000)]
    late, rest = tokens[:1000], tokens[1000:]
    for start in range(0, len(rest), 1000):
        server.report(rest[start : start + 1000])
    counted, unknown = server.report(late)
    assert counted + unknown == 1000
    # A bucket contains at most 8 tokens. With 3 tokens on average, 1.2 % of the buckets are full.
    assert unknown < 40


def test_token_of_earlier_split_is_counted_but_not_judged() -> None:
    earlier, table = make_table(1, old=90, new=10), make_table(5)
    server = FeedbackServer(earlier)
    cell = find_cell(earlier, "new")
    token = server.answer("new", cell)
    server.publish(table)
    assert find_cell(table, "new") == cell, "the present split gives it to the same deployment"
    assert server.report([token]) == (1, 0)
    assert server.read_feedback() == {"old": (0, 0), "new": (0, 0)}
    assert server.read_cells("new") == {}
    page = MetricsPage(server.shared, "e").render(None)
    for name in ("feedback_total", "feedback_successes_total"):
        labels = 'endpoint="e",deployment="new",version="new",variant="fp32"'
        assert f"onnx_ops_{name}{{{labels}}} 0\n" in page
        assert f'onnx_ops_{name}{{{labels},judged="false"}} 1\n' in page


def test_token_of_deployment_with_replaced_files_is_unknown() -> None:
    server = FeedbackServer(make_table(1))
    token = server.answer("new")
    server.publish(change_files(make_table(5), "new"))
    assert server.report([token]) == (0, 1)
    assert server.read_feedback()["new"] == (0, 0)


@pytest.mark.parametrize("key", ["", OTHER_KEY])
def test_token_under_table_without_its_key_is_unknown(key: str) -> None:
    token = FeedbackServer(make_table()).answer("new")
    assert FeedbackServer(make_table(key=key)).report([token]) == (0, 1)


def test_token_in_split_with_epochs_is_counted_without_cell() -> None:
    server = FeedbackServer(make_table(epoch_s=60.0))
    assert server.report([server.answer("new", 7)]) == (1, 0)
    assert server.read_feedback()["new"] == (1, 1)
    assert server.read_table().cells == {}


class TestProcess:
    """A real server of two workers, whose table has a key."""

    @pytest.fixture
    def table(self, blue: Deployment, green: Deployment) -> RoutingTable:
        state = replace(state_of(blue, green, blue=50, green=50), generation=3)
        return RoutingTable(state=state, layout=("green", "blue"), feedback_key=KEY)

    @pytest.fixture
    def server(self, tmp_path: Path, table: RoutingTable) -> Iterator[ServerFamily]:
        with ServerFamily(folder=tmp_path / "state", options=("--workers", "2")) as server:
            publish(server, table)
            yield server

    def test_routed_answers_have_distinct_tokens(self, server: ServerFamily) -> None:
        """An answer with an error has a token too."""
        answers = [ask(server) for _ in range(20)]
        answers.append(ask(server, body=b"{", status=400))
        tokens = [answer.headers[FEEDBACK_HEADER] for answer in answers]
        assert len(set(tokens)) == len(tokens)
        names = Counter(answer.headers[DEPLOYMENT_HEADER] for answer in answers)
        assert report(server, tokens) == {"counted": len(tokens), "unknown": 0}
        assert {name: one.feedback for name, one in server.counts().deployments.items()} == dict(
            names
        )
        assert report(server, tokens) == {"counted": 0, "unknown": len(tokens)}

    def test_answer_of_selected_deployment_has_no_token(self, server: ServerFamily) -> None:
        assert FEEDBACK_HEADER not in ask(server, pin="green").headers

    def test_answer_without_lease_has_no_token(
        self, server: ServerFamily, table: RoutingTable
    ) -> None:
        state = replace(table.state, generation=5)
        publish(server, replace(table, state=state, fallback="blue"))
        assert FEEDBACK_HEADER not in ask(server).headers

    def test_feedback_key_appears_in_no_file_or_answer(
        self, server: ServerFamily, table: RoutingTable
    ) -> None:
        ask(server)
        server.stop()
        server.start()
        assert FEEDBACK_HEADER not in ask(server).headers, "the key was in memory only"
        publish(server, table)
        token = ask(server).headers[FEEDBACK_HEADER]
        assert report(server, [token]) == {"counted": 1, "unknown": 0}
        shown = [
            server.admin(*call).body
            for call in (("GET",), ("GET", None, COUNTS_PATH), ("GET", None, TABLE_PATH))
        ]
        shown += [
            server.call("GET", path).body
            for path in ("/", "/metrics", "/openapi.json", "/v2/models/m")
        ]
        shown += [path.read_bytes() for path in server.folder.rglob("*") if path.is_file()]
        assert not any(
            KEY.encode() in text for text in (*shown, server.log().encode(), repr(table).encode())
        )

    @pytest.mark.parametrize("key", ["0f0f", "secret" * 6, 16 * "0F"])
    def test_table_with_malformed_key_is_refused_without_showing_it(
        self, server: ServerFamily, key: str
    ) -> None:
        table = json.loads(codec.dumps(make_table(9)))
        answer = server.admin(
            "PUT", json.dumps({**table, "feedback_key": key}).encode(), TABLE_PATH
        )
        assert answer.status == 400
        assert "hexadecimal" in answer.body.decode()
        assert key not in answer.body.decode()


def publish(server: ServerFamily, table: RoutingTable) -> None:
    assert server.admin("PUT", codec.dumps(table), TABLE_PATH).status == 200


def ask(
    server: ServerFamily, pin: str = "", body: bytes = infer_body([1, 2]), status: int = 200
) -> Answer:
    headers = {"content-type": "application/json", **({PIN_HEADERS[0]: pin} if pin else {})}
    answer = server.call("POST", INFER, body, headers)
    assert answer.status == status
    return answer


def report(server: ServerFamily, tokens: Sequence[str]) -> object:
    body = {"feedback": [{"token": token, "success": True} for token in tokens]}
    return server.call("POST", "/feedback", body, {"content-type": "application/json"}).json()
