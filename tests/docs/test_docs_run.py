"""Runs of every block of shell and Python on the pages.

The blocks run in a project that has released, and print what the page shows.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_ops.app.context import open_project
from onnx_ops.app.scaffold import scaffold
from onnx_ops.release.journal import list_bound_endpoints
from tests.docs.docs_blocks import PAGES, ROOT, SHELL, Block, Command, blocks_of, commands_of
from tests.docs.docs_scenes import broken, stop, there
from tests.docs.docs_shell import Shell, missing, outcome_of, wait_for

PIPELINE = "configs/pipelines/digits-mlp.yaml"
ONNX_OPS = Path(sys.executable).with_name("onnx-ops")


def beginning(page: Path) -> str:
    return next((said for block in blocks_of(page) if (said := block.note("scratch"))), "project")


RUNNING = [
    page
    for page in PAGES
    if any(block.runs for block in blocks_of(page)) and beginning(page) != "machine"
]
FRESH = [page for page in RUNNING if beginning(page) == "empty"]
INCONCLUSIVE, TRIES = 3, 4


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Provide a project with a release, and a copy of it without running servers.

    Its endpoint `digits` serves version 2, and served version 1 before.
    """
    project = tmp_path_factory.mktemp("docs") / "project"
    scaffold(project, "digits-mlp", "sklearn")
    file = project / PIPELINE
    text = file.read_text(encoding="utf-8").replace("endpoint: digits-mlp", "endpoint: digits")
    variants, rest = text.index("quantize:"), text.index("benchmark:")
    # The limit is wide enough for every shared machine: these tests are about the pages, not about
    # noise.
    file.write_text(
        (text[:variants] + text[rest:]).replace("max_regression: 5%", "max_regression: 80%")
    )
    for seed in (7, 8):
        subprocess.run(
            [ONNX_OPS, "run", PIPELINE, "--set", f"train.with.seed={seed}"], cwd=project, check=True
        )
    bring_files(project)
    stop(project)
    rest_of_it = project.with_name("at-rest")
    shutil.copytree(project, rest_of_it)
    yield project, rest_of_it
    stop(project)


def bring_files(project: Path) -> None:
    """Create the files that the page on single files mentions."""
    from sklearn.datasets import load_digits

    model = onnx.load(next((project / ".onnx-ops" / "models").glob("*/model.onnx")))
    onnx.save(model, project / "fp32.onnx")
    digits = load_digits()
    np.savez(project / "digits.npz", x=digits.data.astype(np.float32))
    np.savez(project / "scored.npz", x=digits.data.astype(np.float32), y=digits.target)
    made: list[str | Path] = [
        ONNX_OPS,
        "quantize",
        "fp32.onnx",
        "int8-static.onnx",
        "--method",
        "static",
        "--data",
        "digits.npz",
    ]
    subprocess.run(made, cwd=project, check=True)


# The tests take eight minutes, so they run only nightly.
@pytest.mark.nightly
@pytest.mark.services
@pytest.mark.parametrize("page", [page for page in RUNNING if page not in FRESH], ids=name)
def test_page_blocks_run_in_released_project(page: Path, released: tuple[Path, Path]) -> None:
    project, at_rest = released
    stop(project)
    shutil.rmtree(project)
    shutil.copytree(at_rest, project)
    subprocess.run([ONNX_OPS, "reconcile"], cwd=project, check=True)
    follow(page, project, project)


# The tests take two minutes, so they run only nightly. `test_docs_blocks` checks the commands in
# every run.
@pytest.mark.nightly
@pytest.mark.services
@pytest.mark.parametrize("page", FRESH, ids=name)
def test_page_blocks_run_in_empty_folder(page: Path, tmp_path: Path) -> None:
    project = tmp_path / "fraud"
    try:
        follow(page, tmp_path, project)
        assert not list_bound_endpoints(open_project(project).context)
    finally:
        stop(project)


def follow(page: Path, folder: Path, project: Path) -> None:
    with contextlib.ExitStack() as stack:
        shell = Shell(
            folder, variables={"PREFECT_HOME": str(project.parent / f"prefect-{page.stem}")}
        )
        stack.callback(shell.close)
        for block in blocks_of(page):
            if block.runs:
                if (what := block.note("with")) is not None:
                    stack.enter_context(there(what, project, shell))
                with broken(block.note("breaks"), project, shell):
                    follow_block(block, shell, project)


def follow_block(block: Block, shell: Shell, project: Path) -> None:
    if (file := block.note("file")) is not None:
        path = project / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        return
    if (sign := block.note("runs on")) is not None:
        commands = [re.sub(r"\s+#\s.*$", "", command.text) for command in commands_of(block)]
        alone = not any(text.endswith("&") for text in commands)
        for text in commands:
            follow_server(text, sign, shell, project.parent / "servers.log", alone=alone)
        return
    if block.language not in SHELL:
        output, code = shell.run(f"python - <<'THE-END'\n{block.text}\nTHE-END")
        assert code == 0, (block.place, output)
        return
    for command in commands_of(block):
        output, code = answered(command, shell)
        expected, shown = outcome_of(command)
        if block.note("output of another machine") is not None:
            assert code in (0, 1, INCONCLUSIVE), (block.place, command.text, output)
            continue
        assert code == expected, f"{block.place}: `{command.text}` ended with {code}\n{output}"
        lost = missing(shown, output)
        assert not lost, f"{block.place}: `{command.text}` does not print {lost}, but\n{output}"


def follow_server(text: str, sign: str, shell: Shell, log: Path, *, alone: bool) -> None:
    """Run a command of a block with servers.

    A command that ends in `&` runs until the end of the page, and the others run as usual. In a
    block without `&` every command can be a server, which is ended once it shows the sign.
    """
    log.write_text("", encoding="utf-8")
    if text.endswith("&"):
        wait_for(sign, log, shell.begin(text.removesuffix("&"), log))
    elif not alone or text.startswith("export "):
        output, code = shell.run(text)
        assert code == 0, (text, output)
    else:
        process = shell.begin(text, log)
        if wait_for(sign, log, process, may_end=True):
            process.terminate()
            process.wait(timeout=60)
        else:
            assert shell.run(f"wait {process.pid}")[1] == 0, log.read_text(encoding="utf-8")


def answered(command: Command, shell: Shell) -> tuple[str, int]:
    """Return the output and the exit code of a command.

    If this machine was too noisy for a verdict, the measurement is repeated, as the pages
    recommend.
    """
    output, code = shell.run(command.text)
    for _ in range(TRIES):
        if code != INCONCLUSIVE or not command.text.startswith("onnx-ops run"):
            break
        output, code = shell.run(f"{command.text} --no-cache benchmark")
    return output, code
