"""Training on megatron.core: micro-batches, the trainer, its checkpoints, and the way weights reach the engines.

`Trainer` (core.py) lives in every training process. Nothing here knows Ray or how samples were made.
"""
