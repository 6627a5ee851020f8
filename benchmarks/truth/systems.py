"""Made systems with known faults: pictures, objects, texts and sounds.

Each world has the project's own code, raw files, a small model, and the steps of the deployed
system. A variant of the steps is either another correct implementation or has one fault.
"""

from __future__ import annotations

import io
import json
import re
import struct
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from PIL import Image, ImageDraw, ImageFilter

from onnx_ops import record_step
from onnx_ops.measure.system_parity import System, SystemStep
from onnx_ops.statistics.differences.resampling import resize as resize_exactly

Step = Callable[[Any], Any]

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
LABELS = ("circle", "square", "ring", "star")


@dataclass(frozen=True, kw_only=True)
class World:
    """One system: its own code, files, and steps by name, before and after the model."""

    name: str
    predict: Step
    files: Path
    model: Path
    before: Mapping[str, Step]
    after: Mapping[str, Step]
    alternatives: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    faults: tuple[tuple[str, str, Step], ...] = ()
    """Faults: the step, words of the right explanation, and the wrong step."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Models with a fault inside, by its description."""

    def build(self, changes: Mapping[str, Step]) -> System:
        """Return the system with some of its steps replaced."""

        def make(steps: Mapping[str, Step]) -> tuple[SystemStep, ...]:
            return tuple(
                SystemStep(name=name, reference=f"steps:{name}", function=changes.get(name, step))
                for name, step in steps.items()
            )

        return System(
            predict=self.predict,
            reference="project:predict",
            candidate=self.model,
            before=make(self.before),
            after=make(self.after),
        )


def draw_picture(random: np.random.Generator) -> Image.Image:
    """Return a picture of shapes on a smooth and slightly grainy background."""
    width, height = (int(size) for size in random.integers(70, 160, 2))
    width += width == height
    ramp = np.linspace(0, 1, width)[None, :, None] * random.uniform(-80, 80, 3)
    ramp = ramp + np.linspace(0, 1, height)[:, None, None] * random.uniform(-80, 80, 3)
    # Pictures are brighter in red than in blue, as skin and soil are.
    pixels = ramp + np.array([150, 120, 95]) + random.normal(0, 6, (height, width, 3))
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    drawing = ImageDraw.Draw(picture)
    for _ in range(int(random.integers(4, 9))):
        x, y = random.uniform(0, width * 0.8), random.uniform(0, height * 0.8)
        w, h = random.uniform(8, width * 0.4), random.uniform(8, height * 0.4)
        color = tuple(int(part) for part in random.integers(0, 256, 3))
        draw = drawing.ellipse if random.random() < 0.5 else drawing.rectangle
        draw((x, y, x + w, y + h), fill=color)
    return picture.filter(ImageFilter.GaussianBlur(0.7))


def write_pictures(folder: Path, random: np.random.Generator, count: int) -> Path:
    """Write JPEG and PNG files of made pictures."""
    folder.mkdir(parents=True)
    for index in range(count):
        picture = draw_picture(random)
        if index % 3 == 2:
            picture.save(folder / f"{index:03d}.png")
        else:
            quality = int(random.integers(75, 96))
            picture.save(folder / f"{index:03d}.jpg", quality=quality, subsampling=2)
    return folder


