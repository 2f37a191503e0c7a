#!/usr/bin/env bash
# The reference run: a real model from package names to a table. README.md beside this file says what each step does.
#
#   bash examples/reference/run.sh STEP
#       models | data | traces | leak | sft | eval | rl | aime | rate | table | pack | all
#   bash examples/reference/run.sh short       all of it with the 0.5B model
#
# A step that has finished is not repeated: the same command goes on where a stopped one was. Everything is set by
# variables, given before the command:
#   WORK          everything is written here (outputs/reference)
#   MODELS_DIR    folders 0.5b, 1.5b with pieces that `coder_models.py --save-pieces` wrote: for a host without network
#   DATA_DIR      the data sets' files (questions.py names them)
#   MODEL         the model that learns: 1.5b (0.5b in the short form), or a folder with a checkpoint
#   WRITER        the model that writes the programs of the SFT traces (1.5b)
#   RUNS          RL runs, ALGORITHM:SEED: "grpo:1 grpo:2 plain:1"; plain is the control without the tool, stream is grpo
#                 with --max-staleness 1
#   GPUS          "0 1 2": RL runs, and the traces of each set, go to these in turn (default: all on the first)
#   RL_STEPS, SFT_EPOCHS, PARALLEL (RL runs side by side, on all GPUs together; default: one a GPU, five in the short
#                 form), and the others set below
#   MPS           0: RL runs on one GPU take turns there, even where NVIDIA MPS would let them work at the same time
#   RL_FLAGS, SFT_FLAGS, EVAL_FLAGS   further flags of slime_retool, which win
#   RESULTS       where `table` writes (docs/results of a clone, or any folder)
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd -- "${HERE}/../.." && pwd)"
STEP="${1:-}"

