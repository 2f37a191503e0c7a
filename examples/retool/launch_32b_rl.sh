# Sourced by the RL scripts of the 32B model: what those runs share, with the values published for verl. They set
# ALGORITHM_ARGS and their `length`, then call `launch_32b_rl NAME FLAGS...`.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch_common.sh"

TINY_DATA=rl.jsonl
MODEL_ARGS_NORM_EPSILON="${MODEL_ARGS_NORM_EPSILON:-1e-6}"  # of -Instruct
use_model qwen2.5-32B
NUM_NODES="${NUM_NODES:-4}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

ROLLOUT_ARGS=(
  --prompt-data "${PROMPT_DATA:-${DATA_ROOT}/dapo-math-17k/dapo-math-17k.jsonl}"
  --rollout-max-prompt-len 2048
  --rollout-max-response-len 16384
  --rollout-max-context-len 18432
  --max-turns 8
)

EVAL_ARGS=(
  --eval-interval 5
  --eval-prompt-data aime25 "${EVAL_DATA:-${DATA_ROOT}/aime-2025/aime-2025.jsonl}"
  --n-samples-per-eval-prompt 30
  --eval-temperature 1
  --eval-top-p 0.6
)

PERF_ARGS=(
  --tensor-model-parallel-size 8
  --sequence-parallel
  --max-tokens-per-gpu 18432
)

LOSS_ARGS=(
  --eps-clip 0.2
  --eps-clip-high 0.28
  --eps-clip-c 10.0
  --calculate-per-token-loss
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.01
  --adam-beta1 0.9
  --adam-beta2 0.999
)

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 4
  --sglang-mem-fraction-static 0.8
)

launch_32b_rl() {
  local name="$1"
  shift
  checkpoints qwen2.5-32b-sft "qwen2.5-32b-sft_${name}" 30
  RUN_ARGS=(
    "${CKPT_ARGS[@]}" "${RL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}"
    "${LOSS_ARGS[@]}" "${ALGORITHM_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}"
  )
  launch "qwen2.5-32B-retool-${name}" "$@"
}
