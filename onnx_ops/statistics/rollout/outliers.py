"""Find servers of one endpoint with an outlying share of bad requests.

Such a server can be a broken machine, or report invented counts. Each server is compared with the
rest in both directions, by the evidence of `evidence` against an odds ratio of at most
`TOLERATED_RATIO`. Each generation of the routing table is an interval, so that servers are compared
over similar periods. Requests are treated as independent. One user whose requests all reach one
server can therefore make this server an outlier, and the result is only a hint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.rollout import ServerOutlier
from onnx_ops.domain.rollout_observations import GenerationCounts, RequestCounts
from onnx_ops.statistics.rollout.evidence import (
    GRID,
    Array,
    average_evidence,
    compute_log10_evidence,
    compute_log_likelihood,
    make_alternatives,
)

TOLERATED_RATIO = 2.0
"""Odds ratio up to which servers are treated as equal, since machines differ."""
OUTLIER_LIMIT = 6.0
"""log10 of the evidence for one comparison.

The evidence is evaluated often, and each further comparison raises the limit.
"""
MAX_OUTLIERS = 8
"""Maximum number of outliers of one deployment and place.

If more servers differ, there is no common share to compare with.
"""

_PLACES: tuple[Literal["errors", "slow"], ...] = ("errors", "slow")
"""Kinds of bad requests: errors, and slow requests.

`count_by_server` counts slow requests as `over_p99`.
"""
_MAX_REQUESTS = 1 << 40
"""Maximum count of one server.

Larger counts are scaled down, so that sums fit into 64 bits.
"""
_SIDE_BAD, _SIDE_REQUESTS = 2_048, 1 << 29
"""Maximum counts of one side of a comparison; larger counts are scaled down.