read -r -a GPUS <<< "${GPUS:-}"
NUM_GPUS=$(( ${#GPUS[@]} ? ${#GPUS[@]} : 1 ))
FORM=main
if [[ "${STEP}" == short || "${MODEL:-}" == 0.5b ]]; then FORM=short; fi
if [[ "${FORM}" == short ]]; then
  MODEL="${MODEL:-0.5b}"
  RUNS="${RUNS:-grpo:1 grpo:2 grpo:3 dapo:1 ppo:1}"
  SETS="${SETS:-gsm8k}"                  # training sets
  SFT_EPOCHS="${SFT_EPOCHS:-2}"
  SFT_BATCH="${SFT_BATCH:-128}"
  SFT_LR="${SFT_LR:-3e-5}"
  MOST_TRACES="${MOST_TRACES:-12000}"
  MOST_CONVERTED="${MOST_CONVERTED:-3000}" # worked answers as programs, where the writer solved none
  PER_QUESTION="${PER_QUESTION:-2}"      # different programs of one question in the SFT data
  RL_STEPS="${RL_STEPS:-24}"
  EVAL_EVERY="${EVAL_EVERY:-${RL_STEPS}}" # rollouts
  RL_LR="${RL_LR:-6e-6}"
  RESPONSE="${RESPONSE:-512}"            # tokens of an RL response
  PARALLEL="${PARALLEL:-5}"
  CACHE_TOKENS="${CACHE_TOKENS:-300000}"
  MEMORY=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
  MAX_TOKENS="${MAX_TOKENS:-32768}"      # of a micro-batch
else
  MODEL="${MODEL:-1.5b}"
  RUNS="${RUNS:-grpo:1 grpo:2 plain:1}"
  SETS="${SETS:-gsm8k math}"
  SFT_EPOCHS="${SFT_EPOCHS:-2}"
  SFT_BATCH="${SFT_BATCH:-64}"
  SFT_LR="${SFT_LR:-1e-5}"
  MOST_TRACES="${MOST_TRACES:-5000}"
  MOST_CONVERTED="${MOST_CONVERTED:-500}"
  PER_QUESTION="${PER_QUESTION:-1}"
  RL_STEPS="${RL_STEPS:-30}"
  EVAL_EVERY="${EVAL_EVERY:-15}"
  RL_LR="${RL_LR:-4e-6}"
  RESPONSE="${RESPONSE:-1024}"
  PARALLEL="${PARALLEL:-${NUM_GPUS}}"
  CACHE_TOKENS="${CACHE_TOKENS:-400000}"
  MEMORY=()
  MAX_TOKENS="${MAX_TOKENS:-16384}"
fi
WRITER="${WRITER:-1.5b}"
WORK="${WORK:-${ROOT}/outputs/reference}"
MODELS_DIR="${MODELS_DIR:-}"
DATA_DIR="${DATA_DIR:-${ROOT}/data}"
PYTHON="${PYTHON:-python3}"
RESULTS="${RESULTS:-${WORK}/results}"
DEVICE="${DEVICE:-auto}"
SAMPLES="${SAMPLES:-2}"                  # programs asked for each training question
PROGRAM_RESPONSE="${PROGRAM_RESPONSE:-640}"  # tokens of a program and what stands around it
SAMPLE_SECONDS="${SAMPLE_SECONDS:-180}"  # after which the programs that are there are taken
MOST_RL="${MOST_RL:-3000}"               # questions of each set that RL draws from
RL_PROMPTS="${RL_PROMPTS:-64}"
RL_SAMPLES="${RL_SAMPLES:-8}"
RL_BATCH="${RL_BATCH:-256}"              # samples of an optimizer step
WARMUP="${WARMUP:-4}"                    # optimizer steps
EVAL_RESPONSE="${EVAL_RESPONSE:-1536}"
CONTEXT="${CONTEXT:-3072}"
PROMPT="${PROMPT:-1024}"                 # longest prompt of RL
CONCURRENCY="${CONCURRENCY:-512}"        # requests of one run at once
SERVED="${SERVED:-1024}"                 # requests of a shared server that decode at once
APART="${APART:-3}"                      # seconds between the starts of RL runs
ISOLATION="${ISOLATION:-namespaces}"
MPS="${MPS:-1}"
TOOL_TIMEOUT="${TOOL_TIMEOUT:-5}"        # seconds of a call; a step waits for its longest
read -r -a RL_FLAGS <<< "${RL_FLAGS:-}"
read -r -a SFT_FLAGS <<< "${SFT_FLAGS:-}"
read -r -a EVAL_FLAGS <<< "${EVAL_FLAGS:-}"

NAME="$(basename "${MODEL}")"
OUT="${WORK}/${NAME}"
PREPARED="${WORK}/prepared"
export PYTHONPATH="${HERE}:${ROOT}/examples/retool:${ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS=1

ON_GPU=0
if [[ "${DEVICE}" == cuda || ( "${DEVICE}" == auto && -e /dev/nvidia0 ) ]]; then ON_GPU=1; fi

# graphs N: flags of an engine that decodes at most N requests at once.
graphs() {
  ENGINE=(--sglang-server-concurrency "${CONCURRENCY}")
  if (( ON_GPU )); then
    ENGINE+=(--sglang-attention-backend triton --sglang-sampling-backend pytorch)
    ENGINE+=(--sglang-cuda-graph-backend-prefill disabled --sglang-cuda-graph-max-bs "$1")
  fi
}

say() { echo "[$(date +%H:%M:%S)] $*"; }

# once NAME COMMAND...: runs it unless it has finished before; its output goes to a log, its seconds to times.jsonl.
once() {
  local name="$1" begin
  shift
  if [[ -e "${WORK}/done/${name}" ]]; then say "${name}: done before"; return; fi
  mkdir -p "${WORK}/done/$(dirname "${name}")" "${WORK}/logs/$(dirname "${name}")"
  say "${name}: begins"
  begin="$(date +%s.%N)"
  "$@" > "${WORK}/logs/${name}.log" 2>&1 &
  if ! wait "$!"; then
    say "${name}: FAILED; the end of ${WORK}/logs/${name}.log:" >&2
    tail -n 25 "${WORK}/logs/${name}.log" >&2
    return 1
  fi
  printf '{"step": "%s", "begin": %s, "end": %s}\n' "${name}" "${begin}" "$(date +%s.%N)" >> "${WORK}/times.jsonl"
  touch "${WORK}/done/${name}"
  say "${name}: done in $(awk -v b="${begin}" -v e="$(date +%s.%N)" 'BEGIN {printf "%.0f", e - b}') s"
}

# A terminal's Ctrl-C reaches this script alone, which then ends what it started, with one signal each.
ASIDE=()
if command -v setsid > /dev/null; then ASIDE=(setsid); fi

# launch FOLDER COMMAND...: runs it, and keeps the command line in the folder.
launch() {
  local folder="$1"
  shift
  mkdir -p "${folder}"
  printf '%q ' "$@" > "${folder}/command.txt"
  ${ASIDE[@]+"${ASIDE[@]}"} "$@"
}

# folder_of MODEL: where its Hugging Face checkpoint is.
folder_of() {
  if [[ -d "$1" ]]; then echo "$1"; else echo "${WORK}/models/$1"; fi
}
HF="$(folder_of "${MODEL}")"

get_model() {
  if [[ -d "$1" ]]; then return; fi
  local pieces=()
  if [[ -n "${MODELS_DIR}" ]]; then pieces=(--pieces "${MODELS_DIR}/$1"); fi
  "${PYTHON}" "${HERE}/coder_models.py" "$1" --output-dir "$(folder_of "$1")" ${pieces[@]+"${pieces[@]}"}
}

to_megatron() {
  "${PYTHON}" -m slime_retool.cli convert to-megatron --hf-checkpoint "${HF}" --save "${OUT}/base_torch_dist" --force
}

models() {
  local jobs=()
  mkdir -p "${OUT}"
  once "models/${NAME}" get_model "${MODEL}" & jobs+=($!)
  if [[ "${WRITER}" != "${MODEL}" ]]; then once "models/$(basename "${WRITER}")" get_model "${WRITER}" & jobs+=($!); fi
  wait_for "${jobs[@]}"
  once "${NAME}/convert" to_megatron
}

# wait_for PID...: waits for all; fails when one of them failed.
wait_for() {
  local failed=0
  for job in "$@"; do wait "${job}" || failed=1; done
  return "${failed}"
}

data() {
  once prepared/data "${PYTHON}" "${HERE}/questions.py" --data-dir "${DATA_DIR}" --output-dir "${PREPARED}" ${DATA_FLAGS:-}
  once prepared/converted "${PYTHON}" "${HERE}/program_traces.py" convert --prepared "${PREPARED}" \
    --sandbox-isolation "${ISOLATION}"
}

leak() {
  "${PYTHON}" -c 'import json, sys
found = json.load(open(sys.argv[1]))
print(json.dumps({key: found[key] for key in ("checked_against", "sets")}, indent=1))' "${PREPARED}/leaks.json"
}

# serve MODEL [WORD]: a server for several evaluations; its address is in URL, its process in SERVERS. WORD tells servers
# of one model apart.
serve() {
  local name file
  name="$(basename "$1")${2:+_$2}"
  file="${WORK}/served/${name}.url"
  mkdir -p "${WORK}/served" "${WORK}/logs"
  rm -f "${file}"
  if (( BASHPID != $$ )); then trap end_servers EXIT; fi  # of this shell in the background
  graphs "${SERVED}"
  local memory=()
  if (( ON_GPU )); then memory=(--sglang-mem-fraction-static 0.35 --sglang-max-running-requests "${SERVED}"); fi
  ${ASIDE[@]+"${ASIDE[@]}"} "${PYTHON}" "${HERE}/shared_server.py" --url-file "${file}" -- \
    --device "${DEVICE}" --hf-checkpoint "$(folder_of "$1")" --output-dir "${WORK}/served/${name}" --rollout-max-context-len "${CONTEXT}" "${ENGINE[@]}" \
    ${memory[@]+"${memory[@]}"} >> "${WORK}/logs/serve_${name}.log" 2>&1 &
  SERVERS+=($!)
  while [[ ! -e "${file}" ]]; do
    if ! kill -0 "${SERVERS[-1]}" 2> /dev/null; then
      say "the server of ${name} did not start; the end of its log:" >&2
      tail -n 25 "${WORK}/logs/serve_${name}.log" >&2
      return 1
    fi
    sleep 1
  done
  URL="$(cat "${file}")"
  say "serving ${name} at ${URL}"
}

end_servers() {
  for server in ${SERVERS[@]+"${SERVERS[@]}"}; do
    kill -TERM "${server}" 2> /dev/null || true
    wait "${server}" 2> /dev/null || true
  done
  SERVERS=()
}
SERVERS=()
LIMIT=()

# measure OUTPUT FORM MODEL URL FLAGS...: `slime-retool eval` of the served model, asked in that form.
measure() {
  local output="$1" form="$2" model="$3" url="$4"
  shift 4
  local hooks=()
  case "${form}" in
    tool) hooks=(--custom-generate-function-path generate_with_retool.generate --tool-format retool) ;;
    program) hooks=(--custom-generate-function-path program_hooks.generate --custom-rm-path program_hooks.reward_func) ;;
  esac
  launch "${output}" ${LIMIT[@]+"${LIMIT[@]}"} "${PYTHON}" -m slime_retool.cli eval --device "${DEVICE}" --hf-checkpoint "$(folder_of "${model}")" \
    --rollout-external-urls "${url}" --output-dir "${output}" --input-key "${form}" --no-progress \
    --rm-type math_verify --sandbox-isolation "${ISOLATION}" --max-turns 4 --max-tool-calls 3 \
    --tool-timeout "${TOOL_TIMEOUT}" \
    --rollout-max-context-len "${CONTEXT}" --sglang-server-concurrency "${CONCURRENCY}" \
    ${hooks[@]+"${hooks[@]}"} "$@" ${EVAL_FLAGS[@]+"${EVAL_FLAGS[@]}"}
}

eval_sets() {
  EVAL_SETS=(--eval-prompt-data gsm8k "${PREPARED}/eval/gsm8k.jsonl" math500 "${PREPARED}/eval/math500.jsonl")
}

# base URL: the untrained model, greedily, with the tool and without.
base() {
  eval_sets
  local greedy=(--eval-temperature 0 --eval-max-response-len "${EVAL_RESPONSE}") jobs=()
  once "${NAME}/base_tool" measure "${OUT}/base_tool" tool "${MODEL}" "$1" "${EVAL_SETS[@]}" "${greedy[@]}" & jobs+=($!)
  once "${NAME}/base_plain" measure "${OUT}/base_plain" plain "${MODEL}" "$1" "${EVAL_SETS[@]}" "${greedy[@]}" & jobs+=($!)
  wait_for "${jobs[@]}"
}

# sampled SET URL: programs for a training set. What is there after SAMPLE_SECONDS is taken.
sampled() {
  local set="$1" status=0 begin="${SECONDS}" written
  written="${WORK}/programs/${set}/eval/${set}_-00001.jsonl"
  LIMIT=(timeout --kill-after=60 "${SAMPLE_SECONDS}")
  measure "${WORK}/programs/${set}" program "${WRITER}" "$2" --eval-prompt-data "${set}" \
    "${PREPARED}/train/${set}.jsonl" --n-samples-per-eval-prompt "${SAMPLES}" --eval-temperature 0.7 \
    --eval-top-p 0.95 --eval-max-response-len "${PROGRAM_RESPONSE}" || status=$?
  LIMIT=()
  if (( status == 124 || (status == 137 && SECONDS - begin >= SAMPLE_SECONDS) )) && [[ -s "${written}" ]]; then
    echo "stopped after ${SAMPLE_SECONDS} s"
    return
  fi
  return "${status}"
}

# programs URL SETS...: side by side, by one server.
programs() {
  local url="$1" jobs=()
  shift
  for set in "$@"; do once "programs/${set}" sampled "${set}" "${url}" & jobs+=($!); done
  wait_for ${jobs[@]+"${jobs[@]}"}
}

# programs_of SET: by a server of its own.
programs_of() {
  serve "${WRITER}" "$1"
  programs "${URL}" "$1"
  end_servers
}

# use_gpu N: this shell, one in the background, uses the N-th of GPUS, in turn.
use_gpu() {
  if (( ${#GPUS[@]} )); then export CUDA_VISIBLE_DEVICES="${GPUS[$(( $1 % ${#GPUS[@]} ))]}"; fi
}

select_traces() {
  local samples=()
  for set in ${SETS}; do
    if [[ -e "${WORK}/programs/${set}/eval/${set}_-00001.jsonl" ]]; then
      samples+=("${set}=${WORK}/programs/${set}/eval/${set}_-00001.jsonl")
    fi
  done
  "${PYTHON}" "${HERE}/program_traces.py" select --prepared "${PREPARED}" --samples ${samples[@]+"${samples[@]}"} \
    --output-dir "${OUT}/data" --per-question "${PER_QUESTION}" --most-converted "${MOST_CONVERTED}" \
    --most "${MOST_TRACES}" --most-rl "${MOST_RL}"
}

pending() {
  for name in "$@"; do
    if [[ ! -e "${WORK}/done/${name}" ]]; then return 0; fi
  done
  return 1
}

traces() {
  local sets=() set
  for set in ${SETS}; do
    if [[ -e "${PREPARED}/train/${set}.jsonl" ]] && pending "programs/${set}"; then sets+=("${set}"); fi
  done
  if (( ${#GPUS[@]} > 1 && ${#sets[@]} > 1 )); then
    local number=0 jobs=()
    for set in "${sets[@]}"; do
      (use_gpu "${number}"; programs_of "${set}") & jobs+=($!)
      number=$((number + 1))
    done
    wait_for "${jobs[@]}"
  elif (( ${#sets[@]} )); then
    serve "${WRITER}"
    if [[ "${WRITER}" == "${MODEL}" && ${#GPUS[@]} -le 1 ]] && pending "${NAME}/base_tool" "${NAME}/base_plain"; then
      base "${URL}" & local other=$!
      programs "${URL}" "${sets[@]}"
      wait "${other}"
    else
      programs "${URL}" "${sets[@]}"
    fi
    end_servers
  fi
  once "${NAME}/select" select_traces
}

evaluate() {
  if pending "${NAME}/base_tool" "${NAME}/base_plain"; then
    serve "${MODEL}"
    base "${URL}"
    end_servers
  fi
}

train_sft() {
  rm -rf "${OUT}/sft_hf"  # of a run that was killed after it: an export goes into no folder that holds something
  launch "${OUT}/sft" "${PYTHON}" -m slime_retool.train --device "${DEVICE}" --hf-checkpoint "${HF}" --ref-load "${OUT}/base_torch_dist" \
    --loss-type sft_loss --prompt-data "${OUT}/data/sft.jsonl" --input-key messages --tool-key tools \
    --tool-format retool --rollout-shuffle --num-epoch "${SFT_EPOCHS}" --rollout-batch-size "${SFT_BATCH}" \
    --calculate-per-token-loss --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --rollout-max-context-len "${CONTEXT}" --lr "${SFT_LR}" --min-lr 1e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.05 --weight-decay 0.01 --adam-beta2 0.95 \
    --save "${OUT}/sft_checkpoints" --load "${OUT}/sft_checkpoints" --no-save-optim --save-hf "${OUT}/sft_hf" \
    --output-dir "${OUT}/sft" --no-progress ${SFT_FLAGS[@]+"${SFT_FLAGS[@]}"}
}

sft() {
  once "${NAME}/sft" train_sft
}

# train_rl ALGORITHM SEED FIRST: FIRST 0 leaves out the evaluation before training, which is the first run's alike.
# A run that was killed goes on from its last evaluation; Adam's moments, which are not kept, begin anew.
train_rl() {
  local algorithm="$1" seed="$2" set data=() before=()
  if (( ! $3 )); then before=(--skip-eval-before-train); fi
  local run="${OUT}/rl_${algorithm}_${seed}" start="${OUT}/sft_hf" reference="${OUT}/sft_checkpoints" form=tool
  local hooks=(--custom-generate-function-path generate_with_retool.generate --tool-format retool)
  hooks+=(--custom-rm-path generate_with_retool.reward_func --reward-key score --shape-tool-use none)
  local how=(--advantage-estimator grpo)
  case "${algorithm}" in
    grpo) ;;
    stream) how+=(--max-staleness 1 --use-tis) ;;
    dapo)
      how+=(--dynamic-sampling-filter-path slime_retool.rollout.filters.check_reward_nonzero_std)
      how+=(--over-sampling-batch-size $((RL_PROMPTS * 5 / 4)) --overlong-filtering --overlong-buffer-len $((RESPONSE / 4)))
      ;;
    ppo)
      how=(--advantage-estimator ppo --normalize-advantages --critic-lr 2e-5 --num-critic-only-steps 2)
      ;;
    plain)
      start="${HF}" reference="${OUT}/base_torch_dist" form=plain hooks=()
      ;;
    *)
      echo "RUNS: an algorithm is grpo, stream, dapo, ppo or plain, got '${algorithm}'" >&2
      return 2
      ;;
  esac
  for set in ${SETS}; do
    if [[ -e "${OUT}/data/rl/${set}.jsonl" ]]; then data+=("${set}=${OUT}/data/rl/${set}.jsonl@1"); fi
  done
  local engine=()
  graphs "$(( RL_PROMPTS * RL_SAMPLES < CONCURRENCY ? RL_PROMPTS * RL_SAMPLES : CONCURRENCY ))"
  engine=("${ENGINE[@]}")
  if (( ON_GPU )); then
    # Trainer and engine keep their memory: several runs share the GPU, and none may find its place taken.
    engine+=(--no-offload-train --no-offload-rollout --sglang-mem-fraction-static 0.8)
    engine+=(--sglang-max-total-tokens "${CACHE_TOKENS}")
  fi
  rm -rf "${run}/hf"
  launch "${run}" "${PYTHON}" -m slime_retool.train --device "${DEVICE}" --hf-checkpoint "${start}" --ref-load "${reference}" \
    --colocate --seed "${seed}" --rollout-seed "${seed}" --output-dir "${run}" --no-progress \
    --prompt-data "${data[@]}" --input-key "${form}" --label-key label --rollout-shuffle \
    --eval-prompt-data gsm8k "${PREPARED}/eval/gsm8k.jsonl" math500 "${PREPARED}/eval/math500.jsonl" \
    --eval-interval "${EVAL_EVERY}" --eval-temperature 0 --eval-max-response-len "${EVAL_RESPONSE}" \
    ${before[@]+"${before[@]}"} ${hooks[@]+"${hooks[@]}"} --rm-type math_verify --sandbox-isolation "${ISOLATION}" \
    --max-turns 4 --max-tool-calls 3 --tool-timeout "${TOOL_TIMEOUT}" \
    --rollout-max-response-len "${RESPONSE}" --rollout-max-prompt-len "${PROMPT}" \
    --rollout-max-context-len "${CONTEXT}" --num-rollout "${RL_STEPS}" --rollout-batch-size "${RL_PROMPTS}" \
    --n-samples-per-prompt "${RL_SAMPLES}" --global-batch-size "${RL_BATCH}" --eps-clip 0.2 --eps-clip-high 0.28 \
    --calculate-per-token-loss --use-dynamic-batch-size --max-tokens-per-gpu "${MAX_TOKENS}" \
    ${MEMORY[@]+"${MEMORY[@]}"} --lr "${RL_LR}" --min-lr 1e-6 --lr-decay-style linear --lr-warmup-iters "${WARMUP}" \
    --save "${run}/checkpoints" --load "${run}/checkpoints" --no-save-optim --save-hf "${run}/hf" \
    --save-interval "${EVAL_EVERY}" --save-keep 1 \
    --dump-rollouts --dump-rollouts-every 10 \
    "${how[@]}" "${engine[@]}" ${RL_FLAGS[@]+"${RL_FLAGS[@]}"}
}

# share_gpus: processes that are started from here on compute at the same time on a GPU, not one after the other, where
# several RL runs will be there, or one that trains while it generates. The server is this script's own.
share_gpus() {
  if (( ! ON_GPU || ! MPS )); then return; fi
  if (( PARALLEL <= NUM_GPUS )) && [[ " ${RUNS}" != *" stream:"* ]]; then return; fi
  if [[ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]]; then say "NVIDIA MPS of ${CUDA_MPS_PIPE_DIRECTORY} is used"; return; fi
  if ! command -v nvidia-cuda-mps-control > /dev/null; then say "no NVIDIA MPS here: runs on one GPU take turns"; return; fi
  MPS_FOLDER="$(mktemp -d)"
  export CUDA_MPS_PIPE_DIRECTORY="${MPS_FOLDER}" CUDA_MPS_LOG_DIRECTORY="${MPS_FOLDER}"
  if ! env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d 9>&-; then
    say "NVIDIA MPS did not start: runs on one GPU take turns" >&2
    end_sharing
  fi
}

end_sharing() {
  if [[ -z "${MPS_FOLDER}" ]]; then return; fi
  echo quit | nvidia-cuda-mps-control > /dev/null 2>&1 || true
  rm -rf "${MPS_FOLDER}"
  MPS_FOLDER=""
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
MPS_FOLDER=""

rl() {
  local running=() failed=0 run number=0 first=1 measured
  if [[ "${FORM}" == main ]] && (( PARALLEL > NUM_GPUS )); then
    say "PARALLEL=${PARALLEL} on ${NUM_GPUS} GPU(s): each run of the 1.5B model takes up to 90 GB of its GPU" >&2
  fi
  share_gpus
  for run in ${RUNS}; do
    while (( ${#running[@]} >= PARALLEL )); do
      wait "${running[0]}" || failed=1
      running=("${running[@]:1}")
    done
    measured=0
    if [[ "${run}" != plain:* ]]; then measured="${first}" first=0; fi
    (use_gpu "${number}"; once "${NAME}/rl_${run/:/_}" train_rl "${run%%:*}" "${run##*:}" "${measured}") &
    running+=($!)
    number=$((number + 1))
    sleep "${APART}"
  done
  for job in ${running[@]+"${running[@]}"}; do wait "${job}" || failed=1; done
  end_sharing
  return "${failed}"
}

# AIME 2024 and 2025, mean@30, of the first run's model.
aime() {
  local run="${RUNS%% *}"
  run="${OUT}/rl_${run/:/_}"
  if pending "${NAME}/aime"; then
    serve "${run}/hf"
    once "${NAME}/aime" measure "${OUT}/aime" tool "${run}/hf" "${URL}" --n-samples-per-eval-prompt 30 \
      --eval-temperature 1 --eval-max-response-len 2048 \
      --eval-prompt-data aime24 "${PREPARED}/eval/aime24.jsonl" aime25 "${PREPARED}/eval/aime25.jsonl"
    end_servers
  fi
}

# What share of the engine's own tokens per second the first run's generation reaches.
rate() {
  local run="${RUNS%% *}" memory=()
  if (( PARALLEL > NUM_GPUS )); then
    echo "rate: with PARALLEL=${PARALLEL} on ${NUM_GPUS} GPU(s) the first run shared its GPU; the engine alone does not" >&2
    return 2
  fi
  run="${OUT}/rl_${run/:/_}"
  graphs "$(( RL_PROMPTS * RL_SAMPLES ))"
  if (( ON_GPU )); then memory=(--sglang-mem-fraction-static 0.5); fi
  once "${NAME}/rate" "${PYTHON}" "${ROOT}/benchmarks/engine_rate.py" --run "${run}" --hf-checkpoint "${HF}" \
    --device "$( (( ON_GPU )) && echo cuda || echo cpu )" --output "${OUT}/engine_rate.json" -- \
    "${ENGINE[@]:2}" ${memory[@]+"${memory[@]}"}
}

# What was measured as small files, and tables and curves of them: at any time.
table() {
  "${PYTHON}" "${HERE}/evidence.py" --work "${WORK}" --output-dir "${RESULTS}/data"
  "${PYTHON}" "${HERE}/tables.py" --results "${RESULTS}"
}

# The same files, with answers and logs, as one archive to take from a host: at any time.
pack() {
  "${PYTHON}" "${HERE}/evidence.py" --work "${WORK}" --pack "${PACKED:-${WORK}/packed/results.tar.xz}"
}

everything() {
  local begin jobs=()
  begin="$(date +%s)"
  models & jobs+=($!)
  data & jobs+=($!)
  wait_for "${jobs[@]}"
  leak
  if [[ "${WRITER}" == "${MODEL}" && ${#GPUS[@]} -le 1 ]]; then
    traces
    evaluate
    sft
  else
    # The base model is measured while traces are made, on a GPU of its own, else while they are learned: servers that
    # start together on one GPU count each other's memory.
    local measuring=""
    if (( ${#GPUS[@]} > 2 )); then (use_gpu 2; evaluate) & measuring=$!; fi
    (use_gpu 0; traces) & wait "$!"
    if [[ -z "${measuring}" ]]; then (use_gpu 1; evaluate) & measuring=$!; fi
    (use_gpu 0; sft) & wait "$!"
    wait "${measuring}" || say "the base model was not measured; the same command does it later"
  fi
  rl || say "an RL run failed; the others are in the table"
  table
  say "all of it took $(( $(date +%s) - begin )) s"
}

# stop PID: SIGTERM, once, to the commands that run below a shell of this script. They end what they started.
declare -A STOPPED=()
stop() {
  local child children
  if [[ "$(cat "/proc/$1/comm" 2> /dev/null)" == bash ]]; then
    children="$(cat "/proc/$1/task/$1/children" 2> /dev/null)" || true
    for child in ${children}; do stop "${child}"; done
  elif [[ -z "${STOPPED[$1]:-}" ]]; then
    STOPPED[$1]=1
    kill -TERM "$1" 2> /dev/null || true
  fi
}

# finish: nothing that this script started goes on without it.
finish() {
  local job
  trap '' TERM INT HUP  # a second one would leave the rest to itself
  while [[ -n "$(jobs -pr)" ]]; do
    for job in $(jobs -pr); do stop "${job}"; done
    sleep 0.2
  done
  end_servers
  end_sharing
}

# lock: two runs would write into the same files.
lock() {
  if ! command -v flock > /dev/null; then return; fi
  exec 9> "${WORK}/lock"
  if ! flock -n 9; then
    echo "another run.sh, or what is left of one, works in WORK=${WORK}: wait for its end, or name another folder" >&2
    exit 2
  fi
}

mkdir -p "${WORK}"
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP
case "${STEP}" in
  leak | table | pack) ;;  # only read, at any time
  *) lock ;;
esac
case "${STEP}" in
  models | data | traces | leak | sft | rl | aime | rate | table | pack) "${STEP}" ;;
  eval) evaluate ;;
  all | short) everything ;;
  *)
    sed -n '2,24s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
