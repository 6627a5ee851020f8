"""Files of others through the single-file tools: what is done, what is refused, and whether a verdict is wrong.

Every file is inspected, held against itself, held against wrong copies (those whose answers differ on rows that the
judge does not see), quantized, and timed. Each command runs as a user types it, in this process. A traceback, a verdict
against the known truth, and a refusal without a remedy are faults, and then this script ends with 1.

    python -m benchmarks.foreign_files --output docs/foreign-files.md

With `--work FOLDER`, finished files are kept there, and a run that was interrupted begins where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import foreign_makers as makers
from benchmarks.foreign_copies import wrong_copies
from onnx_ops.cli.main import app

HEAD = """# Files from other exporters

Results of single-file commands on ONNX files that other tools wrote.
`python -m benchmarks.foreign_files --output docs/foreign-files.md` writes this page.
[Files from other quantizers](quantizer-files.md) has quantized files against their float originals.

- Each file goes through `inspect`, [`judge`](judge.md) against itself, `judge` of wrong copies, `quantize` (dynamic and
  graph), and `bench`. Input rows are synthetic, made from the graph.
- A wrong copy counts if its answers differ by more than 1 % on other rows.
- *done*: commands that returned a verdict or a result. *refused*: commands that ended with a message and exit code 2, 4
  or 5. *not decided*: verdicts INCONCLUSIVE.
- *faults*: tracebacks, a PASS of a wrong copy, a FAIL of a file against itself, a broken file that was accepted, and a
  refusal without a remedy.
"""

QUICK = 4
"""Every which file the quick form takes."""

_FAILED, _OPEN = 1, 3
_REFUSED = (2, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one command made of one file. `copy` names the wrong copy that was judged, `fault` what is wrong."""

    kind: str
    file: str
    command: str
    copy: str = ""
    code: int
    message: str
    fault: str


def outcomes(
    folder: Path, *, step: int = 1, only: str = "", finished: Collection[tuple[str, str]] = ()
) -> Iterator[Outcome]:
    """All commands on every `step`-th file of the kinds that begin with `only`, but for the finished files."""
    for file in makers.files(folder, step=step, only=only):
        if (file.kind, file.name) not in finished:
            yield from _tried(file)
        shutil.rmtree(file.path.parent, ignore_errors=True)


def _tried(file: makers.ForeignFile) -> Iterator[Outcome]:
    def outcome(command: str, *arguments: object, copy: str = "") -> Outcome:
        code, text = run(command, *arguments, "--json")
        message, remedy, fault = _read(text, code)
        if file.broken and code in (0, _FAILED):
            fault = fault or "a broken file was taken"
        elif code in (0, _FAILED) and code != (_FAILED if copy else 0):
            fault = fault or f"exit code {code}"
        elif code in _REFUSED and not remedy:
            fault = fault or "no remedy"
        return Outcome(
            kind=file.kind, file=file.name, command=command, copy=copy, code=code, message=message, fault=fault
        )

    yield outcome("inspect", file.path)
    yield outcome("judge", file.path, file.path, "--only", "parity", "--rows", 16)
    for copy, path in () if file.broken else wrong_copies(file.path):
        yield outcome("judge", file.path, path, "--only", "parity", "--rows", 64, copy=copy)
    for method in ("dynamic", "graph"):
        yield outcome("quantize", file.path, file.path.parent / f"{method}.onnx", "--method", method)
    yield outcome("bench", file.path, "--runs", 20)


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and standard output of a command; 70 and the error's type where it has no type of its own."""
    out: Any = io.StringIO()
    plain: Any = sys.__stdout__
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.__stdout__ = out  # type: ignore[misc]
        try:
            app([str(argument) for argument in arguments], standalone_mode=True)
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
        except Exception as error:
            return 70, f"{type(error).__name__}: {error}"
        finally:
            sys.__stdout__ = plain  # type: ignore[misc]
    return 0, out.getvalue()


