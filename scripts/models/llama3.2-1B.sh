# Llama-3.2-1B and Llama-3.2-1B-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 16
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --vocab-size 128256
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --use-rope-scaling
    --rope-scaling-factor 32
)
