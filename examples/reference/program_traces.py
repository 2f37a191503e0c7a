r"""SFT conversations with a tool call whose output was really printed.

    python program_traces.py convert --prepared DIR            GSM8K's worked answers to programs, run in the sandbox
    python program_traces.py select --prepared DIR --samples NAME=FILE [NAME=FILE ...]

GSM8K's worked answers mark each calculation, as in "She sold 48/2 = <<48/2=24>>24 clips in May.". `convert` turns each
into a line of Python, named after what was counted, in which earlier results appear by name:

    # She sold 48/2 = 24 clips in May.
    clips_in_may = 48 / 2

the last one `answer`, runs the program, and keeps those that print the answer (DIR/converted.jsonl).

`select` reads transcripts of `slime-retool eval` with the hooks of program_hooks.py, keeps programs that calculate and
whose output is the answer, at most --per-question different ones for a question, and fills in the converted program
where a question has none. Writes to --output-dir: sft.jsonl, rl/NAME.jsonl (questions that were solved at least once,
and of those that were tried four times or more not always), and selection.json, which counts all this.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import keyword
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_retool.recipes.retool.tool_sandbox import SCHEMA, format_result
from slime_retool.sandbox import Sandbox, SandboxPolicy, Status
from slime_retool.types import Message

_MARK = re.compile(r"<<([^=<>]+)=([^<>]*)>>")
_NUMBER = re.compile(r"^\s*\$?\s*[\d.,/]*\d%?\s*")
_FORMULA = re.compile(r"[0-9+\-*/(). ]+")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
# Words that a name does not begin or end with.
_LINKS = set(
    "a an and are as at be but by each every for from has have he her his if in is it more of on or per she so".split()
)
_LINKS |= set("than that the their them then there they this times to total was were which will with would x".split())
NAME_WORDS = 3
EASY_AFTER = 4
"""Tries after which a question that was always solved is too easy for RL."""
Row = dict[str, Any]


@dataclass
class Program:
    """A worked answer as Python, while it is being written."""

    lines: list[str] = field(default_factory=list)
    values: list[tuple[str, float]] = field(default_factory=list)
    """(name, value) of each line so far."""

    def add(self, text: str, formula: str, name: str) -> bool:
        """One calculation; False for one that is no plain arithmetic. `text` becomes a comment."""
        formula = _PERCENT.sub(r"(\1 / 100)", formula.replace(",", "").replace("$", "").strip())
        if not _FORMULA.fullmatch(formula):
            return False
        try:
            value = arithmetic(formula)
        except (SyntaxError, ValueError, ArithmeticError):
            return False
        shown = formula
        for known, number in reversed(self.values):
            shown = _by_name(shown, known, number)
        try:
            shown = ast.unparse(ast.parse(shown, mode="eval"))
        except SyntaxError:
            return False
        name = self._free(name)
        self.lines += ([f"# {text}"] if text else []) + [f"{name} = {shown}"]
        self.values.append((name, value))
        return True

    def text(self) -> str:
        last = self.values[-1][0]
        return "\n".join([*self.lines[:-1], f"answer = {self.lines[-1].removeprefix(f'{last} = ')}", "print(answer)"])

    def _free(self, name: str) -> str:
        taken = {known for known, _ in self.values}
        name = name or f"step_{len(self.values) + 1}"
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken)


def arithmetic(formula: str) -> float:
    """The value of + - * / ( ) over numbers. Raises SyntaxError or ValueError for anything else."""
    return _value(ast.parse(formula.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{ast.dump(node)} is no arithmetic")


def _by_name(formula: str, name: str, value: float) -> str:
    """The formula with that number replaced; small and round numbers may mean something else."""
    if value in (0, 1, 2, 10, 100, 1000):
        return formula
    return re.sub(rf"(?<![\w.]){re.escape(f'{value:g}')}(?![\w.])", name, formula)


def name_of(text: str) -> str:
    """A name for a result from the words that follow it; "" where they make none."""
    words: list[str] = re.findall(r"[a-z]+|\S", _NUMBER.sub("", text).lower())[: NAME_WORDS + 1]
    end = next((i for i, word in enumerate(words) if not word.isalpha()), len(words))
    words = words[: min(end, NAME_WORDS)]
    while words and words[0] in _LINKS:
        del words[0]
    while words and words[-1] in _LINKS:
        del words[-1]
    name = "_".join(words)
    return "" if keyword.iskeyword(name) or name in ("print", "sum", "int", "float") or len(name) < 3 else name


def program_of(solution: str) -> str | None:
    """A worked answer of GSM8K as a program; None where a calculation is not plain arithmetic, or none is marked."""
    program = Program()
    for line in solution.split("####")[0].strip().split("\n"):
        text = re.sub(r"\s+", " ", _MARK.sub("", line)).strip()
        for mark in _MARK.finditer(line):
            if not program.add(text, mark[1], name_of(line[mark.end() :])):
                return None
            text = ""
    return program.text() if program.values else None


def conversation(row: Row, thought: str, code: str, output: str) -> Row:
    """A row of SFT: question, call, output, and the label in the box."""
    call = {"type": "function", "function": {"name": SCHEMA["function"]["name"], "arguments": {"code": code}}}
    messages: list[Message] = [
        *row["tool"],
        {"role": "assistant", "content": thought, "tool_calls": [call]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": f"<answer>\\boxed{{{row['label']}}}</answer>"},
    ]
    return {"messages": messages, "tools": [SCHEMA]}


async def run_all(programs: Sequence[str], isolation: str, concurrency: int = 16) -> list[str]:
    """What each prints in the sandbox, as a model would see it; "" where it fails. RuntimeError in an outage."""
    policy = SandboxPolicy(isolation=isolation, concurrency=concurrency, max_queue=1 << 30)

    async def one(box: Sandbox, code: str) -> str:
        result = await box.run(code)
        if result.status is Status.UNAVAILABLE:
            raise RuntimeError(result.error)
        return format_result(result) if result.status is Status.OK else ""

    async with Sandbox(policy) as box:
        return list(await asyncio.gather(*(one(box, code) for code in programs)))


def same_number(output: str, label: str) -> bool:
    """Whether the program printed the label, rounding errors of floating point aside."""
    try:
        return abs(float(output) - float(label)) < 1e-6 * max(1.0, abs(float(label)))
    except ValueError:
        return False


def convert(prepared: Path, isolation: str) -> dict[str, int]:
    rows = read_jsonl(prepared / "train" / "gsm8k.jsonl")
    programs = [(row, code) for row in rows if (code := program_of(row["solution"])) is not None]
    outputs = asyncio.run(run_all([code for _, code in programs], isolation))
    kept = [
        {"question": row["question"], "label": row["label"], "code": code, "output": output}
        for (row, code), output in zip(programs, outputs, strict=True)
        if same_number(output, row["label"])
    ]
    write_jsonl(prepared / "converted.jsonl", kept)
    return {"rows": len(rows), "programs": len(programs), "right": len(kept)}


def calculates(code: str) -> bool:
    """Whether the program computes anything, instead of printing a constant that its writer worked out."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return False
    works = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "print":
                if all(isinstance(argument, ast.Constant) for argument in node.args):
                    return False
            else:
                works = True
        works = works or isinstance(node, ast.BinOp | ast.AugAssign | ast.Compare | ast.comprehension)
    return works


