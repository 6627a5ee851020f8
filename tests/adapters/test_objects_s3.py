"""The store and the ledger on S3, by s3fs and a real server of the S3 protocol."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.adapters.registry_services import BUCKET, s3
from tests.support.objects import ObjectLedgerSuite, RemoteStoreSuite

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield f"s3://{BUCKET}"


@pytest.fixture
def place(bucket: str) -> str:
    return f"{bucket}/{uuid.uuid4().hex}"


@pytest.mark.sweep
class TestStoreOnS3(RemoteStoreSuite):
    pass


@pytest.mark.sweep
class TestLedgerOnS3(ObjectLedgerSuite):
    """The ledger on Moto, which answers `If-None-Match: *` correctly.

    Moto checks and writes in two steps, so that two concurrent writers can both succeed there. S3
    is documented to do both in one step, which was not tried here.
    """

    processes = False
