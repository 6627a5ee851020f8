"""Azurite, the emulator of Azure Blob Storage: an installed one, or one from npm."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from onnx_ops.adapters.isolation.environments import NpmPackages
from tests.support.ports import free_port

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Key of the account that every Azurite has; it gives access to nothing else."""


@contextmanager
def azurite(packages: Path, container: str) -> Iterator[str]:
    """Run Azurite with one empty container; yield its connection string.

    `packages` is a folder for npm.
    """
    from azure.storage.blob import BlobServiceClient

    found = shutil.which("azurite-blob")
    program = (
        found
        or NpmPackages(folder=packages).installed(("azurite@3.37.0",))
        / "node_modules/.bin/azurite-blob"
    )
    port = free_port()
    options = (
        "--silent",
        "--skipApiVersionCheck",
        "--blobPort",
        str(port),
        "--inMemoryPersistence",
    )
    with subprocess.Popen(
        [program, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Tests that end a process group must not end Azurite.
        start_new_session=True,
    ) as process:
        # fsspec caches clients by location, with the connection string of an earlier server.
        fsspec.get_filesystem_class("abfs").clear_instance_cache()
        try:
            account = f"AccountName={ACCOUNT};AccountKey={KEY}"
            opened = f"DefaultEndpointsProtocol=http;{account};BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT}"
            with BlobServiceClient.from_connection_string(
                opened, retry_total=20, retry_backoff_factor=0.1
            ) as client:
                client.create_container(container)  # The client retries until the server answers.
            yield opened
            if (code := process.poll()) is not None:
                raise RuntimeError(f"Azurite ended with exit code {code} during the tests")
        finally:
            process.terminate()