def write_model(path: Path, text: str, weights: Mapping[str, Any]) -> Path:
    """Write a model from its text, with weights."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


# The following functions make the system for pictures, and alternative and faulty versions of its
# steps. The steps before the model are decode, resize and normalize. The steps after the model are
# softmax and label.


def decode(path: str) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def decode_plainly(path: str) -> Any:
    """Decode as libraries do that repeat the colors of a JPEG file, without smoothing."""
    with Image.open(path) as picture:
        if picture.format != "JPEG":
            return np.asarray(picture.convert("RGB"))
        picture.draft("YCbCr", picture.size)
        planes = np.asarray(picture).astype(np.float64)
    height, width = planes.shape[:2]
    padded = np.pad(planes, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    for channel in (1, 2):
        blocks = padded[..., channel].reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2)
        small = blocks.mean(axis=(1, 3))
        padded[..., channel] = np.repeat(np.repeat(small, 2, axis=0), 2, axis=1)
    y, cb, cr = np.moveaxis(padded[:height, :width], 2, 0)
    red, blue = y + 1.402 * (cr - 128), y + 1.772 * (cb - 128)
    green = y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128)
    return np.clip(np.round(np.stack([red, green, blue], axis=2)), 0, 255).astype(np.uint8)


def decode_coarsely(path: str) -> Any:
    """Decode as with an integer cosine transform: some levels differ by one.

    The differences are random, and only in lossy files.
    """
    pixels = decode(path).astype(np.int16)
    random = np.random.default_rng(pixels.size)
    change = random.choice([-1, 0, 1], size=pixels.shape, p=[0.1, 0.8, 0.1])
    lossy = not path.endswith(".png")
    return np.clip(pixels + lossy * change, 0, 255).astype(np.uint8)


def make_resizer(size: int, resample: Image.Resampling) -> Step:
    return lambda pixels: np.asarray(Image.fromarray(pixels).resize((size, size), resample))


def make_exact_resizer(size: int, name: str, finish: Step) -> Step:
    def step(pixels: Any) -> Any:
        return finish(
            np.clip(resize_exactly(pixels.astype(np.float64), (size, size), name), 0, 255)
        )

    return step


def round_levels(pixels: Any) -> Any:
    return np.round(pixels).astype(np.uint8)


def truncate_levels(pixels: Any) -> Any:
    return pixels.astype(np.uint8)


def keep_floats(pixels: Any) -> Any:
    return pixels.astype(np.float32)


def make_normalizer(
    *,
    divisor: float = 255.0,
    mean: Any = MEAN,
    deviation: Any = DEVIATION,
    dtype: Any = np.float32,
    order: tuple[int, ...] = (0, 1, 2),
    axes: tuple[int, ...] = (2, 0, 1),
) -> Step:
    def step(pixels: Any) -> Any:
        values = np.asarray(pixels)[..., list(order)].astype(dtype) / dtype(divisor)
        values = (values - mean.astype(dtype)) / deviation.astype(dtype)
        return np.ascontiguousarray(values.transpose(axes))[None]

    return step


def normalize_levels(pixels: Any) -> Any:
    """Normalize with mean and deviation in levels."""
    values = (np.asarray(pixels, dtype=np.float32) - 255 * MEAN) / (255 * DEVIATION)
    return values.transpose(2, 0, 1)[None].astype(np.float32)


def letterbox(pixels: Any, size: int = 32, color: int = 114) -> Any:
    height, width = pixels.shape[:2]
    ratio = size / max(height, width)
    inner = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    small = np.asarray(Image.fromarray(pixels).resize(inner, Image.Resampling.BILINEAR))
    made = np.full((size, size, 3), color, np.uint8)
    top, left = (size - inner[1]) // 2, (size - inner[0]) // 2
    made[top : top + inner[1], left : left + inner[0]] = small
    return made


def crop_after_resize(pixels: Any, size: int = 32) -> Any:
    return center_crop(np.asarray(Image.fromarray(pixels).resize((size + 8, size + 8), 2)), size)


def center_crop(pixels: Any, size: int, *, shift: int = 0) -> Any:
    top = (pixels.shape[0] - size) // 2 + shift
    left = (pixels.shape[1] - size) // 2 + shift
    return pixels[top : top + size, left : left + size]


def softmax(scores: Any, dtype: Any = np.float32) -> Any:
    values = np.exp(np.asarray(scores, dtype) - np.max(scores, axis=-1, keepdims=True))
    return values / values.sum(axis=-1, keepdims=True)


def softmax_plainly(scores: Any) -> Any:
    values = np.exp(np.asarray(scores, np.float64))
    return (values / values.sum()).astype(np.float32)


def name_label(probabilities: Any) -> str:
    return LABELS[int(np.argmax(probabilities))]


def make_labeler(labels: tuple[str, ...]) -> Step:
    return lambda probabilities: labels[int(np.asarray(probabilities).reshape(-1).argmax())]


def make_pictures(folder: Path, random: np.random.Generator, count: int) -> World:
    """Return a classifier of pictures."""
    size = 32
    resize = make_resizer(size, Image.Resampling.BILINEAR)
    normalize = make_normalizer()
    weights = random.normal(0, 1.5, (4, 3, 8, 8)).astype(np.float32)
    model = write_model(
        folder / "pictures.onnx",
        "g (float[N,3,32,32] x) => (float[N,4] y) { a = Conv<strides=[8,8]>(x, w)\n"
        "b = Relu(a)\n c = GlobalAveragePool(b)\n y = Flatten(c) }",
        {"w": weights * 0.2},
    )

    def predict(path: str) -> Any:
        pixels = record_step("decode", decode(path))
        small = record_step("resize", resize(pixels))
        x = record_step("normalize", normalize(small))
        y = record_step("output", run_picture_model(x, weights * 0.2))
        probabilities = record_step("softmax", softmax(y))
        return record_step("label", name_label(probabilities))

    sampling = Image.Resampling
    swapped = (LABELS[1], LABELS[0], *LABELS[2:])
    return World(
        name="pictures",
        predict=predict,
        files=write_pictures(folder / "pictures", random, count),
        model=model,
        before={"decode": decode, "resize": resize, "normalize": normalize},
        after={"softmax": softmax, "label": name_label},
        alternatives={
            "decode": (decode_plainly, decode_coarsely),
            "resize": tuple(
                make_exact_resizer(size, "bilinear", finish)
                for finish in (round_levels, truncate_levels, keep_floats)
            ),
            "normalize": (make_normalizer(dtype=np.float64), normalize_levels),
            "softmax": (lambda y: softmax(y, np.float64), softmax_plainly),
            "label": (make_labeler(LABELS),),
        },
        faults=(
            ("decode", "BGR", lambda path: decode(path)[..., ::-1]),
            ("decode", "channel", lambda path: np.asarray(Image.open(path).convert("L"))),
            ("decode", "rotated", lambda path: decode(path)[::-1, ::-1]),
            ("decode", "rotated", lambda path: np.rot90(decode(path))),
            ("decode", "flipped", lambda path: decode(path)[:, ::-1]),
            ("decode", "scale", lambda path: decode(path).astype(np.float32) / 255),
            ("decode", "layout", lambda path: decode(path).transpose(2, 0, 1)),
            ("resize", "filter", make_resizer(size, sampling.NEAREST)),
            ("resize", "filter", make_resizer(size, sampling.BICUBIC)),
            ("resize", "filter", make_resizer(size, sampling.LANCZOS)),
            ("resize", "filter", make_resizer(size, sampling.BOX)),
            (
                "resize",
                "antialiasing",
                make_exact_resizer(size, "bilinear without antialiasing", round_levels),
            ),
            ("resize", "letterboxed", letterbox),
            ("resize", "", crop_after_resize),
            ("resize", "size", make_resizer(size - 4, sampling.BILINEAR)),
            ("normalize", "scale", make_normalizer(divisor=1.0)),
            ("normalize", "", make_normalizer(divisor=256.0)),
            ("normalize", "mean", make_normalizer(mean=MEAN[::-1], deviation=DEVIATION[::-1])),
            (
                "normalize",
                "",
                make_normalizer(mean=np.full(3, 0.5), deviation=np.full(3, 0.5)),
            ),
            ("normalize", "channel", make_normalizer(order=(2, 1, 0))),
            ("normalize", "layout", make_normalizer(axes=(0, 1, 2))),
            ("normalize", "mirrored", make_normalizer(axes=(2, 1, 0))),
            ("softmax", "softmax", lambda y: y),
            ("softmax", "", lambda y: 1 / (1 + np.exp(-y))),
            ("label", "label map", make_labeler(swapped)),
            ("label", "label map", make_labeler(LABELS[1:] + LABELS[:1])),
        ),
    )


def run_picture_model(x: Any, weights: Any) -> Any:
    """Return what the model of pictures computes; the sums are in float64."""
    blocks = np.asarray(x, np.float64).reshape(-1, 3, 4, 8, 4, 8)
    scores = np.einsum("ncihjw,kchw->nkij", blocks, weights.astype(np.float64))
    return np.maximum(scores, 0).mean(axis=(2, 3)).astype(np.float32)


# The following functions make the system for objects, and alternative and faulty versions of its
# steps. The steps before the model are decode, letterbox and scale. The steps after the model are
# boxes, threshold, suppress, limit and objects.


def choose_boxes(rows: Any, threshold: float = 0.35) -> Any:
    order = np.argsort(-rows[:, 4], kind="stable")
    return rows[order][rows[order, 4] >= threshold]


def suppress(rows: Any, limit: float = 0.5) -> Any:
    kept: list[int] = []
    for index in range(len(rows)):
        if all(compute_overlap(rows[index], rows[other]) <= limit for other in kept):
            kept.append(index)
    return rows[kept]


def suppress_by_matrix(rows: Any, limit: float = 0.5) -> Any:
    """Suppress with all overlaps in one matrix."""
    if not len(rows):
        return rows
    overlaps = np.array([[compute_overlap(a, b) for b in rows] for a in rows])
    kept = np.ones(len(rows), bool)
    for index in range(len(rows)):
        if kept[index]:
            kept[index + 1 :] &= overlaps[index, index + 1 :] <= limit
    return rows[kept]


def compute_overlap(a: Any, b: Any) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:4], b[2:4])
    common = float(np.prod(np.clip(high - low, 0, None)))
    union = float(np.prod(a[2:4] - a[:2]) + np.prod(b[2:4] - b[:2])) - common
    return common / union


def read_boxes(output: Any, dtype: Any = np.float32) -> Any:
    """Return corners, score and class of each of the model's rows."""
    raw = np.asarray(output, dtype).reshape(-1, 8)
    box = 32 / (1 + np.exp(-raw[:, :4]))
    half = box[:, 2:] * 0.4 + 2
    scores = 1 / (1 + np.exp(-raw[:, 4:]))
    corners = np.concatenate([box[:, :2] - half, box[:, :2] + half], axis=1)
    return np.column_stack([corners, scores.max(axis=1), scores.argmax(axis=1)]).astype(dtype)


