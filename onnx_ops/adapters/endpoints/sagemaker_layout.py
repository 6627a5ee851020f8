"""Conversion between the state of an endpoint and requests to SageMaker.

Models and configs are immutable, so their names contain the digest of their content. The digest of
a config's weights is a separate part of its name. Trusted keys are not compared with those of
running containers, since the machines that run onnx-ops can have different keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.aws import GUARDED_VARIANT, build_variant_name, is_valid_name
from onnx_ops.adapters.endpoints.cloud import format_follower_variables, join_text, split_text
from onnx_ops.adapters.endpoints.sagemaker_options import SageMakerOptions
from onnx_ops.config.server_options import format_option_variables
from onnx_ops.domain.artifact import digest_bytes, digest_json, hex_digits
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.errors import CorruptStateError, UserError
from onnx_ops.protocol.server_process import OPTION_PREFIX, TRUSTED_KEYS_VARIABLE

ENDPOINT_TAG = "onnx-ops.endpoint"
DOCUMENT = "ONNX_OPS_DEPLOYMENT_DOCUMENT"
"""Start of the names of environment variables with a container's deployment.

The document is split into variables with the suffixes `_0`, `_1` ….
"""
_VALUE_CHARACTERS = 1000
"""Maximum number of characters in a variable's value; SageMaker allows 1,024."""
_STEM_CHARACTERS = 30
_LAYOUT_DIGITS, _WEIGHTS_DIGITS, _MODEL_DIGITS = 16, 10, 20
_OWN_SUFFIX = re.compile(
    rf"-[0-9a-f]{{{_MODEL_DIGITS}}}|-[0-9a-f]{{{_LAYOUT_DIGITS}}}-[0-9a-f]{{{_WEIGHTS_DIGITS}}}"
)
_COMPARED_IN_VARIANT = (
    "InstanceType",
    "ServerlessConfig",
    "VolumeSizeInGB",
    "ContainerStartupHealthCheckTimeoutInSeconds",
    "ModelDataDownloadTimeoutInSeconds",
    "InferenceAmiVersion",
    "RoutingConfig",
    "CapacityReservationConfig",
)
_COMPARED_IN_CONFIG = ("KmsKeyId", "DataCaptureConfig", "MetricsConfig")
_COMPARED_IN_MODEL = ("ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLayout:
    """The SageMaker resources of a state; `weights` are by variant."""

    models: Mapping[str, Mapping[str, Any]]
    config_name: str
    config: Mapping[str, Any]
    weights: Mapping[str, float]

    def has_config(self, config_name: str) -> bool:
        """Return whether a config differs from this layout at most in its weights.

        The names are compared. A name contains a digest of the variants and options, without tags.
        """
        return config_name[: -_WEIGHTS_DIGITS - 1] == self.config_name[: -_WEIGHTS_DIGITS - 1]

    def copy_config(self) -> EndpointLayout:
        """Return the same layout with another name of the config."""
        digits = hex_digits(digest_bytes(self.config_name.encode()))[:_WEIGHTS_DIGITS]
        name = f"{self.config_name[:-_WEIGHTS_DIGITS]}{digits}"
        return replace(self, config_name=name, config={**self.config, "EndpointConfigName": name})


def encode_deployment(deployment: Deployment) -> bytes:
    """Return the deployment as JSON, without its location on this machine."""
    return codec.dumps(replace(deployment, location=""))


def encode_variables(deployment: Deployment) -> dict[str, str]:
    """Return the variables from which `read_deployment` restores the deployment."""
    return split_text(f"{DOCUMENT}_", encode_deployment(deployment).decode(), _VALUE_CHARACTERS)


def read_deployment(model: Mapping[str, Any]) -> Deployment | None:
    """Return the deployment in a model's description.

    The result is None if onnx-ops did not create the model.
    """
    environment = model.get("PrimaryContainer", {}).get("Environment", {})
    try:
        return codec.loads(join_text(f"{DOCUMENT}_", environment).encode(), Deployment)
    except CorruptStateError:
        return None


def build_archive_key(prefix: str, endpoint: str, deployment: Deployment) -> str:
    """Return the key of a deployment's archive.

    The key contains the manifest digest and a digest of the deployment document.
    """
    document = hex_digits(digest_bytes(encode_deployment(deployment)))[:16]
    return (
        f"{prefix.strip('/')}/{endpoint}/archives/{hex_digits(deployment.manifest)}/{document}"
        "/model.tar.gz"
    )


def build_name_stem(endpoint: str) -> str:
    """Return the unique stem of the names of an endpoint's models and configs.

    Raises:
        UserError: SageMaker does not support the endpoint's name.
    """
    if not is_valid_name(endpoint):
        remedy = "Use at most 63 letters, digits and hyphens, with no hyphen first or last."
        raise UserError(f"{endpoint!r} cannot be the name of a SageMaker endpoint", remedy=remedy)
    if len(endpoint) <= _STEM_CHARACTERS:
        return endpoint
    return (
        f"{endpoint[: _STEM_CHARACTERS - 9].strip('-')}"
        f"-{hex_digits(digest_bytes(endpoint.encode()))[:8]}"
    )


def is_own_name(name: str, endpoint: str) -> bool:
    """Return whether a name has the form of this endpoint's models and configs."""
    stem = build_name_stem(endpoint)
    return name.startswith(stem) and _OWN_SUFFIX.fullmatch(name[len(stem) :]) is not None


def build_layout(
    endpoint: str, state: EndpointState, options: SageMakerOptions, *, trusted_keys: str = ""
) -> EndpointLayout:
    """Return the requests for a state.

    Without `trusted_keys`, the containers' servers load any model; `traffic: table` requires keys.
    The keys are part of the environment of a SageMaker model, so other keys result in other
    SageMaker models.

    Raises:
        UserError: SageMaker does not support the endpoint's name or the state. Or the trusted keys
            are too long, or are missing although the instances follow a table.
    """
    stem = build_name_stem(endpoint)
    _require_possible(endpoint, state, options)
    tags = [
        {"Key": key, "Value": value}
        for key, value in sorted({**options.tags, ENDPOINT_TAG: endpoint}.items())
    ]
    models: dict[str, Mapping[str, Any]] = {}
    model_names: dict[str, str] = {}
    for deployment in state.deployments:
        request = _model_request(endpoint, deployment, options, trusted_keys)
        name = f"{stem}-{hex_digits(digest_json(request))[:_MODEL_DIGITS]}"
        model_names[deployment.name] = name
        models[name] = {**request, "ModelName": name, "Tags": tags}
    if options.guarded:
        variants = {GUARDED_VARIANT: (state.leader().name, 100.0)}
    else:
        weight_of = state.split.weights
        variants = {
            build_variant_name(d.name): (d.name, float(weight_of.get(d.name, 0)))
            for d in state.deployments
        }
    production = [
        _variant_request(model_names[name], variant, weight, options)
        for variant, (name, weight) in sorted(variants.items())
    ]
    config = {**_config_request(options), "ProductionVariants": production}
    unweighted = [{**variant, "InitialVariantWeight": 0} for variant in production]
    layout = hex_digits(digest_json({**config, "ProductionVariants": unweighted}))[:_LAYOUT_DIGITS]
    weights = {variant: weight for variant, (_, weight) in variants.items()}
    name = f"{stem}-{layout}-{hex_digits(digest_json(weights))[:_WEIGHTS_DIGITS]}"
    return EndpointLayout(
        models=models,
        config_name=name,
        config={**config, "EndpointConfigName": name, "Tags": tags},
        weights=weights,
    )


def _require_possible(endpoint: str, state: EndpointState, options: SageMakerOptions) -> None:
    serving = [name for name, weight in state.split.weights.items() if weight]
    variants = [build_variant_name(d.name) for d in state.deployments]
    problem = ""
    if options.guarded and len(serving) > 1:
        problem = (
            "with strategy guarded, one deployment has all traffic; SageMaker itself shifts traffic"
        )
    elif any(state.split.shadow.values()):
        problem = "SageMaker does not compare the answers of a shadow variant"
    elif len(state.deployments) > 10:
        problem = f"an endpoint can have at most 10 variants, not {len(state.deployments)}"
    elif len(set(variants)) != len(variants):
        repeated = sorted({name for name in variants if variants.count(name) > 1})
        problem = f"several deployments would have the same variant name: {', '.join(repeated)}"
    if problem:
        raise UserError(f"SageMaker does not support this state: {problem}", where=endpoint)


def _model_request(
    endpoint: str, deployment: Deployment, options: SageMakerOptions, trusted_keys: str
) -> dict[str, Any]:
    if len(trusted_keys) > _VALUE_CHARACTERS:
        raise UserError(
            f"the trusted keys have {len(trusted_keys)} characters, and onnx-ops writes at most "
            f"{_VALUE_CHARACTERS} into an environment variable of a container",
            remedy="Retire old keys with `onnx-ops keys retire KEY`.",
        )
    environment = format_option_variables(options)
    if trusted_keys:
        environment[TRUSTED_KEYS_VARIABLE] = trusted_keys
    container: dict[str, Any] = {"Image": options.image}
    if options.is_table:
        environment |= format_follower_variables(
            endpoint, options.locate(endpoint), options.image, trusted_keys
        )
    else:
        archive = build_archive_key(options.prefix, endpoint, deployment)
        container["ModelDataUrl"] = f"s3://{options.bucket}/{archive}"
    container["Environment"] = encode_variables(deployment) | environment
    request: dict[str, Any] = {
        "ExecutionRoleArn": options.role,
        "PrimaryContainer": container,
        "EnableNetworkIsolation": options.isolated,
    }
    if options.subnets:
        groups = list(options.security_groups)
        request["VpcConfig"] = {"Subnets": list(options.subnets), "SecurityGroupIds": groups}
    return request


def _variant_request(
    model: str, variant: str, weight: float, options: SageMakerOptions
) -> dict[str, Any]:
    request: dict[str, Any] = {
        "VariantName": variant,
        "ModelName": model,
        "InitialVariantWeight": weight,
    }
    if options.serverless:
        serverless = {
            "MemorySizeInMB": options.memory_mib,
            "MaxConcurrency": options.max_concurrency,
        }
        if options.provisioned_concurrency:
            serverless["ProvisionedConcurrency"] = options.provisioned_concurrency
        return {**request, "ServerlessConfig": serverless}
    request |= {
        "InstanceType": options.instance_type,
        "InitialInstanceCount": options.instance_count,
        "ContainerStartupHealthCheckTimeoutInSeconds": int(options.startup),
    }
    if options.volume_gb:
        request["VolumeSizeInGB"] = options.volume_gb
    if options.download_timeout is not None:
        request["ModelDataDownloadTimeoutInSeconds"] = int(options.download_timeout)
    if options.inference_ami:
        request["InferenceAmiVersion"] = options.inference_ami
    if options.routing != "default":
        request["RoutingConfig"] = {"RoutingStrategy": options.routing.upper()}
    if options.capacity_reservation:
        request["CapacityReservationConfig"] = {
            "CapacityReservationPreference": "capacity-reservations-only",
            "MlReservationArn": options.capacity_reservation,
        }
    return request


def _config_request(options: SageMakerOptions) -> dict[str, Any]:
    key = {"KmsKeyId": options.kms_key} if options.kms_key else {}
    request: dict[str, Any] = {} if options.serverless else dict(key)
    if options.capture_percent:
        request["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": options.capture_percent,
            "DestinationS3Uri": options.capture_uri,
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
            # SageMaker captures bodies of any other content type as Base64.
            "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
            **key,
        }
    if options.metric_interval_s:
        # SageMaker applies the interval to the metrics of invocations only if enhanced metrics are
        # enabled.
        request["MetricsConfig"] = {
            "EnableEnhancedMetrics": True,
            "MetricPublishFrequencyInSeconds": options.metric_interval_s,
        }
    return request


def read_state(
    variants: Mapping[str, Deployment | None], weights: Mapping[str, float], generation: int
) -> EndpointState | None:
    """Return an endpoint's state.

    Every variant must have a deployment of onnx-ops, and at least one must have traffic. Otherwise,
    the result is None.

    Args:
        variants: the deployment of each variant in the endpoint's config; None if onnx-ops did not
            create the variant's model.
        weights: the current weights by variant.
        generation: the generation of the last claim.
    """
    deployments = {
        variant: deployment for variant, deployment in variants.items() if deployment is not None
    }
    total = sum(weights.values())
    if len(deployments) != len(variants) or not set(weights) <= set(deployments) or not total:
        return None
    percent = {variant: round(100 * weight / total) for variant, weight in weights.items()}
    largest = max(percent, key=lambda variant: (percent[variant], variant))
    percent[largest] += 100 - sum(percent.values())  # Rounded shares need not sum to 100.
    split = TrafficSplit(
        weights={deployments[variant].name: share for variant, share in percent.items()}
    )
    return EndpointState(
        deployments=tuple(deployments.values()), split=split, generation=generation
    )


def has_weights(description: Mapping[str, Any], desired: Mapping[str, float]) -> bool:
    """Return whether traffic has these weights and is not being changed."""
    desired_total = sum(desired.values())
    for key in ("CurrentWeight", "DesiredWeight"):
        weights = {
            v["VariantName"]: float(v.get(key, 0.0))
            for v in description.get("ProductionVariants", ())
        }
        total = sum(weights.values())
        if set(weights) != set(desired) or not total:
            return False
        if any(
            abs(weights[name] / total - weight / desired_total) >= 1e-3
            for name, weight in desired.items()
        ):
            return False
    return True


def find_config_drift(
    config: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], layout: EndpointLayout
) -> Iterator[str]:
    """Yield how an endpoint's config differs from the config of a layout.

    `models` are the models of the config by name.
    """
    yield from _differences(
        "", _pick(config, _COMPARED_IN_CONFIG), _pick(layout.config, _COMPARED_IN_CONFIG)
    )
    actual, desired = (
        {v["VariantName"]: v for v in list_variants(each)} for each in (config, layout.config)
    )
    if set(actual) != set(desired):
        # For example, another traffic strategy uses other variants. The settings of different
        # variants cannot be compared.
        yield f"variants: {', '.join(sorted(actual))}, not {', '.join(sorted(desired))}"
        return
    for name, variant in actual.items():
        wanted = desired[name]
        yield from _differences(
            f"{name}.", _pick(variant, _COMPARED_IN_VARIANT), _pick(wanted, _COMPARED_IN_VARIANT)
        )
        model, wanted_model = models[variant["ModelName"]], layout.models[wanted["ModelName"]]
        yield from _differences(
            f"{name}.", _compared_in_model(model), _compared_in_model(wanted_model)
        )


