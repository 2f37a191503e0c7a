"""Math questions with answers to RL prompts and evaluation sets.

    python examples/retool/rl_data_preprocess.py --input dapo-math-17k.parquet --output data/dapo_math_17k.jsonl
    python examples/retool/rl_data_preprocess.py --input aime24.jsonl --output data/aime24.jsonl

Read: verl's schema (`prompt` messages, `reward_model.ground_truth`), slime's (`prompt` text or messages, `label`),
and evaluation files ({input, output}, {problem, answer}, {question, answer}). Written, one JSON object a line:

    {"prompt": [{"role": "user", "content": "<question>\\n\\n<instruction>"}], "label": "34", "metadata": {...}}

Instructions that published sets wrap around a question are replaced by one that asks for `Answer: \\boxed{...}`.
A question that occurs several times is written once; one that occurs with different answers is left out and listed
in <output>.contradictions.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_retool.data.math_prompts import bare_question, with_instruction
from slime_retool.data.messages import parse_messages
from slime_retool.data.readers import Row, read_rows, write_rows
from slime_retool.errors import DataError, SlimeRetoolError

# (question column, answer column), the first that fits; None stands for verl's reward_model.ground_truth.
SCHEMAS = (
    ("prompt", None),
    ("prompt", "label"),
    ("input", "output"),
    ("problem", "answer"),
    ("question", "answer"),
)
_GSM8K_MARK = "#### "


@dataclass(frozen=True)
class Conversion:
    """What became of a file's rows."""

    rows: list[Row]
    """Written rows, in order of first occurrence."""
    num_read: int
    num_unique_prompts: int
    """Different prompt texts as they stand in the file."""
    num_contradictory_prompts: int
    """Of these, prompts that come with different answers."""
    num_unique: int
    """Different questions once instructions and surrounding blanks are removed, contradictory ones included."""
    contradictions: list[Row]
    """{question, labels} of the questions left out."""


def prompt_and_label(row: Row, where: str) -> tuple[str, str]:
    """The prompt's text and the answer's, as they stand in the row.

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
    label = str(label).rpartition(_GSM8K_MARK)[2].strip()
    if not bare_question(text) or not label:
        raise DataError(f"{where}: question and answer must not be empty")
    return text, label


def convert(rows: Sequence[Row], source: str) -> Conversion:
    """Deduplicate `rows` by question and write them as RL prompts; `source` names them in metadata."""
    prompt_labels: dict[str, set[str]] = {}
    labels: dict[str, set[str]] = {}
    first: dict[str, Row] = {}
    for number, row in enumerate(rows):
        prompt, label = prompt_and_label(row, f"{source}, row {number + 1}")
        question = bare_question(prompt)
        prompt_labels.setdefault(prompt, set()).add(label)
        labels.setdefault(question, set()).add(label)
        first.setdefault(
            question,
            {
                "prompt": [{"role": "user", "content": with_instruction(question)}],
                "label": label,
                "metadata": {"source": row.get("data_source") or source, "row": number},
            },
        )
    return Conversion(
        rows=[row for question, row in first.items() if len(labels[question]) == 1],
        num_read=len(rows),
        num_unique_prompts=len(prompt_labels),
        num_contradictory_prompts=sum(len(found) > 1 for found in prompt_labels.values()),
        num_unique=len(first),
        contradictions=[{"question": q, "labels": sorted(found)} for q, found in labels.items() if len(found) > 1],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="a .parquet or .jsonl file")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write; .jsonl (or .parquet)")
    args = parser.parse_args(argv)
    try:
        done = convert(read_rows(args.input), Path(args.input).stem)
        if not done.rows:
            raise DataError(f"{args.input}: every question has contradictory answers, nothing to write")
        write_rows(args.output, done.rows)
        list_file = Path(f"{args.output}.contradictions.jsonl")
        if done.contradictions:
            write_rows(list_file, done.contradictions)
        else:
            list_file.unlink(missing_ok=True)
    except SlimeRetoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.input}: {done.num_read} rows, {done.num_unique_prompts} unique prompts, "
        f"{done.num_contradictory_prompts} of them with contradictory answers\n"
        f"{args.output}: {done.num_unique} unique questions (instructions and surrounding blanks removed), "
        f"{len(done.contradictions)} contradictory left out, {len(done.rows)} rows written"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
