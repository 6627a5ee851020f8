"""Whether Azure would let us: packages, who we are, the workspace, what we may do there, and how much of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnx_ops.adapters.azure import LOGIN_REMEDY, ROLE_REMEDY, Scalar, ask, bearer, management_url
from onnx_ops.adapters.endpoints.azureml_errors import SPARE
from onnx_ops.adapters.endpoints.azureml_image import image_findings
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings, read_settings
from onnx_ops.domain.target import Finding
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.plugins import EXTRAS, absent, install_hint, version

_WORKSPACES = "Microsoft.MachineLearningServices/workspaces"
ACTIONS = (
    f"{_WORKSPACES}/onlineEndpoints/write",
    f"{_WORKSPACES}/onlineEndpoints/delete",
    f"{_WORKSPACES}/onlineEndpoints/listKeys/action",
    f"{_WORKSPACES}/onlineEndpoints/deployments/write",
    f"{_WORKSPACES}/onlineEndpoints/deployments/delete",
    f"{_WORKSPACES}/models/versions/write",
    f"{_WORKSPACES}/environments/versions/write",
    "Microsoft.Insights/metrics/read",
)
"""What the provider and its source of metrics do there."""
SCALING_ACTIONS = tuple(f"Microsoft.Insights/autoscaleSettings/{verb}" for verb in ("read", "write", "delete"))
"""Besides, where the settings ask for autoscaling."""
_API = "api-version=2024-04-01"
_STRANGE = "an answer is not what Azure Resource Manager answers"
_PROXY = "Look at what stands between this machine and Azure: a proxy, or a page to log in."
_AT_ONCE = 2
"""A rollout runs the old and the new version side by side."""


def diagnose(endpoints: Sequence[Mapping[str, Scalar]]) -> Iterator[Finding]:
    """All findings, the next ones only where they can be made.

    Args:
        endpoints: the settings of every endpoint that is, or shall be, in Azure.
    """
    packages = EXTRAS["azure"]
    missing = absent(packages)
    found = ", ".join(f"{name} {version(name)}" for name in packages)
    yield Finding(check="azure packages", ok=not missing, found=found, remedy=install_hint(*packages))
    if missing:
        return
    try:
        bearer()
    except OnnxOpsError as error:
        yield Finding(check="azure credentials", ok=False, found=str(error), remedy=LOGIN_REMEDY)
        return
    yield Finding(check="azure credentials", ok=True, found=f"a token for {management_url()}")
    for settings in endpoints:
        try:
            yield from _workspace(read_settings(settings))
        except OnnxOpsError as error:
            yield Finding(check="azure workspace", ok=False, found=str(error), remedy=error.remedy or _PROXY)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            yield Finding(check="azure workspace", ok=False, found=f"{_STRANGE}: {error!r}", remedy=_PROXY)


def _workspace(settings: AzureSettings) -> Iterator[Finding]:
    place = settings.place
    check = f"azure workspace {place.workspace}"
    try:
        there = ask(f"{place.path}?{_API}")
    except RefusedError as error:
        unseen = "HTTP 404" in error.why
        remedy = "Look at subscription, resource_group and workspace; make it with infra/." if unseen else ROLE_REMEDY
        yield Finding(check=check, ok=False, found="it is not there" if unseen else error.why, remedy=remedy)
        return
    yield Finding(check=check, ok=True, found=f"in {there.get('location')}")
    yield from _role(settings)
    yield from _seen("azure image", image_findings(settings, there))
    yield from _seen(f"azure quota for {settings.instance_type}", _quota(settings, str(there.get("location"))))


def _seen(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """What nobody needs to be permitted to see is no fault."""
    try:
        yield from findings
    except RefusedError as error:
        yield Finding(check=check, ok=True, found=f"may not be looked at: {error.why}")


def _role(settings: AzureSettings) -> Iterator[Finding]:
    granted = ask(f"{settings.place.path}/providers/Microsoft.Authorization/permissions?api-version=2022-04-01")
    needed = ACTIONS + SCALING_ACTIONS * settings.scaled
    lacking = [action for action in needed if not allowed(action, granted.get("value", ()))]
    found = f"it may not {', '.join(lacking)}" if lacking else f"all {len(needed)} permissions that are needed"
    yield Finding(check=f"azure role on {settings.place.workspace}", ok=not lacking, found=found, remedy=ROLE_REMEDY)


def allowed(action: str, granted: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the roles grants the action and does not take it away again."""
    return any(
        _matches(action, role.get("actions", ())) and not _matches(action, role.get("notActions", ()))
        for role in granted
    )


def _matches(action: str, patterns: Sequence[str]) -> bool:
    expressions = (".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    return any(re.fullmatch(expression, action, re.IGNORECASE) for expression in expressions)


def _quota(settings: AzureSettings, location: str) -> Iterator[Finding]:
    check = f"azure quota for {settings.instance_type}"
    region = (
        f"/subscriptions/{settings.place.subscription}/providers/Microsoft.MachineLearningServices/locations/{location}"
    )
    sizes = {size["name"].lower(): size for size in ask(f"{region}/vmSizes?{_API}")["value"]}
    size = sizes.get(settings.instance_type.lower())
    if size is None:
        remedy = f"Choose one that there is: az ml compute list-sizes --location {location}."
        yield Finding(check=check, ok=False, found=f"there is no such size in {location}", remedy=remedy)
        return
    usages = {usage["name"]["value"].lower(): usage for usage in ask(f"{region}/usages?{_API}")["value"]}
    usage = usages.get(str(size["family"]).lower(), {"limit": 0, "currentValue": 0})
    free = int(usage["limit"]) - int(usage["currentValue"])
    most = settings.max_instances or settings.instances
    needed = _AT_ONCE * math.ceil(most * SPARE) * int(size["vCPUs"])
    found = f"{free} of {usage['limit']} cores of {size['family']} are free; a rollout needs {needed}"
    remedy = "Ask for more in the portal (Quotas, Machine learning); Azure keeps 20% of the instances in reserve."
    yield Finding(check=check, ok=free >= needed, found=found, remedy=remedy)
