"""An HTTP server that records requests and gives the replies of a test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """A request. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    document: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply; `hang` withholds it until the server stops."""

    status: int = 200
    document: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False


class WebhookSink:
    """Records requests in order; `answer` returns the reply to each."""

    def __init__(self, answer: Callable[[ReceivedRequest], Reply] = lambda _: Reply()) -> None:
        self.answer = answer
        self.requests: list[ReceivedRequest] = []
        self.url = ""

    @contextmanager
    def open(self) -> Iterator[WebhookSink]:
        """Listen on this machine at `url`."""
        sink, over = self, threading.Event()

        class SinkHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = ReceivedRequest(
                    method=self.command, path=self.path, headers=headers, document=json.loads(raw) if raw else None
                )
                sink.requests.append(request)
                reply = sink.answer(request)
                if reply.hang:
                    over.wait()
                    return
                body = b"ok" if reply.document is None else json.dumps(reply.document).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PATCH = do_GET  # noqa: N815 (names of http.server)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), SinkHandler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                over.set()
                server.shutdown()
                thread.join()
