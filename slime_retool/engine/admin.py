"""Control of one running SGLang server: pause, flush, weight updates, checksums. Synchronous.

The order of a weight update (each step for every engine before the next):

    pause()  ->  flush_cache()  ->  update_weights_from_*(...) per bucket  ->  set_weight_version()  ->  resume()

Between generating and training on the same GPUs: pause(), settle(), release_memory(tags), and back with
resume_memory(tags), resume().

SGLang flushes its cache by itself after an update, but asserts that this works, and a failed assertion ends the
server; so updates are sent with `flush_cache: false` and flushing is a step of its own that reports an error.
"""

from __future__ import annotations

import base64
import json
import pickle
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from slime_retool.engine.checksum import REPORT_LOADER
from slime_retool.engine.process import direct
from slime_retool.engine.weight_copies import REFRESH_LOADER
from slime_retool.errors import WeightUpdateError

ADAPTER = "policy"
"""What requests call the LoRA adapters of the newest weight update, where engines have them apart."""
NO_FILES = "dummy"
"""The --load-format of a server that began with random weights."""
MemoryTag = Literal["weights", "kv_cache"]


class EngineAdmin:
    """Client of one server's control endpoints.

    Every method raises WeightUpdateError, with the server's own words, when the server refuses, cannot be reached or
    takes longer than `timeout` seconds.
    """

    def __init__(self, url: str, *, timeout: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout

    def weight_version(self) -> str:
        """The version that the server reports with every completion."""
        return str(self._get("/model_info", "weight_version"))

    def tensor_parallel_size(self) -> int:
        """Workers of the server, each with its part of every weight."""
        return int(self._get("/server_info", "tp_size"))

    def returns_experts(self) -> bool:
        """Whether it can return the experts that it chooses (--enable-return-routed-experts)."""
        return bool(self._get("/server_info", "enable_return_routed_experts"))

    def memory(self) -> dict[str, float]:
        """GiB of one worker's weights, KV cache and CUDA graphs, and the cache's tokens; as they were at the start.

        Empty where a server does not say.
        """
        text = self._request("/server_info", None)
        names = {"weights_gib": "weight", "kv_cache_gib": "kvcache", "graphs_gib": "graph"}
        names["kv_cache_tokens"] = "token_capacity"
        try:
            usage = json.loads(text)["internal_states"][0]["memory_usage"]
            return {name: float(usage[key]) for name, key in names.items()}
        except (ValueError, KeyError, IndexError, TypeError):
            return {}

    def pause(self) -> None:
        """End running requests (finish reason "abort"); returns when none is left. New ones wait until `resume`."""
        self._post("/pause_generation", {"mode": "abort"})

    def settle(self) -> None:
        """After `pause`: let go of what has ended, and begin nothing until `resume`. The cache stays as it is.

        A request's answer leaves the server before the scheduler has put its batch away.
        """
        self._post("/pause_generation", {"mode": "retract"})

    def abort(self) -> None:
        """Tell running requests to end (finish reason "abort", with what they have); returns at once."""
        self._request("/abort_request", {"abort_all": True})

    def resume(self) -> None:
        """Go on generating after `pause`."""
        self._post("/continue_generation", {})

    def flush_cache(self) -> None:
        """Forget all cached prefixes (they belong to the old weights); waits up to a minute for idleness."""
        self._request("/flush_cache?timeout=60.0", {})

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the process group over which weights are broadcast; rank of TP rank r is `rank_offset + r`.

        `backend` is "gloo" or "nccl".
        Blocks until all `world_size` ranks are there, so the trainer (rank 0) must join at the same time,
        from another thread.
        """
        self._post(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, *, load_format: str
    ) -> None:
        """Receive tensors with Hugging Face names, broadcast by rank 0 in this order.

        `dtypes` are torch's names ("float32", "bfloat16"). With `load_format` "flattened_bucket" all of them come in
        one broadcast of bytes. Blocks until they are loaded; the sender broadcasts at the same time, from another
        thread. The cache is not flushed: call `flush_cache`.
        """
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name, "flush_cache": False}
        self._post("/update_weights_from_distributed", body | {"load_format": load_format})

    def update_weights_from_tensor(self, payloads: list[str], *, load_format: str) -> None:
        """Load tensors of another process on the engine's own devices.

        `payloads` has one base64 pickle for each tensor-parallel worker (`trainer.weight_sync.ipc.payload`). Returns
        when they are loaded. The cache is not flushed: call `flush_cache`.
        """
        body = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": False}
        self._post("/update_weights_from_tensor", body)

    def update_weights_from_disk(self, path: str) -> None:
        """Load a Hugging Face checkpoint folder. The cache is not flushed: call `flush_cache`."""
        # Without a format SGLang takes that of its start, and refuses where that was no reading of files.
        other = {"load_format": "auto"} if self._get("/server_info", "load_format") == NO_FILES else {}
        self._post("/update_weights_from_disk", {"model_path": path, "flush_cache": False, **other})

    def adapter_rank(self) -> int:
        """The largest rank of LoRA adapters that the server takes; 0 where it takes none."""
        return int(self._get("/server_info", "max_lora_rank") or 0)

    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that the server has."""
        models = self._get("/v1/models", "data")
        return [str(model["id"]) for model in models if model.get("parent") is not None]

    def load_adapter(self, name: str, config: dict[str, Any], payload: str, *, load_format: str) -> None:
        """Take a LoRA adapter, which requests then name as `lora_path`. None of this name may be there.

        `config` is PEFT's, `payload` one base64 pickle for all workers (`trainer.weight_sync.adapters`).
        """
        body = {"lora_name": name, "config_dict": config, "serialized_tensors": payload}
        self._post("/load_lora_adapter_from_tensors", body | {"load_format": load_format})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; waits for the requests that use it."""
        self._post("/unload_lora_adapter", {"lora_name": name})

    def set_weight_version(self, version: int) -> None:
        """The version that completions report from now on."""
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give back the device memory of these parts; what it held is lost.

        The engine must be paused and settled: SGLang ends itself when a request is running. A cache is emptied. Without
        --enable-memory-saver the memory stays where it is.
        """
        self._post("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of released parts back. Weights are undefined until they are sent anew."""
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group that `init_weights_update_group` joined."""
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def weight_checksums(self, *, loader: str = REPORT_LOADER) -> dict[str, str]:
        """{Hugging Face name: checksum} of the weights the engine holds now; see `engine.checksum`.

        loader: `engine.adapter_checksum.ADAPTERS_LOADER` for an engine with adapters, which are reported too.

        For engines that share this host's file system for temporary files, started by `EngineProcess`, which registers
        the function that computes them.
        """
        with tempfile.TemporaryDirectory(prefix="slime-retool-checksums-") as folder:
            path = Path(folder) / "checksums.json"
            self._run_loader(loader, str(path))
            answer = json.loads(path.read_text())
        if "error" in answer:
            raise WeightUpdateError(f"{self.url} could not compute checksums: {answer['error']}")
        return answer["checksums"]

    def refresh_copies(self) -> None:
        """After an update: have what SGLang made of weights and keeps follow them; see `engine.weight_copies`.

        For engines started by `EngineProcess`.
        """
        self._run_loader(REFRESH_LOADER, "")

    def _run_loader(self, loader: str, argument: str) -> None:
        """Run a registered loader in every worker. All it is told is `argument`, as the name of an empty tensor."""
        payload = base64.b64encode(pickle.dumps([(argument, _EmptyTensor())])).decode()
        self.update_weights_from_tensor([payload] * self.tensor_parallel_size(), load_format=loader)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        """POST JSON; a reply with `success: false` is an error whatever its HTTP status."""
        text = self._request(path, body)
        reply = _parsed(text)
        if reply.get("success") is False:
            raise WeightUpdateError(f"{self.url}{path} refused: {reply.get('message') or text}")

    def _get(self, path: str, field: str) -> Any:
        """A field of the JSON object that a GET is answered with."""
        text = self._request(path, None)
        if field not in (reply := _parsed(text)):
            raise WeightUpdateError(
                f"{self.url}{path} has no {field!r} in its answer, as an SGLang server's has: {text[:200]}"
            )
        return reply[field]

    def _request(self, path: str, body: dict[str, Any] | None) -> str:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with direct.open(request, timeout=self.timeout) as reply:
                return reply.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace").strip()
            reply = _parsed(text)
            message = next(filter(None, map(reply.get, ("message", "error", "error_message"))), text) or "no reason"
            if message in ("no reason", "Internal Server Error"):
                message += "; the end of its log says more (logs/engine_N.log in --output-dir)"
            raise WeightUpdateError(f"{self.url}{path} answered HTTP {error.code}: {message}") from error
        except TimeoutError as error:
            raise WeightUpdateError(f"{self.url}{path} did not answer within {self.timeout:g} s") from error
        except (OSError, ValueError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise WeightUpdateError(f"{self.url}{path} cannot be reached: {reason}") from error


def every_engine(
    engines: Sequence[EngineAdmin],
    call: Callable[[EngineAdmin], None],
    meanwhile: Callable[[list[Future[None]]], None] | None = None,
) -> None:
    """Call all engines at once, and `meanwhile(futures)` on this thread; raises the first engine's error."""
    pool = ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="engine-admin")
    futures = [pool.submit(call, engine) for engine in engines]
    try:
        if meanwhile is not None:
            try:
                meanwhile(futures)
            except Exception:
                # An engine's own words say more than the broken connection that follows from them.
                wait_futures(futures, timeout=5)
                raise_first(futures)
                raise
        for future in futures:
            future.result()
    finally:
        pool.shutdown(wait=False)


def raise_first(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


class _EmptyTensor:
    """Arrives as an empty tensor: SGLang moves every value to its device before it calls the loader.

    A tensor itself pickles through torch's storage loader, which Megatron-core replaces in its process by a function
    of its own that SGLang refuses to load.
    """

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        import torch

        return torch.Tensor, ()


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object that a reply is; {} for any other reply."""
    try:
        reply = json.loads(text)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}
