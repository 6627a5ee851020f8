"""The provider of replicas over S3 and Azure Blob Storage.

Real servers implement the protocols of both.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops.adapters.files import FsspecObjects
from tests.adapters.registry_services import BUCKET, s3
from tests.adapters.replica_site import ReplicaSite, open_site
from tests.adapters.test_endpoint_replicas import ReplicaSuite
from tests.support.azurite import azurite

pytestmark = [pytest.mark.nightly, pytest.mark.services]
CONTAINER = "onnx-ops"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        azurite(tmp_path_factory.mktemp("npm"), CONTAINER) as opened,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", opened)
        yield f"abfs://{CONTAINER}"


def open_remote_site(root: str, folder: Path) -> Iterator[ReplicaSite]:
    place = f"{root}/{uuid.uuid4().hex}"
    site = open_site(folder, control=f"{place}/control", reports=f"{place}/reports")
    yield site
    site.stop_all()


class TestReplicasOnS3(ReplicaSuite):
    objects = FsspecObjects

    @pytest.fixture
    def site(self, bucket: str, tmp_path: Path) -> Iterator[ReplicaSite]:
        yield from open_remote_site(bucket, tmp_path)


class TestReplicasOnBlob(ReplicaSuite):
    objects = FsspecObjects

    @pytest.fixture
    def site(self, container: str, tmp_path: Path) -> Iterator[ReplicaSite]:
        yield from open_remote_site(container, tmp_path)
