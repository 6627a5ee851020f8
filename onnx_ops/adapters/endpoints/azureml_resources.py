"""Endpoints and deployments as Azure Resource Manager describes them.

Reads and changes of traffic use these documents instead of azure-ai-ml. The import of that package
takes about 7 s of CPU time, and its read of an endpoint also lists the deployments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TERMINAL_STATES = frozenset({"succeeded", "failed", "canceled"})
_READ_ONLY = frozenset({"provisioningState", "scoringUri", "swaggerUri"})
"""Properties of an endpoint that only Azure sets."""
_IDENTITY = frozenset({"type", "userAssignedIdentities"})
"""Fields of an identity that clients set."""
_DURATION = re.compile(
    r"P(?:(?P<d>\d+)D)?(?:T(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?"
)
_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True, slots=True)
class AzureResource:
    """A resource that Azure can be changing.

    `document` is the resource as a GET request returns it.
    """

    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the resource below its parent."""
        return str(self.document.get("name", ""))

    @property
    def tags(self) -> Mapping[str, str]:
        """Tags of the resource; empty without tags."""
        return self.document.get("tags") or {}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Properties of the resource; absent values are None or missing."""
        return self.document.get("properties") or {}

    @property
    def state(self) -> str:
        """Provisioning state in lower case."""
        return str(self.properties.get("provisioningState", "")).lower()

    @property
    def is_settled(self) -> bool:
        """Whether all changes to the resource have ended, successfully or not."""
        return self.state in _TERMINAL_STATES

    @property
    def has_succeeded(self) -> bool:
        """Whether the last change to the resource succeeded."""
        return self.state == "succeeded"


class OnlineEndpoint(AzureResource):
    """An online endpoint."""

    __slots__ = ()

    @property
    def traffic(self) -> Mapping[str, int]:
        """Percentages of the deployments that get traffic, by name."""
        return self._read_percentages("traffic")

    @property
    def mirror_traffic(self) -> Mapping[str, int]:
        """Percentages of the requests that Azure copies, by name; onnx-ops sets none."""
        return self._read_percentages("mirrorTraffic")

    def gives_traffic(self, name: str) -> bool:
        """Return whether a deployment gets requests, or copies of requests."""
        return bool(self.traffic.get(name) or self.mirror_traffic.get(name))

    @property
    def scoring_uri(self) -> str:
        """Address that clients call."""
        return str(self.properties.get("scoringUri", ""))

    def build_update(self, tags: Mapping[str, str], traffic: Mapping[str, int]) -> dict[str, Any]:
        """Return the document of a PUT request that changes tags and traffic.

        The request also ends the mirroring of traffic. PATCH requests can change tags, but not
        traffic.
        """
        identity = dict(self.document.get("identity") or {})
        # The client ids of assigned identities are read-only, so the request leaves them out.
        if assigned := identity.get("userAssignedIdentities"):
            identity["userAssignedIdentities"] = {name: {} for name in assigned}
        kept = {key: value for key, value in self.properties.items() if key not in _READ_ONLY}
        fields = {key: self.document[key] for key in ("kind", "sku") if self.document.get(key)}
        return {
            **fields,
            "location": self.document.get("location"),
            "identity": {k: v for k, v in identity.items() if k in _IDENTITY},
            "tags": dict(tags),
            "properties": {**kept, "traffic": dict(traffic), "mirrorTraffic": {}},
        }

    def _read_percentages(self, key: str) -> dict[str, int]:
        percentages = self.properties.get(key) or {}
        return {name: int(percent) for name, percent in percentages.items() if int(percent)}


class OnlineDeployment(AzureResource):
    """A managed deployment of an endpoint."""

    __slots__ = ()

    @property
    def instance_type(self) -> str:
        """Size of the instances."""
        return str(self.properties.get("instanceType", ""))

    @property
    def instance_count(self) -> int:
        """Number of instances; 1 if Azure names none."""
        return int((self.document.get("sku") or {}).get("capacity") or 1)

    @property
    def environment(self) -> str:
        """Resource id of the environment, which contains the image."""
        return str(self.properties.get("environmentId", ""))

    @property
    def environment_variables(self) -> Mapping[str, str]:
        """Environment of the container."""
        return self.properties.get("environmentVariables") or {}

    @property
    def egress(self) -> str:
        """`disabled` if the instances reach no public network, otherwise `enabled`."""
        return str(self.properties.get("egressPublicNetworkAccess") or "enabled").lower()

    @property
    def app_insights(self) -> bool:
        """Whether Application Insights gets the log of the container."""
        return bool(self.properties.get("appInsightsEnabled"))

    @property
    def max_concurrent_requests(self) -> int | None:
        """Maximum number of concurrent requests to an instance; None if Azure names none."""
        return self._request_settings.get("maxConcurrentRequestsPerInstance")

    @property
    def request_timeout_s(self) -> float:
        """Time limit of a request in seconds; 0 if Azure's default applies."""
        return parse_duration(str(self._request_settings.get("requestTimeout", "")))

    @property
    def _request_settings(self) -> Mapping[str, Any]:
        return self.properties.get("requestSettings") or {}


def parse_duration(text: str) -> float:
    """Return the seconds of an ISO 8601 duration without years, months and weeks.

    The result is 0 for other text.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        return 0.0
    return sum(float(match[unit] or 0) * seconds for unit, seconds in _UNITS_S.items())
