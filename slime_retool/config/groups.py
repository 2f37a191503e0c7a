"""Every option of a run, declared once: a field is a flag, a docstring the title of a group in --help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_bridge.flags import flag
from megatron_bridge.lora_spec import TARGET_MODULES
from megatron_bridge.model_config import ATTENTION_BACKENDS, TRANSFORMER_IMPLS
from slime_retool.algo.algorithms import (
    ALGORITHMS,
    KL_TYPES,
    LOSSES,
    TIS_LEVELS,
    TIS_MODES,
    names_where,
    published_values,
    readers_of,
)
from slime_retool.sandbox.host.policy import ISOLATION_LEVELS

RL_ROLLOUT = "slime_retool.rollout.rl_rollout.generate_rollout"
SFT_ROLLOUT = "slime_retool.rollout.sft_rollout.generate_rollout"
REPLAY_ROLLOUT = "slime_retool.rollout.replay.generate_rollout"
TRANSPORTS = {
    "ipc": "slime_retool.trainer.weight_sync.ipc.IpcTransport",
    "broadcast": "slime_retool.trainer.weight_sync.broadcast.BroadcastTransport",
    "disk": "slime_retool.trainer.weight_sync.disk.DiskTransport",
}
"""How weights reach the engines: the path of a `trainer.weight_sync.transport.Transport`, by name."""
RM_TYPES = ("dapo", "math_verify")
"""How the built-in rewards compare answers: see `reward.score`."""


def folder(help: str) -> Any:
    """A flag that names a folder; there is none by default."""
    return flag(None, metavar="DIR", help=help)


def hook(help: str) -> Any:
    """A flag that names a function by its dotted path; there is none by default."""
    return flag(None, metavar="MODULE.FUNCTION", help=help)


@dataclass(frozen=True)
class ClusterArgs:
    """Cluster: processes and devices."""

    device: str = flag(
        "auto", choices=("auto", "cpu", "cuda"), help="Where to compute: cuda when a GPU is visible, else cpu."
    )
    actor_num_nodes: int = flag(
        1, min=1, help="Hosts used for training, each with --actor-num-gpus-per-node processes."
    )
    actor_num_gpus_per_node: int = flag(
        1, min=1, help="Training processes per host, one GPU each (on the CPU: plain processes that talk over gloo)."
    )
    rollout_num_gpus: int | None = flag(
        None, min=1, help="GPUs used for generation; all training GPUs with --colocate, else one engine's worth."
    )
    rollout_num_gpus_per_engine: int = flag(1, min=1, help="GPUs (tensor-parallel size) of one SGLang engine.")
    colocate: bool = flag(False, help="Train and generate on the same devices, in turns.")
    kernel_cache_dir: str | None = folder(
        "Keep the kernels that trainers and engines compile for a GPU here, for the next start: a folder that only you "
        "can write to (default: where each library keeps its own, and ~/.cache/slime-retool/kernels for those that "
        "keep none)."
    )
    offload_train: bool | None = flag(
        None,
        help="Move weights, gradients and optimizer state to the host while engines generate (default: with "
        "--colocate on GPUs).",
    )
    offload_rollout: bool | None = flag(
        None,
        help="Give back the engines' weights and KV cache while the trainer works (default: with --colocate on GPUs).",
    )
    offload_rollout_cache: bool = flag(
        True,
        help="With --offload-rollout give back the KV cache too. --no-offload-rollout-cache: engines keep it, so that "
        "with --max-staleness conversations go on after an update without being read again; the trainer has less room.",
    )
    update_weight_transport: str = flag(
        "auto",
        metavar="NAME",
        help=f"How new weights reach the engines: auto, {', '.join(TRANSPORTS)}, or the dotted path of a Transport of "
        "your own (docs/extending.md). auto: ipc with --colocate, disk for external engines with "
        "--update-weight-disk-dir, else broadcast (NCCL, gloo on the CPU). disk: through files, for engines that can "
        "join no group.",
    )
    update_weight_buffer_size: int = flag(
        512 * 2**20, min=1, help="Bytes of one bucket of a weight update; two are in memory during one."
    )
    update_weight_disk_dir: str | None = folder(
        "Folder of the disk transport, under the same path for the engines (default, for engines on the first "
        "trainer rank's host: memory of that host, else --output-dir)."
    )
    ray_address: str | None = flag(
        None,
        help="Join this Ray cluster ('auto' finds a running one; default: RAY_ADDRESS, which `ray job submit` sets); "
        "without either a private one is started and ended.",
    )
    distributed_timeout_minutes: float = flag(10.0, above=0, help="Collective operations that take longer fail.")
    max_restarts: int = flag(
        3,
        min=0,
        help="After the death of a trainer process go on from the run's last complete checkpoint this many times; then "
        "the run ends.",
    )
    seed: int = flag(1234, help="Seed of everything random in training.")


@dataclass(frozen=True)
class ParallelArgs:
    """Parallelism of the trainer. World size = data x tensor x pipeline x context."""

    tensor_model_parallel_size: int = flag(1, min=1, help="Tensor-parallel size.")
    sequence_parallel: bool = flag(
        False, help="Split norms and residuals over the tensor-parallel ranks (no effect at size 1)."
    )
    pipeline_model_parallel_size: int = flag(1, min=1, help="Pipeline-parallel size.")
    decoder_first_pipeline_num_layers: int | None = flag(None, help="Layers on the first pipeline stage.")
    decoder_last_pipeline_num_layers: int | None = flag(None, help="Layers on the last pipeline stage.")
    context_parallel_size: int = flag(1, min=1, help="Context-parallel size.")
    expert_model_parallel_size: int = flag(1, min=1, help="Expert-parallel size (mixture-of-experts models).")
    expert_tensor_parallel_size: int = flag(1, min=1, help="Tensor-parallel size inside an expert.")


@dataclass(frozen=True)
class CheckpointArgs:
    """Checkpoints."""

    hf_checkpoint: str | None = folder("Hugging Face checkpoint: tokenizer, config, and the engines' first weights.")
    load: str | None = folder("Resume from this torch_dist folder; an empty or missing one starts from --ref-load.")
    ref_load: str | None = folder(
        "torch_dist checkpoint of the reference model, and of a fresh run's first weights: the newest in this "
        "folder, or one that is named itself (DIR/iter_0000012)."
    )
    save: str | None = folder("Write torch_dist checkpoints here.")
    save_interval: int | None = flag(None, min=1, help="Save every this many rollouts, and at the end.")
    save_seconds: float | None = flag(
        None, min=0, help="Also save after the first step that ends so many seconds after the last save began."
    )
    no_async_save: bool = flag(
        False,
        help="Wait until the disk holds a checkpoint. By default it is copied to host memory, of which that takes as "
        "much as the checkpoint, and written beside the next rollout.",
    )
    save_keep: int | None = flag(
        None, min=1, help="Keep this many of the newest checkpoints; older ones are deleted once a new one is complete."
    )
    save_hf: str | None = folder("At the end also write the weights here in Hugging Face's format.")
    no_save_optim: bool = flag(
        False, help="Leave the optimizer out of saved checkpoints: smaller; a run resumed from one starts Adam anew."
    )


@dataclass(frozen=True)
class DataArgs:
    """Data."""

    prompt_data: list[str] = flag(
        [],
        nargs="+",
        metavar="[NAME=]FILE[@WEIGHT]",
        help="Training prompts or conversations, .jsonl or .parquet. Several files are mixed by weight (default: their "
        "sizes) and reported by name; FILE@[a:b] takes rows a to b only.",
    )
    input_key: str = flag("prompt", help="Column with the prompt (text or messages) or, in SFT, the conversation.")
    label_key: str = flag("label", help="Column with the ground truth.")
    tool_key: str = flag("tools", help="Column with the tool schemas (a list, or JSON text of one).")
    metadata_key: str = flag("metadata", help="Column copied to sample.metadata.")
    apply_chat_template: bool = flag(
        False, help="Render text prompts as one user message with the chat template (message lists always are)."
    )
    rollout_shuffle: bool = flag(False, help="Shuffle the rows anew in every epoch.")
    rollout_seed: int = flag(42, help="Seed of the shuffle.")
    rollout_max_prompt_len: int | None = flag(None, min=1, help="Leave out rows whose prompt has more tokens.")
    skip_bad_rows: bool = flag(
        False,
        help="Leave out rows that cannot be used and list them in --output-dir/skipped_rows.jsonl (default: the first "
        "one ends the start).",
    )


@dataclass(frozen=True)
class RolloutArgs:
    """Rollout: what is generated, how much, by which functions."""

    num_rollout: int | None = flag(None, min=0, help="Rollouts (generate, train, update) in the run.")
    num_epoch: int | None = flag(None, min=1, help="Passes over the data, instead of --num-rollout.")
    rollout_batch_size: int | None = flag(None, min=1, help="Prompts per rollout.")
    n_samples_per_prompt: int = flag(1, min=1, help="Responses per prompt: the group that an advantage is relative to.")
    over_sampling_batch_size: int | None = flag(
        None, help="Prompts in flight at once when groups may be dropped; at least --rollout-batch-size."
    )
    dynamic_sampling_filter_path: str | None = hook(
        "Function (args, group) -> bool that keeps a group of samples; dropped groups are replaced. DAPO's is "
        "slime_retool.rollout.filters.check_reward_nonzero_std."
    )
    max_sampling_rounds: int = flag(
        20,
        min=1,
        help="Stop with a clear error after drawing this many times --rollout-batch-size prompts without a full batch "
        "(a filter, outages, SFT rows that cannot be used).",
    )
    max_staleness: int = flag(
        0,
        min=0,
        metavar="K",
        help="Weight updates that a token may be older than the weights it trains. 0: every rollout begins and ends "
        "between two updates; 1 and more: unfinished conversations go on across updates (docs/stream.md).",
    )
    rollout_function_path: str = flag(
        RL_ROLLOUT,
        metavar="MODULE.FUNCTION",
        help="Function that makes one training batch; with --loss-type sft_loss instead of the default "
        f"{SFT_ROLLOUT}.",
    )
    custom_generate_function_path: str | None = hook(
        "Hook generate(args, sample, sampling_params); without it one plain turn is generated."
    )
    custom_rm_path: str | None = hook("Hook reward_func(args, sample) -> number or dict.")
    rm_type: str = flag(
        "dapo",
        choices=RM_TYPES,
        help="How answers are compared, by the built-in reward and by ReTool's: the published rule (the box must hold "
        "the very characters of the ground truth), or by meaning.",
    )
    reward_timeout: float = flag(
        300.0,
        above=0,
        help="Seconds the --custom-rm-path hook may run for one sample; beyond that the sample is dropped.",
    )
    reward_key: str | None = flag(None, help="Entry of a reward dict that is trained on (default score).")
    accuracy_threshold: float | None = flag(
        None,
        help="A reward of at least this counts as a right answer, where the reward function does not say so itself "
        "(acc in its dict); without either, rewards are reported and no accuracy.",
    )
    overlong_filtering: bool = flag(
        False, help="Learn nothing from truncated responses (DAPO); they still count in their group's baseline."
    )
    overlong_buffer_len: int | None = flag(
        None,
        min=1,
        help="Soft overlong punishment (DAPO): the reward falls over the last this many tokens of a response.",
    )
    overlong_penalty_factor: float = flag(1.0, above=0, help="The most that --overlong-buffer-len takes off a reward.")
    rollout_max_response_len: int = flag(1024, min=1, help="Tokens of one response, observations included.")
    rollout_max_context_len: int | None = flag(
        None,
        min=1,
        help="Tokens of prompt and response together (default where responses are generated: the model's positions).",
    )
    rollout_temperature: float = flag(1.0, above=0, help="Sampling temperature; the trainer divides logits by it.")
    rollout_top_p: float = flag(1.0, above=0, max=1, help="Nucleus sampling.")
    rollout_top_k: int = flag(-1, min=1, off=-1, help="Sample among the k likeliest tokens (-1: all).")
    rollout_stop: list[str] = flag([], nargs="*", help="Texts that end a turn.")
    rollout_stop_token_ids: list[int] = flag([], nargs="*", help="Token ids that end a turn.")
    rollout_request_timeout: float = flag(600.0, above=0, help="Seconds an engine may take for one request.")
    rollout_request_retries: int = flag(3, min=0, help="Further tries of a failed engine request.")


@dataclass(frozen=True)
class ToolArgs:
    """Tools and sandbox."""

    tool_format: str = flag(
        "qwen",
        choices=("qwen", "retool"),
        help="How calls and observations are written (docs/tools.md): JSON calls as in Qwen's chat template, or the "
        "ReTool paper's code and interpreter tags.",
    )
    max_turns: int = flag(16, min=1, help="Assistant turns in one response.")
    max_tool_calls: int = flag(16, min=0, help="Executed tool calls in one response.")
    max_observation_tokens: int = flag(
        512, min=1, help="Tokens of one observation; the middle is cut, the last line kept."
    )
    sandbox_isolation: str = flag(
        "namespaces",
        choices=ISOLATION_LEVELS,
        help="How model-written code is shut in (docs/sandbox.md): landlock in a stock Docker container; "
        "none is no security boundary.",
    )
    sandbox_url: str | None = flag(
        None, url=True, help="Run code in this SandboxFusion deployment (or `slime-retool sandbox serve`) instead."
    )
    sandbox_token_file: str | None = flag(
        None, help="File whose text that server asks for (its own --token-file; sent as Authorization: Bearer)."
    )
    tool_state: str = flag(
        "call",
        choices=("call", "session"),
        help="call: every tool call starts afresh; session: a conversation keeps its variables from call to call.",
    )
    tool_timeout: float = flag(10.0, above=0, help="Seconds one call may run, counted from its start.")
    tool_memory_mb: int = flag(512, min=1, help="Memory one call may use.")
    tool_concurrency: int = flag(16, min=1, help="Calls that run at once.")
    tool_retries: int = flag(3, min=0, help="Further tries when the sandbox itself is down.")


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation."""

    eval_interval: int | None = flag(None, min=1, help="Evaluate before training and after every this many rollouts.")
    eval_prompt_data: list[str] = flag(
        [], nargs="+", metavar="NAME FILE", help="Name and file of each evaluation set, in pairs."
    )
    eval_input_key: str | None = flag(None, help="Prompt column of evaluation sets (default: --input-key).")
    eval_label_key: str | None = flag(None, help="Label column of evaluation sets (default: --label-key).")
    n_samples_per_eval_prompt: int = flag(1, min=1, help="Responses per evaluation prompt.")
    eval_max_response_len: int | None = flag(None, min=1, help="As --rollout-max-response-len.")
    eval_temperature: float | None = flag(None, min=0, help="As --rollout-temperature; 0 is greedy.")
    eval_top_p: float | None = flag(None, above=0, max=1, help="As --rollout-top-p.")
    eval_top_k: int | None = flag(None, min=1, off=-1, help="As --rollout-top-k.")
    skip_eval_before_train: bool = flag(False, help="No evaluation before the first rollout.")
    rescore: bool = flag(
        False,
        help="`slime-retool eval` only: score samples that are there already again, by the reward, the labels and "
        "the metadata as they are now.",
    )
    eval_endpoint_url: str | None = flag(
        None, url=True, help="`slime-retool eval` only: a model behind this OpenAI-compatible API (.../v1)."
    )
    eval_endpoint_model: str | None = flag(None, metavar="NAME", help="The endpoint's name of the model.")
    eval_endpoint_key_variable: str = flag(
        "OPENAI_API_KEY", metavar="NAME", help="Environment variable that holds the endpoint's key; unset: no key."
    )
    eval_endpoint_concurrency: int = flag(32, min=1, help="Requests to the endpoint at once.")


