"""ReTool-SFT rows to conversations with tool calls.

    python examples/retool/sft_data_processing.py --input ReTool-SFT --output data/retool/ReTool-SFT.parquet

A ReTool row holds its whole solution in one assistant text: prose, `<code>` blocks with fenced Python,
`<interpreter>` blocks with what the code printed, and `<answer>` around the boxed answer. Here it becomes

    user       question and answer instruction (the same as in RL)
    assistant  prose + tool_calls [code_interpreter(code)]
    tool       what the interpreter printed
    ...
    assistant  prose, then "Answer: \\boxed{...}"

so that SFT teaches the call format which RL samples in, and never the interpreter's words. Output columns:
`messages` and `tools`, both lists of objects. Rows that do not have this shape are left out, counted by reason, and
listed in <output>.rejected.jsonl. `--verify-code` also runs every block in the sandbox, and leaves out rows whose
recorded output it does not reproduce.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from code_agreement import disagreement
from tool_sandbox import SCHEMA

from slime_retool.data.math_prompts import INSTRUCTIONS, with_instruction
from slime_retool.data.messages import parse_messages
from slime_retool.data.readers import Row, read_rows, split_slice, write_rows
from slime_retool.errors import ConfigError, DataError, SlimeRetoolError, run_command
from slime_retool.sandbox import Sandbox, SandboxPolicy
from slime_retool.sandbox.host.policy import ISOLATION_LEVELS
from slime_retool.types import Message

TOOLS = [SCHEMA]

QUESTION_MARKER = "*user question:*"
# The code's own text may hold a closing tag: with a fence, the block ends where fence and tag close together.
_CODE = re.compile(
    r"<code>\s*```(?:python3?|py)?[ \t]*\n(?P<fenced>.*?)\n?[ \t]*```\s*</code>"
    r"|<code>(?P<bare>(?:(?!```|<code>).)*?)</code>",
    re.DOTALL | re.IGNORECASE,
)
_OUTPUT = re.compile(r"\s*<interpreter>(?P<output>.*?)</interpreter>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(?P<answer>.*?)</answer>", re.DOTALL)
_TAG = re.compile(r"</?(?:code|interpreter|answer)>")


def convert_row(row: Row, instruction: str = "dapo") -> Row:
    """One ReTool row as {messages, tools}. Raises DataError with the reason when it does not have that shape."""
    messages = parse_messages(row.get("messages"), "messages")
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not roles or roles[0] != "user" or roles[-1] != "assistant":
        raise DataError("the conversation must begin with a user message and end with an assistant message")
    if "tool" in roles:
        raise DataError("the conversation already has tool messages")
    converted: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            converted += split_assistant_text(message["content"])
        elif message["role"] == "user":
            question = message["content"].partition(QUESTION_MARKER)[2] or message["content"]
            converted.append({"role": "user", "content": with_instruction(question, instruction)})
        else:
            converted.append({"role": "system", "content": message["content"]})
    if "\\boxed{" not in converted[-1]["content"]:
        raise DataError("the last turn holds no boxed answer")
    return {"messages": converted, "tools": TOOLS}


def split_assistant_text(text: str) -> list[Message]:
    """Assistant and tool turns of one ReTool solution; the last is always an assistant turn.

    Raises DataError for code without output, output without code, an empty turn or tags that do not pair up.
    """
    turns: list[Message] = []
    position = 0
    while block := _CODE.search(text, position):
        output = _OUTPUT.match(text, block.end())
        if output is None:
            raise DataError("a <code> block is not followed by an <interpreter> block")
        code = block["fenced"] if block["fenced"] is not None else block["bare"].strip("\n")
        if not code.strip():
            raise DataError("a <code> block is empty")
        call = {
            "type": "function",
            "function": {"name": TOOLS[0]["function"]["name"], "arguments": {"code": code}},
        }
        turns.append({"role": "assistant", "content": _prose(text[position : block.start()]), "tool_calls": [call]})
        turns.append({"role": "tool", "content": output["output"].strip()})
        position = output.end()
    turns.append({"role": "assistant", "content": _final_text(text[position:])})
    return turns


def _final_text(text: str) -> str:
    """The last turn, its <answer> block rewritten as the line that the reward reads."""
    answer = _ANSWER.search(text)
    if answer is None:
        final = _prose(text)
    elif text[answer.end() :].strip():
        raise DataError("text follows the <answer> block")
    else:
        final = f"{_prose(text[: answer.start()])}\n\nAnswer: {answer['answer'].strip()}".strip()
    if not final:
        raise DataError("nothing follows the last <interpreter> block")
    return final


def _prose(text: str) -> str:
    stray = _TAG.search(text)
    if stray:
        raise DataError(f"a {stray[0]} tag has no partner")
    return text.strip()


def convert_rows(rows: Sequence[Row], instruction: str = "dapo") -> tuple[dict[int, Row], list[Row]]:
    """(converted rows by row number, rejected rows as {row, reason, messages})."""
    converted, rejected = {}, []
    for number, row in enumerate(rows, start=1):
        try:
            converted[number] = convert_row(row, instruction)
        except DataError as error:
            rejected.append({"row": number, "reason": str(error), "messages": row.get("messages")})
    return converted, rejected


async def verify_rows(converted: Mapping[int, Row], policy: SandboxPolicy) -> dict[int, str]:
    """Row number -> reason, of the rows whose code does not print what was recorded.

    Raises ToolUnavailable when the sandbox is down: no row is judged by an outage.
    """
    # All rows wait at once.
    async with Sandbox(dataclasses.replace(policy, max_queue=max(1, len(converted)))) as box:
        reasons = await asyncio.gather(*(disagreement(box, row["messages"]) for row in converted.values()))
    return {number: reason for number, reason in zip(converted, reasons, strict=True) if reason is not None}


def load_rows(source: str) -> list[Row]:
    """Rows of a .parquet or .jsonl file, of all such files in a folder, or of the train split of a `datasets` name."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".parquet", ".jsonl"))
        if not files:
            raise ConfigError(f"--input {source!r}: the folder holds no .parquet or .jsonl file")
        return [row for file in files for row in read_rows(file)]
    if path.exists() or Path(split_slice(source)[0]).suffix in (".parquet", ".jsonl"):
        return read_rows(source)
    return list(_hub_rows(source))


