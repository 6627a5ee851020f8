"""What may be said of a SageMaker endpoint in a pipeline file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from onnx_ops.adapters.aws import ANSWER_S
from onnx_ops.errors import UserError
from onnx_ops.protocol.server_process import select_container_options

Scalar = str | int | float | bool

_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IMAGE = re.compile(r"\S{1,255}")
_INSTANCE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9-]+")
_TAG = re.compile(r"[\w .:/=+\-@]{1,128}=[\w .:/+\-@]{0,256}")
_OWN_TAGS = "onnx-ops"
_MOST_ALARMS = 10

_RANGES: Mapping[str, tuple[float, float]] = {
    "instance_count": (1, 1000),
    "memory_mb": (1024, 6144),
    "max_concurrency": (1, 200),
    "provisioned_concurrency": (0, 200),
    "min_instances": (0, 1000),
    "max_instances": (0, 1000),
    "invocations_per_instance": (1, 1e9),
    "canary_percent": (0, 50),
    "linear_percent": (0, 50),
    "wait_s": (0, 3600),
    "termination_wait_s": (0, 3600),
    "max_execution_s": (600, 28800),
    "capture_percent": (0, 100),
    "volume_gb": (0, 512),
    "startup_s": (60, 3600),
    "timeout_s": (1, 86400),
    "poll_s": (0, 600),
    "answer_s": (0.1, 600),
}
"""Lowest and highest values that the service (or, for the last three, we) take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerSettings:
    """Settings of one endpoint; see docs/sagemaker.md. Lists are written with commas between their items.

    `server` are options of the endpoint server.
    """

    role: str
    image: str
    bucket: str
    prefix: str = "onnx-ops"
    region: str = ""
    profile: str = ""
    strategy: str = "ab"
    instance_type: str = "ml.c6i.large"
    instance_count: int = 1
    memory_mb: int = 0
    max_concurrency: int = 5
    provisioned_concurrency: int = 0
    min_instances: int = 0
    max_instances: int = 0
    invocations_per_instance: float = 1000.0
    alarms: str = ""
    canary_percent: int = 0
    linear_percent: int = 0
    wait_s: int = 300
    termination_wait_s: int = 120
    max_execution_s: int = 3600
    capture_percent: int = 0
    capture_uri: str = ""
    kms_key: str = ""
    subnets: str = ""
    security_groups: str = ""
    isolated: bool = False
    tags: str = ""
    volume_gb: int = 0
    startup_s: int = 600
    timeout_s: float = 3600.0
    poll_s: float = 10.0
    answer_s: float = ANSWER_S
    server: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def serverless(self) -> bool:
        return self.memory_mb > 0

    @property
    def guarded(self) -> bool:
        return self.strategy == "guarded"

    @property
    def scaled(self) -> bool:
        return self.max_instances > 0

    @property
    def own_tags(self) -> Mapping[str, str]:
        return dict(pair.partition("=")[::2] for pair in listed(self.tags))


def listed(text: str) -> tuple[str, ...]:
    """The items of a list with commas."""
    return tuple(item for item in map(str.strip, text.split(",")) if item)


def settings_of(given: Mapping[str, Scalar], *, where: str = "") -> SageMakerSettings:
    """Settings from plain values.

    Raises:
        UserError: one is not known, is missing, is not of its type or range, or does not go with the others.
    """
    hints = get_type_hints(SageMakerSettings)
    own = tuple(f.name for f in fields(SageMakerSettings) if f.name != "server")
    server = select_container_options(given, where=where, others=own)
    given = {name: value for name, value in given.items() if name in own}
    for name, value in given.items():
        _check(name, hints[name], value, where)
    if missing := [name for name in ("role", "image", "bucket") if not given.get(name)]:
        remedy = "docs/sagemaker.md shows how to make them."
        raise UserError(f"sagemaker needs the settings {', '.join(missing)}", where=where, remedy=remedy)
    values: dict[str, Any] = {name: hints[name](value) for name, value in given.items()}
    found = SageMakerSettings(**values, server=server)
    for problem in _problems(found):
        raise UserError(problem, where=where)
    return found


def _check(name: str, kind: type, value: Scalar, where: str) -> None:
    numeric = kind is float and type(value) is int
    if type(value) is not kind and not numeric:
        raise UserError(f"{name} must be of type {kind.__name__}, not {value!r}", where=where)
    low, high = _RANGES.get(name, (0, 0))
    if name in _RANGES and not isinstance(value, str) and not low <= value <= high:
        raise UserError(f"{name} must be from {low:g} to {high:g}, not {value!r}", where=where)


def _problems(found: SageMakerSettings) -> list[str]:
    """Everything that is wrong, or that the service would refuse."""
    subnets, groups, alarms = listed(found.subnets), listed(found.security_groups), listed(found.alarms)
    shaped = found.canary_percent > 0 or found.linear_percent > 0
    rules = {
        f"role: {found.role!r} is not the ARN of a role": not _ROLE.fullmatch(found.role),
        f"image: {found.image!r} is no image": not _IMAGE.fullmatch(found.image),
        f"bucket: {found.bucket!r} is no name of a bucket": not _BUCKET.fullmatch(found.bucket),
        f"strategy must be ab or guarded, not {found.strategy!r}": found.strategy not in ("ab", "guarded"),
        f"instance_type: {found.instance_type!r} is not like ml.c6i.large": not _INSTANCE.fullmatch(
            found.instance_type
        ),
        "serverless (memory_mb) has one variant only: strategy must be guarded": found.serverless and not found.guarded,
        "memory_mb must be a multiple of 1024": found.memory_mb % 1024 != 0,
        "provisioned_concurrency must not exceed max_concurrency": found.provisioned_concurrency
        > found.max_concurrency,
        "serverless has no VPC": found.serverless and bool(subnets or groups),
        "serverless has no network isolation": found.serverless and found.isolated,
        "serverless has no data capture": found.serverless and found.capture_percent > 0,
        "serverless scales by itself: leave max_instances out": found.serverless and found.scaled,
        "min_instances must be from 1 to max_instances": found.scaled
        and not 1 <= found.min_instances <= found.max_instances,
        "instance_count must lie between min_instances and max_instances": found.scaled
        and not found.min_instances <= found.instance_count <= found.max_instances,
        "min_instances needs max_instances": found.min_instances > 0 and not found.scaled,
        "subnets and security_groups belong together": bool(subnets) != bool(groups),
        "at most 16 subnets and 5 security_groups": len(subnets) > 16 or len(groups) > 5,
        f"at most {_MOST_ALARMS} alarms": len(alarms) > _MOST_ALARMS,
        "alarms, canary_percent and linear_percent need strategy guarded": not found.guarded
        and (bool(alarms) or shaped),
        "canary_percent and linear_percent exclude each other": found.canary_percent > 0 and found.linear_percent > 0,
        "linear_percent must be from 10 to 50": 0 < found.linear_percent < 10,
        "capture_percent needs capture_uri, and capture_uri capture_percent": (found.capture_percent > 0)
        != bool(found.capture_uri),
        "capture_uri must begin with s3://": bool(found.capture_uri) and not found.capture_uri.startswith("s3://"),
        "tags must be like team=vision, cost=42": any(not _TAG.fullmatch(pair) for pair in listed(found.tags)),
        "tags that begin with onnx-ops are our own": any(key.startswith(_OWN_TAGS) for key in found.own_tags),
    }
    return [problem for problem, wrong in rules.items() if wrong]
