# Qwen3-235B-A22B. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
MODEL_ARGS=(
    --swiglu
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --qk-layernorm
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 1536
)
