"""A service that people read, as a real HTTP server: it keeps what it gets and answers what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One request. Names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    document: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer; `hang` leaves the client without one until the server ends."""

    status: int = 200
    document: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False


class Inbox:
    """What arrived, in order. `answer` says what each request gets."""

    def __init__(self, answer: Callable[[Letter], Reply] = lambda _: Reply()) -> None:
        self.answer = answer
        self.letters: list[Letter] = []
        self.url = ""
        self._over = threading.Event()

    @contextmanager
    def open(self) -> Iterator[Inbox]:
        """Listens on this machine at `url`."""
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def _take(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                headers = {name.lower(): value for name, value in self.headers.items()}
                letter = Letter(
                    method=self.command, path=self.path, headers=headers, document=json.loads(raw) if raw else None
                )
                inbox.letters.append(letter)
                inbox._give(self, inbox.answer(letter))

            def do_GET(self) -> None:
                self._take()

            def do_POST(self) -> None:
                self._take()

            def do_PATCH(self) -> None:
                self._take()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                self._over.set()
                server.shutdown()
                thread.join()

    def _give(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply.hang:
            self._over.wait()
            return
        body = b"ok" if reply.document is None else json.dumps(reply.document).encode()
        handler.send_response(reply.status)
        for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
