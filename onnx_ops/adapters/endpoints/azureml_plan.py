"""The traffic, names and tags with which Azure represents an endpoint's state.

Tags record the applied state and what deployments serve. Tags and traffic are sent together, so
they match unless another tool changes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from onnx_ops import codec
from onnx_ops.adapters.endpoints.cloud import join_text, split_text
from onnx_ops.domain.artifact import digest_json, short_digest
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import OnnxOpsError, UserError

OWNER = "onnx-ops-endpoint"
GENERATION = "onnx-ops-generation"
STATE = "onnx-ops-state"
MANIFEST = "onnx-ops-manifest"
SCALING = "onnx-ops-scaling"
"""Tag with the limits of a deployment's autoscaling, or `NOT_SCALED`."""
NOT_SCALED = "none"
_NAMES = "onnx-ops-deployments-"
_RECORD = "onnx-ops-record-"
_TAG_CHARACTERS = 250
"""Maximum number of characters in a tag's value; Azure allows 256."""
_SLUG_CHARACTERS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """Desired tags of an endpoint, and its traffic and deployments by name in Azure.

    Traffic is in percent. `deployments` can be empty if only traffic and tags change. With `since`,
    the endpoint needs no change if it reached this traffic at that generation or a later one.
    """

    generation: int
    traffic: Mapping[str, int]
    tags: Mapping[str, str]
    deployments: Mapping[str, Deployment] = field(default_factory=dict)
    since: int = 0


def plan_traffic(
    state: EndpointState,
    *,
    generation: int,
    name: Callable[[Deployment], str] | None = None,
    where: str = "",
) -> TrafficPlan:
    """Return the desired traffic and tags of an endpoint for a state.

    `name` returns the name of a deployment in Azure, `build_azure_name` by default. `where` is the
    location that the error shows.

    Raises:
        UserError: the state copies requests to a deployment.
    """
    if any(state.split.shadow.values()):
        raise UserError(
            "a shadow split is not supported: Azure would not compare the answers",
            where=where,
            remedy="Remove `shadow` from the rollout in the pipeline file.",
        )
    names = {d.name: (name or build_azure_name)(d) for d in state.deployments}
    traffic = {names[name]: weight for name, weight in state.split.weights.items() if weight}
    deployments = {names[d.name]: d for d in state.deployments}
    plan = plan_names(deployments, traffic, generation=generation)
    return replace(plan, deployments=deployments)


def plan_names(
    names: Iterable[str], traffic: Mapping[str, int], *, generation: int, since: int = 0
) -> TrafficPlan:
    """Return a plan that changes only the traffic and the tags of an endpoint.

    `names` are the names in Azure of the deployments of the state.
    """
    listed = sorted(names)
    tags = {
        GENERATION: str(generation),
        STATE: short_digest(digest_json([listed, traffic])),
        **split_text(_NAMES, json.dumps(listed), _TAG_CHARACTERS),
    }
    return TrafficPlan(generation=generation, traffic=traffic, tags=tags, since=since)


def build_azure_name(deployment: Deployment, immutable: Mapping[str, Json] | None = None) -> str:
    """Return the name in Azure of a deployment, or of the model that it serves.

    The name has at most 32 characters and is derived from the deployment's fields.

    Args:
        immutable: options with which Azure creates the deployment; None for the name of the model.
    """
    slug = (
        re.sub(r"[^a-z0-9]+", "-", deployment.name.lower()).strip("-")[:_SLUG_CHARACTERS].strip("-")
    )
    slug = slug if slug[:1].isalpha() and slug[:1].isascii() else f"d{slug}"
    content = [
        getattr(deployment, name)
        for name in ("name", "model", "version", "variant", "manifest", "batchable")
    ]
    execution = [dict(immutable)] if immutable is not None else []
    if deployment.threads:
        execution.append({"threads": deployment.threads})
    if deployment.execution != Execution():
        execution.append(codec.to_json(deployment.execution))
    return f"{slug}-{short_digest(digest_json([*content, *deployment.custom_ops, *execution]))}"


def build_record_tags(deployment: Deployment) -> dict[str, str]:
    """Return tags from which `read_record` restores a deployment without location."""
    text = codec.dumps(replace(deployment, location="")).decode()
    return {MANIFEST: deployment.manifest, **split_text(_RECORD, text, _TAG_CHARACTERS)}


def read_record(tags: Mapping[str, str]) -> Deployment | None:
    """Return the deployment that the tags describe; None if they describe none."""
    try:
        return codec.loads(join_text(_RECORD, tags).encode(), Deployment)
    except OnnxOpsError:
        return None


def read_generation(tags: Mapping[str, str]) -> int:
    """Return the generation in an endpoint's tags; 0 if they contain none."""
    text = tags.get(GENERATION, "")
    return int(text) if text.isdecimal() else 0


def read_state(
    tags: Mapping[str, str], traffic: Mapping[str, int], records: Mapping[str, Deployment]
) -> EndpointState | None:
    """Return the endpoint's state; None if its tags do not describe a valid state.

    Tags and traffic must agree with each other and with the records.

    Args:
        tags: tags of the endpoint.
        traffic: percentages by the deployments' names in Azure; names without traffic may be
            missing.
        records: every deployment that can answer, by its name in Azure.
    """
    try:
        listed = read_deployment_names(tags)
        deployments = {name: records[name] for name in listed}
        weights = {deployments[name].name: traffic.get(name, 0) for name in listed}
        if {name for name, weight in traffic.items() if weight} - set(listed):
            return None
        split = TrafficSplit(weights=weights)
        return EndpointState(
            deployments=tuple(deployments.values()), split=split, generation=read_generation(tags)
        )
    except (KeyError, ValueError, TypeError):
        return None


def read_deployment_names(tags: Mapping[str, str]) -> list[str]:
    """Return the names in Azure of the deployments that an endpoint's tags list.

    Raises:
        ValueError: the tags list no deployments.
    """
    names: list[str] = json.loads(join_text(_NAMES, tags))
    return names
