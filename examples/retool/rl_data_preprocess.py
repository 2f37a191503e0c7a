"""Math questions with answers to RL prompts and evaluation sets.

    python examples/retool/rl_data_preprocess.py --input dapo-math-17k.parquet --output data/dapo_math_17k.jsonl \\
        --evaluation-sets aime24.jsonl aime25.jsonl
    python examples/retool/rl_data_preprocess.py --input aime24.jsonl --output data/aime24.jsonl

Read: verl's schema (`prompt` messages, `reward_model.ground_truth`), slime's (`prompt` text or messages, `label`),
and evaluation files ({input, output}, {problem, answer}, {question, answer}). Written, by `--schema`:

    slime   {"prompt": [{"role": "user", "content": ...}], "label": "34", "metadata": {...}}
    verl    {"data_source", "prompt", "ability", "reward_model": {"ground_truth", "style"}, "extra_info": {"index",
            "need_tools_kwargs", "tools_kwargs": {"code_interpreter": {"create_kwargs": {"ground_truth"}}}}}

Instructions that published sets wrap around a question are replaced by one that asks for `Answer: \\boxed{...}`
(`--instruction`). A question that occurs several times is written once. Left out, and listed beside the output: one
that occurs with different answers (<output>.contradictions.jsonl), and one that an evaluation set holds
(<output>.leaked.jsonl).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_retool.data.leakage import EvaluationQuestions
from slime_retool.data.math_prompts import INSTRUCTIONS, bare_question, with_instruction
from slime_retool.data.questions import question_and_answer
from slime_retool.data.readers import Row, read_rows, write_rows
from slime_retool.errors import DataError, SlimeRetoolError, run_command

SCHEMAS = ("slime", "verl")


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
    leaked: list[Row]
    """{question, label, evaluation, overlap} of the questions left out."""


def convert(
    rows: Sequence[Row],
    source: str,
    *,
    schema: str = "slime",
    instruction: str = "dapo",
    evaluation: EvaluationQuestions | None = None,
) -> Conversion:
    """Deduplicate `rows` by question and write them as RL prompts; `source` names them."""
    prompt_labels: dict[str, set[str]] = {}
    labels: dict[str, set[str]] = {}
    first: dict[str, Row] = {}
    for number, row in enumerate(rows):
        prompt, label = question_and_answer(row, f"{source}, row {number + 1}")
        question = bare_question(prompt)
        prompt_labels.setdefault(prompt, set()).add(label)
        labels.setdefault(question, set()).add(label)
        content = with_instruction(question, instruction)
        first.setdefault(question, _row(schema, content, label, row.get("data_source") or source, number))
    contradictory = {question for question, found in labels.items() if len(found) > 1}
    leaked = {}
    if evaluation is not None:
        leaks = {question: evaluation.find(question) for question in first}
        leaked = {question: leak for question, leak in leaks.items() if leak is not None}
    return Conversion(
        rows=[row for question, row in first.items() if question not in contradictory and question not in leaked],
        num_read=len(rows),
        num_unique_prompts=len(prompt_labels),
        num_contradictory_prompts=sum(len(found) > 1 for found in prompt_labels.values()),
        num_unique=len(first),
        contradictions=[{"question": q, "labels": sorted(labels[q])} for q in first if q in contradictory],
        leaked=[
            {"question": q, "label": min(labels[q]), "evaluation": leak.evaluation, "overlap": round(leak.overlap, 3)}
            for q, leak in leaked.items()
        ],
    )


def _row(schema: str, content: str, label: str, source: str, number: int) -> Row:
    prompt = [{"role": "user", "content": content}]
    if schema == "slime":
        return {"prompt": prompt, "label": label, "metadata": {"source": source, "row": number}}
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": label, "style": "rule"},
        "extra_info": {
            "index": number,
            "need_tools_kwargs": True,
            "tools_kwargs": {"code_interpreter": {"create_kwargs": {"ground_truth": label}}},
        },
    }


def evaluation_questions(files: Sequence[str]) -> EvaluationQuestions:
    """The questions of evaluation files, named "<file>, row <number>"."""
    named = ((f"{Path(file).name}, row {n}", row) for file in files for n, row in enumerate(read_rows(file), start=1))
    return EvaluationQuestions((name, bare_question(question_and_answer(row, name)[0])) for name, row in named)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="a .parquet or .jsonl file")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write; .jsonl (or .parquet)")
    parser.add_argument("--schema", choices=SCHEMAS, default="slime", help="columns to write (default: %(default)s)")
    parser.add_argument(
        "--instruction", choices=tuple(INSTRUCTIONS), default="dapo",
        help="what is said about the answer's form: as published with DAPO-Math-17k, in one short sentence, or nothing "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--evaluation-sets", nargs="+", default=[], metavar="FILE", help="leave out questions that these files hold"
    )
    args = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _write(args), mistakes=SlimeRetoolError)


def _write(args: argparse.Namespace) -> int:
    """Read, convert and write the rows."""
    evaluation = evaluation_questions(args.evaluation_sets) if args.evaluation_sets else None
    done = convert(
        read_rows(args.input), Path(args.input).stem,
        schema=args.schema, instruction=args.instruction, evaluation=evaluation,
    )  # fmt: skip
    if not done.rows:
        raise DataError(f"{args.input}: every question is contradictory or leaked, nothing to write")
    write_rows(args.output, done.rows)
    for name, listed in (("contradictions", done.contradictions), ("leaked", done.leaked)):
        list_file = Path(f"{args.output}.{name}.jsonl")
        if listed:
            write_rows(list_file, listed)
        else:
            list_file.unlink(missing_ok=True)
    checked = f", {len(done.leaked)} that an evaluation set holds left out" if evaluation is not None else ""
    print(
        f"{args.input}: {done.num_read} rows, {done.num_unique_prompts} unique prompts, "
        f"{done.num_contradictory_prompts} of them with contradictory answers\n"
        f"{args.output}: {done.num_unique} unique questions (instructions and surrounding blanks removed), "
        f"{len(done.contradictions)} contradictory left out{checked}, {len(done.rows)} rows written"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
