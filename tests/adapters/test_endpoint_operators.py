"""Libraries of custom operators behind endpoints.

A library comes with its version, and no other library is ever loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.adapters.endpoints.azureml_plan import (
    build_azure_name,
    build_record_tags,
    read_record,
)
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.sagemaker_resources import pack_archive
from onnx_ops.attestation import TrustedKeys, sign_record
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.attestation import OverrideRecord
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.target import CustomOps
from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError, RefusedError
from onnx_ops.onnx_graph.compatibility import copy_libraries
from onnx_ops.protocol.server_process import SERVER_FILE, ServerRecord
from onnx_ops.serving.inference.integrity import ModelCopies, TrustPolicy
from onnx_ops.testing.endpoints import state_of
from onnx_ops.testing.fakes import FakeSigner
from tests.adapters.endpoint_site import make_config
from tests.support.external import write_external
from tests.support.operators import build_library, released, write_softsign
from tests.support.processes import running_process

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "custom_ops" / "softsign.c"
# The cache of packed models loads libraries too.
CONFIG = make_config("softsign", workers=2, prepack="1 B")
BODY = json.dumps({"inputs": {"x": [[-1.0, 0.0, 3.0]]}}).encode()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CustomOps:
    return build_library(SOURCE, tmp_path_factory.mktemp("library") / "libsoftsign.so")


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LocalEndpoints]:
    provider = LocalEndpoints(tmp_path / "endpoints")
    yield provider
    provider.stop(CONFIG)


@pytest.fixture
def doubling(tmp_path: Path, library: CustomOps) -> Deployment:
    return released(
        tmp_path / "models" / "1", {"cpu": (library,), "other": (library,)}, target="cpu"
    )


def ask(address: str) -> list[float]:
    request = urllib.request.Request(
        f"{address}/invocations", BODY, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        rows: list[list[float]] = json.load(answer)["predictions"]["y"]
    return rows[0]


def answers(provider: LocalEndpoints) -> list[float]:
    return ask(str(provider.address(CONFIG)))


def library_in(deployment: Deployment) -> Path:
    (name,) = deployment.custom_ops
    return Path(deployment.location) / name


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace the file by a new one of the same name.

    A process that has mapped the old file keeps that one.
    """
    changed = path.with_name("changed")
    changed.write_bytes(change(path.read_bytes()))
    changed.replace(path)


def test_endpoint_with_custom_operators_keeps_them_after_restart_and_rollback(
    provider: LocalEndpoints, tmp_path: Path, doubling: Deployment, library: CustomOps
) -> None:
    tripling = released(
        tmp_path / "models" / "2", {"cpu": (library,)}, target="cpu", scale=3.0, version="2"
    )
    provider.apply(CONFIG, state_of(doubling, v1=100), generation=1)
    assert answers(provider) == [-1.0, 0.0, 1.5]
    provider.apply(CONFIG, state_of(doubling, tripling, v1=0, v2=100), generation=2)
    assert answers(provider) == [-1.5, 0.0, 2.25]
    record = codec.loads(
        (tmp_path / "endpoints" / "softsign" / SERVER_FILE).read_bytes(), ServerRecord
    )
    os.kill(record.pid, signal.SIGKILL)
    while provider.observe(CONFIG) is not None:
        pass
    provider.apply(CONFIG, state_of(doubling, tripling, v1=100, v2=0), generation=3)
    assert answers(provider) == [-1.0, 0.0, 1.5]
    observed = provider.observe(CONFIG)
    assert observed is not None
    assert observed.deployments[0].custom_ops == doubling.custom_ops


@pytest.mark.parametrize("declared", [True, False])
def test_model_copies_fetch_accepts_only_declared_library(
    tmp_path: Path, doubling: Deployment, library: CustomOps, declared: bool
) -> None:
    signer = FakeSigner()
    override = OverrideRecord(
        model=doubling.model,
        release=doubling.release,
        variant=doubling.variant,
        version=doubling.version,
        manifest=doubling.manifest,
        target="cpu",
        custom_ops=(library.digest,) if declared else (),
        reason="sure",
        by="alice",
        at="2026-01-01T00:00:00Z",
    )
    deployment = replace(doubling, authority=sign_record(override, signer).envelope)
    trust = TrustPolicy(TrustedKeys((), encoded=signer.trusted_keys), tmp_path)
    with (
        contextlib.nullcontext()
        if declared
        else pytest.raises(RefusedError, match="target cpu does not declare the library")
    ):
        ModelCopies(tmp_path / "copies", trust).fetch(deployment)


def test_endpoint_apply_with_tampered_operator_library_keeps_stable_version(
    provider: LocalEndpoints, tmp_path: Path, doubling: Deployment, library: CustomOps
) -> None:
    provider.apply(CONFIG, state_of(doubling, v1=100), generation=1)
    forged = released(
        tmp_path / "models" / "2", {"cpu": (library,)}, target="cpu", scale=3.0, version="2"
    )
    rewrite(library_in(forged), lambda data: data + b"\0")
    with pytest.raises(DigestMismatchError, match="the manifest of v2 is"):
        provider.apply(CONFIG, state_of(doubling, forged, v1=0, v2=100), generation=2)
    assert answers(provider) == [-1.0, 0.0, 1.5]


