"""Reinforcement learning with a tool on one page: read it top to bottom, then run it on two CPU cores.

    python examples/minimal/rl_loop.py [--steps N] [--seed N] [--model HF_DIR] [--output-dir DIR] [FLAGS]

    prompts -> engine <-> tool -> rewards -> advantages -> one optimizer step -> weights of the engine -> prompts ...

The parts are the toolkit's: SGLang generates, a sandbox runs the model's code, Megatron-core trains. Here they are put
together by hand, in one process and its servers. `slime_retool.train`, whose FLAGS count here as far as this page reads
them, adds GPUs and hosts (Ray, a router), outages that cost a sample and not the run, evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from warm_start import warm_start

from megatron_bridge.convert import convert_hf_to_torch_dist
from slime_retool.algo.advantages import AdvantageInputs, compute_advantages
from slime_retool.algo.losses import token_weights
from slime_retool.chat import ChatTemplate, load_tokenizer
from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.data.source import PromptDataSource
from slime_retool.engine.server import EngineProcess
from slime_retool.errors import ToolUnavailable, run_command
from slime_retool.reward import compute_score
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.rollout.sampling import training_sampling_params
from slime_retool.sandbox import Sandbox, SandboxPolicy, Status
from slime_retool.tool_use import LoopBudgets, Tool, ToolRegistry, ToolResult, make_format, run_tool_loop
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.core import Trainer
from slime_retool.trainer.packing import TokenData
from slime_retool.trainer.weight_sync import WeightSync
from slime_retool.types import TrainSample

FLAGS = """--device cpu --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 64 --max-turns 4
--rollout-max-context-len 256 --max-observation-tokens 32 --advantage-estimator grpo --lr 3e-4 --weight-decay 0
--use-dynamic-batch-size --max-tokens-per-gpu 8192 --rollout-shuffle""".split()


def configure(args: argparse.Namespace, flags: list[str]) -> Config:
    """A model, questions that one line of Python answers, and the configuration, checked like that of any run."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
    from traces import build_prompt_rows, write_jsonl

    out = args.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = args.model or warm_start(out / f"start_{args.seed}", seed=args.seed)
    write_jsonl(build_prompt_rows("rl", 1024, args.seed), out / "prompts.jsonl")
    named = {"--hf-checkpoint": model, "--ref-load": out / "torch_dist", "--prompt-data": out / "prompts.jsonl"}
    named |= {"--output-dir": out, "--num-rollout": args.steps, "--seed": args.seed, "--rollout-seed": args.seed}
    config = resolve(parse_config([*(str(word) for pair in named.items() for word in pair), *FLAGS, *flags]))
    # The engine reads Hugging Face's format and the trainer Megatron's: both start from the same weights.
    convert_hf_to_torch_dist(config, model, out / "torch_dist", force=True, progress=False)
    validate(config)
    return config


def code_interpreter(box: Sandbox) -> Tool:
    """A tool is a schema and a function. A model's code is a stranger's: it runs in the sandbox, never in here."""

    async def run(arguments: dict[str, Any]) -> ToolResult:
        result = await box.run(arguments["code"], timeout=5)
        if result.status is Status.UNAVAILABLE:  # our outage, not the code's error: nothing to learn from
            raise ToolUnavailable(str(result.error))
        return ToolResult(result.stdout.strip() or result.error or "", is_error=result.status is not Status.OK)

    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    return Tool("code_interpreter", "Run Python code.", parameters, run)


async def loop(config: Config, tokenizer: Any, trainer: Trainer, engine: EngineProcess, sync: WeightSync) -> None:
    """Each pass is one step of RL."""
    data, admin = PromptDataSource(config, tokenizer), engine.admin()
    params = training_sampling_params(config, ChatTemplate(tokenizer))
    budgets = LoopBudgets(
        config.rollout_max_response_len,
        config.context_limit,
        max_turns=config.max_turns,
        max_observation_tokens=config.max_observation_tokens,
    )
    box = Sandbox(SandboxPolicy(isolation=config.sandbox_isolation, concurrency=4))
    async with box, RouterClient(engine.url, concurrency=64, timeout=600, retries=0) as client:
        registry = ToolRegistry([code_interpreter(box)])
        tool_format = make_format(config.tool_format, tokenizer, registry.schemas())
        for step in range(config.num_rollout or 0):
            # Several answers to each question: how good one is shows only beside the others.
            prompts = [sample for group in data.next_groups(config.rollout_batch_size or 1) for sample in group]
            # Model and tool take turns on token ids, which are never decoded and encoded again.
            rollouts = [run_tool_loop(client, tool_format, registry, each, params, budgets) for each in prompts]
            samples = await asyncio.gather(*rollouts)
            # Only the final answer is scored: whether calling the tool pays is for the model to find out.
            rewards = [compute_score(sample.response, sample.label or "")["score"] for sample in samples]
            scored = [TrainSample.from_sample(s, reward=r) for s, r in zip(samples, rewards, strict=True)]
            batch = TrainBatch.from_samples(scored)
            # How much better than the rest of its group an answer was: a group of equals teaches nothing.
            inputs = AdvantageInputs(batch.segments, batch.rewards, batch.groups)
            advantages = compute_advantages(config.algorithm, inputs).advantages
            # The loss's denominator is known before the forward. Prompts and tool output weigh 0: no model wrote them.
            weights = token_weights(batch.segments, per_token=True)
            # The loss compares with the log-probs sampled from: a "kl" near 0 says that engine and trainer agree.
            assert batch.rollout_log_probs is not None
            columns = {"advantages": advantages, "old_log_probs": batch.rollout_log_probs}
            # The algorithm's record (slime_retool/algo/algorithms.py) names the loss: for GRPO PPO's clipped ratio.
            loss_data = TokenData(weights, columns)
            metrics = trainer.actor.optimize(batch, range(batch.num_samples), loss_data).metrics
            # The next rollout must come from the new policy: pause, forget what is cached, send, count, resume.
            before, version = admin.weight_checksums(), sync.update()
            now = admin.weight_checksums()
            assert now == sync.weight_checksums() and admin.weight_version() == str(version), "the engine missed some"
            print(
                f"step {step}: weights {min(s.weight_versions[0] for s in samples)}, "
                f"reward {sum(rewards) / len(rewards):+.3f}, tool calls {sum(s.num_tool_calls for s in samples)}, "
                f"loss {metrics['loss']:+.4f}, kl {metrics['ppo_kl']:+.0e}, gradient {metrics['grad_norm']:.3f}; "
                f"engine at {version}, {sum(now[name] != before[name] for name in now)}/{len(now)} tensors new",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint (default: warm_start.py makes a tiny one)")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of questions, sampling, weights (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/minimal"), help="default: %(default)s")
    config = configure(*parser.parse_known_args())
    tokenizer = load_tokenizer(config.hf_checkpoint or "")
    with ExitStack() as stack:  # whatever starts here ends with it: when done, at an error, at Ctrl-C
        trainer = Trainer(config, rank=0, world_size=1, local_rank=0, init_method="tcp://127.0.0.1:0")
        stack.callback(trainer.shutdown)
        trainer.load()
        engine = stack.enter_context(EngineProcess(config))
        sync = stack.enter_context(closing(WeightSync(trainer, [engine.url])))
        asyncio.run(loop(config, tokenizer, trainer, engine, sync))
    return 0


if __name__ == "__main__":
    sys.exit(run_command("rl_loop.py", main))
