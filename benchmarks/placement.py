"""Stages on workers of Prefect work pools: how fast they start, and what survives when something is killed.

    python -m benchmarks.placement [--quick] [--only PART ...]

A Prefect server, an asker and workers run on this machine, each in a folder of its own, with its own lock for
measurements. Ends 1 if a promise is missed.

| part | question |
|---|---|
| dispatch | How long from asking to the start of a stage, and how much longer is a placed benchmark than one here? |
| flow | Is a flow run as fast as `onnx-ops run --jobs`, from the first line of the training to the end? |
| fan | Do independent stages begin together? Is a plan over several pools as fast as its slowest pool? |
| shards | Do rows that three workers score in shards get the metrics that one gets, to the last digit? |
| endurance | Does a worker keep its size, its files and no zombies over many stages? |
| kills | Does the next run end with the same results, without executing a finished stage again? |
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from benchmarks.truth.claims import Claim, summary, table
from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import Evidence
from tests.e2e.e2e_project import Project
from tests.e2e.prefect_site import PrefectSite, ended
from tests.support.pool_site import PoolSite, Worker, kill_tree, pool_site
from tests.support.ports import free_port
from tests.support.postgres import postgres
from tests.support.processes import until

POOL = "board"
PLACED = {"ONNX_OPS_POOLS": f"train={POOL}, export={POOL}, validate={POOL}, quantize={POOL}"}
WAITING = "gates=[{kind: metric, use: 'lab:slow', higher_is_better: true, min: 0%}]"
"""A measurement that leaves its machine idle, as machines of their own would leave the one of who asks."""
VICTIMS = ("asker", "worker", "stage", "worker and stage", "server")
SCORED = f"""\
pipeline: rows
data:
  test: {{file: rows.npz, inputs: {{x: x}}, label: label}}
model: model.onnx
export: {{framework: onnx}}
validate: {{samples: {{data: test, limit: 1000000}}}}
benchmark: {{targets: [{POOL}]}}
gates:
  - {{kind: metric, name: accuracy, min: 50%}}
  - {{kind: metric, name: top_k, k: 1, min: 50%}}
"""
DEATH_S = 15.0
"""So soon is a death seen, and a further run asked for."""


def main() -> int:
    """Run the parts and print what they have shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS), help="kill these only")
    parser.add_argument("--apart", action="store_true", help="a separate user and network for each machine; as root")
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql", help="of the server")
    chosen = parser.parse_args()
    claims: list[Claim] = []
    database = postgres() if chosen.database == "postgresql" else contextlib.nullcontext("")
    with (
        tempfile.TemporaryDirectory(prefix="onnx-ops-placement-") as folder,
        database as url,
        Server(Path(folder), url, "0.0.0.0" if chosen.apart else "127.0.0.1") as server,  # noqa: S104 (for networks of this machine)
    ):
        for name in chosen.only:
            claims += PARTS[name](server, chosen)
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


class Server:
    """A Prefect server that can be killed and started again."""

    def __init__(self, home: Path, database: str, host: str) -> None:
        """Make one with this database, a URL for psycopg2; with SQLite if it is empty."""
        self._port, self._host = free_port(), host
        url = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database.replace("psycopg2", "asyncpg")} if database else {}
        self.site = PrefectSite(Project(home, url), home, f"http://127.0.0.1:{self._port}/api")

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        ended(self.site.started)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.site.started = [self.site.start("server", "start", "--host", self._host, "--port", str(self._port))]
        until(self.site.healthy, seconds=120, what="a healthy Prefect server")

    def kill(self) -> None:
        """Kill it as a crash of its machine would."""
        (process,) = self.site.started
        kill_tree(process.pid)
        process.wait()