@dataclass(frozen=True)
class AlgoArgs:
    """Loss and advantages."""

    loss_type: str = flag(
        next(iter(LOSSES)),
        metavar="NAME",
        help=f"What is minimised: {', '.join(LOSSES)}, or the dotted path of a loss of your own (docs/extending.md). "
        "sft_loss starts no engines; a row is one sample.",
    )
    advantage_estimator: str = flag(
        next(iter(ALGORITHMS)),
        metavar="NAME",
        help="How rewards become advantages: "
        f"{'; '.join(f'{name}, {algorithm.summary}' for name, algorithm in ALGORITHMS.items())}; "
        "or the dotted path of an algorithm of your own (docs/extending.md).",
    )
    disable_grpo_std_normalization: bool = flag(False, help="Do not divide advantages by the group's deviation.")
    normalize_advantages: bool = flag(
        False,
        help="Whiten advantages over all learned tokens of the rollout (those of "
        f"{names_where(lambda algorithm: algorithm.always_whitens)} always are).",
    )
    gamma: float = flag(1.0, min=0, max=1, help=f"Discount per learned token ({readers_of('gamma')}).")
    lambd: float = flag(
        1.0, min=0, max=1, help=f"Lambda of generalised advantage estimation ({readers_of('lambd')})."
    )
    kl_coef: float = flag(
        0.0, help="Take this times the KL from the reference model (--ref-load) off the reward, token by token."
    )
    calculate_per_token_loss: bool = flag(
        False, help="Average over all learned tokens of the batch, not first within each sample."
    )
    loss_constant_length: int | None = flag(
        None, min=1, help="Divide each sample's loss by this many tokens instead of its own length (Dr. GRPO)."
    )
    eps_clip: float = flag(
        0.2,
        above=0,
        max=1,
        help="Clip range of the ratio below 1 (and above, without --eps-clip-high); the paper takes "
        f"{published_values('eps_clip')}.",
    )
    eps_clip_high: float | None = flag(
        None,
        above=0,
        help=f"Clip range above 1 (DAPO's clip-higher); the paper takes {published_values('eps_clip_high')}.",
    )
    eps_clip_c: float | None = flag(None, above=1, help="Dual-clip bound for negative advantages.")
    use_kl_loss: bool = flag(False, help="Add a KL term against the reference model (--ref-load) to the loss.")
    kl_loss_coef: float = flag(0.0, help="Weight of the KL term in the loss.")
    kl_loss_type: str = flag(
        "k1",
        choices=KL_TYPES,
        help="Estimator of the KL, in the loss and in the reward (low_var_kl: k3, clamped). k1 in the loss only "
        "measures: its expected gradient is 0.",
    )
    entropy_coef: float = flag(0.0, help="Weight of the entropy bonus.")
    use_rollout_logprobs: bool = flag(
        False, help="Take the engine's log-probs as the old policy's instead of recomputing them."
    )
    use_rollout_routing_replay: bool = flag(
        False,
        help="Train each token with the experts that the engine chose for it (routing replay, docs/moe.md). Servers of "
        "--rollout-external-urls must have been started with --enable-return-routed-experts.",
    )
    use_tis: bool = flag(
        False, help="Correct for the engine's log-probs differing from the trainer's by importance weights."
    )
    tis_level: str = flag(
        "token",
        choices=TIS_LEVELS,
        help="Ratio of a token, of its whole sample, or the geometric mean over its sample.",
    )
    tis_mode: str = flag(
        "truncate",
        choices=TIS_MODES,
        help="Ratios outside the limits: moved to them, or their tokens (samples) teach nothing.",
    )
    tis_clip: float = flag(2.0, help="Upper limit of importance weights.")
    tis_clip_low: float = flag(0.0, min=0, help="Lower limit of importance weights.")
    teacher_url: str | None = flag(
        None, url=True, help="SGLang server of a teacher with the same tokenizer, for on-policy distillation."
    )
    distill_coef: float = flag(
        0.0, min=0, help="Weight of the distillation term (reverse KL from the teacher) in the loss."
    )


