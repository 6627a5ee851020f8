"""The console in Chromium, by keyboard, during a canary of a local endpoint."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onnx_ops.app.context import Project
from onnx_ops.console.server import ConsoleServer
from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.rollback import roll_back_each, send_command
from tests.cli.watch_parts import TARGET, Site
from tests.release.release_parts import CANARY
from tests.support.mlflow_server import mlflow_server
from tests.support.must import must

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.nightly, pytest.mark.services]

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with mlflow_server(tmp_path / "mlflow") as url:
        found = Site(tmp_path / "project", url)
        yield found
        found.stop_endpoint()


@pytest.fixture
def pages(site: Site) -> Iterator[tuple[str, dict[str, Page], list[str]]]:
    """Yield the console's address, a page for each size, and what the browser reports."""
    from playwright.sync_api import sync_playwright

    browser = must(shutil.which("chromium") or shutil.which("google-chrome"))
    project = Project(settings=site.settings, context=site.context)
    reports: list[str] = []
    with (
        ConsoleServer(project, "127.0.0.1", 0, interval_s=0.5) as server,
        sync_playwright() as playwright,
    ):
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        shown = {}
        for name, (width, height) in SIZES.items():
            scheme = "light" if name == "desktop" else "dark"
            viewport = {"width": width, "height": height}
            page = opened.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
            page.on("console", lambda message: reports.append(message.text))
            page.on("pageerror", lambda error: reports.append(str(error)))
            shown[name] = page
        yield server.url, shown, reports
        opened.close()


def press_until(page: Page, text: str) -> None:
    """Press Tab until a link with this text has the focus, then Enter."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent").strip() == text:
            page.keyboard.press("Enter")
            return
    raise AssertionError(f"no link {text!r} gets the focus")


def overflow(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    root = "document.documentElement"
    return int(page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))


def run_shown_dry_runs(site: Site, page: Page, code: int = 0) -> set[str]:
    """Run the dry runs that a page shows; return their commands, without names.

    Each must end with this exit code.
    """
    shown = page.locator("dl.commands pre.soft code").all_inner_texts()
    for text in shown:
        program, *arguments = shlex.split(text)
        assert program == "onnx-ops"
        assert arguments[-1] == "--dry-run"
        site.command(*arguments, "--json").parsed(code)
    return {re.split(rf" '?{re.escape(site.model)}", text)[0] for text in shown}


def test_console_in_browser_follows_canary_and_rollback(
    site: Site, pages: tuple[str, dict[str, Page], list[str]], tmp_path: Path
) -> None:
    address, shown, reports = pages
    context, endpoint = site.context, site.endpoint
    site.bind()
    promote(context, site.model, site.publish("a"), TARGET)
    reconcile_until_stable(context, endpoint)
    bind_endpoint(context, must(context.ledger.state(endpoint).config), CANARY)
    promote(context, site.model, site.publish("b"), TARGET)
    reconcile_until_stable(context, endpoint)
    for name, page in shown.items():
        page.goto(address)
        page.screenshot(path=tmp_path / f"{name}-endpoints.png", full_page=True)
        press_until(page, endpoint)
        page.get_by_role("heading", name="Rollout in progress").wait_for()
        page.locator("li[aria-current=step]", has_text="10 %").wait_for()
    send_command(context, endpoint, OperatorCommand.ADVANCE)
    reconcile_until_stable(context, endpoint)
    for name, page in shown.items():
        page.locator("li[aria-current=step]", has_text="50 %").wait_for()
        page.screenshot(path=tmp_path / f"{name}-canary.png", full_page=True)
    rollout = {f"onnx-ops rollout {command}" for command in ("abort", "advance", "pause")}
    assert run_shown_dry_runs(site, shown["desktop"]) == rollout
    send_command(context, endpoint, OperatorCommand.PAUSE)
    for page in shown.values():
        page.get_by_text("Continue after the pause").wait_for()
    resumed = rollout - {"onnx-ops rollout pause"} | {"onnx-ops rollout resume"}
    assert run_shown_dry_runs(site, shown["phone"]) == resumed
    _, errors = roll_back_each(context, (endpoint,), reason="<b>it is slow</b>", timeout_s=60.0)
    assert not errors
    for name, page in shown.items():
        page.get_by_text("<b>it is slow</b>").first.wait_for()
        page.locator(".key", has_text="v1 100 %").first.wait_for()
        page.screenshot(path=tmp_path / f"{name}-rolled-back.png", full_page=True)
        assert run_shown_dry_runs(site, page) == {"onnx-ops reconcile"}
        press_until(page, f"History of {endpoint}")
        page.get_by_text("✓ verified").first.wait_for()
        page.screenshot(path=tmp_path / f"{name}-history.png", full_page=True)
        assert overflow(page) == 0
        for path in ("/", f"/endpoints/{endpoint}", "/releases", f"/releases/{site.model}/2"):
            page.goto(f"{address}{path}")
            assert overflow(page) == 0, path
            # The promotion of the version that was rolled back is refused.
            run_shown_dry_runs(site, page, 5 if path.endswith("/2") else 0)
            page.screenshot(path=tmp_path / f"{name}{path.replace('/', '-')}.png", full_page=True)
    assert reports == []
