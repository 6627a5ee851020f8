"""Let A/B tests by feedback decide on the fakes of both clouds.

    python -m benchmarks.clouds --trials 20 --cloud sagemaker

Each trial starts an endpoint with `traffic: table`. Users send requests and report feedback as
clients of the cloud do. The candidate is better, worse or equal in a third of the trials each. A
trial is right if the better version serves at the end; for equal versions, the stable one.

Exit code: 0 if all trials are right and no request failed, otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.adapters.fleet_site import FleetSite, open_azure_fleet, open_sagemaker_fleet
from tests.chaos.fleet_rollouts import FleetRollouts, decide_by_feedback
from tests.support.clouds.sagemaker import fake_sagemaker

STABLE = 0.5
CASES = {"better": (0.8, "v2"), "worse": (0.2, "v1"), "equal": (STABLE, "v1")}
"""Shares of good answers of the candidate, and the version that is right."""


@contextmanager
def open_fleets(cloud: str, folder: Path, trials: int) -> Iterator[Iterator[FleetSite]]:
    """Yield a new fleet for each trial; all trials on SageMaker share one fake."""
    if cloud == "azureml":

        def azure() -> Iterator[FleetSite]:
            for number in range(trials):
                with open_azure_fleet(folder / str(number)) as site:
                    yield site

        yield azure()
        return
    with fake_sagemaker(folder) as fake, patch.dict(os.environ, fake.environment):

        def amazon() -> Iterator[FleetSite]:
            for number in range(trials):
                fake.reset()
                with open_sagemaker_fleet(fake, folder / str(number)) as site:
                    yield site

        yield amazon()


def main() -> int:
    """Run the trials, and print one line for each and a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cloud", choices=("sagemaker", "azureml"), default="sagemaker")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    cases = [list(CASES)[number % len(CASES)] for number in range(arguments.trials)]
    random.Random(arguments.seed).shuffle(cases)  # noqa: S311 (an order, no secret)
    right = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        open_fleets(arguments.cloud, Path(folder), arguments.trials) as fleets,
    ):
        for number, (case, fleet) in enumerate(zip(cases, fleets, strict=True), start=1):
            share, expected = CASES[case]
            began = time.monotonic()
            site = FleetRollouts(fleet.folder / "rollouts", fleet=fleet)
            served = decide_by_feedback(site, stable=STABLE, candidate=share)
            right += served == expected
            took = time.monotonic() - began
            sys.stdout.write(f"{number:3} {case:6} {served} expected {expected} {took:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{arguments.cloud}, seed {arguments.seed}: {right} of {arguments.trials} right\n"
    )
    return 0 if right == arguments.trials else 1


if __name__ == "__main__":
    sys.exit(main())