@dataclass(frozen=True)
class CriticArgs:
    """Critic of an --advantage-estimator that has one."""

    critic_num_nodes: int | None = flag(
        None, min=1, help="Hosts of the critic; without it and the next flag it shares the actor's processes."
    )
    critic_num_gpus_per_node: int | None = flag(
        None, min=1, help="Processes per host for the critic alone, one GPU each; same parallel sizes as the actor."
    )
    critic_load: str | None = folder("The critic's checkpoint: resumed, or its first weights (default: LOAD/critic).")
    critic_save: str | None = folder("Write the critic's checkpoints here (default: SAVE/critic).")
    critic_lr: float | None = flag(None, above=0, help="The critic's peak learning rate (default: --lr).")
    critic_lr_warmup_iters: int = flag(0, min=0, help="The critic's optimizer steps of linear warm-up.")
    num_critic_only_steps: int = flag(0, min=0, help="First rollouts in which only the critic is trained.")
    value_clip: float = flag(
        0.2, min=0, help="Keep values this close to their old ones in the critic's loss (0: never)."
    )


@dataclass(frozen=True)
class LoraArgs:
    """LoRA: train low-rank adapters of frozen weights (docs/algorithms.md)."""

    lora_rank: int | None = flag(
        None, min=1, help="Rank of the adapters of the actor's linear layers; without it all weights are trained."
    )
    lora_alpha: float | None = flag(
        None, above=0, help="An adapter's output counts alpha / rank times (default: twice the rank)."
    )
    lora_target_modules: list[str] = flag(
        list(TARGET_MODULES),
        nargs="+",
        choices=tuple(TARGET_MODULES),
        help="Linear layers that get an adapter; of a mixture of experts every expert's.",
    )
    lora_weight_update: str = flag(
        "merged",
        choices=("merged", "adapters"),
        help="merged: engines get all weights, with the adapters merged into them; adapters: they get the frozen "
        "weights once and then the adapters alone, which SGLang applies beside them.",
    )


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer and learning-rate schedule."""

    optimizer: str = flag("adam", choices=("adam",), help="Adam with decoupled weight decay.")
    lr: float = flag(1e-6, above=0, help="Peak learning rate.")
    min_lr: float = flag(0.0, min=0, help="Learning rate at the end of the decay.")
    lr_decay_style: str = flag("constant", choices=("constant", "cosine", "linear"), help="Shape of the decay.")
    lr_decay_iters: int | None = flag(None, min=1, help="Optimizer steps of the schedule (default: the whole run).")
    lr_warmup_iters: int = flag(0, min=0, help="Optimizer steps of linear warm-up.")
    lr_warmup_fraction: float | None = flag(None, min=0, below=1, help="Warm-up as a share of the schedule's steps.")
    weight_decay: float = flag(0.0, min=0, help="Weight decay (not on norms and biases).")
    adam_beta1: float = flag(0.9, min=0, below=1, help="Adam's beta1.")
    adam_beta2: float = flag(0.98, min=0, below=1, help="Adam's beta2.")
    adam_eps: float = flag(1e-8, above=0, help="Adam's epsilon.")
    clip_grad: float = flag(1.0, min=0, help="Clip the global gradient norm to this (0: never).")


@dataclass(frozen=True)
class BatchArgs:
    """Batches."""

    global_batch_size: int | None = flag(
        None, min=1, help="Samples per optimizer step (default: all of a rollout, one step)."
    )
    micro_batch_size: int = flag(1, min=1, help="Samples packed into one forward without --use-dynamic-batch-size.")
    use_dynamic_batch_size: bool = flag(False, help="Pack samples up to --max-tokens-per-gpu.")
    max_tokens_per_gpu: int | None = flag(
        None, min=1, help="Tokens of one packed micro-batch on one GPU (under context parallelism, of its part)."
    )


@dataclass(frozen=True)
class PerfArgs:
    """Precision, kernels and recomputation."""

    precision: str = flag("auto", choices=("auto", "bf16", "fp32"), help="auto: bf16 on GPUs, fp32 on the CPU.")
    transformer_impl: str = flag(
        "auto", choices=TRANSFORMER_IMPLS, help="auto: Transformer Engine when installed."
    )
    attention_backend: str = flag(
        "auto",
        choices=ATTENTION_BACKENDS,
        help="flash: flash-attn-4 (Hopper and Blackwell GPUs); fused: Transformer Engine's cuDNN kernels, or torch's "
        "varlen_attn in local layers; auto: flash where it runs. Not read on the CPU.",
    )
    use_distributed_optimizer: bool = flag(True, help="Shard optimizer state over data-parallel ranks.")
    recompute_granularity: str = flag("none", choices=("none", "full", "selective"), help="Activation recomputation.")
    recompute_method: str | None = flag(None, choices=("uniform", "block"), help="How layers are chosen for it.")
    recompute_num_layers: int | None = flag(None, min=1, help="Layers per recomputed chunk (uniform) or stage (block).")
    recompute_modules: list[str] = flag(
        [],
        nargs="*",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act"),
        help="Parts recomputed with --recompute-granularity selective; without a name core_attn.",
    )
    gradient_accumulation_fusion: bool = flag(
        True, help="Transformer Engine adds weight gradients to the fp32 buffer inside its matrix products."
    )
    overlap_grad_reduce: bool = flag(False, help="Reduce gradients over data-parallel ranks during the backward.")
    overlap_param_gather: bool = flag(
        False, help="Gather the distributed optimizer's parameters during the next forward."
    )
    keep_logits_gib: float = flag(
        0.0,
        min=0,
        help="Memory of a micro-batch's logits that are kept for the backward pass (4 bytes for each learned token and "
        "vocabulary entry of a rank); the others are computed again.",
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        help="Keep master weights as bf16 and 16 further bits (exact; saves 2 bytes a parameter; needs TE, and "
        "--no-save-optim where checkpoints are saved).",
    )
    optimizer_cpu_offload: bool = flag(
        False, help="Keep optimizer state in host memory and update there (with megatron-core 0.16 needs TE)."
    )
    optimizer_offload_fraction: float = flag(1.0, above=0, max=1, help="Share of it, with --optimizer-cpu-offload.")
    accumulate_allreduce_grads_in_fp32: bool = flag(True, help="Accumulate and reduce gradients in fp32.")


@dataclass(frozen=True)
class SlimeArgs:
    """Accepted for slime's scripts; they change nothing."""

    balance_data: bool = flag(False, help="Even out tokens among data-parallel ranks (always done).")
    disable_compute_advantages_and_returns: bool = flag(False, help="No advantages (--loss-type sft_loss has none).")
    attention_dropout: float = flag(0.0, min=0, max=0, help="With dropout log-probs would not be the policy's.")
    hidden_dropout: float = flag(0.0, min=0, max=0, help="As --attention-dropout.")
    attention_softmax_in_fp32: bool = flag(True, help="Attention softmax in fp32 (always done).")


