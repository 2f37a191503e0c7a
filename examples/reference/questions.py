"""Prompts of the reference run, each in the three forms in which it is asked, and the check for leaks.

    python questions.py --data-dir DIR --output-dir OUT

Reads from DIR (docs/data.md tells where public copies are; none is part of this project):

- `gsm8k_train.jsonl`, `gsm8k_test.jsonl` {question, answer}, and `math500.jsonl` {problem, answer}: needed;
- `math_train.jsonl` {problem, answer}: problems of MATH outside MATH-500, where given;
- `dapo_math_17k.parquet`: DAPO-Math-17k, taken in place of `math_train.jsonl` where that is not given;
- `aime24.jsonl`, `aime25.jsonl` {input, output}: where given.

Without either set of competition problems, integer problems of `reasoning-gym` (PyPI) take their place, where it is
installed. Writes OUT/train/NAME.jsonl, OUT/eval/NAME.jsonl and OUT/leaks.json. A training question that repeats one of
an evaluation set (`slime_retool.data.leakage`: equal words, or four fifths of its runs of eight words) is left out, and
listed there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_retool.data.leakage import EvaluationQuestions
from slime_retool.data.math_prompts import bare_question
from slime_retool.data.questions import read_label
from slime_retool.data.readers import read_rows

FORMS = {
    "tool": "\n\nUse Python code to calculate, and put the final answer within \\boxed{}.",
    "plain": "\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "program": (
        "\n\nExplain in one or two sentences how to find the answer. Then write one complete Python program, between "
        "```python and ```, that computes the answer and prints only the answer. Use sympy where the answer must be "
        "exact (a fraction, a root, an expression). Do not write the result into the program: let it calculate."
    ),
}
"""Column of a row -> what stands after the question there: asked with the tool, without it, and for a program."""
GYM_TASKS = ("gcd", "lcm", "count_primes", "simple_equations", "products", "leg_counting", "count_bits")
GYM_ROWS = 300
"""Of each task."""
MATH_TRAIN = "math_train.jsonl"


@dataclass(frozen=True)
class Question:
    """One problem and its answer."""

    question: str
    label: str
    solution: str = ""
    """The worked answer, where the set has one."""

    def row(self) -> dict[str, Any]:
        """As the toolkit reads it: a column of messages for each form."""
        forms = {form: [{"role": "user", "content": self.question + after}] for form, after in FORMS.items()}
        return {**asdict(self), **forms}


def gsm8k(path: Path) -> list[Question]:
    rows = read_rows(path)
    return [
        Question(row["question"].strip(), row["answer"].split("####")[-1].strip().replace(",", ""), row["answer"])
        for row in rows
    ]


def columns(path: Path, question: str, answer: str) -> list[Question]:
    """Rows of these two columns; one with a blank answer is left out."""
    rows = [(row[question], read_label(row, answer)) for row in read_rows(path)]
    return [Question(bare_question(asked), label) for asked, label in rows if label is not None]


def dapo_math(path: Path) -> list[Question]:
    """One row of each question; questions with several answers are left out."""
    answers: dict[str, set[str]] = {}
    for row in read_rows(path):
        question = bare_question(row["prompt"][-1]["content"])
        answers.setdefault(question, set()).add(str(row["reward_model"]["ground_truth"]).strip())
    return [Question(question, next(iter(found))) for question, found in answers.items() if len(found) == 1]


def gym(seed: int = 0) -> list[Question]:
    """Integer problems of reasoning-gym. Its `gsm_symbolic` is not among them: its templates are GSM8K's test set."""
    import reasoning_gym

    return [
        Question(str(entry["question"]).strip(), str(entry["answer"]).strip())
        for task in GYM_TASKS
        for entry in reasoning_gym.create_dataset(task, size=GYM_ROWS, seed=seed)
    ]


def training_sets(folder: Path) -> Iterator[tuple[str, list[Question]]]:
    """(name, questions): GSM8K's, and competition problems where there are any."""
    yield "gsm8k", gsm8k(folder / "gsm8k_train.jsonl")
    if (folder / MATH_TRAIN).exists():
        yield "math", columns(folder / MATH_TRAIN, "problem", "answer")
    elif (folder / "dapo_math_17k.parquet").exists():
        yield "math", dapo_math(folder / "dapo_math_17k.parquet")
    elif importlib.util.find_spec("reasoning_gym") is not None:
        yield "math", gym()


def evaluation_sets(folder: Path) -> dict[str, list[Question]]:
    sets = {
        "gsm8k": gsm8k(folder / "gsm8k_test.jsonl"),
        "math500": columns(folder / "math500.jsonl", "problem", "answer"),
    }
    for name in ("aime24", "aime25"):
        if (folder / f"{name}.jsonl").exists():
            sets[name] = columns(folder / f"{name}.jsonl", "input", "output")
    return sets


def without_leaks(
    name: str, questions: list[Question], index: EvaluationQuestions
) -> tuple[list[Question], list[dict[str, Any]]]:
    """(what may be trained on, what was left out and why)."""
    kept, left_out = [], []
    for question in questions:
        leak = index.find(question.question)
        if leak is None:
            kept.append(question)
        else:
            left_out.append({"set": name, "question": question.question, **asdict(leak)})
    return kept, left_out


def write(path: Path, questions: list[Question]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(question.row()) + "\n" for question in questions), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument(
        "--eval-rows", type=int, help="only this many problems of each evaluation set: to try things out"
    )
    parser.add_argument(
        "--train-rows", type=int, help="only this many problems of each training set: to try things out"
    )
    args = parser.parse_args()
    sets = evaluation_sets(args.data_dir)
    index = EvaluationQuestions(
        (f"{name} {number + 1}", question.question)
        for name, questions in sets.items()
        for number, question in enumerate(questions)
    )
    leaks: list[dict[str, Any]] = []
    counts: dict[str, dict[str, int]] = {}
    for name, questions in training_sets(args.data_dir):
        kept, left_out = without_leaks(name, questions, index)
        random.Random(0).shuffle(kept)
        write(args.output_dir / "train" / f"{name}.jsonl", kept[: args.train_rows])
        leaks += left_out
        counts[name] = {"rows": len(questions), "left_out": len(left_out), "written": len(kept[: args.train_rows])}
    for name, questions in sets.items():
        write(args.output_dir / "eval" / f"{name}.jsonl", questions[: args.eval_rows])
    report = {"checked_against": {name: len(questions) for name, questions in sets.items()}, "sets": counts}
    (args.output_dir / "leaks.json").write_text(json.dumps(report | {"left_out": leaks}, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
