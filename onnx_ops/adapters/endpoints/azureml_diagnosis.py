"""Checks of an Azure endpoint's prerequisites."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from onnx_ops.adapters.azure import (
    LOGIN_REMEDY,
    fetch_token,
    get_management_url,
    make_role_remedy,
    request_resource,
)
from onnx_ops.adapters.endpoints.azureml_client import SPARE
from onnx_ops.adapters.endpoints.azureml_options import AzureOptions, read_azure_options
from onnx_ops.adapters.endpoints.cloud import Finding, run_check
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.plugins import EXTRAS, absent, install_hint, version

_WORKSPACES = "Microsoft.MachineLearningServices/workspaces"
ACTIONS = (
    f"{_WORKSPACES}/onlineEndpoints/write",
    f"{_WORKSPACES}/onlineEndpoints/delete",
    f"{_WORKSPACES}/onlineEndpoints/deployments/write",
    f"{_WORKSPACES}/onlineEndpoints/deployments/delete",
    f"{_WORKSPACES}/environments/versions/write",
)
"""Azure actions that are checked for all endpoints."""
_NATIVE_ACTIONS = (f"{_WORKSPACES}/models/versions/write", "Microsoft.Insights/metrics/read")
"""Azure actions that are also checked with `traffic: native`."""
_SCALING_ACTIONS = tuple(
    f"Microsoft.Insights/autoscaleSettings/{verb}" for verb in ("read", "write", "delete")
)
"""Azure actions that are also checked if the options request autoscaling."""
_API = "api-version=2024-04-01"
_REGISTRY_SUFFIX = ".azurecr.io"
_PULL_ROLES = frozenset(
    {"7f951dda-4ed3-4680-a7ca-43fe172d538d", "8311e382-0749-4cb8-b61a-304f252e45ec"}
)
"""Azure's ids of the roles AcrPull and AcrPush."""
_VERSIONS_IN_ROLLOUT = 2
"""Number of deployments that run side by side while versions or options change."""


def diagnose(endpoints: Sequence[Mapping[str, Json]]) -> Iterator[Diagnosis]:
    """Yield the findings for the options of endpoints.

    A check is skipped if its prerequisite failed.
    """
    packages = EXTRAS["azure"]
    missing = absent(packages)
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    yield Diagnosis(
        check="azure packages", ok=not missing, found=versions, remedy=install_hint(*packages)
    )
    if missing:
        return
    try:
        fetch_token()
    except OnnxOpsError as error:
        yield Diagnosis(check="azure credentials", ok=False, found=str(error), remedy=LOGIN_REMEDY)
        return
    yield Diagnosis(check="azure credentials", ok=True, found=f"a token for {get_management_url()}")
    for options in endpoints:
        yield from _diagnose_endpoint(options)


def _diagnose_endpoint(values: Mapping[str, Json]) -> Iterator[Diagnosis]:
    try:
        options = read_azure_options(values)
    except OnnxOpsError as error:
        remedy = error.remedy or "See `onnx-ops docs azureml-options`."
        yield Diagnosis(check="azure workspace", ok=False, found=error.what, remedy=remedy)
        return
    run, workspace = partial(run_check, cloud="Azure Resource Manager"), dict[str, Any]()

    def check_workspace() -> Finding:
        try:
            workspace.update(request_resource(f"{options.place.path}?{_API}"))
        except RefusedError as error:
            if "HTTP 404" not in error.why:
                return False, error.why, make_role_remedy(error.why)
            remedy = (
                "Check `subscription`, `resource_group` and `workspace`, "
                "or create the workspace with infra/azure."
            )
            return False, "it does not exist", remedy
        return True, f"in {workspace.get('location')}", ""

    yield (found := run(f"azure workspace {options.workspace}", check_workspace))
    if not found.ok:
        return
    yield run(f"azure role on {options.workspace}", lambda: _check_role(options))
    registries: list[str] = []
    yield run("azure image", lambda: _check_image(options, registries))
    if registries:
        attached = str(workspace.get("properties", {}).get("containerRegistry", ""))
        yield run("azure pull", lambda: _check_pull(options, registries[0], attached))
    location = str(workspace.get("location"))
    yield run(f"azure quota for {options.instance_type}", lambda: _check_quota(options, location))


def _check_role(options: AzureOptions) -> Finding:
    path = f"{options.place.path}/providers/Microsoft.Authorization/permissions"
    granted = request_resource(f"{path}?api-version=2022-04-01")
    needed = ACTIONS + _NATIVE_ACTIONS * (not options.is_table) + _SCALING_ACTIONS * options.scaled
    missing = [action for action in needed if not is_allowed(action, granted.get("value", ()))]
    if missing:
        return False, f"not permitted: {', '.join(missing)}", make_role_remedy(*missing)
    return True, f"all {len(needed)} required permissions are granted", ""


