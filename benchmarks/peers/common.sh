# Sourced by verl.sh and trl.sh, which define `peer`: what both have in common, and our side.
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd -- "${HERE}/../.." && pwd)"
PYTHON="${PYTHON:-python3}"
WORK="${WORK:-${ROOT}/outputs/peers/${PEER}}"
RESULT="${RESULT:-${ROOT}/outputs/peers/peer.json}"  # of all peers; tables.py reads it in docs/results
STEPS="${STEPS:-8}"
PROMPTS="${PROMPTS:-64}"
SAMPLES="${SAMPLES:-8}"
LONGEST="${LONGEST:-512}"
SHORTEST="${SHORTEST:-64}"
ATTENTION="${ATTENTION:-flash_attention_4}"
BATCH=$((PROMPTS * SAMPLES))
HALF=$((BATCH / 2))
DEVICE="${DEVICE:-cuda}"
mkdir -p "${WORK}" "$(dirname -- "${RESULT}")"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"  # each side has one GPU; TRL ends where it sees two
export PYTHONPATH="${HERE}:${ROOT}${PYTHONPATH:+:${PYTHONPATH}}" CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false

work() {
  "${PYTHON}" "${HERE}/equal_work.py" --questions "${QUESTIONS}" --output-dir "${WORK}" --steps "${STEPS}" \
    --prompts "${PROMPTS}" --shortest "${SHORTEST}" --longest "${LONGEST}"
}

# Both sides: two optimizer steps a rollout, no recomputation, loss averaged over tokens, micro-batches of 16k tokens.
ours() {
  "${PYTHON}" -m slime_retool.cli convert to-megatron --hf-checkpoint "${MODEL}" --save "${WORK}/torch_dist" --force
  local engine=()
  if [[ "${DEVICE}" == cuda ]]; then
    engine=(--sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-mem-fraction-static 0.5
      --sglang-cuda-graph-backend-prefill disabled --sglang-cuda-graph-max-bs "${BATCH}")
  fi
  "${PYTHON}" -m slime_retool.train --device "${DEVICE}" --hf-checkpoint "${MODEL}" --ref-load "${WORK}/torch_dist" \
    --colocate --output-dir "${WORK}/ours" --no-progress --prompt-data "${WORK}/ours.jsonl" \
    --custom-generate-function-path limited.generate --custom-rm-path limited.reward_func \
    --num-rollout "${STEPS}" --rollout-batch-size "${PROMPTS}" --n-samples-per-prompt "${SAMPLES}" \
    --global-batch-size "${HALF}" --rollout-max-response-len "${LONGEST}" --rollout-max-context-len $((LONGEST + 512)) \
    --sglang-server-concurrency "${BATCH}" --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --calculate-per-token-loss --lr 1e-6 ${engine[@]+"${engine[@]}"}
}

compare() {
  "${PYTHON}" "${HERE}/step_ratio.py" --peer "${PEER}" --ours "${WORK}/ours/metrics.jsonl" --theirs "${WORK}/${PEER}.jsonl" \
    --output "${RESULT}" "$@"
}

# run STEP [FLAG ...]: flags go to the peer.
run() {
  local step="${1:-all}"
  if (( $# )); then shift; fi
  case "${step}" in
    work | ours | peer | compare) "${step}" "$@" ;;
    all)
      work
      ours
      if peer "$@"; then compare; else
        compare --why "${PEER} ended with status $?"
        return 1
      fi
      ;;
    *)
      sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
      exit 2
      ;;
  esac
}