def describe_objects(rows: Any, labels: tuple[str, ...] = LABELS) -> list[dict[str, Any]]:
    return [
        {
            "box": [float(part) for part in row[:4]],
            "score": float(row[4]),
            "label": labels[int(row[5])],
        }
        for row in rows
    ]


def change_boxes(change: Step) -> Step:
    def step(rows: Any) -> Any:
        return [{**one, "box": change(one["box"])} for one in describe_objects(rows)]

    return step


def make_objects(folder: Path, random: np.random.Generator, count: int) -> World:
    """Return a detector of objects."""
    rows = 30
    weights = random.normal(0, 0.5, (48, rows * 8)).astype(np.float32)
    bias = np.tile([0, 0, 0, 0, -1.5, -1.5, -1.5, -1.5], rows).astype(np.float32)
    model = write_model(
        folder / "objects.onnx",
        "g (float[N,3,32,32] x) => (float[N,30,8] y) { "
        "a = AveragePool<kernel_shape=[8,8], strides=[8,8]>(x)\n"
        "b = Flatten(a)\n c = MatMul(b, w)\n d = Add(c, v)\n y = Reshape(d, s) }",
        {"w": weights, "v": bias, "s": np.array([-1, rows, 8], np.int64)},
    )
    scale = make_normalizer(mean=np.full(3, 0.45), deviation=np.full(3, 0.25))

    def predict(path: str) -> Any:
        pixels = record_step("decode", decode(path))
        x = record_step("input", scale(record_step("letterbox", letterbox(pixels))))
        pooled = np.asarray(x, np.float64).reshape(1, 3, 4, 8, 4, 8).mean(axis=(3, 5))
        y = record_step("output", (pooled.reshape(1, -1) @ weights + bias).reshape(1, rows, 8))
        boxes = record_step("boxes", read_boxes(y))
        chosen = record_step("threshold", choose_boxes(boxes))
        single = record_step("suppress", suppress(chosen))
        return describe_objects(record_step("limit", single[:10]))

    swapped = (LABELS[0], LABELS[3], LABELS[2], LABELS[1])
    return World(
        name="objects",
        predict=predict,
        files=write_pictures(folder / "objects", random, count),
        model=model,
        before={"decode": decode, "letterbox": letterbox, "scale": scale},
        after={
            "boxes": read_boxes,
            "threshold": choose_boxes,
            "suppress": suppress,
            "limit": lambda rows: rows[:10],
            "objects": describe_objects,
        },
        alternatives={
            "decode": (decode_coarsely,),
            "boxes": (lambda y: read_boxes(y, np.float64),),
            "suppress": (suppress_by_matrix,),
        },
        faults=(
            ("letterbox", "letterboxed", make_resizer(32, Image.Resampling.BILINEAR)),
            ("letterbox", "", lambda pixels: letterbox(pixels, color=0)),
            ("boxes", "", lambda y: read_boxes(y)[:, [1, 0, 3, 2, 4, 5]]),
            ("threshold", "threshold", lambda rows: choose_boxes(rows, 0.5)),
            ("threshold", "threshold", lambda rows: choose_boxes(rows, 0.3)),
            ("suppress", "suppression", lambda rows: rows),
            ("suppress", "suppression", lambda rows: suppress(rows, 0.2)),
            ("limit", "limit", lambda rows: rows[:5]),
            ("objects", "label map", lambda rows: describe_objects(rows, swapped)),
            (
                "objects",
                "box format",
                change_boxes(lambda b: [b[0], b[1], b[2] - b[0], b[3] - b[1]]),
            ),
            ("objects", "box coordinates", change_boxes(lambda b: [part / 32 for part in b])),
            (
                "objects",
                "box coordinates",
                change_boxes(lambda b: [b[0] * 4 + 3, b[1] * 4 - 2, b[2] * 4 + 3, b[3] * 4 - 2]),
            ),
        ),
    )


