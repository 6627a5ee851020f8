"""Open the project of a flow, with the settings of Prefect's blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from pydantic import Field

from onnx_ops.app.context import Project, open_project
from onnx_ops.errors import UserError
from onnx_ops.orchestration.blocks import EnvironmentBlock, load_block
from onnx_ops.orchestration.events import with_events
from onnx_ops.scratch import Scratch


class CollectionSettings(PrefectBaseSettings):
    """Prefect's settings of this collection.

    Their variables are `PREFECT_INTEGRATIONS_ONNX_OPS_ROOT` and
    `PREFECT_INTEGRATIONS_ONNX_OPS_BLOCKS`.
    """

    model_config = build_settings_config(("integrations", "onnx_ops"))

    root: Path | None = Field(
        default=None, description="Folder of the project, if it is not that of the flow."
    )
    blocks: str = Field(default="", description="Default blocks of flows, separated by commas.")


@contextlib.contextmanager
def project_of(blocks: Sequence[str]) -> Iterator[Project]:
    """Open the project with the variables of Prefect blocks in the environment.

    The variables are set for this process and its children. Blocks take precedence over the
    environment and the settings file. The root in Prefect's settings is used unless `ONNX_OPS_ROOT`
    is set. If a server is configured, changes of traffic emit events. If the flow run is cancelled
    or fails, its running stages end on every machine.

    Args:
        blocks: types and names, such as `onnx-ops-registry/prod`. If empty, the blocks of the
            settings are used.

    Raises:
        UserError: a block is missing, belongs to another package, or contradicts another block. The
            same error is raised if the settings of the project are invalid.
        ServiceUnavailableError: a block cannot be read, such as while Prefect's server is down.
    """
    settings = CollectionSettings()
    named = tuple(blocks) or tuple(
        part for part in map(str.strip, settings.blocks.split(",")) if part
    )
    with Scratch() as folder:
        variables = dict(environment(named, folder))
        if settings.root is not None and "ONNX_OPS_ROOT" not in os.environ:
            variables["ONNX_OPS_ROOT"] = str(settings.root)
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            project = open_project()
            with project.running().ended_on_error():
                yield replace(project, context=with_events(project.context))
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def environment(blocks: Sequence[str], folder: Path) -> Mapping[str, str]:
    """Return the variables of these blocks.

    Args:
        folder: an empty folder for files that variables name.

    Raises:
        UserError: a block does not exist, belongs to another package, or contradicts another block.
        ServiceUnavailableError: a block cannot be read, such as while Prefect's server is down.
    """
    variables: dict[str, str] = {}
    source: dict[str, str] = {}
    for number, place in enumerate(dict.fromkeys(blocks)):
        block = load_block(place)
        if not isinstance(block, EnvironmentBlock):
            ours = (
                "onnx-ops-registry, onnx-ops-endpoints, onnx-ops-targets or onnx-ops-notifications"
            )
            raise UserError(
                "this is not a block of onnx-ops",
                where=f"prefect block {place}",
                remedy=f"Name a block of type {ours}.",
            )
        own = folder / str(number)
        own.mkdir(parents=True)
        for name, value in block.environ(own).items():
            if variables.setdefault(name, value) != value:
                raise UserError(
                    f"{source[name]} and {place} have different values of {name}",
                    where="blocks",
                    remedy="Leave out one of the blocks.",
                )
            source.setdefault(name, place)
    return variables