def measure_dispatch(server: Server, chosen: argparse.Namespace) -> list[Claim]:
    """Return the promises about single stages."""
    with pool_site(server.site, apart=chosen.apart) as site:
        site.work(POOL)
        waits = []
        for number in range(5 if chosen.quick else 20):
            site.result(site.ask(f"train.with.mark=m{number}", until="train", environ=PLACED))
            created = seconds(site.runs("train")[-1]["created"])
            begun = seconds(site.runs("train")[-1]["start_time"])
            waits.append((begun - created, site.marked(f"m{number}")["begins"][0] - created))
        taken: dict[str, list[float]] = {"here": [], "placed": []}
        for number in range(3 if chosen.quick else 7):
            for where, pool in (("here", ""), ("placed", f"pool: {POOL}\n")):
                (site.asker / f"configs/targets/{POOL}.yaml").write_text(f"name: {POOL}\n{pool}", encoding="utf-8")
                asked = site.ask(f"train.with.mark={where}{number}", options=("--no-cache", "benchmark"))
                outcomes = site.result(asked)["outcomes"]
                taken[where] += [one["seconds"] for one in outcomes if one["stage"].startswith("benchmark/")]
    starts, codes = zip(*waits, strict=True)
    rows = {"submit to start": starts, "submit to the first line of the training function": codes}
    rows |= {"a benchmark here": tuple(taken["here"]), "the same benchmark, placed": tuple(taken["placed"])}
    table(
        "One stage, in seconds", ("what", "median", "least", "most"), [(name, *spread(v)) for name, v in rows.items()]
    )
    wait, cost = statistics.median(starts), statistics.median(taken["placed"]) - statistics.median(taken["here"])
    return [
        build_claim("dispatch", "submit to start, median", "≤ 5 s", f"{wait:.2f} s", wait <= 5),
        build_claim("dispatch", "what placing adds to a benchmark", "≤ 2 s", f"{cost:.2f} s", cost <= 2),
    ]


def measure_flow(server: Server, chosen: argparse.Namespace) -> list[Claim]:
    """Return the promise about the flow beside the command.

    A flow ends when Prefect shows its final state; its process sends what is left of its log and ends a little later.
    """
    kinds = ("train", "export", "validate", "quantize", "benchmark", "gate")
    took: dict[str, list[float]] = {"command": [], "flow": []}
    with pool_site(server.site, apart=chosen.apart, variants=4) as site:
        (site.asker / f"configs/targets/{POOL}.yaml").write_text(f"name: {POOL}\n", encoding="utf-8")
        again = [part for kind in kinds for part in ("--no-cache", kind)]
        for number in range(2 if chosen.quick else 5):
            for who, seconds_of in took.items():
                mark = f"train.with.mark={who}{number}"
                ran = (
                    site.ask(mark, options=(*again, "--jobs", "2"))
                    if who == "command"
                    else site.flow(mark, no_cache=kinds)
                )
                _, errors = ran.communicate(timeout=300)
                assert ran.returncode == 0, errors
                end = time.time()  # noqa: TID251 (beside a time of another process)
                if who == "flow":
                    end = seconds(server.site.latest("pipeline")["end_time"])
                seconds_of.append(end - site.marked(f"{who}{number}")["begins"][0])
    table(
        "A pipeline of five variants, in seconds",
        ("who", "median", "least", "most"),
        [(n, *spread(v)) for n, v in took.items()],
    )
    ratio = statistics.median(took["flow"]) / statistics.median(took["command"])
    return [build_claim("flow", "the flow beside the command", "≤ 1.05", f"{ratio:.2f}", ratio <= 1.05)]


def measure_fan(server: Server, chosen: argparse.Namespace) -> list[Claim]:
    """Return the promises about many stages at once."""
    pools = ("east", "north", "west")
    with pool_site(server.site, apart=chosen.apart, variants=4, targets=pools) as site:
        for pool in pools:
            site.work(pool)
        site.work("makers", "--limit", "4")
        made = {"ONNX_OPS_POOLS": "quantize=makers"}
        site.result(site.ask("train.with.mark=fan", environ=made))
        starts = sorted(seconds(run["start_time"]) for run in site.runs() if run["name"].startswith("lab/quantize/"))
        took: dict[str, list[float]] = {}
        for chosen_pools in (*((pool,) for pool in pools), pools):
            targets = ", ".join(chosen_pools)
            for gates in ((), (WAITING,)):
                begun = time.monotonic()
                wanted = ("train.with.mark=fan", f"benchmark.targets=[{targets}]", *gates)
                site.result(site.ask(*wanted, options=("--no-cache", "benchmark"), environ=made))
                took.setdefault(targets, []).append(time.monotonic() - begun)
    rows = [(name, *(f"{s:.1f}" for s in figures)) for name, figures in took.items()]
    table("Five variants measured by a run, in seconds", ("pools", "all at once", "that wait 3 s each"), rows)
    apart = starts[-1] - starts[0]
    *alone, together = took.values()
    busy, waiting = (figures[-1] / max(figures[:-1]) for figures in zip(*alone, together, strict=True))
    return [
        build_claim("fan", f"{len(starts)} independent stages begin", "within 2 s", f"{apart:.2f} s", apart <= 2),
        build_claim("fan", "3 pools that wait", "≤ 1.2 × the slowest alone", f"{waiting:.2f} ×", waiting <= 1.2),
        build_claim("fan", "3 pools that share the cores", "≤ 1.2 × the slowest alone", f"{busy:.2f} ×", busy <= 1.2),
    ]


