"""Files of other quantizers through `judge` with labels: sound ones pass, planted faults fail, none stays undecided.

Eight networks are trained on the digits of scikit-learn. Each quantizer that is installed here writes its files of
them, and those that keep the task metric are sound. Planted faults are in scales, zero points, blocks and ranges; one
counts if it moves the answers by more than 1 % of their spread.

    python -m benchmarks.foreign_quantizers [--seed N] [--networks mlp,cnn] [--only ort] [--output PAGE]

Quantizers beside ONNX Runtime's are optional: Olive, neural-compressor, NNCF, ModelOpt, onnxsim. The table names those
that are missing. Run it with the interpreter of an environment that has them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import logging
import multiprocessing
import os
import secrets
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.quantizer_faults import faults
from benchmarks.quantizer_makers import QUANTIZERS
from benchmarks.quantizer_networks import Network, networks
from onnx_ops.cli.main import app

MAX_DROP = 0.03
"""Points of accuracy that a candidate may lose. A sound file is one that loses less than a third of it here."""

SPREAD = 0.01
"""Share of the spread of the answers by which a fault that counts moves them."""


_VERDICTS = {0: "PASS", 1: "FAIL", 2: "refused", 3: "INCONCLUSIVE", 4: "ERROR", 5: "refused"}


def judge(network: Network, candidate: Path, rows: Path) -> tuple[str, str]:
    """Return the verdict and the first lines of the output of `onnx-ops judge`."""
    out = io.StringIO()
    command = [
        "judge", str(network.path), str(candidate), "--data", str(rows), "--labels", "y", "--only", "parity",
        "--max-drop", f"{100 * MAX_DROP:g}%", "--quiet",
    ]  # fmt: skip
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            app(command, standalone_mode=True)
        except SystemExit as end:
            return _VERDICTS[int(end.code or 0)], out.getvalue()
    return "PASS", out.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on one file. `fault` names the planted one, or is empty for a file as its quantizer wrote it.

    `verdict` is `missing` where there is no file, with the reason in `why`, and `lossy` where it lost more than a third
    of the allowed loss. `moved` is the change of the answers by the fault, as a share of their spread.
    """

    seed: int
    network: str
    quantizer: str
    verdict: str
    fault: str = ""
    moved: float = 0.0
    why: str = ""


def outcomes(
    folder: Path,
    seed: int,
    networks_: Collection[str] = (),
    only: Sequence[str] = ("",),
    finished: Collection[tuple[int, str, str]] = (),
    most_faults: int = 6,
) -> Iterator[Outcome]:
    """Judge the files of the quantizers whose names begin with one of `only`, and their copies with planted faults.

    `finished` are pairs of network and quantizer, with the seed, that are left out. `most_faults` of the planted faults
    are drawn for each file.
    """
    for network in networks(folder, seed, networks_):
        rows = network.path.with_name("rows.npz")
        np.savez(rows, image=network.scored, y=network.labels)
        right = (network.answers(network.path).argmax(1) == network.labels).mean()
        for name in QUANTIZERS:
            if not name.startswith(tuple(only)) or (seed, network.name, name) in finished:
                continue
            outcome = functools.partial(Outcome, seed=seed, network=network.name, quantizer=name)
            path = network.path.parent / name.replace(" ", "-").replace(",", "") / "model.onnx"
            path.parent.mkdir()
            if problem := _attempt(name, network, path):
                yield outcome(verdict="missing", why=problem)
                continue
            given = network.answers(path)
            if right - (given.argmax(1) == network.labels).mean() > MAX_DROP / 3:
                yield outcome(verdict="lossy")
                continue
            verdict, text = judge(network, path, rows)
            yield outcome(verdict=verdict, why=text)
            copies = dict(faults(path))
            draw = np.random.default_rng([seed, *f"{network.name} {name}".encode()])
            for fault in draw.permutation(sorted(copies))[:most_faults]:
                copy = copies[fault]
                moved = 0.0
                with contextlib.suppress(Exception):  # the runtime refuses the copy, so no server can load it
                    moved = float(np.abs(network.answers(copy) - given).max() / given.std())
                if moved > SPREAD:
                    verdict, text = judge(network, copy, rows)
                    yield outcome(verdict=verdict, fault=str(fault), moved=moved, why=text)


def main() -> int:
    """Run the table; 1 if a promise is not kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 20))
    parser.add_argument("--networks", default="", help="Names, with commas; default: all eight.")
    parser.add_argument("--only", default="", help="Beginnings of the names of quantizers, with commas.")
    parser.add_argument("--faults", type=int, default=6, help="Planted faults of each file; fewer are drawn.")
    parser.add_argument("--log", type=Path, help="File to which outcomes are added; the tables are of all in it.")
    parser.add_argument("--output", type=Path, help="Page to write.")
    parser.add_argument("--verbose", action="store_true", help="Show the output of each wrong verdict.")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"seed {options.seed}", flush=True)
    known = []
    if options.log is not None and options.log.exists():
        known = [Outcome(**json.loads(line)) for line in options.log.read_text().splitlines()]
    names = tuple(filter(None, options.networks.split(",")))
    finished = {(one.seed, one.network, one.quantizer) for one in known}
    with tempfile.TemporaryDirectory() as scratch:
        for outcome in (
            ()
            if names == ("none",)
            else outcomes(Path(scratch), options.seed, names, options.only.split(","), finished, options.faults)
        ):
            known.append(outcome)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.verdict in _VERDICTS.values() and outcome.verdict != ("FAIL" if outcome.fault else "PASS"):
                title = f"{outcome.network}, {outcome.quantizer}, {outcome.fault or 'sound'}: {outcome.verdict}"
                print(
                    f"! {title}, moved {outcome.moved:.2g}" + (f"\n{outcome.why}" if options.verbose else ""),
                    flush=True,
                )
    page = "\n".join(list_page(known))
    print(page)
    if options.output is not None:
        options.output.write_text(f"{HEAD}\n{page}\n", encoding="utf-8")
    return int(compute_share(known, planted=False) < SOUND or compute_share(known, planted=True) < CAUGHT)


SOUND, CAUGHT = 0.98, 0.97
"""Shares of sound files that must pass, and of planted faults that must fail."""

HEAD = """# Files from other quantizers

