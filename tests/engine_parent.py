"""Owns an engine and a router until it is killed: `engine_parent.py CHECKPOINT OUTPUT_DIR` prints their URLs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sglang_utils import engine_config

from slime_retool.engine.router import RouterProcess
from slime_retool.engine.server import start_engines

if __name__ == "__main__":
    config = engine_config(Path(sys.argv[1]), Path(sys.argv[2]))
    # The trainer starts engines from a thread pool, whose threads end: the servers must not end with them.
    engines = start_engines(config)
    router = RouterProcess(config, [engine.url for engine in engines])
    print(json.dumps({"engine": engines[0].url, "router": router.url}), flush=True)
    time.sleep(3600)
