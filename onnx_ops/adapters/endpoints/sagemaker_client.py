"""Requests to AWS for one SageMaker endpoint, and the fence of its generation.

SageMaker has no conditional update, and its reads can be stale. S3 has conditional writes and
consistent reads. So a generation is claimed in S3 before any change, by an object with the whole
state. The claims are read again before every change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onnx_ops import codec
from onnx_ops.adapters.aws import (
    Clients,
    create_once,
    get_error_code,
    get_error_message,
    translate_errors,
)
from onnx_ops.adapters.endpoints.sagemaker_layout import ENDPOINT_TAG
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings
from onnx_ops.adapters.retry import attempts, converge
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError, ServiceUnavailableError

T = TypeVar("T")

MISSING_OBJECT = ("404", "NoSuchKey", "NotFound", "NoSuchBucket")
"""Error codes of S3 for an object that does not exist."""
NOT_FOUND = ("could not find",)
"""SageMaker's message, in lower case, for a resource that does not exist."""
IN_PROGRESS = ("in-progress", "in progress")
"""SageMaker's messages, in lower case, for a resource that is being changed."""


class SageMakerClient:
    """Requests about one endpoint."""

    def __init__(self, clients: Clients, endpoint: str, settings: SageMakerSettings) -> None:
        self.clients = clients
        self.endpoint = endpoint
        self.settings = settings
        self.folder = f"{settings.prefix.strip('/')}/{endpoint}"
        self._status = "not there"

    def call(
        self,
        service: str,
        operation: str,
        *,
        ignored_codes: tuple[str, ...] = (),
        ignored_messages: tuple[str, ...] = (),
        where: str = "",
        **request: Any,
    ) -> Any:
        """Make one request; return None if it fails with an ignored code or message."""
        from botocore.exceptions import ClientError

        with translate_errors(where or self.endpoint):
            try:
                return getattr(self.clients(service), operation)(**request)
            except ClientError as error:
                message = get_error_message(error).lower()
                if get_error_code(error) in ignored_codes or any(
                    text in message for text in ignored_messages
                ):
                    return None
                raise

    def list_all(self, service: str, operation: str, items: str, **request: Any) -> list[Any]:
        """Return the items of all pages."""
        with translate_errors(self.endpoint):
            pages = self.clients(service).get_paginator(operation).paginate(**request)
            return [item for page in pages for item in page.get(items, ())]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of the bucket with this prefix, sorted."""
        objects = self.list_all(
            "s3", "list_objects_v2", "Contents", Bucket=self.settings.bucket, Prefix=prefix
        )
        return sorted(item["Key"] for item in objects)

    def describe(self) -> dict[str, Any] | None:
        """Return SageMaker's description, which can be stale; None without an endpoint."""
        description: dict[str, Any] | None = self.call(
            "sagemaker", "describe_endpoint", ignored_messages=NOT_FOUND, EndpointName=self.endpoint
        )
        self._status = "not there" if description is None else str(description["EndpointStatus"])
        return description

    def describe_config(self, name: str) -> Mapping[str, Any]:
        """Return SageMaker's description of an endpoint config."""
        return dict(self.call("sagemaker", "describe_endpoint_config", EndpointConfigName=name))

    def describe_model(self, name: str) -> Mapping[str, Any]:
        """Return SageMaker's description of a model."""
        return dict(self.call("sagemaker", "describe_model", ModelName=name))

    def is_ours(self, description: Mapping[str, Any]) -> bool:
        """Return whether the described endpoint has the tag of onnx-ops."""
        return self.tag_of(description["EndpointArn"]) == self.endpoint

    def tag_of(self, arn: str) -> str | None:
        """Return the endpoint that a resource's tag names; None without the tag."""
        tags = {
            tag["Key"]: tag["Value"]
            for tag in self.list_all("sagemaker", "list_tags", "Tags", ResourceArn=arn)
        }
        return tags.get(ENDPOINT_TAG)

    def converge(self, step: Callable[[], T | None], what: str) -> T:
        """Repeat a step until it returns a result.

        `what` describes the missing result in the time-out error.
        """

        def timeout() -> ServiceUnavailableError:
            remedy = "The change continues in AWS; run the command again, or increase `timeout`."
            return ServiceUnavailableError(
                what, where=self.endpoint, why=f"it is {self._status}", remedy=remedy
            )

        return converge(step, attempts(self.settings.timeout, self.settings.poll_interval), timeout)


