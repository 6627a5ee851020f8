"""MLflow's deployments target `onnx-ops`.

The target provides `mlflow deployments create -t onnx-ops …` and `get_deploy_client`.

A deployment is an endpoint, and all rules of endpoints apply. A version is promoted as by
`onnx-ops promote`, with its signed decision verified. The reconciler moves the endpoint. Endpoints
that serve the same model on the same target follow the same alias.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from onnx_ops.app.context import Project, open_project
from onnx_ops.app.handler import at_rest
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout import format_alias
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    MeasurementError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
    quoted,
)
from onnx_ops.release.journal import Journal, list_bound_endpoints, read_readable_state
from onnx_ops.release.promote import bind_endpoint, delete_endpoint, promote
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.status import read_status

if TYPE_CHECKING:
    import pandas as pd

P = ParamSpec("P")
R = TypeVar("R")

_FLAVOR = "onnx"
_MODEL_URI = re.compile(r"models:/+([^/@]+)(?:/([0-9]+)|@([A-Za-z0-9_-]+))")
_PREDICT_S = 300.0
_CODES: tuple[tuple[type[OnnxOpsError], str], ...] = (
    (NotFoundError, "RESOURCE_DOES_NOT_EXIST"),
    (RefusedError, "PERMISSION_DENIED"),
    (ConflictError, "RESOURCE_CONFLICT"),
    (ServiceUnavailableError, "TEMPORARILY_UNAVAILABLE"),
    (MeasurementError, "INTERNAL_ERROR"),
    (UserError, "INVALID_PARAMETER_VALUE"),
)
_HELP = """\
Target onnx-ops: endpoints of an onnx-ops project.

  mlflow deployments create -t onnx-ops --name digits -m models:/digits-mlp/3 -C target=cpu-1t
  mlflow deployments update -t onnx-ops --name digits -m models:/digits-mlp@challenger-cpu-1t

Target URI: `onnx-ops` for the project around the current folder, \
`onnx-ops:/path/to/project` for another one.

Config of create and update (-C name=value):
  target    a target that `onnx-ops targets` lists; required by create, unchanged by update
  provider  endpoint plugin; default local
  reason    why, recorded in a tag of the version
  others    options of a new endpoint, as under `deploy: … options:` in a pipeline file, \
e.g. port=8080

