"""How an endpoint at SageMaker differs from its settings.

Models and configs are named by what they hold, so a config of the wanted name has the wanted instances and images. Of
any other one, what differs is read here. Which keys a container trusts stays as it was when its model was made, as
machines may hold different keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onnx_ops.adapters.endpoints.sagemaker_layout import Layout
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings
from onnx_ops.protocol.server_process import OPTION_PREFIX, TRUSTED_KEYS_VARIABLE

_OF_VARIANTS = (
    "InstanceType",
    "ServerlessConfig",
    "VolumeSizeInGB",
    "ContainerStartupHealthCheckTimeoutInSeconds",
)
_OF_CONFIG = ("KmsKeyId", "DataCaptureConfig")
_OF_MODEL = ("ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation")


def instance_drift(found: Mapping[str, Any], settings: SageMakerSettings) -> Iterator[str]:
    """Variants of an endpoint that shall have another number of instances than the settings say."""
    for variant in found.get("ProductionVariants", ()):
        count = variant.get("DesiredInstanceCount")
        if count is not None and count != settings.instance_count:
            yield f"instances of {variant['VariantName']}: {count}, not {settings.instance_count}"


def config_drift(config: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], layout: Layout) -> Iterator[str]:
    """What differs between the config that an endpoint has, with its models by name, and a layout of the same
    deployments."""
    yield from _differences("", _picked(config, _OF_CONFIG), _picked(layout.config, _OF_CONFIG))
    there, wanted = ({v["VariantName"]: v for v in variants_in(each)} for each in (config, layout.config))
    if set(there) != set(wanted):  # the strategy is another
        yield f"variants: {', '.join(sorted(there))}, not {', '.join(sorted(wanted))}"
        return
    for name, variant in there.items():
        yield from _differences(f"{name}.", _picked(variant, _OF_VARIANTS), _picked(wanted[name], _OF_VARIANTS))
        made, asked = models[variant["ModelName"]], layout.models[wanted[name]["ModelName"]]
        yield from _differences(f"{name}.", _of_model(made), _of_model(asked))


def variants_in(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Production variants of a config, and shadows that a hand has given it."""
    return [*config["ProductionVariants"], *config.get("ShadowProductionVariants", ())]


def _of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    container = model["PrimaryContainer"]
    options = {
        name: value
        for name, value in container.get("Environment", {}).items()
        if name.startswith(OPTION_PREFIX) and name != TRUSTED_KEYS_VARIABLE
    }
    archive = {"ModelDataUrl": container["ModelDataUrl"], "Image": container["Image"]}
    return _picked(model, _OF_MODEL) | archive | options


def _picked(document: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: document[name] for name in names if document.get(name)}


def _differences(place: str, found: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    """Values that are not as asked for. The service describes some with more than was asked for."""
    for name in sorted({*found, *asked}):
        there, wanted = found.get(name), asked.get(name)
        if isinstance(there, Mapping) and isinstance(wanted, Mapping):
            yield from _differences(f"{place}{name}.", {key: there.get(key) for key in wanted}, wanted)
        elif there != wanted:
            yield f"{place}{name}: {_told(there)}, not {_told(wanted)}"


def _told(value: object) -> str:
    return "none" if value is None else str(value)
