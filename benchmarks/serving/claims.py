"""What the endpoint server promises beside others, and whether this run bears it out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from truth.claims import Claim, table

from serving.rounds import Score

OURS, KEYED, BINARY, SNIPPET, MLFLOW = (
    "onnx-ops",
    "onnx-ops, user keys",
    "onnx-ops, binary",
    "FastAPI snippet",
    "mlflow",
)


@dataclass(frozen=True, slots=True)
class Board:
    """The scores of all heats, found by name, model and connections."""

    scores: Sequence[Score]

    def find(self, name: str, model: str, connections: int) -> Score:
        return next(
            s
            for s in self.scores
            if (s.heat.name, s.heat.contestant.model.name, s.heat.connections) == (name, model, connections)
        )

    def faster(self, name: str, other: str, model: str, connections: int) -> float:
        """Requests a second against another's: the median of the rounds' ratios."""
        mine, theirs = self.find(name, model, connections), self.find(other, model, connections)
        return statistics.median(a / b for a, b in zip(mine.rates, theirs.rates, strict=True))


def claims_of_mlp(board: Board, bare_us: float) -> list[Claim]:
    claims = []
    for name in (OURS, KEYED):
        cpu = min(board.find(name, "mlp", 16).cpu_us)
        snippet = min(board.find(SNIPPET, "mlp", 16).cpu_us)
        claims += [
            _at_most(name, "server CPU a request against the snippet's, 16 connections", cpu / snippet, 0.085, "× "),
            _at_most(name, f"the same against session.run alone ({bare_us:.1f} µs)", cpu / bare_us, 4, "× "),
            _at_least(name, "requests/s against the snippet, 1 connection", board.faster(name, SNIPPET, "mlp", 1), 10),
            _at_least(name, "the same at 16 connections", board.faster(name, SNIPPET, "mlp", 16), 13),
            *(
                _at_least(name, f"requests/s against mlflow, {c} connections", board.faster(name, MLFLOW, "mlp", c), 25)
                for c in (1, 16)
            ),
        ]
    ours = board.find(OURS, "mlp", 16)
    claims.append(_at_most(OURS, "seconds from start to the first answer", ours.ready_s, 1, ""))
    claims.append(_at_most(OURS, "memory (PSS of all processes), MB", ours.pss / 1e6, 70, ""))
    return claims


def claims_of_cnn(board: Board) -> list[Claim]:
    ratio = board.faster(OURS, SNIPPET, "cnn", 8)
    return [_at_least(OURS, "small CNN: requests/s against the snippet, 8 connections", ratio, 6)]


def claims_of_image(board: Board) -> list[Claim]:
    ratio = board.faster(BINARY, SNIPPET, "image", 1)
    return [_at_least(BINARY, "224×224 image: requests/s against the snippet in JSON, 1 connection", ratio, 60)]


def claim_of_failures(board: Board) -> Claim:
    ours = [s for s in board.scores if s.heat.name.startswith(OURS)]
    failed, requests = sum(s.failed for s in ours), sum(s.requests for s in ours)
    held = failed == 0 and requests > 0
    return Claim(gate=OURS, what="failed requests", bound="0", figure=f"{failed} of {requests:,}", held=held)


HEAD = ("server", "model", "conn.", "req/s", "× snippet", "CPU µs", "p50 µs", "p99 µs", "ready s", "PSS MB", "failed")


def rows_of(board: Board) -> list[tuple[str, ...]]:
    """The table of all heats, in the columns of HEAD. CPU is the least round; all else of the rounds is the median."""
    rows = []
    for score in board.scores:
        model, connections = score.heat.contestant.model.name, score.heat.connections
        rows.append(
            (
                score.heat.name,
                model,
                str(connections),
                f"{statistics.median(score.rates):,.0f}",
                f"{board.faster(score.heat.name, SNIPPET, model, connections):.2f}",
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
    table("rounds in turn; CPU of all the server's processes, the least round; else medians", HEAD, rows_of(board))
    head = ("", "server", "what", "bound", "figure")
    table("promises", head, [(c.outcome, c.gate, c.what, c.bound, c.figure) for c in claims])


def _at_most(gate: str, what: str, figure: float, bound: float, unit: str) -> Claim:
    return Claim(gate=gate, what=what, bound=f"≤ {unit}{bound:g}", figure=f"{figure:.3g}", held=figure <= bound)


def _at_least(gate: str, what: str, figure: float, bound: float) -> Claim:
    return Claim(gate=gate, what=what, bound=f"≥ × {bound:g}", figure=f"{figure:.3g}", held=figure >= bound)
