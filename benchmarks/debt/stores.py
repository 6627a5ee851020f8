"""Stores of replicas, as servers on this machine.

A store is a folder, S3 or Azure Blob Storage.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.adapters.registry_services import BUCKET, s3
from tests.support.azurite import azurite

STORES = ("folder", "s3", "blob")


@contextmanager
def open_store(kind: str) -> Iterator[tuple[str, int, Callable[[int], dict[str, str]]]]:
    """Open a store, and yield how processes reach it.

    Yields the root of the store, its port (0: none), and a function. For the port of a proxy, the
    function returns the variables of a process that goes through the proxy.
    """
    if kind == "folder":
        yield "", 0, lambda _: {}
    elif kind == "s3":
        with s3() as endpoint:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            port = int(endpoint.rpartition(":")[2])
            yield (
                f"s3://{BUCKET}",
                port,
                lambda proxy: _list_aws({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy}"}),
            )
    else:
        with tempfile.TemporaryDirectory() as packages, azurite(Path(packages), "places") as opened:
            os.environ["AZURE_STORAGE_CONNECTION_STRING"] = opened
            port = int(opened.rpartition("127.0.0.1:")[2].partition("/")[0])
            yield (
                "abfs://places",
                port,
                lambda proxy: {
                    "AZURE_STORAGE_CONNECTION_STRING": opened.replace(f":{port}/", f":{proxy}/")
                },
            )


def _list_aws(changed: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of AWS, with changes.

    A process of a fork server lacks them if the fork server is older than the store.
    """
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")} | dict(
        changed
    )
