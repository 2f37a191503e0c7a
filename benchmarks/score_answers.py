"""Every answer of a data set against itself, its respellings and its neighbours. CPU, minutes.

    python benchmarks/score_answers.py math500.jsonl gsm8k_test.jsonl

The ground truth of each row, put into a box, must score right by `--rm-type math_verify`, and so must the same answer
written in another way; what is next to it (another digit, sign or letter, its case, a prime) must score wrong. Prints
one line of counts for each file, and what fails on stderr; exit code 1 when anything does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.data.questions import question_and_answer
from slime_retool.data.readers import read_rows
from slime_retool.reward import compute_score


def respellings(answer: str) -> Iterator[str]:
    yield answer
    yield f" {answer} "
    yield f"${answer}$"
    yield f"\\text{{{answer}}}" if "\\" not in answer else f"{answer}."
    yield answer.replace("\\frac", "\\dfrac")
    yield re.sub(r"(?<!\\)([)\]])", r"\\right\1", re.sub(r"(?<!\\)([(\[])", r"\\left\1", answer))
    yield answer.replace("-", "−").replace("\\pi", "π").replace("\\infty", "∞")
    if "=" not in answer and "\\in" not in answer and "," not in answer:
        yield f"x = {answer}"


def neighbours(answer: str) -> Iterator[str]:
    """Answers that look alike and mean something else."""
    if match := re.search(r"\d", answer):
        digit = str((int(match[0]) + 1) % 10)
        yield answer[: match.start()] + digit + answer[match.end() :]
        yield answer + digit if answer[-1].isdigit() else f"{digit.replace('0', '1')}{answer}"
    elif match := re.search(r"(?<![A-Za-z\\])[A-Za-z]", answer):
        yield answer[: match.start()] + ("q" if match[0] != "q" else "w") + answer[match.end() :]
    if match := re.search(r"(?<![A-Za-z\\])[A-Za-df-hj-z](?![A-Za-z])", answer):  # e and i are numbers
        yield answer[: match.start()] + match[0].swapcase() + answer[match.end() :]
        yield f"{answer[: match.end()]}'{answer[match.end() :]}"
    if re.fullmatch(r"-?[\d.,]*[1-9][\d.,]*|-?\\frac\{\d+\}\{\d+\}", answer):
        yield answer[1:] if answer.startswith("-") else f"-{answer}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    failures = 0
    for file in parser.parse_args().files:
        cases = []
        for number, row in enumerate(read_rows(file), start=1):
            _, label = question_and_answer(row, f"{file}, row {number}")
            cases += [(number, label, each, True) for each in dict.fromkeys(respellings(label))]
            cases += [(number, label, each, False) for each in dict.fromkeys(neighbours(label))]
        with ThreadPoolExecutor(2) as pool:
            scores = pool.map(lambda case: compute_score(f"\\boxed{{{case[2]}}}", case[1], "math_verify")["acc"], cases)
        counts: Counter[str] = Counter()
        for (number, label, answer, right), acc in zip(cases, scores, strict=True):
            counts["respellings" if right else "neighbours"] += 1
            if acc is not right:
                counts["failures"] += 1
                print(f"{file}, row {number}: {answer!r} for {label!r} scores {acc}", file=sys.stderr)
        failures += counts["failures"]
        print(json.dumps({"file": file.name, "failures": 0, **counts}))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