def is_allowed(action: str, granted: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether one of the roles grants the action and does not exclude it."""
    return any(
        _matches(action, role.get("actions", ()))
        and not _matches(action, role.get("notActions", ()))
        for role in granted
    )


def _matches(action: str, patterns: Sequence[str]) -> bool:
    expressions = (".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    return any(re.fullmatch(expression, action, re.IGNORECASE) for expression in expressions)


def _check_image(options: AzureOptions, registries: list[str]) -> Finding:
    """Check the image's registry; add its resource id to `registries` if it is found.

    Only registries of Azure in the endpoint's subscription can be found. The tag is not checked,
    since tags of images are missing from the answers of Azure Resource Manager.
    """
    host = options.image.partition("/")[0]
    if not host.endswith(_REGISTRY_SUFFIX):
        found = (
            f"{host} is not checked: the permission to pull is checked only for hosts that end "
            f"in {_REGISTRY_SUFFIX}"
        )
        return True, found, ""
    path = (
        f"/subscriptions/{options.place.subscription}"
        "/providers/Microsoft.ContainerRegistry/registries"
    )
    listed = request_resource(f"{path}?api-version=2023-07-01").get("value", ())
    registries += [
        str(one["id"])
        for one in listed
        if str(one["properties"]["loginServer"]).lower() == host.lower()
    ]
    if registries:
        return True, f"{host} exists", ""
    name = host.removesuffix(_REGISTRY_SUFFIX)
    remedy = (
        f"Run `az acr create --name {name} --sku Basic --resource-group GROUP "
        f"--subscription {options.place.subscription}` and push the image, or correct `image`. "
        "A registry in another subscription cannot be checked."
    )
    return False, f"the subscription has no registry {host}", remedy


def _check_pull(options: AzureOptions, registry: str, attached: str) -> Finding:
    if not options.identity:
        if registry.lower() == attached.lower():
            return True, "the endpoints of the workspace can pull from this registry", ""
        return (
            True,
            "the endpoint's own identity needs the role AcrPull once the endpoint exists",
            "",
        )
    name = options.identity.rpartition("/")[2]
    try:
        identity = request_resource(f"{options.identity}?api-version=2023-01-31")
    except RefusedError as error:
        if "HTTP 404" not in error.why:
            raise
        return False, f"identity {name} does not exist", "Correct `identity`, or create it."
    principal = identity["properties"]["principalId"]
    path = f"{registry}/providers/Microsoft.Authorization/roleAssignments?api-version=2022-04-01"
    roles = {
        str(assignment["properties"]["roleDefinitionId"]).rpartition("/")[2]
        for assignment in request_resource(path).get("value", ())
        if assignment["properties"]["principalId"] == principal
    }
    if roles & _PULL_ROLES:
        return True, f"{name} can pull", ""
    remedy = (
        f"Run `az role assignment create --assignee {principal} --role AcrPull --scope {registry}`."
    )
    return False, f"{name} has neither the role AcrPull nor AcrPush on the registry", remedy


def _check_quota(options: AzureOptions, location: str) -> Finding:
    subscription = options.place.subscription
    region = (
        f"/subscriptions/{subscription}/providers/Microsoft.MachineLearningServices"
        f"/locations/{location}"
    )
    sizes = {
        size["name"].lower(): size for size in request_resource(f"{region}/vmSizes?{_API}")["value"]
    }
    size = sizes.get(options.instance_type.lower())
    if size is None:
        remedy = (
            f"Choose a size that `az ml compute list-sizes --location {location} "
            f"--workspace-name {options.place.workspace} "
            f"--resource-group {options.place.resource_group} --subscription {subscription}` "
            "lists."
        )
        return False, f"{location} does not have this size", remedy
    usages = {
        usage["name"]["value"].lower(): usage
        for usage in request_resource(f"{region}/usages?{_API}")["value"]
    }
    usage = usages.get(str(size["family"]).lower(), {"limit": 0, "currentValue": 0})
    free = int(usage["limit"]) - int(usage["currentValue"])
    instances = math.ceil((options.max_instances or options.instances) * SPARE)
    needed = _VERSIONS_IN_ROLLOUT * instances * int(size["vCPUs"])
    found = (
        f"{free} of {usage['limit']} cores of {size['family']} are free; "
        f"two deployments need {needed}"
    )
    remedy = (
        "Request more cores in the portal (Quotas, Machine learning); Azure keeps 20% of the "
        "instances in reserve."
    )
    return free >= needed, found, remedy
