"""A small detector of drawn shapes, whose released file takes PNG and JPEG files.

The file joins four graphs: the decoder with resizing and normalization, the net, and the selection
of boxes. `python -m examples.shapes_detector` draws the data sets below `examples/data`, copies the
library of onnxruntime-extensions to `lib`, and writes the target `cpu-images` that names it.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional

from onnx_ops import build_image_decoder, join_graphs
from onnx_ops.ports import Dataset

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data"
CLASSES = ("circle", "square", "triangle")
SIZE, STRIDE = 64, 8
CELLS = SIZE // STRIDE
MOST = 3
"""Largest number of shapes of an image."""
BOXES = 20
"""Number of boxes that the released file returns for each image; unused ones have class -1."""
MEAN, STD = 0.5, 0.25
FOUND = 0.5
"""Smallest score and smallest IoU of a detection that `score_detections` counts."""

TARGET = """\
# yaml-language-server: $schema=../schema/target.schema.json
name: cpu-images
description: One thread on any CPU, with the operators of onnxruntime-extensions that decode images.
runtime: onnxruntime
providers: [CPUExecutionProvider]
session:
  intra_op_threads: 1
  inter_op_threads: 1
  spinning: false
  graph_level: all
custom_ops:
  path: lib/{name}
  digest: sha256:{digest}
  domains: [com.microsoft.extensions]
"""


def draw_image(draw: np.random.Generator) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Return an image file with one to three shapes, and their boxes.

    A box is x1, y1, x2, y2 as shares of the width and height, and the class.
    """
    width, height = draw.integers(48, 97, 2).tolist()
    image = Image.new("RGB", (width, height), tuple(draw.integers(0, 90, 3).tolist()))
    canvas = ImageDraw.Draw(image)
    boxes = np.full((MOST, 5), -1, np.float32)
    for number in range(int(draw.integers(1, MOST + 1))):
        kind, size = int(draw.integers(len(CLASSES))), int(draw.integers(14, 27))
        x, y = int(draw.integers(0, width - size)), int(draw.integers(0, height - size))
        color = tuple(draw.integers(140, 256, 3).tolist())
        corners = (x, y, x + size, y + size)
        if kind == 0:
            canvas.ellipse(corners, color)
        elif kind == 1:
            canvas.rectangle(corners, color)
        else:
            canvas.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], color)
        scale = np.array([width, height, width, height], np.float32)
        boxes[number] = [*(np.array(corners, np.float32) / scale), kind]
    stream = io.BytesIO()
    if draw.random() < 0.5:
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=85)
    return stream.getvalue(), boxes