class GenerationFence:
    """The claims of an endpoint's generations, and records of guarded updates.

    For a guarded endpoint, one record contains the config that the endpoint reached last. Each
    update that was started under alarms has a record of the alarms' states before the update.
    """

    def __init__(self, client: SageMakerClient) -> None:
        self._client = client
        self._claims = f"{client.folder}/claims/"
        self._reached = f"{client.folder}/guard/standing"
        self._updates = f"{client.folder}/guard/updates/"

    def latest(self) -> EndpointState | None:
        """Return the state that the highest claimed generation contains."""
        keys = self._client.keys(self._claims)
        if not keys:
            return None
        body = self._read(keys[-1], ignored_codes=()) or b""
        return codec.loads(
            body, EndpointState, where=f"s3://{self._client.settings.bucket}/{keys[-1]}"
        )

    def take(self, state: EndpointState) -> None:
        """Claim the state's generation.

        Raises:
            ConflictError: a later generation is claimed, or this generation for another state.
        """
        self.check(state.generation)
        self._create(self._key(state.generation), codec.dumps(state))
        claimed = self.latest()
        if (
            claimed is None
            or claimed.generation != state.generation
            or not claimed.is_equivalent(state)
        ):
            raise self._conflict(state.generation)

    def check(self, generation: int) -> None:
        """Raise ConflictError if a later generation is claimed.

        A claim that is made after this check is detected when the endpoint is observed.
        """
        keys = self._client.keys(self._claims)
        if keys and keys[-1] > self._key(generation):
            raise self._conflict(generation)

    def delete_older(self, generation: int) -> None:
        """Delete the claims of generations before this generation."""
        self._delete(
            [key for key in self._client.keys(self._claims) if key < self._key(generation)]
        )

    def record_reached(self, config_name: str) -> None:
        """Record that a guarded endpoint has reached a config."""
        bucket, body = self._client.settings.bucket, config_name.encode()
        self._client.call("s3", "put_object", Bucket=bucket, Key=self._reached, Body=body)
        self.end_update(config_name)

    def has_reached(self, config_name: str) -> bool:
        """Return whether this is the config that a guarded endpoint reached last."""
        return self._read(self._reached) == config_name.encode()

    def begin_update(self, config_name: str, alarms: Mapping[str, str]) -> None:
        """Record the states of alarms before a guarded update.

        If the update was already started, its first record is not replaced.
        """
        self._create(f"{self._updates}{config_name}", json.dumps(alarms).encode())

    def alarms_before(self, config_name: str) -> Mapping[str, str] | None:
        """Return the alarms' states before an update; None if no update is in progress."""
        body = self._read(f"{self._updates}{config_name}")
        return None if body is None else dict(json.loads(body))

    def end_update(self, config_name: str) -> None:
        """Delete the record of an update."""
        self._delete([f"{self._updates}{config_name}"])

    def delete(self) -> None:
        """Delete all records of a deleted endpoint."""
        self._delete(
            [self._reached, *self._client.keys(self._updates), *self._client.keys(self._claims)]
        )

    def _read(self, key: str, *, ignored_codes: tuple[str, ...] = MISSING_OBJECT) -> bytes | None:
        bucket = self._client.settings.bucket
        answer = self._client.call(
            "s3", "get_object", ignored_codes=ignored_codes, Bucket=bucket, Key=key
        )
        with translate_errors(self._client.endpoint):
            body: bytes | None = None if answer is None else answer["Body"].read()
        return body

    def _create(self, key: str, data: bytes) -> None:
        s3, bucket = self._client.clients("s3"), self._client.settings.bucket
        with translate_errors(self._client.endpoint):
            create_once(lambda: s3.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*"))

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._client.call("s3", "delete_object", Bucket=self._client.settings.bucket, Key=key)

    def _key(self, generation: int) -> str:
        return f"{self._claims}{generation:016d}.json"

    def _conflict(self, generation: int) -> ConflictError:
        return ConflictError(
            f"a later generation than {generation} is already claimed",
            where=self._client.endpoint,
            remedy="Another client is changing this endpoint: see `onnx-ops history`.",
        )
