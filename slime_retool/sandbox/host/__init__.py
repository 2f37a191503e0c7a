"""What runs in the caller's process: the sandbox as callers see it, its client of the broker, and the HTTP forms."""
