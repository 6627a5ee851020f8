"""Requests to AWS for one SageMaker endpoint, and the fence of its generation.

SageMaker has no conditional update, and its reads can be stale. S3 has conditional writes and
consistent reads. So a generation is claimed in S3 before the endpoint is created or updated. The
claim is a conditional write of one object with the whole state. A request to create or update the
endpoint follows immediately after this write, or the object is read again before the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from onnx_ops import codec
from onnx_ops.adapters.aws import (
    Clients,
    get_error_code,
    get_error_message,
    translate_errors,
    write_conditionally,
)
from onnx_ops.adapters.endpoints.sagemaker_layout import ENDPOINT_TAG
from onnx_ops.adapters.endpoints.sagemaker_options import SageMakerOptions
from onnx_ops.adapters.retry import attempts, converge
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError, ServiceUnavailableError

T = TypeVar("T")

MISSING_OBJECT = ("404", "NoSuchKey", "NotFound", "NoSuchBucket")
"""Error codes of S3 for an object or a bucket that does not exist."""
NOT_FOUND = ("could not find",)
"""Part of SageMaker's message, in lower case, for a resource that does not exist."""
IN_PROGRESS = ("in-progress", "in progress")
"""Parts of SageMaker's messages, in lower case, about a resource being changed."""
_MAX_RACES = 8
"""Maximum number of attempts to write the claim: other writers can be faster."""


