# GLM-4.5, GLM-4.5-Base and GLM-4.6. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
MODEL_ARGS=(
    --swiglu
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 151552
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --qk-layernorm
    --rotary-percent 0.5
    --untie-embeddings-and-output-weights
    --num-experts 160
    --moe-router-topk 8
    --moe-ffn-hidden-size 1536
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.5
    --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq "[0]*3+[1]*89"
)
