"""Measure what many pipelines cost.

    python -m benchmarks.scale [--pipelines 200] [--variants 4] [--targets 4] [--processes 2]

Measured are planning, the work of onnx-ops around each stage, memory, and a second run. Exporter,
optimizer and runtime are plugins of this benchmark that cost next to nothing. Planner, engine,
statistics, codec and store are the real ones. Stages run in this process, so that starting
processes does not hide the rest. What a process for each stage adds is then measured on a few
pipelines (`--processes`). Seconds are those of this machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PLUGINS = Path(__file__).resolve().parent / "synthetic"
sys.path.insert(0, str(PLUGINS))

from synthetic_project import in_this_process, write_project  # noqa: E402

from onnx_ops.app.context import Project, open_project  # noqa: E402
from onnx_ops.app.project import execute, prepare  # noqa: E402
from onnx_ops.app.results import summarize  # noqa: E402
from onnx_ops.domain.plan import StageStatus  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """The measurements of one pipeline that was planned and run.

    Times are in seconds, `cpu` in CPU seconds. `memory` is the peak memory of this process so far,
    in MB.
    """

    plan: float
    run: float
    cpu: float
    executed: int
    stages: int
    memory: float
    exit_code: int
    by_kind: dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", type=int, default=200)
    parser.add_argument("--variants", type=int, default=4, help="with the export itself")
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="pipelines whose stages run in separate processes",
    )
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before")
    with tempfile.TemporaryDirectory(prefix="onnx-ops-scale-") as name:
        root = Path(name) / "many"
        files = write_project(
            root, pipelines=options.pipelines, variants=options.variants, targets=options.targets
        )
        project = open_project(root)
        print_times("first run, all new", [led(project, file) for file in files])
        print_times(
            "second run, nothing changed", [led(open_project(root), file) for file in files]
        )
        few = Path(name) / "few"
        some = write_project(
            few, pipelines=options.processes, variants=options.variants, targets=options.targets
        )
        print_times(
            "a process for each stage", [led(open_project(few), file, here=False) for file in some]
        )
    print(f"load {os.getloadavg()[0]:.1f} after")


def led(project: Project, file: Path, *, here: bool = True) -> Led:
    begun = time.perf_counter()
    prepared = prepare(project, file)
    planned = time.perf_counter()
    before = cpu()
    wanted = in_this_process(prepared) if here else prepared
    result = execute(project, wanted)
    summary = summarize(wanted.pipeline, result, project.context)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for stage in wanted.plan.stages:
        if result.outcomes[stage.id].status is StageStatus.DONE:
            by_kind[stage.kind.value].append(result.outcomes[stage.id].seconds)
    return Led(
        plan=planned - begun,
        run=time.perf_counter() - planned,
        cpu=cpu() - before,
        executed=len(summary.executed),
        stages=len(wanted.plan.stages),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        exit_code=summary.exit_code,
        by_kind=dict(by_kind),
    )


def cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def print_times(title: str, all_led: list[Led]) -> None:
    if not all_led:
        return
    stages, executed = sum(one.stages for one in all_led), sum(one.executed for one in all_led)
    wall, busy = sum(one.run for one in all_led), sum(one.cpu for one in all_led)
    print(
        f"\n{title}: {len(all_led)} pipelines, {stages} stages, {executed} executed, {wall:.1f} s"
    )
    print(f"  exit codes               {sorted({one.exit_code for one in all_led})}")
    print(f"  plan, a pipeline         {median([one.plan for one in all_led])}")
    if len(all_led) >= 20:
        # The first pipeline fills caches, so its time is left out of these medians.
        print(f"    pipelines 2-11         {median([one.plan for one in all_led[1:11]])}")
        print(f"    the last 10            {median([one.plan for one in all_led[-10:]])}")
    count = executed or stages
    print(
        f"  run, a stage             {1e3 * wall / count:.1f} ms, CPU {1e3 * busy / count:.1f} ms"
    )
    if executed:
        print_kinds(all_led, wall, count)
    marks = sorted({0, len(all_led) // 4, len(all_led) // 2, len(all_led) - 1})
    print(
        "  memory at its highest    "
        + ", ".join(f"{all_led[at].memory:.0f} MB after {at + 1}" for at in marks)
    )


def print_kinds(all_led: list[Led], wall: float, count: int) -> None:
    """Print the time outside of executed stages, and the median of each kind of stage."""
    inside = sum(sum(seconds) for one in all_led for seconds in one.by_kind.values())
    print(f"    outside of the stages  {1e3 * (wall - inside) / count:.2f} ms")
    for kind in all_led[-1].by_kind:
        print(f"    {kind:<22} {median([s for one in all_led for s in one.by_kind.get(kind, ())])}")


def median(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms" if seconds else "-"


if __name__ == "__main__":
    main()
