"""Results of `inspect` and `judge` for the test models of the onnx package.

`python -m tests.support.backend_models` reads paths from standard input. It writes one JSON line
for each result. It is a separate process because a model may crash it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.errors import OnnxOpsError
from tests.support.processes import ROOT

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 26, 13
"""Newest versions that ONNX Runtime 1.31 accepts.

The onnx package makes its models of single operators at its own newest version.
"""

ON_DISK = ("pytorch-converted", "pytorch-operator", "simple", "light")

LOOKED_AT_ONLY = "light"
"""Whole image classifiers: each weight is filled with a single number.

They are only inspected. Comparing one of them on all groups takes many minutes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one tool for one model: a verdict, a typed error, or neither.

    `kind` is a verdict, the name of an error type, `crashed`, or `untyped` for any other exception.
    Only `crashed` and `untyped` are faults.
    """

    model: str
    tool: str
    kind: str
    text: str

    @property
    def fault(self) -> bool:
        return self.kind in ("crashed", "untyped")


def write_models(folder: Path, operators: Iterable[str] | None = None) -> tuple[Path, ...]:
    """Copy or make all test models as `folder/KIND/NAME/model.onnx`.

    This takes about half a minute.

    Args:
        folder: where the models are written.
        operators: modules of the onnx package whose operators get models; all by default.
    """
    found = [*_stored(folder), *_made(folder, operators)]
    return tuple(sorted(found))


def outcomes(models: Sequence[Path], *, timeout: float = 120.0) -> Iterator[Outcome]:
    """Yield the results of `inspect` and `judge` for each model.

    The tools run in a separate process, which is replaced when a model ends it.

    Args:
        models: files as `write_models` returns them.
        timeout: seconds for one model.
    """
    waiting = list(models)
    while waiting:
        done = 0
        for model, lines, ending in _batch(waiting, timeout):
            outcomes_of_model = [Outcome(**json.loads(line)) for line in lines]
            yield from outcomes_of_model
            if ending:
                tool = "judge" if outcomes_of_model else "inspect"
                yield Outcome(model=_name(model), tool=tool, kind="crashed", text=ending)
            done += 1
        waiting = waiting[done:]


def _batch(models: Sequence[Path], timeout: float) -> Iterator[tuple[Path, list[str], str]]:
    """Yield each model with its output lines, and how the process ended.

    All models run in one process, up to the first model that ends it.
    """
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.support.backend_models"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=environ,
        cwd=ROOT,
    ) as process:
        for model in models:
            process.stdin.write(f"{model}\n".encode())  # type: ignore[union-attr]
            lines, ending = _lines(process, timeout, 1 if _looked_at_only(model) else 2)
            yield model, lines, ending
            if ending:
                return
        process.stdin.close()  # type: ignore[union-attr]


def _lines(process: subprocess.Popen[bytes], timeout: float, wanted: int) -> tuple[list[str], str]:
    """Return the output lines of one model, and how the process ended if it did."""
    stream = process.stdout.fileno()  # type: ignore[union-attr]
    output = b""
    while output.count(b"\n") < wanted:
        if not select.select([stream], [], [], timeout)[0]:
            process.kill()
            return output.decode().splitlines(), f"no answer in {timeout:g} s"
        more = os.read(stream, 1 << 16)
        if not more:
            return output.decode().splitlines(), f"exit {process.wait()}"
        output += more
    return output.decode().splitlines(), ""


def look(model: Path) -> Outcome:
    """Return the result of `inspect` for a model."""
    from onnx_ops.onnx_graph.model_summary import estimate_cost, summarize_model

    def run() -> tuple[str, str]:
        found = summarize_model(model)
        estimate_cost(model)
        return ("invalid", found.problem) if found.problem else ("valid", "")

    return _outcome(model, "inspect", run)


def compare_with_itself(model: Path) -> Outcome:
    """Return the parity verdict of a model compared with itself, on a few random rows."""
    from onnx_ops.adapters.runtimes.placement import GuardedRuntime
    from onnx_ops.config.targets import PROFILES, TargetFiles
    from onnx_ops.tools.compare import compare
    from onnx_ops.tools.generated_rows import generate_samples
    from onnx_ops.tools.model_inputs import shared_inputs

    def run() -> tuple[str, str]:
        samples = generate_samples(shared_inputs(model, model), count=4, dims={})
        found = compare(
            GuardedRuntime(), TargetFiles(PROFILES).load("cpu-1t"), model, model, samples
        )
        return found.verdict.value, found.reason

    return _outcome(model, "judge", run)


def _outcome(model: Path, tool: str, run: Callable[[], tuple[str, str]]) -> Outcome:
    try:
        kind, text = run()
    except OnnxOpsError as error:
        kind, text = type(error).__name__, str(error)
    except Exception as error:
        kind, text = "untyped", f"{type(error).__name__}: {error}"
    return Outcome(
        model=_name(model), tool=tool, kind=kind, text=text.replace(str(model.parent), "…")[:300]
    )


def _looked_at_only(model: Path) -> bool:
    return model.parent.parent.name == LOOKED_AT_ONLY


def _name(model: Path) -> str:
    return "/".join(model.parts[-3:-1])


def _stored(folder: Path) -> Iterator[Path]:
    origin = _package() / "backend" / "test" / "data"
    for kind in ON_DISK:
        for source in sorted((origin / kind).glob("*/model.onnx" if kind != "light" else "*.onnx")):
            name = source.parent.name if kind != "light" else source.stem
            path = folder / kind / name / "model.onnx"
            path.parent.mkdir(parents=True)
            shutil.copyfile(source, path)
            yield path


def _made(folder: Path, operators: Iterable[str] | None) -> Iterator[Path]:
    """Yield models of single operators.

    A model is lowered to the versions that the runtime accepts, unless it has a newer operator.
    """
    from onnx.backend.test.case import node
    from onnx.backend.test.loader import load_node_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if operators is None:
            load_node_model_tests()
        for operator in operators or ():
            # The import registers the operator's models.
            import_module(f"{node.__name__}.{operator}")
    for case in tuple(node._NodeTestCases):
        path = folder / "node" / case.name / "model.onnx"
        path.parent.mkdir(parents=True)
        _lower(case.model)
        path.write_bytes(case.model.SerializeToString())
        yield path


def _lower(model: onnx.ModelProto) -> None:
    from onnx import defs

    for entry in model.opset_import:
        if entry.domain or entry.version <= OPSET:
            continue
        for node in model.graph.node:
            with contextlib.suppress(defs.SchemaError):
                if defs.get_schema(node.op_type, entry.version, node.domain).since_version > OPSET:
                    return
        entry.version = OPSET
    model.ir_version = min(model.ir_version, IR_VERSION)


def _package() -> Path:
    spec = find_spec("onnx")
    if spec is None or spec.origin is None:
        raise RuntimeError("the onnx package has no files")
    return Path(spec.origin).parent


def _main() -> None:
    for line in sys.stdin:
        model = Path(line.rstrip("\n"))
        for tool in (look,) if _looked_at_only(model) else (look, compare_with_itself):
            result = tool(model)
            document = {
                "model": result.model,
                "tool": result.tool,
                "kind": result.kind,
                "text": result.text,
            }
            sys.__stdout__.write(json.dumps(document) + "\n")  # type: ignore[union-attr]
            sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        _main()
