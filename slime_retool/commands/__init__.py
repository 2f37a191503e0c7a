"""What `slime-retool COMMAND` runs; `slime_retool.cli` holds the table."""
