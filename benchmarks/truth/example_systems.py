"""The systems of two examples with known faults: drawn shapes and ticket texts.

Each world has fresh images or texts, and the model that the example trains. Faults and other
correct implementations are those of clients of these models.
"""

from __future__ import annotations

import csv
import functools
import random as python_random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from benchmarks.truth.systems import Step, World
from examples import drawn_shapes as shapes
from examples import ticket_texts as tickets
from onnx_ops.adapters.data.file import FileSource
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.domain.pipeline import Export, FileData
from onnx_ops.ports.export import ExportRequest
from onnx_ops.statistics.differences.resampling import resize as resize_exactly

ROOT = Path(__file__).parents[2]


# The following functions make the system for shapes, and alternative and faulty versions of its
# steps. The steps before the model are decode, letterbox and normalize. The steps after the model
# are boxes, threshold, suppress, limit and objects.


@functools.cache
def train_shapes() -> shapes.ShapeNet:
    """Return the network of the example."""
    return shapes.train_net()


def write_shapes(folder: Path, random: np.random.Generator, count: int) -> Path:
    """Write fresh images of shapes."""
    folder.mkdir(parents=True)
    for index in range(count):
        name = f"{index:03d}.{'png' if index % 3 == 0 else 'jpg'}"
        shapes.draw_image(random)[0].save(folder / name, quality=90)
    return folder


