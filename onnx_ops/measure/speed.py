"""How fast a variant is: latency always; load and fresh processes where a gate asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.evidence import LatencyComparison, LatencySamples, PairedRatios, Starts, Throughput
from onnx_ops.domain.measuring import Asked
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.load import throughput_against, throughput_alone
from onnx_ops.measure.starts import starts_against, starts_alone
from onnx_ops.measure.timing import Race, Raw, time_against, time_alone
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.ports.data import Array

FASTER = 0.0
"""The limit that asks whether a variant is faster at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A variant on one target, and the models it is measured against by name; the last one is its baseline."""

    runtime: Runtime
    target: Target
    candidate: Path
    rivals: Mapping[str, Path]
    feed: Tensors
    seed: int

    def race(self, against: str, tolerances: Mapping[str, Sequence[float]]) -> Race:
        return Race(
            runtime=self.runtime,
            target=self.target,
            baseline=self.rivals[against],
            candidate=self.candidate,
            against=against,
            feed=self.feed,
            seed=self.seed,
            tolerances=tolerances,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Figures for the evidence, and the raw samples behind them by array name."""

    latency: LatencySamples
    comparisons: tuple[LatencyComparison, ...]
    throughput: tuple[Throughput, ...]
    starts: Starts | None
    ratios: tuple[PairedRatios, ...]
    raw: Raw


def measure_speed(contest: Contest, asked: Asked) -> Speed:
    """The variant alone, its latency against every rival, and what else was asked against its baseline.

    A rival other than the export may be a model with other inputs, which cannot be fed with these rows: what could
    not be measured against it is left out, and its gate says so.

    Raises:
        MeasurementError: the variant does not run there.
    """
    feed, seed, place = contest.feed, contest.seed, (contest.runtime, contest.candidate, contest.target)
    latency, raw = time_alone(*place, feed)
    samples: dict[str, Array] = dict(raw)
    throughput = []
    for level in asked.throughput:
        found, raw = throughput_alone(*place, feed, level, seed)
        throughput.append(found)
        samples |= raw
    starts = None
    if asked.starts:
        starts, raw = starts_alone(*place, feed, seed)
        samples |= raw
    comparisons: list[LatencyComparison] = []
    ratios: list[PairedRatios] = []
    for against in contest.rivals:
        with contextlib.nullcontext() if against == EXPORT else contextlib.suppress(MeasurementError):
            comparison, raw = time_against(contest.race(against, _limits(against, asked.tolerances)))
            comparisons.append(comparison)
            samples |= raw
            if against == list(contest.rivals)[-1]:
                found_ratios, raw = compare_more(contest.race(against, asked.tolerances), asked)
                ratios += found_ratios
                samples |= raw
    return Speed(
        latency=latency,
        comparisons=tuple(comparisons),
        throughput=tuple(throughput),
        starts=starts,
        ratios=tuple(ratios),
        raw=samples,
    )


def compare_more(race: Race, asked: Asked) -> tuple[tuple[PairedRatios, ...], Raw]:
    """What was asked for beside latency, of candidate and baseline in turns.

    Raises:
        MeasurementError: one of the models does not run there.
    """
    ratios: list[PairedRatios] = []
    samples: dict[str, Array] = {}
    for level in asked.throughput:
        found, raw = throughput_against(race, level)
        ratios.append(found)
        samples |= raw
    if asked.starts:
        figures, raw = starts_against(race)
        ratios += figures
        samples |= raw
    return tuple(ratios), samples


def _limits(against: str, tolerances: Mapping[str, Sequence[float]]) -> Mapping[str, Sequence[float]]:
    """The export is also asked whether the variant is faster, which the choice between variants needs."""
    if against != EXPORT:
        return tolerances
    latency = (FASTER, *tolerances.get("latency", ()), *tolerances.get("speedup", ()))
    return {**tolerances, "latency": latency}
