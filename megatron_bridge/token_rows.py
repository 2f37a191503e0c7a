"""Tokens that a Hugging Face checkpoint has never seen: found by the rows of its embedding, and given new ones.

Rows that training never touched stay what they began as or were decayed to: the same for many tokens, or zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import Tensor

from megatron_bridge.convert import EMBEDDING_HF, OUTPUT_LAYER_HF, copy_beside_weights, replace_directory
from megatron_bridge.safetensors_io import SafetensorsCheckpoint, rewrite_file

_MOST_UNUSED = 512
"""Rows without a token that are looked at."""
_STEP = 1 / 64
"""A row that another token has already is made longer by this, which bf16 can tell apart."""


def untrained_tokens(
    checkpoint: str | Path, tokens: Mapping[str, int], others: Iterable[int], first_unused: int
) -> list[str]:
    """Those of `tokens` (text -> id) whose embedding row is zero, or bit for bit that of another id.

    Compared are all of `tokens`, the ids `others`, and rows from `first_unused` on, which the tokenizer has no token
    for. Only these rows are read. ValueError for a checkpoint that cannot be read.
    """
    hf = SafetensorsCheckpoint(checkpoint)
    if EMBEDDING_HF not in hf.entries:
        return []
    rows = hf.entries[EMBEDDING_HF].shape[0]
    ids = {*tokens.values(), *others, *range(first_unused, min(rows, first_unused + _MOST_UNUSED))}
    read = hf.read_rows(EMBEDDING_HF, sorted(number for number in ids if number < rows))
    shared = Counter(read.values())
    alike = {number for number, row in read.items() if shared[row] > 1 or not any(row)}
    return [token for token, number in tokens.items() if number in alike]


def initialize_tokens(
    checkpoint: str | Path, output_dir: str | Path, pieces: Mapping[int, Sequence[int]], *, force: bool = False
) -> None:
    """Copy a checkpoint, with rows for the ids `pieces` that are the mean of the rows of the ids that each is made of.

    In the embedding and, where there is one, in the output layer. A factor makes equal means differ, so that no two ids
    share a row. ValueError for an id beyond the rows, for pieces whose mean is zero, and for an existing non-empty
    `output_dir` without `force`.
    """
    origin = Path(checkpoint)
    hf = SafetensorsCheckpoint(origin)

    def value_of(name: str) -> Tensor:
        value = hf.read(name)
        return _with_rows(value, pieces, name) if name in (EMBEDDING_HF, OUTPUT_LAYER_HF) else value

    with replace_directory(output_dir, force=force, sources=[checkpoint]) as out:
        copy_beside_weights(origin, out)
        for file in hf.files:
            rewrite_file(origin / file, out / file, lambda entry: value_of(entry.name))


def _with_rows(matrix: Tensor, pieces: Mapping[int, Sequence[int]], name: str) -> Tensor:
    """`matrix` [vocabulary, width] with a row of its own for each id of `pieces`."""
    highest = max(chain(pieces, *pieces.values()))
    if highest >= len(matrix):
        raise ValueError(f"{name} has {len(matrix)} rows, none for the tokenizer's token {highest}: resize it first")
    means = {number: matrix[list(made_of)].double().mean(0) for number, made_of in pieces.items()}
    for number, mean in means.items():
        if not mean.any():
            raise ValueError(f"{name}: the tokens {list(pieces[number])} that token {number} is made of have no values")
        factor = 1.0
        while (matrix == (row := (mean * factor).to(matrix.dtype))).all(1).any():
            factor += _STEP
        matrix[number] = row
    return matrix
