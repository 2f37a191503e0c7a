"""Training and evaluation rows for the quickstart: SFT tool traces, RL prompts, evaluation prompts.

    python examples/quickstart/traces.py --output-dir DIR [--seed N]

writes

- `sft.parquet`: `messages` (a list of {role, content, tool_calls}) and `tools` (a JSON string: a list of
  function schemas). Every tool output in it was printed by the code beside it.
- `rl.jsonl` and `eval.jsonl`: {prompt: messages, label: "123", tools: [...], metadata: {kind}}.

What SFT teaches, and what it leaves to RL: `TOOL_KINDS` are always solved with the tool. Of the `THIN_KINDS`
only about a third of the rows call the tool; the others state the right answer at once, as people who write
examples do. A small model cannot compute such an answer, but it learns to try. RL is where it finds out that
running code pays on every kind.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from problems import Problem, generate_problems

TOOL_KINDS = ("sum", "difference", "remainder", "digit_sum")
THIN_KINDS = ("distance", "and", "or", "xor")
SFT_KINDS = TOOL_KINDS + THIN_KINDS
# Below one half, so that the likeliest first token of a thin kind starts a direct answer; large enough that
# in a group of 8 samples some call the tool and show the difference.
THIN_TOOL_SHARE = 0.35

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Run Python code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}},
                "required": ["code"],
            },
        },
    }
]

_EXECUTOR = """
import contextlib, io, json, sys
outputs = []
for code in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    outputs.append(printed.getvalue().strip())
json.dump(outputs, sys.stdout)
"""


def execute(codes: Sequence[str], timeout: float = 120.0) -> list[str]:
    """Run the snippets one after the other in a fresh isolated Python; return what each printed, stripped.

    For snippets we generated ourselves: a snippet that raises is a bug of ours and ends the run.

    Raises RuntimeError with the child's error text when a snippet fails, subprocess.TimeoutExpired after
    `timeout` seconds.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", _EXECUTOR],
        input=json.dumps(list(codes)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a snippet must run without error, exit code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def final_message(answer: str) -> dict:
    """The assistant's last turn: the answer in the box that the reward reads."""
    return {"role": "assistant", "content": f"Answer: \\boxed{{{answer}}}"}


def tool_trace(problem: Problem, output: str) -> list[dict]:
    """Question, tool call, tool output, and the output copied into the box."""
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": problem.code}}}
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output},
        final_message(output),
    ]


def direct_trace(problem: Problem) -> list[dict]:
    """Question and answer, without the tool."""
    return [{"role": "user", "content": problem.question}, final_message(str(problem.answer))]


def build_sft_rows(num_rows: int, seed: int) -> list[dict]:
    """SFT rows {messages, tools}; tool outputs come from `execute`.

    Raises RuntimeError when an executed output is not the problem's answer.
    """
    rng = random.Random(f"traces-{seed}")
    problems = list(islice(generate_problems("sft", seed, SFT_KINDS), num_rows))
    outputs = execute([problem.code for problem in problems])
    rows = []
    for problem, output in zip(problems, outputs, strict=True):
        if output != str(problem.answer):
            raise RuntimeError(f"{problem.code!r} must print {problem.answer}, it printed {output!r}")
        use_tool = problem.kind in TOOL_KINDS or rng.random() < THIN_TOOL_SHARE
        messages = tool_trace(problem, output) if use_tool else direct_trace(problem)
        rows.append({"messages": messages, "tools": json.dumps(TOOLS)})
    return rows


def build_prompt_rows(split: str, num_rows: int, seed: int) -> list[dict]:
    """RL or evaluation rows {prompt, label, tools, metadata}, every kind equally often."""
    return [
        {
            "prompt": [{"role": "user", "content": problem.question}],
            "label": str(problem.answer),
            "tools": TOOLS,
            "metadata": {"kind": problem.kind},
        }
        for problem in islice(generate_problems(split, seed), num_rows)
    ]


def write_sft(rows: Sequence[dict], path: Path) -> None:
    """Write SFT rows as parquet; a message without tool calls reads back with `tool_calls` None."""
    import pandas

    pandas.DataFrame(rows).to_parquet(path, index=False)


def write_jsonl(rows: Sequence[dict], path: Path) -> None:
    """Write rows as one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_all(output_dir: Path, seed: int, sft_rows: int, rl_rows: int, eval_rows: int) -> dict[str, Path]:
    """Write the three files; returns their paths by split. Evaluation rows do not depend on `seed`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    names = {"sft": "sft.parquet", "rl": "rl.jsonl", "eval": "eval.jsonl"}
    paths = {split: output_dir / name for split, name in names.items()}
    write_sft(build_sft_rows(sft_rows, seed), paths["sft"])
    write_jsonl(build_prompt_rows("rl", rl_rows, seed), paths["rl"])
    write_jsonl(build_prompt_rows("eval", eval_rows, seed=0), paths["eval"])
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's SFT, RL and evaluation rows.")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="which SFT and RL problems are drawn")
    parser.add_argument("--sft-rows", type=int, default=6000)
    parser.add_argument("--rl-rows", type=int, default=1024)
    parser.add_argument("--eval-rows", type=int, default=128)
    args = parser.parse_args()
    for split, path in write_all(args.output_dir, args.seed, args.sft_rows, args.rl_rows, args.eval_rows).items():
        print(f"{split}: {path}")


if __name__ == "__main__":
    main()
