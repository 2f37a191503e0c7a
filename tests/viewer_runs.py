"""Made-up runs for the viewer's tests: arithmetic with a Python tool, in the form that --dump-rollouts writes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "code_interpreter", "parameters": {"type": "object"}}}]
BEGIN = 1_700_000_000.0


def call_text(code: str) -> str:
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def pieces_of(text: str) -> list[str]:
    """A stand-in for a tokenizer: words with the space before them, marks and newlines apart."""
    return re.findall(r"<[^<>\n]{1,40}>| ?[^\W_]+|.", text, re.DOTALL)


def make_sample(
    index: int, *, step: int = 0, group: int = 0, turns: list[tuple[str, str]] | None = None, **changes: Any
) -> dict[str, Any]:
    """One dumped line. `turns` are ("model" or "tool", text); by default a call, its result and an answer."""
    rng = random.Random(index)
    a, b = 12 + group % 37, 5 + group % 11
    question = f"What is {a} * {b} + {group % 5}? Use the tool, then put the answer into \\boxed{{}}."
    answer = a * b + group % 5
    right = rng.random() < 0.3 + 0.02 * min(step, 30)
    said = answer if right else answer + rng.randint(1, 9)
    if turns is None:
        code = f"# the product first\nproduct = {a} * {b}\nprint(product + {group % 5})"
        turns = [
            ("model", f"I compute {a} times {b} with Python.\n{call_text(code)}"),
            ("tool", f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
                     "<|im_start|>assistant\n"),
            ("model", f"The result is \\boxed{{{said}}}.<|im_end|>"),
        ]  # fmt: skip
    rendered = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    texts = [pieces_of(text) for _, text in turns]
    mask = [int(kind == "model") for (kind, _), part in zip(turns, texts, strict=True) for _ in part]
    prompt_texts = pieces_of(rendered)
    response_texts = [text for part in texts for text in part]
    calls = sum(kind == "tool" for kind, _ in turns)
    start = BEGIN + 20 * step + rng.random()
    generated = 2 + 8 * rng.random()
    return {
        "prompt": [{"role": "user", "content": question}],
        "label": str(answer),
        "index": index,
        "group_index": group,
        "row": group % 64,
        "source": ("gsm8k", "dapo")[group % 2],
        "tools": TOOLS,
        "metadata": {},
        "tokens": [hash(text) % 150_000 for text in prompt_texts + response_texts],
        "response_length": len(mask),
        "response": "".join(text for _, text in turns),
        "loss_mask": mask,
        "rollout_log_probs": [m * round(-rng.random() ** 4 * 3, 5) for m in mask],
        "weight_versions": [step] * (calls + 1),
        "num_turns": calls + 1,
        "num_tool_calls": calls,
        "num_tool_errors": 0,
        "num_malformed_calls": 0,
        "reward": {"score": 1.0 if right else -1.0, "acc": right, "pred": str(said)},
        "status": "completed",
        "error": None,
        "spans": [  # fmt: skip
            {"name": "generate", "start": start, "seconds": generated, "status": "ok"},
            {"name": "reward", "start": start + generated, "seconds": 0.3, "status": "ok"},
            {"name": "request", "start": start, "seconds": generated * 0.4, "status": "ok", "turn": 1, "tokens": 40,
             "prompt_tokens": 30, "cached_tokens": 10},
            {"name": "tool", "start": start + generated * 0.4, "seconds": generated * 0.15, "status": "ok", "turn": 1,
             "waited": 0.25},
        ],
        "rollout_id": step,
        "token_texts": prompt_texts + response_texts,
        **changes,
    }


def trained_line(row: dict[str, Any], advantage: float, shift: float = 0.01) -> dict[str, Any]:
    """What the trainer adds to a dumped line: log-probs `shift` above and below the engine's, and one advantage."""
    rng = random.Random(row["index"] + 1)
    mask = row["loss_mask"]
    return {
        "index": row["index"],
        "log_probs": [
            m * round(value + shift * rng.uniform(-1, 1), 5)
            for m, value in zip(mask, row["rollout_log_probs"], strict=True)
        ],
        "advantages": [m * advantage for m in mask],
    }


def write_run(
    folder: Path, *, steps: int = 3, groups: int = 4, size: int = 4, first_index: int = 0
) -> Path:
    """A run of `steps` rollouts of `groups` times `size` samples; prompts come back every second step."""
    index, metrics = first_index, []
    for step in range(steps):
        rows = []
        for group in range(groups):
            number = (step % 2) * groups + group
            for _ in range(size):
                rows.append(make_sample(index, step=step, group=number))
                rows[-1]["group_index"] = step * groups + group
                index += 1
        write_rows(folder / "rollouts" / f"rollout_{step:06d}.jsonl", rows)
        mean = {row["group_index"]: 0.0 for row in rows}
        for row in rows:
            mean[row["group_index"]] += row["reward"]["score"] / size
        lines = [trained_line(row, round(row["reward"]["score"] - mean[row["group_index"]], 4)) for row in rows]
        write_rows(folder / "rollouts" / f"trained_{step:06d}.jsonl", lines)
        metrics.append(metrics_row(step, rows))
    rows = [make_sample(i, step=steps - 1, group=100 + i, eval_set="aime") for i in range(2 * size)]
    write_rows(folder / "eval" / f"aime_{steps - 1:06d}.jsonl", rows)
    write_rows(folder / "metrics.jsonl", metrics)
    return folder


