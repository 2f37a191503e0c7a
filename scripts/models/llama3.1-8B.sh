# Llama-3.1-8B and Llama-3.1-8B-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
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
    --rope-scaling-factor 8
    --untie-embeddings-and-output-weights
)
