"""A state in Azure's terms: names, tags and traffic of an endpoint. Pure.

The endpoint's tags say which state was applied, the deployments' tags what they hold. Tags and traffic go into the same
request, so there is no moment at which one is old and the other new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, digest_json, short
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.execution import Execution
from onnx_ops.errors import OnnxOpsError, UserError

OWNER = "onnx-ops-endpoint"
GENERATION = "onnx-ops-generation"
STATE = "onnx-ops-state"
_NAMES = "onnx-ops-deployments"
_RECORD = "onnx-ops-record"
MANIFEST = "onnx-ops-manifest"
SCALING = "onnx-ops-scaling"
"""How a deployment is scaled automatically, or `NOT_SCALED`."""
NOT_SCALED = "none"

_TAG_CHARACTERS = 250
"""A tag's value has at most 256."""
_SLUG = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the endpoint shall be: deployments by their names in Azure, percentages of traffic by name."""

    generation: int
    deployments: Mapping[str, Deployment]
    traffic: Mapping[str, int]
    tags: Mapping[str, str]

    @property
    def digest(self) -> str:
        return self.tags[STATE]


def planned(
    state: EndpointState, *, generation: int, name: Callable[[Deployment], str] | None = None, where: str = ""
) -> Plan:
    """What an endpoint shall be for a state. `name` tells what a deployment is called in Azure.

    Raises:
        UserError: the state asks for copies of requests.
    """
    if any(state.split.shadow.values()):
        raise UserError("Azure mirrors requests, but nobody would compare the answers", where=where)
    names = {d.name: (name or azure_name)(d) for d in state.deployments}
    traffic = {names[name]: weight for name, weight in state.split.weights.items() if weight}
    deployments = {names[d.name]: d for d in state.deployments}
    tags = {
        GENERATION: str(generation),
        STATE: short(digest_json([sorted(deployments), traffic])),
        **_cut(_NAMES, json.dumps(sorted(deployments))),
    }
    return Plan(generation=generation, deployments=deployments, traffic=traffic, tags=tags)


def azure_name(deployment: Deployment, made_with: Mapping[str, str | int | float | bool] | None = None) -> str:
    """One name for one content: what stands under it never changes. Lower case, at most 32 characters.

    Args:
        deployment: what it serves. By that alone its model is named.
        made_with: settings that a deployment in Azure was made with.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", deployment.name.lower()).strip("-")[:_SLUG].strip("-")
    slug = slug if slug[:1].isalpha() and slug[:1].isascii() else f"d{slug}"
    what = [getattr(deployment, name) for name in ("name", "model", "version", "variant", "manifest", "batchable")]
    how = [dict(made_with)] if made_with is not None else []
    if deployment.execution != Execution():
        how.append(codec.to_json(deployment.execution))
    return f"{slug}-{short(digest_json([*what, *deployment.custom_ops, *how]))}"


def record_tags(deployment: Deployment) -> dict[str, str]:
    """Tags of a deployment, from which `record_of` reads it back. Where its files stand here is nobody's business."""
    text = codec.dumps(replace(deployment, location="")).decode()
    return {MANIFEST: deployment.manifest, **_cut(_RECORD, text)}


def record_of(tags: Mapping[str, str]) -> Deployment | None:
    """None if these are not the tags of one of our deployments."""
    try:
        return codec.loads(_joined(_RECORD, tags).encode(), Deployment)
    except OnnxOpsError:
        return None


def manifest_of(tags: Mapping[str, str]) -> Digest | None:
    return Digest(tags[MANIFEST]) if MANIFEST in tags else None


def generation_of(tags: Mapping[str, str]) -> int:
    """0 where nothing was applied yet."""
    text = tags.get(GENERATION, "")
    return int(text) if text.isdecimal() else 0


def without_ours(tags: Mapping[str, str]) -> dict[str, str]:
    """What others have tagged stays."""
    return {key: value for key, value in tags.items() if not key.startswith("onnx-ops-")}


def state_of(
    tags: Mapping[str, str], traffic: Mapping[str, int], records: Mapping[str, Deployment]
) -> EndpointState | None:
    """What an endpoint does, or None if that is no state: a deployment is lost, or traffic goes elsewhere or nowhere.

    Args:
        tags: the endpoint's.
        traffic: percentages by the deployments' names in Azure; names without traffic may be missing.
        records: what every deployment that can answer holds, by its name in Azure.
    """
    try:
        listed = listed_in(tags)
        ours = {name: records[name] for name in listed}
        weights = {ours[name].name: traffic.get(name, 0) for name in listed}
        if {name for name, weight in traffic.items() if weight} - set(listed):
            return None
        split = TrafficSplit(weights=weights)
        return EndpointState(deployments=tuple(ours.values()), split=split, generation=generation_of(tags))
    except (KeyError, ValueError, TypeError):
        return None


def listed_in(tags: Mapping[str, str]) -> list[str]:
    """Names in Azure of the deployments that an endpoint's tags name.

    Raises:
        ValueError: they name none.
    """
    listed: list[str] = json.loads(_joined(_NAMES, tags))
    return listed


def _cut(name: str, text: str) -> dict[str, str]:
    pieces = range(0, len(text), _TAG_CHARACTERS)
    return {f"{name}-{number}": text[start : start + _TAG_CHARACTERS] for number, start in enumerate(pieces)}


def _joined(name: str, tags: Mapping[str, str]) -> str:
    pieces: list[str] = []
    while (piece := tags.get(f"{name}-{len(pieces)}")) is not None:
        pieces.append(piece)
    return "".join(pieces)