def without_comments(code: str) -> str:
    """What two programs have in common that differ in comments and spaces only."""
    return ast.unparse(ast.parse(code))


@dataclass
class Tried:
    """What the transcripts say of one question."""

    tries: int = 0
    right: list[tuple[str, str, str]] = field(default_factory=list)
    """(thought, code, output) of right answers."""

    def different(self, most: int) -> list[tuple[str, str, str]]:
        """At most so many right programs that calculate and differ."""
        found: dict[str, tuple[str, str, str]] = {}
        for thought, code, output in self.right:
            if calculates(code) and "```" not in code and "</code>" not in code:
                found.setdefault(without_comments(code), (thought, code, output))
        return list(found.values())[:most]


def tried(rows: Sequence[Row], transcripts: Iterable[Row]) -> list[Tried]:
    """One for each row of the set that the transcripts are of. ValueError when they are of another one."""
    found = [Tried() for _ in rows]
    for line in transcripts:
        row, one = rows[line["group_index"]], found[line["group_index"]]
        if row["program"] != line["prompt"]:
            raise ValueError(f"the transcripts are of other questions: {line['prompt'][-1]['content'][:80]!r}")
        if line["status"] not in ("completed", "truncated"):
            continue
        one.tries += 1
        if line["reward"]["acc"]:
            one.right.append(tuple(line["metadata"][key] for key in ("thought", "code", "output")))  # type: ignore[arg-type]
    return found


