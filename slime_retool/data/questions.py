"""Question and label of a data row, whichever of the published schemas it has."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from slime_retool.data.math_prompts import bare_question
from slime_retool.data.messages import parse_messages
from slime_retool.data.readers import Row
from slime_retool.errors import DataError

# (question column, label column), the first that fits.
SCHEMAS = (("prompt", "label"), ("input", "output"), ("problem", "answer"), ("question", "answer"))
QUESTIONS = (*(question for question, _ in SCHEMAS), "messages", "conversations", "query", "instruction", "text")
LABELS = (*dict.fromkeys(label for _, label in SCHEMAS), "solution", "target", "ground_truth", "expected_answer")
"""Columns that are often what --input-key and --label-key have to name, the likeliest first."""
_GSM8K_MARK = "\n#### "
_GROUPED_INTEGER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")


def read_label(row: Row, key: str) -> str | None:
    """The label in column `key`, else in verl's `reward_model.ground_truth`, as text; None where neither holds one.

    Stripped; of a worked solution in GSM8K's form, the answer behind its last "####"; of an integer, the digits without
    thousands separators. Null, NaN, infinity and blank text are no label. Raises DataError for what is neither text nor
    JSON.
    """
    verl = row.get("reward_model")
    return _text(row.get(key)) or _text(verl.get("ground_truth") if isinstance(verl, dict) else None)


def _text(value: Any) -> str | None:
    if value is None or (isinstance(value, (float, Decimal)) and not math.isfinite(value)):
        return None
    if isinstance(value, (float, Decimal)) and value == int(value):
        value = int(value)  # parquet makes 34.0 of 34 where another label is missing
    if isinstance(value, Decimal):  # parquet has them
        value = str(value)
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except TypeError:
        raise DataError(f"a label must be text or a number, got {type(value).__name__}") from None
    text = text.rpartition(_GSM8K_MARK)[2].strip()
    return (text.replace(",", "") if _GROUPED_INTEGER.fullmatch(text) else text) or None


def similar_columns(row: Iterable[str], key: str, known: Iterable[str]) -> list[str]:
    """Columns of `row` that may be meant by `key`, which it lacks: those of the `known` names, then similar ones."""
    columns, near = list(row), difflib.get_close_matches(key, list(row), n=2)
    return list(dict.fromkeys([*(name for name in known if name in columns), *near]))


def known_columns(row: Row, where: str) -> tuple[str, str]:
    """The first of `SCHEMAS` that has a question and a label in `row`. Raises DataError, naming `where`."""
    for question_key, label_key in SCHEMAS:
        if row.get(question_key) is not None and read_label(row, label_key) is not None:
            return question_key, label_key
    known = ", ".join(f"{question}+{label}" for question, label in SCHEMAS)
    raise DataError(
        f"{where}: needs one of the column pairs {known} (or reward_model.ground_truth), the label not empty; "
        f"it has {', '.join(row)}"
    )


def question_and_answer(row: Row, where: str) -> tuple[str, str]:
    """The question's text as it stands in the row, and its label (see `read_label`).

    Raises DataError, naming `where`, when no known schema fits.
    """
    question_key, label_key = known_columns(row, where)
    text, label = row[question_key], read_label(row, label_key)
    assert label is not None
    if not isinstance(text, str):
        users = [m["content"] for m in parse_messages(text, f"{where}, {question_key}") if m["role"] == "user"]
        if len(users) != 1:
            raise DataError(f"{where}: the prompt must hold exactly one user message, got {len(users)}")
        text = users[0]
    if not bare_question(text):
        raise DataError(f"{where}: the question must not be empty")
    return text, label