class SageMakerClient:
    """Client for one endpoint."""

    def __init__(self, clients: Clients, endpoint: str, options: SageMakerOptions) -> None:
        self.clients = clients
        self.endpoint = endpoint
        self.options = options
        self.folder = f"{options.prefix.strip('/')}/{endpoint}"
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
        """Return the entries under key `items` of all pages of an operation's answer."""
        with translate_errors(self.endpoint):
            pages = self.clients(service).get_paginator(operation).paginate(**request)
            return [item for page in pages for item in page.get(items, ())]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of the bucket with this prefix, sorted."""
        objects = self.list_all(
            "s3", "list_objects_v2", "Contents", Bucket=self.options.bucket, Prefix=prefix
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
        """Return whether the tag of the described endpoint names this endpoint."""
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

        return converge(step, attempts(self.options.timeout, self.options.poll_interval), timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointClaim:
    """The claim of an endpoint's latest generation.

    `reached` is the name of the config with which the endpoint was in service last. This name shows
    that onnx-ops owns the endpoint, and which variants the endpoint has. `settled` is true if the
    endpoint has reached `state`. `scaled` is true if its variants can have scaling policies of
    onnx-ops.
    """

    state: EndpointState
    reached: str = ""
    settled: bool = False
    scaled: bool = False


class GenerationFence:
    """The claim of an endpoint's latest generation, and records of guarded updates.

    Before SageMaker starts an update that alarms guard, the states of the alarms are recorded. For
    an update to the config that was reached last, they are not recorded.
    """

    def __init__(self, client: SageMakerClient) -> None:
        self._client = client
        self._key = f"{client.folder}/claim.json"
        self._updates = f"{client.folder}/guard/updates/"
        self._etag = ""
        self.claim: EndpointClaim | None = None
        """The claim that was read or written last."""

    def read(self) -> EndpointClaim | None:
        """Read the claim; None before the first claim."""
        self.claim, self._etag = None, ""
        if (answer := self._get(self._key)) is not None:
            body, self._etag = answer
            where = f"s3://{self._client.options.bucket}/{self._key}"
            self.claim = codec.loads(body, EndpointClaim, where=where)
        return self.claim

    def take(self, state: EndpointState) -> None:
        """Claim the generation of a state with a conditional write.

        A claim of the same generation can be replaced by a claim without idle deployments.

        Raises:
            ConflictError: a later generation is claimed, or this generation for another state.
            ServiceUnavailableError: other writers keep changing the claim.
        """

        def replace_claim(before: EndpointClaim | None) -> EndpointClaim:
            if before is None:
                return EndpointClaim(state=state, scaled=self._client.options.scaled)
            if before.state.generation == state.generation:
                if before.state.is_equivalent(state):
                    return before
                if not before.state.covers(state):
                    raise self._conflict(state.generation)
            scaled = before.scaled or self._client.options.scaled
            return replace(before, state=state, settled=False, scaled=scaled)

        self._write(state.generation, replace_claim)

    def check(self, generation: int) -> None:
        """Raise ConflictError if a later generation is claimed.

        A claim that is made after this check is detected when the endpoint is observed.
        """
        self._require_latest(self.read(), generation)

    def settle(self, generation: int, *, reached: str = "") -> None:
        """Record that the endpoint has reached the claimed state.

        `reached` is the name of its config; empty to keep the recorded name.

        Raises:
            ConflictError: a later generation is claimed.
            ServiceUnavailableError: other writers keep changing the claim.
        """

        def settle_claim(before: EndpointClaim | None) -> EndpointClaim | None:
            if before is None:  # The endpoint was removed after the request.
                return None
            if not reached:
                return replace(before, settled=True)
            scaled = self._client.options.scaled
            return replace(before, settled=True, reached=reached, scaled=scaled)

        if self.claim is not None and settle_claim(self.claim) == self.claim:
            self.check(generation)
            return
        self._write(generation, settle_claim)

    def has_reached(self, config_name: str) -> bool:
        """Return whether the claim names a config as the last that was reached."""
        return self.claim is not None and self.claim.reached == config_name

    def begin_update(self, config_name: str, alarms: Mapping[str, str]) -> None:
        """Record the states of alarms before a guarded update.

        If the update was already started, its first record is not replaced.
        """
        self._put(f"{self._updates}{config_name}", json.dumps(alarms).encode(), IfNoneMatch="*")

    def alarms_before(self, config_name: str) -> Mapping[str, str] | None:
        """Return the alarms' states before an update; None if they are not recorded."""
        answer = self._get(f"{self._updates}{config_name}")
        return None if answer is None else dict(json.loads(answer[0]))

    def end_update(self, config_name: str) -> None:
        """Delete the record of an update."""
        self._delete([f"{self._updates}{config_name}"])

    def delete(self) -> None:
        """Delete all records of a deleted endpoint."""
        self._delete([*self._client.keys(self._updates), self._key])

    def _write(
        self,
        generation: int,
        change: Callable[[EndpointClaim | None], EndpointClaim | None],
    ) -> None:
        """Replace the claim; repeat this if another writer has replaced it since `read`.

        Raises:
            ConflictError: a later generation is claimed.
            ServiceUnavailableError: other writers keep changing the claim.
        """
        for _ in range(_MAX_RACES):
            self._require_latest(self.claim, generation)
            claim = change(self.claim)
            if claim is None or claim == self.claim:
                return
            condition = {"IfMatch": self._etag} if self._etag else {"IfNoneMatch": "*"}
            etag = self._put(self._key, codec.dumps(claim), **condition)
            if etag is not None:
                self.claim, self._etag = claim, etag
                return
            self.read()
        raise ServiceUnavailableError(
            "other writers keep changing the claim of this endpoint",
            where=self._client.endpoint,
            remedy="Run the command again.",
        )

    def _get(self, key: str) -> tuple[bytes, str] | None:
        """Return an object and its ETag; None if it does not exist."""
        bucket = self._client.options.bucket
        answer = self._client.call(
            "s3", "get_object", ignored_codes=MISSING_OBJECT, Bucket=bucket, Key=key
        )
        if answer is None:
            return None
        with translate_errors(self._client.endpoint):
            return answer["Body"].read(), str(answer["ETag"])

    def _put(self, key: str, data: bytes, **condition: str) -> str | None:
        """Write an object; return its ETag, or None if the condition is not met."""
        s3, bucket = self._client.clients("s3"), self._client.options.bucket
        with translate_errors(self._client.endpoint):
            answer = write_conditionally(
                lambda: s3.put_object(Bucket=bucket, Key=key, Body=data, **condition)
            )
        return None if answer is None else str(answer["ETag"])

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._client.call("s3", "delete_object", Bucket=self._client.options.bucket, Key=key)

    def _require_latest(self, claim: EndpointClaim | None, generation: int) -> None:
        if claim is not None and claim.state.generation > generation:
            raise self._conflict(generation)

    def _conflict(self, generation: int) -> ConflictError:
        return ConflictError(
            f"generation {generation} or a later one is already claimed for another state",
            where=self._client.endpoint,
            remedy="Another client is changing this endpoint: see "
            f"`onnx-ops history {self._client.endpoint}`. If the history shows no such change, "
            "another ledger made it: restore that ledger (`onnx-ops docs backup`). If no other "
            f"project uses the endpoint, delete `s3://{self._client.options.bucket}/{self._key}`.",
        )
