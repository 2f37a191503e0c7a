"""The rollout side of a run behind plain synchronous methods: usable from a loop, a script or a Ray actor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slime_retool.chat import load_tokenizer
from slime_retool.config import Config
from slime_retool.config.groups import RL_ROLLOUT, SFT_ROLLOUT
from slime_retool.config.schedule import with_num_rollout
from slime_retool.data.readers import Row, write_rows
from slime_retool.data.rows import RowCheck, RowReader
from slime_retool.data.source import PromptDataSource, load_eval_samples
from slime_retool.engine.admin import ADAPTER
from slime_retool.engine.upkeep import EngineService
from slime_retool.errors import ConfigError
from slime_retool.protocols import RolloutFn, load_function
from slime_retool.rollout import evaluate as evaluation
from slime_retool.rollout.chat_endpoint import ChatEndpoint
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.rollout.engine_client import RouterClient, WithoutRouting
from slime_retool.rollout.garbage_collection import settle_garbage_collector
from slime_retool.rollout.held_out import held_out_samples
from slime_retool.rollout.hooks import Hooks, cancel, row_checks
from slime_retool.rollout.open_turns import Aside, OpenTurns
from slime_retool.rollout.places import Places
from slime_retool.rollout.replay import dump_batch
from slime_retool.rollout.routing import RouterShape
from slime_retool.rollout.sft_tokens import conversation_check
from slime_retool.rollout.stop_tokens import StopTokens
from slime_retool.rollout.stream import Stream, rows_of
from slime_retool.rollout.transcripts import prune_dumps
from slime_retool.run_folder import SKIPPED_ROWS
from slime_retool.tool_use.control_tokens import untrained_control_tokens
from slime_retool.types import RolloutBatch, Sample, Span, TrainSample

logger = logging.getLogger(__name__)
T = TypeVar("T")
Made = concurrent.futures.Future[tuple[RolloutBatch, dict[str, Any]]]
"""A batch, and the data's position after it."""

CLOSE_SECONDS = 15.0