@dataclass(frozen=True)
class SglangArgs:
    """SGLang engines and router. Any other --sglang-FLAG [VALUE] is handed to the servers as --FLAG [VALUE]."""

    sglang_mem_fraction_static: float | None = flag(
        None, above=0, below=1, help="Share of device memory for weights and KV cache."
    )
    sglang_server_concurrency: int = flag(512, min=1, help="Requests in flight per engine.")
    sglang_startup_timeout: float = flag(600.0, above=0, help="Seconds an engine may take to become healthy.")
    max_engine_restarts: int = flag(
        8,
        min=0,
        help="Replace engines that died or hang this many times in all (the router as often); then the run ends.",
    )
    engine_hang_timeout: float = flag(
        120.0,
        above=0,
        help="An engine that gives no token for this many seconds, although asked to, hangs: it is ended and replaced.",
    )
    sglang_gather_prefills: bool = flag(
        True,
        help="On GPUs, engines let requests wait (at most a quarter of a second) until a twelfth as many as are "
        "decoding can be prefilled at once: each prefill interrupts decoding, and every turn brings one.",
    )
    sglang_max_total_tokens: int | None = flag(
        None, min=1, help="Tokens in the KV cache (default on the CPU: what the batch of samples needs)."
    )
    rollout_external_urls: list[str] = flag(
        [],
        nargs="*",
        url=True,
        help="Use these running SGLang servers instead of starting any. Start them with SGLANG_TIMEOUT_KEEP_ALIVE=600: "
        "by default they close connections that were idle for 5 s, and some requests need a second try.",
    )


