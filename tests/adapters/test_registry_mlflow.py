"""The MLflow registry against a real SQLite database and a real tracking server."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import requests
from sqlalchemy.exc import SQLAlchemyError

from onnx_ops import codec
from onnx_ops.adapters.registries import mlflow as mlflow_registry
from onnx_ops.adapters.registries import mlflow_folder, mlflow_tags
from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from onnx_ops.adapters.registries.mlflow_connection import MlflowConnection
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EndpointBound,
    EntryBody,
    Intent,
    LedgerEntry,
)
from onnx_ops.domain.release import Publication, VersionRecord
from onnx_ops.domain.rollout import Action, ActionKind, Roles, build_split_state
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import (
    DigestMismatchError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    StorageError,
    UserError,
)
from onnx_ops.ports.release import Registry
from onnx_ops.reporting.description import model_description
from onnx_ops.testing.fakes import FakeSigner
from onnx_ops.testing.registries import RegistrySuite, publication
from tests.support.endpoints import endpoint_config, fileless_deployment
from tests.support.mlflow_server import mlflow_server as started_server
from tests.support.ports import free_port
from tests.support.suite import Sweep


@pytest.fixture(scope="session")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a migrated database.

    The migrations take seconds, so they run once.
    """
    home = tmp_path_factory.mktemp("mlflow")
    MlflowRegistry(f"sqlite:///{home}/mlflow.db").aliases("none")
    return home


@pytest.fixture
def registry(mlflow_home: Path) -> MlflowRegistry:
    return MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db")