def _hub_rows(name: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    try:
        yield from load_dataset(name, split="train")
    except Exception as error:  # `datasets` raises errors of many libraries: hub, network, file formats
        raise ConfigError(
            f"--input {name!r} is neither a file or folder here nor a data set that loads: {error}"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input", default="JoeYing/ReTool-SFT", metavar="SOURCE",
        help="a .parquet or .jsonl file, a folder of them, or a data set's name on the Hugging Face hub "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write; .parquet or .jsonl")
    parser.add_argument(
        "--instruction", choices=tuple(INSTRUCTIONS), default="dapo",
        help="what is said about the answer's form; the same as in rl_data_preprocess.py (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--verify-code", action="store_true", help="keep only rows whose recorded output still comes")
    parser.add_argument(
        "--sandbox-isolation", choices=ISOLATION_LEVELS, default=ISOLATION_LEVELS[0],
        help="how the code is shut in, see docs/sandbox.md (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tool-timeout", type=float, default=10.0, help="seconds a block may run (default: %(default)s)"
    )
    parser.add_argument(
        "--tool-concurrency", type=int, default=16, help="blocks that run at once (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _write(args), mistakes=SlimeRetoolError)


def _write(args: argparse.Namespace) -> int:
    """Read, convert, verify and write the rows."""
    rows = load_rows(args.input)
    converted, rejected = convert_rows(rows, args.instruction)
    if args.verify_code:
        policy = SandboxPolicy(args.sandbox_isolation, timeout=args.tool_timeout, concurrency=args.tool_concurrency)
        for number, reason in asyncio.run(verify_rows(converted, policy)).items():
            del converted[number]
            rejected.append({"row": number, "reason": reason, "messages": rows[number - 1]["messages"]})
    list_file = Path(f"{args.output}.rejected.jsonl")
    if rejected:
        write_rows(list_file, rejected)
    else:
        list_file.unlink(missing_ok=True)
    for reason, count in Counter(row["reason"] for row in rejected).most_common():
        print(f"left out {count}: {reason}")
    if not converted:
        raise DataError(f"none of {len(rejected)} rows can be used; reasons in {list_file}")
    write_rows(args.output, converted.values())
    listed = f", listed in {list_file}" if rejected else ""
    print(f"{args.output}: {len(converted)} rows written, {len(rejected)} left out{listed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
