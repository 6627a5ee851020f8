"""Let random faults happen to releases on the fakes of both clouds.

    python -m benchmarks.cloud_faults --cloud sagemaker --traffic native --trials 500
    python -m benchmarks.cloud_faults --cloud azureml --traffic table --only 1234

Each trial draws operations of an operator and faults of the cloud from its seed. The faults are
throttled requests, errors, lost answers, outages, used up quotas, kills at any request, and stale
reads. Updates take 30 to 60 s of virtual time. `tests.chaos.cloud_trials` describes what is real
and what is modelled.

A trial is wrong if it does not end as the operator wanted, if anything is left behind, if a version
answers that must not, or if a request is lost.

Exit code: 0 if all trials are right, otherwise 1; the seed of a wrong trial is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.chaos.cloud_trial_places import open_place
from tests.chaos.cloud_trials import TrialResult, run_trial


def main() -> int:
    """Run the trials, and print the wrong ones and a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cloud", choices=("sagemaker", "azureml"), default="sagemaker")
    parser.add_argument("--traffic", choices=("native", "table"), default="native")
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    parser.add_argument("--only", type=int, action="append", help="seed of a trial to repeat")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    # A simulated kill of a process raises an error in its threads, which Python would print.
    threading.excepthook = lambda _: None
    draw = random.Random(options.seed)  # noqa: S311 (trials, no secret)
    seeds = options.only or [draw.randrange(10**12) for _ in range(options.trials)]
    began, results = time.process_time(), list[TrialResult]()
    with (
        tempfile.TemporaryDirectory(prefix="onnx-ops-trials-") as folder,
        open_place(options.cloud, options.traffic, Path(folder)) as place,
    ):
        for seed in seeds:
            result = run_trial(place, seed)
            results.append(result)
            if options.only or not result.is_right:
                print(_describe(result), flush=True)
    summary = {
        "cloud": options.cloud,
        "traffic": options.traffic,
        "seed": options.seed,
        "trials": len(results),
        "wrong": sum(bool(one.wrong) for one in results),
        "lost": sum(len(one.lost) for one in results),
        "answered": sum(one.answered for one in results),
        "failed calls": sum(one.failures for one in results),
        "virtual hours": round(sum(one.virtual_s for one in results) / 3600, 1),
        "CPU s": round(time.process_time() - began),
    }
    print(json.dumps(summary) if options.json else _format(summary), flush=True)
    return 0 if all(one.is_right for one in results) else 1


def _describe(result: TrialResult) -> str:
    state = "right" if result.is_right else "WRONG"
    lines = [f"{state} --only {result.seed}: {', '.join(result.operations)} ({result.faults})"]
    lines += [f"  {problem}" for problem in result.wrong[:5]]
    if result.lost:
        lines.append(f"  {len(result.lost)} requests lost, the first with {result.lost[0]}")
    return "\n".join(lines)


def _format(summary: dict[str, object]) -> str:
    return "\n".join(f"{name:>14}  {value}" for name, value in summary.items())


if __name__ == "__main__":
    sys.exit(main())