A version is refused (PERMISSION_DENIED) if it has no passing, correctly signed decision \
for the target. Its
files must have been registered by `onnx-ops run`. Endpoints of the same model and target follow \
the same alias, so that
an update moves all of them; each by the steps of its rollout policy.
"""


def target_help() -> str:
    """Return the text of `mlflow deployments help -t onnx-ops`."""
    return _HELP


def run_local(
    target: str,
    name: str,
    model_uri: str,
    flavor: str | None = None,
    config: Mapping[str, str] | None = None,
) -> None:
    """Create a deployment on this machine; a provider in `config` is ignored."""
    OnnxOpsDeployments(target).create_deployment(
        name, model_uri, flavor, {**(config or {}), "provider": "local"}
    )


def _translated(method: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of the method that raises errors of onnx-ops as MLflow errors."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except OnnxOpsError as error:
            code = next(
                (code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL_ERROR"
            )
            raise MlflowException(str(error), error_code=ErrorCode.Value(code)) from error

    return wrapped


class OnnxOpsDeployments(BaseDeploymentClient):
    """Endpoints of one project as MLflow deployments."""

    @_translated
    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)  # type: ignore[no-untyped-call]
        path = urlsplit(target_uri)
        place = f"{path.netloc}{path.path}" if path.scheme else ""
        self._project: Project = open_project(Path(place) if place else None)
        self._context = self._project.context

    @_translated
    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: Mapping[str, str] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, str]:
        """Bind a new endpoint, and serve the version on it.

        If the version is refused, no endpoint is bound.
        """
        _check_flavor(flavor)
        if name in list_bound_endpoints(self._context):
            remedy = (
                f"Change it with `mlflow deployments update -t {self.target_uri} --name {name} "
                f"-m {model_uri}`."
            )
            if read_readable_state(self._context, name).deleting:
                remedy = f"It is being deleted: run `onnx-ops delete {name}`, then create it again."
            raise UserError(f"deployment {name} already exists", remedy=remedy)
        model, version = self._version(model_uri)
        given = dict(config or {})
        target_name, provider = given.pop("target", ""), given.pop("provider", "local")
        reason = given.pop("reason", "")
        if not target_name:
            raise UserError(
                "a new deployment needs a target",
                remedy="Add -C target=NAME; `onnx-ops targets` lists the targets.",
            )
        options = {key: _parse_scalar(text) for key, text in given.items()}
        self._context.provider(provider).validate_options(options)
        bound = EndpointConfig(
            endpoint=name,
            provider=provider,
            model=model,
            target=target_name,
            target_digest=self._project.targets.load(target_name).digest(),
            pipeline="mlflow deployments",
            options=options,
        )
        promote(self._context, model, version, target_name, reason=reason, expects=(name,))
        bind_endpoint(self._context, bound, RolloutPolicy())
        at_rest(name, reconcile_until_stable(self._context, name))
        return {"name": name, "flavor": _FLAVOR}

    @_translated
    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: Mapping[str, str] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, str]:
        """Promote a version for the endpoint's target, if `model_uri` is given; reconcile.

        Approval steps of the rollout still wait for a person. Besides a reason, `config` can have
        only the provider and the target of the endpoint.
        """
        _check_flavor(flavor)
        journal = Journal.open(self._context, name)
        bound, given = journal.config, dict(config or {})
        reason = given.pop("reason", "")
        same = {"target": bound.target, "provider": bound.provider}
        if any(given.pop(key, value) != value for key, value in same.items()):
            raise UserError(
                "the target and the provider of an endpoint cannot be changed",
                where=name,
                remedy="Create another deployment.",
            )
        if given:
            raise UserError(
                f"an update cannot change options of {name}",
                where=", ".join(sorted(given)),
                remedy="Change them in the pipeline file if one declares the endpoint. Otherwise "
                "delete the deployment, and create it again.",
            )
        if model_uri is not None:
            model, version = self._version(model_uri)
            if model != bound.model:
                raise UserError(
                    f"{name} serves {bound.model}, not {model}", remedy="Create another deployment."
                )
            promote(self._context, model, version, bound.target, reason=reason)
        reports = reconcile_until_stable(self._context, name)
        if any(report.refused for report in reports):
            at_rest(name, reports)
        return {"name": name, "flavor": _FLAVOR}

    @_translated
    def delete_deployment(
        self, name: str, config: Mapping[str, str] | None = None, endpoint: str | None = None
    ) -> None:
        """Delete the endpoint if it exists; record the `reason` of `config`."""
        if name in list_bound_endpoints(self._context):
            delete_endpoint(
                self._context,
                name,
                reason=dict(config or {}).get("reason", "mlflow deployments delete"),
            )

    @_translated
    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """Return the state of every endpoint; for a corrupt ledger, the error."""
        endpoints = []
        for name in list_bound_endpoints(self._context):
            try:
                endpoints.append(self._described(name))
            except CorruptStateError as error:
                endpoints.append({"name": name, "flavor": _FLAVOR, "state": str(error)})
        return endpoints

    @_translated
    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """Return the state of an endpoint."""
        return self._described(name)

    @_translated
    def predict(
        self,
        deployment_name: str | None = None,
        inputs: pd.DataFrame | Mapping[str, Any] | list[Any] | None = None,
        endpoint: str | None = None,
    ) -> PredictionsResponse:
        """Send one request to `/invocations` of the endpoint `deployment_name`.

        Without `deployment_name`, `endpoint` is the name.
        """
        import httpx
        from mlflow.utils.proto_json_utils import dump_input_data

        name = deployment_name or endpoint or ""
        address = read_status(self._context, name).address
        if address is None:
            raise ServiceUnavailableError(
                "the endpoint has no address", where=name, remedy=f"See `onnx-ops status {name}`."
            )
        # In MLflow 3.17, `dump_input_data` fails for a dict of inputs, because it iterates over the
        # keys as if they were pairs.
        if isinstance(inputs, dict):
            plain = {
                key: value.tolist() if hasattr(value, "tolist") else value
                for key, value in inputs.items()
            }
            body = json.dumps({"inputs": plain})
        else:
            body = dump_input_data(inputs)
        headers = {"content-type": "application/json"}
        try:
            answer = httpx.post(
                f"{address}/invocations", content=body, headers=headers, timeout=_PREDICT_S
            )
        except httpx.HTTPError as error:
            raise ServiceUnavailableError(
                "the endpoint does not answer", where=name, why=str(error)
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise UserError(
                f"the endpoint answered {answer.status_code}", where=name, why=quoted(answer.text)
            )
        return PredictionsResponse(answer.json())

    def _described(self, name: str) -> dict[str, Any]:
        seen = read_status(self._context, name)
        config, stable = seen.state.config, seen.state.roles.stable
        if config is None:
            raise NotFoundError("there is no endpoint of this name", where=name)
        silent = "serving, but not supervised" if seen.unsupervised else "does not answer"
        return {
            "name": name,
            "flavor": _FLAVOR,
            "model": config.model,
            "target": config.target,
            "version": stable.version if stable is not None else None,
            "traffic": dict(seen.actual.split.weights) if seen.actual is not None else {},
            "state": silent if seen.actual is None else "serving",
            "address": seen.address,
        }

    def _version(self, model_uri: str) -> tuple[str, str]:
        """Return model and version of `models:/NAME/VERSION` or `models:/NAME@ALIAS`."""
        match = _MODEL_URI.fullmatch(model_uri)
        if match is None:
            raise UserError(
                f"{model_uri!r} does not name a registered version",
                remedy="Write models:/NAME/VERSION or models:/NAME@ALIAS; "
                "`onnx-ops run` registers models.",
            )
        model, version, name = match.groups()
        if version is not None:
            return str(model), str(version)
        aliases = self._context.registry().aliases(str(model))
        if name not in aliases:
            known = ", ".join(sorted(aliases)) or "none"
            raise NotFoundError(
                f"{model} has no alias {name!r}",
                remedy=f"Its aliases: {known}. "
                f"A target's champion is {format_alias('champion', 'TARGET')}.",
            )
        return str(model), aliases[name]


def _check_flavor(flavor: str | None) -> None:
    if flavor not in (None, _FLAVOR):
        raise UserError(
            f"flavor {flavor!r} cannot be deployed", remedy="Leave out the flavor, or write onnx."
        )


def _parse_scalar(text: str) -> str | int | float | bool:
    """Return the bool, int, float or text that an option's text represents.

    MLflow passes every option as text.
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