# The following functions make the system for texts, and alternative and faulty versions of its
# steps. The steps before the model are clean and tokens. The steps after the model are scores and
# answer.

WORDS = tuple(
    f"{a}{b}{c}"
    for a in ("ba", "ko", "lu", "mi")
    for b in ("na", "ri", "to")
    for c in ("", "s", "n")
)
LENGTH = 16


def write_texts(path: Path, random: np.random.Generator, count: int) -> Path:
    """Write lines of made texts, some of which are longer than the model's input."""
    lines = []
    for index in range(count):
        words = [str(random.choice(WORDS)) for _ in range(int(random.integers(3, 24)))]
        words[0] = words[0].capitalize()
        if index % 4 == 0:
            words[1] = words[1].upper()
        lines.append(f"  {' '.join(words)}" + ("!" if index % 3 == 0 else " é.") + " ")
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def clean(row: Any) -> str:
    return str(row["text"]).strip().lower()


def tokenize(
    text: str,
    *,
    start: tuple[int, ...] = (1,),
    end: tuple[int, ...] = (2,),
    length: int = LENGTH,
    left: bool = False,
    padding: int = 0,
    keep_end: bool = False,
    offset: int = 4,
) -> Any:
    known = {word: offset + index for index, word in enumerate(WORDS)}
    ids = [known.get(word, 3) for word in re.findall(r"\w+", text)]
    room = length - len(start) - len(end)
    ids = [*start, *(ids[-room:] if keep_end else ids[:room]), *end]
    pad = [padding] * (LENGTH - len(ids))
    return np.array([[*pad, *ids] if left else [*ids, *pad]], np.int64)


