"""The flat, typed, frozen configuration object."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megatron_bridge import flags
from megatron_bridge.arithmetic import checkpoint_size
from megatron_bridge.lora_spec import LoraSpec
from megatron_bridge.model_config import ModelArgs
from slime_retool.algo.algorithms import Algorithm, Loss, LossTerm, active_terms, find_algorithm, find_loss
from slime_retool.config import groups
from slime_retool.config.data_sets import DataSet, parse_data_sets
from slime_retool.dumps import FOLDER, dump_path

H = TypeVar("H")

BATCHES_OPEN = 2
"""Batches of groups that a stream (--max-staleness) has open: one being finished while the next is under way."""
UNKNOWN_BATCH = 16
"""Prompts that engines are prepared for without --rollout-batch-size."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ShippedHookArgs:
    """A hook's `HookArgs` as plain data: on the way to a process that may lack the module, unless it reads them."""

    module: str
    name: str
    """Module and name of the class."""
    values: dict[str, Any] = field(repr=False)
    """By field, secrets among them."""

    @classmethod
    def of(cls, args: Any) -> ShippedHookArgs:
        """What `args` holds; itself where it is shipped already."""
        if isinstance(args, ShippedHookArgs):
            return args
        made = type(args)
        return cls(made.__module__, made.__qualname__, {f.name: getattr(args, f.name) for f in fields(args)})


