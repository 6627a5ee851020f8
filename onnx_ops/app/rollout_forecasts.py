"""Forecasts of rollouts, of an endpoint or of the endpoints of a pipeline file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.pipeline import Deploy, Pipeline
from onnx_ops.domain.rollout_forecast import Cadence, Harm, Traffic
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import NotFoundError, OnnxOpsError, UserError
from onnx_ops.reporting.rollout_forecast import EndpointForecast, list_warnings

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.domain.endpoint import EndpointConfig

_NO_ANALYSIS = (
    "the policy has no guardrails, slo, shadow or ab_test, so that each step before "
    "100% waits for `onnx-ops rollout advance`"
)
_SCRAPE_S, _SERVICE_S = 30.0, 90.0
"""Delay in seconds of counts from Prometheus, and from a cloud's metrics service."""
_ENDLESS = 1e6
"""Rate of requests per second for computing the shortest possible duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRequest:
    """What a forecast is about.

    `given` are fields of the traffic by name. Without a rate, the traffic is measured for
    `window_s` seconds, and given fields replace measured ones. Without `harms`, they are derived
    from the policy's guardrails and shadow trial.
    """

    given: dict[str, float]
    harms: tuple[Harm, ...] = ()
    window_s: float = 20.0


def forecast_named(project: Project, name: str, request: ForecastRequest) -> list[EndpointForecast]:
    """Return the forecasts of an endpoint, or of each endpoint of a pipeline file.

    Raises:
        NotFoundError: neither an endpoint nor a file has this name, or the traffic of a future
            endpoint must be measured.
        UserError: the pipeline file has problems or deploys to no endpoint, or a number of the
            request is invalid. Or the measured endpoint lacks a version or requests.
        ServiceUnavailableError: the metrics source cannot be read, or its counts restarted.
    """
    file = Path(name)
    if file.suffix in (".yaml", ".yml") or file.is_file():
        from onnx_ops.app.project import check

        pipeline = check(project, file, static=True).pipeline
        if not pipeline.deploy:
            raise UserError("the pipeline deploys to no endpoint", where=name)
        return [_forecast_entry(project, entry, request) for entry in pipeline.deploy]
    from onnx_ops.release.journal import Journal

    journal = Journal.open(project.context, name)
    config, policy = journal.config, journal.state.policy
    find_cadence = partial(_find_cadence, project, config)
    return [_forecast(project, name, policy, find_cadence, request)]


def forecast_offline(project: Project, pipeline: Pipeline) -> list[EndpointForecast]:
    """Return the forecast of each endpoint's analyzed rollout, without network access.

    Rollouts with a single step are left out. The traffic is that of the endpoint's last rollout, if
    this machine has its ledger. Otherwise, the result is the shortest duration at any traffic, and
    `origin` is empty.
    """
    results = []
    for entry in pipeline.deploy:
        if not entry.rollout.is_analyzed or len(entry.rollout.planned()) == 1:
            continue
        # This import loads NumPy and SciPy, so it runs only for an analyzed rollout.
        from onnx_ops.statistics.rollout.forecast import forecast_rollout

        traffic = _read_local(project, entry.endpoint)
        origin = "traffic of its last rollout"
        if traffic is None:
            traffic, origin = Traffic(rate=_ENDLESS), ""
        cadence = _find_entry_cadence(project, entry)
        results.append(
            EndpointForecast(
                endpoint=entry.endpoint,
                policy=entry.rollout,
                origin=origin,
                forecast=forecast_rollout(entry.rollout, traffic, cadence=cadence),
            )
        )
    return results


def warn_of_rollouts(project: Project, pipeline: Pipeline) -> list[str]:
    """Return warnings about rollouts that do not end, or take very long."""
    return [
        f"warning: {result.endpoint}{f' ({result.origin})' if result.origin else ''}: {warning}"
        for result in forecast_offline(project, pipeline)
        for warning in list_warnings(result)
    ]


def _read_local(project: Project, endpoint: str) -> Traffic | None:
    """Return the traffic of the last rollout in a local ledger; None if unknown."""
    from onnx_ops.release.traffic import read_recorded_traffic

    if "://" in project.settings.ledger:
        return None
    try:
        return read_recorded_traffic(project.context, endpoint)
    except OnnxOpsError:  # Other commands report a damaged ledger.
        return None


def _forecast_entry(project: Project, entry: Deploy, request: ForecastRequest) -> EndpointForecast:
    find_cadence = partial(_find_entry_cadence, project, entry)
    try:
        return _forecast(project, entry.endpoint, entry.rollout, find_cadence, request)
    except NotFoundError as error:
        raise NotFoundError(
            "the endpoint does not exist yet, so its traffic is unknown",
            where=entry.endpoint,
            remedy="Give the expected traffic: --rate 5/s.",
        ) from error


def _forecast(
    project: Project,
    endpoint: str,
    policy: RolloutPolicy,
    find_cadence: Callable[[], Cadence],
    request: ForecastRequest,
) -> EndpointForecast:
    if not policy.is_analyzed:
        return EndpointForecast(endpoint=endpoint, policy=policy, why=_NO_ANALYSIS)
    if len(policy.planned()) == 1:
        return EndpointForecast(endpoint=endpoint, policy=policy, why="the only step is 100%")
    from onnx_ops.statistics.rollout.forecast import choose_harms, forecast_rollout

    traffic, origin = _find_traffic(project, endpoint, request)
    harms = request.harms or choose_harms(policy, traffic)
    try:
        forecast = forecast_rollout(policy, traffic, harms, find_cadence())
    except ValueError as error:
        raise UserError(str(error), where=endpoint) from error
    return EndpointForecast(endpoint=endpoint, policy=policy, origin=origin, forecast=forecast)


def _find_traffic(project: Project, endpoint: str, request: ForecastRequest) -> tuple[Traffic, str]:
    """Return the given or measured traffic, and where it is from."""
    fields = {**request.given}
    if "users" in fields:
        fields["users"] = int(fields["users"])
    if "rate" in fields:
        return Traffic(**fields), "given"  # type: ignore[arg-type]  # options with these names
    from onnx_ops.release.traffic import measure_traffic

    measured = measure_traffic(project.context, endpoint, request.window_s)
    origin = f"measured from {measured.counted:,} requests"
    if fields:
        origin += f"; given: {', '.join(fields)}"
    return replace(measured, **fields), origin  # type: ignore[arg-type]  # as above


def _find_cadence(project: Project, config: EndpointConfig) -> Cadence:
    provider = project.context.provider(config.provider)
    able = provider.capabilities(config.options)
    return _make_cadence("epochs" in able, project.context.metrics(config).capabilities())


def _find_entry_cadence(project: Project, entry: Deploy) -> Cadence:
    from onnx_ops import plugins

    provider = project.context.provider(entry.provider)
    metrics = (
        provider.metrics(entry.options)
        if entry.metrics is None
        else plugins.load("metrics", entry.metrics.source, entry.metrics.options)
    )
    able = provider.capabilities(entry.options)
    return _make_cadence("epochs" in able, metrics.capabilities())


def _make_cadence(has_epochs: bool, capabilities: Iterable[str]) -> Cadence:
    """Return how counts reach the analysis of a rollout.

    Only metrics sources that read the servers themselves count by unit. A unit is a user in an
    epoch, or a request without a key. Such a source has the capability `cold_starts`.
    """
    if "exceedances" not in capabilities:
        return Cadence(source="percentiles", lag_s=_SERVICE_S)
    if has_epochs and "cold_starts" in capabilities:
        return Cadence()
    return Cadence(source="intervals", lag_s=_SCRAPE_S)


def parse_harms(texts: Sequence[str]) -> tuple[Harm, ...]:
    """Parse harms such as `errors=1%`, `latency_p99=1.2x`.

    Raises:
        UserError: a name is unknown, or a value has another form or is out of range.
    """
    return tuple(map(_parse_harm, texts))


def _parse_harm(text: str) -> Harm:
    from typing import get_args

    from onnx_ops.domain.rollout_policy import GuardrailName

    name, _, value = text.partition("=")
    shares = ("errors", "shadow")
    known = ({*get_args(GuardrailName)} - {"cold_start"}) | {"shadow", "feedback"}
    unit, scale = ("%", 0.01) if name in shares else ("x", 1.0)
    try:
        number = float(value.removesuffix(unit)) * scale if value.endswith(unit) else -1.0
    except ValueError:
        number = -1.0
    if name not in known or not 0 < number < (1.0001 if name in shares else 1e6):
        raise UserError(
            f"{text!r} is not a valid harm",
            where="--harm",
            why=f"names: {', '.join(sorted(known))}; the value of errors and shadow is a "
            "percentage up to 100%, and that of the others a factor such as 1.2x",
            remedy="For example: --harm errors=1%, --harm latency_p99=1.2x, "
            "--harm feedback=0.9x, --harm shadow=3%.",
        )
    return Harm(name=name, value=number)
