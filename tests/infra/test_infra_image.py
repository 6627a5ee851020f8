"""The image without a container engine.

Its files are copied, its installation is run, and its entrypoint is started as each cloud does.

The instructions are read from the Dockerfile. That an engine builds it is not shown here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.protocol.server_process import DEPLOYMENT_FILE, MODEL_FOLDER
from onnx_ops.testing.endpoints import scaling_deployment
from tests.infra.infra_tools import INFRA, ROOT, tool
from tests.support.ports import free_port
from tests.support.processes import running_process

pytestmark = pytest.mark.services

LINES = (INFRA / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
IN_THE_IMAGE = "/opt/onnx-ops"
BODY = json.dumps({"inputs": {"x": [[1.0, 2.0]]}}).encode()
TIMEOUT_S = 60.0
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u9
Description: GNU C Library
 Shared libraries.

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
NEVER_INSTALLED = (
    "pip",
    "mlflow",
    "prefect",
    "fastapi",
    "sqlalchemy",
    "boto3",
    "azure.ai",
    "sklearn",
)
FOLLOWER_CLIENTS = ("s3fs", "adlfs")
"""Clients of object stores, which a container that follows tables needs."""
NEVER_LOADED = ("pydantic", "onnx", "scipy", "cryptography", "rich", "typer", "httpx", "fsspec")


def instruction(name: str) -> list[str]:
    """Return the exec form of the Dockerfile's last instruction of this name."""
    line = [line for line in LINES if line.startswith(f"{name} ")][-1]
    words: list[str] = json.loads(line.removeprefix(f"{name} "))
    return words


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that is /opt/onnx-ops in the image.

    The installation takes long, so the tests that use it are nightly.
    """
    source, venv = tmp_path_factory.mktemp("src"), tmp_path_factory.mktemp("image") / "onnx-ops"
    first_stage = LINES[: next(i for i, line in enumerate(LINES) if line.endswith(" AS platform"))]
    for copied in [line.split()[1:] for line in first_stage if line.startswith("COPY ")]:
        for name in copied[:-1]:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, source / copied[-1], ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / name, source / copied[-1])
    places = (source, source / "constraints.txt", venv, venv.parent / "reports")
    command = [str(source / "infra" / "docker" / "install.sh"), *map(str, places)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return venv


@pytest.fixture(params=["here", pytest.param("installed", marks=pytest.mark.nightly)])
def image(request: pytest.FixtureRequest) -> Path:
    """Return a folder with the server's packages.

    It is this environment, or the one that the image's installation makes.
    """
    if request.param == "here":
        return Path(sys.prefix)
    found: Path = request.getfixturevalue("installed")
    return found


def files_below(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def healthy(image: Path, environ: Mapping[str, str]) -> bool:
    python, _ = instruction("HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD")
    command = [python.replace(IN_THE_IMAGE, str(image)), str(INFRA / "docker" / "healthcheck.py")]
    return (
        subprocess.run(
            command, env=environ, capture_output=True, timeout=30, check=False
        ).returncode
        == 0
    )


@contextmanager
def running(image: Path, folder: Path, given: Mapping[str, str]) -> Iterator[None]:
    """Run the entrypoint with the variables of the image and of the cloud.

    It can write to one folder.
    """
    scratch = folder / "tmp"
    scratch.mkdir()
    environ = {
        "PATH": f"{image}/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(scratch),
        "ONNX_OPS_HOST": "127.0.0.1",
        **given,
    }
    command = [word.replace(IN_THE_IMAGE, str(image)) for word in instruction("ENTRYPOINT")]
    command += instruction("CMD")
    log, is_ready = folder / "log", partial(healthy, image, environ)
    with running_process(
        command, log, is_ready, env=environ, cwd="/", start_new_session=True
    ) as process:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, log.read_text(encoding="utf-8")
        assert not healthy(image, environ)


def ask(port: str) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", BODY, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def released(folder: Path) -> None:
    deployment = scaling_deployment(folder / MODEL_FOLDER, name="v7", version="7", scale=2.0)
    (folder / DEPLOYMENT_FILE).write_bytes(codec.dumps(deployment))


@pytest.mark.parametrize(
    ("below", "port_name", "folder_name"),
    [
        ("ml/model", "SAGEMAKER_BIND_TO_PORT", "ONNX_OPS_MODEL_DIR"),
        ("azureml-models/digits/7", "ONNX_OPS_PORT", "AZUREML_MODEL_DIR"),
        ("anywhere", "ONNX_OPS_PORT", "ONNX_OPS_MODEL_DIR"),
    ],
    ids=["sagemaker", "azureml", "plain"],
)
def test_image_entrypoint_with_cloud_or_plain_environment_serves_model(
    image: Path, tmp_path: Path, below: str, port_name: str, folder_name: str
) -> None:
    released(tmp_path / "mounted" / below)
    mounted = tmp_path / "mounted" / (below if folder_name == "ONNX_OPS_MODEL_DIR" else "")
    kept = (ROOT / "onnx_ops" if image == Path(sys.prefix) else image, tmp_path / "mounted")
    before = [files_below(folder) for folder in kept]
    port = str(free_port())
    with running(image, tmp_path, {port_name: port, folder_name: str(mounted)}):
        assert ask(port)["predictions"]["y"] == [[2.0, 4.0]]
    assert [files_below(folder) for folder in kept] == before, "all that is written is in TMPDIR"


@pytest.mark.nightly
def test_serving_image_omits_platform_packages_and_loads_no_heavy_module(installed: Path) -> None:
    code = (
        "import importlib.util, sys, onnx_ops.serving.container, onnx_ops.serving.workers.worker;"
        f"print([name for name in {NEVER_INSTALLED!r} if importlib.util.find_spec(name)],"
        f"[name for name in {NEVER_LOADED!r} if name in sys.modules],"
        f"[name for name in {FOLLOWER_CLIENTS!r} if not importlib.util.find_spec(name)])"
    )
    done = subprocess.run(
        [f"{installed}/bin/python", "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert done.stdout.strip() == "[] [] []", done.stderr


def test_base_image_is_pinned_by_digest() -> None:
    (base,) = [
        line.removeprefix("ARG PYTHON_IMAGE=")
        for line in LINES
        if line.startswith("ARG PYTHON_IMAGE=")
    ]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    stages = [line.split()[1] for line in LINES if line.startswith("FROM ")]
    assert stages
    assert set(stages) == {"${PYTHON_IMAGE}"}


def complete(bill: Path, status: str, *reports: Path) -> Any:
    """Return the bill of materials after the image's script has completed it."""
    listed = bill.with_name("status")
    listed.write_text(status, encoding="utf-8")
    script = INFRA / "docker" / "bill.py"
    command = [sys.executable, *map(str, (script, bill, listed, "python:3.11@sha256:1", *reports))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_bill_of_materials_includes_system_packages_and_requires_hashes(tmp_path: Path) -> None:
    bill, report = tmp_path / "bill.json", tmp_path / "report.json"
    components = [{"type": "library", "name": "typing_extensions", "version": "4.13"}]
    bill.write_text(json.dumps({"metadata": {}, "components": components}), encoding="utf-8")
    archive = {"archive_info": {"hashes": {"sha256": "ab" * 32}}}
    installed = {"metadata": {"name": "typing-extensions"}, "download_info": archive}
    report.write_text(json.dumps({"install": [installed]}), encoding="utf-8")
    found = complete(bill, STATUS, report)
    python, system = found["components"]
    assert python["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert system["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64"
    assert found["metadata"]["properties"] == [
        {"name": "onnx-ops:base-image", "value": "python:3.11@sha256:1"}
    ]
    report.write_text('{"install": []}', encoding="utf-8")
    assert "KeyError: 'typing-extensions'" in complete(bill, STATUS, report)


@pytest.mark.nightly
def test_bill_of_materials_lists_all_installed_packages(installed: Path, tmp_path: Path) -> None:
    done = tool(
        "cyclonedx-py",
        "environment",
        "--output-reproducible",
        "--output-file",
        tmp_path / "sbom.json",
        installed,
    )
    assert done.returncode == 0, done.stderr
    reports = sorted((installed.parent / "reports").glob("*.json"))
    found = complete(tmp_path / "sbom.json", STATUS, *reports)["components"]
    components = [one for one in found if not one.get("purl", "").startswith("pkg:deb/")]
    assert len(components) == len(found) - 1
    assert all(len(one["hashes"][0]["content"]) == 64 for one in components)
    distributions = {
        path.name.partition("-")[0].lower()
        for path in installed.glob("lib/*/site-packages/*.dist-info")
    }
    assert {one["name"].replace("-", "_").lower() for one in components} == distributions
    assert {"onnxruntime", "onnx_ops", "httptools"} <= distributions
