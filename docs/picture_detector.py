"""Draw the pictures of the page on the detector.

`detector.png` shows images with the boxes that the weights of a released file give. `bisection.png`
is the report of `judge --system` about a client that stretches images. Needs Chromium on the path.

python docs/picture_detector.py RELEASED.onnx
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
SHOWN = ("001.jpg", "008.png", "022.jpg", "075.jpg")
SCALE, GAP = 3, 12
STEPS = "examples.drawn_shapes"
CLIENT = """\
import numpy as np
from PIL import Image


def stretch(pixels):
    return np.asarray(Image.fromarray(pixels).resize((96, 96), Image.Resampling.BILINEAR))
"""


def main() -> None:
    """Draw both pictures."""
    sys.path.insert(0, str(ROOT))
    model = Path(sys.argv[1]).resolve()
    draw_boxes(model)
    with tempfile.TemporaryDirectory() as folder:
        draw_report(model, Path(folder))


def draw_boxes(model: Path) -> None:
    """Draw images with the boxes that `predict` finds with the file's weights."""
    from examples.drawn_shapes import DATA, predict

    drawn = []
    for name in SHOWN:
        path = DATA / "shapes" / name
        with Image.open(path) as small:
            size = (small.width * SCALE, small.height * SCALE)
            image = small.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        drawing = ImageDraw.Draw(image)
        for one in predict(str(path), model):
            x1, y1, x2, y2 = (side * SCALE for side in one["box"])
            drawing.rectangle((x1, y1, x2, y2), outline="yellow", width=3)
            label = f"{one['name']} {one['score']:.2f}"
            at = (x1 + 4, y1 - 16 if y1 > 16 else y1 + 4)
            drawing.rectangle(drawing.textbbox(at, label), fill="black")
            drawing.text(at, label, fill="yellow")
        drawn.append(image)
    width = sum(image.width + GAP for image in drawn) - GAP
    page = Image.new("RGB", (width, max(image.height for image in drawn)), "white")
    left = 0
    for image in drawn:
        page.paste(image, (left, 0))
        left += image.width + GAP
    page.quantize(96).save(IMAGES / "detector.png", optimize=True)


def draw_report(model: Path, folder: Path) -> None:
    """Take a picture of the report about a client whose step differs."""
    from examples.drawn_shapes import export_net, load_net

    onnx.save(export_net(load_net(model)), folder / "net.onnx")
    (folder / "client.py").write_text(CLIENT, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    steps = {name: f"{STEPS}:{name}" for name in ("letterbox", "normalize")}
    steps["letterbox"] = "client:stretch"
    after = {
        "boxes": "read_boxes",
        "threshold": "choose_boxes",
        "suppress": "suppress",
        "limit": "limit",
        "objects": "list_objects",
    }
    command = ["onnx-ops", "judge", "--system", f"{STEPS}:predict_by_steps", "net.onnx"]
    command += ["--files", "examples/data/shapes", "--html", "report.html", "--quiet"]
    command += ["--before", f"decode={STEPS}:decode_file"]
    command += [part for name, use in steps.items() for part in ("--before", f"{name}={use}")]
    command += [
        part for name, use in after.items() for part in ("--after", f"{name}={STEPS}:{use}")
    ]
    subprocess.run(command, cwd=folder, check=False)
    picture = folder / "report.png"
    subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--hide-scrollbars"),
            *("--window-size=1000,620", f"--screenshot={picture}", str(folder / "report.html")),
        ],
        check=True,
    )
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(IMAGES / "bisection.png", optimize=True)


if __name__ == "__main__":
    main()