class RolloutManager:
    """Owns the tokenizer, the data's position, the engine client and one asyncio loop in a thread of its own.

    Not for use by several threads at once.
    """

    def __init__(self, config: Config, *, tokenizer: Any = None) -> None:
        """Load tokenizer (default: --hf-checkpoint's), data, evaluation sets and hooks, so that mistakes show now.

        `config` is `self.config` from then on, with the number of rollouts that follows from the data. Raises
        ConfigError or DataError.
        """
        if tokenizer is None and config.eval_endpoint_url is None:
            assert config.hf_checkpoint is not None, "`validate` refuses a run without it"
            tokenizer = load_tokenizer(config.hf_checkpoint)
            _warn_of_untrained_tokens(config.hf_checkpoint, tokenizer, config.tool_format)
        reader = RowReader(config, tokenizer, _row_checks(config, tokenizer))
        self.data = PromptDataSource(config, tokenizer, reader)
        self.config = config = with_num_rollout(config, self.data.num_rows)
        self.eval_sets = load_eval_samples(config, reader)
        self.rows_skipped = len(reader.skipped)
        if reader.skipped:
            _tell_of_skipped(config, reader.skipped)
        self._rollout: RolloutFn = load_function(config.rollout_function_path, "--rollout-function-path")
        if not config.debug_train_only:
            Hooks.load(config)
        self._context = RolloutContext(config=config, tokenizer=tokenizer, engine=None)
        self._held_out: dict[str, list[TrainSample]] | None = None
        if config.loss.supervised and not config.debug_rollout_only:
            self.held_out()  # now, so that a conversation that cannot be used ends the start
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._closed = False
        self._working: set[asyncio.Task[Any]] = set()
        self._client: RouterClient | None = None
        self._engine: StopTokens | None = None
        self._position = self.data.state_dict()
        """In the data, after the batch that `generate` returned last."""
        self._ahead: tuple[int, Made] | None = None
        """A rollout whose batch is being made before it is asked for."""
        self._turns: OpenTurns | None = None
        """With --max-staleness: the engine, over weight updates."""
        self._stream: Stream | None = None
        self._evaluating: concurrent.futures.Future[dict[str, float]] | None = None
        self._restored: dict[str, Any] | None = None
        """The open groups of a checkpoint, until the stream begins."""

    def connect(self, router: str | EngineService) -> None:
        """Generate through this router from now on; behind a URL nothing is replaced when it dies."""
        self._call(self._connect(router))
        settle_garbage_collector()

    def connect_endpoint(self, url: str, model: str, api_key: str | None) -> None:
        """Evaluate a model behind a chat API instead."""

        def make(config: Config) -> ChatEndpoint:
            return ChatEndpoint(
                url,
                model,
                api_key=api_key,
                concurrency=config.eval_endpoint_concurrency,
                timeout=config.rollout_request_timeout,
                retries=config.rollout_request_retries,
            )

        self._context.chat = self._call(self._context.resource("chat endpoint", make))

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Make one training batch with `--rollout-function-path`; its errors are raised here.

        SFT depends on nothing that is trained: while the caller trains on a batch, the next one is made.
        """
        if self._ahead is not None and self._ahead[0] != rollout_id:
            self.load_state_dict(self._position)
        made = self._start(rollout_id) if self._ahead is None else self._ahead[1]
        self._ahead = None
        batch, self._position = _wait(made)
        is_last = rollout_id + 1 >= (self.config.num_rollout or 0)
        if self.config.rollout_function_path == SFT_ROLLOUT and not is_last:
            self._ahead = rollout_id + 1, self._start(rollout_id + 1)
        return batch

    def evaluate(self, rollout_id: int = -1, *, resume: bool = False) -> dict[str, float]:
        """Metrics of all evaluation sets, see `rollout.evaluate`. What `begin_evaluation` began is waited for."""
        if self._evaluating is not None:
            begun, self._evaluating = self._evaluating, None
            return _wait(begun)
        return self._call(self._evaluate(rollout_id, resume))

    def begin_evaluation(self, rollout_id: int) -> None:
        """Evaluate beside what is generated, with the engines' present weights: `evaluate` comes before the next
        `hold`."""
        self._evaluating = asyncio.run_coroutine_threadsafe(self._evaluate(rollout_id), self._loop)

    def held_out(self) -> dict[str, list[TrainSample]]:
        """The evaluation sets as SFT's validation data, see `rollout.held_out`; made once."""
        if self._held_out is None:
            self._held_out = held_out_samples(self._context, self.eval_sets)
        return self._held_out

    # Weight updates, with --max-staleness: hold, drained (and the engines told to end what runs), update, go_on.

    def hold(self) -> None:
        """Send nothing more to the engines until `go_on`."""
        if self._turns is not None:
            self._loop.call_soon_threadsafe(self._turns.hold)

    def drained(self, seconds: float) -> bool:
        """Whether no request is at the engines, now or within so many seconds.

        Those that wait, because none serves or for a look at the engines, go on by themselves after the update.
        """
        return self._turns is None or self._call(self._drained(self._turns.places, seconds))

    def go_on(self, version: int, *, draws: bool = True) -> None:
        """The engines hold weights `version`: generation goes on, with new groups too if it `draws`."""
        if self._turns is not None:
            self._call(self._work(partial(self._go_on, version, draws)))

    def stop_generating(self) -> None:
        """End what goes on across updates, while the engines still answer."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            try:
                self._call(stream.aclose(), CLOSE_SECONDS)
            except concurrent.futures.TimeoutError:
                logger.warning("a hook blocks the event loop; what it generates is left behind")

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the last batch that `generate` returned, and the open conversations."""
        if self._stream is not None:
            return self._call(self._state_of_stream(self._stream))
        return self._position if self._restored is None else self._position | {"stream": self._restored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: in the data, and with its conversations, from the next `go_on` on.

        Raises ConfigError when the data is another.
        """
        if self._ahead is not None:
            concurrent.futures.wait([self._ahead[1]])  # its thread draws from the data
            self._ahead = None
        if self._evaluating is not None:
            self._evaluating.cancel()
            self._evaluating = None
        self.stop_generating()
        self.data.load_state_dict(state)
        self._restored = state.get("stream") if self.config.max_staleness else None
        if "stream" in state and self._restored is None:
            self.data.return_rows(rows_of(state["stream"]))
        self._position = self.data.state_dict()

    def record(self) -> None:
        """Keep what conversations do from now on, for `take_spans`."""
        self._loop.call_soon_threadsafe(self._context.attempts.record)

    def take_spans(self) -> list[list[Span]]:
        """Spans of each conversation since `record`, see `rollout.attempts`."""
        return self._call(self._take_spans())

    def close(self) -> None:
        """End all that is running, resources of hooks included; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._call(self._close(), CLOSE_SECONDS)
        except concurrent.futures.TimeoutError:
            logger.warning("a hook blocks the event loop; it is left to end with this process")
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run on the loop and wait."""
        return _wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop), timeout)

    def _start(self, rollout_id: int) -> Made:
        return asyncio.run_coroutine_threadsafe(self._generate(rollout_id), self._loop)

    async def _connect(self, router: str | EngineService) -> None:
        if self._client is not None:
            await self._client.aclose()
        config = self.config
        service = None if isinstance(router, str) else router
        self._client = RouterClient(
            router if isinstance(router, str) else router.url,
            service=service,
            adapter=ADAPTER if config.serves_adapters else None,
            concurrency=config.sglang_server_concurrency * max(1, config.num_engines),
            timeout=config.rollout_request_timeout,
            retries=config.rollout_request_retries,
            experts=RouterShape.of(config) if config.use_rollout_routing_replay else None,
        )
        self._engine = StopTokens(self._client, self._context.tokenizer)
        if config.max_staleness == 0:
            self._context.engine = self._engine
        elif self._turns is None:
            self._turns = self._context.engine = OpenTurns(
                self._engine,
                concurrency=self._client.concurrency,
                tokenizer=self._context.tokenizer,
                keeps_cache=config.keeps_cache,
                returns_experts=config.use_rollout_routing_replay,
            )
        else:
            self._turns.engine = self._engine

    async def _evaluate(self, rollout_id: int, resume: bool = False) -> dict[str, float]:
        context = self._context
        if self._turns is not None:
            context = context.with_engine(Aside(self._turns))
        elif self._engine is not None and self.config.use_rollout_routing_replay:
            context = context.with_engine(WithoutRouting(self._engine))
        work = partial(evaluation.evaluate, context, self.eval_sets, rollout_id, resume=resume)
        return await self._work(work, context)

    def _open_stream(self) -> Stream:
        """The stream, begun at its first use, with the groups of a checkpoint."""
        assert self._turns is not None, "connect comes first"
        if self._stream is None:
            self._stream = Stream(self._context, self.data, self._turns)
        return self._stream

    async def _drained(self, places: Places, seconds: float) -> bool:
        assert self._client is not None
        return await places.empty(seconds) or places.running == self._client.waiting

    async def _go_on(self, version: int, draws: bool) -> None:
        stream = self._open_stream()
        if self._restored is not None:
            stream.load_state_dict(self._restored, version)
            self._restored = None
        stream.go_on(version, draws=draws)

    async def _state_of_stream(self, stream: Stream) -> dict[str, Any]:
        return self.data.state_dict() | {"stream": stream.state_dict()}

    async def _take_spans(self) -> list[list[Span]]:
        return self._context.attempts.take(self._unfinished_turn)

    def _unfinished_turn(self, sample: Sample) -> list[Span]:
        record = None if self._turns is None else self._turns.record(str(sample.index))
        return [] if record is None else [{**span, "turn": len(record.turns)} for span in record.spans]

    async def _generate(self, rollout_id: int) -> tuple[RolloutBatch, dict[str, Any]]:
        if self._turns is None:
            if self._client is not None:
                self._client.take_stats()
            made = await self._work(partial(self._rollout, self._context, self.data, rollout_id))
            batch = _checked_batch(made, self.config.rollout_function_path)
        else:
            batch = await self._work(partial(self._open_stream().next_batch, rollout_id))
        if self._client is not None:
            stats = self._client.take_stats()
            batch.metrics |= {
                "rollout/engine_requests": float(stats.requests),
                "rollout/engine_retries": float(stats.retries),
                # Asked again because an engine or the router was replaced.
                "rollout/engine_moved": float(stats.moved),
                # Prompt tokens that the engines had in their cache.
                "rollout/cached_token_ratio": stats.cached_tokens / max(stats.prompt_tokens, 1),
            }
            if self._stream is not None:
                read = stats.prompt_tokens - stats.cached_tokens + stats.completion_tokens
                batch.metrics["rollout/reread_ratio"] = batch.metrics["rollout/reread_tokens"] / max(read, 1)
        if self.config.dumps(rollout_id):
            await asyncio.to_thread(self._dump, rollout_id, batch)
        return batch, self.data.state_dict()

    def _dump(self, rollout_id: int, batch: RolloutBatch) -> None:
        config = self.config
        path = config.dump_path("trained_on", rollout_id)
        dump_batch(path, rollout_id, batch)
        if config.dump_rollouts_keep is not None:
            prune_dumps(path.parent, config.dump_rollouts_keep, rollout_id)

    async def _work(self, start: Callable[[], Awaitable[T]], context: RolloutContext | None = None) -> T:
        """Await what `start` returns: hooks find the context, and `close` finds the task."""
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            async with use_context(context or self._context):
                return await start()
        finally:
            self._working.discard(task)

    async def _close(self) -> None:
        # Only what was asked of us: resources end their own tasks.
        await cancel(list(self._working))
        if self._stream is not None:
            await self._stream.aclose()
        await self._context.aclose()
        if self._client is not None:
            await self._client.aclose()


def _checked_batch(made: Any, path: str) -> RolloutBatch:
    """What `--rollout-function-path` returned, its metrics as plain floats. ConfigError where it is no batch."""
    wanted = f"--rollout-function-path {path} must return"
    if not isinstance(made, RolloutBatch):
        raise ConfigError(
            f"{wanted} a slime_retool.types.RolloutBatch, got {type(made).__name__}: return RolloutBatch(samples)"
        )
    if not isinstance(made.samples, Sequence) or not isinstance(made.metrics, dict):
        given = f"{type(made.samples).__name__} and {type(made.metrics).__name__}"
        raise ConfigError(f"{wanted} a list of samples and a dict of metrics in its RolloutBatch, got {given}")
    if other := next((each for each in made.samples if not isinstance(each, TrainSample)), None):
        raise ConfigError(
            f"{wanted} TrainSamples in its RolloutBatch, one is of type {type(other).__name__}: use "
            "TrainSample.from_sample(sample, reward=...)"
        )
    for name, value in made.metrics.items():
        try:
            made.metrics[name] = float(value)  # trackers write JSON, which has no form for NumPy's and torch's numbers
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{wanted} numbers as metrics, {name!r} is {value!r:.80}: leave it out") from error
    return made


def _row_checks(config: Config, tokenizer: Any) -> Sequence[RowCheck]:
    """What the run needs of a data row. A rollout function of one's own may use no hook."""
    if config.rollout_function_path == SFT_ROLLOUT:
        return [conversation_check(config.tool_format, tokenizer)]
    return row_checks(config) if config.rollout_function_path == RL_ROLLOUT else ()


def _tell_of_skipped(config: Config, rows: list[Row]) -> None:
    if config.dry_run:  # which writes nothing
        first = f"{rows[0]['file']}, row {rows[0]['row']}: {rows[0]['reason']}"
        logger.warning("%d rows cannot be used and would be left out, the first: %s", len(rows), first)
        return
    path = Path(config.output_dir) / SKIPPED_ROWS
    logger.warning("%d rows cannot be used and are left out, see %s", write_rows(path, rows), path)


def _wait(future: concurrent.futures.Future[T], timeout: float | None = None) -> T:
    """An interrupt here (Ctrl-C) cancels what runs on the loop."""
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


def _warn_of_untrained_tokens(checkpoint: str, tokenizer: Any, tool_format: str) -> None:
    tokens = untrained_control_tokens(checkpoint, tokenizer, tool_format)
    if tokens:
        logger.warning(
            "%s was never trained on %s, which its chat template or --tool-format %s writes: their embedding rows are "
            "zero or those of other tokens, and a model hardly learns to write them. Give them rows with "
            "`slime-retool convert init-tokens %s --output-dir OUT` and start from OUT%s",
            checkpoint, " ".join(tokens), tool_format, checkpoint,
            "; or, for those of tool calls, use --tool-format retool" if tool_format == "qwen" else "",
        )  # fmt: skip
