"""Draw the picture of the page "How an A/B test is judged".

It shows splits of 1,000 requests.

python docs/picture_tosses.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnx_ops.reporting.svg import Axis, Chart, make_standalone

PICTURE = Path(__file__).resolve().parent / "images" / "tosses.svg"
SPLITS = 100


def main() -> None:
    """Draw the picture."""
    random = np.random.default_rng(3)
    rows = (
        ("each request", random.binomial(1000, 0.5, SPLITS)),
        ("20 users", 50 * random.binomial(20, 0.5, SPLITS)),
    )
    chart = Chart(
        x=Axis(low=100.0, high=900.0, label="requests to the candidate, of 1,000"),
        y=Axis(low=0.0, high=2.0, label=""),
        height=190.0,
        left=110.0,
        y_ticks=False,
    )
    chart.upright(500.0, "limit")
    for place, (name, found) in enumerate(rows):
        middle = 1.5 - place
        chart.row(middle, name, "")
        for split in found:
            chart.dot(
                float(split),
                middle + random.uniform(-0.3, 0.3),
                f"s{place}",
                str(split),
                radius=2.5,
            )
    svg = chart.render(
        "A hundred splits each: a coin for each request, and a coin for each of 20 users"
    )
    svg = make_standalone(svg, "svg{background:var(--bg)}circle{fill:var(--c)}")
    PICTURE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
