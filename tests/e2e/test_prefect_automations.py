"""The automations of `infra/prefect`, created at a server with a password.

They are created as their own instructions describe. A failed gate leads to a notification, and a
dead run is found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops.adapters.host import SystemClock
from onnx_ops.domain.notification import GATE_FAILED, ReleaseEvent, format_model_id
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.orchestration.events import post
from onnx_ops.testing.notifiers import WebhookSink
from tests.e2e.e2e_project import Project
from tests.e2e.prefect_site import PASSWORD, PREFECT, PrefectSite, site_of
from tests.support.processes import ROOT, until

pytestmark = pytest.mark.services

FILE = ROOT / "infra" / "prefect" / "automations.yaml"
GATE, DEAD = "onnx-ops gate failed", "onnx-ops dead runs are crashed"
CLOCK = SystemClock()
SILENCE_S = 10
"""Shortest time that a server accepts for a trigger on missing events, in seconds."""


@pytest.fixture(scope="module")
def site(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectSite]:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    home = tmp_path_factory.mktemp("prefect")
    with (
        site_of(Project(home), home, prefect_api) as made,
        temporary_settings({PREFECT_API_URL: made.api, PREFECT_API_AUTH_STRING: PASSWORD}),
    ):
        yield made


@pytest.fixture(scope="module")
def inbox(site: PrefectSite) -> Iterator[WebhookSink]:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    with WebhookSink().open() as inbox:
        block = CustomWebhookNotificationBlock(
            name="ops",
            url=inbox.url,
            json_data={"subject": "{{subject}}", "body": "{{body}}"},
            headers=None,
            cookies=None,
        )
        # Other tests also save a block `ops`.
        block.save("ops", overwrite=True)
        yield inbox


@pytest.fixture(scope="module")
def automations(site: PrefectSite, inbox: WebhookSink) -> Iterator[dict[str, dict[str, Any]]]:
    """Create the automations by the commands in the file; yield them by name.

    The time without events is shorter than in the file.
    """
    commands = [
        line.removeprefix("#   ")
        for line in FILE.read_text().splitlines()
        if line.startswith("#   ")
    ]
    shortened = f"sed -i 's/within: 90/within: {SILENCE_S}/' automations.yaml"
    script = "\n".join(["set -e", *commands[:-1], shortened, commands[-1]])
    (site.project.root / "infra" / "prefect").mkdir(parents=True)
    (site.project.root / "infra" / "prefect" / FILE.name).write_text(FILE.read_text())
    done = subprocess.run(
        ["bash", "-c", script.replace("slack-webhook/ops", "custom-webhook/ops")],
        cwd=site.project.root,
        env=site.environment()
        | {"PATH": f"{PREFECT.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed: list[dict[str, Any]] = [
        one for one in site.ask("/automations/filter") if one["name"] in (GATE, DEAD)
    ]
    yield {automation["name"]: automation for automation in listed}
    # Other tests have runs at this server, so the automations are deleted.
    for automation in listed:
        site.call("DELETE", f"/automations/{automation['id']}")


@pytest.mark.nightly
def test_automations_are_listed_and_enabled(
    automations: dict[str, dict[str, Any]], site: PrefectSite
) -> None:
    assert (
        set(automations)
        == {GATE, DEAD}
        == {one["name"] for one in yaml.safe_load(FILE.read_text())["automations"]}
    )
    assert all(automation["enabled"] for automation in automations.values())
    assert GATE in site.done("automation", "ls")


@pytest.mark.nightly
def test_post_of_events_with_wrong_password_raises_service_unavailable_error(
    site: PrefectSite,
) -> None:
    from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

    with (
        temporary_settings({PREFECT_API_AUTH_STRING: "admin:wrong"}),
        pytest.raises(ServiceUnavailableError) as caught,
    ):
        post([beat("nobody")])
    assert "admin:wrong" not in str(caught.value)


@pytest.mark.nightly
def test_gate_automation_sends_message_only_for_target_without_passing_variant(
    automations: dict[str, dict[str, Any]], inbox: WebhookSink
) -> None:
    for served_by, variant in (("yes", "int8"), ("no", "fp32")):
        event = ReleaseEvent(
            event=GATE_FAILED,
            resource=format_model_id("digits-mlp"),
            name="digits-mlp",
            at=CLOCK.now(),
            labels={"onnx-ops.target": "cpu-1t", "onnx-ops.served": served_by},
            payload={
                "what": f"{variant} failed on cpu-1t",
                "why": "latency: 21% slower",
                "link": "https://x.example",
            },
        )
        post([event])
    until(lambda: inbox.requests, seconds=60, what="a message about the gate")
    (letter,) = inbox.requests
    assert letter.document["subject"] == "digits-mlp: fp32 failed on cpu-1t"
    assert letter.document["body"] == "Why: latency: 21% slower\nhttps://x.example"


@pytest.mark.nightly
def test_dead_run_automation_marks_only_silent_run_as_crashed(
    automations: dict[str, dict[str, Any]], site: PrefectSite
) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.states import Failed, Running

    with get_client(sync_client=True) as client:
        silent, ended = [
            client.create_flow_run(flow(name="beating")(lambda: None), state=Running())
            for _ in range(2)
        ]
        post([beat(str(run.id)) for run in (silent, ended)])
        client.set_flow_run_state(ended.id, Failed(name="GateFailed"))
        until(
            lambda: client.read_flow_run(silent.id).state_type == "CRASHED",
            seconds=120,
            what="a crashed run",
        )
        state = client.read_flow_run(silent.id).state
        assert client.read_flow_run(ended.id).state_name == "GateFailed"
    assert state is not None
    assert "the process and the worker have probably ended" in (state.message or "")


def beat(run: str) -> ReleaseEvent:
    name = "prefect.flow-run.heartbeat"
    return ReleaseEvent(
        event=name, resource=f"prefect.flow-run.{run}", name="beating", at=CLOCK.now(), payload={}
    )
