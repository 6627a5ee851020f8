"""A real server of the S3 protocol, for tests of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "registry"


@contextmanager
def s3() -> Iterator[str]:
    """Yield the URL of an S3 server with one empty bucket.

    Environment variables name the server until the context ends.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_S3_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
        try:
            yield endpoint
        finally:
            server.stop()
