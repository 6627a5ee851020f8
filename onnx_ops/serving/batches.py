"""Running what queued up in a lane: together where rows are independent of each other, else one by one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports.data import Array
from onnx_ops.serving.answers import Answer, Head
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.wire import Call

Outcome = Answer | OnnxOpsError
_MOST_ROWS = 1024
"""Rows of one batch, so that a request never waits for a run that is much longer than its own."""


@dataclass(frozen=True, slots=True)
class Item:
    """A request as it came: which protocol, headers, body."""

    invocation: bool
    head: Head
    body: bytes


def run_items(resident: Resident, items: Sequence[Item]) -> tuple[list[Outcome], list[tuple[float, int]]]:
    """The outcome of each item, and of every run of the model the seconds that it took and the requests in it."""
    outcomes: dict[int, Outcome] = {}
    calls: dict[int, Call] = {}
    for position, item in enumerate(items):
        try:
            calls[position] = resident.read(item.invocation, item.head, item.body)
        except OnnxOpsError as error:
            outcomes[position] = error
    runs: list[tuple[float, int]] = []
    for group in groups(calls, batchable=resident.deployment.batchable):
        found = _run_group(resident, [calls[position] for position in group], runs)
        outcomes.update(zip(group, found, strict=True))
    return [outcomes[position] for position in range(len(items))], runs


def groups(calls: Mapping[int, Call], *, batchable: bool) -> list[list[int]]:
    """Keys of the calls that may be run together: same outputs, same types, and same shapes but for axis 0."""
    if not batchable:
        return [[position] for position in calls]
    grouped: list[list[int]] = []
    open_groups: dict[object, tuple[list[int], int]] = {}
    for position, call in calls.items():
        kind = _kind(call)
        group, rows = open_groups.get(kind, ([], 0))
        if not group or kind is None or rows + call.rows > _MOST_ROWS:
            group, rows = [], 0
            grouped.append(group)
        group.append(position)
        open_groups[kind] = (group, rows + call.rows)
    return grouped


def _kind(call: Call) -> object:
    """What must be equal for two calls to fit together; None for a call that fits with none."""
    if not call.rows:
        return None
    return call.outputs, tuple(sorted((name, a.dtype.str, a.shape[1:]) for name, a in call.feed.items()))


def _run_group(resident: Resident, calls: Sequence[Call], runs: list[tuple[float, int]]) -> list[Outcome]:
    if len(calls) > 1:
        parts = _together(resident, calls, runs)
        if parts is not None:
            return [_written(resident, call, arrays) for call, arrays in zip(calls, parts, strict=True)]
    return [_alone(resident, call, runs) for call in calls]


def _together(
    resident: Resident, calls: Sequence[Call], runs: list[tuple[float, int]]
) -> list[tuple[Array, ...]] | None:
    """Each call's part of the outputs; None if the batch fails or an output has not one entry for each row."""
    feed = {name: np.concatenate([call.feed[name] for call in calls]) for name in calls[0].feed}
    began = time.perf_counter()
    try:
        arrays = resident.run(calls[0].outputs, feed)
    except OnnxOpsError:
        return None
    seconds = time.perf_counter() - began
    rows = [call.rows for call in calls]
    if any(array.ndim == 0 or array.shape[0] != sum(rows) for array in arrays):
        return None
    resident.run_time.observe(seconds / len(calls))
    runs.append((seconds, len(calls)))
    ends = np.cumsum(rows)[:-1]
    return list(zip(*(np.split(array, ends) for array in arrays), strict=True))


def _alone(resident: Resident, call: Call, runs: list[tuple[float, int]]) -> Outcome:
    began = time.perf_counter()
    try:
        answer = resident.answer(call)
    except OnnxOpsError as error:
        return error
    runs.append((time.perf_counter() - began, 1))
    return answer


def _written(resident: Resident, call: Call, arrays: Sequence[Array]) -> Outcome:
    try:
        return resident.write(call, arrays)
    except OnnxOpsError as error:
        return error
