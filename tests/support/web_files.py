"""A web server of files, and a stand-in of the Hugging Face hub, on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class WebFiles:
    """Files by path, the requests that were received, and the address of the server.

    Paths of `hub` are below a repository, `OWNER/NAME`.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    hub: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def address(self, name: str) -> str:
        """Return the pinned address of a file."""
        return f"{self.url}/{name}#sha256={hashlib.sha256(self.files[name]).hexdigest()}"

    def answer(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        """Return status, body and headers of the answer to a request."""
        name = path.lstrip("/")
        if name in self.statuses:
            return self.statuses[name], b"", {}
        if name in self.files:
            return 200, self.files[name], {}
        return self._answer_as_hub(name)

    def _answer_as_hub(self, name: str) -> tuple[int, bytes, Mapping[str, str]]:
        for repository, files in self.hub.items():
            kind = "" if repository.startswith("datasets/") else "models/"
            if name.startswith(f"api/{kind}{repository}/tree/{COMMIT}"):
                listed = [
                    {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                    for path, data in files.items()
                ]
                return 200, json.dumps(listed).encode(), {"Content-Type": "application/json"}
            path = name.removeprefix(f"{repository}/resolve/{COMMIT}/")
            if path in files:
                headers = {"ETag": f'"{_etag(files[path])}"', "X-Repo-Commit": COMMIT}
                return 200, files[path], headers
        return 404, b"", {"X-Error-Code": "RepoNotFound"}


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def serve_web_files() -> Iterator[WebFiles]:
    """Yield files that a server on the loopback interface answers with."""
    served = WebFiles()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name is the library's)
            pass

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            served.requests.append(path)
            status, body, headers = served.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