def make_letterbox(
    *,
    resample: Image.Resampling = Image.Resampling.BILINEAR,
    border: int = shapes.BORDER,
    is_centered: bool = False,
    size: int = shapes.SIZE,
) -> Step:
    """Return a letterbox of pixels in bytes."""

    def step(pixels: Any) -> Any:
        height, width = pixels.shape[:2]
        ratio = min(size / height, size / width)
        inner = (round(width * ratio), round(height * ratio))
        made = np.full((shapes.SIZE, shapes.SIZE, 3), border, np.uint8)
        free = (shapes.SIZE - inner[1], shapes.SIZE - inner[0])
        top, left = (side // 2 for side in free) if is_centered else (0, 0)
        small = np.asarray(Image.fromarray(pixels).resize(inner, resample))
        made[top : top + inner[1], left : left + inner[0]] = small
        return made

    return step


def make_exact_letterbox(name: str = "bilinear") -> Step:
    """Return a letterbox whose resize filter is computed in NumPy."""

    def step(pixels: Any) -> Any:
        height, width = pixels.shape[:2]
        ratio = min(shapes.SIZE / height, shapes.SIZE / width)
        inner = (round(height * ratio), round(width * ratio))
        made = np.full((shapes.SIZE, shapes.SIZE, 3), shapes.BORDER, np.float32)
        small = resize_exactly(pixels.astype(np.float64), inner, name)
        made[: inner[0], : inner[1]] = np.clip(small, 0, 255)
        return made

    return step


def stretch(pixels: Any) -> Any:
    side = (shapes.SIZE, shapes.SIZE)
    return np.asarray(Image.fromarray(pixels).resize(side, Image.Resampling.BILINEAR))


def crop(pixels: Any) -> Any:
    """Return the middle square of an image in the size of the network's input."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return stretch(pixels[top : top + side, left : left + side])


def make_shape_normalizer(
    *,
    divisor: float = 255.0,
    mean: Any = shapes.MEAN,
    deviation: Any = shapes.STD,
    order: tuple[int, ...] = (0, 1, 2),
    axes: tuple[int, ...] = (2, 0, 1),
    dtype: Any = np.float32,
) -> Step:
    """Return a normalization of pixels."""

    def step(pixels: Any) -> Any:
        values = np.asarray(pixels, dtype)[..., list(order)] / dtype(divisor)
        values = (values - np.asarray(mean, dtype)) / np.asarray(deviation, dtype)
        return np.ascontiguousarray(values.transpose(axes))[None].astype(np.float32)

    return step


def change_box_columns(change: Callable[[Any], Any]) -> Step:
    """Return the reading of boxes with other corners."""

    def step(raw: Any) -> Any:
        boxes = shapes.read_boxes(raw)
        return np.concatenate([change(boxes[:, :4]), boxes[:, 4:]], axis=1)

    return step


def read_boxes_in_loop(raw: Any) -> Any:
    """Read the boxes one after another, in float64."""
    output, places = np.asarray(raw, np.float64)[0], shapes.list_places()
    rows = []
    for index, (x, y) in enumerate(places):
        left, top, right, bottom = output[:4, index] * shapes.STRIDE
        scores = [1 / (1 + np.exp(-value)) for value in output[4:, index]]
        rows.append([x - left, y - top, x + right, y + bottom, *scores])
    return np.array(rows)


def read_logits(raw: Any) -> Any:
    boxes = shapes.read_boxes(raw)
    return np.concatenate([boxes[:, :4], np.asarray(raw)[0, 4:].T], axis=1)


def choose_in_loop(boxes: Any) -> Any:
    rows = [
        [*box[:4], score, kind]
        for box in boxes
        for kind, score in enumerate(box[4:])
        if score > shapes.MIN_SCORE
    ]
    return np.array(sorted(rows, key=lambda row: -row[4])).reshape(-1, 6)


def suppress_by_class(rows: Any) -> Any:
    """Suppress the boxes of each class separately."""
    parts = [shapes.suppress(rows[rows[:, 5] == kind]) for kind in range(len(shapes.SHAPES))]
    made = np.concatenate(parts)
    return made[np.argsort(-made[:, 4], kind="stable")]


def make_shapes(folder: Path, random: np.random.Generator, count: int) -> World:
    """Return the detector of the example, as a network with steps before and after it."""
    model = folder / "shapes.onnx"
    onnx.save(shapes.export_net(train_shapes()), model)

    def swap_names(rows: Any) -> list[dict[str, Any]]:
        swapped = dict(zip(shapes.SHAPES, (*shapes.SHAPES[1:], shapes.SHAPES[0]), strict=True))
        return [{**one, "name": swapped[one["name"]]} for one in shapes.list_objects(rows)]

    def change_objects(change: Callable[[list[float]], list[float]]) -> Step:
        return lambda rows: [
            {**one, "box": change(one["box"])} for one in shapes.list_objects(rows)
        ]

    sampling = Image.Resampling
    return World(
        name="shapes",
        predict=functools.partial(shapes.predict_by_steps, model=model),
        files=write_shapes(folder / "shapes", random, count),
        model=model,
        before={
            "decode": shapes.decode_file,
            "letterbox": shapes.letterbox,
            "normalize": shapes.normalize,
        },
        after={
            "boxes": shapes.read_boxes,
            "threshold": shapes.choose_boxes,
            "suppress": shapes.suppress,
            "limit": shapes.limit,
            "objects": shapes.list_objects,
        },
        alternatives={
            "decode": (lambda path: np.array(Image.open(path).convert("RGB")),),
            "letterbox": (make_letterbox(), make_exact_letterbox()),
            "normalize": (make_shape_normalizer(dtype=np.float64), make_shape_normalizer()),
            "boxes": (read_boxes_in_loop,),
            "threshold": (choose_in_loop,),
            "suppress": (suppress_by_class,),
        },
        faults=(
            ("decode", "BGR", lambda path: shapes.decode_file(path)[..., ::-1]),
            ("decode", "channel", lambda path: np.asarray(Image.open(path).convert("L"))),
            ("decode", "rotated", lambda path: np.rot90(shapes.decode_file(path))),
            ("decode", "flipped", lambda path: shapes.decode_file(path)[:, ::-1]),
            ("decode", "layout", lambda path: shapes.decode_file(path).transpose(2, 0, 1)),
            ("letterbox", "letterboxed", stretch),
            ("letterbox", "", crop),
            ("letterbox", "", make_letterbox(resample=sampling.NEAREST)),
            ("letterbox", "", make_letterbox(resample=sampling.BICUBIC)),
            ("letterbox", "", make_exact_letterbox("bilinear without antialiasing")),
            ("letterbox", "", make_letterbox(border=0)),
            ("letterbox", "", make_letterbox(is_centered=True)),
            ("letterbox", "", make_letterbox(size=88)),
            ("letterbox", "", lambda pixels: shapes.letterbox(pixels) / 255),
            ("normalize", "scale", make_shape_normalizer(divisor=1.0)),
            ("normalize", "", make_shape_normalizer(mean=(0, 0, 0))),
            ("normalize", "", make_shape_normalizer(deviation=(0.229, 0.224, 0.225))),
            ("normalize", "channel", make_shape_normalizer(order=(2, 1, 0))),
            ("normalize", "layout", make_shape_normalizer(axes=(0, 1, 2))),
            ("normalize", "mirrored", make_shape_normalizer(axes=(2, 1, 0))),
            ("boxes", "", change_box_columns(lambda b: np.c_[b[:, :2], b[:, 2:] - b[:, :2]])),
            ("boxes", "", change_box_columns(lambda b: b[:, [1, 0, 3, 2]])),
            ("boxes", "", change_box_columns(lambda b: b / 2)),
            ("boxes", "", read_logits),
            ("threshold", "threshold", lambda boxes: shapes.choose_boxes(boxes, 0.8)),
            ("threshold", "threshold", lambda boxes: shapes.choose_boxes(boxes, 0.1)),
            ("suppress", "suppression", lambda rows: rows),
            ("suppress", "suppression", lambda rows: shapes.suppress(rows, 0.95)),
            ("limit", "limit", lambda rows: rows[:1]),
            ("objects", "label map", swap_names),
            (
                "objects",
                "box format",
                change_objects(lambda b: [b[0], b[1], b[2] - b[0], b[3] - b[1]]),
            ),
            (
                "objects",
                "box coordinates",
                change_objects(lambda b: [side / shapes.SIZE for side in b]),
            ),
        ),
    )


# The following functions make the system for tickets: its data, its model, and changed versions of
# its steps. The step `input` runs before the model, and `team` after it.


def write_new_tickets(path: Path, random: np.random.Generator, count: int) -> Path:
    """Write fresh tickets as a CSV file."""
    draw = python_random.Random(int(random.integers(1 << 30)))  # noqa: S311 (to be repeatable)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("text", "team"))
        rows.writerows(tickets.make_ticket(draw) for _ in range(count))
    return path


def export_tickets(path: Path, model: Any) -> Path:
    """Export an estimator of tickets."""
    data = FileSource().load(FileData(file="examples/data/tickets-test.csv"), ROOT)
    SklearnExporter().export(
        model,
        ExportRequest(
            section=Export(framework="sklearn"), samples={"text": data["text"]}, path=path
        ),
    )
    return path


def fit_other(**options: Any) -> Any:
    """Return an estimator with another tokenizer."""
    with (tickets.DATA / "tickets-train.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    model = make_pipeline(TfidfVectorizer(**options), LogisticRegression(C=10.0))
    return model.fit([row["text"] for row in rows], [row["team"] for row in rows])


def change_text(change: Callable[[str], str]) -> Step:
    """Return the reading of a ticket with another text."""
    return lambda ticket: tickets.read_text({"text": change(ticket["text"])})


def strip_accents(text: str) -> str:
    parts = unicodedata.normalize("NFKD", text)
    return "".join(part for part in parts if not unicodedata.combining(part))


def make_namer(names: list[str]) -> Step:
    return lambda answer: names[int(np.argmax(answer["probabilities"]))]


def name_second_team(answer: Any) -> str:
    """Return the team with the second highest probability."""
    return sorted(tickets.PHRASES)[int(np.argsort(np.ravel(answer["probabilities"]))[-2])]


def make_tickets(folder: Path, random: np.random.Generator, count: int) -> World:
    """Return the classifier of the example, with its tokenizer in the model's file."""
    teams = sorted(tickets.PHRASES)
    return World(
        name="tickets",
        predict=tickets.predict,
        files=write_new_tickets(folder / "tickets.csv", random, count),
        model=export_tickets(folder / "tickets.onnx", tickets.load_model()),
        before={"input": tickets.read_text},
        after={"team": tickets.name_team},
        alternatives={
            "input": (
                lambda ticket: np.array([[str(ticket["text"])]]),
                lambda ticket: np.array([ticket["text"]], dtype=object)[:, None],
            ),
            "team": (
                lambda answer: str(np.asarray(answer["label"]).reshape(-1)[0]),
                lambda answer: max(zip(np.ravel(answer["probabilities"]), teams, strict=True))[1],
            ),
        },
        faults=(
            ("input", "case", change_text(str.lower)),
            ("input", "", change_text(lambda text: text[:30])),
            ("input", "", change_text(lambda text: " ".join(text.split()[:6]))),
            ("input", "", change_text(lambda text: text.replace(",", "").replace(".", ""))),
            ("input", "accents", change_text(strip_accents)),
            ("input", "encoding", change_text(lambda text: text.encode().decode("latin-1"))),
            ("input", "white space", change_text(lambda text: f" {text}\n")),
            ("input", "", lambda ticket: tickets.read_text({"text": ticket["team"]})),
            ("team", "label map", make_namer(teams[::-1])),
            ("team", "label map", make_namer(teams[1:] + teams[:1])),
            ("team", "case", lambda answer: tickets.name_team(answer).title()),
            ("team", "", name_second_team),
            ("team", "", lambda answer: teams[int(np.argmin(answer["probabilities"]))]),
        ),
        models={
            "lower-casing": export_tickets(folder / "cased.onnx", fit_other(lowercase=False)),
            "word pairs": export_tickets(folder / "single.onnx", fit_other()),
        },
    )


EXAMPLE_WORLDS = (make_shapes, make_tickets)
