"""Presets of Olive and Optimum for `variants.py`.

Each tool has a separate environment with pinned packages.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.adapters.isolation.environments import PythonEnvironments
from onnx_ops.adapters.isolation.process import build_clean_environ
from onnx_ops.domain.execution import Environment

OLIVE, OPTIMUM = "Olive 0.13.0", "optimum-onnx 0.1.0"
_SAME = ("onnx==1.23.2", "onnxruntime==1.31.1", "torch==2.13.0", "numpy==2.4.6")
PINS = {
    # olive-ai imports `requests` without declaring this dependency, see
    # https://github.com/microsoft/Olive/issues/2676
    OLIVE: ("olive-ai==0.13.0", "requests==2.34.2", "transformers==5.23.0", *_SAME),
    OPTIMUM: ("optimum-onnx[onnxruntime]==0.1.0", "optimum==2.1.0", "transformers==4.57.6", *_SAME),
}
TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model for one tool.

    It has the file, rows for ranges, an empty folder, and the path of the result.
    """

    python: Path
    source: Path
    feed: str
    rows: np.ndarray[Any, Any]
    folder: Path
    out: Path


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One preset of a tool, which is a row of the table.

    `make` leaves a model at the work's `out`, or raises.
    """

    tool: str
    name: str
    make: Callable[[Work], None]


def interpreter(tool: str, folder: Path) -> Path:
    """Return the Python of the environment that has the tool.

    pip makes the environment on first use. Settings of pip determine where torch comes from.

    Raises:
        StageError: the packages cannot be installed.
    """
    return PythonEnvironments(folder=folder, base=()).python(Environment(requirements=PINS[tool]))


def _olive(work: Work, *words: str) -> None:
    _call(work, "-m", "olive", *words, "-o", str(work.folder), "--disable_telemetry")


def _auto_opt(work: Work) -> None:
    _olive(work, "auto-opt", *_asked(work))
    _taken(work)


def _optimize(work: Work) -> None:
    _olive(work, "optimize", *_asked(work))
    _taken(work)


def _optimize_with_rows(work: Work) -> None:
    """Run the passes that `optimize` writes down, with the rows of this benchmark.

    The rows replace its text data set.
    """
    _olive(work, "optimize", *_asked(work), "--save_config_file", "--dry_run")
    config = json.loads((work.folder / "config.json").read_text())
    names = [one["name"] for one in config["data_configs"]]
    config["data_configs"] = [{"name": name, "load_dataset_config": _raw(work)} for name in names]
    own = work.folder / "own.json"
    own.write_text(json.dumps(config))
    _olive(work, "run", "--config", str(own))
    _taken(work)


def _asked(work: Work) -> Sequence[str]:
    return (
        "-m",
        str(work.source),
        "--precision",
        "int8",
        "--device",
        "cpu",
        "--provider",
        "CPUExecutionProvider",
    )


def _raw(work: Work) -> dict[str, Any]:
    place = work.folder / "rows" / work.feed
    place.mkdir(parents=True)
    for number, row in enumerate(work.rows):
        row.tofile(place / f"{number:05}.bin")
    return {
        "type": "raw_dataset",
        "params": {
            "data_dir": str(place.parent),
            "input_names": [work.feed],
            "input_shapes": [list(work.rows.shape[1:])],
            "input_types": [str(work.rows.dtype)],
        },
    }


def _taken(work: Work) -> None:
    (work.folder / "model.onnx").replace(work.out)


def _optimum(preset: str, kind: str) -> Callable[[Work], None]:
    def make(work: Work) -> None:
        rows = work.folder / "rows.npy"
        np.save(rows, work.rows)
        _call(
            work,
            "-c",
            _QUANTIZE,
            str(work.source),
            str(work.folder),
            str(rows),
            work.feed,
            preset,
            kind,
        )
        (work.folder / f"{work.source.stem}_quantized.onnx").replace(work.out)

    return make


_QUANTIZE = """
import pathlib, sys
import numpy as np
from onnxruntime.quantization import CalibrationMethod
from optimum.onnxruntime import ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig, CalibrationConfig
source, folder, rows, feed, preset, kind = sys.argv[1:]
config = getattr(AutoQuantizationConfig, preset)(is_static=kind == "static")
quantizer, ranges = ORTQuantizer(pathlib.Path(source)), None
if config.is_static:
    own = CalibrationConfig("rows", "", "", len(np.load(rows)), method=CalibrationMethod.MinMax)
    ranges = quantizer.fit([{feed: row} for row in np.load(rows)], own, folder + "/augmented.onnx",
                           operators_to_quantize=config.operators_to_quantize, batch_size=8)
quantizer.quantize(config, folder, calibration_tensors_range=ranges)
"""


def _call(work: Work, *words: str) -> None:
    """Run the tool's interpreter.

    Raises:
        RuntimeError: it failed; the reason is the last line of its error output.
    """
    done = subprocess.run(
        [str(work.python), *words], cwd=work.folder, env=build_clean_environ(),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(
            next(
                (line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message"
            )
        )


PRESETS = (
    Preset(tool=OLIVE, name="`auto-opt --precision int8`", make=_auto_opt),
    Preset(tool=OLIVE, name="`optimize --precision int8`", make=_optimize),
    Preset(
        tool=OLIVE, name="passes of `optimize --precision int8`, our rows", make=_optimize_with_rows
    ),
    *(
        Preset(
            tool=OPTIMUM,
            name=f"`{preset}` {kind}{', our rows' * (kind == 'static')}",
            make=_optimum(preset, kind),
        )
        for preset in ("avx2", "avx512_vnni")
        for kind in ("dynamic", "static")
    ),
)
