"""Compare the endpoint server with others in one interleaved run.

    python -m benchmarks.serving [--quick] [--only mlp|cnn|image|dense] [--json] [--triton FOLDER]

All servers run on one machine. Contestants: the server of this project with a split and metrics,
with and without user keys; a plain parser loop; the FastAPI and pydantic snippet of the tutorials,
as they write and start it, and tuned; `mlflow models serve`; MLServer; NVIDIA Triton; an ASGI
application and a server in C that run no model; `session.run` alone. Load comes from `wrk` where it
is installed, else from tests.support.load. Exits with 1 if a promise does not hold. MLServer is
installed once into a separate virtual environment below --cache. Triton takes part where --triton
has `bin/tritonserver` and `backends/onnxruntime`. Its ONNX Runtime should have the version that is
installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.serving.claims import (
    ALL,
    ALL_BINARY,
    BINARY,
    HEAD,
    KEYED,
    MLFLOW,
    ONE,
    ONE_BINARY,
    OURS,
    PLAIN,
    PLAIN_BINARY,
    SNIPPET,
    TRITON,
    TRITON_BINARY,
    TUNED,
    Board,
    claim_of_failures,
    claims_of_cnn,
    claims_of_dense,
    claims_of_image,
    claims_of_mlp,
    claims_of_triton,
    rows_of,
    show,
)
from benchmarks.serving.contestants import (
    Call,
    Contestant,
    Floor,
    MlflowServe,
    MlServer,
    Ours,
    Plain,
    Triton,
    TunedUvicorn,
    Uvicorn,
)
from benchmarks.serving.load import generator
from benchmarks.serving.models import CNN, DENSE, IMAGE, MLP, Model, write_all
from benchmarks.serving.rounds import Match, Score, bare_run_us, choose_threads, run_matches
from benchmarks.truth.claims import Claim
from benchmarks.truth.page import fill, markdown, promises

Caller = tuple[str, Contestant, Call]


def main() -> int:
    options = arguments()
    triton = (options.triton or options.cache / "triton").resolve()
    if not Triton.is_in(triton):
        print(
            f"Triton takes no part: {triton} has no bin/tritonserver with backends/onnxruntime.",
            file=sys.stderr,
        )
        triton = None
    rounds, seconds, starts = (3, 1.0, 1) if options.quick else (options.rounds, 3.0, 3)
    scores: list[Score] = []
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="onnx-ops-serving-") as name:
        folder = Path(name)
        write_all(folder)

        def play(matches: list[Match]) -> list[Score]:
            played = run_matches(
                matches, rounds=rounds, seconds=seconds, starts=starts, folder=folder
            )
            scores.extend(played)
            return played

        for model in [options.only] if options.only else ["mlp", "cnn", "image", "dense"]:
            if model == "mlp":
                board = Board(play(list_mlp_matches(folder, options.cache, triton)))
                claims += claims_of_mlp(board, bare_run_us(MLP, folder, rounds))
            elif model == "cnn":
                claims += claims_of_cnn(Board(play(list_cnn_matches(folder, triton))))
            elif model == "image":
                claims += claims_of_image(Board(play(list_image_matches(folder, triton))))
            else:
                claims += claims_of_dense(Board(play(list_dense_matches(folder, triton))))
    board = Board(scores)
    claims += [*claims_of_triton(board), claim_of_failures(board)]
    if options.page:
        text = f"Load by {generator()}, {rounds} rounds of {seconds:g} s, {os.cpu_count()} cores."
        fill(
            options.page,
            "serving",
            f"{text}\n\n{markdown(HEAD, rows_of(board))}\n\n{promises(claims)}",
        )
    if options.json:
        matches = [score.document() for score in scores]
        print(
            json.dumps(
                {
                    "load": generator(),
                    "matches": matches,
                    "claims": [asdict(claim) for claim in claims],
                }
            )
        )
    else:
        print(f"load by {generator()}, {rounds} rounds of {seconds:g} s")
        show(board, claims)
    return 0 if all(claim.is_met for claim in claims) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="three rounds of a second: shows gross breaks"
    )
    parser.add_argument("--only", choices=("mlp", "cnn", "image", "dense"), help="one model")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contestant (7)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--page", type=Path, help="page to write the figures into")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnx-ops-benchmarks"
    parser.add_argument(
        "--cache", type=Path, default=cache, help=f"environments of the others ({cache})"
    )
    parser.add_argument(
        "--triton", type=Path, help="folder of an installed Triton (triton below --cache)"
    )
    return parser.parse_args()


def list_mlp_matches(folder: Path, cache: Path, triton: Path | None) -> list[Match]:
    ours = Ours(OURS, MLP, folder)
    plain = Plain(PLAIN, MLP, folder)
    callers = list_callers(ours, folder, triton)
    callers += [(PLAIN, plain, plain.call()), (PLAIN_BINARY, plain, plain.binary())]
    others: list[Contestant] = [
        tuned_snippet(MLP, folder),
        MlflowServe(MLFLOW, MLP, folder),
        MlServer(MLP, folder, cache),
        TunedUvicorn("raw ASGI, no model", "hello", "/", MLP, folder),
        *floor(MLP, folder, ours.call()),
    ]
    everyone = [
        *callers,
        (KEYED, ours, ours.keyed()),
        *((other.name, other, other.call()) for other in others),
    ]
    alone = [*list_matches(everyone, (1,)), *list_matches(everyone, (1,), together=True)]
    return [*alone, *list_matches(everyone, (16,)), *list_matches(callers, (64,))]


def list_cnn_matches(folder: Path, triton: Path | None) -> list[Match]:
    callers, tuned = (
        list_callers(Ours(OURS, CNN, folder), folder, triton),
        tuned_snippet(CNN, folder),
    )
    return list_matches([*callers, (TUNED, tuned, tuned.call())], (8,)) + list_matches(
        callers, (16, 64)
    )


def list_image_matches(folder: Path, triton: Path | None) -> list[Match]:
    ours = Ours(OURS, IMAGE, folder)
    callers = [caller for caller in list_callers(ours, folder, triton) if caller[0] != TRITON]
    others = [tuned_snippet(IMAGE, folder), *floor(IMAGE, folder, ours.binary())]
    return list_matches([*callers, *((other.name, other, other.call()) for other in others)], (1,))


def list_dense_matches(folder: Path, triton: Path | None) -> list[Match]:
    """Return matches of this server with the chosen threads, one thread and all.

    The chosen threads are those that a release would select by measurements.
    """
    model = replace(DENSE, threads=choose_threads(DENSE, folder))
    callers = list_callers(Ours(OURS, model, folder), folder, triton)
    for name, binary, threads in ((ONE, ONE_BINARY, 1), (ALL, ALL_BINARY, 0)):
        ours = Ours(name, replace(model, threads=threads), folder)
        callers += [(name, ours, ours.call()), (binary, ours, ours.binary())]
    return list_matches(callers, (16, 64))


def list_callers(ours: Ours, folder: Path, triton: Path | None) -> list[Caller]:
    """Return this server, the snippet and Triton, with the requests of each."""
    snippet = fastapi_snippet(ours.model, folder)
    callers: list[Caller] = [
        (OURS, ours, ours.call()),
        (BINARY, ours, ours.binary()),
        (SNIPPET, snippet, snippet.call()),
    ]
    if triton is not None:
        peer = Triton(TRITON, ours.model, folder, triton)
        callers += [(TRITON, peer, peer.call()), (TRITON_BINARY, peer, peer.binary())]
    return callers


def list_matches(
    callers: list[Caller], connections: tuple[int, ...], *, together: bool = False
) -> list[Match]:
    return [
        Match(name=name, contestant=contestant, call=call, connections=count, together=together)
        for count in connections
        for name, contestant, call in callers
    ]


def floor(model: Model, folder: Path, call: Call) -> list[Contestant]:
    """Return the server in C; nothing where there is no C compiler."""
    return [Floor(model, folder, call)] if Floor.can_be_built() else []


def fastapi_snippet(model: Model, folder: Path) -> Uvicorn:
    return Uvicorn(SNIPPET, "snippet", "/predict", model, folder)


def tuned_snippet(model: Model, folder: Path) -> Uvicorn:
    return TunedUvicorn(TUNED, "snippet", "/tuned", model, folder)


if __name__ == "__main__":
    sys.exit(main())
