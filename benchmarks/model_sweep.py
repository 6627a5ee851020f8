"""What `inspect` and `judge` make of every test model of the onnx package, as a page.

Each model is looked over and held against itself, in a process that may die of it. A process that died (`crashed`)
or an exception without a type of its own (`untyped`) is a fault, and then this script ends with 1.

    python -m benchmarks.model_sweep > docs/models-table.md
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.support.backend_models import IR_VERSION, OPSET, Outcome, outcomes, write_models

HEAD = f"""# The test models of the onnx package

Results of `inspect` and `judge` on the test models of the onnx package. `benchmarks/model_sweep.py` writes this page;
the last run used onnx {version("onnx")} and onnxruntime {version("onnxruntime")}.

- Models of single operators are lowered to opset {OPSET} and IR version {IR_VERSION} if no operator is newer.
  All others are unchanged.
- `inspect` reads each model, cost included. `judge` compares it with itself, on four synthetic rows and variations of
  them. It skips the whole image classifiers (`light`), which take many minutes each.
- Rows are synthetic and do not respect the operator: an axis can be out of range, a shape can be wrong. The runtime
  then refuses, and the error repeats its message.
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        found = tuple(outcomes(models))
    print(HEAD)
    print(f"{len(models)} models, {sum(one.fault for one in found)} faults.\n")
    totals(found)
    reasons(found)
    return int(any(one.fault for one in found))


def totals(found: Sequence[Outcome]) -> None:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in found:
        counts[one.tool, one.model.partition("/")[0]][one.kind] += 1
    print("| tool | models | outcomes |\n|---|---|---|")
    for (tool, kind), outcome in sorted(counts.items()):
        print(f"| {tool} | {kind} | {', '.join(f'{name} {n}' for name, n in outcome.most_common())} |")


def reasons(found: Sequence[Outcome]) -> None:
    """Everything but `valid` and `pass`, alike ones together."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in found:
        if one.kind not in ("valid", "pass"):
            groups[one.tool, one.kind, _alike(one.text)].append(one.model)
    print("\n| tool | outcome | number | for example | message |\n|---|---|---|---|---|")
    for (tool, kind, text), models in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"| {tool} | {kind} | {len(models)} | {models[0]} | {text} |")


def _alike(text: str) -> str:
    """The message without what differs from model to model."""
    text = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : ", "ONNX Runtime: ", text)
    text = re.sub(r"(Load model from) \S+", r"\1 …", text)
    text = re.sub(r"(input|output|inputs|Name:|input:|Node, \() ?['\"(][^'\")]*['\")]", r"\1 …", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text)
    return text.replace("|", "\\|").replace("\n", " ")[:110]


if __name__ == "__main__":
    sys.exit(main())
