"""Compare forecasts of rollouts with rollouts simulated request by request.

    python -m benchmarks.forecast_truth [--rollouts N] [--harmful N] [--levels N] [--seed N]

Each rollout has its own random policy and traffic, and runs through the product's own judge and
state machine until it ends. Half of the forecasts get the true rate, the others one measured from
about 30 requests or a minute. Few rollouts wait longest for a service level, so its time is also
compared alone, simulated by interval. At least 90 % of the rollouts and of the steps should take
between half and twice the forecast median, and 80 % of the times of service levels should be in
their interval. Harms that are forecast to be found should be found in 95 % of the rollouts. Exits
with 1 if the confidence interval of a share is below its bound. Worlds come from a new seed in each
run, which is printed. With 500 healthy and 150 harmful rollouts, the benchmark takes about ten
minutes of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.truth.claims import Claim, at_least, summary, table
from benchmarks.truth.draws import begin_run, make_generator
from benchmarks.truth.forecast_world import (
    Outcome,
    SimulatedRollout,
    World,
    draw_world,
    get_resolution,
    measure,
)
from benchmarks.truth.level_world import LevelTrial, run_level_trials
from onnx_ops.domain.rollout_forecast import Duration, RolloutForecast
from onnx_ops.statistics.rollout.forecast import forecast_rollout

_FACTOR = 2.0
_PROMISED = 0.9
_HEALTHY, _HARMFUL = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One rollout and its forecast."""

    world: World
    outcome: Outcome
    forecast: RolloutForecast

    @property
    def is_close(self) -> bool:
        """Return whether the rollout took between half and twice the forecast median.

        If the rollout paused, return whether some step had a forecast chance of at least 5 % to
        time out.
        """
        if self.outcome.end == "paused":
            return any(step.timeout >= 0.05 for step in self.forecast.steps)
        return _is_within_factor(self.outcome.elapsed_s, self.forecast.total)

    @property
    def is_covered(self) -> bool:
        """Return whether the rollout's duration is in the forecast interval."""
        return _is_covered(self.outcome.elapsed_s, self.forecast.total, self.world)


def _is_within_factor(elapsed_s: float, duration: Duration) -> bool:
    median_s = duration.median_s
    return median_s is not None and median_s / _FACTOR <= elapsed_s <= median_s * _FACTOR


def _is_covered(elapsed_s: float, duration: Duration, world: World) -> bool:
    """Return whether a time is in the interval, up to the simulation's resolution."""
    low_s, high_s = duration.low_s, duration.high_s
    apart_s = get_resolution(elapsed_s, world.policy.epoch)
    return (
        low_s is not None
        and low_s - apart_s <= elapsed_s
        and (high_s is None or elapsed_s <= high_s + apart_s)
    )


def run_trial(kind: int, number: int) -> Trial:
    """Simulate one rollout, and forecast it."""
    random = make_generator(kind, number)
    world = draw_world(random, is_harmful=kind == _HARMFUL)
    simulated = SimulatedRollout(world, random)
    outcome = simulated.run()
    traffic = measure(world, random, simulated.latencies)
    harms = [] if world.harm is None else [world.harm]
    forecast = forecast_rollout(world.policy, traffic, harms)
    return Trial(world=world, outcome=outcome, forecast=forecast)


def prove_durations(trials: Sequence[Trial]) -> list[Claim]:
    """Compare durations of rollouts and of steps with their forecasts."""
    kept = [trial for trial in trials if trial.outcome.end != "rolled back"]
    finished = [trial for trial in kept if trial.outcome.end == "finished"]
    steps = [
        (seconds, step, trial)
        for trial in kept
        for seconds, step in zip(trial.outcome.steps_s, trial.forecast.steps, strict=False)
    ]
    close = sum(_is_within_factor(seconds, step.duration) for seconds, step, _ in steps)
    covered = sum(_is_covered(s, step.duration, trial.world) for s, step, trial in steps)
    rows = [
        *_count_by(kept, "all", lambda _: ""),
        *_count_by(kept, "traffic", lambda trial: trial.world.name),
        *_count_by(kept, "rate", _name_rate),
        *_count_by(kept, "users", _name_users),
        *_count_by(kept, "slowest step waits for", _name_wait),
    ]
    head = ("", "rollouts", "paused", "within a factor of 2", "in the 90 % interval", "ratio")
    table("duration of healthy candidates, simulated / forecast median", head, rows)
    return [
        at_least(
            "duration", "rollouts within a factor of 2", _count_close(kept), len(kept), _PROMISED
        ),
        at_least("duration", "steps within a factor of 2", close, len(steps), _PROMISED),
        Claim(
            gate="duration",
            what="rollouts and steps in the 90 % interval",
            bound="shown only",
            figure=f"{100 * sum(t.is_covered for t in finished) / max(1, len(finished)):.1f} %, "
            f"{100 * covered / max(1, len(steps)):.1f} %",
            is_met=True,
        ),
    ]


def _count_close(trials: Sequence[Trial]) -> int:
    return sum(trial.is_close for trial in trials)


def _count_by(
    trials: Sequence[Trial], title: str, name: Callable[[Trial], str]
) -> list[tuple[str, ...]]:
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[name(trial)].append(trial)
    return [
        _make_row(f"{title}: {key}" if key else title, group)
        for key, group in sorted(groups.items())
    ]


