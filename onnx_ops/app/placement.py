"""Placement of stages on workers of work pools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.app.stage_request import build_request, load_failure
from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_json, hex_digits
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.pipeline import TRANSLATIONS
from onnx_ops.domain.plan import MEASURED, Stage, StageKind
from onnx_ops.domain.pool import PlacedStage
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import ConflictError, MeasurementError
from onnx_ops.measure.files import HARDWARE
from onnx_ops.pipeline.stage_settings import get_pool
from onnx_ops.pipeline.stages.champion import HINT, attach_champion, read_champion
from onnx_ops.pipeline.user_code import CODE, collect_user_code, find_code_file
from onnx_ops.ports import Context, Pools, Store

_LIBRARIES = "custom_ops"
_CHAMPION = "champion"


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
    """Return the result of a stage that a worker of its pool computes.

    Without `renew`, a result that was computed for another run is reused. The store contains the
    request and its files: the inputs, the user's code, libraries of operators, and the champion of
    a benchmark.

    Args:
        place: location of the store, for messages on the other machine.
        renew: whether to compute the result again if it is already stored.
        took: function that receives the seconds that the worker spent.

    Raises:
        OnnxOpsError: the error of the worker, or the reason why no worker executed the stage.
    """
    prepared = attach_champion(stage, context) if stage.kind is StageKind.BENCHMARK else stage
    files, paths = dict[str, Json](), dict[str, Json]()
    for name, path, travels_as in _list_files(prepared, inputs, context):
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            files |= {
                f"{name}/{file.relative_to(path).as_posix()}": context.store.put_file(file)
                for file in inside
            }
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
    if (failure := load_failure(context.store, ended.run)) is not None:
        raise failure
    if ended.failed:
        raise MeasurementError(
            f"the worker of pool {placed.pool} did not complete this stage",
            where=stage.id,
            why=ended.message,
        )
    if (result := _take(stage, key, context.store)) is None:
        raise MeasurementError(
            f"a worker of pool {placed.pool} completed the stage, but the store has no usable "
            "result",
            where=stage.id,
            remedy="Set the same `store` in onnx-ops.toml on both machines, "
            "such as s3://bucket/onnx-ops. For a measurement, also check that the worker's "
            "machine meets `requires` of the target.",
        )
    if took is not None:
        took(ended.seconds)
    return result


def _take(stage: Stage, key: Digest, store: Store) -> Manifest | None:
    """Return the recorded result of a stage; None without a usable result.

    A result is ignored if the machine that measured it does not meet the target's requirements.
    """
    result = store.lookup(key)
    if result is None or stage.kind not in MEASURED:
        return result
    if stage.kind is StageKind.SCORE:
        hardware = codec.loads(store.read(result[HARDWARE]), HardwareFingerprint)
    else:
        hardware = codec.loads(store.read(result["evidence.json"]), Evidence).hardware
    hints: Mapping[str, Any] = stage.hints
    target = codec.from_json(hints["target"], Target, where=stage.id)
    return None if target.requires.find_missing(hardware) else result


def _list_files(
    stage: Stage, inputs: Mapping[str, Manifest], context: Context
) -> Iterator[tuple[str, Path, str]]:
    """Yield the files and folders that a stage reads besides its inputs.

    Each entry has the name on the other machine, the path here, and the path in the hints. The last
    is empty if the hints do not contain the file.
    """
    settings: Mapping[str, Any] = stage.settings
    hints: Mapping[str, Any] = stage.hints
    modules = _list_modules(settings, inputs, context.store)
    if modules:
        code = collect_user_code(sorted(modules), context.root, tuple(hints.get("depends", ())))
        if settings.get("code", digest_json(dict(code.files))) != digest_json(dict(code.files)):
            raise ConflictError(
                "the code of the stage was changed after the plan was made",
                where=stage.id,
                remedy="Run the pipeline again.",
            )
        for name in code.files:
            yield name, find_code_file(name, context.root), ""
    for library in _list_libraries(hints):
        yield (
            f"{_LIBRARIES}/{hex_digits(library['digest'])}.so",
            Path(library["path"]),
            library["path"],
        )
    if HINT in hints and (champion := read_champion(stage, context)) is not None:
        yield _CHAMPION, Path(champion.location), champion.location


def _list_modules(
    settings: Mapping[str, Any], inputs: Mapping[str, Manifest], store: Store
) -> set[str]:
    """Return the functions and modules of the user that a stage needs.

    The stage calls these functions, and a trained model has classes of these modules.
    """
    metrics = [*settings.get("metrics", ()), *filter(None, [settings.get("metric")])]
    definitions = [metric["definition"] for metric in metrics]
    definitions += settings.get("definitions", ())
    functions = [definition.get(key) for definition in definitions for key in ("use", "decode")]
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
