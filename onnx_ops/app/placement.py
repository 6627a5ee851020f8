"""Stages on workers of work pools: what is sent, what comes back, and what a worker refuses."""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from onnx_ops import codec, plugins
from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_json, hex_digits
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.pipeline import PLACEABLE, TRANSLATIONS, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    MeasurementError,
    OnnxOpsError,
    RefusedError,
    from_document,
)
from onnx_ops.measure.files import HARDWARE
from onnx_ops.pipeline.stage_settings import REVISIONS, get_pool, is_isolated
from onnx_ops.pipeline.stages.champion import HINT, attach_champion, read_champion
from onnx_ops.pipeline.user_code import CODE, collect_user_code, find_code_file
from onnx_ops.ports import Context, Observer, PlacedStage, Pools, Store
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from onnx_ops.app.context import Project

_ERROR = "error.json"
_LIBRARIES = "custom_ops"
_CHAMPION = "champion"
_MEASURED = (StageKind.SCORE, StageKind.BENCHMARK)
"""Stages whose result depends on the machine, which it names."""


def build_request(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> dict[str, Json]:
    """Return a stage and its inputs as JSON."""
    return {
        "stage": codec.to_json(stage),
        "key": key,
        "inputs": {name: dict(manifest.files) for name, manifest in inputs.items()},
    }


def parse_request(request: Mapping[str, Json]) -> tuple[Stage, Digest, Mapping[str, Manifest]]:
    """Return the arguments of `build_request`."""
    stage = codec.from_json(request["stage"], Stage, where="request")
    files = codec.from_json(request["inputs"], dict[str, dict[str, Digest]], where="request")
    return stage, Digest(str(request["key"])), {name: Manifest(files=content) for name, content in files.items()}


def ask(
    pools: Pools,
    context: Context,
    stage: Stage,
    key: Digest,
    inputs: Mapping[str, Manifest],
    *,
    place: str,
    renew: bool = False,
    took: Callable[[float], None] | None = None,
) -> Manifest:
    """Return the result that a worker of the stage's pool computes, or has computed for another run.

    The request and everything that it needs are in the store: the inputs, the user's code, libraries of operators, and
    the champion that a benchmark is compared with.

    Args:
        place: the location of the store, for messages on the other machine.
        renew: compute the result again, even if it is stored.
        took: gets the seconds that the worker spent.

    Raises:
        OnnxOpsError: what the worker raised, or why no worker has done it.
    """
    prepared = attach_champion(stage, context) if stage.kind is StageKind.BENCHMARK else stage
    files, paths = dict[str, Json](), dict[str, Json]()
    for name, path, travels_as in _list_files(prepared, inputs, context):
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            files |= {f"{name}/{file.relative_to(path).as_posix()}": context.store.put_file(file) for file in inside}
        else:
            files[name] = context.store.put_file(path)
        if travels_as:
            paths[travels_as] = name
    hints = {**prepared.hints, "commit": context.git_sha()}
    request = {**build_request(stage, key, inputs), "hints": hints, "files": files, "paths": paths}
    placed = PlacedStage(
        pool=get_pool(stage),
        kind=stage.kind,
        title=stage.id,
        pipeline=str(stage.hints.get("pipeline", "")),
        key=f"{key}/{uuid.uuid4().hex}" if renew else key,
        parameters={"request": context.store.put_bytes(canonical_json(request)), "store": place},
        timeout=stage.timeout,
    )
    ended = pools.run(placed, lambda: not renew and _take(stage, key, context.store) is not None)
    if (failed := context.store.lookup(_error_key(ended.run))) is not None:
        raise from_document(json.loads(context.store.read(failed[_ERROR])))
    if ended.failed:
        raise MeasurementError(
            f"the worker of pool {placed.pool} did not execute it", where=stage.id, why=ended.message
        )
    if (result := _take(stage, key, context.store)) is None:
        raise MeasurementError(
            f"the worker of pool {placed.pool} has ended, and its result is not in the store",
            where=stage.id,
            remedy="Give both machines one store: `store` in onnx-ops.toml, such as s3://bucket/onnx-ops.",
        )
    if took is not None:
        took(ended.seconds)
    return result


def _take(stage: Stage, key: Digest, store: Store) -> Manifest | None:
    """Return the recorded result, unless a machine measured it that the target does not accept."""
    result = store.lookup(key)
    if result is None or stage.kind not in _MEASURED:
        return result
    if stage.kind is StageKind.SCORE:
        hardware = codec.loads(store.read(result[HARDWARE]), HardwareFingerprint)
    else:
        hardware = codec.loads(store.read(result["evidence.json"]), Evidence).hardware
    hints: Mapping[str, Any] = stage.hints
    target = codec.from_json(hints["target"], Target, where=stage.id)
    return None if target.requires.find_missing(hardware) else result


def _list_files(stage: Stage, inputs: Mapping[str, Manifest], context: Context) -> Iterator[tuple[str, Path, str]]:
    """Yield what a stage reads besides its inputs: name over there, file or folder, and the path in hints, if any."""
    settings: Mapping[str, Any] = stage.settings
    hints: Mapping[str, Any] = stage.hints
    modules = _list_modules(settings, inputs, context.store)
    if modules:
        code = collect_user_code(sorted(modules), context.root, tuple(hints.get("depends", ())))
        if settings.get("code", digest_json(dict(code.files))) != digest_json(dict(code.files)):
            raise ConflictError("its code changed after the plan", where=stage.id, remedy="Run the pipeline again.")
        for name in code.files:
            yield name, find_code_file(name, context.root), ""
    for library in _list_libraries(hints):
        yield f"{_LIBRARIES}/{hex_digits(library['digest'])}.so", Path(library["path"]), library["path"]
    if HINT in hints and (champion := read_champion(stage, context)) is not None:
        yield _CHAMPION, Path(champion.location), champion.location


def _list_modules(settings: Mapping[str, Any], inputs: Mapping[str, Manifest], store: Store) -> set[str]:
    """Return the user's functions that a stage calls, and the modules whose classes a trained model has."""
    metrics = [*settings.get("metrics", ()), *filter(None, [settings.get("metric")])]
    functions = [metric["definition"].get("use") for metric in metrics]
    translations = settings.get("section", {}).get("options", {}).get(TRANSLATIONS)
    modules = set(filter(None, (*functions, settings.get("run"), translations)))
    for manifest in inputs.values():
        if CODE in manifest:
            modules |= set(json.loads(store.read(manifest[CODE]))["modules"])
    return modules


def _list_libraries(hints: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the libraries of custom operators in the hints of a stage."""
    if isinstance(hints, Mapping) and {"path", "digest", "domains"} <= hints.keys():
        yield hints
    elif isinstance(hints, (Mapping, list, tuple)):
        for value in hints.values() if isinstance(hints, Mapping) else hints:
            yield from _list_libraries(value)


def answer(project: Project, request: str, *, place: str, run: str, observer: Observer) -> OnnxOpsError | None:
    """Execute a requested stage, on the worker's side; record its result under the stage's key.

    Args:
        project: of the worker: its store, its isolated environments, its installation.
        request: digest of the request in the store.
        place: the location of the requesting machine's store.
        run: an identifier of this execution, under which its error is recorded.
        observer: gets the progress.

    Returns:
        The error of the stage, if it failed.

    Raises:
        ConflictError: the two sides differ in their store or in their packages.
        RefusedError: the request is not one that a worker executes.
    """
    store = project.context.store
    try:
        document = json.loads(store.read(Digest(request)))
    except CorruptStateError as error:
        raise ConflictError(
            f"the request is not in this worker's store, {project.settings.store}, but in {place}",
            where=f"worker on {platform.node()}",
            remedy="Give both machines one store: `store` in onnx-ops.toml, such as s3://bucket/onnx-ops.",
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
        # Its own root, so that it executes the code that was sent and no other.
        there = replace(
            project, settings=replace(project.settings, root=root), context=replace(project.context, root=root)
        )
        handler = there.handler(observer=observer)
        perform = handler.perform
        handler = replace(handler, perform=lambda stage, key, inputs: perform(replace(stage, hints=hints), key, inputs))
        try:
            handler.execute(stage, key, inputs)
        except OnnxOpsError as error:
            failure = json.dumps(error.as_document()).encode("utf-8")
            store.record(_error_key(run), Manifest(files={_ERROR: store.put_bytes(failure)}))
            return error
    return None


def _require_same_release(stage: Stage) -> None:
    """Raise an error if this installation would compute another result than the requested one."""
    here = f"worker on {platform.node()}"
    if stage.kind not in PLACEABLE:
        raise RefusedError(f"a worker does not execute {stage.kind.value} stages", where=here)
    revision = stage.settings.get("revision")
    differs = dict[str, tuple[object, object]]()
    if revision != REVISIONS[stage.kind]:
        differs["revision of the stage"] = (REVISIONS[stage.kind], revision)
    if stage.kind not in _MEASURED and not is_isolated(stage):  # evidence names the versions that measured
        local = {name: plugins.version(name) for name in stage.tools if name != "python"}
        local |= {"python": ".".join(platform.python_version_tuple()[:2])} if "python" in stage.tools else {}
        differs |= {name: (local[name], required) for name, required in stage.tools.items() if local[name] != required}
    if differs:
        what = "; ".join(
            f"{name} is {local} here, {required} is required" for name, (local, required) in differs.items()
        )
        remedy = "Install the same versions on both machines."
        raise ConflictError(f"it would not compute the same result: {what}", where=here, remedy=remedy)


def _checked_name(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RefusedError(f"a file of the request would be outside the folder: {name!r}", where="request")
    return path


def _relocated(value: Any, places: Mapping[str, str]) -> Any:
    """Return a document with other paths in place of those that are keys of `places`."""
    if isinstance(value, dict):
        return {name: _relocated(entry, places) for name, entry in value.items()}
    if isinstance(value, list):
        return [_relocated(entry, places) for entry in value]
    return places.get(value, value) if isinstance(value, str) else value


def _error_key(run: str) -> Digest:
    return digest_json(["error", run])
