"""Count found faults of whole systems, and correct systems that are refused.

    python -m benchmarks.system_truth [--seeds N] [--seed N] [--inputs N] [--worlds A,B]

Each seed makes fresh pictures, objects, texts and sounds, and models of them. The worlds `shapes`
and `tickets` are the examples `drawn_shapes` and `ticket_texts`. Every fault changes one step
before or after the model, or the tokenizer in the model. A correct system has another
implementation of one to three steps: another decoder, NumPy instead of Pillow, float64 instead of
float32, rounding or truncation.
Exits with 1 if a fault was missed, the wrong step was named, or a correct system was refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.truth.example_systems import EXAMPLE_WORLDS
from benchmarks.truth.systems import WORLDS, World
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.decision import Verdict
from onnx_ops.measure.system_inputs import list_raw_inputs
from onnx_ops.measure.system_judgement import SystemJudgement, SystemRequest, judge_system
from onnx_ops.measure.system_parity import OUTPUT
from onnx_ops.tools.compare import REFERENCE


def judge_world(world: World, changes: Mapping[str, object], count: int) -> SystemJudgement:
    """Judge a world with some of its steps replaced."""
    inputs, total = list_raw_inputs(world.files, count)
    runtime = OnnxRuntime()
    return judge_system(
        SystemRequest(
            system=world.build(changes),  # type: ignore[arg-type]
            inputs=inputs,
            total=total,
            targets=[REFERENCE],
            runtime=lambda _: runtime,
        )
    )


def judge_faults(world: World, count: int, counts: Counter[str]) -> None:
    """Judge every fault of a world, and print and count the results.

    `??` marks a fault that was missed, located in another step, or not explained.
    """
    cases: list[tuple[str, str, World, Mapping[str, object]]] = [
        *((step, words, world, {step: wrong}) for step, words, wrong in world.faults),
        *((OUTPUT, "", replace(world, model=path), {}) for path in world.models.values()),
    ]
    for step, words, changed, changes in cases:
        judgement = judge_world(changed, changes, count)
        counts["faults"] += 1
        reason = next(
            (r.reason for r in judgement.decisions[0].results if r.verdict is Verdict.FAIL), ""
        )
        is_caught = judgement.verdict is Verdict.FAIL
        counts["caught"] += is_caught
        counts["named"] += is_caught and judgement.step == step
        counts["explained"] += is_caught and words in reason.rpartition("; ")[2] + reason
        mark = "ok" if is_caught and judgement.step == step and words in reason else "??"
        print(f"{mark} {world.name}.{step} [{words}] {judgement.verdict.value}: {reason[:230]}")


def judge_correct(world: World, count: int, number: int, seed: int, counts: Counter[str]) -> None:
    """Judge correct systems with other implementations of some steps."""
    random = np.random.default_rng(seed)
    names = list(world.alternatives)
    for _ in range(number):
        chosen = random.permutation(names)[: int(random.integers(1, 4))]
        changes: dict[str, object] = {}
        for name in chosen:
            options = world.alternatives[str(name)]
            changes[str(name)] = options[int(random.integers(len(options)))]
        judgement = judge_world(world, changes, count)
        counts["correct"] += 1
        counts["passed"] += judgement.verdict is Verdict.PASS
        counts["refused"] += judgement.verdict in (Verdict.FAIL, Verdict.ERROR)
        if judgement.verdict is not Verdict.PASS:
            print(f"?? {world.name} correct with {list(changes)}: {judgement.verdict.value}")
            for result in judgement.decisions[0].results:
                print(f"     {result.metric} {result.verdict.value} {result.reason[:200]}")


def main(arguments: list[str] | None = None) -> int:
    """Run all worlds for some seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=24)
    parser.add_argument("--correct", type=int, default=15, help="correct systems of each world")
    parser.add_argument("--worlds", help="names, separated by commas; default: all")
    options = parser.parse_args(arguments)
    names = (options.worlds or "pictures,objects,texts,sounds,shapes,tickets").split(",")
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for index, make in enumerate((*WORLDS, *EXAMPLE_WORLDS)):
                if make.__name__.removeprefix("make_") not in names:
                    continue
                random = np.random.default_rng([seed, index])
                world = make(Path(folder), random, options.inputs)
                judge_faults(world, options.inputs, counts)
                judge_correct(world, options.inputs, options.correct, seed, counts)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    wrong = counts["faults"] - counts["named"] + counts["refused"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
