"""The HTTP server of the console, on Starlette and uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from onnx_ops.adapters.web.server import BackgroundServer
from onnx_ops.app.context import Project
from onnx_ops.console.access import REPORT_POLICY, VARIABLE, AccessControl, choose_hosts
from onnx_ops.console.pages import Page, Pages
from onnx_ops.console.shared_reads import SharedReads
from onnx_ops.errors import NotFoundError, OnnxOpsError, RefusedError
from onnx_ops.reporting.svg import STYLE

MIN_INTERVAL_S, MAX_INTERVAL_S = 2.0, 3600.0
_WAIT_S = 10.0
"""Maximum time in seconds that a page waits for a read."""
_MAX_FOLLOWERS = 24
"""Maximum number of pages that are updated at the same time.

All viewers can share one proxy, and the server accepts 32 connections from one address
(`adapters.web.connections`). The other 8 connections are for loading pages.
"""
_ALIVE_S = 15.0
"""Seconds after which an idle stream sends a comment at the next read.

A read is one of the endpoints. Without the comment, a proxy could close the stream.
"""
_STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

PageReader = Callable[[Request], Awaitable[Page]]


class ConsoleServer(BackgroundServer):
    """Server that listens while this context manager is open.

    Port 0 selects a free port. Endpoints are read at most once in `interval_s` seconds, and only
    while a page is open.

    Raises:
        RefusedError: the server would be reachable from other machines, and there is no token.
        ServiceUnavailableError: the address is not available.
    """

    def __init__(
        self,
        project: Project,
        host: str,
        port: int,
        *,
        token: str = "",
        interval_s: float = 5.0,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        def build_app(address: str) -> ASGIApp:
            if not token and (allowed_hosts or not ip_address(address).is_loopback):
                raise RefusedError(
                    "other machines could read the console, and it has no token",
                    where=f"{host}:{port}",
                    remedy=f"Set {VARIABLE}, or write a token into "
                    f"{project.settings.console_token} (mode 0600).",
                )
            pages = _build_pages(project, interval_s)
            return AccessControl(pages, token=token, hosts=choose_hosts(address, allowed_hosts))

        super().__init__(
            host,
            port,
            build_app=build_app,
            name="console",
            what="the console",
            remedy="Choose another address with --listen HOST:PORT.",
        )


def _build_pages(project: Project, interval_s: float) -> Starlette:
    """Return the application of the console, whose routes change nothing."""
    reads = SharedReads(wait_s=_WAIT_S)
    pages = Pages(project, reads, interval_s=interval_s)

    @asynccontextmanager
    async def close_reads(_: Starlette) -> AsyncIterator[None]:
        yield
        reads.close()

    shown: dict[str, PageReader] = {
        "/": lambda request: pages.show_endpoints(),
        "/endpoints/{name:path}": lambda request: pages.show_endpoint(request.path_params["name"]),
        "/history": lambda request: pages.show_history(
            request.query_params.get("endpoint", ""), request.query_params.get("skip", "")
        ),
        "/releases": lambda request: pages.show_releases(),
        "/releases/{model:path}/{version}": lambda request: pages.show_release(
            request.path_params["model"], request.path_params["version"]
        ),
        "/targets": lambda request: pages.show_targets(),
    }
    report = Route("/reports/{model:path}/{version}", partial(_show_report, pages))
    static = [Route(f"/static/{name}", partial(_show_file, name)) for name in _STATIC]
    routes = [Route(path, partial(_show_page, reader)) for path, reader in shown.items()]
    routes += [report, *static, Route("/events", _EventStream(pages, interval_s).answer)]
    return Starlette(
        routes=routes,
        lifespan=close_reads,
        exception_handlers={404: partial(_show_missing, pages), 500: _show_fault},
    )


async def _show_page(reader: PageReader, request: Request) -> Response:
    page = await reader(request)
    return HTMLResponse(page.html, status_code=page.status)


async def _show_missing(pages: Pages, request: Request, error: Exception) -> Response:
    page = await pages.show_missing()
    return HTMLResponse(page.html, status_code=page.status)


async def _show_fault(request: Request, error: Exception) -> Response:
    return PlainTextResponse("The page could not be rendered; the log has the error.\n", 500)


async def _show_file(name: str, request: Request) -> Response:
    text = (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
    return Response(STYLE + text if name.endswith(".css") else text, media_type=_STATIC[name])


async def _show_report(pages: Pages, request: Request) -> Response:
    """Return a stored report, which runs no script."""
    headers = {"content-security-policy": REPORT_POLICY}
    model, version = request.path_params["model"], request.path_params["version"]
    try:
        return HTMLResponse(await pages.read_report(model, version), headers=headers)
    except NotFoundError as error:
        return PlainTextResponse(f"{error}\n", 404)
    except OnnxOpsError as error:
        return PlainTextResponse(f"{error}\n", 503)


class _EventStream:
    """Stream of server-sent events, with an event for each new revision of the pages."""

    def __init__(self, pages: Pages, interval_s: float) -> None:
        self._pages = pages
        self._interval_s = interval_s
        self._followers = 0

    async def answer(self, request: Request) -> Response:
        """Return the event stream of one page; status 503 beyond `_MAX_FOLLOWERS`."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._followers >= _MAX_FOLLOWERS:
            text = "Too many pages are open; this page is not updated.\n"
            return PlainTextResponse(text, 503)
        return StreamingResponse(self._iterate(), media_type="text/event-stream")

    async def _iterate(self) -> AsyncIterator[str]:
        self._followers += 1
        try:
            sent, silent_s = "", 0.0
            yield f"retry: {self._interval_s * 1000:.0f}\n\n"
            while True:
                snapshot = await self._pages.read_snapshot()
                if snapshot.revision != sent:
                    sent, silent_s = snapshot.revision, 0.0
                    yield f"event: revision\ndata: {sent}\n\n"
                elif silent_s >= _ALIVE_S:
                    silent_s = 0.0
                    yield ": alive\n\n"
                await asyncio.sleep(self._interval_s)
                silent_s += self._interval_s
        finally:
            self._followers -= 1
