"""The MLflow registry on production services: PostgreSQL and S3.

PostgreSQL stores the records, S3 the files.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from onnx_ops.domain.release import VersionRecord
from onnx_ops.ports.release import Registry
from onnx_ops.testing.registries import RegistrySuite
from tests.adapters.registry_services import BUCKET, s3
from tests.support.postgres import postgres


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as endpoint:
        yield endpoint


@pytest.mark.sweep
@pytest.mark.services
class TestOnPostgresAndS3(RegistrySuite):
    @pytest.fixture
    def registry(self, database: str, bucket: str) -> MlflowRegistry:
        self.endpoint = bucket
        return MlflowRegistry(database, artifact_root=f"s3://{BUCKET}/models")

    def tamper(self, registry: Registry, record: VersionRecord, name: str) -> None:
        import boto3

        assert isinstance(registry, MlflowRegistry)
        model_id = str(registry._version(record.model, record.version).source).removeprefix(
            "models:/"
        )
        client = boto3.client("s3", endpoint_url=self.endpoint)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        keys = [entry["Key"] for page in pages for entry in page["Contents"]]
        (key,) = [key for key in keys if key.endswith(f"{model_id}/artifacts/{name}")]
        content = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        client.put_object(Bucket=BUCKET, Key=key, Body=content + b" ")