def tokenize_by_split(text: str) -> Any:
    """Tokenize with another way of finding words."""
    words = "".join(c if c.isalnum() else " " for c in text).split()
    ids = [1, *[4 + WORDS.index(w) if w in WORDS else 3 for w in words][: LENGTH - 2], 2]
    return np.pad(np.array(ids, np.int64), (0, LENGTH - len(ids)))[None]


def make_texts(folder: Path, random: np.random.Generator, count: int) -> World:
    """Return a classifier of texts."""
    table = random.normal(0, 1, (60, 8)).astype(np.float32)
    weights = random.normal(0, 2, (LENGTH * 8, 4)).astype(np.float32)
    model = write_model(
        folder / "texts.onnx",
        "g (int64[N,16] ids) => (float[N,4] y) "
        "{ a = Gather(t, ids)\n b = Flatten(a)\n y = MatMul(b, w) }",
        {"t": table, "w": weights},
    )

    def predict(row: Any) -> Any:
        ids = record_step("tokens", tokenize(record_step("clean", clean(row))))
        y = table[ids].reshape(1, -1).astype(np.float64) @ weights
        scores = record_step("scores", softmax(record_step("output", y.astype(np.float32))))
        return record_step("answer", f"It is a {name_label(scores)}.")

    def answer(scores: Any) -> str:
        return f"It is a {name_label(scores)}."

    return World(
        name="texts",
        predict=predict,
        files=write_texts(folder / "texts.jsonl", random, count),
        model=model,
        before={"clean": clean, "tokens": tokenize},
        after={"scores": softmax, "answer": answer},
        alternatives={
            "clean": (lambda row: row["text"].lower().strip(),),
            "tokens": (tokenize_by_split, lambda text: tokenize(text)[0]),
            "scores": (lambda y: softmax(y, np.float64), softmax_plainly),
        },
        faults=(
            ("clean", "case", lambda row: row["text"].strip()),
            ("clean", "white space", lambda row: row["text"].lower()),
            ("clean", "accents", lambda row: clean(row).replace("é", "e")),
            (
                "clean",
                "encoding",
                lambda row: clean(row).encode("utf-8").decode("latin-1"),
            ),
            ("tokens", "padding side", lambda text: tokenize(text, left=True)),
            ("tokens", "truncation", lambda text: tokenize(text, length=12)),
            ("tokens", "truncation", lambda text: tokenize(text, keep_end=True)),
            ("tokens", "special tokens", lambda text: tokenize(text, start=(), end=())),
            ("tokens", "", lambda text: tokenize(text, end=())),
            ("tokens", "padding", lambda text: tokenize(text, padding=59)),
            ("tokens", "vocabulary", lambda text: tokenize(text, offset=5)),
            ("tokens", "tokenizer", lambda text: tokenize(text.upper())),
            ("answer", "case", lambda scores: answer(scores).lower()),
            ("answer", "white space", lambda scores: f" {answer(scores)}"),
        ),
    )


