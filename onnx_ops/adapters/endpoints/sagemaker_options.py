"""Options of a SageMaker endpoint in a pipeline file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen, Unit

from onnx_ops.adapters.aws import AwsAccess
from onnx_ops.adapters.endpoints.table_options import LeaseOptions, ReplicaOptions
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.protocol.server_process import ContainerOptions

_OWN_TAGS = "onnx-ops"
_MIB = 1 << 20
_GB = 10**9

VARIANT_FIELDS: Mapping[str, str] = {
    "CapacityReservationConfig": "capacity_reservation",
    "ContainerStartupHealthCheckTimeoutInSeconds": "startup",
    "InferenceAmiVersion": "inference_ami",
    "InitialInstanceCount": "instance_count",
    "InstanceType": "instance_type",
    "ModelDataDownloadTimeoutInSeconds": "download_timeout",
    "RoutingConfig": "routing",
    "ServerlessConfig": "memory",
    "VolumeSizeInGB": "volume",
}
"""Option of each field of a variant in SageMaker's API that users choose."""
DERIVED_VARIANT_FIELDS = frozenset({"InitialVariantWeight", "ModelName", "VariantName"})
"""Fields of a variant that follow from the deployment and its traffic."""
UNSUPPORTED_VARIANT_FIELDS: Mapping[str, str] = {
    "AcceleratorType": "AWS has ended Elastic Inference",
    "CoreDumpConfig": "a core dump contains requests",
    "EnableSSMAccess": "a shell in the container could change the verified model",
    "InstancePools": "a benchmark is valid for one instance type only",
    "ManagedInstanceScaling": "it is for inference components; use `max_instances`",
    "VariantInstanceProvisionTimeoutInSeconds": "it belongs to `InstancePools`",
}
"""Reason for each field of a variant that no option supports."""
_METRIC_INTERVALS_S = (10, 30, 60, 120, 180, 240, 300)
_DEFAULT_METRIC_INTERVAL_S = 60

