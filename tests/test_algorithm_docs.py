"""docs/algorithms.md tells of every algorithm what its record says."""

from __future__ import annotations

from pathlib import Path

from slime_retool.algo.algorithms import ALGORITHMS

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_the_table_has_each_record_with_its_formula_and_loss() -> None:
    lines = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    rows = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}
    for name, algorithm in ALGORITHMS.items():
        formula, _, loss = rows[name]
        assert (formula, loss.partition("'")[0]) == (algorithm.formula, algorithm.loss.name.upper()), name


def test_each_source_is_named() -> None:
    assert [name for name, algorithm in ALGORITHMS.items() if f"({algorithm.source})" not in PAGE] == []