def fit_for_rl(one: Tried) -> bool:
    """Not tried, or solved sometimes: a question that is never or always solved teaches RL nothing."""
    return one.tries == 0 or 0 < len(one.right) < (one.tries if one.tries >= EASY_AFTER else one.tries + 1)


def select(args: argparse.Namespace) -> dict[str, Any]:
    samples = dict(pair.split("=", 1) for pair in args.samples)
    converted = {row["question"]: row for row in read_jsonl(args.prepared / "converted.jsonl")}
    out = args.output_dir
    conversations: list[Row] = []
    report: dict[str, Any] = {}
    for path in sorted((args.prepared / "train").glob("*.jsonl")):
        name, rows = path.stem, read_jsonl(path)
        found = tried(rows, read_jsonl(Path(samples[name])) if name in samples else [])
        own, filled = [], []
        for row, one in zip(rows, found, strict=True):
            programs = one.different(args.per_question)
            own += [conversation(row, *program) for program in programs]
            if not programs and (known := converted.get(row["question"])) is not None:
                filled.append(conversation(row, "", known["code"], known["output"]))
        random.Random(args.seed).shuffle(filled)
        filled = filled[: args.most_converted]
        # A writer that solves nothing says nothing of the questions.
        fit = [row for row, one in zip(rows, found, strict=True) if fit_for_rl(one)] or rows
        random.Random(args.seed).shuffle(fit)
        write_jsonl(out / "rl" / f"{name}.jsonl", fit[: args.most_rl])
        conversations += own + filled
        report[name] = {
            "questions": len(rows),
            "tries": sum(one.tries for one in found),
            "right": sum(len(one.right) for one in found),
            "solved_questions": sum(bool(one.right) for one in found),
            "own_conversations": len(own),
            "converted_conversations": len(filled),
            "for_rl": len(fit[: args.most_rl]),
        }
    random.Random(args.seed).shuffle(conversations)
    conversations = conversations[: args.most]
    write_jsonl(out / "sft.jsonl", conversations)
    report["conversations"] = len(conversations)
    (out / "selection.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def read_jsonl(path: Path) -> list[Row]:
    """The file's rows; a last line that is still being written is left out."""
    return list(_rows(path.read_text(encoding="utf-8")))


def _rows(text: str) -> Iterator[Row]:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line:
            try:
                yield json.loads(line)
            except ValueError:
                if number < len(lines) - 1:
                    raise


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("convert")
    second = commands.add_parser("select")
    for command in (first, second):
        command.add_argument("--prepared", type=Path, required=True, help="what questions.py wrote")
    first.add_argument("--sandbox-isolation", default="namespaces", help="level of the jail (docs/sandbox.md)")
    second.add_argument("--samples", nargs="*", default=[], metavar="NAME=FILE", help="transcripts of a training set")
    second.add_argument("--output-dir", type=Path, required=True)
    second.add_argument("--per-question", type=int, default=2, help="different programs of one question")
    second.add_argument("--most-converted", type=int, default=10**9, help="converted worked answers")
    second.add_argument("--most", type=int, default=10**9, help="conversations in all")
    second.add_argument("--most-rl", type=int, default=10**9, help="questions of each set for RL")
    second.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = convert(args.prepared, args.sandbox_isolation) if args.command == "convert" else select(args)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
