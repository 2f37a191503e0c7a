"""Programs that solve reasoning-gym's tasks (https://github.com/open-thought/reasoning-gym), all at once.

`data/puzzles.jsonl` holds ten tasks of each of 55 families: the question (without instructions that all questions of
the family share) and an answer that the family's own scorer gives full marks. `data/puzzle_programs.txt` holds our
program for each family; it computes the answer from `question`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from test_jail import LEVELS, in_box

from slime_retool.sandbox import Result, Sandbox

DATA = Path(__file__).parent / "data"
PUZZLES = [json.loads(line) for line in (DATA / "puzzles.jsonl").read_text("utf-8").splitlines()]
PROGRAMS = dict(part.split("\n", 1) for part in (DATA / "puzzle_programs.txt").read_text("utf-8").split("### ")[1:])


@pytest.mark.parametrize("level", LEVELS)
def test_programs_for_550_puzzles_run_at_once_with_right_answers(level: str) -> None:
    """As one-shots, and as cells of one session for each family."""
    codes = [f"question = {puzzle['question']!r}\n{PROGRAMS[puzzle['family']]}" for puzzle in PUZZLES]
    assert len(codes) == 550 and len(PROGRAMS) == 55

    async def use(box: Sandbox) -> list[list[Result]]:
        cells = [
            box.session(puzzle["family"]).run(code, timeout=60) for puzzle, code in zip(PUZZLES, codes, strict=True)
        ]
        return [
            list(await asyncio.gather(*(box.run(code, timeout=60) for code in codes))),
            list(await asyncio.gather(*cells)),
        ]

    one_shots, cells = in_box(level, use, packages=("numpy", "sympy"))
    wrong = [
        (puzzle["family"], puzzle["question"], result)
        for results in (one_shots, cells)
        for puzzle, result in zip(PUZZLES, results, strict=True)
        if (result.stdout + (result.result or "")).strip() != puzzle["answer"]
    ]
    assert wrong == []