# The following functions make the system for sounds, and alternative and faulty versions of its
# steps. The steps before the model are read, resample and frames. The steps after the model are
# softmax and label.


def write_sounds(folder: Path, random: np.random.Generator, count: int) -> Path:
    """Write WAV files of made tones, in stereo at 16 kHz."""
    folder.mkdir(parents=True)
    for index in range(count):
        time = np.arange(8000) / 16000
        tones = [
            np.sin(2 * np.pi * f * time) * a
            for f, a in zip(random.uniform(150, 1500, 3), random.uniform(0.1, 0.3, 3), strict=True)
        ]
        sides = np.stack([sum(tones), 0.6 * sum(tones[:2])], axis=1)
        samples = (sides * 30000).astype("<i2")
        with wave.open(str(folder / f"{index:03d}.wav"), "wb") as sound:
            sound.setnchannels(2)
            sound.setsampwidth(2)
            sound.setframerate(16000)
            sound.writeframes(samples.tobytes())
    return folder


def read_sound(path: str, dtype: Any = np.float32, scale: float = 32768.0) -> Any:
    with wave.open(path, "rb") as sound:
        data = sound.readframes(sound.getnframes())
    return (np.frombuffer(data, "<i2").reshape(-1, 2).astype(dtype) / dtype(scale)).mean(axis=1)


