"""Execution of a stage that another machine has placed on this worker."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from onnx_ops import plugins
from onnx_ops.app.context import Project
from onnx_ops.app.stage_request import parse_request, record_failure
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.plan import MEASURED, PLACEABLE, Stage
from onnx_ops.errors import ConflictError, CorruptStateError, OnnxOpsError, RefusedError
from onnx_ops.pipeline.stage_settings import REVISIONS, is_isolated
from onnx_ops.ports import Observer
from onnx_ops.scratch import Scratch


def answer(
    project: Project, request: str, *, place: str, run: str, observer: Observer
) -> OnnxOpsError | None:
    """Execute a requested stage on a worker, and record its result under its key.

    Args:
        project: project of the worker, with its store and its isolated environments.
        request: digest of the request in the store.
        place: location of the store of the requesting machine.
        run: an identifier of this execution, under which its error is recorded.
        observer: receives the progress.

    Returns:
        The error of the stage; None if it succeeded.

    Raises:
        ConflictError: the stores, the packages or the revisions of the stage differ.
        RefusedError: workers do not execute this kind of stage, or a file of the request would be
            outside its folder.
    """
    store = project.context.store
    try:
        document = json.loads(store.read(Digest(request)))
    except CorruptStateError as error:
        raise ConflictError(
            f"the request in store {place} cannot be read from this worker's store "
            f"{project.settings.store}",
            where=f"worker on {platform.node()}",
            remedy="Set the same `store` in onnx-ops.toml on both machines, "
            "such as s3://bucket/onnx-ops.",
        ) from error
    stage, key, inputs = parse_request(document)
    _require_same_release(stage)
    with Scratch() as root:
        for name, digest in document["files"].items():
            path = root / _checked_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store.path(digest), path)
        places = {path: str(root / _checked_name(name)) for path, name in document["paths"].items()}
        hints: Any = _relocated({**document["hints"], "pool": ""}, places)
        # The project's root is a separate folder, which has only the files sent with the stage.
        there = replace(
            project,
            settings=replace(project.settings, root=root),
            context=replace(project.context, root=root),
        )
        handler = there.handler(observer=observer)
        perform = handler.perform
        handler = replace(
            handler,
            perform=lambda stage, key, inputs: perform(replace(stage, hints=hints), key, inputs),
        )
        try:
            handler.execute(stage, key, inputs)
        except OnnxOpsError as error:
            record_failure(store, run, error)
            return error
    return None


def _require_same_release(stage: Stage) -> None:
    """Raise an error if this installation could compute a different result.

    Raises:
        ConflictError: the revision of the stage or the versions of packages differ.
        RefusedError: workers do not execute this kind of stage.
    """
    here = f"worker on {platform.node()}"
    if stage.kind not in PLACEABLE:
        raise RefusedError(f"a worker does not execute {stage.kind.value} stages", where=here)
    revision = stage.settings.get("revision")
    differs = dict[str, tuple[object, object]]()
    if revision != REVISIONS[stage.kind]:
        differs["revision of the stage"] = (REVISIONS[stage.kind], revision)
    # Scores and benchmarks permit other versions, since their results record the runtime and the
    # machine of the worker. An isolated tool has the packages of a separate environment.
    if stage.kind not in MEASURED and not is_isolated(stage):
        local = {name: plugins.version(name) for name in stage.tools if name != "python"}
        local |= (
            {"python": ".".join(platform.python_version_tuple()[:2])}
            if "python" in stage.tools
            else {}
        )
        differs |= {
            name: (local[name], required)
            for name, required in stage.tools.items()
            if local[name] != required
        }
    if differs:
        what = "; ".join(
            f"{name} is {local} here, but {required} is required"
            for name, (local, required) in differs.items()
        )
        remedy = "Install the same versions on both machines."
        raise ConflictError(
            f"the worker would not compute the same result: {what}", where=here, remedy=remedy
        )


def _checked_name(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RefusedError(
            f"a file of the request would be outside the folder: {name!r}", where="request"
        )
    return path


def _relocated(value: Any, places: Mapping[str, str]) -> Any:
    """Return a document whose paths are replaced according to `places`."""
    if isinstance(value, dict):
        return {name: _relocated(entry, places) for name, entry in value.items()}
    if isinstance(value, list):
        return [_relocated(entry, places) for entry in value]
    return places.get(value, value) if isinstance(value, str) else value
