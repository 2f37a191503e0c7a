# SmolLM2-135M (the instruct version has the same shape)
MODEL_ARGS=(
    --swiglu
    --num-layers 30
    --hidden-size 576
    --ffn-hidden-size 1536
    --num-attention-heads 9
    --group-query-attention
    --num-query-groups 3
    --vocab-size 49152
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-100000}"
)
