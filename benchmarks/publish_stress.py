"""Publish and roll back under load, and count failed and stale answers.

    python -m benchmarks.publish_stress [--publications 1000] [--workers 2] [--connections 16]
    [--quick] [--json]

Every publication moves all traffic: to a new deployment with its own name, back to the version
before, to the next new deployment. An answer is stale if its version was replaced by a publication
that had returned before the request was sent. Exits with 1 if there is a stale answer, if a request
failed, or if there were too few requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.truth.claims import Claim, table
from benchmarks.truth.page import fill, markdown, promises
from onnx_ops.testing.endpoints import scaling_deployment
from tests.support.load import LoadPlan, Payload
from tests.support.publish_stress import StressResult, stress_publications
from tests.support.server import ServerFamily

BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
GATE = "publish stress"
LEAST_REQUESTS = 10
"""Smallest number of requests per publication that shows anything.

With fewer, too few requests are sent near a publication.
"""


def main() -> int:
    options = arguments()
    publications = 50 if options.quick else options.publications
    with tempfile.TemporaryDirectory(prefix="onnx-ops-stress-") as name:
        folder = Path(name)
        deployment = scaling_deployment(
            folder / "blue", name="blue", version="0", scale=2.0, model="m"
        )
        server = ServerFamily(folder=folder / "state", options=("--workers", str(options.workers)))
        server.start()
        try:
            plan = LoadPlan(
                url=server.url("/v2/models/m/infer"),
                payloads=[Payload(body=BODY)],
                connections=options.connections,
                seconds=3600,
                keys=100,
            )
            seen = stress_publications(server, deployment, plan, publications=publications)
        finally:
            server.destroy()
    claims = claims_of(seen, publications)
    figures = {
        "publications": publications,
        "publish_p50_ms": seen.publish_ms(50),
        "publish_p99_ms": seen.publish_ms(99),
        **{k: v for k, v in seen.records.summary().items() if k != "deployments"},
        "stale": seen.stale,
    }
    if options.page:
        text = f"{options.workers} workers, {options.connections} connections."
        rows = [
            (name.replace("_", " "), f"{v:.1f}" if isinstance(v, float) else str(v))
            for name, v in figures.items()
        ]
        fill(
            options.page,
            "publish-stress",
            f"{text}\n\n{markdown(('', ''), rows)}\n\n{promises(claims)}",
        )
    if options.json:
        print(json.dumps({"figures": figures, "claims": [asdict(claim) for claim in claims]}))
    else:
        table("publish stress", ("", ""), [(name, str(value)) for name, value in figures.items()])
        table(
            "promises",
            ("", "what", "bound", "figure"),
            [(c.outcome, c.what, c.bound, c.figure) for c in claims],
        )
    return 0 if all(claim.is_met for claim in claims) else 1


def claims_of(seen: StressResult, publications: int) -> list[Claim]:
    records, sent = seen.records, len(seen.records)
    failed = f"{records.failed} of {sent:,} {records.failures() or ''}"
    return [
        Claim(
            gate=GATE, what="failed requests", bound="0", figure=failed, is_met=records.failed == 0
        ),
        Claim(
            gate=GATE,
            what="stale answers",
            bound="0",
            figure=f"{seen.stale} of {sent:,}",
            is_met=seen.stale == 0,
        ),
        Claim(
            gate=GATE,
            what="requests per publication",
            bound=f"≥ {LEAST_REQUESTS}",
            figure=f"{sent / publications:.0f}",
            is_met=sent >= LEAST_REQUESTS * publications,
        ),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--publications", type=int, default=1000, help="publications and rollbacks together (1000)"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    parser.add_argument("--connections", type=int, default=16, help="clients (16)")
    parser.add_argument("--quick", action="store_true", help="50 publications")
    parser.add_argument("--page", type=Path, help="page to write the figures into")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