@dataclass(frozen=True)
class Config(
    groups.DebugArgs,
    groups.TrackingArgs,
    groups.SglangArgs,
    groups.SlimeArgs,
    groups.PerfArgs,
    groups.BatchArgs,
    groups.OptimizerArgs,
    groups.LoraArgs,
    groups.CriticArgs,
    groups.AlgoArgs,
    groups.EvalArgs,
    groups.ToolArgs,
    groups.RolloutArgs,
    groups.DataArgs,
    groups.CheckpointArgs,
    groups.ParallelArgs,
    ModelArgs,
    groups.ClusterArgs,
):
    """All options of a run: given (`parse_config`), completed (`resolve`), checked (`validate`). Hooks' `args`."""

    sglang_server_flags: dict[str, list[str]] = field(default_factory=dict)
    """Flags for `sglang.launch_server` that are not declared here, e.g. {"--attention-backend": ["triton"]}."""
    hook_args: tuple[Any, ...] = ()
    """What the flags hold that the hooks' modules declare, one object per `HookArgs` class; read by `hook`."""

    def hook(self, cls: type[H]) -> H:
        """A hook's own flags: `args.hook(HookArgs).my_flag`. Defaults where no hook's path named the module, and so
        none of its flags can have been given."""
        for args in self.hook_args:
            if type(args) is cls:
                return args
            if isinstance(args, ShippedHookArgs) and (args.module, args.name) == (cls.__module__, cls.__qualname__):
                return cls(**args.values)
        return cls()

    @property
    def model_args(self) -> ModelArgs:
        """The description of the model alone."""
        return ModelArgs(**{f.name: self.__dict__[f.name] for f in fields(ModelArgs)})

    def for_actors(self) -> Config:
        """The same for trainers and engines, which start in another working folder and may not find the hooks."""
        given = {name: self.__dict__[name] for name in flags.names_of(Config, metavar="DIR")}
        paths = {name: os.path.abspath(path) for name, path in given.items() if path is not None}
        return replace(self, hook_args=tuple(map(ShippedHookArgs.of, self.hook_args)), **paths)

    # Derived sizes; `validate` has checked that they divide.

    @property
    def on_cuda(self) -> bool:
        """`device` is settled by `resolve`; before that "auto" counts as the CPU."""
        return self.device == "cuda"

    @property
    def in_bf16(self) -> bool:
        """Whether the trainer's weights are bf16 and not fp32."""
        return self.precision == "bf16" or (self.precision == "auto" and self.on_cuda)

    @property
    def world_size(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    @property
    def lora(self) -> LoraSpec | None:
        """The actor's adapters; None when all weights are trained."""
        if self.lora_rank is None:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        base = None if self.ref_load is None else os.path.abspath(self.ref_load)
        return LoraSpec(self.lora_rank, alpha, tuple(self.lora_target_modules), base)

    @property
    def serves_adapters(self) -> bool:
        """Whether engines hold the frozen weights and the adapters apart, and an update sends the adapters alone."""
        updates = self.num_engines > 0 and not self.debug_rollout_only
        return updates and self.lora_rank is not None and self.lora_weight_update == "adapters"

    @property
    def algorithm(self) -> Algorithm:
        """What `--advantage-estimator` names. Raises ConfigError for a name or path that leads to none."""
        return find_algorithm(self.advantage_estimator)

    @property
    def loss(self) -> Loss:
        """What `--loss-type` names. Raises ConfigError for a name or path that leads to none."""
        return find_loss(self.loss_type, self.algorithm)

    @property
    def prompt_limit(self) -> tuple[int | None, str]:
        """Tokens that a prompt may have, and how a message says so. A context must have room for an answer too."""
        longest, context = self.rollout_max_prompt_len, self.rollout_max_context_len
        if context is None or self.loss.supervised or (longest is not None and longest < context):
            return longest, f"--rollout-max-prompt-len {longest} tokens"
        return context - 1, f"{context - 1} tokens, and --rollout-max-context-len {context} must hold an answer too"

    @property
    def loss_terms(self) -> list[tuple[LossTerm, float]]:
        """The loss and what is added to it, each with its weight."""
        return active_terms(self.loss, self)

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.needs_critic and not self.loss.supervised

    @property
    def policy_starts_at(self) -> int:
        """The first rollout that trains the policy; those before it train the critic alone."""
        return self.num_critic_only_steps

    def dumps(self, rollout_id: int) -> bool:
        """Whether --dump-rollouts writes the samples of this rollout."""
        return self.dump_rollouts and rollout_id % self.dump_rollouts_every == 0

    def dump_path(self, kind: str, rollout_id: int) -> Path:
        """Where --dump-rollouts writes its file of this kind."""
        return dump_path(Path(self.output_dir) / FOLDER, kind, rollout_id, compressed=self.dump_rollouts_compressed)

    @property
    def roles(self) -> list[Role]:
        """The models that are trained, the policy first."""
        policy = Role("actor", self)
        if not self.uses_critic:
            return [policy]
        return [policy, Role("critic", self.of_critic(), has_logits=False, separate=self._critic_processes is not None)]

    @property
    def trainer_groups(self) -> list[tuple[str, Config]]:
        """(roles, options) of each group of training processes: see `trainer.core.ROLES`."""
        if not self.uses_critic or self._critic_processes is None:
            return [("all", self)]
        return [("actor", self), ("critic", replace(self, **self._critic_processes))]

    @property
    def _critic_processes(self) -> dict[str, Any] | None:
        """What differs in the options of a critic's own processes; None where it has none."""
        nodes, gpus = self.critic_num_nodes, self.critic_num_gpus_per_node
        if nodes is None and gpus is None:
            return None
        return {
            "actor_num_nodes": 1 if nodes is None else nodes,
            "actor_num_gpus_per_node": 1 if gpus is None else gpus,
            "offload_train": False,  # nobody else wants its devices
        }

    def of_critic(self) -> Config:
        """The options as the critic has them: its own learning rate and folders, no adapters.

        Its folders are by default those called `critic` in the actor's.
        """
        lr = self.lr if self.critic_lr is None else self.critic_lr
        return replace(
            self,
            **(self._critic_processes or {}),
            lr=lr,
            min_lr=min(self.min_lr, lr),
            lr_warmup_iters=self.critic_lr_warmup_iters,
            lr_warmup_fraction=None,
            num_critic_only_steps=0,
            load=self.critic_load or (self.load and os.path.join(self.load, "critic")),
            save=self.critic_save or (self.save and os.path.join(self.save, "critic")),
            lora_rank=None,
        )

    @property
    def halves_master_weights(self) -> bool:
        """Whether master weights are 16 bits beside the bf16 weights; the optimizer on the host has whole ones."""
        return self.use_precision_aware_optimizer and not self.optimizer_cpu_offload

    @property
    def going_on(self) -> Config:
        """The same, which goes on from what this run itself has saved."""
        assert self.save is not None
        return replace(self, load=self.save, critic_load=self.critic_save or os.path.join(self.save, "critic"))

    @property
    def critic_places(self) -> list[str]:
        """Folders that may hold the critic's checkpoint beside the actor's in --load; none without a critic.

        A run that goes on from its own --save has put it into --critic-save, whatever --critic-load began with.
        """
        if not self.uses_critic:
            return []
        critic, load, save = self.of_critic(), self.load, self.save
        own = load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)
        return [place for place in dict.fromkeys([critic.save if own else None, critic.load]) if place is not None]

    @property
    def load_folders(self) -> dict[str, str]:
        """Flag -> folder that trainers read checkpoints from."""
        named = {"--ref-load": self.ref_load} | {role.flag("--load"): role.config.load for role in self.roles}
        return {flag: folder for flag, folder in named.items() if folder is not None}

    @property
    def save_folders(self) -> dict[str, str]:
        """Flag -> folder that trainers write checkpoints to."""
        named = {role.flag("--save"): role.config.save for role in self.roles}
        return {flag: folder for flag, folder in named.items() if folder is not None}

    @property
    def needs_reference(self) -> bool:
        """Whether anything compares the policy with the reference model."""
        if self.loss.supervised:
            return False
        return self.kl_coef != 0 or any("ref_log_probs" in term.needs for term, _ in self.loss_terms)

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the trainer makes the old policy's log-probs in a pass of their own.

        Where neither a later optimizer step nor the advantages need them, they come with the forward itself.
        """
        if self.loss.supervised or self.use_rollout_logprobs:
            return False
        return self.steps_per_rollout > 1 or self.use_tis or self.kl_coef != 0

    @property
    def bytes_of_a_save(self) -> int:
        """Bytes of what is written at one save."""
        return sum(role.checkpoint_bytes for role in self.roles)

    def checkpoint_bytes(self, *, value_head: bool = False) -> int:
        """Bytes of one checkpoint of a model with these options, or of one with a value head."""
        return checkpoint_size.checkpoint_bytes(
            self,
            bf16=self.in_bf16,
            with_optimizer=not self.no_save_optim,
            lora=self.lora,
            value_head=value_head,
        )

    @property
    def samples_per_rollout(self) -> int:
        assert self.rollout_batch_size is not None
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def groups_at_once(self) -> int:
        """Prompts that engines may work on at the same time."""
        batch = max(self.rollout_batch_size or 0, self.over_sampling_batch_size or 0)
        return batch * (BATCHES_OPEN if self.max_staleness else 1)

    @property
    def context_limit(self) -> int | None:
        """Tokens that a prompt and a generated response may have together: --rollout-max-context-len, else the model's
        positions. None where neither is known."""
        return self.max_position_embeddings if self.rollout_max_context_len is None else self.rollout_max_context_len

    def response_limit(self, prompt_length: int) -> int:
        """Tokens that a response may have, observations included: --rollout-max-response-len, or what its prompt leaves
        of the context where that is less."""
        most, context = self.rollout_max_response_len, self.context_limit
        return most if context is None else min(most, context - prompt_length)

    def fits_context(self, length: int) -> bool:
        """Whether --rollout-max-context-len lets prompt and response have so many tokens together."""
        return self.rollout_max_context_len is None or length <= self.rollout_max_context_len

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return 1 if self.global_batch_size is None else self.samples_per_rollout // self.global_batch_size

    @property
    def num_engines(self) -> int:
        if self.debug_train_only:
            return 0
        if self.rollout_external_urls:
            return len(self.rollout_external_urls)
        return self.generation_gpus // self.rollout_num_gpus_per_engine

    @property
    def generation_gpus(self) -> int:
        """GPUs of all engines that the run starts. By default those of the trainers, or of one engine."""
        return self.rollout_num_gpus or (self.world_size if self.colocate else self.rollout_num_gpus_per_engine)

    @property
    def requests_per_engine(self) -> int:
        """Samples that an engine may work on at the same time; of `UNKNOWN_BATCH` prompts where nothing says of how
        many."""
        samples = (self.groups_at_once or UNKNOWN_BATCH) * self.n_samples_per_prompt
        return math.ceil(samples / max(1, self.num_engines))

    @property
    def prompt_sets(self) -> list[DataSet]:
        """The data sets of `--prompt-data`. Raises ConfigError for values that do not go together."""
        values = self.prompt_data
        return parse_data_sets([values] if isinstance(values, str) else values)

    @property
    def weight_transport(self) -> str:
        """`update_weight_transport` with "auto" settled."""
        if self.update_weight_transport != "auto":
            return self.update_weight_transport
        if self.rollout_external_urls and self.update_weight_disk_dir is not None:
            return "disk"
        return "ipc" if self.colocate else "broadcast"

    @property
    def engines_elsewhere(self) -> bool:
        """Whether an external engine is reached by an address beyond this host's loopback."""
        return any(urlsplit(url).hostname not in LOOPBACK for url in self.rollout_external_urls)

    @property
    def offloads_train(self) -> bool:
        """Whether the trainer leaves its device while engines generate."""
        if self.debug_rollout_only or not self.num_engines:
            return False
        return self.colocate and self.on_cuda if self.offload_train is None else self.offload_train

    @property
    def offloads_rollout(self) -> bool:
        """Whether engines give back their memory while the trainer works."""
        if self.debug_rollout_only or not self.num_engines:
            return False
        return self.colocate and self.on_cuda if self.offload_rollout is None else self.offload_rollout

    @property
    def offloads_cache(self) -> bool:
        """Whether they give back their KV cache, too."""
        return self.offloads_rollout and self.offload_rollout_cache

    @property
    def keeps_cache(self) -> bool:
        """Whether engines keep what they have read when their weights are updated."""
        return self.max_staleness > 0 and not self.offloads_cache

    @property
    def eval_sets(self) -> list[tuple[str, str]]:
        """(name, file) of each evaluation set."""
        return list(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))


@dataclass(frozen=True)
class Role:
    """A model that a run trains."""

    name: str
    config: Config
    """The run's options as this model has them: its learning rate, folders, adapters, and processes."""
    has_logits: bool = True
    """It predicts words. Otherwise one value for each token takes the place of the output layer."""
    separate: bool = False
    """It has processes of its own, which train while the policy's do."""

    def flag(self, actors: str) -> str:
        """The flag of this model's that is `actors` of the actor: --save, --critic-save."""
        return actors if self.name == "actor" else f"--{self.name}-{actors.removeprefix('--')}"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.config.checkpoint_bytes(value_head=not self.has_logits)


HOOK_PATHS = tuple(flags.names_of(Config, metavar="MODULE.FUNCTION"))
"""Fields that name a hook."""
NAMES_OR_PATHS = ("advantage_estimator", "loss_type", "update_weight_transport")
"""Fields that hold a name of the product's, or the dotted path of what a user wrote."""
