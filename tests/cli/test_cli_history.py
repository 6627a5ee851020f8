"""`onnx-ops history --traffic`: shares of traffic over time, for people."""

from __future__ import annotations

import pytest

from onnx_ops.cli.endpoints import traffic_chart
from onnx_ops.release.status import HistoryLine


def moved(at: str, why: str, **traffic: int) -> HistoryLine:
    when = f"2026-11-25T{at}+00:00"
    return HistoryLine(
        endpoint="m",
        sequence=1,
        at=when,
        actor="al[i]ce",
        kind="k",
        what="w",
        why=why,
        traffic=traffic,
    )


def test_traffic_chart_prints_bar_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    traffic_chart(
        [
            moved("10:00:00", "first", v1=100),
            moved("10:01:00", "step 1", v1=90, v2=10),
            moved("10:02:00", "slower", v1=100, v2=0),
        ]
    )
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "m: shares of traffic; times in UTC",
        f"2026-11-25 10:00:00 {'█' * 40} v1 100 %",
        "                    first (al[i]ce)",
        f"2026-11-25 10:01:00 {'█' * 36}{'▒' * 4} v1 90 %, v2 10 %",
        "                    step 1 (al[i]ce)",
        f"2026-11-25 10:02:00 {'█' * 40} v1 100 %",
        "                    slower (al[i]ce)",
    ]


def test_traffic_chart_without_changes_prints_message(capsys: pytest.CaptureFixture[str]) -> None:
    traffic_chart([])
    assert capsys.readouterr().out == "No traffic change is recorded.\n"
