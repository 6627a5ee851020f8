"""Calls of the Python functions from scripts, modules, notebooks and threads.

No process runs the caller's code again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onnx_ops.testing.models import write_perceptron

CALL = """
open("times.txt", "a").write("x")
import onnx_ops
found = onnx_ops.judge("model.onnx", "model.onnx", only="parity", rows=8, quiet=True)
open("verdict.txt", "w").write(found["verdict"])
"""


def run_script(folder: Path) -> list[str]:
    (folder / "script.py").write_text(CALL)
    return ["script.py"]


def run_script_elsewhere(folder: Path) -> list[str]:
    """Return the arguments that run a script by a relative path.

    The script changes the folder before it calls.
    """
    (folder / "scripts").mkdir()
    (folder / "scripts" / "script.py").write_text("import os\nos.chdir('..')\n" + CALL)
    return [
        "-c",
        "import os, runpy\nos.chdir('scripts')\nrunpy.run_path('script.py', run_name='__main__')",
    ]


def run_script_in_a_function(folder: Path) -> list[str]:
    indented = CALL.replace("\n", "\n    ")
    (folder / "script.py").write_text(
        f"def main():{indented}\nif __name__ == '__main__':\n    main()\n"
    )
    return ["script.py"]


def run_module(folder: Path) -> list[str]:
    (folder / "tool").mkdir()
    (folder / "tool" / "__init__.py").touch()
    (folder / "tool" / "__main__.py").write_text(CALL)
    return ["-m", "tool"]


def run_command_line(folder: Path) -> list[str]:
    return ["-c", CALL]


def run_standard_input(folder: Path) -> list[str]:
    return ["-"]


def run_pytest(folder: Path) -> list[str]:
    indented = CALL.replace("\n", "\n    ")
    (folder / "test_models.py").write_text(f"def test_models():{indented}\n")
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_models.py"]


def run_interactive(folder: Path) -> list[str]:
    """Return the arguments that run the code as a notebook does.

    Each cell is compiled and executed in a separate module.
    """
    lines = [line for line in CALL.splitlines() if line]
    cells = "; ".join(f"shell.push({line!r})" for line in lines)
    return ["-c", f"import code; shell = code.InteractiveConsole(); {cells}"]


def run_spawning(folder: Path) -> list[str]:
    (folder / "script.py").write_text(
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n" + CALL
    )
    return ["script.py"]


def run_frozen(folder: Path) -> list[str]:
    """Return the arguments that run the code as the program of a bundler.

    `__main__` is frozen, and its file does not exist.
    """
    (folder / "script.py").write_text(
        "import sys\nsys.frozen = True\n__file__ = '/nowhere/program.py'\n" + CALL
    )
    return ["script.py"]


def run_in_a_thread(folder: Path) -> list[str]:
    (folder / "script.py").write_text(
        "import threading\nthread = threading.Thread(target=exec, "
        f"args=({CALL!r},))\nthread.start()\nthread.join()\n"
    )
    return ["script.py"]


@pytest.mark.parametrize(
    "style",
    [
        run_script,
        pytest.param(run_script_elsewhere, marks=pytest.mark.nightly),
        pytest.param(run_script_in_a_function, marks=pytest.mark.nightly),
        pytest.param(run_module, marks=pytest.mark.nightly),
        run_command_line,
        run_standard_input,
        run_pytest,
        pytest.param(run_interactive, marks=pytest.mark.nightly),
        run_spawning,
        run_frozen,
        pytest.param(run_in_a_thread, marks=pytest.mark.nightly),
    ],
)
def test_api_judge_from_each_kind_of_caller_runs_caller_once(
    tmp_path: Path, style: Callable[[Path], list[str]]
) -> None:
    write_perceptron(tmp_path / "model.onnx")
    arguments = style(tmp_path)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        input=CALL if arguments == ["-"] else None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "verdict.txt").read_text() == "pass"
    assert (tmp_path / "times.txt").read_text() == "x"


def test_api_judge_leaves_process_pools_of_caller_working(tmp_path: Path) -> None:
    """A pool of the caller still finds the script's functions, with each start method."""
    write_perceptron(tmp_path / "model.onnx")
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "def double(n):\n    return 2 * n\n"
        "if __name__ == '__main__':\n"
        + CALL.replace("\n", "\n    ")
        + "\n    for method in ('spawn', 'forkserver', 'fork'):\n"
        "        with multiprocessing.get_context(method).Pool(1) as pool:\n"
        "            assert pool.map(double, [1, 2]) == [2, 4]\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
