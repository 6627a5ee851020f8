"""Prefect blocks with the addresses and secrets of a project's services.

Prefect's server and workers import this module when they start (entry point `prefect.collections`),
so the module imports no heavy package. A block sets environment variables that
`onnx_ops.config.settings`, MLflow and the clouds' SDKs read. In onnx-ops, only modules of
`onnx_ops.orchestration` import this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from prefect.blocks.core import Block, UnknownBlockType
from prefect.blocks.fields import SecretDict
from prefect.settings import PREFECT_API_URL
from pydantic import Field, HttpUrl, SecretStr, field_validator

from onnx_ops.domain.quantities import NAME_PATTERN
from onnx_ops.errors import ConfigError, ServiceUnavailableError, UserError
from onnx_ops.scratch import Scratch

_LOGO = HttpUrl(
    "https://raw.githubusercontent.com/onnx/onnx/7c945e43f1d016474647ebdefbfd98ba952f9f79/docs/docsgen/source/"
    "onnx-favicon.png"
)
_DOCUMENTATION = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

_CREDENTIAL = re.compile(r"(AWS|AZURE)_[A-Z0-9_]+")
"""Names of the variables that a block can set as credentials.

Write access to a block must not allow setting PATH, PYTHONPATH or LD_PRELOAD on workers.
"""


_DIFFERENT_CODE = ("env", "custom_ops", "package")
_HARMLESS = re.compile(r"[\w ,:+=-]*|\d+\.\d+")
"""Pattern of the texts that a target in a block can contain.

A `description` can contain any text. Write access to a block must not make workers install a
package or load a library.
"""


class EnvironmentBlock:
    """Base class of the Prefect blocks."""

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return the environment variables that the block sets.

        Secrets are in plain text. An empty field sets no variable.

        Args:
            folder: an empty folder for files that variables name. The folder is removed when the
                variables are no longer set.
        """
        raise NotImplementedError


class ModelRegistry(Block, EnvironmentBlock):
    """
    The MLflow server of a project, and the credentials for it.

    Example:
        ```python
        from onnx_ops.orchestration.blocks import ModelRegistry

        registry = ModelRegistry.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "onnx-ops registry"
    _block_type_slug = "onnx-ops-registry"
    _logo_url = _LOGO
    _documentation_url = _DOCUMENTATION

    tracking_uri: str = Field(
        default=..., description="Address of MLflow, such as https://mlflow.example.org."
    )
    mlflow_url: str = Field(
        default="", description="Address at which people open MLflow, if it differs."
    )
    username: str = Field(default="", description="User name at MLflow.")
    password: SecretStr | None = Field(default=None, description="Password of that user.")
    token: SecretStr | None = Field(
        default=None, description="Bearer token, instead of user name and password."
    )

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return the environment variables for MLflow; `folder` is not used."""
        return _filled(
            ONNX_OPS_TRACKING_URI=self.tracking_uri,
            ONNX_OPS_MLFLOW_URL=self.mlflow_url,
            MLFLOW_TRACKING_USERNAME=self.username,
            MLFLOW_TRACKING_PASSWORD=_plain(self.password),
            MLFLOW_TRACKING_TOKEN=_plain(self.token),
        )


class EndpointAccess(Block, EnvironmentBlock):
    """
    The ledger and the store of a project, and credentials for the clouds.

    Example:
        ```python
        from onnx_ops.orchestration.blocks import EndpointAccess

        access = EndpointAccess.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "onnx-ops endpoints"
    _block_type_slug = "onnx-ops-endpoints"
    _logo_url = _LOGO
    _documentation_url = _DOCUMENTATION

    ledger: str = Field(
        default="", description="The ledger: a path or a URL such as s3://bucket/ledger."
    )
    store: str = Field(
        default="", description="The store: a path or a URL such as s3://bucket/store."
    )
    credentials: SecretDict = Field(
        default_factory=lambda: SecretDict({}),
        description="Variables of the cloud SDKs, named AWS_... or AZURE_..., "
        "such as AWS_SECRET_ACCESS_KEY.",
    )

    @field_validator("credentials")
    @classmethod
    def _are_credentials(cls, value: SecretDict) -> SecretDict:
        wrong = sorted(name for name in value.get_secret_value() if not _CREDENTIAL.fullmatch(name))
        if wrong:
            raise ValueError(
                f"credentials must be named AWS_... or AZURE_..., not {', '.join(wrong)}"
            )
        return value

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return the variables for ledger, store and clouds; `folder` is not used."""
        secrets = {name: str(value) for name, value in self.credentials.get_secret_value().items()}
        return _filled(ONNX_OPS_LEDGER=self.ledger, ONNX_OPS_STORE=self.store, **secrets)