Verdicts of [`judge`](judge.md) on quantized files that other tools wrote, against the float32 model, with labels.
`python -m benchmarks.foreign_quantizers --output docs/quantizer-files.md` writes this page. The tools beside ONNX
Runtime are optional.

- **Models.** Eight small networks (5,000 to 90,000 weights), trained on 900 images of the digits of scikit-learn:
  perceptrons with ReLU and GELU, convolutions with and without batch normalization, a depthwise one with a skip
  connection, a transformer encoder, an LSTM, a mixer. They are exported by `torch.onnx.export` at opset 18.
- **Rows.** 897 other images, four times with noise, and their labels. `--max-drop 3%`.
- **Sound files.** What the quantizer writes, if accuracy drops by at most 1 point. PASS is right.
- **Planted faults.** In the largest quantized weight: exchanged or shifted scales, a moved zero point, shifted levels,
  a range that is cut in half; and a rolled float bias. A fault counts if an answer moves by more than 1 % of the spread
  of the answers. FAIL is right.
- Eight bits are rounded by channel or tensor, four bits in blocks of 16 and 32. Larger models, other tasks and blocks
  of other sizes are not in these figures.
"""


def compute_share(known: Sequence[Outcome], *, planted: bool) -> float:
    """Return the share of right verdicts on sound files, or on planted faults."""
    judged = [o for o in known if bool(o.fault) is planted and o.verdict in _VERDICTS.values()]
    return sum(o.verdict == ("FAIL" if planted else "PASS") for o in judged) / max(1, len(judged))


def list_page(known: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the tables."""
    yield f"Seeds: {', '.join(map(str, sorted({o.seed for o in known})))}."
    for planted in (False, True):
        yield from _list_verdicts(known, planted=planted)
    lossy = sum(o.verdict == "lossy" for o in known)
    yield f"\n{lossy} files lost more than 1 point and are left out."
    yield from _list_missing(known)


def _list_verdicts(known: Sequence[Outcome], *, planted: bool) -> Iterator[str]:
    """Yield the table of verdicts on sound files by quantizer, or on planted faults by their kind."""
    title, what, right = (
        ("planted fault", "planted faults", "FAIL") if planted else ("quantizer", "sound files", "PASS")
    )
    verdicts: dict[str, list[str]] = defaultdict(list)
    for outcome in known:
        if bool(outcome.fault) is planted and outcome.verdict in _VERDICTS.values():
            verdicts[outcome.fault if planted else outcome.quantizer].append(outcome.verdict)
    judged = [verdict for group in verdicts.values() for verdict in group]
    share = 100 * compute_share(known, planted=planted)
    yield f"\n{len(judged)} {what}, {share:.1f} % {right}.\n"
    kinds = sorted({*judged, right}, key=lambda verdict: (verdict != right, verdict))
    yield f"| {title} | judged | {' | '.join(kinds)} |\n|---|{'---|' * (len(kinds) + 1)}"
    for name, group in verdicts.items():
        yield f"| {name} | {len(group)} | {' | '.join(str(group.count(kind)) for kind in kinds)} |"


def _list_missing(known: Sequence[Outcome]) -> Iterator[str]:
    """Yield the quantizers without a file, each with its most frequent reason."""
    missing: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in known:
        if outcome.verdict == "missing":
            missing[outcome.quantizer][outcome.why] += 1
    if missing:
        yield "\nFiles that could not be had:\n"
    for name, reasons in missing.items():
        yield f"- {name}, {reasons.total()} times: {reasons.most_common(1)[0][0]}"


def _attempt(name: str, network: Network, path: Path) -> str:
    """Write a file; return why that failed.

    Each quantizer runs in a separate process: some replace functions of ONNX Runtime for all later ones, and the
    runtime ends by a segmentation fault on some files.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_write, name, network, path).result()
        except BrokenProcessPool:
            return "its process, or ONNX Runtime that loaded the file, ended by a signal"


def _write(name: str, network: Network, path: Path) -> str:
    """Write a file with the quantizer of that name and load it; return why that failed."""
    silent = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            warnings.simplefilter("ignore")
            QUANTIZERS[name](network, path)
            if np.array_equal(network.answers(path), network.answers(network.path)):
                return "it rounded nothing: the answers are those of the original"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return "" if path.exists() else "it wrote no file"


if __name__ == "__main__":
    sys.exit(main())
