"""The jail: Linux isolation of model-written code in pure Python (ctypes, no compiled extension).

    client (asyncio)  ->  broker (one process: time, output, status, kills)  ->  zygote  ->  one child a call
    or session

`broker`, `zygote` and `executor` run in their own processes, started by `boot.py`, and import only the standard library
and one another, so that a fork of the zygote is small. docs/sandbox.md describes the layers.
"""
