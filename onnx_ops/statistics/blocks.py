"""Block medians of runs in turns, freed of what a probe tells about the machine's speed at each run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import MeasurementError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PARTS = 20
"""Points of the curve of run time over probe, of each model."""

FEWEST_PER_PART = 10

_TICK_NS = 1.0


def block_logs(nanoseconds: npt.ArrayLike, preempted: npt.ArrayLike, probe: npt.ArrayLike | None = None) -> Floats:
    """Log of the median run of each block, up to a constant that all models share.

    Medians are of the runs that were not preempted; of all runs in a block without one. A single run that kept its
    core tells more than ten that did not: with runs of 2 ms at a load of three a core, pairs varied by 6.7 %, and by
    9.4 % where three such runs were asked for. Where a probe was timed around each run, what it says about the run is
    taken off first: `_explained`.

    Args:
        nanoseconds: shape (heats, blocks, models, runs).
        preempted: the same shape, whether the run lost its core.
        probe: the same shape, in any unit; how long a piece of work that is always the same took around the run. None,
            or values that are not positive, not finite or all alike, tell nothing.

    Returns:
        Shape (heats, blocks, models). Only differences between models mean something.

    Raises:
        MeasurementError: a block has no positive duration, so that there is no ratio.
    """
    times = np.asarray(nanoseconds, dtype=np.float64)
    lost = np.asarray(preempted, dtype=bool)
    kept = ~lost | lost.all(axis=-1, keepdims=True)
    if not (np.nanmedian(np.where(kept, times, np.nan), axis=-1) > 0).all():
        raise MeasurementError(
            "a block of runs took no measurable time", remedy="Time more rows in one request: `benchmark.batch`."
        )
    logs = np.log(np.maximum(times, _TICK_NS))
    slowness = None if probe is None else _slowness(np.asarray(probe, dtype=np.float64))
    if slowness is not None:
        logs = logs - _explained(logs, kept, slowness)
    return np.asarray(np.nanmedian(np.where(kept, logs, np.nan), axis=-1), dtype=np.float64)


def _slowness(probe: Floats) -> Floats | None:
    """Log of each probe, less what is usual after that model beside the others; None if it tells nothing.

    A model that leaves cold caches or a lower clock behind slows the probes after it, always; that is its own doing,
    and must not excuse its runs. What is usual is read off runs of the same round, most of which meet the machine in
    the same state: over all runs, a slow spell that one model had a little more of would pass for it.
    """
    if not probe.size or not (np.isfinite(probe) & (probe > 0)).all():
        return None
    logs = np.log(probe)
    beside = np.median(logs[:, :, :, np.newaxis] - logs[:, :, np.newaxis], axis=(0, 1, 4))
    return logs - beside.mean(axis=1)[:, np.newaxis] if np.ptp(logs) > 0 else None


def _explained(logs: Floats, kept: Flags, slowness: Floats) -> Floats | float:
    """What a run takes on a machine that slow, as the mean over the models' own curves: the same for all of them.

    A curve is a model's median run over its median probe in parts of equally many runs, straight in between.
    """
    curves = []
    for model in range(logs.shape[2]):
        counts = kept[:, :, model]
        x, y = slowness[:, :, model][counts], logs[:, :, model][counts]
        parts = min(PARTS, len(x) // FEWEST_PER_PART)
        if parts < 2:
            return 0.0
        order = np.argsort(x, kind="stable")
        pieces = np.array_split(order, parts)
        nodes = [float(np.median(x[piece])) for piece in pieces]
        curves.append(np.interp(slowness, nodes, [float(np.median(y[piece])) for piece in pieces]))
    return np.asarray(np.mean(curves, axis=0), dtype=np.float64)