Scaling reduces the evidence as a design effect does. The likelihood of more events takes too much
time and memory, and that of more requests loses digits.
"""

_Counts: TypeAlias = npt.NDArray[np.int64]
_Tallies: TypeAlias = Mapping[str, Mapping[int, RequestCounts]]
"""Requests to one deployment by server and generation."""


def find_outliers(counts: Iterable[GenerationCounts]) -> tuple[ServerOutlier, ...]:
    """Return the servers that differ from the others by more than chance.

    Servers are compared by deployment and place. If all servers differ by at most `TOLERATED_RATIO`
    and requests are independent, the probability that any server is returned is at most 1e-6 at
    each evaluation. The counts of several starts of a server are added. Counts without a server
    name and inconsistent counts are ignored.
    """
    comparisons = [
        (deployment, place, *_tabulate(by_server, place))
        for deployment, by_server in _sum_starts(counts).items()
        for place in _PLACES
    ]
    limit = OUTLIER_LIMIT + math.log10(
        max(1, sum(2 * len(servers) for _, _, servers, _ in comparisons))
    )
    return tuple(
        ServerOutlier(
            server=server,
            deployment=deployment,
            place=place,
            own=own,
            others=others,
            evidence=evidence,
        )
        for deployment, place, servers, table in comparisons
        for server, own, others, evidence in _select(servers, table, limit)
    )


def _sum_starts(counts: Iterable[GenerationCounts]) -> Mapping[str, _Tallies]:
    """Return the counts by deployment, server and generation.

    If the same start was reported twice, the later report is used.
    """
    latest: dict[tuple[str, str, int], GenerationCounts] = {}
    for each in counts:
        key = (each.server, each.origin, each.generation)
        if each.server and (key not in latest or each.is_later_than(latest[key])):
            latest[key] = each
    tallies: dict[str, dict[str, dict[int, RequestCounts]]] = {}
    for each in latest.values():
        for deployment, tally in each.tallies.items():
            if tally.is_consistent:
                by_generation = tallies.setdefault(deployment, {}).setdefault(each.server, {})
                before = by_generation.get(each.generation)
                by_generation[each.generation] = tally if before is None else before.plus(tally)
    return tallies


def _tabulate(by_server: _Tallies, place: Literal["errors", "slow"]) -> tuple[list[str], _Counts]:
    """Return the servers and a table of their request counts.

    The table has the shape (servers, generations, 2), for bad requests and all requests.
    """
    servers = sorted(by_server)
    generations = sorted({generation for tallies in by_server.values() for generation in tallies})
    columns = {generation: column for column, generation in enumerate(generations)}
    table = np.zeros((len(servers), len(generations), 2), dtype=np.int64)
    for row, server in enumerate(servers):
        for generation, tally in by_server[server].items():
            bad, requests = (
                (tally.errors, tally.requests)
                if place == "errors"
                else (tally.over_p99, tally.measured)
            )
            if bad is not None:
                scale = max(1, -(-requests // _MAX_REQUESTS))
                table[row, columns[generation]] = bad // scale, requests // scale
    return servers, table


def _select(
    servers: list[str], table: _Counts, limit: float
) -> Iterator[tuple[str, tuple[int, int], tuple[int, int], float]]:
    """Yield the servers that differ most from the remaining ones.

    A tuple has the server, its counts, the counts of the others, and the evidence. Servers with a
    higher share come first, since a broken server makes the others seem too good. A yielded server
    is removed from the comparison of the remaining ones.
    """
    left = np.arange(len(servers))
    while len(left) > max(1, len(servers) - MAX_OUTLIERS):
        own, usual = table[left], _limit_weights(table[left])
        rest = usual.sum(axis=0) - usual
        evidence = _measure(own, rest)
        if evidence.max() < limit:
            evidence = _measure(rest, own)
        if evidence.max() < limit:
            return
        place = int(evidence.argmax())
        others = own.sum(axis=0) - own[place]
        yield servers[left[place]], _sum_pair(own[place]), _sum_pair(others), float(evidence[place])
        left = np.delete(left, place)


def _limit_weights(table: _Counts) -> _Counts:
    """Return the counts with at most the median number of requests in each generation.

    Without this limit, one server with invented counts could dominate every comparison.
    """
    requests = table[..., 1]
    counted = (requests > 0).sum(axis=0)
    middle = np.minimum(len(table) - counted + counted // 2, len(table) - 1)
    median = np.take_along_axis(np.sort(requests, axis=0), middle[None], axis=0)
    share = np.minimum(1.0, median / np.maximum(1, requests))
    return np.asarray(np.rint(table * share[..., None]), dtype=np.int64)


def _sum_pair(rows: _Counts) -> tuple[int, int]:
    bad, requests = rows.sum(axis=0).tolist()
    return bad, requests


def _measure(mine: _Counts, others: _Counts) -> Array:
    """Return log10 of the evidence of a higher share of bad requests in `mine`.

    The result has one value for each server. It is the mean of the evidence of each generation and
    of all generations together, since a machine can break at any time.
    """
    evidence = np.full(len(mine), -np.inf)
    chosen = np.flatnonzero(_can_be_higher(mine, others))
    if len(chosen):
        rows = np.concatenate([_scale(mine[chosen]), _scale(others[chosen])], axis=-1)
        logs = compute_log_likelihood(rows, make_alternatives(TOLERATED_RATIO))
        logs = np.concatenate([logs, logs.sum(axis=1, keepdims=True)], axis=1)
        evidence[chosen] = average_evidence(compute_log10_evidence(logs))
    return evidence


def _can_be_higher(mine: _Counts, others: _Counts) -> npt.NDArray[np.bool_]:
    """Return for which servers the evidence can reach the limit.

    The evidence of the other servers need not be computed. If all odds ratios are at most the
    tolerated one, the likelihood favours none of the alternatives. Each bad request multiplies the
    evidence by at most the largest alternative.
    """
    bad, requests = np.moveaxis(mine.astype(np.float64), -1, 0)
    others_bad, others_requests = np.moveaxis(others.astype(np.float64), -1, 0)
    is_higher = bad * (others_requests - others_bad) > TOLERATED_RATIO * others_bad * (
        requests - bad
    )
    return np.asarray(
        is_higher.any(axis=1) & (bad.sum(axis=1) * math.log10(GRID[-1]) >= OUTLIER_LIMIT)
    )


def _scale(side: _Counts) -> _Counts:
    bad, requests = side[..., 0], side[..., 1]
    scale = np.maximum(1.0, np.maximum(bad / _SIDE_BAD, requests / _SIDE_REQUESTS))
    return np.asarray(np.rint(side / scale[..., None]), dtype=np.int64)