@pytest.fixture(scope="session")
def mlflow_server(
    mlflow_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a tracking server and the folder of its artifacts."""
    home = tmp_path_factory.mktemp("server")
    shutil.copy(mlflow_home / "mlflow.db", home / "mlflow.db")
    with started_server(home) as url:
        yield url, home / "files"


def test_registry_with_deleted_experiment_names_tracking_uri_in_remedy(
    registry: MlflowRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(registry)
    number = registry._ensure_experiment(client, "deleted experiment")
    client.delete_experiment(number)
    for uri, shown in (
        (registry._mlflow.uri, registry._mlflow.uri),
        ("postgresql://me:secret@host/mlflow", "'postgresql://me:***@host/mlflow'"),
    ):
        monkeypatch.setattr(registry, "_mlflow", MlflowConnection(uri))
        with pytest.raises(UserError, match="the experiment was deleted") as caught:
            registry._ensure_experiment(client, "deleted experiment")
        command = f"mlflow experiments restore --experiment-id {number}"
        assert f"`MLFLOW_TRACKING_URI={shown} {command}`." in caught.value.remedy
        assert ("Replace ***" in caught.value.remedy) is ("***" in shown)


def _overwrite(root: Path, registry: Registry, record: VersionRecord, name: str) -> None:
    assert isinstance(registry, MlflowRegistry)
    model_id = str(registry._version(record.model, record.version).source).removeprefix("models:/")
    (path,) = root.rglob(f"{model_id}/artifacts/{name}")
    path.write_bytes(path.read_bytes() + b" ")


def publish(registry: MlflowRegistry, folder: Path, model: str) -> VersionRecord:
    """Publish a release of one variant; return its version."""
    return registry.version(
        model, registry.publish(publication(folder, model=model, seed="a"))["fp32"]
    )


def published(registry: MlflowRegistry, folder: Path, model: str, **changes: Any) -> str:
    """Publish a release whose only variant has these fields; return the version."""
    release = publication(folder, model=model, seed="a")
    return registry.publish(replace(release, variants=(replace(release.variants[0], **changes),)))[
        "fp32"
    ]


def client_of(registry: MlflowRegistry) -> Any:
    return registry._mlflow._client


class TestOnADatabase(RegistrySuite):
    @pytest.fixture(autouse=True)
    def _home(self, mlflow_home: Path) -> None:
        self.files = mlflow_home / "mlartifacts"

    def tamper(self, registry: Registry, record: VersionRecord, name: str) -> None:
        _overwrite(self.files, registry, record, name)


def test_registry_all_aliases_over_several_pages_is_complete(
    registry: MlflowRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        registry.publish(publication(tmp_path, model=f"paged-{number}", seed="a"))
        registry.set_alias(f"paged-{number}", "champion-cpu-1t", "1")
    whole = registry.all_aliases()
    monkeypatch.setattr(mlflow_registry, "_PAGE", 2)
    assert registry.all_aliases() == whole
    assert {f"paged-{number}" for number in range(3)} <= set(whole)


@pytest.mark.nightly
@pytest.mark.services
class TestOnAServer(RegistrySuite):
    @pytest.fixture
    def registry(self, mlflow_server: tuple[str, Path]) -> MlflowRegistry:
        url, self.files = mlflow_server
        return MlflowRegistry(url)

    def tamper(self, registry: Registry, record: VersionRecord, name: str) -> None:
        _overwrite(self.files, registry, record, name)

    def test_registry_where_on_server_returns_model_url(
        self, registry: MlflowRegistry, mlflow_server: tuple[str, Path]
    ) -> None:
        assert registry.where("digits mlp") == f"{mlflow_server[0]}/#/models/digits%20mlp"

    def test_version_description_on_server_links_to_report(
        self, registry: MlflowRegistry, mlflow_server: tuple[str, Path], tmp_path: Path
    ) -> None:
        (tmp_path / "report.html").write_text("<p>all gates passed</p>")
        version = published(
            registry, tmp_path, "reported", evidence={"report.html": tmp_path / "report.html"}
        )
        page = registry.page("reported", version, "report.html")
        assert page.startswith(f"{mlflow_server[0]}/#/experiments/")
        description = client_of(registry).get_model_version("reported", version).description
        assert f"[Report]({page.removeprefix(mlflow_server[0] + '/')})" in str(description)

    def test_publish_updates_model_description_unless_edited_by_user(
        self, registry: MlflowRegistry, tmp_path: Path
    ) -> None:
        client = client_of(registry)

        def published(about: str) -> str:
            release = publication(tmp_path, model="described", seed="a")
            about = model_description(about, "linear", ["fp32"], ["cpu-1t"])
            registry.publish(replace(release, about=about))
            return str(client.get_registered_model("described").description)

        assert published("A line.").startswith("A line.\n\nPipeline linear. Variants: fp32.")
        written = published("A straight line.")
        assert written.startswith("A straight line.")
        assert published("A straight line.") == written
        for edited in ("Mine.", f"Mine.\n\n{written}", written.replace("fp32", "int8")):
            client.update_registered_model("described", edited)
            assert published("A line.") == edited
        client.update_registered_model("described", "")
        assert published("A line.").startswith("A line.")

    def test_publish_writes_readable_tags_before_internal_tags(
        self, registry: MlflowRegistry, tmp_path: Path
    ) -> None:
        version = publish(registry, tmp_path, "labelled").version
        tags = list(client_of(registry).get_model_version("labelled", version).tags)
        assert tags[:5] == ["variant", "gate.cpu-1t", "git.sha", "data.rev", "release"]
        assert all(key.startswith("mlflow.onnx_ops.") for key in tags[5:])


@contextmanager
def failing_server(status: int | None) -> Iterator[str]:
    """Serve only `/health`; yield the address.

    Other requests get the status, or no answer if it is None.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health" or status is not None:
                self.send_response(200 if self.path == "/health" else int(status or 0))
                self.send_header("Content-Length", "0")
                self.end_headers()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Killed(BaseException):
    """The effect of `kill -9` within the process: no error handler runs afterwards."""


class Killing:
    """A client that is killed at call `at`, before (`after=False`) or after its effect."""

    def __init__(
        self, client: Any, error: Callable[[], BaseException], *, at: int, after: bool
    ) -> None:
        self.client, self.error, self.at, self.after = client, error, at, after
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            mine = len(self.calls) == self.at
            if mine and not self.after:
                raise self.error()
            result = getattr(self.client, name)(*arguments, **named)
            if mine:
                raise self.error()
            return result

        return call


def _failing(
    mlflow_home: Path, *, at: int, after: bool = False, error: Callable[[], BaseException] = Killed
) -> Any:
    registry = MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db")
    with registry._mlflow.session("") as client:
        killing = Killing(client, error, at=at, after=after)
    registry._mlflow.__dict__["_client"] = killing
    return registry, killing


def _lost() -> Exception:
    from mlflow.exceptions import MlflowException

    return MlflowException("the connection was lost")


def _is_whole(registry: MlflowRegistry, release: Publication, folder: Path) -> None:
    """Publish the release again, and assert that it is complete.

    Each variant has one readable version, no run is still active, and the parent run is finished.
    """
    client = client_of(registry)
    versions = registry.publish(release)
    listed = client.search_model_versions(f"name = '{release.model}'")
    assert sorted(str(v.version) for v in listed) == sorted(versions.values())
    for record in release.variants:
        read = registry.version(release.model, versions[record.variant])
        assert read.decisions == record.signed
        target = folder / record.variant
        target.mkdir(parents=True)
        assert registry.fetch(read, target).digest() == record.manifest.digest()
    experiment = client.get_experiment_by_name(release.model)
    runs = client.search_runs([experiment.experiment_id])
    assert not [run for run in runs if run.info.status == "RUNNING"]
    assert [run.info.status for run in runs if run.data.tags["onnx_ops.kind"] == "release"] == [
        "FINISHED"
    ]
    assert not client.search_logged_models([experiment.experiment_id], "status = 'PENDING'")


@pytest.mark.parametrize(("error", "after"), [(Killed, False), (_lost, True)])
def test_publish_interrupted_at_any_call_is_completed_by_retry(
    mlflow_home: Path, tmp_path: Path, error: Callable[[], BaseException], after: bool, sweep: Sweep
) -> None:
    registry, killing = _failing(mlflow_home, at=0)
    mode = f"{after}".lower()
    registry.publish(publication(tmp_path, model=f"whole-{mode}", seed="a"))
    assert "create_model_version" in killing.calls
    for at in sweep(range(1, len(killing.calls) + 1)):
        release = publication(tmp_path, model=f"dies-{mode}-{at}", seed=f"{at}")
        registry, _ = _failing(mlflow_home, at=at, after=after, error=error)
        with pytest.raises((Killed, ServiceUnavailableError)):
            registry.publish(release)
        survivor = MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db")
        _is_whole(survivor, release, tmp_path / f"fetched-{at}")


def test_publish_of_changed_decision_interrupted_at_any_call_is_completed_by_retry(
    mlflow_home: Path, tmp_path: Path, sweep: Sweep
) -> None:
    def judged(seed: str, verdict: Verdict) -> Publication:
        return publication(tmp_path, model=f"refresh-{seed}", seed=seed, verdict=verdict)

    survivor = MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db")
    survivor.publish(judged("all", Verdict.PASS))
    registry, killing = _failing(mlflow_home, at=0)
    registry.publish(judged("all", Verdict.FAIL))
    assert "update_model_version" in killing.calls
    assert "create_model_version" not in killing.calls
    for at in sweep(range(1, len(killing.calls) + 1)):
        survivor.publish(judged(f"{at}", Verdict.PASS))
        registry, _ = _failing(mlflow_home, at=at)
        with pytest.raises(Killed):
            registry.publish(judged(f"{at}", Verdict.FAIL))
        _is_whole(survivor, judged(f"{at}", Verdict.FAIL), tmp_path / f"fetched-{at}")


def _mirrored(
    registry: MlflowRegistry, folder: Path, name: str
) -> Callable[[MlflowRegistry], None]:
    intent = replace(_entries()[1], endpoint=name)
    return lambda registry: registry.mirror(intent, "digits")


def _deleted(registry: MlflowRegistry, folder: Path, name: str) -> Callable[[MlflowRegistry], None]:
    registry.publish(publication(folder, model=name, seed=name))
    return lambda registry: registry.delete_version(name, "1")


def _named(registry: MlflowRegistry, folder: Path, name: str) -> Callable[[MlflowRegistry], None]:
    registry.publish(publication(folder, model=name, seed=name))
    registry.set_alias(name, "challenger-cpu-1t", "1")

    def act(registry: MlflowRegistry) -> None:
        registry.set_alias(name, "champion-cpu-1t", "1")
        registry.delete_alias(name, "challenger-cpu-1t")
        registry.annotate(name, "1", {"onnxops.a": "1", "onnxops.b": "2"})

    return act


def _shown(registry: MlflowRegistry, name: str) -> object:
    """Return all that MLflow shows of a model, or of the endpoint of that name."""
    client = client_of(registry)
    places = (client.get_experiment_by_name(place) for place in (name, f"releases/{name}"))
    runs = client.search_runs([place.experiment_id for place in places if place is not None])
    versions = client.search_model_versions(f"name = '{name}'")
    return (
        sorted(
            (run.info.run_name.split()[0], run.info.status, sorted(run.data.metrics.items()))
            for run in runs
        ),
        sorted(
            (one.version, {k: v for k, v in one.tags.items() if k.startswith("onnxops.")})
            for one in versions
        ),
        registry.aliases(name),
    )


@pytest.mark.parametrize(
    "prepare",
    [_mirrored, *(pytest.param(one, marks=pytest.mark.nightly) for one in (_deleted, _named))],
)
@pytest.mark.parametrize(("error", "after"), [(Killed, False), (_lost, True)])
def test_registry_change_interrupted_at_any_call_is_completed_by_retry(
    prepare: Callable[[MlflowRegistry, Path, str], Callable[[MlflowRegistry], None]],
    error: Callable[[], BaseException],
    after: bool,
    mlflow_home: Path,
    tmp_path: Path,
    sweep: Sweep,
) -> None:
    kind = f"{prepare.__name__.strip('_')}-{after}".lower()
    registry, killing = _failing(mlflow_home, at=0)
    act = prepare(registry, tmp_path, f"{kind}-whole")
    killing.calls.clear()
    act(registry)
    whole = _shown(registry, f"{kind}-whole")
    assert len(killing.calls) > 1
    for at in sweep(range(1, len(killing.calls) + 1)):
        name = f"{kind}-{at}"
        survivor = MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db")
        act = prepare(survivor, tmp_path, name)
        registry, _ = _failing(mlflow_home, at=at, after=after, error=error)
        with suppress(Killed, ServiceUnavailableError):
            act(registry)
        act(survivor)
        assert _shown(survivor, name) == whole, f"{kind}: call {at}"


def test_publish_of_unchanged_release_writes_nothing(mlflow_home: Path, tmp_path: Path) -> None:
    release = publication(tmp_path, model="unchanged", seed="a", variants=("fp32", "int8-dynamic"))
    registry, killing = _failing(mlflow_home, at=0)
    registry.publish(release)
    killing.calls.clear()
    registry.publish(release)
    assert {name.partition("_")[0] for name in killing.calls} == {"get", "search"}


def test_publish_with_duplicate_version_keeps_first(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="raced", seed="a")
    first = registry.publish(release)["fp32"]
    client = client_of(registry)
    other = client.get_model_version("raced", first)
    with registry._mlflow.as_default():
        source = str(other.source)
        model_id = source.removeprefix("models:/")
        second = client.create_model_version(
            "raced", source=source, model_id=model_id, tags=other.tags
        )
    assert registry.publish(release) == {"fp32": first}
    with pytest.raises(NotFoundError):
        registry.version("raced", str(second.version))


def test_publish_by_concurrent_publishers_creates_one_version_of_each_variant(
    mlflow_home: Path, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="at-once", seed="a", variants=("fp32", "int8-dynamic"))
    registries = [MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        published = list(pool.map(lambda registry: registry.publish(release), registries))
    assert published[0] == published[1] == published[2]
    client = registries[0]._mlflow._client
    listed = client.search_model_versions("name = 'at-once'")
    assert sorted(str(version.version) for version in listed) == sorted(published[0].values())


def test_publish_with_spaces_in_name_and_folder_succeeds(mlflow_home: Path, tmp_path: Path) -> None:
    root = tmp_path / "my files 100%"
    registry = MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db", artifact_root=str(root))
    record = publish(registry, tmp_path, "digits mlp")
    folder = tmp_path / "fetched"
    folder.mkdir()
    assert registry.fetch(record, folder).digest() == record.manifest
    assert list(root.rglob("model.onnx"))


def test_publish_with_long_and_many_parameters_keeps_them(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="parameters", seed="a")
    parameters = {f"p{n:03}": "x" * 4000 for n in range(150)}
    lineage = replace(release.lineage, parameters=parameters)
    version = registry.publish(replace(release, lineage=lineage))["fp32"]
    client = client_of(registry)
    assert (
        client.get_run(str(client.get_model_version("parameters", version).run_id)).data.params
        == parameters
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("PERMISSION_DENIED", RefusedError),
        ("RESOURCE_DOES_NOT_EXIST", NotFoundError),
        ("INVALID_PARAMETER_VALUE", UserError),
        ("TEMPORARILY_UNAVAILABLE", ServiceUnavailableError),
        ("UNAUTHENTICATED", ServiceUnavailableError),
    ],
)
def test_mlflow_error_raises_error_type_for_its_code(
    registry: MlflowRegistry, code: str, expected: type[OnnxOpsError]
) -> None:
    from mlflow.exceptions import RestException

    with pytest.raises(expected) as caught, registry._mlflow.session("alias champion-cpu-1t"):
        raise RestException({"error_code": code, "message": "first line\nsecond line"})  # type: ignore[no-untyped-call]
    assert "second line" not in str(caught.value)


@pytest.mark.parametrize("code", ["INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "BAD_REQUEST"])
def test_mlflow_error_without_own_type_reports_failed_request_and_cause(
    registry: MlflowRegistry, code: str
) -> None:
    from mlflow.exceptions import RestException

    with pytest.raises(ServiceUnavailableError) as caught, registry._mlflow.session("model m"):
        raise RestException({"error_code": code, "message": "no space on the server"})  # type: ignore[no-untyped-call]
    assert caught.value.what == "MLflow could not process the request"
    assert caught.value.why == f"{code}: no space on the server"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), "MLflow does not answer"),
        (requests.ConnectionError("no route"), "MLflow does not answer"),
        (requests.ReadTimeout("no answer"), "MLflow does not answer"),
        (
            requests.HTTPError("404", response=requests.Response()),
            "MLflow could not process the request",
        ),
        (SQLAlchemyError("a table is missing"), "MLflow could not process the request"),
    ],
)
def test_mlflow_session_with_network_or_database_error_raises_service_unavailable_error(
    registry: MlflowRegistry, error: Exception, what: str
) -> None:
    with pytest.raises(ServiceUnavailableError) as caught, registry._mlflow.session("model m"):
        raise error
    assert (caught.value.what, caught.value.where) == (what, registry._mlflow.shown)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (PermissionError(errno.EACCES, "denied", "/f"), "a file or folder is not accessible"),
        (FileNotFoundError(errno.ENOENT, "missing", "/f"), "a file or folder is not accessible"),
        (OSError(errno.EIO, "broken", "/f"), "a file or folder is not accessible"),
    ],
)
def test_mlflow_session_with_local_os_error_raises_storage_error(
    registry: MlflowRegistry, error: OSError, what: str
) -> None:
    with pytest.raises(StorageError) as caught, registry._mlflow.session("model m"):
        raise error
    assert (caught.value.what, caught.value.where) == (what, "model m")
    assert str(error) in caught.value.why


