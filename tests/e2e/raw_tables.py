"""Synthetic imitations of public tables, in the form of their raw files.

They have the same separators, quotation marks, dates and identifiers.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Draw = np.random.Generator

TRAINING = """
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

def train(data):
    rows = data["train"]
    frame = rows.frame()
    texts = [name for name in frame if frame[name].dtype.kind not in "iufb"]
    numbers = [name for name in frame if name not in texts]
    parts = []
    if numbers:
        parts.append((make_pipeline(SimpleImputer(), StandardScaler()), numbers))
    if texts:
        parts.append((OneHotEncoder(handle_unknown="ignore", max_categories=30), texts))
    model = make_pipeline(make_column_transformer(*parts), LogisticRegression(max_iter=1000))
    return model.fit(frame, rows.label)
"""


@dataclass(frozen=True)
class RawTable:
    """A table: the name of its file, its label, and the columns that are used.

    `write` takes a generator and the number of rows, and returns the bytes of the file.
    """

    file: str
    label: str
    columns: tuple[str, ...]
    write: Callable[[Draw, int], bytes]


def _encode(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    separator: str = ",",
    quote_all: bool = False,
) -> str:
    stream = io.StringIO()
    quoting: Literal[0, 1] = csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL
    writer = csv.writer(stream, delimiter=separator, quoting=quoting, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows(rows)
    return stream.getvalue()


def _telco(draw: Draw, count: int) -> bytes:
    """Return customers; new customers have a blank for their total charges."""
    rows = []
    for row in range(count):
        tenure = int(draw.integers(0, 72))
        monthly = round(float(draw.normal(65, 20)), 2)
        gone = draw.random() < 1 / (1 + np.exp(tenure / 12 - monthly / 40))
        total = " " if tenure == 0 else f"{tenure * monthly:.2f}"
        contract = str(draw.choice(["Month-to-month", "One year", "Two year"]))
        churn = "Yes" if gone else "No"
        rows.append(
            [f"{row:04d}-ABCDE", int(draw.random() < 0.2), tenure, contract, monthly, total, churn]
        )
    names = [
        "customerID",
        "SeniorCitizen",
        "tenure",
        "Contract",
        "MonthlyCharges",
        "TotalCharges",
        "Churn",
    ]
    return _encode(names, rows).encode()


def _adult(draw: Draw, count: int) -> bytes:
    """Return census rows.

    Text and numeric columns contain question marks. Names of columns contain dots and dashes.
    """
    rows = []
    for _ in range(count):
        age, hours = int(draw.integers(17, 90)), int(draw.integers(10, 80))
        work = str(draw.choice(["Private", "Self-emp-not-inc", "?", "State-gov"]))
        gain = "?" if draw.random() < 0.1 else int(draw.exponential(900))
        rows.append(
            [
                age,
                work,
                gain,
                hours,
                ">50K" if age / 40 + hours / 40 + draw.normal(0, 0.4) > 2 else "<=50K",
            ]
        )
    return _encode(["age", "work-class", "capital.gain", "hours per week", "income"], rows).encode()


def _wine(draw: Draw, count: int) -> bytes:
    """Return measurements with semicolons, decimal points, and spaces in names."""
    values = draw.normal([8, 0.5, 10.4], [1.7, 0.2, 1.0], (count, 3)).round(3)
    good = (values[:, 2] - values[:, 1] * 3 + draw.normal(0, 0.5, count) > 9).astype(int)
    rows = [[*row, label] for row, label in zip(values.tolist(), good.tolist(), strict=True)]
    return _encode(
        ["fixed acidity", "volatile acidity", "alcohol", "good"], rows, separator=";"
    ).encode()


def _bikes(draw: Draw, count: int) -> bytes:
    """Return hours of bicycle rentals, as Excel exports them.

    A column name has a degree sign. Dates have slashes and numbers have decimal commas, in UTF-16.
    """
    rows = []
    for row in range(count):
        hour, warm = row % 24, float(draw.normal(14, 9))
        many = hour / 24 + warm / 20 + draw.normal(0, 0.2) > 1.2
        day = f"{row // 24 % 28 + 1:02d}/{row // 672 % 12 + 1:02d}/2018"
        rows.append(
            [
                day,
                hour,
                f"{warm:.1f}".replace(".", ","),
                str(draw.choice(["Winter", "Été"])),
                int(many),
            ]
        )
    text = _encode(["Date", "Hour", "Temperature(°C)", "Seasons", "many"], rows, separator=";")
    return text.encode("utf-16")


def _patients(draw: Draw, count: int) -> bytes:
    """Return compressed rows of patients with an index column.

    They have postal codes with leading zeros, 64-bit identifiers, notes and empty cells.
    """
    rows = []
    for row in range(count):
        pressure = round(float(draw.normal(120, 15)), 1)
        ill = pressure > 122 + draw.normal(0, 6)
        note = " ".join(
            draw.choice(
                ["pain", "none, since May", 'he said "fine"', "cough"], int(draw.integers(1, 4))
            )
        )
        cell = "" if draw.random() < 0.1 else pressure
        rows.append(
            [
                row,
                (1 << 62) + row * 3,
                f"0{int(draw.integers(1000, 1009))}",
                cell,
                note,
                str(bool(ill)),
            ]
        )
    names = ["", "patient id", "zip", "Blood Pressure [mmHg]", "note", "ill"]
    return gzip.compress(_encode(names, rows, quote_all=True).encode())


TABLES = {
    "telco": RawTable(
        "telco.csv",
        "Churn",
        ("SeniorCitizen", "tenure", "Contract", "MonthlyCharges", "TotalCharges"),
        _telco,
    ),
    "adult": RawTable(
        "adult.csv", "income", ("age", "work-class", "capital.gain", "hours per week"), _adult
    ),
    "wine": RawTable(
        "winequality.csv", "good", ("fixed acidity", "volatile acidity", "alcohol"), _wine
    ),
    "bikes": RawTable("SeoulBikeData.csv", "many", ("Hour", "Temperature(°C)", "Seasons"), _bikes),
    "patients": RawTable(
        "patients.csv.gz", "ill", ("zip", "Blood Pressure [mmHg]", "note"), _patients
    ),
}