@dataclass(frozen=True)
class TrackingArgs:
    """Tracking. A JSONL of all metrics is always written to --output-dir."""

    output_dir: str = flag(
        "outputs/run",
        metavar="DIR",
        help="Logs, metrics.jsonl and rollout dumps. A run that resumes nothing first moves the metrics and samples "
        "that an earlier one left there to DIR/earlier_1, 2, ...",
    )
    dump_rollouts: bool = flag(
        False,
        help="Write every sample (text, tokens, reward, times, and what the trainer made of it) to --output-dir, for "
        "slime-retool view.",
    )
    dump_rollouts_compressed: bool = flag(
        False, help="Write dumps as .jsonl.gz, a third of the size or less; the viewer and --replay-rollouts read both."
    )
    dump_rollouts_every: int = flag(1, min=1, metavar="N", help="Dump only every Nth rollout, from the first on.")
    dump_rollouts_keep: int | None = flag(None, min=1, metavar="N", help="Delete all dumps but the newest N.")
    profile_rollout: list[int] = flag(
        [],
        nargs="+",
        min=0,
        metavar="N",
        help="Write a trace of these rollouts' steps to OUTPUT_DIR/traces, for ui.perfetto.dev: what driver, "
        "conversations, engines, tools and trainers did, by one clock.",
    )
    no_progress: bool = flag(False, help="No progress bars (only a terminal gets any): a line for each rollout.")
    use_wandb: bool = flag(False, help="Log to Weights & Biases.")
    wandb_project: str | None = flag(None, help="W&B project.")
    wandb_group: str | None = flag(None, help="W&B group.")
    wandb_name: str | None = flag(None, help="W&B run name.")
    wandb_key: str | None = flag(None, secret=True, help="W&B key (else WANDB_API_KEY or an earlier `wandb login`).")
    wandb_mode: str | None = flag(None, choices=("online", "offline", "disabled"), help="W&B mode.")
    use_tensorboard: bool = flag(False, help="Write TensorBoard event files to --output-dir.")
    prometheus_port: int | None = flag(
        None,
        min=1,
        max=65535,
        help="Serve the newest value of every metric to Prometheus at http://127.0.0.1:PORT/metrics, as "
        "slime_retool_train_loss and so on.",
    )
    custom_tracker_path: str | None = hook("Hook tracker(args) -> a tracker of your own (docs/extending.md).")


@dataclass(frozen=True)
class DebugArgs:
    """Partial runs."""

    debug_train_only: bool = flag(False, help="Start no engines (SFT).")
    debug_rollout_only: bool = flag(False, help="Generate and score, never train.")
    replay_rollouts: str | None = folder(
        "Start no engines and train on the batches of an earlier run, whose --output-dir with --dump-rollouts this is. "
        "With its other flags the losses are the same; nothing is evaluated or saved."
    )
    check_weight_update_equal: bool = flag(
        False,
        help="After every weight update compare each tensor's checksum in trainer and engines; stop if one differs.",
    )
    dry_run: bool = flag(
        False,
        help="Check all that can be checked before anything starts, the data's rows and the hooks included, print the "
        "resolved configuration without secrets, and stop.",
    )
