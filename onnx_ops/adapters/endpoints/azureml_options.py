"""Options of an Azure ML endpoint in a pipeline file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, Unit, doc

from onnx_ops.adapters.azure import API_TIMEOUT_S, EndpointName, PlaceName, Workspace
from onnx_ops.adapters.endpoints.cloud import format_follower_variables
from onnx_ops.adapters.endpoints.table_options import (
    LeaseOptions,
    ReplicaOptions,
    find_overlap,
)
from onnx_ops.config.binding import bind_options
from onnx_ops.config.server_options import format_option_variables
from onnx_ops.domain.quantities import COMPUTED, Json, Pattern
from onnx_ops.protocol.server_process import TRUSTED_KEYS_VARIABLE, ContainerOptions

_DATASTORE = r"(?a)azureml://datastores/(?P<datastore>\w+)/paths/(?P<folder>[\w./-]+?)/?"
_IMAGE = r"(?a)[\w.-]+(:\d+)?(/[\w.-]+)+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?"

_Instances = Annotated[int | None, Ge(1), Le(500)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOptions(LeaseOptions, ContainerOptions):
    """Options of one endpoint and of its server; see docs/azureml-options.md.

    `trusted_keys` and `endpoint` are not set in the options: the provider adds them.
    """

    subscription: PlaceName
    resource_group: PlaceName
    workspace: PlaceName
    image: Annotated[str, Pattern(_IMAGE, "REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST")]
    instance_type: Annotated[
        str, Pattern(r"(?a)[A-Z][A-Za-z]+_\w+", "a size, such as Standard_F4s_v2")
    ]
    traffic: Literal["table", "native"] = "table"
    control: Annotated[
        str, doc("Location of tables and models: abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/….")
    ] = ""
    reports: Annotated[str, doc("Location of the reports; must not overlap `control`.")] = ""
    instances: Annotated[int, Ge(1), Le(500)] = 1
    min_instances: _Instances = None
    max_instances: _Instances = None
    cpu_percent: Annotated[int, Ge(1), Le(100)] = 70
    registry: Annotated[
        str,
        Pattern(
            r"(?a)([A-Za-z0-9][\w-]{2,32})?",
            "a registry name of 3 to 33 letters, digits, hyphens and underscores",
        ),
    ] = ""
    models: Annotated[str, Pattern(_DATASTORE, "azureml://datastores/NAME/paths/FOLDER")] = (
        "azureml://datastores/workspaceblobstore/paths/onnx-ops"
    )
    auth: Literal["key", "aml_token", "aad_token"] = "key"
    identity: Annotated[
        str,
        Pattern(
            "(/subscriptions/.*)?", "the resource id of a user-assigned identity: /subscriptions/…"
        ),
    ] = ""
    client_id: Annotated[
        str, doc("Client id of `identity`, with which containers read and write the locations.")
    ] = ""
    egress: Annotated[
        Literal["enabled", "disabled"],
        doc(
            "Whether instances reach public networks. With `disabled`, they reach only private "
            "endpoints of the workspace."
        ),
    ] = "enabled"
    app_insights: Annotated[
        bool, doc("Whether Application Insights of the workspace gets the log of the container.")
    ] = False
    name: EndpointName | None = None
    request_timeout: Annotated[float, Unit("s"), Ge(0.001), Le(180)] = 60.0
    max_concurrent_requests_per_instance: Annotated[int | None, Ge(1), Le(10_000)] = None
    blob_url: Annotated[str, Pattern("(https://.*)?", "an https address")] = ""
    api_timeout: Annotated[float, Unit("s"), Ge(0.1), Le(600)] = API_TIMEOUT_S
    trusted_keys: str = field(default="", metadata=COMPUTED)
    endpoint: str = field(default="", metadata=COMPUTED)

    @property
    def is_table(self) -> bool:
        """Whether the instances follow a table in object storage."""
        return self.traffic == "table"

    def locate(self) -> ReplicaOptions:
        """Return locations, least number of instances, and `LeaseOptions`."""
        return ReplicaOptions(
            control=self.control,
            reports=self.reports,
            replicas=self.min_instances or self.instances,
            judge_timeout=self.judge_timeout,
            lease=self.lease,
        )

    @property
    def place(self) -> Workspace:
        """The Azure ML workspace in which the endpoint is."""
        return Workspace(
            subscription=self.subscription,
            resource_group=self.resource_group,
            workspace=self.workspace,
        )

    @property
    def models_path(self) -> tuple[str, str]:
        """Name of the datastore of the models, and their path in it."""
        match = re.fullmatch(_DATASTORE, self.models)
        return (match["datastore"], match["folder"]) if match else ("", "")

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent requests to an instance."""
        return self.max_concurrent_requests_per_instance or self.queue

    @property
    def scaled(self) -> bool:
        """Whether Azure Monitor sets the number of instances."""
        return self.max_instances is not None

    @property
    def immutable(self) -> Mapping[str, Json]:
        """Options that are fixed when a deployment is created.

        They do not include the keys that the container trusts.
        """
        followed = {"control": self.control, "reports": self.reports, "client_id": self.client_id}
        return {
            "image": self.image,
            "instance_type": self.instance_type,
            "max_concurrent_requests_per_instance": self.concurrency,
            "request_timeout": self.request_timeout,
            "egress": self.egress,
            "app_insights": self.app_insights,
            **format_option_variables(self),
            **(followed if self.is_table else {}),
        }

    def variables(self) -> dict[str, str]:
        """Return the environment of the container.

        Raises:
            UserError: the container must follow tables, and no public key is trusted.
        """
        variables = format_option_variables(self)
        if not self.is_table:
            keys = {TRUSTED_KEYS_VARIABLE: self.trusted_keys} if self.trusted_keys else {}
            return variables | keys
        # adlfs 2026.8 uses credentials by default. Older versions use credentials only with this
        # variable, see https://github.com/fsspec/adlfs/pull/437
        identity = {"AZURE_STORAGE_ANON": "false"}
        if self.client_id:
            identity["AZURE_CLIENT_ID"] = self.client_id
        follower = format_follower_variables(
            self.endpoint, self.locate(), self.image, self.trusted_keys
        )
        return variables | identity | follower


def read_azure_options(given: Mapping[str, Json], *, where: str = "") -> AzureOptions:
    """Return the options of an endpoint.

    Raises:
        OptionsError: the options are wrong or contradict each other.
    """
    remedy = (
        ""
        if {"image", "instance_type"} <= set(given)
        else "See `onnx-ops docs azureml` for an example."
    )

    def find_contradictions(options: AzureOptions) -> Iterator[tuple[str, str]]:
        if options.is_table:
            yield from _find_missing_locations(options)
        low, high = options.min_instances, options.max_instances
        if (low is None) != (high is None) or ("cpu_percent" in given and high is None):
            yield (
                "max_instances",
                "autoscaling and cpu_percent require both min_instances and max_instances",
            )
        elif low is not None and high is not None and not low <= options.instances <= high:
            yield (
                "instances",
                f"must be from min_instances to max_instances, not {options.instances}",
            )

    return bind_options(given, AzureOptions, where=where, remedy=remedy, rules=find_contradictions)


def _find_missing_locations(options: AzureOptions) -> Iterator[tuple[str, str]]:
    """Yield missing or overlapping locations of an endpoint with `traffic: table`."""
    missing = [name for name in ("control", "reports") if not getattr(options, name)]
    for name in missing:
        yield (
            name,
            "is needed for `traffic: table`; if instances cannot reach it, set `traffic: native`",
        )
    if not missing:
        yield from find_overlap(options.control, options.reports)