def measure_shards(server: Server, chosen: argparse.Namespace) -> list[Claim]:
    """Return the promise about rows that are scored in shards."""
    rows = 100_000 if chosen.quick else 1_000_000
    rng = np.random.default_rng(0)
    with pool_site(server.site, apart=chosen.apart) as site:
        x = rng.standard_normal((rows, 16), dtype=np.float32)
        weights = rng.standard_normal((16, 2), dtype=np.float32)
        np.savez(site.asker / "rows.npz", x=x, label=(x @ weights + rng.standard_normal((rows, 2))).argmax(axis=1))
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "weights"], ["scores"])],
            "rows",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
            [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])],
            [numpy_helper.from_array(weights, "weights")],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.save(made, site.asker / "model.onnx")
        (site.asker / "configs/pipelines/rows.yaml").write_text(SCORED)
        scored = list[Any]()
        for shards in (1, 3):
            for _ in range(shards - len(site.workers)):
                site.work(POOL)
            asked = site.ask(f"benchmark.shards={shards}", pipeline="configs/pipelines/rows.yaml")
            outcomes = {one["stage"]: one for one in site.result(asked, seconds=900)["outcomes"]}
            store = ContentStore(LocalObjects(site.folder / "store"), site.folder / "cache")
            evidence = outcomes[f"benchmark/fp32@{POOL}"]["manifest"]["files"]["evidence.json"]
            found = codec.loads(store.read(Digest(evidence)), Evidence)
            scored.append((found.metrics, found.scores, {one.n for one in found.metrics}))
        workers = sum(run["name"].startswith("rows/score/") for run in site.runs())
    figure = "equal" if scored[0] == scored[1] and scored[0][2] == {rows} else "different"
    what = f"metrics of {rows:,} rows in {workers} shards and in one"
    return [build_claim("shards", what, "equal", figure, figure == "equal" and workers == 3)]


def measure_endurance(server: Server, chosen: argparse.Namespace) -> list[Claim]:
    """Return the promises about a worker that executes many stages."""
    count, at_once = (30, 10) if chosen.quick else (200, 20)
    with pool_site(server.site, apart=chosen.apart, variants=at_once) as site:
        worker = site.work(POOL, "--limit", "4")
        again = [part for kind in ("train", "export", "validate", "quantize") for part in ("--no-cache", kind)]
        process = psutil.Process(worker.process.pid)
        site.result(site.ask("train.with.mark=first", until="quantize", environ=PLACED))
        before = process.memory_info().rss, process.num_fds()
        done = 0
        while done < count:
            asked = site.ask(f"train.with.mark=e{done}", until="quantize", options=again, environ=PLACED)
            result = site.result(asked, seconds=900)
            done += sum(outcome["status"] == "done" for outcome in result["outcomes"])
        until(lambda: not worker.forks(), what="the end of the last stage")
        time.sleep(2)  # a worker looks twice a second for processes that have ended
        growth, files = (process.memory_info().rss - before[0]) / 1e6, process.num_fds() - before[1]
        zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in process.children())
    return [
        build_claim("endurance", f"growth over {done} stages", "< 20 MB", f"{growth:.1f} MB", growth < 20),
        build_claim("endurance", "files left open; zombies", "0; 0", f"{files}; {zombies}", files <= 0 and not zombies),
    ]


