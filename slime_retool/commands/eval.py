"""`slime-retool eval FLAGS`: measure a checkpoint, or a model behind a chat API, on any number of sets.

    slime-retool eval --hf-checkpoint models/qwen3-4b-sft --n-samples-per-eval-prompt 30 \\
        --eval-prompt-data aime24 data/aime24.jsonl aime25 data/aime25.jsonl \\
        --custom-generate-function-path generate_with_retool.generate \\
        --custom-rm-path generate_with_retool.reward_func --output-dir outputs/eval-sft

Flags are those of `slime_retool.train`. Transcripts are written as samples end; the same command goes on where a
stopped one was. Exit codes as in `slime_retool.train`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.config.parse import build_parser
from slime_retool.config.validate import validate_evaluation
from slime_retool.engine.flag_check import ServerFlagCheck
from slime_retool.errors import RolloutError, SlimeRetoolError, UserError
from slime_retool.rollout.manager import RolloutManager
from slime_retool.rollout.statistics import powers_up_to

logger = logging.getLogger("slime_retool")
PROG = "slime-retool eval"
PROMPTS_AT_ONCE = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, validate, evaluate, print a table. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    parser = build_parser(
        PROG,
        usage=f"{PROG} --hf-checkpoint DIR --eval-prompt-data NAME FILE [NAME FILE ...] [--FLAG VALUE ...]",
        description="Measure a checkpoint, or with --eval-endpoint-url a model behind an API, on any number of sets. "
        "Flags are those of slime_retool.train.",
    )
    try:
        config = _as_evaluation(parse_config(argv, parser))
        validate_evaluation(config)
        if config.eval_endpoint_url is None:
            config = resolve(config)
            validate(config)
        signal.signal(signal.SIGTERM, _interrupt)
        figures = _from_endpoint(config) if config.eval_endpoint_url is not None else _from_checkpoint(config)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    except SlimeRetoolError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    path = Path(config.output_dir) / "eval" / "figures.json"
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(table(config, figures))
    print(f"\nall figures: {path}\ntranscripts: slime-retool view {path.parent}/<set>_-00001.jsonl")
    return 0


def _interrupt(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _as_evaluation(config: Config) -> Config:
    """What an evaluation leaves open of a run, filled in so that the same checks serve."""
    return replace(
        config,
        debug_rollout_only=True,
        debug_train_only=False,
        eval_interval=1,
        num_rollout=0,
        num_epoch=None,
        # No batch is trained on: as many as any number of ranks divides, and as an engine's cache is to hold at once.
        rollout_batch_size=config.rollout_batch_size or PROMPTS_AT_ONCE * config.world_size,
        prompt_data=config.prompt_data or config.eval_prompt_data[1:2],
        input_key=config.eval_input_key or config.input_key,
        label_key=config.eval_label_key or config.label_key,
    )


def _from_checkpoint(config: Config) -> dict[str, float]:
    from slime_retool.cluster.cluster import Cluster

    os.makedirs(config.output_dir, exist_ok=True)
    with ServerFlagCheck(config) as check, Cluster(config) as cluster:
        signal.signal(signal.SIGTERM, _interrupt)  # again: Ray's start puts its own crash handler there
        with RolloutManager(config) as rollout:
            check.wait()
            logger.info("starting %d SGLang engine(s) and the router", config.num_engines)
            rollout.connect(cluster.engines.start_router(cluster.engines.start()))
            try:
                return rollout.evaluate(resume=True)
            except RolloutError:
                cluster.engines.check()  # an engine that died says more
                raise


def _from_endpoint(config: Config) -> dict[str, float]:
    assert config.eval_endpoint_url is not None and config.eval_endpoint_model is not None
    os.makedirs(config.output_dir, exist_ok=True)
    key = os.environ.get(config.eval_endpoint_key_variable)
    with RolloutManager(config) as rollout:
        rollout.connect_endpoint(config.eval_endpoint_url, config.eval_endpoint_model, key)
        return rollout.evaluate(resume=True)


def table(config: Config, figures: dict[str, float]) -> str:
    """One line per set. Where outages left some problem with fewer than n samples, a cell names the k it is for."""
    n = config.n_samples_per_eval_prompt
    columns = [
        "set",
        f"mean@{n}",
        "95 % interval",
        f"pass@{n}",
        f"maj@{n}",
        "turns",
        "tokens",
        "tool use",
        "code ok",
        "cut",
    ]
    rows = [columns]
    for name, _ in config.eval_sets:
        core, aux, plain = f"val-core/{name}", f"val-aux/{name}", f"eval/{name}"
        k = next((k for k in reversed(powers_up_to(n)) if f"{aux}/acc/pass@{k}" in figures), None)
        of_fewer = "" if k in (None, n) else f" (k={k})"
        rows.append([
            name,
            _percent(figures[f"{core}/acc/mean@{n}"]),
            f"{_percent(figures[f'{aux}/acc/mean@{n}/low'])} to {_percent(figures[f'{aux}/acc/mean@{n}/high'])}",
            _percent(figures.get(f"{aux}/acc/pass@{k}")) + of_fewer,
            _percent(figures.get(f"{aux}/acc/maj@{k}")) + of_fewer,
            f"{figures[f'{aux}/num_turns/mean']:.1f}",
            f"{figures[f'{plain}/response_length']:.0f}",
            _percent(figures[f"{plain}/tool_call_rate"]),
            _percent(figures.get(f"{aux}/code/pass_rate")),
            _percent(figures[f"{plain}/truncated"]),
        ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