def list_variants(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the production variants of a config, and its shadow variants."""
    return [*config["ProductionVariants"], *config.get("ShadowProductionVariants", ())]


def _compared_in_model(model: Mapping[str, Any]) -> dict[str, Any]:
    container = model["PrimaryContainer"]
    environment = {
        name: value
        for name, value in container.get("Environment", {}).items()
        if name.startswith(OPTION_PREFIX) and name != TRUSTED_KEYS_VARIABLE
    }
    return (
        _pick(model, _COMPARED_IN_MODEL) | _pick(container, ("ModelDataUrl", "Image")) | environment
    )


def _pick(document: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: document[name] for name in names if document.get(name)}


def _differences(
    place: str, actual: Mapping[str, Any], desired: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the actual values that differ from the desired values.

    In a nested value, only the desired fields are compared, since SageMaker returns more fields
    than were requested.
    """
    for name in sorted({*actual, *desired}):
        value, wanted = actual.get(name), desired.get(name)
        if isinstance(value, Mapping) and isinstance(wanted, Mapping):
            yield from _differences(
                f"{place}{name}.", {key: value.get(key) for key in wanted}, wanted
            )
        elif value != wanted:
            shown = ("none" if one is None else str(one) for one in (value, wanted))
            yield f"{place}{name}: {', not '.join(shown)}"