def test_endpoint_restart_with_tampered_operator_library_loads_verified_copy(
    provider: LocalEndpoints, doubling: Deployment
) -> None:
    state = state_of(doubling, v1=100)
    provider.apply(CONFIG, state, generation=1)
    provider.stop(CONFIG)
    rewrite(library_in(doubling), lambda data: data[:-1] + b"\1")
    provider.apply(CONFIG, state, generation=2)
    assert answers(provider) == [-1.0, 0.0, 1.5]


def test_endpoint_apply_with_wrong_operator_library_list_raises_error(
    provider: LocalEndpoints, doubling: Deployment, library: CustomOps
) -> None:
    strange = replace(doubling, custom_ops=(library.path,))
    with pytest.raises(DigestMismatchError, match="not among the files of v1"):
        provider.apply(CONFIG, state_of(strange, v1=100), generation=1)
    without = replace(doubling, custom_ops=())
    with pytest.raises(InfrastructureError, match="acme"):
        provider.apply(CONFIG, state_of(without, v1=100), generation=1)


def test_endpoint_apply_with_invalid_operator_library_raises_error(
    provider: LocalEndpoints, tmp_path: Path
) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    digest = digest_bytes(text.read_bytes())
    broken = CustomOps(path=str(text), digest=digest, domains=("acme.ops",))
    deployment = released(tmp_path / "models" / "1", {"cpu": (broken,)}, target="cpu")
    with pytest.raises(InfrastructureError, match="cannot load the model"):
        provider.apply(CONFIG, state_of(deployment, v1=100), generation=1)


def test_cloud_container_with_operator_library_verifies_and_loads_it(
    tmp_path: Path, doubling: Deployment
) -> None:
    """Both clouds give the container the same folder.

    Here SageMaker's archive makes it.
    """
    with (tmp_path / "model.tar.gz").open("wb") as archive:
        pack_archive(doubling, archive)
    with tarfile.open(tmp_path / "model.tar.gz") as packed:
        assert doubling.custom_ops[0] in {name.removeprefix("model/") for name in packed.getnames()}
        packed.extractall(tmp_path / "ml", filter="data")
    port_file = tmp_path / "state" / SERVER_FILE
    environment = {
        "PATH": os.environ["PATH"],
        "ONNX_OPS_HOST": "127.0.0.1",
        "ONNX_OPS_STATE_DIR": str(port_file.parent),
    }
    command = [sys.executable, "-P", "-m", "onnx_ops.serving.container", "serve"]
    environment |= {"ONNX_OPS_MODEL_DIR": str(tmp_path / "ml"), "ONNX_OPS_PORT": "0"}
    with running_process(command, tmp_path / "log", port_file.exists, env=environment):
        port = codec.loads(port_file.read_bytes(), ServerRecord).port
        assert ask(f"http://127.0.0.1:{port}") == [-1.0, 0.0, 1.5]
    rewrite(
        next((tmp_path / "ml" / "model" / "custom_ops" / "cpu").iterdir()),
        lambda data: data + b"\0",
    )
    # The previous state folder has an intact copy of the files, so a new folder is used.
    environment["ONNX_OPS_STATE_DIR"] = str(tmp_path / "new-state")
    refused: Any = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == DigestMismatchError.exit_code
    assert "the manifest of v1 is" in refused.stderr


def test_read_record_of_deployment_with_operators_restores_library_names(
    doubling: Deployment,
) -> None:
    assert read_record(build_record_tags(doubling)) == replace(doubling, location="")


def test_dumps_of_deployment_without_operators_omits_custom_ops(doubling: Deployment) -> None:
    plain = replace(doubling, custom_ops=())
    assert "custom_ops" not in codec.dumps(plain).decode()
    assert codec.loads(codec.dumps(plain), Deployment) == plain


def test_removal_of_operators_from_deployment_changes_azure_name_and_ends_equivalence(
    doubling: Deployment,
) -> None:
    plain = replace(doubling, custom_ops=())
    assert build_azure_name(plain) != build_azure_name(doubling)
    assert not state_of(plain, v1=100).is_equivalent(state_of(doubling, v1=100))


def test_copy_libraries_with_changed_missing_or_unused_library_copies_nothing(
    tmp_path: Path, library: CustomOps
) -> None:
    model = tmp_path / "model.onnx"
    write_softsign(model)
    with pytest.raises(DigestMismatchError, match="target cpu"):
        copy_libraries(model, {"cpu": (replace(library, digest=digest_bytes(b"")),)})
    with pytest.raises(NotFoundError):
        copy_libraries(model, {"cpu": (replace(library, path="/none.so"),)})
    copy_libraries(model, {"cpu": (replace(library, domains=("another.domain",)),)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_copy_libraries_of_model_with_weights_in_library_folder_raises_refused_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "custom_ops").mkdir()
    write_external(tmp_path / "weights.onnx", "custom_ops/cpu.so")
    with pytest.raises(RefusedError, match="loaded as libraries"):
        copy_libraries(tmp_path / "weights.onnx", {})
