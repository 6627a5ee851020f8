"""Settings of an endpoint in Azure ML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnx_ops.adapters.azure import ANSWER_S, ENDPOINT_NAME, Scalar, Workspace, workspace_of
from onnx_ops.errors import UserError
from onnx_ops.protocol.server_process import (
    TRUSTED_KEYS_VARIABLE,
    format_option_variables,
    parse_options,
    select_container_options,
)

_DATASTORE = re.compile(r"azureml://datastores/(?P<datastore>\w+)/paths/(?P<folder>[\w./-]+?)/?", re.ASCII)
_IMAGE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)
_SIZE = re.compile(r"[A-Z][A-Za-z]+_\w+", re.ASCII)
_REGISTRY = re.compile(r"[A-Za-z0-9][\w-]{2,32}", re.ASCII)
_AUTH = ("key", "aml_token", "aad_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """What an endpoint's settings say.

    `image` is the serving image in a registry that the endpoint's identity may pull from, best with its digest.
    `instance_type` and `instances` are what every deployment runs on. With `max_instances` Azure Monitor keeps each
    deployment's instances between that and `min_instances`, by their mean load of the processor: it adds one above
    `cpu_percent`, and takes one away below half of it. `models` is the folder of a datastore that
    gets the models, `registry` the Azure ML registry that they are copied into and read from. `auth` is how clients
    show who they are, `identity` the resource id of a user-assigned identity (a system-assigned one without it),
    `name` the endpoint's name in Azure, `request_timeout` in seconds. `max_concurrent_requests_per_instance` is how
    many requests Azure gives to an instance at a time before it answers 429 itself: as many as the server queues by
    default, where Azure's own default is 1. `blob_url` is the address of the datastore's storage account where it has
    another one than usual, `answer_s` how many seconds Azure may take to answer one request. `server` are options of
    the endpoint server.
    """

    place: Workspace
    image: str
    instance_type: str
    instances: int = 1
    min_instances: int = 0
    max_instances: int = 0
    cpu_percent: int = 70
    registry: str = ""
    models: str = "azureml://datastores/workspaceblobstore/paths/onnx-ops"
    auth: str = "key"
    identity: str = ""
    request_timeout: float = 60.0
    max_concurrent_requests_per_instance: int = 0
    blob_url: str = ""
    answer_s: float = ANSWER_S
    server: Mapping[str, Scalar]

    @property
    def datastore(self) -> str:
        return str(_parts(self.models)["datastore"])

    @property
    def folder(self) -> str:
        """Path inside the datastore."""
        return str(_parts(self.models)["folder"])

    @property
    def concurrency(self) -> int:
        """Requests that an instance gets at a time."""
        return self.max_concurrent_requests_per_instance or parse_options(self.server).queue

    @property
    def scaled(self) -> bool:
        return self.max_instances > 0

    @property
    def made_with(self) -> Mapping[str, Scalar]:
        """What a deployment keeps for as long as it exists, but for the keys that its container trusts."""
        variables = {name: value for name, value in self.variables().items() if name != TRUSTED_KEYS_VARIABLE}
        return {
            "image": self.image,
            "instance_type": self.instance_type,
            "max_concurrent_requests_per_instance": self.concurrency,
            "request_timeout": self.request_timeout,
            **variables,
        }

    def variables(self) -> dict[str, str]:
        """Environment of the container."""
        return format_option_variables(self.server)


_OWN = ("subscription", "resource_group", "workspace", "name")
_KNOWN = (
    "image",
    "instance_type",
    "instances",
    "min_instances",
    "max_instances",
    "cpu_percent",
    "registry",
    "models",
    "auth",
    "identity",
    "request_timeout",
    "max_concurrent_requests_per_instance",
    "blob_url",
    "answer_s",
)


def read_settings(settings: Mapping[str, Scalar], *, where: str = "") -> AzureSettings:
    """Raises UserError if a setting is not known, missing or wrong."""
    place = workspace_of(settings, where=where)
    name = settings.get("name")
    if name is not None and not (isinstance(name, str) and ENDPOINT_NAME.fullmatch(name)):
        raise _wrong("name", name, "3 to 32 lower-case letters, digits and hyphens, first a letter", where)
    given = {key: value for key, value in settings.items() if key in _KNOWN}
    server = select_container_options(settings, where=where, others=(*_OWN, *_KNOWN))
    for key in ("image", "instance_type"):
        if key not in given:
            raise UserError(f"azureml needs {key}", where=where, remedy="See docs/azureml.md for an example.")
    _check(given, where)
    read = AzureSettings(place=place, server=server, **given)  # type: ignore[arg-type] # _check has seen to it
    if bool(read.min_instances) != read.scaled or ("cpu_percent" in given and not read.scaled):
        remedy = "Set min_instances and max_instances for autoscaling, or neither, and cpu_percent with them only."
        raise UserError("min_instances, max_instances and cpu_percent belong together", where=where, remedy=remedy)
    if read.scaled and not read.min_instances <= read.instances <= read.max_instances:
        raise _wrong("instances", read.instances, "a number from min_instances to max_instances", where)
    return read


def _check(given: Mapping[str, Scalar], where: str) -> None:
    texts = {"image": (_IMAGE, "REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST"), "instance_type": (_SIZE, "a size")}
    for key, (pattern, told) in texts.items():
        if not (isinstance(given[key], str) and pattern.fullmatch(str(given[key]))):
            raise _wrong(key, given[key], told, where)
    most_of = {"instances": 500, "max_concurrent_requests_per_instance": 10_000, "cpu_percent": 100}
    for key, most in {**most_of, "min_instances": 500, "max_instances": 500}.items():
        if type(number := given.get(key, 1)) is not int or not 1 <= number <= most:
            raise _wrong(key, number, f"a number from 1 to {most}", where)
    for key, (low, high) in {"request_timeout": (0.001, 180.0), "answer_s": (0.1, 600.0)}.items():
        if type(seconds := given.get(key, high)) not in (int, float) or not low <= float(seconds) <= high:
            raise _wrong(key, seconds, f"seconds, from {low:g} to {high:g}", where)
    registry = given.get("registry", "")
    if registry and not (isinstance(registry, str) and _REGISTRY.fullmatch(registry)):
        raise _wrong("registry", registry, "the name of an Azure ML registry", where)
    if "models" in given and not _DATASTORE.fullmatch(str(given["models"])):
        raise _wrong("models", given["models"], "azureml://datastores/NAME/paths/FOLDER", where)
    if given.get("auth", "key") not in _AUTH:
        raise _wrong("auth", given["auth"], f"one of {', '.join(_AUTH)}", where)
    identity, blob_url = given.get("identity", ""), given.get("blob_url", "")
    if identity and not str(identity).startswith("/subscriptions/"):
        raise _wrong("identity", identity, "the resource id of a user-assigned identity", where)
    if blob_url and not str(blob_url).startswith("https://"):
        raise _wrong("blob_url", blob_url, "an https address", where)


def _parts(models: str) -> re.Match[str]:
    found = _DATASTORE.fullmatch(models)
    if found is None:
        raise _wrong("models", models, "azureml://datastores/NAME/paths/FOLDER", "")
    return found


def _wrong(key: str, value: object, wanted: str, where: str) -> UserError:
    return UserError(f"{key} is {value!r}", where=where, remedy=f"It must be {wanted}.")