class NotificationTarget(Block, EnvironmentBlock):
    """The notifiers of a project, and the secrets of their services.

    Example:
        ```python
        from onnx_ops.orchestration.blocks import NotificationTarget

        people = NotificationTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "onnx-ops notifications"
    _block_type_slug = "onnx-ops-notifications"
    _logo_url = _LOGO
    _documentation_url = _DOCUMENTATION

    notify: str = Field(
        default=...,
        description="Notifiers as in ONNX_OPS_NOTIFY: names separated by commas, such as "
        'webhook,prefect-events, or a JSON list: [{"notifier": "github", "options": '
        '{"repository": "acme/models"}}].',
    )
    webhook: SecretStr | None = Field(
        default=None, description="Address of an incoming webhook in Slack's format."
    )
    github_token: SecretStr | None = Field(
        default=None, description="GitHub token with write access to issues."
    )

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return the environment variables for notifiers; `folder` is not used."""
        return _filled(
            ONNX_OPS_NOTIFY=self.notify,
            ONNX_OPS_NOTIFY_WEBHOOK=_plain(self.webhook),
            ONNX_OPS_NOTIFY_GITHUB_TOKEN=_plain(self.github_token),
        )


class TargetDefinitions(Block, EnvironmentBlock):
    """
    Targets that several projects share.

    A target names execution providers, hardware, and the work pool whose workers measure it.

    Example:
        ```python
        from onnx_ops.orchestration.blocks import TargetDefinitions

        fleet = TargetDefinitions.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "onnx-ops targets"
    _block_type_slug = "onnx-ops-targets"
    _logo_url = _LOGO
    _documentation_url = _DOCUMENTATION

    targets: dict[str, dict[str, Any]] = Field(
        default=...,
        description='Targets by name, each as in a target file: {"t4": {"providers": [...], '
        '"pool": "t4"}}.',
    )

    @field_validator("targets")
    @classmethod
    def _are_targets(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        wrong = [
            f"{name}: {problem}" for name, target in value.items() for problem in _forbidden(target)
        ]
        if wrong:
            raise ValueError(
                "a block must not set the following; use a target file of the project: "
                f"{'; '.join(wrong)}"
            )
        from onnx_ops.config.targets import TargetFiles

        with Scratch() as folder:
            files = TargetFiles(_written(value, folder), folder)
            for name in value:
                try:
                    files.load(name)
                except ConfigError as error:
                    problems = "; ".join(
                        f"{problem.path}: {problem.message}" for problem in error.problems
                    )
                    raise ValueError(f"{name}: {problems}") from error
                except UserError as error:
                    raise ValueError(f"{name}: {error.what}") from error
        return value

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Return the variable that names `folder`, with a written file for each target."""
        return {"ONNX_OPS_TARGETS": str(_written(self.targets, folder))}


def _forbidden(value: object, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _DIFFERENT_CODE:
                yield str(name)
            elif name != "description":
                yield from _forbidden(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _forbidden(inner, key)
    elif isinstance(value, str) and not _HARMLESS.fullmatch(value):
        yield f"{key} {value!r}"


def _written(targets: Mapping[str, Mapping[str, Any]], folder: Path) -> Path:
    for name, target in targets.items():
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(
                f"{name!r} is not a valid target name: use lower-case letters, digits and hyphens, "
                "beginning with a letter or digit"
            )
        # A target file is YAML, and JSON is valid YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"name": name, **target}), encoding="utf-8")
    return folder


def load_block(place: str) -> Block:
    """Load a block by type and name, such as `onnx-ops-registry/prod`.

    Raises:
        UserError: the block or a configured Prefect server is missing, or the block's type is not
            installed here.
        ServiceUnavailableError: the block cannot be read, for example because Prefect's server is
            down.
    """
    where = f"prefect block {place}"
    try:
        block: Any = Block.load(place)
    except UnknownBlockType as error:
        what = "the type of the block is not installed on this machine"
        remedy = "Install the package that defines the block's type."
        raise UserError(what, where=where, remedy=remedy) from error
    except ValueError as error:
        # Without a server, Prefect reads a local database, in which a user can have saved blocks.
        # So the server is only required for a block that does not exist there.
        why, remedy = "", "`prefect block ls` lists the blocks of the server in PREFECT_API_URL."
        if not PREFECT_API_URL.value():
            why = "no Prefect server is configured"
            remedy = "Run `prefect config set PREFECT_API_URL=http://HOST:4200/api`."
        raise UserError("the block does not exist", where=where, why=why, remedy=remedy) from error
    except Exception as error:
        # The message can contain a secret, so only the type of the error is reported.
        raise ServiceUnavailableError(
            "the block cannot be read", where=where, why=type(error).__name__
        ) from None
    return cast("Block", block)


def _filled(**values: str) -> Mapping[str, str]:
    return {name: value for name, value in values.items() if value}


def _plain(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret is not None else ""
