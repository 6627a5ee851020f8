"""`reconcile --watch` and `webhooks` as processes.

MLflow's server, its webhooks and the endpoint are real.
"""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks
from onnx_ops.adapters.web.webhook_receiver import WebhookReceiver, read_secret
from onnx_ops.domain.decision import Verdict
from onnx_ops.errors import NotFoundError, ServiceUnavailableError, UserError
from tests.cli.watch_parts import CHALLENGER, CHAMPION, Site, watching
from tests.support.mlflow_server import mlflow_server
from tests.support.must import must
from tests.support.ports import free_port
from tests.support.processes import until

pytestmark = pytest.mark.services

OPEN = {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
SECRET = "a secret of some length"  # noqa: S105 (of a test)
listening = partial(
    WebhookReceiver, "127.0.0.1", 0, secret=SECRET, metrics=str, clock=SystemClock()
)


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def server(mlflow: Path) -> Iterator[str]:
    from cryptography.fernet import Fernet

    key = {
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(),
        "MLFLOW_WEBHOOK_CACHE_TTL": "1",
    }
    with mlflow_server(mlflow, environ=OPEN | key) as url:
        yield url


@pytest.fixture
def site(server: str, tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path / "".join(c for c in tmp_path.name if c.isalnum()), server)
    yield found
    found.stop_endpoint()
    MlflowWebhooks(server).remove()


@pytest.mark.nightly
def test_reconcile_watch_after_webhook_applies_or_reverts_alias(site: Site) -> None:
    """Passes are an hour apart, so that only webhooks trigger actions."""
    registry, port = site.context.registry(), free_port()
    url = f"http://127.0.0.1:{port}/webhooks/mlflow"
    site.publish("a")
    site.publish("b")
    site.publish("bad", Verdict.FAIL)
    site.bind()
    done = site.command("webhooks", "install", "--url", url, "--json")
    assert (done.code, json.loads(done.stdout)["did"]) == (4, ["created"])
    with watching(site, "--interval", "1h", "--listen", f"127.0.0.1:{port}") as watch:
        until(lambda: "webhook" in watch.kinds(), "a word about the webhook")
        assert "works" in next(r["why"] for r in watch.reports if r["kind"] == "webhook")
        findings = {
            finding["check"]: finding
            for finding in json.loads(site.command("doctor", "--json").stdout)
        }
        assert findings["webhook"]["ok"]
        assert findings["webhook"]["found"] == f"{url}: 4 of 4 test deliveries arrived"
        registry.set_alias(site.model, CHALLENGER, "1")
        until(lambda: registry.aliases(site.model) == {CHAMPION: "1"}, "the first deployment")
        registry.set_alias(site.model, CHALLENGER, "2")
        until(lambda: registry.aliases(site.model).get(CHAMPION) == "2", "the second release")
        for alias in (CHALLENGER, CHAMPION):
            registry.set_alias(site.model, alias, "3")

            def refused(alias: str = alias) -> bool:
                return f"refused {alias} 3" in site.done()

            until(refused, f"the refusal of {alias}")
        assert (
            "cpu-1t is FAIL"
            in registry.version(site.model, "3").tags[f"onnxops.rejected.{CHAMPION}"]
        )
        assert {k: v for k, v in registry.aliases(site.model).items() if v == "3"} == {}
        assert "refused" in watch.kinds()
        assert watch.end(signal.SIGTERM) == 0
        assert watch.kinds()[-1] == "stopped"
    assert site.traffic() == {"v2": 100, "v1": 0}
    assert site.ever_deployed() == {"1", "2"}
    assert site.done() == [
        "first-deployment",
        "finish",
        f"refused {CHALLENGER} 3",
        f"refused {CHAMPION} 3",
    ]
    secret = read_secret(site.settings.webhook_secret, {})
    assert all(
        secret not in text for text in (done.stdout, (site.folder / "watch.log").read_text())
    )
    assert secret not in json.dumps(watch.reports)


@pytest.mark.nightly
def test_reconcile_watch_without_webhooks_converges_by_polling(site: Site) -> None:
    site.publish("a")
    site.publish("b")
    site.bind()
    registry = site.context.registry()
    registry.set_alias(site.model, CHALLENGER, "1")
    with watching(site, "--interval", "200 ms") as watch:
        until(lambda: site.done() == ["first-deployment"], "the first deployment")
        assert watch.end(signal.SIGKILL) == -signal.SIGKILL
    site.stop_endpoint()
    assert site.traffic() == {}
    registry.set_alias(site.model, CHALLENGER, "2")
    with watching(site, "--interval", "200 ms") as watch:
        until(lambda: registry.aliases(site.model).get(CHAMPION) == "2", "the second release")
        until(lambda: watch.kinds()[-1] == "waiting", "rest")
        assert watch.end(signal.SIGTERM) == 0
    assert site.traffic() == {"v2": 100, "v1": 0}
    assert site.done() == ["first-deployment", "restore", "finish"]


def test_mlflow_webhooks_install_check_and_repair_restore_changed_webhook(
    server: str, tmp_path: Path
) -> None:
    ours, woken, refused = MlflowWebhooks(server, "tested"), list[str](), list[str]()
    client = ours._mlflow._client
    with listening(wake=woken.append, refused=refused.append) as it:
        url = it.address
        with pytest.raises(NotFoundError, match=r"no webhook is installed.*--name tested`"):
            ours.check()
        assert ours.repair(SECRET) is None
        assert (ours.install(url, SECRET).did, ours.install(url, SECRET).did) == (("created",), ())
        assert len([w for w in client.list_webhooks() if w.name == "tested"]) == 1
        assert ours.check().ok
        assert woken
        (webhook,) = [w for w in client.list_webhooks() if w.name == "tested"]
        client.update_webhook(
            webhook.webhook_id, status="DISABLED", events=["registered_model.created"]
        )
        assert ours.check().problem == "wrong settings: events, disabled"
        assert f"--url {url} --name tested`" in ours.check().remedy
        repaired = must(ours.repair(SECRET))
        assert (repaired.did, repaired.ok) == (("events", "disabled"), True)
        client.update_webhook(webhook.webhook_id, secret="another secret of length")  # noqa: S106 (of a test)
        assert "401" in ours.check().problem
        assert f"Otherwise, run `onnx-ops webhooks install --url {url}" in (ours.check().remedy)
        assert must(ours.repair(SECRET)).ok
        client.create_webhook("tested", f"{url}2", ["registered_model.created"])
        assert ours.install(url, SECRET).did == ("removed a duplicate",)
    assert ours.remove()
    assert not ours.remove()


@pytest.mark.nightly
def test_mlflow_webhooks_error_on_unconfigured_server_contains_required_setting(
    server: str, mlflow: Path, tmp_path: Path
) -> None:
    """A server that has lost its key cannot read its webhooks either."""
    with listening(wake=print, refused=print) as receiver, mlflow_server(tmp_path) as url:
        ours = MlflowWebhooks(url)
        with pytest.raises(UserError) as closed:
            ours.install(receiver.address, SECRET)
        assert "MLFLOW_WEBHOOK_ALLOWED_SCHEMES" in str(closed.value)
        with pytest.raises(UserError) as closed:
            ours.install(receiver.address.replace("http:", "https:"), SECRET)
        assert "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS" in str(closed.value)
        theirs = MlflowWebhooks(server)
        assert theirs.install(receiver.address, SECRET).ok
        copy_webhooks(mlflow / "mlflow.db", tmp_path / "mlflow.db")
        theirs.remove()
        with pytest.raises(ServiceUnavailableError) as unread:
            ours.check()
        assert "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY" in str(unread.value)


def test_mlflow_webhooks_check_without_server_advises_to_start_server() -> None:
    """The error of the connection has the same text as that of a failed delivery."""
    with pytest.raises(ServiceUnavailableError) as down:
        MlflowWebhooks(f"http://127.0.0.1:{free_port()}").check()
    assert "refused" in down.value.why
    assert down.value.remedy == "Start the server or check its URL"


@pytest.mark.nightly
def test_mlflow_webhooks_check_after_loss_of_server_key_raises_service_unavailable_error(
    tmp_path: Path,
) -> None:
    with listening(wake=print, refused=print) as receiver:
        with mlflow_server(tmp_path, environ=OPEN) as url:
            assert MlflowWebhooks(url).install(receiver.address, SECRET).ok
        unread = pytest.raises(
            ServiceUnavailableError, match="MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY"
        )
        with mlflow_server(tmp_path, environ=OPEN) as url, unread:
            MlflowWebhooks(url).check()


def copy_webhooks(source: Path, to: Path) -> None:
    """Copy the webhooks of one server to another.

    They are encrypted with the key of the first server. The other server has a different key.
    """
    with closing(sqlite3.connect(to, timeout=60)) as database, database:
        database.execute("ATTACH ? AS source", (str(source),))
        for table in ("webhooks", "webhook_events"):
            database.execute(f"INSERT INTO {table} SELECT * FROM source.{table}")  # noqa: S608 (of a test)


def test_mlflow_webhooks_with_database_uri_raise_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="webhooks need an MLflow server"):
        MlflowWebhooks(f"sqlite:///{tmp_path}/mlflow.db")