def _make_row(name: str, group: Sequence[Trial]) -> tuple[str, ...]:
    ended = [trial for trial in group if trial.outcome.end == "finished"]
    ratios = [
        trial.outcome.elapsed_s / trial.forecast.total.median_s
        for trial in ended
        if trial.forecast.total.median_s
    ]
    covered = f"{100 * np.mean([trial.is_covered for trial in ended]):.0f} %" if ended else "-"
    quantiles = np.quantile(ratios, (0.05, 0.5, 0.95)) if ratios else ()
    shown = " ".join(f"{ratio:.2f}" for ratio in quantiles) or "-"
    return (
        *(name, f"{len(group)}", f"{len(group) - len(ended)}"),
        f"{100 * _count_close(group) / len(group):.1f} %",
        covered,
        shown,
    )


def _name_rate(trial: Trial) -> str:
    exponent = int(np.floor(np.log10(trial.world.traffic.rate) / 2)) * 2
    return f"10^{exponent} to 10^{exponent + 2} requests/s"


def _name_users(trial: Trial) -> str:
    users = trial.world.traffic.users
    names = ((0, "no keys"), (20, "1 to 20"), (2000, "21 to 2,000"), (10**7, "over 2,000"))
    return next(name for most, name in names if users <= most)


def _name_wait(trial: Trial) -> str:
    def get_median(index: int) -> float:
        median_s = trial.forecast.steps[index].duration.median_s
        return np.inf if median_s is None else median_s

    slowest = max(range(len(trial.forecast.steps)), key=get_median)
    return trial.forecast.steps[slowest].waits[0].kind


def prove_levels(trials: Sequence[LevelTrial]) -> list[Claim]:
    """Compare the times of service levels with their forecasts."""
    groups: dict[str, list[LevelTrial]] = {"all": list(trials)}
    for trial in trials:
        groups.setdefault(f"traffic: {trial.world.name}", []).append(trial)
        kind = "measured" if trial.traffic.counted else "given"
        groups.setdefault(f"traffic: {kind}", []).append(trial)
    rows = [
        (
            name,
            f"{len(group)}",
            f"{100 * np.mean([_is_within_factor(t.elapsed_s, t.forecast) for t in group]):.0f} %",
            f"{100 * np.mean([t.is_covered for t in group]):.0f} %",
        )
        for name, group in sorted(groups.items())
    ]
    table(
        "time until a service level is shown",
        ("", "steps", "within a factor of 2", "in the 90 % interval"),
        rows,
    )
    covered = sum(trial.is_covered for trial in trials)
    return [at_least("service level", "times in the 90 % interval", covered, len(trials), 0.8)]


def prove_harms(trials: Sequence[Trial]) -> list[Claim]:
    """Compare how many harms are found, and when, with the forecasts."""
    _print_undetected(trials)
    found = [trial for trial in trials if trial.outcome.end == "rolled back"]
    known = [trial for trial in found if trial.forecast.harms[0].median_s is not None]
    sure = [trial for trial in trials if trial.forecast.harms[0].undetected < 0.05]
    early = 0
    for trial in known:
        median_s = trial.forecast.harms[0].median_s or 0.0
        apart_s = get_resolution(trial.outcome.elapsed_s, trial.world.policy.epoch)
        early += trial.outcome.elapsed_s <= _FACTOR * median_s + apart_s
    return [
        at_least(
            "harm",
            "not undetected, where fewer than 5 % are forecast to be",
            sum(trial.outcome.end != "finished" for trial in sure),
            len(sure),
            0.95,
        ),
        Claim(
            gate="harm",
            what="found within twice the forecast median",
            bound="shown only",
            figure=f"{early} of {len(known)}",
            is_met=True,
        ),
    ]


def _print_undetected(trials: Sequence[Trial]) -> None:
    """Print the share of undetected harms by the forecast share."""
    rows = []
    for low, high in ((0.0, 0.05), (0.05, 0.5), (0.5, 0.95), (0.95, 1.01)):
        group = [trial for trial in trials if low <= trial.forecast.harms[0].undetected < high]
        if group:
            passed = np.mean([trial.outcome.end == "finished" for trial in group])
            forecast = np.mean([trial.forecast.harms[0].undetected for trial in group])
            name = f"{100 * low:.0f} to {100 * min(1, high):.0f} %"
            shown = (f"{100 * forecast:.0f} %", f"{100 * passed:.0f} %")
            rows.append((name, f"{len(group)}", *shown))
    head = ("forecast share of undetected harms", "rollouts", "forecast", "simulated")
    table("harmful candidates that get all traffic", head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=500, help="healthy rollouts (500)")
    parser.add_argument("--harmful", type=int, default=150, help="harmful rollouts (150)")
    parser.add_argument("--levels", type=int, default=400, help="service levels (400)")
    parser.add_argument("--seed", type=int, help="repeat the worlds of an earlier run")
    options = parser.parse_args()
    begin_run(options.seed)
    begun = time.process_time()
    claims = []
    if options.rollouts:
        claims += prove_durations([run_trial(_HEALTHY, n) for n in range(options.rollouts)])
    if options.levels:
        claims += prove_levels(run_level_trials(options.levels))
    if options.harmful:
        claims += prove_harms([run_trial(_HARMFUL, n) for n in range(options.harmful)])
    summary(claims)
    print(f"  ({time.process_time() - begun:.0f} s of processor time)")
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
