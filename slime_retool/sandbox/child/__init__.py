"""The process that code runs in: the zygote, its layers, and what a fork of it does. Standard library only."""
