#!/usr/bin/env bash
# RL (GRPO) of the SFT model with a Python sandbox in its rollouts: one host, 4 GPUs shared by training and
# generation. Further flags may follow and win:
#   MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen3_4b_rl.sh --num-rollout 100
set -euo pipefail

EXAMPLE_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
REPO_DIR="$(cd -- "${EXAMPLE_DIR}/../.." && pwd)"

MODEL_ROOT="${MODEL_ROOT:-${REPO_DIR}/models}"
DATA_ROOT="${DATA_ROOT:-${REPO_DIR}/data}"
HF_CHECKPOINT="${HF_CHECKPOINT:-${MODEL_ROOT}/qwen3-4b-sft}"
REF_LOAD="${REF_LOAD:-${HF_CHECKPOINT}_torch_dist}"
SAVE_DIR="${SAVE_DIR:-${MODEL_ROOT}/qwen3-4b-sft_rl}"
# A run that stopped goes on from what it saved; an empty folder starts from REF_LOAD.
LOAD_DIR="${LOAD_DIR:-${SAVE_DIR}}"
PROMPT_DATA="${PROMPT_DATA:-${DATA_ROOT}/dapo-math-17k/dapo-math-17k.jsonl}"
EVAL_DATA="${EVAL_DATA:-${DATA_ROOT}/aime-2024/aime-2024.jsonl}"
NUM_NODES="${NUM_NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-4}"

source "${REPO_DIR}/scripts/models/qwen3-4B.sh"

CLUSTER_ARGS=(
  --actor-num-nodes "${NUM_NODES}"
  --actor-num-gpus-per-node "${GPUS_PER_NODE}"
  --colocate
)
if [[ -n "${RAY_ADDRESS:-}" ]]; then
  CLUSTER_ARGS+=(--ray-address "${RAY_ADDRESS}")
fi

CKPT_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT}"
  --ref-load "${REF_LOAD}"
  --load "${LOAD_DIR}"
  --save "${SAVE_DIR}"
  --save-interval 20
  # The 2507 models' value; the last one given wins over MODEL_ARGS.
  --rotary-base 5000000
)

ROLLOUT_ARGS=(
  --prompt-data "${PROMPT_DATA}"
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rollout-shuffle
  --reward-key score
  --num-rollout 3000
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-response-len 8192
  --rollout-temperature 1

  --global-batch-size 256
  --balance-data
)

EVAL_ARGS=(
  --eval-interval 20
  --eval-prompt-data aime "${EVAL_DATA}"
  --n-samples-per-eval-prompt 16
  --eval-max-response-len 16384
  --eval-top-p 1
)

PERF_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1

  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1

  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
  --advantage-estimator grpo
  --use-kl-loss
  --kl-loss-coef 0.00
  --kl-loss-type low_var_kl
  --entropy-coef 0.00
  --eps-clip 0.2
  --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)

# Without a key there is no W&B; metrics always go to --output-dir as well.
WANDB_ARGS=()
if [[ -n "${WANDB_KEY:-}${WANDB_API_KEY:-}" ]]; then
  WANDB_ARGS=(
    --use-wandb
    --wandb-project "${WANDB_PROJECT:-slime-retool}"
    --wandb-group "${WANDB_GROUP:-qwen3-4B-retool-rl}"
  )
  if [[ -n "${WANDB_KEY:-}" ]]; then
    WANDB_ARGS+=(--wandb-key "${WANDB_KEY}")
  fi
fi

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend flash
)

CUSTOM_ARGS=(
  --custom-generate-function-path generate_with_retool.generate
  --custom-rm-path generate_with_retool.reward_func
)

export PYTHONPATH="${EXAMPLE_DIR}:${REPO_DIR}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
# Megatron overlaps communication with computation only when launches keep their order.
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec "${PYTHON:-python3}" -m slime_retool.train \
  "${MODEL_ARGS[@]}" \
  "${CLUSTER_ARGS[@]}" \
  "${CKPT_ARGS[@]}" \
  "${ROLLOUT_ARGS[@]}" \
  "${EVAL_ARGS[@]}" \
  "${PERF_ARGS[@]}" \
  "${GRPO_ARGS[@]}" \
  "${OPTIMIZER_ARGS[@]}" \
  ${WANDB_ARGS[@]+"${WANDB_ARGS[@]}"} \
  "${SGLANG_ARGS[@]}" \
  "${MISC_ARGS[@]}" \
  "${CUSTOM_ARGS[@]}" \
  "$@"
