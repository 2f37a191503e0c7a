"""A conversation of several turns with real tool calls, and faults at chosen ones of them.

The tiny model never writes a call, so the hook makes one after each turn: a snippet in the run's sandbox, whose output
is appended as an observation. A fault is an action in place of the n-th call.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_utils import signal_all

from slime_retool.config import Config
from slime_retool.errors import ToolUnavailable
from slime_retool.rollout.context import current_context
from slime_retool.sandbox import Sandbox, SandboxPolicy, Status
from slime_retool.tool_use.loop import LoopBudgets, append_turn
from slime_retool.types import Sample, SampleStatus

TURNS = 3
TURN_TOKENS = 12


@dataclass
class Script:
    """What happens at which call, counted over all samples since `begin`; and what was asked and answered."""

    calls: int = 0
    at: dict[int, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    turns: dict[int, list[tuple[list[int], list[int], list[float]]]] = field(default_factory=dict)
    """Of each sample, by index: the ids sent, and the ids and log-probs that came back, in the order of the turns."""

    def begin(self, at: dict[int, Callable[[], Awaitable[None]]]) -> None:
        self.calls, self.at, self.turns = 0, at, {}


script = Script()


def sandbox(config: Config) -> Sandbox:
    return Sandbox(SandboxPolicy(concurrency=2, packages=()))


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    context = current_context()
    box = await context.resource("sandbox", sandbox)
    LoopBudgets(max_response_tokens=256).start(sample, context.template.prompt_ids(sample.prompt))
    params = {**sampling_params, "max_new_tokens": TURN_TOKENS, "ignore_eos": True, "stop_token_ids": []}
    for turn in range(TURNS):
        sent = list(sample.tokens)
        completion = await context.engine.generate(sent, params, session=str(sample.index))
        append_turn(sample, completion, TURN_TOKENS)
        script.turns.setdefault(sample.index, []).append((sent, completion.ids, completion.log_probs))
        if turn == TURNS - 1:
            break
        script.calls += 1
        if (action := script.at.get(script.calls)) is not None:
            await action()
        for _ in range(1 + args.tool_retries):
            result = await box.run(f"print({sample.index} * {turn + 1})")
            if result.status is not Status.UNAVAILABLE:
                break
        else:
            raise ToolUnavailable(result.error)
        sample.num_tool_calls += 1
        sample.append(list(result.stdout.encode()), log_probs=None)  # bytes are the tiny tokenizer's ids
    sample.response = context.tokenizer.decode(sample.tokens[sample.prompt_length :])
    sample.status = SampleStatus.COMPLETED
    return sample


def find(*words: str) -> list[int]:
    """Living processes whose command line has all these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if all(word.encode() in command for word in words):
            found.append(int(path.parent.name))
    return found


def engine_processes(url: str) -> list[int]:
    """The SGLang server at `url`: its HTTP server first, then its scheduler and detokenizer."""
    found = find("slime_retool.engine.cpu_main", str(urlsplit(url).port))
    [server] = [pid for pid in found if b"supervisor" not in command(pid)]
    children = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    return [server, *children]


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def send(url: str, number: signal.Signals) -> None:
    """Send a signal to all processes of an engine, as to a machine that dies or hangs as a whole."""
    signal_all(engine_processes(url), number)


def turns_are_token_exact(sample: Any) -> bool:
    """Whether a trained sample holds what the engines answered, and every turn was asked with all that stood before."""
    position = None
    for sent, ids, log_probs in script.turns[sample.index]:
        tokens = list(sample.tokens)
        position = len(sent)
        if tokens[:position] != sent or tokens[position : position + len(ids)] != ids:
            return False
        got = sample.rollout_log_probs[position : position + len(ids)]
        if any(abs(one - other) > 1e-6 for one, other in zip(got, log_probs, strict=True)):
            return False
    return position is not None and len(script.turns[sample.index]) == TURNS


def requests_served(log: Path) -> int:
    """Completed requests in an engine's access log."""
    return len(re.findall(r'POST /generate HTTP/1.1" 200', log.read_text()))