def measure_kills(server: Server, chosen: argparse.Namespace) -> list[Claim]:
    """Return the promises about what follows a kill."""
    moments = 3 if chosen.quick else 10
    rows, claims = [], []
    with pool_site(server.site, apart=chosen.apart) as site:
        worker = site.work(POOL)
        began = time.monotonic()
        undisturbed = site.manifests(site.result(site.ask(*marked("reference"), until="validate", environ=PLACED)))
        whole = time.monotonic() - began
        for victim in chosen.victims:
            wrong = again = 0
            waits = []
            for number in range(moments):
                mark = f"{victim.replace(' ', '-')}-{number}"
                result, dead = disturbed(server, site, worker, victim, whole * (number + 0.5) / moments, mark)
                wrong += site.manifests(result) != undisturbed
                again += executed_again(site, mark)
                waits += [crash - dead for crash in crashes(site, dead)]
            latest = max(waits, default=0.0)
            rows.append((victim, str(moments), str(wrong), str(again), f"{latest:.1f}"))
            claims += [
                build_claim(
                    "kills", f"{victim}: other results than undisturbed", "0", f"{wrong} of {moments}", not wrong
                ),
                build_claim("kills", f"{victim}: finished stages executed again", "0", str(again), not again),
                build_claim(
                    "kills",
                    f"{victim}: a death is seen",
                    "≤ 15 s",
                    f"{latest:.1f} s",
                    latest <= DEATH_S,
                ),
            ]
    head = ("killed", "moments", "other results", "executed again", "seen after, s: most")
    table(f"Kills over a run of {whole:.0f} s", head, rows)
    return claims


def marked(mark: str) -> tuple[str, ...]:
    """Return the values that make a run another one with the same results."""
    return (f"train.with.mark={mark}", "train.with.seconds=3")


def disturbed(
    server: Server, site: PoolSite, worker: Worker, victim: str, moment: float, mark: str
) -> tuple[Any, float]:
    """Run, kill something, and run again until a run ends well; return its result and the time of the kill."""
    asked = site.ask(*marked(mark), until="validate", environ=PLACED)
    time.sleep(moment)
    dead = time.time()  # noqa: TID251 (compared with times of Prefect's server)
    forks, stages = worker.forks(), worker.stages()
    if victim == "asker":
        os.killpg(asked.pid, signal.SIGKILL)
    elif victim == "server":
        server.kill()
        time.sleep(3)
        server.start()
    else:
        if victim.startswith("worker"):
            worker.process.kill()
            worker.process.wait()
        if victim.endswith("stage"):
            # One moment kills the process of the flow run, the next one that of the stage below it.
            for pid in stages if victim == "stage" and int(mark[-1]) % 2 else forks:
                kill_tree(pid)
        if victim.startswith("worker"):
            site.restart(worker)
    for _ in range(4):
        out, errors = asked.communicate(timeout=300)
        if asked.returncode == 0:
            return parse(out), dead
        problems = [error["what"] for error in parse(out)["errors"].values()] if out else errors.splitlines()[-1:]
        print(f"  {mark}: exit code {asked.returncode}: {'; '.join(problems)}", flush=True)
        asked = site.ask(*marked(mark), until="validate", environ=PLACED)
    raise AssertionError(f"{mark}: no run ended well; the worker's log:\n{worker.log[-3000:]}")


def executed_again(site: PoolSite, mark: str) -> int:
    """Return how many trainings began after one had ended and its flow run was complete."""
    begins, ends = (sorted(site.marked(mark)[what]) for what in ("begins", "ends"))
    complete = [run for run in site.runs("train") if run["state_type"] == "COMPLETED"]
    recorded = [seconds(run["end_time"]) for run in complete if ends and seconds(run["end_time"]) >= ends[0]]
    return sum(bool(recorded) and begin > min(recorded) for begin in begins)


def crashes(site: PoolSite, since: float) -> list[float]:
    """Return when flow runs were found dead after a moment."""
    found = [run for run in site.runs() if run["state_type"] == "CRASHED"]
    return [at for run in found if (at := seconds(run["state"]["timestamp"])) > since]


def parse(text: str) -> Any:
    """Return the document that a command has printed."""
    import json

    return json.loads(text)


def seconds(text: str) -> float:
    """Return a time of Prefect's API in seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def spread(values: Sequence[float]) -> tuple[str, str, str]:
    """Return the median, the least and the greatest value, as texts."""
    return f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{max(values):.2f}"


def build_claim(gate: str, what: str, bound: str, figure: str, is_met: bool) -> Claim:
    """Return a promise and whether it was kept."""
    return Claim(gate=gate, what=what, bound=bound, figure=figure, is_met=is_met)


PARTS: Mapping[str, Callable[[Server, argparse.Namespace], list[Claim]]] = {
    "dispatch": measure_dispatch,
    "flow": measure_flow,
    "fan": measure_fan,
    "shards": measure_shards,
    "endurance": measure_endurance,
    "kills": measure_kills,
}

if __name__ == "__main__":
    sys.exit(main())