@pytest.mark.parametrize(
    ("status", "what"),
    [(500, "MLflow could not process the request"), (None, "MLflow does not answer")],
)
def test_aliases_from_failing_server_distinguish_failed_and_unanswered_request(
    monkeypatch: pytest.MonkeyPatch, status: int | None, what: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with failing_server(status) as address, pytest.raises(ServiceUnavailableError) as caught:
        MlflowRegistry(address.replace("//", "//u:secret@")).aliases("digits")
    assert caught.value.what == what
    assert ("500" in caught.value.why) is (status == 500)
    assert "secret" not in str(caught.value)


@pytest.mark.nightly
def test_mlflow_load_model_of_published_version_returns_predictions(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    script = """
import sys, warnings
import mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
proto = mlflow.onnx.load_model("models:/loaded/1")
model = mlflow.pyfunc.load_model("models:/loaded/1")
print(proto.opset_import[0].version, model.predict({"x": np.ones((3, 2), np.float32)})["y"].tolist())
"""  # noqa: E501
    release = publication(tmp_path, model="loaded", seed="a")
    registry.publish(release)
    done = subprocess.run(
        [sys.executable, "-c", script, registry._mlflow.uri],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    import onnxruntime

    path = release.variants[0].files["model.onnx"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": np.ones((3, 2), np.float32)})[0].tolist()
    assert done.stdout.strip() == f"18 {expected}"


def test_publish_logs_metrics_with_their_own_model(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="measured", seed="a", variants=("fp32", "int8-dynamic"))
    fast = replace(release.variants[1], metrics={"cpu-1t/p50": 0.5})
    registry.publish(replace(release, variants=(release.variants[0], fast)))
    client = client_of(registry)
    experiment = client.get_experiment_by_name("measured")
    found = client.search_logged_models([experiment.experiment_id], "metrics.`cpu-1t/p50` > 0.1")
    assert [model.name for model in found] == ["int8-dynamic"]
    assert [metric.value for metric in found[0].metrics or ()] == [0.5]
    assert found[0].params == {"epochs": "12"}


def test_publish_of_new_measurement_keeps_metric_history(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    first = publication(tmp_path, model="again", seed="one")
    registry.publish(first)
    again = publication(tmp_path, model="again", seed="one", verdict=Verdict.FAIL)
    slower = replace(again.variants[0], metrics={"cpu-1t/p50": 0.002})
    versions = [registry.publish(replace(again, variants=(slower,)))["fp32"] for _ in range(2)]
    client = client_of(registry)
    run_id = str(client.get_model_version("again", versions[-1]).run_id)
    assert client.get_run(run_id).data.metrics == {"cpu-1t/p50": 0.002}
    assert [metric.value for metric in client.get_metric_history(run_id, "cpu-1t/p50")] == [
        0.00125,
        0.002,
    ]


def test_publish_links_metrics_to_their_data_set(registry: MlflowRegistry, tmp_path: Path) -> None:
    release = publication(tmp_path, model="scored", seed="a")
    version, client = registry.publish(release)["fp32"], client_of(registry)
    run = client.get_run(str(client.get_model_version("scored", version).run_id))
    (used,) = run.inputs.dataset_inputs
    assert str(release.lineage.data["test"]).startswith(f"sha256:{used.dataset.digest}")
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "evaluation")]
    model = client.get_logged_model(
        str(client.get_model_version("scored", version).source).removeprefix("models:/")
    )
    assert [(m.dataset_name, m.dataset_digest) for m in model.metrics or ()] == [
        ("test", used.dataset.digest)
    ]


def test_published_input_example_is_readable_by_mlflow(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    from mlflow.artifacts import download_artifacts
    from mlflow.models import Model

    version = publish(registry, tmp_path, "exemplary").version
    source = str(client_of(registry).get_model_version("exemplary", version).source)
    with registry._mlflow.as_default():
        folder = download_artifacts(source, dst_path=str(tmp_path / "downloaded"))
    model = Model.load(folder)
    example: Any = model.load_input_example(folder)
    assert example["x"].dtype == np.float32
    assert example["x"].tolist() == [[1.0, 2.0]]
    assert model.get_serving_input(folder) == '{"inputs": {"x": [[1.0, 2.0]]}}'


def test_publish_stores_evidence_and_lineage_in_run_of_variant(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    version, client = publish(registry, tmp_path, "evident").version, client_of(registry)
    found = client.get_model_version("evident", version)
    experiment, run_id = client.get_experiment_by_name("evident"), str(found.run_id)
    assert f"#/experiments/{experiment.experiment_id}/runs/{run_id}" in str(found.description)
    path = client.download_artifacts(run_id, "evidence/cpu-1t.json", str(tmp_path))
    assert Path(path).read_text() == '{"verdict":"pass"}'
    run = client.get_run(run_id)
    assert run.data.tags["mlflow.source.git.commit"] == "0123456789abcdef"
    assert client.get_run(run.data.tags["mlflow.parentRunId"]).info.run_name.startswith("release ")


def test_publish_without_signature_removes_signed_decision(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    assert publish(registry, tmp_path, "withdrawn").decisions
    version = published(registry, tmp_path, "withdrawn", signed={})
    assert registry.version("withdrawn", version).decisions == {}


def test_version_with_malformed_decisions_or_decision_of_other_target_omits_them(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="malformed", seed="a")
    version = registry.publish(release)["fp32"]
    good = codec.dumps(release.variants[0].signed["cpu-1t"].envelope).decode()
    bad = {
        f"{mlflow_tags.DECISION}{target}": text
        for target, text in {"a": "{", "b": "[" * 20_000, "c": good, "d": '{"key":1}'}.items()
    }
    registry.annotate("malformed", version, bad)
    read = registry.version("malformed", version)
    assert set(read.decisions) == {"cpu-1t"}
    assert read.tags.items() >= bad.items()


def test_build_decision_tags_with_too_long_decision_raises_user_error(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="long", seed="a")
    record = release.variants[0]
    signed = record.signed["cpu-1t"]
    verdicts = {f"gate {n}": Verdict.PASS for n in range(5000)}
    longer = sign_record(replace(signed.record, verdicts=verdicts), FakeSigner())
    with pytest.raises(UserError, match="too long for a tag"):
        mlflow_tags.build_decision_tags(replace(record, signed={"cpu-1t": longer}))


def test_publish_with_long_description_cuts_and_marks_it(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    version = published(registry, tmp_path, "wordy", description="word " * 2000)
    description = client_of(registry).get_model_version("wordy", version).description
    assert len(description) == 5000
    assert "Cut here" in description
    assert description.endswith("/artifacts)")


@pytest.mark.parametrize("name", ["MLmodel", "manifest.json"])
def test_fetch_of_tampered_metadata_file_raises_digest_mismatch_error(
    registry: MlflowRegistry, mlflow_home: Path, tmp_path: Path, name: str
) -> None:
    model = f"tampered-{name.lower()}"
    record = publish(registry, tmp_path, model)
    _overwrite(mlflow_home / "mlartifacts", registry, record, name)
    with pytest.raises(DigestMismatchError, match=f"{name} differs from the registered file"):
        registry.fetch(record, tmp_path)


def test_fetch_with_missing_file_raises_digest_mismatch_error(
    registry: MlflowRegistry, mlflow_home: Path, tmp_path: Path
) -> None:
    record = publish(registry, tmp_path, "gone")
    for path in (mlflow_home / "mlartifacts" / "gone").rglob("model.onnx"):
        path.unlink()
    with pytest.raises(DigestMismatchError, match=r"model\.onnx is missing"):
        registry.fetch(record, tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "MLmodel", "manifest.json"])
def test_publish_after_deletion_of_damaged_version_creates_version_with_intact_files(
    registry: MlflowRegistry, mlflow_home: Path, tmp_path: Path, name: str
) -> None:
    model = f"healed-{name.lower()}"
    damaged = publish(registry, tmp_path, model)
    _overwrite(mlflow_home / "mlartifacts", registry, damaged, name)
    client_of(registry).delete_model_version(model, damaged.version)
    published = publish(registry, tmp_path / "again", model)
    (fetched := tmp_path / "fetched").mkdir()
    assert registry.fetch(published, fetched).digest() == damaged.manifest


def test_publish_after_deletion_of_intact_version_uses_its_model_again(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    deleted = publish(registry, tmp_path, "deleted")
    source = registry._version("deleted", deleted.version).source
    client_of(registry).delete_model_version("deleted", deleted.version)
    published = publish(registry, tmp_path / "again", "deleted")
    assert registry._version("deleted", published.version).source == source


def test_fetch_with_path_outside_folder_in_manifest_raises_digest_mismatch_error(
    registry: MlflowRegistry, mlflow_home: Path, tmp_path: Path
) -> None:
    record = publish(registry, tmp_path, "outside")
    evil = Manifest(files={"../../stolen": digest_bytes(b"")})
    for path in (mlflow_home / "mlartifacts" / "outside").rglob("manifest.json"):
        path.write_bytes(mlflow_folder.encode_manifest(evil))
    with pytest.raises(DigestMismatchError, match="not a valid name"):
        registry.fetch(replace(record, manifest=evil.digest()), tmp_path)


@pytest.mark.parametrize(
    "location", ["http://127.0.0.1:9/a", "ftp://127.0.0.1/a", "foo://a", "dbfs:/a"]
)
def test_fetch_of_version_copied_to_unsupported_storage_raises_refused_error(
    registry: MlflowRegistry, tmp_path: Path, location: str
) -> None:
    model = f"copied-{location[:3]}-{len(location)}"
    record = publish(registry, tmp_path, model)
    with registry._mlflow.session("") as client:
        original = client.get_model_version(model, record.version)
        experiment = client.create_experiment(model + "-elsewhere", artifact_location=location)
        logged = client.create_logged_model(experiment)
        with registry._mlflow.as_default():
            copy = client.create_model_version(
                model, source=f"models:/{logged.model_id}", tags=dict(original.tags)
            )
    copied = registry.version(model, str(copy.version))
    assert copied.manifest == record.manifest
    with pytest.raises(RefusedError, match="does not fetch files from the artifact location"):
        registry.fetch(copied, tmp_path)


def test_fetch_with_failing_storage_client_raises_service_unavailable_error(
    registry: MlflowRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = publish(registry, tmp_path, "broken-client")

    def fail(*_: object) -> NoReturn:
        raise ValueError("no credentials")

    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    monkeypatch.setattr(LocalArtifactRepository, "list_artifacts", fail)
    with pytest.raises(ServiceUnavailableError, match="ValueError: no credentials"):
        registry.fetch(record, tmp_path)


@pytest.mark.parametrize(
    ("error", "kind", "what"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/m"), StorageError, "the disk is full"),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)),
            ServiceUnavailableError,
            "the files of this version cannot be read now",
        ),
        (
            ValueError("no credentials"),
            ServiceUnavailableError,
            "the files of this version cannot be read now",
        ),
    ],
)
def test_fetch_with_failing_download_raises_error_with_cause(
    registry: MlflowRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[OnnxOpsError],
    what: str,
) -> None:
    """MLflow reports the failed files in the text of one error."""
    record = publish(registry, tmp_path, f"download-{type(error).__name__}")

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    monkeypatch.setattr(LocalArtifactRepository, "_download_file", fail)
    with pytest.raises(kind) as caught:
        registry.fetch(record, tmp_path)
    assert caught.value.what == what
    assert str(error).rpartition("] ")[2] in caught.value.why


def test_publish_with_missing_evidence_file_raises_storage_error(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="lost", seed="a")
    for path in release.variants[0].evidence.values():
        path.unlink()
    with pytest.raises(StorageError, match="No such file") as caught:
        registry.publish(release)
    assert caught.value.where == "model lost"


def test_version_of_foreign_model_raises_not_found_error(registry: MlflowRegistry) -> None:
    with registry._mlflow.session("") as client:
        client.create_registered_model("foreign")
        client.create_model_version("foreign", source="s3://bucket/model")
    with pytest.raises(NotFoundError, match="not registered by onnx-ops"):
        registry.version("foreign", "1")


def test_version_missing_in_registry_of_several_pages_names_newest(
    registry: MlflowRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in ("listed-1", "listed-2"):
        publish(registry, tmp_path, model)
    monkeypatch.setattr(mlflow_registry, "_PAGE", 1)
    with pytest.raises(NotFoundError, match="listed-2 has no version '7'") as caught:
        registry.version("listed-2", "7")
    assert caught.value.remedy == "Newest: 1"


def test_registry_with_unknown_or_invalid_name_raises_user_error(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    version = publish(registry, tmp_path, "spelled").version
    registry.set_alias("spelled", "champion-cpu-1t", version)
    with pytest.raises(NotFoundError, match="Did you mean 'spelled'"):
        registry.version("speled", "1")
    with pytest.raises(NotFoundError, match="'champion-cpu-1t' is an alias: name its version 1"):
        registry.version("spelled", "champion-cpu-1t")
    with pytest.raises(NotFoundError, match="Newest: 1"):
        registry.version("spelled", "7")
    with pytest.raises(UserError):
        registry.set_alias("spelled", "v1", version)
    with pytest.raises(UserError, match="not a valid name"):
        registry.aliases("it's' or name != '")


@pytest.mark.parametrize(
    ("safe", "names"),
    [
        (True, ["model.onnx", "model.onnx.data", "weights/layer 1.bin", ".hidden"]),
        (False, ["", "..", "/etc/passwd", "a/../b", "a//b", "a\\b", "C:evil", "a\x00", "b/"]),
    ],
)
def test_is_safe_name_accepts_only_relative_names_inside_folder(
    safe: bool, names: list[str]
) -> None:
    assert [name for name in names if mlflow_folder.is_safe_name(name) is not safe] == []


def test_publish_of_invalid_record_raises_error_and_creates_no_version(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    release = publication(tmp_path, model="unsent", seed="a")
    record = release.variants[0]
    path = record.files["model.onnx"]
    manifest = Manifest(files={"MLmodel": digest_file(path), "model.onnx": digest_file(path)})
    two = {"a.onnx": path, "b.onnx": path}
    both = Manifest(files={name: digest_file(path) for name in two})
    for wrong, error in (
        (
            replace(record, files={"MLmodel": path, "model.onnx": path}, manifest=manifest),
            UserError,
        ),
        (replace(record, files=two, manifest=both), UserError),
        (
            replace(record, manifest=Manifest(files={"model.onnx": digest_bytes(b"x")})),
            DigestMismatchError,
        ),
        (replace(record, manifest=Manifest(files={})), DigestMismatchError),
        (replace(record, evidence={"../a.json": path}), UserError),
    ):
        with pytest.raises(error):
            registry.publish(replace(release, variants=(wrong,)))
    with pytest.raises(NotFoundError):
        registry.version("unsent", "1")


@pytest.mark.parametrize("size", [4096, pytest.param((2 << 30) + 4096, marks=pytest.mark.nightly)])
def test_fetch_of_version_with_external_data_returns_all_files(
    registry: MlflowRegistry, mlflow_home: Path, tmp_path: Path, size: int
) -> None:
    """This includes weights that exceed the size of one protobuf message."""
    with (tmp_path / "weights").open("wb") as stream:
        stream.truncate(size)
    model = f"external-{size}"
    release = publication(tmp_path, model=model, seed="a")
    files = {**release.variants[0].files, "model.onnx.data": tmp_path / "weights"}
    manifest = Manifest(files={name: digest_file(path) for name, path in files.items()})
    version = published(registry, tmp_path, model, files=files, manifest=manifest, signed={})
    folder = tmp_path / "fetched"
    folder.mkdir()
    try:
        assert registry.fetch(registry.version(model, version), folder) == manifest
    finally:
        shutil.rmtree(folder)
        for copy in (mlflow_home / "mlartifacts" / model).rglob("model.onnx.data"):
            copy.unlink()


def test_publish_leaves_tracking_uri_of_user_unchanged(
    registry: MlflowRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    publish(registry, tmp_path, "polite")
    import mlflow

    assert mlflow.get_tracking_uri() == "http://mlflow.example:5000"


def test_publish_and_fetch_print_nothing(
    mlflow_home: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db")
    registry.fetch(publish(registry, tmp_path, "quiet"), tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize(
    "address", ["http://u:secret@{}", "postgresql+psycopg2://u:secret@{}/mlflow"]
)
def test_aliases_without_reachable_server_raise_service_unavailable_error(address: str) -> None:
    registry = MlflowRegistry(
        address.format(f"127.0.0.1:{free_port()}"), artifact_root="s3://bucket"
    )
    with pytest.raises(ServiceUnavailableError) as caught:
        registry.aliases("digits")
    assert "secret" not in str(caught.value)
    assert caught.value.remedy


def test_aliases_with_damaged_database_raise_service_unavailable_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database" * 1000)
    registry = MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(ServiceUnavailableError, match=r"could not process .*not a database"):
        registry.aliases("digits")


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "databricks", ""])
def test_registry_with_unsupported_tracking_uri_raises_user_error(uri: str) -> None:
    with pytest.raises(UserError, match="tracking URI cannot be used"):
        MlflowRegistry(uri)


def test_registry_shows_command_or_url_without_secrets_and_needs_artifact_root_for_postgresql(
    tmp_path: Path,
) -> None:
    registry = MlflowRegistry(f"sqlite:///{tmp_path}/my mlflow.db")
    command = registry.where("digits")
    assert f"'sqlite:///{tmp_path}/my mlflow.db'" in command
    assert f"--default-artifact-root {tmp_path}/mlartifacts --host 127.0.0.1 --port 5000" in command
    public = MlflowRegistry("http://u:secret@mlflow:5000", public_url="https://mlflow.example/")
    assert public.where("a b") == "https://mlflow.example/#/models/a%20b"
    assert MlflowConnection("http://u:secret@mlflow:5000").shown == "http://u:***@mlflow:5000"
    database = MlflowRegistry("postgresql://u:secret@db/mlflow", artifact_root="s3://bucket/files")
    assert "secret" not in database.where("digits")
    with pytest.raises(UserError, match="artifact root"):
        MlflowRegistry("postgresql://u:secret@db/mlflow")


def _entries() -> tuple[LedgerEntry, ...]:
    new = fileless_deployment("v2", model="digits")
    config = endpoint_config("digits", model="digits", target="cpu-1t")
    action = Action(
        kind=ActionKind.FIRST,
        state=build_split_state(None, new, 100),
        roles=Roles(stable=new),
        why="first deployment",
    )
    bodies: tuple[EntryBody, ...] = (
        EndpointBound(config=config, policy=RolloutPolicy()),
        Intent(action=action, holder="host:1", expires_at=1_800_000_060.0),
        ActionOutcome(of=2, ok=False, detail="the port is taken"),
        AliasesWritten(aliases={"champion-cpu-1t": "2", "challenger-cpu-1t": None}),
    )
    return tuple(
        LedgerEntry(endpoint="digits", sequence=n, at=1_800_000_000.0 + n, actor="ada", body=body)
        for n, body in enumerate(bodies, start=1)
    )


def test_registry_mirror_of_ledger_writes_one_run_per_entry(registry: MlflowRegistry) -> None:
    for entry in (*_entries(), *_entries()):
        registry.mirror(entry, "digits")
    client = client_of(registry)
    experiment = client.get_experiment_by_name("releases/digits")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert [(run.info.run_name, run.info.status) for run in runs] == [
        ("00001 endpoint-bound", "FINISHED"),
        ("00002 first-deployment", "FINISHED"),
        ("00003 failed: entry 2", "FAILED"),
        ("00004 aliases-written", "FINISHED"),
    ]
    assert runs[1].data.metrics == {"percent/v2": 100.0}
    assert runs[2].data.tags["why"] == "the port is taken"
    assert codec.loads(runs[1].data.tags["entry"].encode(), LedgerEntry) == _entries()[1]
    assert runs[1].info.start_time == 1_800_000_002_000


def test_registry_mirror_with_damaged_database_logs_problem_without_raising(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database" * 1000)
    MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db").mirror(_entries()[0], "digits")
    assert "not shown in MLflow" in caplog.text