def metrics_row(step: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    rng = random.Random(1000 + step)
    reward = sum(row["reward"]["score"] for row in rows) / len(rows)
    return {
        "step": step, "time": BEGIN + 20 * step + 19.5,
        "rollout/reward_mean": reward, "rollout/accuracy": (reward + 1) / 2,
        "rollout/mean_turns": 1.5 + 0.02 * step, "rollout/tool_call_rate": min(1.0, 0.4 + 0.03 * step),
        "rollout/tool_error_rate": 0.3 / (1 + step), "rollout/malformed_call_rate": 0.1 / (1 + step),
        "rollout/response_tokens_mean": 80.0 + rng.random() * 10, "rollout/model_tokens_mean": 60 + 5 * rng.random(),
        "rollout/truncated_ratio": 0.05 * rng.random(),
        "train/loss": 0.1 * rng.random(), "train/entropy": 0.8 / (1 + 0.05 * step), "train/kl_loss": 0.001 * step,
        "train/logprob_abs_diff": 0.003 * rng.random(), "train/grad_norm": 0.5 + rng.random(),
        "rollout/weight_version_min": step, "rollout/weight_version_max": step,
        "perf/generate_seconds": 11.0 + rng.random(), "perf/offload_seconds": 0.6, "perf/log_probs_seconds": 1.2,
        "perf/train_seconds": 4.1, "perf/sync_seconds": 0.4, "perf/idle_seconds": 0.2, "perf/step_seconds": 18.0,
    }  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_large_run(folder: Path, *, steps: int = 98, samples: int = 512) -> Path:
    """About 50,000 samples, quickly: each step repeats the same lines under other numbers."""
    numbers = {"index": 7_000_001, "group_index": 7_000_002, "rollout_id": 7_000_003}
    rows = [{**make_sample(i, step=20, group=i // 8), **numbers} for i in range(samples)]
    trained = [{**trained_line(row, 0.5 if row["reward"]["acc"] else -0.5), "index": 7_000_001} for row in rows]
    # The one long conversation, which a test looks for.
    long_turns = [("model", "needle in a haystack: " + "let me check. " * 400 + "\\boxed{1}<|im_end|>")]
    rows[100] = {**make_sample(100, step=20, group=12, turns=long_turns), **numbers}
    trained[100] = {**trained_line(rows[100], -0.5, shift=0.5), "index": 7_000_001}
    lines = [[json.dumps(row) for row in part] for part in (rows, trained)]
    plain = [json.dumps({**make_sample(100, step=20, group=12), **numbers})]
    for step in range(steps):
        for name, part in (("rollout", lines[0]), ("trained", lines[1])):
            if name == "rollout" and step != 57:  # the needle is in one step only
                part = [*part[:100], *plain, *part[101:]]
            text = "".join(
                line.replace("7000001", str(step * samples + i))
                .replace("7000002", str(step * samples // 8 + i // 8))
                .replace("7000003", str(step)) + "\n"
                for i, line in enumerate(part)
            )  # fmt: skip
            path = folder / "rollouts" / f"{name}_{step:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    write_rows(folder / "metrics.jsonl", [metrics_row(step, rows) for step in range(steps)])
    return folder


HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror=\"window.hacked = 1\">",
    '"); window.hacked = 1; ("',
    "</pre></div><style>*{display:none}</style>",
    "\u2028\u2029\x00\x1b[31m\x7f\ufeff\u202e",
    "\ud800 half a pair",
    "\\u003c/script\\u003e \\",
    "${window.hacked = 1} `x`",
    "<a href=javascript:window.hacked=1>click</a><svg onload=window.hacked=1>",
)


def write_hostile_run(folder: Path) -> Path:
    """Hostile text in every place that a page shows, and a line of a megabyte."""
    rows = []
    for i, text in enumerate((*HOSTILE, "m" * 1_000_000)):
        code = f"```python\n{text}\n```<|im_end|>"
        turns = [("model", f"{text}\n{call_text(text)}"), ("tool", text), ("model", code)]
        more = {"label": text[:500], "error": text, "metadata": {text[:50]: text}, "source": text[:50]}
        rows.append(make_sample(i, group=i, turns=turns, **more))
        rows[-1]["prompt"] = [{"role": "user", "content": text}]
        if i % 2:  # shown by its messages then
            del rows[-1]["token_texts"]
    write_rows(folder / "rollouts" / "rollout_000000.jsonl", rows)
    metrics = [{"step": 0, "time": 1.0, f"train/{HOSTILE[1]}": 1.0}, {"step": 1, HOSTILE[0]: 2}]
    write_rows(folder / "metrics.jsonl", metrics)
    return folder
