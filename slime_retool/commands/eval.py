"""`slime-retool eval FLAGS`: measure a checkpoint, or a model behind a chat API, on any number of sets.

    slime-retool eval --hf-checkpoint models/qwen3-4b-sft --n-samples-per-eval-prompt 30 \\
        --eval-prompt-data aime24 data/aime24.jsonl aime25 data/aime25.jsonl --rollout-max-response-len 16384 \\
        --custom-generate-function-path generate_with_retool.generate \\
        --custom-rm-path generate_with_retool.reward_func --output-dir outputs/eval-sft

Flags are those of `slime_retool.train`; --help shows what an evaluation reads of them. Transcripts are written as
samples end; the same command goes on where a stopped one was (--rescore: and scores anew what is there). Exit codes as
in `slime_retool.train`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.config.devices import check_devices
from slime_retool.config.groups import EvalArgs, SglangArgs, ToolArgs
from slime_retool.config.parse import build_parser
from slime_retool.config.printable import print_command_line
from slime_retool.config.validate import validate_evaluation
from slime_retool.engine.flag_check import ServerFlagCheck
from slime_retool.errors import run_command
from slime_retool.metrics import json_figures
from slime_retool.rollout.manager import RolloutManager
from slime_retool.rollout.statistics import powers_up_to

logger = logging.getLogger("slime_retool")
PROG = "slime-retool eval"
PROMPTS_AT_ONCE = 16
READ = {
    *(field.name for group in (EvalArgs, ToolArgs, SglangArgs) for field in fields(group)),
    *("hf_checkpoint", "device", "rollout_num_gpus", "rollout_num_gpus_per_engine", "ray_address", "seed"),
    *("input_key", "label_key", "tool_key", "metadata_key", "apply_chat_template"),
    *("custom_generate_function_path", "custom_rm_path", "rm_type", "reward_timeout", "reward_key"),
    "accuracy_threshold",
    *("rollout_max_response_len", "rollout_max_context_len", "skip_bad_rows"),
    *("rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_stop", "rollout_stop_token_ids"),
    *("rollout_request_timeout", "rollout_request_retries", "output_dir", "no_progress", "dry_run"),
} - {"eval_interval", "skip_eval_before_train"}
"""What an evaluation reads of a run's options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, validate, evaluate, print a table. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    parser = build_parser(
        PROG,
        usage=f"{PROG} --hf-checkpoint DIR --eval-prompt-data NAME FILE [NAME FILE ...] [--FLAG VALUE ...]",
        description="Measure a checkpoint, or with --eval-endpoint-url a model behind an API, on any number of sets. "
        "The other flags of `slime-retool train` are taken too, so that a run can be measured with its own.",
        shown=READ,
    )
    return run_command(
        PROG,
        lambda: _evaluate(parse_config(argv, parser)),
        interrupted="interrupted; the same command goes on from here",
    )


def _evaluate(given: Config) -> int:
    config = _as_evaluation(given)
    validate_evaluation(config)
    if config.eval_endpoint_url is None:
        config = resolve(config)
        validate(config)
        if not config.dry_run:
            check_devices(config)
    if config.dry_run:
        with ServerFlagCheck(config) as check, RolloutManager(config):
            check.wait()
        print_command_line(given, PROG, PROG)
        return 0
    os.makedirs(config.output_dir, exist_ok=True)
    metrics = _from_endpoint(config) if config.eval_endpoint_url is not None else _from_checkpoint(config)
    path = Path(config.output_dir) / "eval" / "figures.json"
    path.write_text(json.dumps(json_figures(metrics), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(table(config, metrics))
    print(f"\nall figures: {path}\ntranscripts: slime-retool view {path.parent}/<set>_-00001.jsonl")
    return 0


def _as_evaluation(config: Config) -> Config:
    """What an evaluation leaves open of a run, filled in so that the same checks serve."""
    return replace(
        config,
        debug_rollout_only=True,
        debug_train_only=False,
        # A supervised loss generates nothing; no other is computed here.
        loss_type=Config.loss_type if config.loss.supervised else config.loss_type,
        eval_interval=1,
        num_rollout=0,
        num_epoch=None,
        # No batch is trained on: as many as any number of ranks divides, and as an engine's cache is to hold at once.
        rollout_batch_size=config.rollout_batch_size or PROMPTS_AT_ONCE * config.world_size,
        prompt_data=config.eval_prompt_data[1:2],
        input_key=config.eval_input_key or config.input_key,
        label_key=config.eval_label_key or config.label_key,
    )


def _from_checkpoint(config: Config) -> dict[str, float]:
    from slime_retool.cluster.connection import RayStart

    with ExitStack() as stack:
        check = stack.enter_context(ServerFlagCheck(config))
        ray_start = stack.enter_context(RayStart(config))
        rollout = stack.enter_context(RolloutManager(config))
        from slime_retool.cluster.cluster import Cluster

        cluster = stack.enter_context(Cluster(config, ray_start))
        logger.info("starting %d SGLang engine(s) and the router", config.num_engines)
        cluster.engines.launch()
        check.wait()
        rollout.connect(cluster.engines.start_router(cluster.engines.start()))
        with cluster.engines.checked():
            return rollout.evaluate(resume=True)


def _from_endpoint(config: Config) -> dict[str, float]:
    assert config.eval_endpoint_url is not None and config.eval_endpoint_model is not None
    key = os.environ.get(config.eval_endpoint_key_variable)
    with RolloutManager(config) as rollout:
        rollout.connect_endpoint(config.eval_endpoint_url, config.eval_endpoint_model, key)
        return rollout.evaluate(resume=True)


def table(config: Config, metrics: dict[str, float]) -> str:
    """One line per set. Where no problem has n usable samples, a cell names the k it is for."""
    n = config.n_samples_per_eval_prompt
    judged = any(f"eval/{name}/accuracy" in metrics for name, _ in config.eval_sets)
    columns = [
        "set", f"mean@{n}" if judged else "reward", "95 % interval", f"pass@{n}", f"maj@{n}", "turns", "tokens",
        "tool use", "code ok", "cut", "failed",
    ]  # fmt: skip
    rows = [columns]
    for name, _ in config.eval_sets:
        aux, plain = f"val-aux/{name}", f"eval/{name}"
        what, shown = ("acc", _percent) if f"{plain}/accuracy" in metrics else ("reward", _number)
        k = next((k for k in reversed(powers_up_to(n)) if f"{aux}/acc/pass@{k}" in metrics), None)
        of_fewer = "" if k in (None, n) else f" (k={k})"
        low, high = (metrics[f"{aux}/{what}/mean@{n}/{end}"] for end in ("low", "high"))
        rows.append([
            name,
            shown(metrics[f"val-core/{name}/{what}/mean@{n}"]),
            f"{shown(low)} to {shown(high)}",
            _percent(metrics.get(f"{aux}/acc/pass@{k}")) + of_fewer,
            _percent(metrics.get(f"{aux}/acc/maj@{k}")) + of_fewer,
            f"{metrics[f'{plain}/mean_turns']:.1f}",
            f"{metrics[f'{plain}/response_length']:.0f}",
            _percent(metrics[f"{plain}/tool_call_rate"]),
            _percent(metrics.get(f"{aux}/code/pass_rate")),
            _percent(metrics[f"{plain}/truncated"]),
            _percent(metrics[f"{plain}/failed"]),
        ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float) -> str:
    return f"{value:.3g}"