_Instances = Annotated[int, Ge(0), Le(1000)]
_Shift = Annotated[int, Ge(0), Le(50)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerOptions(AwsAccess, LeaseOptions, ContainerOptions):
    """Options of one endpoint and of its server; see docs/sagemaker-options.md.

    Most limits of values are those of SageMaker.
    """

    role: Annotated[
        str,
        Pattern(r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "the ARN of a role"),
    ]
    image: Annotated[str, Pattern(r"\S{1,255}", "an image")]
    bucket: Annotated[str, Pattern(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of a bucket")]
    prefix: str = "onnx-ops"
    traffic: Literal["table", "native"] = "table"
    strategy: Literal["ab", "guarded"] = "ab"
    instance_type: Annotated[
        str, Pattern(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", "an instance type, such as ml.c6i.large")
    ] = "ml.c6i.large"
    instance_count: Annotated[int, Ge(1), Le(1000)] = 1
    memory: Annotated[int | None, Unit("B"), Ge(1024 * _MIB), Le(6144 * _MIB)] = None
    max_concurrency: Annotated[int, Ge(1), Le(200)] = 5
    provisioned_concurrency: Annotated[int, Ge(0), Le(200)] = 0
    min_instances: _Instances = 0
    max_instances: _Instances = 0
    invocations_per_instance: Annotated[float, Ge(1), Le(1e9)] = 1000.0
    alarms: Annotated[tuple[str, ...], MaxLen(10)] = ()
    canary_percent: _Shift = 0
    linear_percent: _Shift = 0
    wait: Annotated[float, Unit("s"), Ge(0), Le(3600)] = 300.0
    termination_wait: Annotated[float, Unit("s"), Ge(0), Le(3600)] = 120.0
    max_execution: Annotated[float, Unit("s"), Ge(600), Le(28800)] = 3600.0
    routing: Literal["default", "random", "least_outstanding_requests"] = "default"
    metric_interval: Annotated[float, Unit("s"), Ge(10), Le(300)] = 60.0
    capture_percent: Annotated[int, Ge(0), Le(100)] = 0
    capture_uri: Annotated[str, Pattern("(s3://.*)?", "an s3:// address")] = ""
    kms_key: str = ""
    subnets: Annotated[tuple[str, ...], MaxLen(16)] = ()
    security_groups: Annotated[tuple[str, ...], MaxLen(5)] = ()
    isolated: bool = False
    tags: Mapping[
        Annotated[str, Pattern(r"[\w .:/=+\-@]{1,128}", "the name of a tag")],
        Annotated[str, Pattern(r"[\w .:/=+\-@]{0,256}", "the value of a tag")],
    ] = field(default_factory=dict)
    volume: Annotated[int | None, Unit("B"), Ge(_GB), Le(512 * _GB)] = None
    startup: Annotated[float, Unit("s"), Ge(60), Le(3600)] = 600.0
    download_timeout: Annotated[float | None, Unit("s"), Ge(60), Le(3600)] = None
    inference_ami: Annotated[str, Pattern("[a-zA-Z0-9-]*", "the version of an inference AMI")] = ""
    capacity_reservation: Annotated[
        str,
        Pattern(
            r"(arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:[a-z0-9-]+/\S+)?",
            "the ARN of a capacity reservation",
        ),
    ] = ""
    timeout: Annotated[float, Unit("s"), Ge(1), Le(86400)] = 3600.0
    poll_interval: Annotated[float, Unit("s"), Ge(0), Le(600)] = 10.0

    @property
    def is_table(self) -> bool:
        """Whether the instances follow a table in the bucket."""
        return self.traffic == "table"

    def locate(self, endpoint: str) -> ReplicaOptions:
        """Return locations in the bucket, least number of instances, and `LeaseOptions`.

        Reports have a separate prefix, so that the containers' role needs no permission to write
        tables.
        """
        prefix = self.prefix.strip("/")
        return ReplicaOptions(
            control=f"s3://{self.bucket}/{prefix}/{endpoint}/control",
            reports=f"s3://{self.bucket}/{prefix}-reports/{endpoint}",
            replicas=self.min_instances if self.scaled else self.instance_count,
            judge_timeout=self.judge_timeout,
            lease=self.lease,
        )

    @property
    def serverless(self) -> bool:
        """Whether the endpoint has no instances."""
        return self.memory is not None

    @property
    def memory_mib(self) -> int:
        """Memory of a serverless endpoint in MiB, the unit of the SageMaker API.

        The value is 0 if the endpoint has instances.
        """
        return (self.memory or 0) // _MIB

    @property
    def volume_gb(self) -> int:
        """Storage in GB, the unit of the SageMaker API; 0 for the API's default."""
        return (self.volume or 0) // _GB

    @property
    def guarded(self) -> bool:
        """Whether SageMaker updates the one variant blue/green, with `alarms` if set.

        This is the case for strategy `guarded`, and for `traffic: table`, where the instances split
        the traffic between versions.
        """
        return self.is_table or self.strategy == "guarded"

    @property
    def metric_interval_s(self) -> int:
        """Interval of metrics in CloudWatch in seconds; 0 for SageMaker's default."""
        interval_s = int(self.metric_interval)
        return 0 if interval_s == _DEFAULT_METRIC_INTERVAL_S else interval_s

    @property
    def scaled(self) -> bool:
        """Whether the number of instances follows the load."""
        return self.max_instances > 0


def read_sagemaker_options(given: Mapping[str, Json], *, where: str = "") -> SageMakerOptions:
    """Return the options of an endpoint.

    Raises:
        OptionsError: the options are wrong or contradict each other.
    """
    remedy = (
        ""
        if {"role", "image", "bucket"} <= set(given)
        else "See `onnx-ops docs sagemaker` for how to create role, image and bucket."
    )
    return bind_options(
        given, SageMakerOptions, where=where, remedy=remedy, rules=_find_contradictions
    )


def _find_contradictions(options: SageMakerOptions) -> Iterator[tuple[str, str]]:
    """Yield the option to change for each unsupported combination, and the reason."""
    if options.serverless:
        yield from _find_serverless_contradictions(options)
    is_shifted = options.canary_percent > 0 or options.linear_percent > 0
    low, high, count = options.min_instances, options.max_instances, options.instance_count
    rules = (
        ("provisioned_concurrency", "must not exceed max_concurrency",
         options.provisioned_concurrency > options.max_concurrency),
        ("min_instances", "must be from 1 to max_instances",
         options.scaled and not 1 <= low <= high),
        ("instance_count", "must be from min_instances to max_instances",
         options.scaled and not low <= count <= high),
        ("min_instances", "needs max_instances", low > 0 and not options.scaled),
        ("subnets", "set both subnets and security_groups, or neither",
         bool(options.subnets) != bool(options.security_groups)),
        ("strategy", "strategy guarded requires `traffic: native`",
         options.is_table and options.strategy == "guarded"),
        ("traffic", "with network isolation, containers cannot read tables: set `traffic: native`",
         options.is_table and options.isolated),
        ("strategy", ("alarms, canary_percent and linear_percent require strategy guarded "
                      "or `traffic: table`"),
         not options.guarded and (bool(options.alarms) or is_shifted)),
        ("linear_percent", "excludes canary_percent",
         options.canary_percent > 0 and options.linear_percent > 0),
        ("linear_percent", "must be from 10 to 50", 0 < options.linear_percent < 10),
        ("capture_percent", "set both capture_percent and capture_uri, or neither",
         (options.capture_percent > 0) != bool(options.capture_uri)),
        ("tags", f"tags that begin with {_OWN_TAGS} are reserved",
         any(k.startswith(_OWN_TAGS) for k in options.tags)),
        ("volume", "must be a whole number of GB", (options.volume or 0) % _GB != 0),
        ("metric_interval",
         f"must be one of {', '.join(map(str, _METRIC_INTERVALS_S))} seconds",
         options.metric_interval not in _METRIC_INTERVALS_S),
    )  # fmt: skip
    yield from ((name, text) for name, text, wrong in rules if wrong)


def _find_serverless_contradictions(options: SageMakerOptions) -> Iterator[tuple[str, str]]:
    """Yield the options that a serverless endpoint does not support."""
    rules = (
        (
            "traffic",
            "a serverless endpoint cannot follow a table: set `traffic: native`",
            options.is_table,
        ),
        (
            "memory",
            "a serverless endpoint has one variant: set `strategy: guarded`",
            not options.guarded,
        ),
        ("memory", "must be a multiple of 1 GiB", options.memory_mib % 1024 != 0),
        (
            "subnets",
            "a serverless endpoint does not support a VPC",
            bool(options.subnets or options.security_groups),
        ),
        ("isolated", "a serverless endpoint does not support network isolation", options.isolated),
        (
            "capture_percent",
            "a serverless endpoint does not support data capture",
            options.capture_percent > 0,
        ),
        (
            "max_instances",
            "a serverless endpoint scales automatically; remove this key",
            options.scaled,
        ),
    )
    of_instances = {
        "capacity_reservation": bool(options.capacity_reservation),
        "download_timeout": options.download_timeout is not None,
        "inference_ami": bool(options.inference_ami),
        "metric_interval": options.metric_interval_s > 0,
        "routing": options.routing != "default",
    }
    for name, is_set in of_instances.items():
        if is_set:
            yield name, "a serverless endpoint has no instances; remove this key"
    yield from ((name, text) for name, text, wrong in rules if wrong)
