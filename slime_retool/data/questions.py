"""Question and answer of a math data row, whichever of the published schemas it has."""

from __future__ import annotations

from slime_retool.data.math_prompts import bare_question
from slime_retool.data.messages import parse_messages
from slime_retool.data.readers import Row
from slime_retool.errors import DataError

# (question column, answer column), the first that fits; None stands for verl's reward_model.ground_truth.
SCHEMAS = (
    ("prompt", None),
    ("prompt", "label"),
    ("input", "output"),
    ("problem", "answer"),
    ("question", "answer"),
)
_GSM8K_MARK = "\n#### "


def question_and_answer(row: Row, where: str) -> tuple[str, str]:
    """The question's text and the final answer's, as they stand in the row.

    Raises DataError, naming `where`, when no known schema fits.
    """
    for question_key, label_key in SCHEMAS:
        if label_key is None:
            verl = row.get("reward_model")
            label = verl.get("ground_truth") if isinstance(verl, dict) else None
        else:
            label = row.get(label_key)
        if row.get(question_key) is not None and label is not None:
            break
    else:
        known = ", ".join(f"{q}+{a or 'reward_model.ground_truth'}" for q, a in SCHEMAS)
        raise DataError(f"{where}: needs one of the column pairs {known}; it has {', '.join(row)}")
    text = row[question_key]
    if not isinstance(text, str):
        users = [m["content"] for m in parse_messages(text, f"{where}, {question_key}") if m["role"] == "user"]
        if len(users) != 1:
            raise DataError(f"{where}: the prompt must hold exactly one user message, got {len(users)}")
        text = users[0]
    answer = final_answer(str(label)).strip()
    if not bare_question(text) or not answer:
        raise DataError(f"{where}: question and answer must not be empty")
    return text, answer


def final_answer(label: str) -> str:
    """The label itself or, of a worked solution in GSM8K's form, the answer behind its last "####"."""
    return label.rpartition(_GSM8K_MARK)[2].strip() if _GSM8K_MARK in label else label
