"""The command that forecasts rollouts."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from onnx_ops.cli.common import AsJson, open_project, parse_duration, print_result, say
from onnx_ops.errors import UserError

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def forecast(
    name: Annotated[
        str, typer.Argument(metavar="ENDPOINT|FILE", help="Name of an endpoint, or pipeline file.")
    ],
    rate: Annotated[
        str,
        typer.Option(
            metavar="N/UNIT",
            help="Expected requests, such as 5/s, 30/min, 100/h; default: measured now.",
            show_default=False,
        ),
    ] = "",
    users: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of users with keys; 0: requests have no key.",
            show_default=False,
        ),
    ] = None,
    errors: Annotated[
        str,
        typer.Option(
            metavar="PERCENT", help="Share of requests that fail, such as 0.1%.", show_default=False
        ),
    ] = "",
    harm: Annotated[
        list[str] | None,
        typer.Option(
            "--harm",
            metavar="NAME=VALUE",
            help="Smallest harm to detect: errors=1%, latency_p99=1.2x; repeat for several. "
            "Default: derived from the tolerances of the guardrails.",
            show_default=False,
        ),
    ] = None,
    feedback: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="A/B test: share of requests for which clients report a result.",
            show_default=False,
        ),
    ] = "",
    success: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="A/B test: share of successes among reported results.",
            show_default=False,
        ),
    ] = "",
    window: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the traffic is measured.")
    ] = "20s",
    as_json: AsJson = False,
) -> None:
    """Forecast how long a rollout takes, and which harm it finds.

    The forecast follows from the policy and the traffic. For each step except a cold start, it
    shows the time of a healthy candidate with the bounds of 90 % of rollouts. It also shows what
    each of these steps waits for, and after what time a harm is found. If a step cannot end in
    time, it shows what to change.

    Example: onnx-ops forecast digits-cnn --harm errors=1%

    Example: onnx-ops forecast configs/pipelines/digits-cnn.yaml --rate 5/s --users 2000
    """
    from onnx_ops.app.rollout_forecasts import ForecastRequest, forecast_named, parse_harms
    from onnx_ops.config.quantities import parse_option
    from onnx_ops.reporting.rollout_forecast import describe_forecast, document_forecast

    given: dict[str, float] = {}
    if rate:
        given["rate"] = _parse_rate(rate)
    if users is not None:
        given["users"] = users
    shares = (("errors", errors), ("feedback", feedback), ("success", success))
    given |= {key: parse_option(text, "1", f"--{key}") for key, text in shares if text}
    request = ForecastRequest(
        given=given, harms=parse_harms(harm or ()), window_s=parse_duration(window, "--window")
    )
    results = forecast_named(open_project(), name, request)

    def report() -> None:
        for result in results:
            for depth, line in describe_forecast(result):
                say(line, indent=2 * depth)

    print_result(lambda: [document_forecast(each) for each in results], report, as_json=as_json)


def _parse_rate(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?/ ?(s|min|h|d)", text)
    if match is None or not float(match[1]):
        raise UserError(
            f"{text!r} is not a rate of requests above 0",
            where="--rate",
            remedy="For example: --rate 5/s, --rate 30/min, --rate 100/h.",
        )
    return float(match[1]) / _UNITS_S[match[2]]
