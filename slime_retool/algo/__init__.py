"""The mathematics of training: tensors in, tensors out. No megatron, no configuration object.

`segments` says where samples lie and which tokens are learned; `advantages`, `kl` and `importance` compute on the
whole global batch, the same on every rank and without collectives; `losses` and `log_probs` on one micro-batch.
`group_relative` is plain Python, for the rollout side.
"""
