#!/usr/bin/env bash
# SFT of Qwen3-4B-Instruct-2507 on ReTool traces: one host, 8 GPUs. Further flags may follow and win:
#   MODEL_ROOT=/models DATA_ROOT=/data bash examples/retool/retool_qwen3_4b_sft.sh --num-epoch 1
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_common.sh"

TINY_DATA=sft.parquet
MODEL_ARGS_ROTARY_BASE=5000000  # the 2507 models' value
use_model qwen3-4B
length --num-epoch 3

HF_CHECKPOINT="${HF_CHECKPOINT:-${MODEL_ROOT}/Qwen3-4B-Instruct-2507}"
REF_LOAD="${REF_LOAD:-${HF_CHECKPOINT}_torch_dist}"
SAVE_DIR="${SAVE_DIR:-${MODEL_ROOT}/Qwen3-4B-Instruct-2507_sft}"
# A run that stopped goes on from what it saved; an empty folder starts from REF_LOAD.
LOAD_DIR="${LOAD_DIR:-${SAVE_DIR}}"
PROMPT_DATA="${PROMPT_DATA:-${DATA_ROOT}/retool/ReTool-SFT.parquet}"
NUM_NODES="${NUM_NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

CKPT_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT}"
  --ref-load "${REF_LOAD}"
  --load "${LOAD_DIR}"
  --save "${SAVE_DIR}"
  --save-interval 1000
)

SFT_ARGS=(
  --rollout-function-path slime_retool.rollout.sft_rollout.generate_rollout
  --prompt-data "${PROMPT_DATA}"
  --input-key messages
  --tool-key tools
  --rollout-shuffle
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

RUN_ARGS=("${CKPT_ARGS[@]}" "${SFT_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}")
launch qwen3-4B-retool-sft "$@"
