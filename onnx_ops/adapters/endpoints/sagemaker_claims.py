"""Who may move an endpoint: one small object in S3 for each generation, created only if absent.

SageMaker has no conditional update, and its reads are behind. S3's are not. So a generation is claimed there before
anything is touched, the claim holds the whole state, and before every change the claims are looked at again. Between
such a look and the change lies the time of one request: what slips through there is seen by the next `observe`.

Beside the claims of a guarded endpoint lie which config stands there, and for each update that was begun under alarms
the state that they had before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.aws import code_of, create_once, translated
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError

_MISSING = frozenset({"404", "NoSuchKey", "NotFound", "NoSuchBucket"})


class Claims:
    """The claims of one endpoint.

    Args:
        s3: a boto3 client.
        folder: what the endpoint's keys begin with.
    """

    def __init__(self, s3: Any, bucket: str, folder: str, *, endpoint: str) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._claims = f"{folder}/claims/"
        self._standing = f"{folder}/guard/standing"
        self._updates = f"{folder}/guard/updates/"
        self._endpoint = endpoint

    def latest(self) -> EndpointState | None:
        """What the highest generation wants."""
        keys = self._keys()
        if not keys:
            return None
        with translated(self._endpoint):
            body = self._s3.get_object(Bucket=self._bucket, Key=keys[-1])["Body"].read()
        return codec.loads(body, EndpointState, where=f"s3://{self._bucket}/{keys[-1]}")

    def take(self, state: EndpointState) -> None:
        """Claim the state's generation.

        Raises:
            ConflictError: a later one is claimed, or this one for another state.
        """
        self.hold(state.generation)
        self._create(self._key(state.generation), codec.dumps(state))
        claimed = self.latest()
        if claimed is None or claimed.generation != state.generation or not claimed.same_as(state):
            raise self._conflict(state.generation)

    def hold(self, generation: int) -> None:
        """Raises ConflictError if a later generation is claimed."""
        keys = self._keys()
        if keys and keys[-1] > self._key(generation):
            raise self._conflict(generation)

    def settle(self, generation: int) -> None:
        """Forget the claims before this one."""
        self._delete([key for key in self._keys() if key < self._key(generation)])

    def stand(self, config_name: str) -> None:
        """Remember that a guarded endpoint has arrived at a config."""
        with translated(self._endpoint):
            self._s3.put_object(Bucket=self._bucket, Key=self._standing, Body=config_name.encode())
        self.end_update(config_name)

    def stands(self, config_name: str) -> bool:
        """Return whether this is the config that a guarded endpoint arrived at last."""
        return self._read(self._standing) == config_name.encode()

    def begin_update(self, config_name: str, alarms: Mapping[str, str]) -> None:
        """Remember the alarms' states before a guarded update. Those of an update that was begun before stay."""
        self._create(f"{self._updates}{config_name}", json.dumps(alarms).encode())

    def begun_update(self, config_name: str) -> Mapping[str, str] | None:
        """Return the alarms' states before the update to a config; None if none was begun, or it has ended."""
        body = self._read(f"{self._updates}{config_name}")
        return None if body is None else dict(json.loads(body))

    def end_update(self, config_name: str) -> None:
        self._delete([f"{self._updates}{config_name}"])

    def forget(self) -> None:
        """Everything about an endpoint that is gone."""
        self._delete([self._standing, *self._keys(self._updates), *self._keys()])

    def _read(self, key: str) -> bytes | None:
        from botocore.exceptions import ClientError

        with translated(self._endpoint):
            try:
                body: bytes = self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read()
            except ClientError as error:
                if code_of(error) in _MISSING:
                    return None
                raise
        return body

    def _create(self, key: str, data: bytes) -> None:
        with translated(self._endpoint):
            create_once(lambda: self._s3.put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*"))

    def _keys(self, prefix: str = "") -> list[str]:
        with translated(self._endpoint):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix or self._claims
            )
            return sorted(found["Key"] for page in pages for found in page.get("Contents", ()))

    def _delete(self, keys: list[str]) -> None:
        with translated(self._endpoint):
            for key in keys:
                self._s3.delete_object(Bucket=self._bucket, Key=key)

    def _key(self, generation: int) -> str:
        return f"{self._claims}{generation:016d}.json"

    def _conflict(self, generation: int) -> ConflictError:
        return ConflictError(
            f"a later generation than {generation} was begun",
            where=self._endpoint,
            remedy="Somebody else acts on this endpoint: see `onnx-ops history`.",
        )
