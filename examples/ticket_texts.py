"""Text classification of support tickets, with the tokenizer in the released file.

The estimator takes texts. Its export has one input of strings, so the endpoint takes what the
estimator takes. `predict` is the project's own code, with which a release is compared:

    onnx-ops run configs/pipelines/ticket-texts.yaml
    onnx-ops judge --system examples.ticket_texts:predict --files examples/data/tickets-test.csv \\
        --before input=examples.ticket_texts:read_text \\
        --after team=examples.ticket_texts:name_team .onnx-ops/models/*/model.onnx

`python -m examples.ticket_texts` writes the made tickets below `examples/data` again.
"""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from onnx_ops import record_step
from onnx_ops.ports import Dataset

DATA = Path(__file__).parent / "data"

PHRASES = {
    "account": (
        "I cannot log in",
        "my password was refused",
        "the reset mail never arrived",
        "please change the email of my profile",
        "two-factor codes are not accepted",
        "my user name is locked",
    ),
    "billing": (
        "the invoice shows the wrong amount",
        "you charged my card twice",
        "please refund the last payment",
        "our VAT number is missing on the receipt",
        "I want to cancel my subscription",
        "the discount was not applied",
    ),
    "defect": (
        "the app crashes on start",
        "the export ends with an error",
        "the page stays blank after the update",
        "search returns no results",
        "the upload stops at 99 percent",
        "buttons overlap on a small screen",
    ),
    "delivery": (
        "the parcel has not arrived",
        "the courier left it at the wrong address",
        "the tracking number is unknown",
        "one box was damaged in transit",
        "please ship the order to Malmö instead",
        "the delivery is two weeks late",
    ),
}
"""What customers write to each team."""

OPENINGS = ("Hello,", "Hi team,", "Good morning!", "Urgent:", "Grüezi,", "")
CLOSINGS = ("Thanks.", "Please help!", "Best regards, {name}", "This is the {count}th time.", "")
NAMES = ("Ana", "Björn", "Chloé", "Dmitri", "Emeka", "Fatima")


def make_ticket(draw: random.Random) -> tuple[str, str]:
    """Return a text and its team.

    One ticket in twelve also has a phrase of a random team.
    """
    team = draw.choice(list(PHRASES))
    phrases = draw.sample(PHRASES[team], draw.choice((1, 2)))
    if draw.random() < 1 / 12:
        phrases.append(draw.choice(PHRASES[draw.choice(list(PHRASES))]))
    closing = draw.choice(CLOSINGS).format(name=draw.choice(NAMES), count=draw.randint(4, 9))
    words = [draw.choice(OPENINGS), " and ".join(phrases) + ".", closing]
    text = " ".join(word for word in words if word)
    return (text.upper() if draw.random() < 0.05 else text), team


def write_tickets(folder: Path) -> None:
    """Write the sets `train` and `test` as CSV files."""
    for part, seed, count in (("train", 1, 480), ("test", 2, 240)):
        draw = random.Random(seed)  # noqa: S311 (to be repeatable)
        with (folder / f"tickets-{part}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("text", "team"))
            rows.writerows(make_ticket(draw) for _ in range(count))


def train(data: Mapping[str, Dataset], *, strength: float = 10.0) -> Pipeline:
    """Fit a vectorizer and a classifier on the set `train`."""
    rows = data["train"]
    return fit(rows.inputs["text"].reshape(-1), rows.label, strength=strength)


def fit(texts: Any, teams: Any, *, strength: float = 10.0) -> Pipeline:
    """Fit the pipeline; it is the same for the same texts in the same order."""
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=strength))
    return model.fit(texts, teams)


@functools.cache
def load_model() -> Pipeline:
    """Return the project's own estimator, fitted on the file of the set `train`."""
    with (DATA / "tickets-train.csv").open(encoding="utf-8", newline="") as file:
        tickets = [*csv.DictReader(file)]
    return fit([ticket["text"] for ticket in tickets], [ticket["team"] for ticket in tickets])


def read_text(ticket: Mapping[str, str]) -> Any:
    """Return the text of a ticket, as the model takes it."""
    return np.array([[ticket["text"]]], dtype=object)


def name_team(answer: Mapping[str, Any]) -> str:
    """Return the team with the highest probability."""
    return sorted(PHRASES)[int(np.argmax(answer["probabilities"]))]


def predict(ticket: Mapping[str, str]) -> str:
    """Return the team that answers a ticket."""
    text = record_step("input", read_text(ticket))
    probabilities = load_model().predict_proba(text.reshape(-1))
    answer = {
        "label": load_model().classes_[probabilities.argmax(axis=1)],
        "probabilities": probabilities.astype(np.float32),
    }
    return name_team(record_step("output", answer))


if __name__ == "__main__":
    write_tickets(DATA)
