#!/usr/bin/env bash
# SFT of Qwen3-4B-Instruct-2507 on ReTool traces: one host, 8 GPUs. Further flags may follow and win:
#   MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen3_4b_sft.sh --num-epoch 1
set -euo pipefail

EXAMPLE_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
REPO_DIR="$(cd -- "${EXAMPLE_DIR}/../.." && pwd)"

MODEL_ROOT="${MODEL_ROOT:-${REPO_DIR}/models}"
DATA_ROOT="${DATA_ROOT:-${REPO_DIR}/data}"
HF_CHECKPOINT="${HF_CHECKPOINT:-${MODEL_ROOT}/Qwen3-4B-Instruct-2507}"
REF_LOAD="${REF_LOAD:-${HF_CHECKPOINT}_torch_dist}"
SAVE_DIR="${SAVE_DIR:-${MODEL_ROOT}/Qwen3-4B-Instruct-2507_sft}"
# A run that stopped goes on from what it saved; an empty folder starts from REF_LOAD.
LOAD_DIR="${LOAD_DIR:-${SAVE_DIR}}"
PROMPT_DATA="${PROMPT_DATA:-${DATA_ROOT}/retool/ReTool-SFT.parquet}"
NUM_NODES="${NUM_NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

source "${REPO_DIR}/scripts/models/qwen3-4B.sh"

CLUSTER_ARGS=(
  --actor-num-nodes "${NUM_NODES}"
  --actor-num-gpus-per-node "${GPUS_PER_NODE}"
)
if [[ -n "${RAY_ADDRESS:-}" ]]; then
  CLUSTER_ARGS+=(--ray-address "${RAY_ADDRESS}")
fi

CKPT_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT}"
  --ref-load "${REF_LOAD}"
  --load "${LOAD_DIR}"
  --save "${SAVE_DIR}"
  --save-interval 1000
  # The 2507 models' value; the last one given wins over MODEL_ARGS.
  --rotary-base 5000000
)

SFT_ARGS=(
  --rollout-function-path slime_retool.rollout.sft_rollout.generate_rollout
  --prompt-data "${PROMPT_DATA}"
  --input-key messages
  --tool-key tools
  --rollout-shuffle
  --num-epoch 3
  --rollout-batch-size 128
  --global-batch-size 128

  --loss-type sft_loss
  --calculate-per-token-loss
  --disable-compute-advantages-and-returns
  --debug-train-only
)

PERF_ARGS=(
  --tensor-model-parallel-size 1
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

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-5
  --lr-decay-style cosine
  --min-lr 1e-6
  --lr-warmup-fraction 0.1
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
)

# Without a key there is no W&B; metrics always go to --output-dir as well.
WANDB_ARGS=()
if [[ -n "${WANDB_KEY:-}${WANDB_API_KEY:-}" ]]; then
  WANDB_ARGS=(
    --use-wandb
    --wandb-project "${WANDB_PROJECT:-slime-retool}"
    --wandb-group "${WANDB_GROUP:-qwen3-4B-retool-sft}"
  )
  if [[ -n "${WANDB_KEY:-}" ]]; then
    WANDB_ARGS+=(--wandb-key "${WANDB_KEY}")
  fi
fi

MISC_ARGS=(
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend flash
)

export PYTHONPATH="${EXAMPLE_DIR}:${REPO_DIR}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
# Megatron overlaps communication with computation only when launches keep their order.
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec "${PYTHON:-python3}" -m slime_retool.train \
  "${MODEL_ARGS[@]}" \
  "${CLUSTER_ARGS[@]}" \
  "${CKPT_ARGS[@]}" \
  "${SFT_ARGS[@]}" \
  "${PERF_ARGS[@]}" \
  "${OPTIMIZER_ARGS[@]}" \
  ${WANDB_ARGS[@]+"${WANDB_ARGS[@]}"} \
  "${MISC_ARGS[@]}" \
  "$@"
