#!/usr/bin/env bash
# One RL step here and in verl 0.9.1, at equal work, on the same GPU: see verl.md.
#
#   MODEL=DIR VERL_SITE=DIR QUESTIONS=FILE bash benchmarks/peers/verl.sh [work | ours | peer | compare | all]
#
#   MODEL       a Hugging Face checkpoint          VERL_SITE   the folder of verl and what it needs
#   QUESTIONS   train/gsm8k.jsonl of the reference run's prepared data
#   WORK, RESULT (peer.json), STEPS, PROMPTS, SAMPLES, SHORTEST, LONGEST, ATTENTION (of verl's trainer), PYTHON
set -euo pipefail
PEER=verl
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

peer() {
  # antlr4 of hydra and of math-verify exclude each other: verl's own folder comes first. flash-attn-4's compiler finds
  # itself by a .pth file, which is not read there.
  PYTHONPATH="${VERL_SITE}:${VERL_SITE}/nvidia_cutlass_dsl/python_packages:${PYTHONPATH}" \
    VERL_FILE_LOGGER_PATH="${WORK}/verl.jsonl" "${PYTHON}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${WORK}/verl.parquet" data.val_files="${WORK}/verl.parquet" data.shuffle=False \
    data.train_batch_size="${PROMPTS}" data.max_prompt_length=512 data.max_response_length="${LONGEST}" \
    data.dataloader_num_workers=1 \
    actor_rollout_ref.model.path="${MODEL}" actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    +actor_rollout_ref.model.override_config.attn_implementation="${ATTENTION}" \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((PROMPTS / 2)) \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n="${SAMPLES}" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.max_num_seqs="${BATCH}" actor_rollout_ref.rollout.max_model_len=$((LONGEST + 520)) \
    actor_rollout_ref.rollout.agent.default_agent_loop=limited \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="${HERE}/verl_loop.yaml" \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=pytorch \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.cuda_graph_max_bs_decode="${BATCH}" \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.cuda_graph_backend_prefill=disabled \
    reward.custom_reward_function.path="${HERE}/verl_limited.py" \
    reward.custom_reward_function.name=compute_score \
    trainer.logger='["console","file"]' trainer.project_name=peer trainer.experiment_name=equal_work \
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.val_before_train=False trainer.test_freq=-1 \
    trainer.save_freq=-1 trainer.total_training_steps="${STEPS}" trainer.resume_mode=disable \
    +ray_kwargs.ray_init.include_dashboard=False "$@"
}

run "$@"
