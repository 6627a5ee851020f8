"""Files of others through the single-file tools: what is done, what is refused, and whether a verdict is wrong.

Every file is inspected, held against itself, held against a copy with one wrong weight (where it has weights that its
answers depend on), quantized, and timed. Each command runs as a user types it, in this process. A traceback, a verdict
against the known truth, and a refusal without a remedy are faults, and then this script ends with 1.

    python -m benchmarks.foreign_files > docs/foreign-files.md
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from benchmarks import foreign_makers as makers
from onnx_ops.cli.main import app
from onnx_ops.errors import OnnxOpsError
from onnx_ops.graph.files import read_model
from onnx_ops.graph.inspect import info

HEAD = """# Files of others

Written by `benchmarks/foreign_files.py`. Each file goes through `inspect`, `judge` against itself, `judge` of a copy
that has a wrong weight, `quantize` (dynamic and graph), and `bench`. *done* counts the commands that ended in a
verdict or a result, *refused* those that ended with a message and exit code 2, 4 or 5.
"""

_LARGEST = 1 << 30
QUICK = 4
"""Every which file the quick form takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one command made of one file. `fault` says what is wrong with that; empty if nothing is."""

    kind: str
    file: str
    command: str
    code: int
    message: str
    fault: str


def outcomes(folder: Path, *, step: int = 1, only: str = "") -> Iterator[Outcome]:
    """All commands on every `step`-th file of the kinds that begin with `only`."""
    for file in makers.files(folder, step=step, only=only):
        yield from _tried(file)
        shutil.rmtree(file.path.parent, ignore_errors=True)


def _tried(file: makers.ForeignFile) -> Iterator[Outcome]:
    def outcome(command: str, *arguments: object, good: Sequence[int] = (0,)) -> Outcome:
        code, text = run(command, *arguments, "--json")
        message, remedy, fault = _read(text, code)
        if file.broken and code in (0, 1):
            fault = fault or "a broken file was taken"
        elif code in (0, 1) and code not in good:
            fault = fault or f"exit code {code}"
        elif code in (2, 4, 5) and not remedy and not fault:
            fault = "no remedy"
        return Outcome(kind=file.kind, file=file.name, command=command, code=code, message=message, fault=fault)

    yield outcome("inspect", file.path)
    yield outcome("judge", file.path, file.path, "--only", "parity", "--rows", 16)
    if not file.broken and (wrong := wrong_copy(file.path)) is not None:
        yield outcome("judge", file.path, wrong, "--only", "parity", "--rows", 64, good=(1,))
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
    return (
        f"{document.get('what', '')} {document.get('why', '')}".strip(),
        str(document.get("remedy") or document.get("problem") or ""),
        "",
    )


def wrong_copy(path: Path) -> Path | None:
    """A copy whose largest float weight is another one in every fourth place; None where there is no such weight."""
    try:
        if info(path).size_bytes > _LARGEST:
            return None
        model = read_model(path)
    except OnnxOpsError:
        return None
    found = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    found = [tensor for tensor in found if len(tensor.dims) > 1 and onnx.numpy_helper.to_array(tensor).any()]
    if not found:
        return None
    tensor = max(found, key=lambda one: onnx.numpy_helper.to_array(one).size)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[::4] *= -1.3
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    wrong = path.parent / f"wrong-{path.name}"
    onnx.save_model(model, wrong)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"one file in {QUICK}")
    parser.add_argument("--only", default="", help="kinds that begin so")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found: list[Outcome] = []
        for one in outcomes(Path(folder), step=QUICK if arguments.quick else 1, only=arguments.only):
            found.append(one)
            if one.fault:
                print(f"{one.kind}/{one.file} {one.command}: {one.fault}: {one.code} {one.message}", file=sys.stderr)
    print(HEAD)
    _table(found)
    print(f"({time.perf_counter() - began:.0f} s)", file=sys.stderr)
    return int(any(one.fault for one in found))


def _table(found: Sequence[Outcome]) -> None:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one)
    files = len({(one.kind, one.file) for one in found})
    faults = Counter(one.fault for one in found if one.fault)
    print(f"{files} files of {len(by_kind)} kinds, {len(found)} commands: {sum(faults.values())} faults.\n")
    print("| kind | files | done | refused | faults | refused, for example |\n|---|---|---|---|---|---|")
    for kind, ones in sorted(by_kind.items()):
        refused = [one for one in ones if one.code in (2, 4, 5)]
        example = f"`{refused[0].command}`: {_cell(refused[0].message)}" if refused else ""
        done = sum(one.code in (0, 1, 3) for one in ones)
        wrong = sum(bool(one.fault) for one in ones)
        print(f"| {kind} | {len({o.file for o in ones})} | {done} | {len(refused)} | {wrong} | {example} |")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:120]


if __name__ == "__main__":
    sys.exit(main())
