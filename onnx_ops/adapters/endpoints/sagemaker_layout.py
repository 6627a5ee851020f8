"""A state of an endpoint as the requests that SageMaker takes, and back. Nothing here asks anybody.

Models and endpoint configs cannot be changed, so they are called by the digest of what they hold. A config's name has
two parts: which models stand how behind the endpoint, and with which weights it begins. Weights alone may change later.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.aws import GUARDED_VARIANT, is_name, variant_of
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings, listed
from onnx_ops.domain.artifact import digest_bytes, digest_json, hex_of
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import CorruptStateError, UserError
from onnx_ops.protocol.server_process import TRUSTED_KEYS_VARIABLE, format_option_variables

ENDPOINT_TAG = "onnx-ops.endpoint"
DOCUMENT = "ONNX_OPS_DEPLOYMENT_DOCUMENT"
"""Environment variables of a model's container that show which deployment it is: this name with `_0`, `_1` ..."""
_VALUE_CHARACTERS = 1000
"""A variable's value has at most 1,024."""
_STEM = 30
_LAYOUT, _WEIGHTS, _MODEL = 16, 10, 20
_OWN_NAME = re.compile(rf"-[0-9a-f]{{{_MODEL}}}|-[0-9a-f]{{{_LAYOUT}}}-[0-9a-f]{{{_WEIGHTS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What must stand at SageMaker for a state. `weights` are those of production variants, by variant."""

    models: Mapping[str, Mapping[str, Any]]
    config_name: str
    config: Mapping[str, Any]
    weights: Mapping[str, float]

    def holds(self, config_name: str) -> bool:
        """Whether a config has the same models behind the same variants; its weights may differ."""
        return config_name[: -_WEIGHTS - 1] == self.config_name[: -_WEIGHTS - 1]


def document_of(deployment: Deployment) -> bytes:
    """What says which deployment it is, wherever its files lie."""
    return codec.dumps(replace(deployment, location=""))


def variables_of(deployment: Deployment) -> dict[str, str]:
    """Return the document in pieces, as environment variables from which `deployment_in` reads it back."""
    text = document_of(deployment).decode()
    starts = range(0, len(text), _VALUE_CHARACTERS)
    return {f"{DOCUMENT}_{n}": text[start : start + _VALUE_CHARACTERS] for n, start in enumerate(starts)}


def deployment_in(environment: Mapping[str, str]) -> Deployment | None:
    """The deployment that a model's container says it is; None if it is none of ours."""
    text = ""
    for number in itertools.count():
        if (piece := environment.get(f"{DOCUMENT}_{number}")) is None:
            break
        text += piece
    try:
        return codec.loads(text.encode(), Deployment)
    except CorruptStateError:
        return None


def archive_key(prefix: str, endpoint: str, deployment: Deployment) -> str:
    """Where a deployment's archive lies in the bucket; other content has another key."""
    document = hex_of(digest_bytes(document_of(deployment)))[:16]
    return f"{prefix.strip('/')}/{endpoint}/archives/{hex_of(deployment.manifest)}/{document}/model.tar.gz"


def stem_of(endpoint: str) -> str:
    """How the names of an endpoint's models and configs begin; different for different endpoints.

    Raises:
        UserError: SageMaker takes no endpoint of that name.
    """
    if not is_name(endpoint):
        remedy = "Use letters, digits and single hyphens between them, at most 63."
        raise UserError(f"{endpoint!r} cannot be the name of a SageMaker endpoint", remedy=remedy)
    if len(endpoint) <= _STEM:
        return endpoint
    return f"{endpoint[: _STEM - 9].strip('-')}-{hex_of(digest_bytes(endpoint.encode()))[:8]}"


def is_own(name: str, endpoint: str) -> bool:
    """Whether a model or config has a name that we give for this endpoint."""
    stem = stem_of(endpoint)
    return name.startswith(stem) and _OWN_NAME.fullmatch(name[len(stem) :]) is not None


def lay_out(endpoint: str, state: EndpointState, settings: SageMakerSettings, *, trusted_keys: str = "") -> Layout:
    """The requests for a state.

    Args:
        endpoint: its name.
        state: what it shall be.
        settings: how it runs.
        trusted_keys: option of the containers' servers; empty: they load anything. Other keys make other models.

    Raises:
        UserError: SageMaker cannot do that: see the strategies.
    """
    stem = stem_of(endpoint)
    _check(endpoint, state, settings)
    tags = _tags(endpoint, settings)
    models: dict[str, Mapping[str, Any]] = {}
    named: dict[str, str] = {}
    for deployment in state.deployments:
        request = _model(endpoint, deployment, settings, trusted_keys)
        name = f"{stem}-{hex_of(digest_json(request))[:_MODEL]}"
        named[deployment.name] = name
        models[name] = {**request, "ModelName": name, "Tags": tags}
    production = _variants(state, settings)
    asked = {
        **_config(settings),
        "ProductionVariants": [_variant(named[d], v, w, settings) for v, (d, w) in sorted(production.items())],
    }
    bare = [{**one, "InitialVariantWeight": 0} for one in asked["ProductionVariants"]]
    layout = hex_of(digest_json({**asked, "ProductionVariants": bare}))[:_LAYOUT]
    weights = {variant: float(weight) for variant, (_, weight) in production.items()}
    name = f"{stem}-{layout}-{hex_of(digest_json(weights))[:_WEIGHTS]}"
    return Layout(
        models=models, config_name=name, config={**asked, "EndpointConfigName": name, "Tags": tags}, weights=weights
    )


def _variants(state: EndpointState, settings: SageMakerSettings) -> dict[str, tuple[str, float]]:
    """Deployment and weight by variant."""
    if settings.guarded:
        return {GUARDED_VARIANT: (state.leader().name, 100.0)}
    weights = state.split.weights
    return {variant_of(d.name): (d.name, float(weights.get(d.name, 0))) for d in state.deployments}


def _check(endpoint: str, state: EndpointState, settings: SageMakerSettings) -> None:
    serving = [name for name, weight in state.split.weights.items() if weight]
    variants = [variant_of(d.name) for d in state.deployments]
    problem = ""
    if settings.guarded and len(serving) > 1:
        problem = "strategy guarded has one deployment with all traffic; SageMaker itself shifts it"
    elif any(state.split.shadow.values()):
        problem = "it copies requests, but nobody would compare the answers"
    elif len(state.deployments) > 10:
        problem = "an endpoint has at most ten variants"
    elif len(set(variants)) != len(variants):
        problem = f"two deployments would have the same variant: {', '.join(sorted(variants))}"
    if problem:
        raise UserError(f"SageMaker cannot do that: {problem}", where=endpoint)


def _model(endpoint: str, deployment: Deployment, settings: SageMakerSettings, trusted_keys: str) -> dict[str, Any]:
    if len(trusted_keys) > _VALUE_CHARACTERS:
        raise UserError("there are more trusted keys than a container's environment takes", remedy="Retire old ones.")
    options = format_option_variables(settings.server) | ({TRUSTED_KEYS_VARIABLE: trusted_keys} if trusted_keys else {})
    subnets, groups = listed(settings.subnets), listed(settings.security_groups)
    request: dict[str, Any] = {
        "ExecutionRoleArn": settings.role,
        "PrimaryContainer": {
            "Image": settings.image,
            "ModelDataUrl": f"s3://{settings.bucket}/{archive_key(settings.prefix, endpoint, deployment)}",
            "Environment": variables_of(deployment) | options,
        },
        "EnableNetworkIsolation": settings.isolated,
    }
    if subnets:
        request["VpcConfig"] = {"Subnets": list(subnets), "SecurityGroupIds": list(groups)}
    return request


def _variant(model: str, variant: str, weight: float, settings: SageMakerSettings) -> dict[str, Any]:
    request: dict[str, Any] = {"VariantName": variant, "ModelName": model, "InitialVariantWeight": weight}
    if settings.serverless:
        serverless = {"MemorySizeInMB": settings.memory_mb, "MaxConcurrency": settings.max_concurrency}
        if settings.provisioned_concurrency:
            serverless["ProvisionedConcurrency"] = settings.provisioned_concurrency
        return {**request, "ServerlessConfig": serverless}
    request |= {
        "InstanceType": settings.instance_type,
        "InitialInstanceCount": settings.instance_count,
        "ContainerStartupHealthCheckTimeoutInSeconds": settings.startup_s,
    }
    if settings.volume_gb:
        request["VolumeSizeInGB"] = settings.volume_gb
    return request


def _config(settings: SageMakerSettings) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if settings.kms_key and not settings.serverless:
        request["KmsKeyId"] = settings.kms_key
    if settings.capture_percent:
        capture = {
            "EnableCapture": True,
            "InitialSamplingPercentage": settings.capture_percent,
            "DestinationS3Uri": settings.capture_uri,
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
        }
        request["DataCaptureConfig"] = {**capture, **({"KmsKeyId": settings.kms_key} if settings.kms_key else {})}
    return request


def _tags(endpoint: str, settings: SageMakerSettings) -> list[dict[str, str]]:
    tags = {**settings.own_tags, ENDPOINT_TAG: endpoint}
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
