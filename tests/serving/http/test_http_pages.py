"""Pages for people: complete, without scripts, and safe with any names.

The names are those of models and tensors.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.printable import show_controls
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.serving.http.pages import (
    ServedVersion,
    build_docs_page,
    build_example,
    build_start_page,
    list_served,
)
from onnx_ops.serving.inference.deployments import TableSnapshot
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.metrics import OTHER_STATUS, REVISION, get_column
from onnx_ops.testing.endpoints import state_of
from tests.serving.inference.tensor_cases import signature, spec
from tests.serving.serving_worker import Worker, post

TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "h4",
        "p",
        "ul",
        "li",
        "a",
        "pre",
        "code",
    ),
    *("div", "section", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {
    ("html", "lang"),
    ("meta", "charset"),
    ("meta", "name"),
    ("meta", "content"),
    ("a", "href"),
    ("section", "id"),
    ("div", "class"),
}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; touch /tmp/x; echo '$(id)`id`",
    "</code></pre></style><iframe>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "a\nb\r\n\u202e\x00日本",
)


@dataclass
class Page(HTMLParser):
    """A parser that collects the elements and texts of a page."""

    text: str
    tags: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    preformatted: list[str] = field(default_factory=list)
    words: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open = ""
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.tags.add(tag)
        self.attributes.update((tag, name) for name, _ in attrs)
        values = dict(attrs)
        if tag == "a":
            self.links.append(values["href"] or "")
        if "id" in values:
            self.ids.append(values["id"] or "")
        if tag == "pre":
            self.preformatted.append("")

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._open == "pre":
            self.preformatted[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def split_by_shell(command: str) -> list[str]:
    """Return the words of a command, as a shell passes them to its program."""
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True
    )
    return done.stdout.decode().split("\0")[:-1]


@pytest.fixture
def worker(blue: Deployment, green: Deployment) -> Iterator[Worker]:
    with Worker(state_of(blue, green, blue=70, green=30)).running() as running:
        yield running


def get(worker: Worker, path: str, headers: dict[str, str] | None = None) -> tuple[bytes, bytes]:
    """Return the head and the body of a response."""
    head, _, body = worker.send(post(path, b"", headers, method="GET")).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_no_resources_and_forbid_scripts(worker: Worker, path: str) -> None:
    head, body = get(worker, path)
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert "content-type: text/html; charset=utf-8" in lines
    assert "x-content-type-options: nosniff" in lines
    (policy,) = (line for line in lines if line.startswith("content-security-policy: "))
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    page = Page(body.decode())
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page.text
    assert not any(urlsplit(link).netloc or urlsplit(link).scheme for link in page.links)


def test_start_page_links_return_200(worker: Worker) -> None:
    _, body = get(worker, "/")
    links = Page(body.decode()).links
    assert {"docs", "metrics", "openapi.json", "v2/health/ready", "v2/models/m"} <= set(links)
    for link in links:
        assert get(worker, f"/{link}")[0].startswith(b"HTTP/1.1 200 OK"), link


def test_docs_page_shows_every_operation_and_schema(worker: Worker) -> None:
    _, body = get(worker, "/docs")
    page = Page(body.decode())
    document = json.loads(get(worker, "/openapi.json")[1])
    for path, item in document["paths"].items():
        for method in item.keys() - {"parameters"}:
            assert f"{method.upper()} {path}" in page.words
            assert item[method]["summary"] in page.words
    schemas = [f"schema-{name}" for name in document["components"]["schemas"]]
    assert page.ids == schemas
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(schemas)
    for text in [
        response["description"] for response in document["components"]["responses"].values()
    ]:
        assert text in page.words


def test_docs_page_with_accept_encoding_is_compressed(worker: Worker) -> None:
    assert get(worker, "/docs", {"accept-encoding": "gzip"})[1][:2] == gzip.compress(b"")[:2]


def test_docs_page_example_command_returns_200(worker: Worker) -> None:
    _, body = get(worker, "/docs")
    command = split_by_shell(Page(body.decode()).preformatted[0])
    assert command[:2] == ["curl", "http://x/v2/models/m/infer"]
    data = command[command.index("--data") + 1]
    answer = worker.send(post(urlsplit(command[1]).path, data.encode()))
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_pages_before_first_publication_report_nothing_published(worker: Worker) -> None:
    worker.shared.header[REVISION] = 0
    head, body = get(worker, "/")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert "Nothing is published yet" in Page(body.decode()).words
    head, body = get(worker, "/docs")
    assert head.startswith(b"HTTP/1.1 503")
    assert "published" in json.loads(body)["error"]


def make_snapshot(name: str) -> tuple[TableSnapshot, list[ServedVersion]]:
    """Return a table at 10 % of a rollout, and the rows of its page.

    Its model has this name.
    """
    old, new = (make_deployment(version, name) for version in ("1", "2"))
    state = EndpointState(
        deployments=(old, new),
        split=TrafficSplit(weights={old.name: 90, new.name: 10}, shadow={}),
        generation=7,
    )
    loaded = {new.name: SimpleNamespace(slot=1)}
    table = RoutingTable(state=state, layout=(new.name, old.name))
    parts = {
        "table": table,
        "model": name,
        "deployments": loaded,
        "failed": {old.name: f"no {name}"},
        "loaded_at": 0.0,
    }
    snapshot = cast("TableSnapshot", SimpleNamespace(**parts))
    counts = [0] * (OTHER_STATUS + 1)
    counts[get_column(200)], counts[get_column(503)], counts[get_column(422)] = 40, 2, 3
    return snapshot, list_served(snapshot, lambda slot: counts if slot == 1 else [])


def make_deployment(version: str, model: str) -> Deployment:
    digest = digest_bytes(version.encode())
    return Deployment(
        name=f"v{version}",
        model=model,
        version=version,
        variant="fp32",
        release=digest,
        manifest=digest,
    )


def test_start_page_shows_versions_with_shares_requests_and_errors() -> None:
    snapshot, served = make_snapshot("m")
    assert served == [
        ServedVersion(version="1", variant="fp32", share="90 %", state="not loaded: no m"),
        ServedVersion(version="2", variant="fp32", share="10 %", requests=45, errors=2, rejected=3),
    ]
    page = build_start_page(snapshot, served).body.decode()
    cells = [row.split("<td>")[3:] for row in "".join(page.splitlines()).split("<tr>")[2:]]
    assert [[cell.partition("<")[0] for cell in row] for row in cells] == [
        ["90 %", "0", "0", "0", "not loaded: no m"],
        ["10 %", "45", "2", "3", "ready"],
    ]
    words = Page(page).words
    assert "A rollout is at 10 %: version 2 has 10 % of the traffic." in words
    assert (
        "Generation 7 of the routing table, loaded by this worker at 1970-01-01 00:00:00 UTC"
        in words
    )


def test_start_page_after_rejected_request_counts_it(worker: Worker) -> None:
    def count_rejected() -> int:
        _, body = get(worker, "/")
        rows = re.findall(r"<tr><td><code>.*?<td>ready", body.decode(), re.DOTALL)
        assert rows
        return sum(int(row.split("<td>")[6]) for row in rows)

    before = count_rejected()
    assert worker.send(post("/v2/models/m/infer", b"{")).startswith(b"HTTP/1.1 4")
    assert count_rejected() == before + 1


@pytest.mark.parametrize("name", HOSTILE)
def test_pages_with_hostile_names_show_them_as_text(name: str) -> None:
    names = [spec(name, "float32", "batch", 2), spec(f"{name}2", "string", name)]
    model = signature(names, [spec(name, "float16", name)])
    model.model = name
    responses = build_start_page(*make_snapshot(name)), build_docs_page([model], {b"host": b"x"})
    start, docs = (Page(response.body.decode()) for response in responses)
    for page in (start, docs):
        assert page.tags <= TAGS
        assert page.attributes <= ATTRIBUTES
        assert not any(urlsplit(link).scheme for link in page.links)
        assert show_controls(name) in page.words
    assert f"schema-{name}" not in docs.ids
    command = split_by_shell(docs.preformatted[0])
    document = json.loads(command[command.index("--data") + 1])
    assert [tensor["name"] for tensor in document["inputs"]] == [name, f"{name}2"]
    assert docs.preformatted[0].isascii()
    assert command[1].isascii()
    assert len(command) == 6


@settings(deadline=None, max_examples=50)
@given(st.text(), st.binary(max_size=40))
def test_build_example_with_any_name_and_host_returns_one_command(name: str, host: bytes) -> None:
    model = signature([spec(name, "float32", "batch", 2)])
    model.model = name
    command, request = build_example(model, host)
    program, url, header, content_type, data, body = split_by_shell(command)
    assert (program, header, content_type, data, request) == (
        *("curl", "--header", "Content-Type: application/json", "--data"),
        "",
    )
    assert json.loads(body)["inputs"][0]["name"] == name
    assert urlsplit(url).scheme == "http"


def test_build_example_of_several_types_returns_valid_request() -> None:
    model = signature(
        [
            spec(dtype, dtype, "n", 2)
            for dtype in ("bool", "uint8", "int64", "float16", "float64", "string")
        ]
        + [spec("scalar", "float32")]
    )
    command, _ = build_example(model, b"x")
    body = split_by_shell(command)[-1]
    assert set(read_infer(body.encode(), None, model).feed) == set(model.inputs)


@pytest.mark.parametrize("name", ["image", *HOSTILE])
def test_build_example_of_large_input_sends_generated_file(tmp_path: Path, name: str) -> None:
    command, request = build_example(signature([spec(name, "float32", "batch", 3, 224, 224)]), b"x")
    assert split_by_shell(command)[-1] == "@request.json"
    assert len(request) < 1000
    subprocess.run(["sh", "-c", request], cwd=tmp_path, check=True)
    (tensor,) = json.loads((tmp_path / "request.json").read_text())["inputs"]
    assert (tensor["name"], tensor["shape"], len(tensor["data"])) == (
        name,
        [1, 3, 224, 224],
        3 * 224 * 224,
    )


def test_build_example_with_bfloat16_output_saves_file_and_with_bfloat16_input_is_empty() -> None:
    outputs = [spec("y", "bfloat16", "batch")]
    command, _ = build_example(signature([spec("x", "float32", "batch")], outputs), b"x")
    assert split_by_shell(command)[-2:] == ["--output", "response.bin"]
    model = signature([spec("x", "bfloat16", "batch")], outputs)
    assert build_example(model, b"x") == ("", "")
    assert "binary form" in build_docs_page([model], {}).body.decode()


def test_server_with_hostile_model_names_serves_pages(build: Callable[..., Deployment]) -> None:
    deployment = build(
        [helper.make_node("Identity", [HOSTILE[0]], [HOSTILE[1]])],
        [(HOSTILE[0], TensorProto.FLOAT, [HOSTILE[1], 2])],
        [(HOSTILE[1], TensorProto.FLOAT, [HOSTILE[1], 2])],
    )
    deployment = replace(deployment, model=HOSTILE[1])
    with Worker(state_of(deployment, **{deployment.name: 100})).running() as worker:
        pages = [Page(get(worker, path)[1].decode()) for path in ("/", "/docs")]
        assert get(worker, f"/{pages[0].links[3]}")[0].startswith(b"HTTP/1.1 200 OK")
        command = split_by_shell(pages[1].preformatted[0])
        answer = worker.send(post(urlsplit(command[1]).path, command[-1].encode()))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert all(page.tags <= TAGS and HOSTILE[1] in page.words for page in pages)
