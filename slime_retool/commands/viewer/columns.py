"""One row of the table for each sample, and what looks suspicious about a sample.

R tokens of a response; token lists cover prompt and response (T).
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

from slime_retool.commands.viewer.reading import DumpedSample
from slime_retool.rollout.sample_metrics import is_right
from slime_retool.rollout.transcripts import last_asked
from slime_retool.types import Sample, SampleStatus

NO_CALL, REPEATED, NO_LABEL, LEARNED_OBSERVATION, NO_END = 1, 2, 4, 8, 16
FLAGS = {
    NO_CALL: ("no call", "rewarded without a tool call, in a run that has tools"),
    REPEATED: ("repeated", "the response says the same again and again: it compresses to a fifth or less"),
    NO_LABEL: ("label absent", "rewarded although the label does not occur in the response"),
    LEARNED_OBSERVATION: (
        "tool text learned",
        "the loss mask covers what marks a tool's result: its output is learned, or the model made one up",
    ),
    NO_END: ("no end", "completed, but the last token of the response is no end mark: cut off?"),
}
"""Bit of the column `flags` -> (short name, what it means)."""

COLUMNS = (
    "kind", "step", "index", "group", "prompt", "source", "status", "reward", "right", "turns", "calls", "errors",
    "malformed", "prompt_tokens", "response_tokens", "model_tokens", "mismatch", "advantage", "log_prob", "version",
    "seconds", "flags",
)  # fmt: skip
CODED = ("kind", "source", "status")
"""Columns whose values are places in a list of names."""

_OBSERVATION = re.compile(r"<(tool_response|interpreter)>")
_SPLIT = re.compile(r"(<tool_response>.*?(?:</tool_response>|\Z)|<interpreter>.*?(?:</interpreter>|\Z))", re.DOTALL)
_END_MARK = re.compile(r"<[^<>\s]{1,40}>\s*\Z")
_MIN_REPEATED = 400
_PREVIEW = 120


class Table:
    """The columns of one run. Rows are added in the order in which pieces hold the samples."""

    def __init__(self, reward_key: str | None, accuracy_threshold: float | None) -> None:
        self._reward_key, self._threshold = reward_key, accuracy_threshold
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self._codes: dict[str, dict[str, int]] = {name: {} for name in CODED}
        self._prompts: dict[str, int] = {}
        self._previews: list[str] = []
        self._labels: list[str] = []
        self._keys: list[str] = []

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, dumped: DumpedSample) -> None:
        """Raises ValueError when the sample has a reward that --reward-key does not name."""
        sample = dumped.sample
        reward = sample.reward_value(self._reward_key) if sample.reward is not None else None
        right = is_right(sample, self._reward_key, self._threshold) if sample.reward is not None else None
        calls = sample.num_tool_calls
        values = {
            "kind": self._code("kind", "train" if dumped.eval_set is None else f"eval/{dumped.eval_set}"),
            "step": dumped.rollout_id,
            "index": sample.index,
            "group": sample.group_index,
            "prompt": self._prompt(sample),
            "source": self._code("source", sample.source),
            "status": self._code("status", sample.status.value),
            "reward": short(reward),
            "right": None if right is None else int(right),
            "turns": sample.num_turns,
            "calls": calls,
            "errors": sample.num_tool_errors,
            "malformed": sample.num_malformed_calls,
            "prompt_tokens": sample.prompt_length,
            "response_tokens": sample.response_length,
            "model_tokens": sum(sample.loss_mask),
            "mismatch": short(_mismatch(dumped)),
            "advantage": short(_mean_learned(sample, dumped.trained.advantages if dumped.trained else None)),
            "log_prob": short(_mean_learned(sample, sample.rollout_log_probs)),
            "version": min(sample.weight_versions, default=None),
            "seconds": short(_seconds(sample)),
            "flags": flags(dumped, reward),
        }
        for name, value in values.items():
            self._columns[name].append(value)

    def as_dict(self) -> dict[str, Any]:
        """What the page reads: columns by name, names of coded values, prompts, and what flags mean."""
        columns = dict(self._columns)
        if not any(columns["calls"]) and not any(columns["malformed"]):  # no tools: nothing to miss
            columns["flags"] = [bits & ~NO_CALL for bits in columns["flags"]]
        return {
            "columns": columns,
            "names": {name: list(codes) for name, codes in self._codes.items()},
            "prompts": {"preview": self._previews, "label": self._labels, "key": self._keys},
            "flags": [[bit, *text] for bit, text in FLAGS.items()],
        }

    def _code(self, column: str, name: str) -> int:
        codes = self._codes[column]
        return codes.setdefault(name, len(codes))

    def _prompt(self, sample: Sample) -> int:
        """A number for the prompt, the same for samples of the same prompt; its key is the same in every run."""
        key = blake2b(json.dumps([sample.prompt, sample.label]).encode(), digest_size=8).hexdigest()
        if key not in self._prompts:
            self._prompts[key] = len(self._prompts)
            self._keys.append(key)
            self._previews.append(preview(sample))
            self._labels.append(str(sample.label if sample.label is not None else "")[:_PREVIEW])
        return self._prompts[key]


def preview(sample: Sample) -> str:
    """The beginning of the last thing the user says, on one line."""
    return " ".join(last_asked(sample)[: 4 * _PREVIEW].split())[:_PREVIEW]


def segments(dumped: DumpedSample) -> list[tuple[str, str]]:
    """The response in parts, as ("model" or "tool", text): by the loss mask where token texts are known, else by tags.

    A sample whose whole mask is 0 (an overlong one, say) is split by tags too.
    """
    sample, texts = dumped.sample, dumped.token_texts
    if texts is None or not any(sample.loss_mask):
        parts = _SPLIT.split(sample.response)
        return [("tool" if _OBSERVATION.match(part) else "model", part) for part in parts if part]
    response = list(zip(sample.loss_mask, texts[sample.prompt_length :], strict=True))
    runs = [(mask, "".join(text for _, text in run)) for mask, run in groupby(response, key=lambda pair: pair[0])]
    return [("model" if mask else "tool", text) for mask, text in runs]


def flags(dumped: DumpedSample, reward: float | None) -> int:
    """What looks suspicious, as bits; `NO_CALL` is for the whole run to confirm."""
    sample, found = dumped.sample, 0
    text = sample.response
    if reward is not None and reward > 0:
        found |= NO_CALL * (sample.num_tool_calls == 0)
        found |= NO_LABEL * bool(sample.label and str(sample.label).strip() not in text)
    if len(text) >= _MIN_REPEATED:
        data = text[:20_000].encode("utf-8", "replace")
        found |= REPEATED * (len(zlib.compress(data, 1)) * 5 <= len(data))
    if dumped.token_texts is not None:
        learned = (part for kind, part in segments(dumped) if kind == "model")
        found |= LEARNED_OBSERVATION * any(_OBSERVATION.search(part) for part in learned)
        if sample.status is SampleStatus.COMPLETED and sample.tokens:
            found |= NO_END * (_END_MARK.search("".join(dumped.token_texts[-8:])) is None)
    return found


def short(value: float | None, digits: int = 5) -> float | None:
    """Rounded, for a smaller page; None where it is no finite number."""
    return round(float(value), digits) if value is not None and math.isfinite(value) else None


def _seconds(sample: Sample) -> float | None:
    """From the first thing that was done for the sample to the end of the last one."""
    if not sample.spans:
        return None
    return max(span["start"] + span["seconds"] for span in sample.spans) - min(span["start"] for span in sample.spans)


def _mismatch(dumped: DumpedSample) -> float | None:
    """The largest difference between the engine's log-prob and the trainer's, over the response."""
    ours = dumped.trained.log_probs if dumped.trained else None
    if ours is None or len(ours) != dumped.sample.response_length:
        return None
    triples = zip(dumped.sample.loss_mask, dumped.sample.rollout_log_probs, ours, strict=True)
    return max((abs(engine - value) for mask, engine, value in triples if mask and value is not None), default=None)


def _mean_learned(sample: Sample, values: Sequence[float | None] | None) -> float | None:
    """Mean over the tokens that the model wrote."""
    if values is None or len(values) != len(sample.loss_mask):
        return None
    chosen = [value for mask, value in zip(sample.loss_mask, values, strict=True) if mask and value is not None]
    return sum(chosen) / len(chosen) if chosen else None
