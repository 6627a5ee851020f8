"""Base of the providers for managed clouds, and code that other providers share."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from onnx_ops import plugins
from onnx_ops.adapters.endpoints.table_options import ReplicaOptions
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import Manifest, digest_folder, short_digest
from onnx_ops.domain.endpoint import (
    Deployment,
    EndpointConfig,
    EndpointState,
    drop_idle_deployments,
    preview_rollback,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Diagnosis, Target
from onnx_ops.errors import (
    DigestMismatchError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    UserError,
)
from onnx_ops.ports import EndpointProvider, MetricsSource
from onnx_ops.protocol.server_process import (
    CONTAINER_PROVIDERS,
    FOLLOW_VARIABLE,
    IMAGE_VARIABLE,
    OPTION_PREFIX,
    REPORTS_VARIABLE,
    TRUSTED_KEYS_VARIABLE,
    explain_unservable,
)

_DOWNLOADED = (
    "`onnx-ops reconcile` downloads the files only of a version that an alias requests, that it "
    "restores, or to which it rolls back."
)


class CloudEndpoints(EndpointProvider):
    """Base of the providers that run the image of onnx-ops in containers of a cloud.

    The containers verify signatures with the public keys in the folder `trusted`. If no key is
    trusted, containers with `traffic: native` load any model. The creation of containers with
    `traffic: table` then fails.
    """

    metrics_plugin: ClassVar[str]

    def __init__(self, trusted: Path | None) -> None:
        self._keys = None if trusted is None else TrustedKeys(trusted)

    def metrics(self, options: Mapping[str, Json] | None = None) -> MetricsSource:
        """Return the metrics source for the metrics service of the cloud."""
        source: MetricsSource = plugins.load("metrics", self.metrics_plugin, {})
        return source

    @abstractmethod
    def read_machine(self, config: EndpointConfig) -> str:
        """Return the type of an endpoint's machines.

        Raises:
            UserError: the options are not valid.
        """

    def explain_unservable(self, target: Target) -> str:
        """Return why the image cannot run models of the target; empty if it can."""
        return explain_unservable(target, CONTAINER_PROVIDERS)

    @abstractmethod
    def count_instances(self, config: EndpointConfig) -> int | None:
        """Return how many instances serve now; None if this is 0 or unknown."""

    def _trusted_keys(self) -> str:
        return "" if self._keys is None else self._keys.encoded()


def verify_files(deployment: Deployment) -> dict[str, Path]:
    """Return the verified model files of a deployment, by relative POSIX name.

    The names are sorted.

    Raises:
        NotFoundError: the files are not on this machine.
        DigestMismatchError: the files do not match the deployment's manifest.
    """
    folder = Path(deployment.location)
    manifest = digest_folder(folder) if deployment.location else Manifest(files={})
    if not manifest.files:
        raise NotFoundError(
            f"the files of {deployment.name} do not exist",
            where=str(folder) if deployment.location else f"deployment {deployment.name}",
            remedy="Run the command on a machine that has the files, or copy the folder from "
            f"there. {_DOWNLOADED}",
        )
    digest = manifest.digest()
    if digest != deployment.manifest:
        raise DigestMismatchError(
            f"the files of {deployment.name} do not match its manifest "
            f"{short_digest(deployment.manifest)}",
            where=str(folder),
            why=f"their digest is {short_digest(digest)}",
            remedy="Remove the folder, and copy it from a machine that has the intact files. "
            f"{_DOWNLOADED}",
        )
    return {name: folder / name for name in manifest}


def verify_new_files(state: EndpointState, current: EndpointState | None) -> None:
    """Verify the files of the deployments that an endpoint does not have yet.

    Raises:
        NotFoundError, DigestMismatchError: files are missing, or do not match their manifest.
    """
    for deployment in state.deployments:
        if current is None or current.find_deployment(deployment) is None:
            verify_files(deployment)


def preview_cloud_rollback(current: EndpointState | None, state: EndpointState) -> EndpointState:
    """Return the state after a rollback of an endpoint with native traffic.

    If the endpoint does not have the leader of `state`, only the deployments with traffic are
    deployed again.
    """
    if current is None or current.find_deployment(state.leader()) is None:
        return drop_idle_deployments(state)
    return preview_rollback(current, state)


def format_follower_variables(
    endpoint: str, options: ReplicaOptions, image: str, trusted_keys: str
) -> dict[str, str]:
    """Return the variables of a container that follows an endpoint's tables.

    Raises:
        UserError: no public key is trusted. The container needs one to verify tables.
    """
    if not trusted_keys:
        raise UserError(
            "containers follow signed tables only, and no public key is trusted",
            where=endpoint,
            remedy="Create a key with `onnx-ops keys new`, or set `traffic: native`.",
        )
    return {
        FOLLOW_VARIABLE: options.control,
        REPORTS_VARIABLE: options.reports,
        IMAGE_VARIABLE: image,
        f"{OPTION_PREFIX}ENDPOINT": endpoint,
        TRUSTED_KEYS_VARIABLE: trusted_keys,
    }


def split_text(name: str, text: str, characters: int) -> dict[str, str]:
    """Split a string into pieces for tags or variables.

    The keys of the pieces are `name` followed by 0, 1 ….
    """
    starts = range(0, len(text), characters)
    return {
        f"{name}{number}": text[start : start + characters] for number, start in enumerate(starts)
    }


def join_text(name: str, pieces: Mapping[str, str]) -> str:
    """Return the string that `split_text` split; empty if there are no pieces."""
    return "".join(
        itertools.takewhile(
            bool, (pieces.get(f"{name}{number}", "") for number in itertools.count())
        )
    )


Finding = tuple[bool, str, str]
"""Result of a check: whether it passed, its finding, and the remedy."""


def run_check(check: str, find: Callable[[], Finding], *, cloud: str) -> Diagnosis:
    """Run a check; return its diagnosis.

    If the check raises an error, the diagnosis contains the error. A missing permission to read is
    not reported as a fault.
    """
    proxy = f"Check for a proxy or a login page between this machine and {cloud}."
    try:
        ok, found, remedy = find()
    except RefusedError as error:
        ok, found, remedy = True, f"the check was refused: {error.why}", ""
    except OnnxOpsError as error:
        ok, found, remedy = False, f"{error.what} {error.why}".strip(), error.remedy or proxy
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # The response lacks a field, or a field has the wrong type.
        ok, found, remedy = (
            False,
            f"the answer does not have the format that {cloud} documents: {error!r}",
            proxy,
        )
    return Diagnosis(check=check, ok=ok, found=found, remedy=remedy)
