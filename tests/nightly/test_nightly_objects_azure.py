"""The store and the ledger on Azure Blob, by adlfs and Azurite, which npm brings."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops.adapters.isolation.environments import NpmPackages
from tests.support.objects import RemoteLedgerSuite, RemoteStoreSuite
from tests.support.ports import free_port

AZURITE = "azurite@3.37.0"
CONTAINER = "onnx-ops"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has; it opens nothing else."""

pytestmark = [
    pytest.mark.nightly,
    # aiohttp would rather have a file than bytes; the SDK gives it bytes.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from azure.storage.blob import BlobServiceClient

    found = shutil.which("azurite-blob")
    packages = NpmPackages(folder=tmp_path_factory.mktemp("npm"))
    program = Path(found) if found else packages.installed([AZURITE]) / "node_modules" / ".bin" / "azurite-blob"
    port = free_port()
    options = ("--silent", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence")
    with subprocess.Popen([program, *options, "--skipApiVersionCheck"], stdout=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}/{ACCOUNT}"
            account = f"AccountName={ACCOUNT};AccountKey={KEY}"
            opened = f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={address}"
            _wait_for(f"{address}?comp=list", process)
            with BlobServiceClient.from_connection_string(opened) as client:
                client.create_container(CONTAINER)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AZURE_STORAGE_CONNECTION_STRING", opened)
                yield f"abfs://{CONTAINER}"
        finally:
            process.terminate()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert process.poll() is None
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except urllib.error.HTTPError as refused:  # it is there, and wants to know who asks
            refused.close()
            return
        except OSError:
            subprocess.run(["sleep", "0.2"], check=True)
    pytest.fail("Azurite does not answer")


@pytest.fixture
def place(container: str) -> str:
    return f"{container}/{uuid.uuid4().hex}"


class TestStoreOnBlob(RemoteStoreSuite):
    pass


class TestLedgerOnBlob(RemoteLedgerSuite):
    pass
