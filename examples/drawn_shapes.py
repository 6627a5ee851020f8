"""Detection of circles, squares and triangles in drawn images.

The released file contains the image decoder: it takes PNG and JPEG files, and returns boxes in
pixels of the image. It joins the decoder, a network trained with PyTorch, and the choice of boxes.
`predict` is the project's own code, with which a release is compared: it decodes with Pillow and
runs the network in PyTorch.

    onnx-ops run configs/pipelines/drawn-shapes.yaml

`python -m examples.drawn_shapes` draws the test images below `examples/data` again.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import parser
from PIL import Image, ImageDraw, ImageFilter
from torch import nn

from onnx_ops import build_image_decoder, join_graphs, record_step

DATA = Path(__file__).parent / "data"
SHAPES = ("circle", "square", "triangle")
SIZE, STRIDE = 96, 8
"""Side of the network's input, and distance of the places of its grid, in pixels."""

BORDER = 114
"""Level of the border of an image that is not square."""

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
MIN_SCORE, MAX_OVERLAP, MAX_BOXES = 0.35, 0.4, 20
MIN_LOGIT = math.log(MIN_SCORE / (1 - MIN_SCORE))
OPSET = 18

Boxes = list[list[float]]


def draw_image(random: np.random.Generator) -> tuple[Image.Image, Boxes]:
    """Return an image with one to three shapes, and the box and class of each of them."""
    width, height = (int(side) for side in random.integers(80, 129, 2))
    ramp = np.linspace(0, 1, width)[None, :, None] * random.uniform(-60, 60, 3)
    ramp = ramp + np.linspace(0, 1, height)[:, None, None] * random.uniform(-60, 60, 3)
    base = random.uniform(70, 185, 3)
    noise = random.normal(0, 8, (height // 4 + 1, width // 4 + 1, 3))
    grain = np.kron(noise, np.ones((4, 4, 1)))[:height, :width]
    pixels = np.clip(base + ramp + grain, 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    boxes: Boxes = []
    for _ in range(40):
        if len(boxes) == int(width * height) % 3 + 1:
            break
        side = int(random.integers(24, 49))
        x = int(random.integers(2, width - side - 2))
        y = int(random.integers(2, height - side - 2))
        box = [float(x), float(y), float(x + side), float(y + side)]
        if all(compute_overlap(box, other) == 0 for other in boxes):
            kind = int(random.integers(len(SHAPES)))
            color = (base + 127) % 255 + random.uniform(-25, 25, 3)
            _draw_shape(image, SHAPES[kind], box, tuple(int(c) for c in np.clip(color, 0, 255)))
            boxes.append([*box, float(kind)])
    return image.filter(ImageFilter.GaussianBlur(0.6)), boxes


def _draw_shape(image: Image.Image, shape: str, box: list[float], color: tuple[int, ...]) -> None:
    drawing = ImageDraw.Draw(image)
    x1, y1, x2, y2 = box
    if shape == "circle":
        drawing.ellipse(box, fill=color)
    elif shape == "square":
        drawing.rectangle(box, fill=color)
    else:
        drawing.polygon([((x1 + x2) / 2, y1), (x2, y2), (x1, y2)], fill=color)


def write_images(folder: Path, count: int = 96) -> None:
    """Write the test images, and their boxes in the format of COCO."""
    place = folder / "shapes"
    place.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(2)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(count):
        image, boxes = draw_image(random)
        name = f"{number:03d}.{'png' if number % 8 == 0 else 'jpg'}"
        image.save(place / name, quality=88, subsampling=0)
        images.append(
            {"id": number, "file_name": name, "width": image.width, "height": image.height}
        )
        annotations += [
            {
                "id": len(annotations) + place_in_image,
                "image_id": number,
                "category_id": int(kind),
                "bbox": [x1, y1, x2 - x1, y2 - y1],
            }
            for place_in_image, (x1, y1, x2, y2, kind) in enumerate(boxes)
        ]
    categories = [{"id": number, "name": name} for number, name in enumerate(SHAPES)]
    document = {"images": images, "categories": categories, "annotations": annotations}
    (folder / "shapes.json").write_text(json.dumps(document) + "\n", encoding="utf-8")


class ShapeNet(nn.Module):
    """A network that predicts a box and class scores at each place of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.ReLU(),
            # Dilation lets a place see the whole of a large shape.
            nn.Conv2d(64, 64, 3, padding=2, dilation=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=2, dilation=2),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(64, 4 + len(SHAPES), 1)
        with torch.no_grad():
            self.head.bias[4:] = -3.0  # type: ignore[index]  # most places have no shape

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape (batch, 7, places).

        The rows are the distances from the place to the sides of the box, in strides, and the
        scores before the sigmoid.
        """
        made: torch.Tensor = self.head(self.layers(pixels)).flatten(2)
        return made


def list_places() -> Any:
    """Return the places of the grid in pixels of the input, of shape (places, 2)."""
    side = SIZE // STRIDE
    rows, columns = np.divmod(np.arange(side * side), side)
    return (np.stack([columns, rows], axis=1).astype(np.float32) + 0.5) * STRIDE


def train(*, images: int = 640, epochs: int = 20, lr: float = 0.0025, seed: int = 5) -> Any:
    """Draw images, fit the network, and return the graph that will be released.

    The test images have another seed. The same seed gives the same weights on the same machine.
    """
    return build_model(train_net(images=images, epochs=epochs, lr=lr, seed=seed))


def train_net(
    *, images: int = 640, epochs: int = 20, lr: float = 0.0025, seed: int = 5
) -> ShapeNet:
    """Return the fitted network."""
    torch.manual_seed(seed)
    random = np.random.default_rng([seed, 1])
    drawn = [draw_image(random) for _ in range(images)]
    pixels = torch.from_numpy(
        np.concatenate([normalize(letterbox(np.asarray(image))) for image, _ in drawn])
    )
    targets = [_make_target(boxes, image.size) for image, boxes in drawn]
    distances, classes = (torch.from_numpy(np.stack(part)) for part in zip(*targets, strict=True))
    net = ShapeNet()
    steps = epochs * math.ceil(images / 32)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr * 2, total_steps=steps)
    for _ in range(epochs):
        for rows in np.array_split(random.permutation(images), math.ceil(images / 32)):
            optimizer.zero_grad()
            _compute_loss(net(pixels[rows]), distances[rows], classes[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def _make_target(boxes: Boxes, size: tuple[int, int]) -> tuple[Any, Any]:
    """Return the distances and the classes that the network must learn.

    Their shapes are (places, 4) and (places, 3). A place predicts the box whose middle is within a
    stride of it.
    """
    places = list_places()
    distances = np.zeros((len(places), 4), np.float32)
    classes = np.zeros((len(places), len(SHAPES)), np.float32)
    ratio = min(SIZE / size[0], SIZE / size[1])
    for *corners, kind in boxes:
        box = np.array(corners, np.float32) * ratio
        middle = (box[:2] + box[2:]) / 2
        near = np.abs(places - middle).max(axis=1) <= STRIDE
        distances[near] = np.concatenate([places[near] - box[:2], box[2:] - places[near]], 1)
        classes[near, int(kind)] = 1
    return distances / STRIDE, classes


def _compute_loss(made: torch.Tensor, distances: torch.Tensor, classes: torch.Tensor) -> Any:
    scores, sides = made[:, 4:].transpose(1, 2), made[:, :4].transpose(1, 2)
    is_box = classes.amax(dim=2)
    by_class = nn.functional.binary_cross_entropy_with_logits(scores, classes, reduction="sum")
    by_side = (nn.functional.smooth_l1_loss(sides, distances, reduction="none").sum(2)) * is_box
    return (2 * by_class + by_side.sum()) / is_box.sum().clamp(min=1)


_CHOICE = f"""
<ir_version: 10, opset_import: ["" : {OPSET}]>
choose_boxes (float[batch, 7, 144] raw, float[batch, 2] size)
    => (float[batch, {MAX_BOXES}, 6] detections)
{{
    detections = Scan <num_scan_inputs = 2, body = row
    (float[7, 144] raw_row, float[2] size_row) => (float[{MAX_BOXES}, 6] chosen)
    <float[2, 144] places, int64[1] none = {{0}}, int64[1] two = {{2}}, int64[1] four = {{4}},
     int64[1] all = {{9223372036854775807}}, int64[1] first = {{1}}, int64[1] last = {{3}},
     float[1] stride = {{{STRIDE}.0}}, float[1] side = {{{SIZE}.0}}, float[1] zero = {{0.0}},
     int64[1] most = {{{MAX_BOXES}}}, float overlap = {{{MAX_OVERLAP}}},
     float least = {{{MIN_LOGIT:.8f}}}, int64 score = {{4}}, int64 left = {{0}},
     float[{MAX_BOXES}, 6] blank>
    {{
        near = Slice (raw_row, none, two, none)
        far = Slice (raw_row, two, four, none)
        logits = Slice (raw_row, four, all, none)
        near_pixels = Mul (near, stride)
        far_pixels = Mul (far, stride)
        low = Sub (places, near_pixels)
        high = Add (places, far_pixels)
        corners = Concat <axis = 0> (low, high)
        boxes = Transpose <perm = [1, 0]> (corners)
        scores = Sigmoid (logits)
        box_batch = Unsqueeze (boxes, none)
        logit_batch = Unsqueeze (logits, none)
        selected = NonMaxSuppression (box_batch, logit_batch, most, overlap, least)
        pairs = Slice (selected, first, last, first)
        kinds = Slice (selected, first, two, first)
        numbers = Slice (selected, two, last, first)
        best = GatherND (scores, pairs)
        best_column = Unsqueeze (best, first)
        box_numbers = Squeeze (numbers, first)
        best_boxes = Gather <axis = 0> (boxes, box_numbers)
        ratios = Div (side, size_row)
        ratio = ReduceMin <keepdims = 1> (ratios)
        in_image = Div (best_boxes, ratio)
        height = Slice (size_row, none, first, none)
        width = Slice (size_row, first, two, none)
        limits = Concat <axis = 0> (width, height, width, height)
        above = Max (in_image, zero)
        inside = Min (above, limits)
        classes = Cast <to = 1> (kinds)
        found = Concat <axis = 1> (inside, best_column, classes)
        padded = Concat <axis = 0> (found, blank)
        order_scores = Gather <axis = 1> (padded, score)
        top_scores, top = TopK <axis = 0> (order_scores, most)
        kept = Gather <axis = 0> (padded, top)
        lefts = Gather <axis = 1> (kept, left)
        sorted_lefts, order = TopK <axis = 0> (lefts, most)
        chosen = Gather <axis = 0> (kept, order)
    }}> (raw, size)
}}
"""
"""Boxes of each image: corners in pixels, score and class.

Rows without a box have the class -1. Boxes are ordered by their left side, from right to left:
nearly equal scores cannot swap two rows. Suppression ranks the boxes by their scores before the
sigmoid: near 1, different scores are equal after it, and rounding would choose the box.
"""


def build_choice() -> onnx.ModelProto:
    """Return the graph from the network's output to boxes in pixels of the image."""
    from onnx import numpy_helper

    model = parser.parse_model(_CHOICE)
    (scan,) = model.graph.node
    (body,) = (attribute.g for attribute in scan.attribute if attribute.name == "body")
    blank = np.zeros((MAX_BOXES, 6), np.float32)
    blank[:, 5] = -1
    known = {"places": np.ascontiguousarray(list_places().T), "blank": blank}
    for tensor in list(body.initializer):
        if tensor.name in known:
            body.initializer.remove(tensor)
    body.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
    return model


def export_net(net: ShapeNet) -> onnx.ModelProto:
    """Return the network as a graph from `pixels` to `raw`."""
    made = torch.onnx.export(
        net,
        (torch.zeros(2, 3, SIZE, SIZE),),
        dynamo=True,
        opset_version=OPSET,
        input_names=["pixels"],
        output_names=["raw"],
        dynamic_shapes={"pixels": {0: "batch"}},
        verbose=False,
    )
    model: onnx.ModelProto = made.model_proto  # type: ignore[union-attr]
    model.ir_version = 10
    return model


def build_decoder() -> onnx.ModelProto:
    """Return the graph from image files to the network's input and the images' sizes."""
    return build_image_decoder(
        SIZE, SIZE, mean=MEAN, std=STD, letterbox=BORDER, size_output="size", opset=OPSET
    )


def build_model(net: ShapeNet) -> onnx.ModelProto:
    """Return the graph that is released: image files to boxes."""
    return join_graphs([build_decoder(), export_net(net), build_choice()])


# The following functions are the project's own code, which runs the network in torch.


@functools.lru_cache(maxsize=4)
def load_net(model: Path | None) -> ShapeNet:
    """Return the network with the weights of a released file; train it without one."""
    if model is None:
        return train_net()
    from onnx import numpy_helper

    # Joining puts a prefix before the names of the parameters.
    tensors = {
        tensor.name.rpartition("/")[2]: torch.from_numpy(numpy_helper.to_array(tensor).copy())
        for tensor in onnx.load(model).graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    net = ShapeNet()
    net.load_state_dict({name: tensors[name] for name in net.state_dict()})
    return net.eval()


def read_file(path: str) -> Any:
    """Return the bytes of an image file, as the released file takes them."""
    return np.frombuffer(Path(path).read_bytes(), np.uint8)[None]


def decode(encoded: Any) -> Any:
    """Return the pixels of an image file in RGB."""
    with Image.open(io.BytesIO(encoded.tobytes())) as image:
        return np.asarray(image.convert("RGB"))


def decode_file(path: str) -> Any:
    """Return the pixels of an image file in RGB."""
    return decode(read_file(path))


def letterbox(pixels: Any) -> Any:
    """Return an image in the network's size, with a border at the right or bottom.

    The pixels are floats.
    """
    height, width = pixels.shape[:2]
    ratio = min(SIZE / height, SIZE / width)
    inner = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    made = np.full((SIZE, SIZE, 3), BORDER, np.float32)
    for channel in range(3):
        plane = Image.fromarray(pixels[..., channel].astype(np.float32))
        small = plane.resize(inner, Image.Resampling.BILINEAR)
        made[: inner[1], : inner[0], channel] = np.asarray(small)
    return made


def normalize(pixels: Any) -> Any:
    """Return the network's input, shape (1, 3, size, size)."""
    mean, deviation = (np.array(part, np.float32) for part in (MEAN, STD))
    values = (np.asarray(pixels, np.float32) / 255 - mean) / deviation
    return np.ascontiguousarray(values.transpose(2, 0, 1))[None]


def run_net(net: ShapeNet, x: Any) -> Any:
    """Return the network's output."""
    with torch.no_grad():
        return net(torch.from_numpy(x)).numpy()


def read_boxes(raw: Any) -> Any:
    """Return corners in pixels of the network's input, and the score of each class.

    The scores are in float64: near 1, different scores can be equal in float32.
    """
    sides = np.asarray(raw)[0, :4].T * STRIDE
    places = list_places()
    scores = 1 / (1 + np.exp(-np.asarray(raw)[0, 4:].T.astype(np.float64)))
    corners = np.concatenate([places - sides[:, :2], places + sides[:, 2:]], axis=1)
    return np.concatenate([corners, scores], axis=1)


def choose_boxes(boxes: Any, least: float = MIN_SCORE) -> Any:
    """Return corners, score and class of each sufficient score, best first."""
    place, kind = np.nonzero(boxes[:, 4:] > least)
    scores = boxes[place, 4 + kind]
    rows = np.column_stack([boxes[place, :4], scores, kind])
    return rows[np.argsort(-scores, kind="stable")]


def suppress(rows: Any, most: float = MAX_OVERLAP) -> Any:
    """Return the rows without those that overlap a better row of their class."""
    chosen: list[Any] = []
    for row in rows:
        if all(row[5] != c[5] or compute_overlap(row[:4], c[:4]) <= most for c in chosen):
            chosen.append(row)
    return np.array(chosen, np.float64).reshape(-1, 6)


def limit(rows: Any) -> Any:
    """Return the best rows."""
    return rows[:MAX_BOXES]


def compute_overlap(one: Any, other: Any) -> float:
    """Return the intersection of two boxes, divided by their union."""
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:4], other[2:4])
    common = float(np.prod(np.clip(high - low, 0, None)))
    areas = [float((box[2] - box[0]) * (box[3] - box[1])) for box in (one, other)]
    return common / (sum(areas) - common)


def place_boxes(rows: Any, size: tuple[int, int]) -> Any:
    """Return the best boxes in pixels of the image of this height and width, padded.

    Boxes are ordered by their left side, from right to left.
    """
    ratio = min(SIZE / side for side in size)
    made = np.zeros((1, MAX_BOXES, 6), np.float32)
    made[..., 5] = -1
    best = limit(rows).copy()
    best[:, :4] = np.clip(best[:, :4] / ratio, 0, [size[1], size[0]] * 2)
    made[0, : len(best)] = best
    return made[:, np.argsort(-made[0, :, 0], kind="stable")]


def list_objects(detections: Any) -> list[dict[str, Any]]:
    """Return the name, the box and the score of each object."""
    if isinstance(detections, Mapping):
        detections = detections["detections"]
    return [
        {
            "name": SHAPES[int(row[5])],
            "box": [float(side) for side in row[:4]],
            "score": float(row[4]),
        }
        for row in np.asarray(detections).reshape(-1, 6)
        if row[5] >= 0
    ]


def predict(path: str, model: Path | None = None) -> list[dict[str, Any]]:
    """Return the objects of an image file.

    Args:
        model: the file that the run trained, whose weights the network gets.
    """
    encoded = record_step("input", read_file(path))
    pixels = decode(encoded)
    raw = run_net(load_net(model), normalize(letterbox(pixels)))
    rows = suppress(choose_boxes(read_boxes(raw)))
    detections = record_step("output", place_boxes(rows, pixels.shape[:2]))
    return list_objects(detections)


def predict_by_steps(path: str, model: Path | None = None) -> list[dict[str, Any]]:
    """Return the objects of an image file, for clients that deploy the network alone.

    Boxes are in pixels of the network's input.
    """
    pixels = record_step("decode", decode_file(path))
    x = record_step("normalize", normalize(record_step("letterbox", letterbox(pixels))))
    boxes = record_step("boxes", read_boxes(record_step("output", run_net(load_net(model), x))))
    rows = record_step("suppress", suppress(record_step("threshold", choose_boxes(boxes))))
    return list_objects(record_step("limit", limit(rows)))


if __name__ == "__main__":
    write_images(DATA)
