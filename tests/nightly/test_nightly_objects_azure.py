"""The store and the ledger on Azure Blob, by adlfs and Azurite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.azurite import azurite
from tests.support.objects import ObjectLedgerSuite, RemoteStoreSuite

pytestmark = [
    pytest.mark.nightly,
    # aiohttp warns about bytes and prefers a file, but the SDK passes bytes.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        azurite(tmp_path_factory.mktemp("npm"), "onnx-ops") as opened,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", opened)
        yield "abfs://onnx-ops"


@pytest.fixture
def place(container: str) -> str:
    return f"{container}/{uuid.uuid4().hex}"


class TestStoreOnBlob(RemoteStoreSuite):
    pass


class TestLedgerOnBlob(ObjectLedgerSuite):
    pass