def write_images(path: Path, *, count: int, seed: int) -> None:
    """Write a data set: rows of bytes, padded with zeros, and the boxes of each image."""
    draw = np.random.default_rng(seed)
    files, boxes = zip(*(draw_image(draw) for _ in range(count)), strict=True)
    rows = np.zeros((count, max(map(len, files))), np.uint8)
    for row, content in zip(rows, files, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    np.savez_compressed(path, image=rows, boxes=np.stack(boxes))


def write_target() -> None:
    """Copy the library of operators into the project, and write the target that names it."""
    import onnxruntime_extensions

    library = Path(onnxruntime_extensions.get_library_path())
    (ROOT / "lib").mkdir(exist_ok=True)
    copy = ROOT / "lib" / "libort_extensions.so"
    shutil.copyfile(library, copy)
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    text = TARGET.format(name=copy.name, digest=digest)
    (ROOT / "configs/targets/cpu-images.yaml").write_text(text, encoding="utf-8")


class Net(nn.Module):
    """A network from pixels (batch, 3, 64, 64) to one raw box for each of 8 × 8 cells.

    Channels: score, x and y of the center in the cell, width, height, and a score for each class.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, step in ((3, 16, 2), (16, 32, 2), (32, 48, 2), (48, 64, 1), (64, 64, 1)):
            layers += [
                nn.Conv2d(before, after, 3, step, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(64, 5 + len(CLASSES), 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        raw: torch.Tensor = self.layers(pixels)
        return raw


def decode_boxes(raw: torch.Tensor) -> torch.Tensor:
    """Return boxes (batch, 64, 4) as shares of width and height."""
    place = torch.arange(CELLS, dtype=torch.float32)
    x = (raw[:, 1].sigmoid() + place[None, None, :]) / CELLS
    y = (raw[:, 2].sigmoid() + place[None, :, None]) / CELLS
    half_width, half_height = raw[:, 3].sigmoid() / 2, raw[:, 4].sigmoid() / 2
    corners = [x - half_width, y - half_height, x + half_width, y + half_height]
    return torch.stack(corners, dim=-1).flatten(1, 2)


class Boxes(nn.Module):
    """Selection of boxes: the best 20 cells, without those that overlap a better box.

    The result is (batch, 20, 6): x1, y1, x2, y2, score, class. Boxes that overlap a better box of
    their class get the score 0 and the class -1.
    """

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        scores, classes = raw[:, 5:].softmax(1).max(1)
        scores = (raw[:, 0].sigmoid() * scores).flatten(1)
        best, cells = scores.topk(BOXES, dim=1)
        boxes = decode_boxes(raw).gather(1, cells.unsqueeze(2).expand(-1, -1, 4))
        kinds = classes.flatten(1).gather(1, cells)
        overlaps = compute_overlaps(boxes, boxes) * (kinds[:, :, None] == kinds[:, None, :])
        worst = torch.triu(overlaps, 1).max(1).values
        kept = (worst < 0.45) & (best > 0.05)
        score = torch.where(kept, best, torch.zeros_like(best))
        kind = torch.where(kept, kinds, torch.full_like(kinds, -1)).to(torch.float32)
        return torch.cat([boxes, score[:, :, None], kind[:, :, None]], dim=2)


def compute_overlaps(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the IoU (batch, n, m) of boxes (batch, n, 4) and (batch, m, 4)."""
    low = torch.maximum(first[:, :, None, :2], second[:, None, :, :2])
    high = torch.minimum(first[:, :, None, 2:], second[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(3)
    areas = [(boxes[:, :, 2:] - boxes[:, :, :2]).clamp(min=0).prod(2) for boxes in (first, second)]
    return shared / (areas[0][:, :, None] + areas[1][:, None, :] - shared + 1e-9)


def read_pixels(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the input of the net for rows of bytes, as the released file computes it."""
    images = []
    for row in rows:
        with Image.open(io.BytesIO(row.tobytes())) as image:
            resized = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        images.append(np.asarray(resized, np.float32).transpose(2, 0, 1))
    return torch.from_numpy((np.stack(images) / 255 - MEAN) / STD)


def build_targets(boxes: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cells with a shape, the boxes of the cells, and their classes."""
    count = len(boxes)
    has_shape = np.zeros((count, CELLS, CELLS), np.float32)
    corners = np.zeros((count, CELLS, CELLS, 4), np.float32)
    kinds = np.zeros((count, CELLS, CELLS), np.int64)
    for image, listed in enumerate(boxes):
        for x1, y1, x2, y2, kind in listed[listed[:, 4] >= 0]:
            column, row = (min(CELLS - 1, int(v / 2 * CELLS)) for v in (x1 + x2, y1 + y2))
            has_shape[image, row, column] = 1
            corners[image, row, column] = x1, y1, x2, y2
            kinds[image, row, column] = int(kind)
    return torch.from_numpy(has_shape), torch.from_numpy(corners), torch.from_numpy(kinds)


def fit(pixels: torch.Tensor, boxes: np.ndarray[Any, Any], *, epochs: int, seed: int) -> Net:
    """Fit the net."""
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    has_shape, corners, kinds = build_targets(boxes)
    net = Net()
    steps = epochs * (len(pixels) // 32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in np.array_split(order.permutation(len(pixels)), len(pixels) // 32):
            raw = net(pixels[rows])
            there = has_shape[rows] > 0
            found = decode_boxes(raw).unflatten(1, (CELLS, CELLS))[there]
            loss = functional.binary_cross_entropy_with_logits(
                raw[:, 0], has_shape[rows], pos_weight=torch.tensor(4.0)
            )
            loss = loss + 5 * functional.l1_loss(found, corners[rows][there])
            own, right = found[:, None], corners[rows][there][:, None]
            loss = loss + (1 - compute_overlaps(own, right)).mean()
            scores = raw[:, 5:].movedim(1, 3)[there]
            loss = loss + functional.cross_entropy(scores, kinds[rows][there])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def export(module: nn.Module, source: str, result: str, shape: Sequence[int]) -> Any:
    """Return the ONNX graph of a module with a free batch size."""
    program: Any = torch.onnx.export(
        module.eval(),
        (torch.zeros(2, *shape),),
        dynamo=True,
        opset_version=18,
        input_names=[source],
        output_names=[result],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},),
        verbose=False,
    )
    return program.model_proto


def train(data: Mapping[str, Dataset], *, epochs: int = 60, seed: int = 7) -> Any:
    """Fit the net on the set `train`; return the joined ONNX model."""
    rows = data["train"]
    net = fit(read_pixels(rows.inputs["image"]), np.asarray(rows.label), epochs=epochs, seed=seed)
    mean, std = [MEAN] * 3, [STD] * 3
    return join_graphs(
        [
            build_image_decoder(SIZE, SIZE, mean=mean, std=std),
            export(net, "pixels", "raw", (3, SIZE, SIZE)),
            export(Boxes(), "raw", "detections", (5 + len(CLASSES), CELLS, CELLS)),
        ]
    )


def score_detections(detections: np.ndarray[Any, Any], boxes: np.ndarray[Any, Any]) -> float:
    """Return F1 of the shapes of all images, at a score and an IoU of 0.5."""
    counted = (detections[:, :, 4] >= FOUND) & (detections[:, :, 5] >= 0)
    real = boxes[:, :, 4] >= 0
    overlaps = compute_overlaps(
        torch.from_numpy(np.asarray(detections[:, :, :4], np.float32)),
        torch.from_numpy(np.asarray(boxes[:, :, :4], np.float32)),
    ).numpy()
    match = (overlaps >= FOUND) & (detections[:, :, None, 5] == boxes[:, None, :, 4])
    match &= counted[:, :, None] & real[:, None, :]
    precision = match.any(2).sum() / max(1, counted.sum())
    recall = match.any(1).sum() / max(1, real.sum())
    return float(2 * precision * recall / max(1e-9, precision + recall))


if __name__ == "__main__":
    write_images(DATA / "shapes-train.npz", count=700, seed=1)
    write_images(DATA / "shapes-test.npz", count=200, seed=2)
    write_target()