def read_sound_by_struct(path: str) -> Any:
    """Read the samples without a library for sounds."""
    content = Path(path).read_bytes()
    start = content.index(b"data") + 8
    values = struct.unpack(f"<{(len(content) - start) // 2}h", content[start:])
    pairs = np.array(values, np.float64).reshape(-1, 2) / 32768
    return (0.5 * (pairs[:, 0] + pairs[:, 1])).astype(np.float32)


def halve(samples: Any, step: int = 2) -> Any:
    return np.asarray(samples).reshape(-1, step).mean(axis=1)


def frame(samples: Any) -> Any:
    return np.abs(np.fft.rfft(np.asarray(samples)[:3840].reshape(30, 128))).astype(np.float32)[None]


def make_sounds(folder: Path, random: np.random.Generator, count: int) -> World:
    """Return a classifier of sounds."""
    weights = random.normal(0, 0.05, (30 * 65, 4)).astype(np.float32)
    model = write_model(
        folder / "sounds.onnx",
        "g (float[N,30,65] x) => (float[N,4] y) { a = Flatten(x)\n y = MatMul(a, w) }",
        {"w": weights},
    )

    def predict(path: str) -> Any:
        samples = record_step("resample", halve(record_step("read", read_sound(path))))
        x = record_step("frames", frame(samples))
        y = record_step("output", (x.reshape(1, -1).astype(np.float64) @ weights))
        return name_label(record_step("softmax", softmax(y)))

    return World(
        name="sounds",
        predict=predict,
        files=write_sounds(folder / "sounds", random, count),
        model=model,
        before={"read": read_sound, "resample": halve, "frames": frame},
        after={"softmax": softmax, "label": name_label},
        alternatives={
            "read": (lambda path: read_sound(path, np.float64), read_sound_by_struct),
            "resample": (lambda samples: 0.5 * (samples[::2] + samples[1::2]),),
            "softmax": (lambda y: softmax(y, np.float64),),
        },
        faults=(
            ("read", "scale", lambda path: read_sound(path, scale=1.0)),
            ("read", "sample rate", lambda path: halve(read_sound(path))),
            ("resample", "", lambda samples: samples[::2]),
            ("resample", "", lambda samples: samples),
            ("frames", "", lambda s: np.log1p(frame(s))),
        ),
    )


WORLDS = (make_pictures, make_objects, make_texts, make_sounds)


def reencode(path: str, quality: int) -> Any:
    """Return a picture after another lossy encoding, as a cache of pictures makes it."""
    buffer = io.BytesIO()
    Image.open(path).convert("RGB").save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


def without_records(world: World) -> World:
    """Return the world with steps before the model as one step that ends in its input."""
    steps = list(world.before.values())

    def prepare(raw: Any) -> Any:
        for step in steps:
            raw = step(raw)
        return raw

    last = list(world.before)[-1]
    return replace(world, before={last: prepare})
