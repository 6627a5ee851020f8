"""Send mutated texts to a real endpoint of the example `ticket_texts`.

    python -m benchmarks.fuzz_texts [--texts 2000] [--seed 1]

Every answer must be 400 or 413 with its cause, or 200 with the estimator's own answer to the text.
Prints the number of answers by kind and status, the longest time without an answer of the health
page, the peak of memory, and the number of workers that ended. Exits with 1 above `LONGEST_S` or
`LARGEST_BYTES`. An error prints the seed and the number of the text, which repeat it.

The letter İ is left out: its lower case has two characters in Python, and one in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import unicodedata
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from examples.ticket_texts import OPENINGS, load_model, make_ticket
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.ports.export import ExportRequest
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Server, deploy
from tests.support.processes import peak_memory
from tests.support.server import Answer

LONGEST_S = 10.0
LARGEST_BYTES = 2_000_000_000
"""Largest peak of memory of all processes of the server together."""
_TOLERANCE = 1e-4
_LETTERS = "aZ0_ \t\r\n.,-'ßıǅﬁ٣²é\u0301\u200d\u2028\ufeff\U0001f600\U0010ffff\x00\x7f"

Change = Callable[[random.Random, str], Any]


def repeat_words(draw: random.Random, text: str) -> str:
    """Return a text of up to 300 kB; one in ten has 10 MB."""
    size = 10_000_000 if draw.random() < 0.1 else draw.randrange(1, 300_000)
    return (f"{text} " * (size // (len(text) + 1) + 1))[:size]


def insert_letters(draw: random.Random, text: str) -> str:
    """Return a text with characters that tokenizers treat differently."""
    letters = list(text)
    for _ in range(draw.randrange(1, 20)):
        letters.insert(draw.randrange(len(letters) + 1), draw.choice(_LETTERS))
    return "".join(letters)


CHANGES: Mapping[str, Change] = {
    "plain": lambda _, text: text,
    "empty": lambda draw, _: draw.choice(["", " ", "\n", "\t \r\n"]),
    "repeated": repeat_words,
    "long word": lambda draw, text: text + draw.choice("xé😀") * draw.randrange(1, 500_000),
    "letters": insert_letters,
    "zero bytes": lambda draw, text: text.replace(" ", "\x00", draw.randrange(1, 5)),
    "emoji": lambda draw, text: text + " 👩\u200d💻🏽🇸🇪" * draw.randrange(1, 50),
    "combining": lambda _, text: unicodedata.normalize("NFD", text),
    "marks": lambda draw, text: text + "\u0301" * draw.randrange(1, 3000),
    "upper case": lambda _, text: text.upper(),
    "number": lambda draw, _: draw.choice([0, -1, 1.5, 1e308, 2**63, 2**70]),
    "literal": lambda draw, _: draw.choice([None, True, False]),
    "nested": lambda draw, text: draw.choice([[[text]], [[[[text]]]], {"text": text}, []]),
    "surrogate": lambda _, text: text + "\ud800",
    "invalid UTF-8": lambda draw, text: (
        text.encode() + draw.choice([b"\xff", b"\xc3(", b"\xed\xa0"])
    ),
    "padded": lambda draw, text: [text * draw.choice([1, 2000]), *["x"] * draw.randrange(1, 4000)],
}


def build_body(draw: random.Random, value: Any) -> tuple[str, bytes]:
    """Return the path and the body of a request with a value, or with a list of texts."""
    if isinstance(value, bytes):
        start, _, end = b'{"instances": ["?"]}'.partition(b"?")
        return "/invocations", start + value + end
    rows = value if isinstance(value, list) and value and isinstance(value[0], str) else [value]
    if draw.random() < 0.5:
        document: object = {"dataframe_records": [{"text": row} for row in rows]}
        path = "/invocations"
    else:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(rows), 1], "data": rows}
        document, path = {"inputs": [tensor]}, INFER
    return path, json.dumps(
        document, ensure_ascii=draw.random() < 0.5 or "\ud800" in str(value)[-9:]
    ).encode()


def check(answer: Answer, value: Any, model: Pipeline) -> None:
    """Raise AssertionError unless the answer is right, or an error with its cause."""
    if answer.status in (400, 413):
        assert answer.json()["error"], "an error without its cause"
        return
    assert answer.status == 200, answer.body[:300]
    texts = [value] if isinstance(value, str) else value
    assert all(isinstance(text, str) for text in texts), "a wrong type was answered"
    document = answer.json()
    if "predictions" in document:
        found = [row["probabilities"] for row in document["predictions"]]
    else:
        found = np.reshape(document["outputs"][1]["data"], (len(texts), -1)).tolist()
    expected = model.predict_proba(texts)
    assert np.abs(np.array(found) - expected).max() < _TOLERANCE, "another answer than the source"


def watch_health(url: str, is_ended: Event, longest_s: Any) -> None:
    """Request the health page repeatedly; record the longest time without an answer.

    It runs in its own process, because the estimator blocks the interpreter for seconds.
    """
    answered = time.monotonic()
    while not is_ended.wait(0.1):
        try:
            with urllib.request.urlopen(url, timeout=60) as page:
                is_ready = page.status == 200
        except OSError:
            is_ready = False
        now = time.monotonic()
        longest_s.value = max(longest_s.value, now - answered)
        answered = now if is_ready else answered


@contextmanager
def watching(url: str) -> Iterator[Any]:
    """Yield the longest time without an answer of a page, as a shared value."""
    context = multiprocessing.get_context("spawn")
    is_ended, longest_s = context.Event(), context.Value("d", 0.0)
    process = context.Process(target=watch_health, args=(url, is_ended, longest_s))
    process.start()
    try:
        yield longest_s
    finally:
        is_ended.set()
        process.join()


def export_example(folder: Path) -> Pipeline:
    """Write the export of the example's estimator into a folder; return the estimator."""
    model = load_model()
    samples = {"text": np.array([["the app crashes"], [OPENINGS[0]]])}
    section = Export(framework="sklearn")
    folder.mkdir()
    SklearnExporter().export(
        model, ExportRequest(section=section, samples=samples, path=folder / "model.onnx")
    )
    return model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    counts: Counter[tuple[str, int]] = Counter()
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, Server(folder=Path(name) / "state") as server:
        model = export_example(Path(name) / "model")
        state = state_of(deploy(Path(name) / "model"), blue=100)
        assert server.publish(state, 1).status == 200
        before, kinds = set(server.workers()), sorted(CHANGES)
        with watching(server.url("/v2/health/ready")) as longest_s:
            for number in range(given.texts):
                draw = random.Random(f"{given.seed}/{number}")  # noqa: S311 (to be repeatable)
                kind = draw.choice(kinds)
                value = CHANGES[kind](draw, make_ticket(draw)[0])
                started = time.monotonic()
                try:
                    path, body = build_body(draw, value)
                    headers = {"content-type": "application/json"}
                    answer = server.call("POST", path, body, headers)
                    seconds = time.monotonic() - started
                    check(answer, value, model)
                except Exception:
                    print(f"seed {given.seed}, text {number}: {kind}")
                    raise
                counts[kind, answer.status] += 1
                slowest[kind] = max(slowest.get(kind, 0.0), seconds)
        ended, peak = before - set(server.workers()), peak_memory(server.processes())
    for (kind, status), count in sorted(counts.items()):
        print(f"{kind:14} {status} {count:5}   slowest {slowest[kind]:.1f} s")
    print(
        f"{counts.total()} answers; {len(ended)} workers ended; the longest time without an answer "
        f"{longest_s.value:.1f} s; peak of memory {peak / 1e6:.0f} MB"
    )
    return 0 if longest_s.value < LONGEST_S and peak < LARGEST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
