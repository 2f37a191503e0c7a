"""What each metric of a run is, once: docs/metrics.md is written from it, and Prometheus's help texts are.

A name may hold parts that differ: `<set>` (an evaluation set), `<source>` (a data set of the training prompts), `<n>`
and `<k>` (numbers), `<name>` (any word). Metrics of hooks and trackers of one's own are not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

PARTS = {"<set>": r"[^/]+", "<source>": r"[^/]+", "<name>": r"[a-z_0-9]+", "<n>": r"\d+", "<k>": r"\d+"}


@dataclass(frozen=True)
class MetricInfo:
    """One metric, or one for each value of the parts in its name."""

    name: str
    meaning: str
    """With its unit, where it has one."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that a run writes."""
        parts = re.split(f"({'|'.join(PARTS)})", self.name)
        return re.compile("".join(PARTS.get(part) or re.escape(part) for part in parts))


@dataclass(frozen=True)
class MetricGroup:
    """Metrics that are found together."""

    title: str
    about: str
    metrics: tuple[MetricInfo, ...]


def _group(title: str, about: str, metrics: dict[str, str]) -> MetricGroup:
    return MetricGroup(title, about, tuple(MetricInfo(name, meaning) for name, meaning in metrics.items()))


GROUPS = (
    _group("Rollout", "All samples that finished in this step, whether they were trained on or not. Means are over the "
           "usable ones (completed or truncated).", {
        "rollout/samples": "samples that finished",
        "rollout/train_samples": "samples in the batch that was trained on",
        "rollout/reward_mean": "mean reward, in the reward function's units",
        "rollout/reward_std": "standard deviation of the rewards",
        "rollout/trained_reward_mean": "mean reward of the samples trained on",
        "rollout/accuracy": "share of right answers, by the reward's `acc` or `--accuracy-threshold`, else absent",
        "rollout/truncated_ratio": "share of samples cut at a limit of length, turns or context",
        "rollout/aborted_ratio": "share of all samples that were given up, most because the batch was full",
        "rollout/failed_ratio": "share of samples lost to an outage; they are never trained on",
        "rollout/failed_<name>": "samples lost to an outage of this part (engine, tool, reward, rollout)",
        "rollout/response_tokens_mean": "tokens of a response, observations included",
        "rollout/response_tokens_max": "the longest response, observations included, tokens",
        "rollout/model_tokens": "tokens that the model wrote in this step",
        "rollout/model_tokens_mean": "tokens of a response that the model wrote",
        "rollout/model_tokens_max": "the most tokens that the model wrote in one response",
        "rollout/mean_turns": "replies of the model in one response",
        "rollout/tools_offered_ratio": "share of samples whose prompt shows tools",
        "rollout/tool_call_rate": "share of samples that called a tool",
        "rollout/tool_calls_mean": "calls of a sample",
        "rollout/tool_error_rate": "share of calls that ended in an error",
        "rollout/tool_seconds_mean": "seconds of a call, its wait for a free place included",
        "rollout/tool_seconds_max": "the longest call: near `--tool-timeout` it is what the step waits for",
        "rollout/malformed_call_rate": "share of samples with a call that could not be read",
        "rollout/log_prob_mean": "mean log-prob of the model's own tokens as the engine gave it, nats",
        "rollout/weight_version": "version of the weights that the engines hold after this step",
        "rollout/weight_version_min": "oldest weights that wrote a turn of this step",
        "rollout/weight_version_max": "newest weights that wrote a turn of this step",
        "rollout/routed_token_ratio": "share of all tokens of the batch, prompts included, that came with the engine's "
                                      "choice of experts (`--use-rollout-routing-replay`)",
        "rollout/overlong_masked": "samples left out of the loss because they were truncated (`--overlong-filtering`)",
        "rollout/groups_kept": "groups in the batch",
        "rollout/groups_finished": "groups that ended by themselves",
        "rollout/groups_dropped": "groups that the dynamic-sampling filter dropped",
        "rollout/groups_failed": "groups lost to outages",
        "rollout/groups_returned": "groups whose prompt went back to the data because the batch was full",
        "rollout/groups_equal": "finished groups whose rewards are all equal: they teach nothing",
        "rollout/groups_all_wrong": "finished groups without a right answer",
        "rollout/groups_all_right": "finished groups of right answers only",
        "rollout/seconds": "seconds of the rollout",
        "rollout/tokens_per_second": "model tokens per second of the rollout, all engines together",
        "rollout/engine_requests": "requests sent to the engines in this step",
        "rollout/engine_retries": "requests sent again after a failure",
        "rollout/engine_moved": "requests asked again because an engine or the router was replaced (docs/faults.md)",
        "rollout/cached_token_ratio": "share of prompt tokens that the engines had in their prefix cache",
        "rollout/staleness_mean": "`--max-staleness` (so are the next ones): updates between the weights that wrote a "
                                  "token and those it trains, mean over learned tokens",
        "rollout/staleness_mean/q<n>": "the same for responses in the n-th quarter of `--rollout-max-response-len`",
        "rollout/staleness_max": "the largest",
        "rollout/groups_open": "groups that were open after the hand-over of the batch",
        "rollout/groups_dropped_stale": "groups that were too old to be trained on; their prompts are drawn again",
        "rollout/samples_dropped_stale/q<n>": "their samples, by the length that they had",
        "rollout/samples_dropped_stale_ratio": "share of such samples among all that were handed over or dropped",
        "rollout/samples_over_updates": "samples of the batch with tokens of several weights",
        "rollout/requests_interrupted": "requests that weight updates ended before their turn was whole",
        "rollout/requests_continued": "requests that went on with such a turn",
        "rollout/reread_tokens": "tokens that engines read again for those",
        "rollout/reread_ratio": "the same as a share of all tokens that engines read and wrote",
        "rollout/engine_busy_share": "share of the step in which at least one request ran",
        "rollout/requests_running_mean": "requests that ran, mean over the step",
        "rollout/<source>/<name>": "the same figures of the samples of one data set, with several `--prompt-data`",
    }),
    _group("Supervised batches", "SFT's counterpart of the rollout.", {
        "rollout/tokens": "tokens of the batch",
        "rollout/supervised_tokens": "tokens of the batch that are learned",
        "rollout/skipped_too_long": "conversations left out because they exceed `--rollout-max-context-len`",
        "rollout/skipped_refused": "conversations left out because they cannot be tokenized (named in the log)",
    }),
    _group("Training", "The actor's optimizer steps; means over the steps of one rollout.", {
        "train/loss": "the whole loss",
        "train/pg_loss": "the policy-gradient part",
        "train/kl_loss": "the KL term to the reference model (`--use-kl-loss`), nats per token",
        "train/kl": "mean KL to the reference that is taken from rewards (`--kl-coef`), nats per token",
        "train/distill_loss": "the distillation term",
        "train/reverse_kl": "KL(student || teacher) estimate of the samples, nats per token",
        "train/entropy": "entropy of the policy, nats per learned token",
        "train/ppo_kl": "mean of old minus new log-prob: how far this rollout's steps moved the policy, nats per token",
        "train/clip_fraction": "share of learned tokens whose gradient the clipping removes",
        "train/grad_norm": "norm of the gradient before clipping",
        "train/lr": "learning rate of the last step",
        "train/steps": "optimizer steps",
        "train/skipped_steps": "steps without an update, because the gradient was not finite",
        "train/micro_batches": "micro-batches of all steps, of one data-parallel rank",
        "train/tokens": "tokens of the batch, prompts included",
        "train/loss_tokens": "learned tokens of the batch",
        "train/advantage_mean": "mean advantage over learned tokens",
        "train/advantage_std": "standard deviation of the advantages",
        "train/advantage_min": "smallest advantage",
        "train/advantage_max": "largest advantage",
        "train/logprob_abs_diff": "the same as `mismatch/abs_diff`",
    }),
    _group("Critic", "With `--advantage-estimator ppo`.", {
        "critic/loss": "the critic's loss",
        "critic/value_loss": "squared error of the values, clipped",
        "critic/value_clip_fraction": "share of values that the clip holds back",
        "critic/explained_variance": "1 - Var(return - value) / Var(return): 1 is perfect, 0 no better than a constant",
        "critic/value_mean": "mean value of learned tokens",
        "critic/return_mean": "mean return of learned tokens",
        "critic/grad_norm": "norm of the gradient before clipping",
        "critic/lr": "learning rate of the last step",
        "critic/steps": "optimizer steps",
        "critic/skipped_steps": "steps without an update, because the gradient was not finite",
        "critic/micro_batches": "micro-batches of all steps, of one data-parallel rank",
    }),
    _group("Trainer against engine", "d is the trainer's log-prob of a token less the engine's, under the same "
           "weights, over all learned tokens. Nats per token.", {
        "mismatch/abs_diff": "mean |d|: about 0.01 in bf16, 1e-6 in fp32",
        "mismatch/abs_diff_max": "largest |d|",
        "mismatch/stale_abs_diff": "mean |d| on tokens of older weights (`--max-staleness`), which are not part of the "
                                   "others: the policy's own movement",
        "mismatch/diff": "mean d",
        "mismatch/k3_kl": "estimate of KL(engine || trainer): mean of exp(d) - d - 1",
        "mismatch/ess": "effective sample size of the token ratios exp(d), as a share: 1 is none lost",
        "mismatch/sequence_ess": "the same for ratios of whole samples",
        "mismatch/turn_<n>/abs_diff": "mean |d| in turn n: a jump after turn 0 points at the template or the cache",
        "mismatch/experts_replayed": "share of the choices of experts, one for each token in each layer with experts, "
                                     "that were the engine's (`--use-rollout-routing-replay`); each sample's last "
                                     "token, of which nothing is read, is not part of it",
        "mismatch/experts_differ": "share of those in which the trainer's router would have taken another set of "
                                   "experts",
        "tis/ratio_mean": "mean importance ratio before truncation (`--use-tis`)",
        "tis/ratio_max": "largest importance ratio",
        "tis/weight_mean": "mean weight after truncation",
        "tis/low_fraction": "share of ratios below the lower bound",
        "tis/high_fraction": "share of ratios above the upper bound",
        "tis/ess": "effective sample size of the weights, as a share",
    }),
    _group("Evaluation", "Of each set in `--eval-prompt-data`. n is the number of samples of a problem; figures at k "
           "are exact, not resampled.", {
        "eval/<set>/accuracy": "mean over problems of the share of right answers",
        "eval/<set>/reward": "mean reward",
        "eval/<set>/samples": "samples (SFT: conversations)",
        "eval/<set>/failed": "share of samples lost to outages; they count in no other figure",
        "eval/<set>/truncated": "share of samples cut at a limit",
        "eval/<set>/response_length": "tokens of a response, observations included",
        "eval/<set>/mean_turns": "replies of the model in one response",
        "eval/<set>/tool_call_rate": "share of samples that called a tool",
        "eval/<set>/tool_error_rate": "share of calls that ended in an error",
        "eval/<set>/malformed_call_rate": "share of samples with a call that could not be read",
        "eval/<set>/loss": "SFT: mean negative log-likelihood of a supervised token, nats",
        "eval/<set>/perplexity": "SFT: exp of that loss",
        "eval/<set>/supervised_tokens": "SFT: supervised tokens of the set",
        "val-core/<set>/acc/mean@<n>": "the accuracy, under the name that verl uses",
        "val-core/<set>/reward/mean@<n>": "mean reward, where nothing says which answers are right",
        "val-aux/<set>/acc/mean@<n>/low": "lower end of the accuracy's 95 % interval (over problems)",
        "val-aux/<set>/acc/mean@<n>/high": "upper end of it",
        "val-aux/<set>/reward/mean@<n>/low": "lower end of the mean reward's 95 % interval",
        "val-aux/<set>/reward/mean@<n>/high": "upper end of it",
        "val-aux/<set>/acc/pass@<k>": "chance that k answers hold a right one",
        "val-aux/<set>/acc/maj@<k>": "chance that the most frequent of k answers is right",
        "val-aux/<set>/acc/problems@<k>": "problems that have k usable answers, where some have fewer",
        "val-aux/<set>/code/pass_rate": "share of executed calls that ended without an error",
        "val-aux/<set>/num_turns/mean": "messages of a conversation, the prompt counted as one",
        "val-aux/<set>/num_turns/min": "fewest messages",
        "val-aux/<set>/num_turns/max": "most messages",
        "val-aux/num_turns/mean": "messages of a conversation, over all sets",
        "val-aux/num_turns/min": "fewest messages, over all sets",
        "val-aux/num_turns/max": "most messages, over all sets",
    }),
    _group("Time and speed", "On the CPU a process stands for a GPU.", {
        "perf/step_seconds": "the whole step; checkpoints and evaluations are not part of it",
        "perf/generate_seconds": "generation, with its tool calls and rewards",
        "perf/log_probs_seconds": "forward-only passes (old and reference log-probs, values)",
        "perf/train_seconds": "optimizer steps",
        "perf/sync_seconds": "the update of the engines' weights",
        "perf/offload_seconds": "moving memory between trainer and engines (`--colocate`)",
        "perf/idle_seconds": "the step's seconds in none of these, nor in the critic's where it shares processes",
        "perf/critic_seconds": "the critic's optimizer steps; with processes of its own they are beside the policy's",
        "perf/reward_seconds": "seconds in which a sample waited for its reward, mostly while others were written",
        "perf/save_seconds": "writing the checkpoint until the disk has all of it; in the step that finds it complete",
        "perf/save_stall_seconds": "what the loop waited for it: for the one before, and for the copy to host memory",
        "perf/save_wait_seconds": "the part of it that was for the one before, which the disk did not have yet",
        "perf/eval_seconds": "the evaluation; with `--max-staleness` what the loop waited for it",
        "perf/generate_tokens_per_second_per_gpu": "model tokens over generation's seconds and the engines' GPUs",
        "perf/train_tokens_per_second": "tokens of the batch over training's seconds",
        "perf/train_tokens_per_second_per_gpu": "the same, over the trainer's GPUs",
        "perf/train_mfu": "the model's own operations over what the cards' dense bf16 peak allows in that time; "
        "absent for cards without a known peak",
    }),
    _group("Start", "Of the first step of a run, in the order of the start. A part is what was waited for after those "
           "before it: engines, trainers and SGLang's answer start side by side.", {
        "start/total_seconds": "from the start of the process to that of the first rollout",
        "start/flags_seconds": "Python's imports and the flags",
        "start/data_seconds": "tokenizer, data and hooks",
        "start/ray_seconds": "Ray, which starts beside the data: what is left of it after them",
        "start/sglang_flags_seconds": "SGLang's answer whether it takes the `--sglang-*` flags",
        "start/engines_seconds": "engines: imports, weights, cache, CUDA graphs",
        "start/trainers_seconds": "trainers: imports, model, checkpoint",
        "start/router_and_weights_seconds": "the router, and the first weight update",
        "start/evaluation_seconds": "the evaluation before training",
    }),
    _group("Memory", "GiB, but for the tokens of the cache.", {
        "memory/trainer_peak_gib": "most that tensors held on a trainer's GPU since the last step, of all ranks",
        "memory/trainer_reserved_gib": "what torch's allocator holds there after the step",
        "memory/trainer_host_gib": "resident memory of the largest trainer process, page-locked copies included",
        "memory/driver_host_gib": "resident memory of the driver",
        "memory/engine_weights_gib": "an engine worker's weights, as SGLang says at its start",
        "memory/engine_kv_cache_gib": "its KV cache",
        "memory/engine_graphs_gib": "its CUDA graphs",
        "memory/engine_kv_cache_tokens": "tokens that the smallest engine's cache holds",
    }),
)  # fmt: skip


def metrics() -> Iterable[MetricInfo]:
    """All of them, group by group."""
    return (metric for group in GROUPS for metric in group.metrics)


def meaning_of(name: str) -> str:
    """What `name`, as a run writes it, is, in words."""
    found = find_metric(name)
    return f"{name}: a metric of a hook" if found is None else f"{name}: {found.meaning}"


def find_metric(name: str) -> MetricInfo | None:
    """What `name`, as a run writes it, is; None for a name that is not in the table."""
    return next((metric for metric in metrics() if metric.pattern.fullmatch(name)), None)
