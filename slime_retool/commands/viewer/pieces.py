r"""Data as .js files: `viewerData("a/texts/0003", {...});`. A page opened from disk may load scripts, but not fetch.

Everything outside ASCII is written as `\u....`, and `<` too, so that no text ends a string, a line or a script.
Text search would have to load all pieces; an index says which of them can hold a text: for each piece the set of its
trigrams (three letters in a row, ASCII in lower case), hashed to `TRIGRAM_BITS` bits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_retool.commands.viewer.columns import segments, short
from slime_retool.commands.viewer.reading import DumpedSample
from slime_retool.commands.viewer.text import prompt_text
from slime_retool.rollout.open_turns import runs_of

PIECE_SAMPLES = 200
PIECE_CHARACTERS = 2_000_000
"""A piece ends with the sample that reaches this much text."""
TRIGRAM_BITS = 1 << 16
MAX_METADATA = 20_000
LOG_PROB_DIGITS = 4


def write_data(path: Path, name: str, value: Any) -> None:
    """One call of `viewerData(name, value)`. ValueError for numbers that are not finite: they are not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(f"viewerData({json.dumps(name)},{text});\n", encoding="ascii")


def trigram_bits(text: str) -> np.ndarray:
    """[TRIGRAM_BITS] bool: the trigrams of `text`. The page's `trigrams` (store.js) computes the same places."""
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), dtype="<u2").astype(np.uint32)
    units = np.where((units >= 65) & (units <= 90), units + 32, units)
    bits = np.zeros(TRIGRAM_BITS, dtype=bool)
    if len(units) >= 3:
        bits[(units[:-2] * 961 + units[1:-1] * 31 + units[2:]) % TRIGRAM_BITS] = True
    return bits


class PieceWriter:
    """Texts and tokens of one run's samples, in the order of its table. Call `close` at the end."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self.starts: list[int] = []
        """Row of the first sample of each piece."""
        self._rows = 0
        self._index: list[str] = []
        self._begin()

    def add(self, dumped: DumpedSample) -> None:
        sample, texts = dumped.sample, dumped.token_texts
        rendered = "".join(texts[: sample.prompt_length]) if texts is not None else ""
        text, parts = rendered or prompt_text(sample), segments(dumped)
        prompt = {"text": text, "rendered": bool(rendered), "tools": sample.tools}
        self._texts.append({
            "prompt": _place(self._prompts, prompt),
            "parts": parts,
            "label": sample.label,
            "reward": _finite(sample.reward),
            "error": sample.error,
            "metadata": _bounded(sample.metadata),
            "versions": sample.weight_versions,
            "spans": _finite(sorted(sample.spans, key=lambda span: span["start"])),
        })  # fmt: skip
        self._tokens.append(self._token_record(dumped))
        said = [part for _, part in parts]
        searched = "\n".join([text, *said, str(sample.label or ""), sample.error or ""])
        self._searched.append(searched)
        self._characters += len(searched)
        self._rows += 1
        if len(self._texts) == PIECE_SAMPLES or self._characters >= PIECE_CHARACTERS:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the index."""
        if self._texts:
            self._flush()
        write_data(self._folder / "search.js", f"{self._run}/search", {"bits": TRIGRAM_BITS, "pieces": self._index})

    def _begin(self) -> None:
        self._texts: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any] | None] = []
        self._prompts: dict[str, int] = {}
        self._vocabulary: dict[str, int] = {}
        self._prompt_ids: dict[str, int] = {}
        self._searched: list[str] = []
        self._characters = 0

    def _flush(self) -> None:
        number = len(self.starts)
        self.starts.append(self._rows - len(self._texts))
        for kind, value in (
            ("texts", {"prompts": list(map(json.loads, self._prompts)), "samples": self._texts}),
            ("tokens", {
                "vocabulary": list(self._vocabulary),
                "prompts": list(map(json.loads, self._prompt_ids)),
                "samples": self._tokens,
            }),
        ):  # fmt: skip
            write_data(self._folder / kind / f"{number:04d}.js", f"{self._run}/{kind}/{number:04d}", value)
        bits = np.packbits(trigram_bits("\n".join(self._searched)), bitorder="little")
        self._index.append(base64.b64encode(bits.tobytes()).decode())
        self._begin()

    def _token_record(self, dumped: DumpedSample) -> dict[str, Any] | None:
        """Tokens as places in the piece's vocabulary; mask as [value, length] runs; numbers over the response."""
        sample, texts, trained = dumped.sample, dumped.token_texts, dumped.trained
        if texts is None:
            return None
        vocabulary = self._vocabulary
        places = [vocabulary.setdefault(text, len(vocabulary)) for text in texts]
        record: dict[str, Any] = {
            "prompt": _place(self._prompt_ids, places[: sample.prompt_length]),
            "response": places[sample.prompt_length :],
            "mask": runs_of(sample.loss_mask),
            "engine": _rounded(sample.rollout_log_probs),
        }
        for name, values in (
            ("trainer", trained.log_probs if trained else None),
            ("advantage", trained.advantages if trained else None),
        ):
            if values is not None and len(values) == sample.response_length:
                record[name] = _rounded(values)
        return record


def _place(table: dict[str, int], value: Any) -> int:
    """Where `value` is, or now gets, in a table of what several samples share."""
    return table.setdefault(json.dumps(value, default=repr), len(table))


def _rounded(values: Sequence[float | None]) -> list[float | None] | float | None:
    """One number where all are the same: an advantage mostly is."""
    rounded = [short(value, LOG_PROB_DIGITS) for value in values]
    return rounded[0] if len(set(rounded)) == 1 else rounded


def _finite(value: Any) -> Any:
    """`value` with numbers that are not finite as text."""
    if isinstance(value, dict):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and short(value) is None else value


def _bounded(metadata: Any) -> Any:
    text = json.dumps(metadata, default=repr)
    return _finite(metadata) if len(text) <= MAX_METADATA else f"{text[:MAX_METADATA]} ... ({len(text)} characters)"
