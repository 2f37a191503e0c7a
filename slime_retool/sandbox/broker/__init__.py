"""The process that owns time, output and status of every call. Standard library only."""