def _read(text: str, code: int) -> tuple[str, str, str]:
    """Message, remedy and fault of what a command printed; what a checker says is the remedy too."""
    if code == 70:
        return text, "", "traceback"
    try:
        document = json.loads(text)
    except ValueError:
        return text[:300], "", "no JSON"
    message = f"{document.get('what', '')} {document.get('why', '')}".strip() or str(document.get("reason", ""))
    of_targets = " ".join(one["remedy"] for one in document.get("targets", []) if code == 4)
    return message, str(document.get("remedy") or document.get("problem") or of_targets), ""


def read_finished(log: Path) -> tuple[list[Outcome], set[tuple[str, str]]]:
    """Return the outcomes of files that an earlier run finished, and these files: `bench` is their last command."""
    outcomes = [Outcome(**json.loads(line)) for line in log.read_text().splitlines()] if log.is_file() else []
    finished = {(one.kind, one.file) for one in outcomes if one.command == "bench"}
    return [one for one in outcomes if (one.kind, one.file) in finished], finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one file in {QUICK}")
    parser.add_argument("--only", default="", help="kinds that begin so")
    parser.add_argument("--work", type=Path, help="a folder that keeps the results of finished files")
    parser.add_argument("--output", type=Path, help="the page; default: standard output")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        log = work / "foreign-files.jsonl"
        found, finished = read_finished(log)
        log.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in found))
        step = QUICK if arguments.quick else 1
        with log.open("a") as file:
            for one in outcomes(Path(folder) / "files", step=step, only=arguments.only, finished=finished):
                found.append(one)
                print(json.dumps(asdict(one)), file=file, flush=True)
    for one in found:
        if one.fault:
            place = " ".join(part for part in (f"{one.kind}/{one.file}", one.command, one.copy) if part)
            print(f"{place}: {one.fault}: {one.code} {one.message}", file=sys.stderr)
    page = "\n".join((HEAD, *_table(found), "", *_copies(found), ""))
    if arguments.output:
        arguments.output.write_text(page)
    else:
        print(page, end="")
    print(f"({time.perf_counter() - began:.0f} s)", file=sys.stderr)
    return int(any(one.fault for one in found))


def _table(found: Sequence[Outcome]) -> Iterator[str]:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one)
    files = len({(one.kind, one.file) for one in found})
    yield (
        f"{files} files of {len(by_kind)} kinds, {len(found)} commands: {sum(bool(one.fault) for one in found)} faults."
    )
    yield "\n| kind | files | done | not decided | refused | faults | refused, for example |"
    yield "|---|---|---|---|---|---|---|"
    for kind, ones in sorted(by_kind.items()):
        refused = [one for one in ones if one.code in _REFUSED]
        example = f"`{refused[0].command}`: {_cell(refused[0].message)}" if refused else ""
        counts = Counter(one.code for one in ones)
        done, wrong = counts[0] + counts[_FAILED], sum(bool(one.fault) for one in ones)
        names = len({one.file for one in ones})
        yield f"| {kind} | {names} | {done} | {counts[_OPEN]} | {len(refused)} | {wrong} | {example} |"


def _copies(found: Sequence[Outcome]) -> Iterator[str]:
    by_copy: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        if one.copy:
            by_copy[one.copy].append(one)
    total = Counter(one.code for one in found if one.copy)
    yield f"{total.total()} wrong copies: {total[_FAILED]} FAIL, {total[0]} PASS, {total[_OPEN]} INCONCLUSIVE."
    yield "\n| wrong copy | judged | FAIL | PASS | INCONCLUSIVE | refused |\n|---|---|---|---|---|---|"
    for copy, ones in sorted(by_copy.items()):
        counts = Counter(one.code for one in ones)
        refused = sum(counts[code] for code in _REFUSED)
        yield f"| {copy} | {len(ones)} | {counts[_FAILED]} | {counts[0]} | {counts[_OPEN]} | {refused} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:120]


if __name__ == "__main__":
    sys.exit(main())
