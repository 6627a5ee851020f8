"""What the endpoint server promises in comparison, and whether a run confirms it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.rounds import Score
from benchmarks.truth.claims import Claim, table

OURS, KEYED, BINARY, SNIPPET, TUNED, MLFLOW = (
    "onnx-ops",
    "onnx-ops, user keys",
    "onnx-ops, binary",
    "FastAPI snippet",
    "FastAPI snippet, tuned",
    "mlflow",
)
ONE, ONE_BINARY = "onnx-ops, one thread", "onnx-ops, one thread, binary"
ALL, ALL_BINARY = "onnx-ops, all threads", "onnx-ops, all threads, binary"
PLAIN, PLAIN_BINARY = "plain parser loop", "plain parser loop, binary"
TRITON, TRITON_BINARY = "Triton", "Triton, binary"
_ABOUT = 0.95


@dataclass(frozen=True, slots=True)
class Board:
    """The scores of all matches, found by name, model and number of connections."""

    scores: Sequence[Score]

    def find(self, name: str, model: str, place: str) -> Score:
        return next(
            s
            for s in self.scores
            if (s.match.name, s.match.contestant.model.name, s.match.place) == (name, model, place)
        )

    def faster(self, name: str, other: str, model: str, place: str) -> float:
        """Return the ratio of requests per second to another server's.

        This is the median of the rounds' ratios.
        """
        mine, theirs = self.find(name, model, place), self.find(other, model, place)
        return statistics.median(a / b for a, b in zip(mine.rates, theirs.rates, strict=True))


def claims_of_mlp(board: Board, bare_us: float) -> list[Claim]:
    ours = board.find(OURS, "mlp", "16")
    cpu, snippet = min(ours.cpu_us), min(board.find(SNIPPET, "mlp", "16").cpu_us)
    alone = board.faster(OURS, SNIPPET, "mlp", "1, one CPU")
    return [
        _at_most(
            "server CPU per request relative to the snippet, 16 connections",
            cpu / snippet,
            0.085,
            "× ",
        ),
        _at_most(
            f"server CPU per request relative to session.run alone ({bare_us:.1f} µs), "
            "16 connections",
            cpu / bare_us,
            4,
            "× ",
        ),
        _about("requests/s relative to the snippet, 1 connection, one processor", alone, 10),
        _about(
            "requests/s relative to the snippet, 16 connections",
            board.faster(OURS, SNIPPET, "mlp", "16"),
            13,
        ),
        _at_least(
            "requests/s relative to mlflow, 16 connections",
            board.faster(OURS, MLFLOW, "mlp", "16"),
            25,
        ),
        _at_most("seconds from start to the first answer", ours.ready_s, 1, ""),
        _at_most("memory (PSS of all processes), MB", ours.pss / 1e6, 70, ""),
    ]


def claims_of_cnn(board: Board) -> list[Claim]:
    ratio = board.faster(OURS, SNIPPET, "cnn", "8")
    return [_at_least("small CNN: requests/s relative to the snippet, 8 connections", ratio, 6)]


def claims_of_image(board: Board) -> list[Claim]:
    ratio = board.faster(BINARY, SNIPPET, "image", "1")
    what = "224×224 image in binary: requests/s relative to the snippet in JSON, 1 connection"
    return [_at_least(what, ratio, 40)]


def claims_of_dense(board: Board) -> list[Claim]:
    """Compare the chosen threads with the better of one thread and all threads."""
    return [
        _at_least(
            "dense model: requests/s of the chosen number of threads relative to the better of one "
            f"thread and all threads: {name}, {place} connections",
            min(board.faster(name, other, "dense", place) for other in others),
            0.9,
        )
        for name, others in ((OURS, (ONE, ALL)), (BINARY, (ONE_BINARY, ALL_BINARY)))
        for place in ("16", "64")
    ]


def claims_of_triton(board: Board) -> list[Claim]:
    """Return a claim for each row of Triton that has a matching row of this server.

    Matching rows have the same requests.
    """
    claims: list[Claim] = []
    for name, other in ((OURS, TRITON), (BINARY, TRITON_BINARY)):
        for theirs in (score for score in board.scores if score.match.name == other):
            model, place = theirs.match.contestant.model.name, theirs.match.place
            mine = board.find(name, model, place)
            rate = board.faster(name, other, model, place)
            p99 = statistics.median(a / b for a, b in zip(mine.p99_us, theirs.p99_us, strict=True))
            cpu = min(mine.cpu_us) / min(theirs.cpu_us)
            claim = Claim(
                gate=name,
                what=f"requests/s, p99 and CPU per request relative to {other}: {model}, "
                f"connections: {place}",
                bound="≥ × 1, < × 1, < × 1",
                figure=f"{rate:.3g}, {p99:.3g}, {cpu:.3g}",
                is_met=rate >= 1 and p99 < 1 and cpu < 1,
            )
            claims.append(claim)
    return claims


def claim_of_failures(board: Board) -> Claim:
    ours = [s for s in board.scores if s.match.name.startswith(OURS)]
    failed, requests = sum(s.failed for s in ours), sum(s.requests for s in ours)
    is_met = failed == 0 and requests > 0
    return Claim(
        gate=OURS,
        what="failed requests",
        bound="0",
        figure=f"{failed} of {requests:,}",
        is_met=is_met,
    )


HEAD = (
    "server",
    "model",
    "conn.",
    "req/s",
    "× snippet",
    "CPU µs",
    "p50 µs",
    "p99 µs",
    "ready s",
    "PSS MB",
    "failed",
)


def rows_of(board: Board) -> list[tuple[str, ...]]:
    """Return the table of all matches, in the columns of HEAD.

    CPU is the minimum of the rounds. Rates, ratios and latencies are medians.
    """
    rows: list[tuple[str, ...]] = []
    for score in board.scores:
        model, place = score.match.contestant.model.name, score.match.place
        rows.append(
            (
                score.match.name,
                model,
                place,
                f"{statistics.median(score.rates):,.0f}",
                f"{board.faster(score.match.name, SNIPPET, model, place):.2f}",
                f"{min(score.cpu_us):.1f}",
                f"{statistics.median(score.p50_us):,.0f}",
                f"{statistics.median(score.p99_us):,.0f}",
                f"{score.ready_s:.2f}",
                f"{score.pss / 1e6:.0f}",
                str(score.failed),
            )
        )
    return rows


def show(board: Board, claims: Sequence[Claim]) -> None:
    table(
        "rounds in turn; CPU of all the server's processes, the least round; else medians",
        HEAD,
        rows_of(board),
    )
    head = ("", "server", "what", "bound", "figure")
    table("promises", head, [(c.outcome, c.gate, c.what, c.bound, c.figure) for c in claims])


def _at_most(what: str, figure: float, bound: float, unit: str) -> Claim:
    return Claim(
        gate=OURS,
        what=what,
        bound=f"≤ {unit}{bound:g}",
        figure=f"{figure:.3g}",
        is_met=figure <= bound,
    )


def _at_least(what: str, figure: float, bound: float) -> Claim:
    return Claim(
        gate=OURS, what=what, bound=f"≥ × {bound:g}", figure=f"{figure:.3g}", is_met=figure >= bound
    )


def _about(what: str, figure: float, bound: float) -> Claim:
    least = _ABOUT * bound
    text = f"about × {bound:g} (≥ {least:.4g})"
    return Claim(gate=OURS, what=what, bound=text, figure=f"{figure:.3g}", is_met=figure >= least)
