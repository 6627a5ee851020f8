"""Servers whose share of bad requests differs from that of the other servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from onnx_ops.domain.rollout_observations import GenerationCounts, RequestCounts
from onnx_ops.statistics.rollout.outliers import MAX_OUTLIERS, OUTLIER_LIMIT, find_outliers

Numbers = npt.NDArray[np.int64]
HONEST = ((100_000, 100, 1000), (90_000, 95, 880), (95_000, 90, 1010))
"""Requests, errors and slow requests of three similar servers."""


def count(
    server: str, requests: int, errors: int, slow: int = 0, *, origin: str = "", generation: int = 1
) -> GenerationCounts:
    tally = RequestCounts(requests=requests, errors=errors, timed=requests, over_p99=slow)
    return GenerationCounts(
        origin=origin or server, generation=generation, tallies={"v1": tally}, server=server
    )


def count_each(rows: Iterable[Sequence[int]]) -> list[GenerationCounts]:
    return [count(f"r{number}", *row) for number, row in enumerate(rows, 1)]


def list_found(counts: Iterable[GenerationCounts]) -> list[tuple[str, str]]:
    return [(outlier.server, outlier.place) for outlier in find_outliers(counts)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((100_000, 110, 1100), []),
        ((100_000, 190, 1900), []),
        ((100_000, 500, 1000), ["errors"]),
        ((100_000, 100, 5000), ["slow"]),
        ((100_000, 500, 5000), ["errors", "slow"]),
        ((100_000, 0, 1000), ["errors"]),
        ((100_000, 0, 0), ["errors", "slow"]),
        ((5, 5, 5), []),
        ((0, 0, 0), []),
    ],
)
def test_find_outliers_compares_each_server_with_others(
    row: tuple[int, int, int], expected: list[str]
) -> None:
    assert list_found(count_each([*HONEST, row])) == [("r4", place) for place in expected]


def test_find_outliers_of_two_servers_names_server_with_higher_error_rate() -> None:
    for rows in ([(2000, 2), (2000, 100)], [(2000, 100), (2000, 2)]):
        (outlier,) = find_outliers(count_each(rows))
        assert (outlier.own, outlier.others) == ((100, 2000), (2, 2000))


def test_find_outliers_summary_names_server_deployment_and_counts() -> None:
    (outlier,) = find_outliers(count_each([(2000, 2), (2000, 100)]))
    assert outlier.summary.startswith(
        "replica r2: 100/2000 (5.00%) requests to v1 failed, 2/2000 (0.10%) "
        "on the others (evidence 1e"
    )


def test_find_outliers_with_several_broken_servers_names_only_them_up_to_maximum() -> None:
    bad = [(20_000, 1000), (20_000, 900)]
    assert list_found(count_each([*[(20_000, 20)] * 6, *bad])) == [
        ("r7", "errors"),
        ("r8", "errors"),
    ]
    assert len(list_found(count_each([*[(20_000, 20)] * 30, *bad * 10]))) == MAX_OUTLIERS


def test_find_outliers_sums_counts_of_server_starts_and_uses_repeated_start_once() -> None:
    parts = [count("r4", 100, 5, origin=f"start{number}") for number in range(6)]
    honest = count_each(HONEST)
    assert not find_outliers([*honest, parts[0]])
    assert not find_outliers([*honest, *[parts[0]] * 6])
    (outlier,) = find_outliers([*honest, *parts])
    assert outlier.own == (30, 600)
    later = count("r4", 110, 6, origin="start0")
    for order in ((parts[0], later), (later, parts[0])):
        (outlier,) = find_outliers([*honest, *parts[1:], *order])
        assert outlier.own == (31, 610)


def test_find_outliers_compares_within_generation() -> None:
    """Three servers failed under the first table; the fourth started after that."""
    before = [count(f"r{number}", 5000, 500, generation=1) for number in range(3)]
    after = [count(f"r{number}", 5000, 5, generation=2) for number in range(4)]
    assert not find_outliers([*before, *after])
    assert list_found([*before, *after, count("r2", 2000, 200, origin="again", generation=2)]) == [
        ("r2", "errors")
    ]


def test_find_outliers_adds_evidence_of_generations() -> None:
    counts = [
        count(f"r{number}", 1000, 8 if number == 3 else 1, generation=generation)
        for generation in range(12)
        for number in range(4)
    ]
    assert not find_outliers(counts[:8])
    assert list_found(counts) == [("r3", "errors")]


def test_find_outliers_raises_limit_by_number_of_comparisons() -> None:
    """Four servers, two metrics and two directions make sixteen comparisons."""
    strengths = [
        outlier.evidence
        for errors in range(100, 600)
        for outlier in find_outliers(count_each([*HONEST, (100_000, errors)]))
    ]
    assert strengths
    assert min(strengths) >= OUTLIER_LIMIT + np.log10(16)


def test_find_outliers_of_servers_with_very_many_requests_names_faulty_server() -> None:
    rows = [(10**12, 10**11), (10**12, 10**11), (10**12, 4 * 10**11)]
    assert list_found(count_each(rows)) == [("r3", "errors")]
    assert not find_outliers(count_each(rows[:2]))


def test_find_outliers_compares_deployments_separately() -> None:
    counts = count_each(HONEST)
    candidates = [
        replace(each, tallies={**each.tallies, "v2": RequestCounts(requests=1000)})
        for each in counts
    ]
    assert not find_outliers(candidates)
    candidates[1] = replace(candidates[1], tallies={"v2": RequestCounts(requests=1000, errors=100)})
    (outlier,) = find_outliers(candidates)
    assert (outlier.server, outlier.deployment) == ("r2", "v2")


def test_find_outliers_without_names_of_servers_returns_no_outliers() -> None:
    counts = count_each([(2000, 2), (2000, 100)])
    assert find_outliers(counts)
    assert not find_outliers(replace(each, server="") for each in counts)
    assert not find_outliers([])


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        (RequestCounts(requests=10**400, errors=10**399), ["errors"]),
        (
            RequestCounts(requests=10**15, errors=10**15, timed=10**15, over_p99=10**15),
            ["errors", "slow"],
        ),
        (RequestCounts(requests=10**15, errors=10), ["errors"]),
        (RequestCounts(requests=-5, errors=-1), []),
        (RequestCounts(requests=10, errors=-(10**30)), []),
        (RequestCounts(requests=1, errors=5), []),
        (RequestCounts(requests=1000, errors=900, timed=-4, over_p99=0), []),
        (RequestCounts(requests=float("nan"), errors=float("nan")), []),  # type: ignore[arg-type]
    ],
)
def test_find_outliers_with_invented_counts_names_server_or_ignores_them(
    tally: RequestCounts, expected: list[str]
) -> None:
    invented = GenerationCounts(origin="x", generation=1, tallies={"v1": tally}, server="r9")
    assert list_found([*count_each(HONEST), invented]) == [("r9", place) for place in expected]


@pytest.mark.parametrize("servers", [3, 4, 10])
@pytest.mark.parametrize(("share", "invented"), [(0.001, 0.1), (0.05, 0.0)])
def test_find_outliers_with_huge_counts_of_one_server_names_no_other(
    servers: int, share: float, invented: float
) -> None:
    random = np.random.default_rng(servers)
    honest = count_each([(20_000, int(random.binomial(20_000, share))) for _ in range(servers - 1)])
    requests = 10**15
    assert list_found([*honest, count("r0", requests, round(requests * invented))]) == [
        ("r0", "errors")
    ]


class Fleet:
    """Replicas that answer requests with these shares of errors and slow requests."""

    def __init__(
        self,
        random: np.random.Generator,
        weights: npt.ArrayLike,
        errors: npt.ArrayLike,
        slow: float,
    ) -> None:
        self.random, self.weights = random, np.asarray(weights, dtype=float)
        self.shares = [
            np.broadcast_to(np.asarray(share, dtype=float), self.weights.shape)
            for share in (errors, slow)
        ]
        self.table = np.zeros((len(self.weights), 3), dtype=np.int64)

    def answer(self, requests: float) -> list[GenerationCounts]:
        """Answer `requests` more requests at each replica on average.

        Return the counts until now.
        """
        added = self.random.poisson(requests * self.weights)
        columns = [added, *(self.random.binomial(added, share) for share in self.shares)]
        self.table += np.stack(columns, axis=1)
        return count_each(self.table.tolist())


@pytest.mark.parametrize("endpoints", [100, pytest.param(2000, marks=pytest.mark.nightly)])
def test_find_outliers_of_similar_servers_returns_no_outliers_in_twenty_analyses(
    endpoints: int,
) -> None:
    random = np.random.default_rng(endpoints)
    found = 0
    for _ in range(endpoints):
        weights = random.dirichlet(np.full(random.integers(2, 51), 5.0))
        fleet = Fleet(
            random,
            weights * len(weights),
            10 ** random.uniform(-4, -0.5),
            10 ** random.uniform(-3, -0.3),
        )
        requests = 10 ** random.uniform(1, 5)
        found += any(find_outliers(fleet.answer(requests)) for _ in range(20))
    assert found == 0


@pytest.mark.parametrize(("servers", "needed"), [(2, 2500), (5, 1500), (50, 1000)])
def test_find_outliers_detects_five_percent_errors_after_given_requests(
    servers: int, needed: int
) -> None:
    random = np.random.default_rng(servers)
    for _ in range(20):
        bad = int(random.integers(servers))
        fleet = Fleet(
            random, np.ones(servers), np.where(np.arange(servers) == bad, 0.05, 0.001), 0.01
        )
        assert list_found(fleet.answer(needed)) == [(f"r{bad + 1}", "errors")]
