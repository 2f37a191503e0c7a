"""Owns an engine and a router until it is killed: `engine_parent.py CHECKPOINT OUTPUT_DIR` prints their URLs."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_utils import engine_config

from slime_retool.engine.router import RouterProcess
from slime_retool.engine.server import EngineProcess

if __name__ == "__main__":
    config = engine_config(Path(sys.argv[1]), Path(sys.argv[2]))
    # From a thread that ends: the server must not end with it.
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(EngineProcess, config).result()
    router = RouterProcess(config, [engine.url])
    print(json.dumps({"engine": engine.url, "router": router.url}), flush=True)
    time.sleep(3600)
