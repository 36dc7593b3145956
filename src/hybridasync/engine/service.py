"""The engine behind its HTTP routes: control calls, weight updates and their rules; knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import torch

from hybridasync.engine.groups import Announced, GroupError, Named, UpdateGroups
from hybridasync.engine.loop import DecoderThread
from hybridasync.engine.requests import Group, Sampling
from hybridasync.engine.scheduler import Loads, PauseMode, Scheduler
from hybridasync.engine.schema import (
    JoinGroupBody,
    ModelLimits,
    StageWeightsBody,
    SwitchBody,
    UpdateFromDiskBody,
    UpdateFromDistributedBody,
    UpdateFromTensorBody,
)
from hybridasync.engine.unpickle import named_tensors
from hybridasync.engine.weights import Weights, WeightStore
from hybridasync.weights.checksums import overall
from hybridasync.weights.snapshot import read_tensors

SGLANG_VERSION = "0.5.23"
HEALTH_TIMEOUT_S = 20.0
"""SGLang's: a batch of long prompts may keep a healthy engine from answering for seconds."""
T = TypeVar("T")
Outcome = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the server was started with; answered by `/server_info`."""

    model_path: str
    device: str
    dtype: str
    max_running_requests: int
    context_length: int
    max_total_tokens: int
    random_seed: int


class EngineService:
    def __init__(
        self, thread: DecoderThread, scheduler: Scheduler, *, store: WeightStore, settings: EngineSettings
    ) -> None:
        self.thread = thread
        self.settings = settings
        self.model_path = settings.model_path
        self.weight_version = scheduler.version
        self.config = store.config
        self.limits = ModelLimits(
            vocab_size=store.config.vocab_size,
            context_length=settings.context_length,
            eos_token_ids=store.config.eos_token_ids,
        )
        self._scheduler = scheduler  # its attributes `weights` and `paused` are read as one reference, nothing else
        self._store = store
        self._groups = UpdateGroups(store.device)
        self._updating = anyio.Lock()
        self._session_open = False
        self._staged: tuple[str, str, Weights] | None = None  # version, folder, complete set
        self._retired: Weights | None = None  # was live before; its memory goes once the engine decodes again
        self._releasing: asyncio.Future[None] | None = None
        self._started = time.time()

    @property
    def paused(self) -> bool:
        return self._scheduler.paused is not None

    # --- requests

    def submit(self, groups: list[Group], failed: Callable[[BaseException], None]) -> None:
        """Queue them; `failed` gets RequestError for an id that is in use and EngineDeadError, on any thread."""

        def settled(future: Future[None]) -> None:
            if error := future.exception():
                failed(error)

        self.thread.call(lambda scheduler: scheduler.submit(groups)).add_done_callback(settled)

    def drop(self, groups: list[Group]) -> None:
        """Their client is gone."""
        rids = [group.rid for group in groups]
        self.thread.call(lambda scheduler: scheduler.drop(rids))

    async def abort(self, rid: str | None, abort_all: bool) -> None:
        if abort_all:
            await self._call(lambda scheduler: scheduler.abort_all())
        elif rid:
            await self._call(lambda scheduler: scheduler.abort(rid))

    async def healthy(self) -> bool:
        """Really generates a token."""
        if self.paused or not self.thread.alive:
            return False
        done: Future[Group] = Future()
        done.set_running_or_notify_cancel()
        group = Group(f"HEALTH_CHECK_{time.time_ns()}", [0], Sampling(1, temperature=0.0), done.set_result)
        self.submit([group], done.set_exception)
        with anyio.move_on_after(HEALTH_TIMEOUT_S):
            finished = await asyncio.wrap_future(done)
            return all(s.finish is not None and s.finish["type"] != "abort" for s in finished.sequences)
        self.drop([group])
        return False

    async def loads(self) -> Loads:
        return await self._call(lambda scheduler: scheduler.loads())

    # --- pausing

    async def pause(self, mode: PauseMode) -> None:
        await self._call(lambda scheduler: scheduler.pause(mode))

    async def resume(self) -> None:
        await self._call(lambda scheduler: scheduler.resume())
        self._release()

    async def flush(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for an idle engine."""
        deadline = anyio.current_time() + timeout_s
        while not (flushed := await self._call(lambda scheduler: scheduler.flush())):
            if anyio.current_time() >= deadline:
                break
            await anyio.sleep(0.05)
        return flushed

    # --- weights

    async def update_from_disk(self, body: UpdateFromDiskBody) -> Outcome:
        """Read and check beside the live weights while decoding goes on, then switch."""
        async with self._updating:
            await self._release_all()
            if body.abort_all_requests:
                await self.abort(None, abort_all=True)
            try:
                weights = await anyio.to_thread.run_sync(self._read, body.model_path)
            except (OSError, ValueError, RuntimeError) as error:
                return False, f"Failed to update weights: {error}. The old weights are kept."
            success, message = await self._install(weights, version=body.weight_version, flush=body.flush_cache)
            if success:
                self.model_path = body.model_path
            return success, message

    async def begin_update(self) -> Outcome:
        async with self._updating:
            if self._session_open:
                return False, "a weight-update session is already open; call end_weight_update() first"
            await self._call_exclusive(lambda _: None)
            self._session_open = True
            await self._release_all()
            return True, "Success"

    async def end_update(self) -> Outcome:
        async with self._updating:
            if not self._session_open:
                return False, "no weight-update session is open; call begin_weight_update() first"
            self._session_open = False
            return True, "Success"

    async def update_from_tensor(self, body: UpdateFromTensorBody) -> Outcome:
        """Each call switches to the tensors it brought: between two calls the weights are mixed, as in SGLang."""
        read = partial(named_tensors, body.serialized_named_tensors[0], body.load_format)
        return await self._update_part("update_weights_from_tensor", body, read)

    async def update_from_distributed(self, body: UpdateFromDistributedBody) -> Outcome:
        """As `update_from_tensor`, with tensors that come over a group. A broadcast that breaks off changes nothing."""
        announced = Announced(body.names, body.dtypes, body.shapes)
        flattened = body.load_format is not None
        receive = partial(self._groups.receive, body.group_name, announced, flattened=flattened)
        return await self._update_part("update_weights_from_distributed", body, receive)

    async def join_group(self, body: JoinGroupBody) -> Outcome:
        async with self._updating:
            join = partial(
                self._groups.join,
                body.group_name,
                (body.master_address, body.master_port),
                rank=body.rank_offset,
                world_size=body.world_size,
                backend=body.backend,
            )
            try:
                await anyio.to_thread.run_sync(join)
            except GroupError as error:
                return False, f"Failed to initialize custom process group: {error}."
            return True, "Succeeded to initialize custom process group."

    async def leave_group(self, name: str) -> Outcome:
        async with self._updating:
            try:
                self._groups.leave(name)
            except GroupError as error:
                return False, str(error)
            return True, "Succeeded to destroy custom process group."

    async def stage(self, body: StageWeightsBody) -> Outcome:
        """Prepare weights beside the live ones, checksums included, while decoding goes on; they replace staged ones.

        What fails here changes nothing but that nothing is staged any more.
        """
        async with self._updating:
            await self._release_all()
            live = self._scheduler.weights
            if body.base_version is not None and body.base_version != self.weight_version:
                return False, f"A delta to version {body.base_version} can't be applied to {self.weight_version}."
            try:
                weights = await anyio.to_thread.run_sync(self._prepare, body, live)
            except (OSError, ValueError, RuntimeError) as error:
                return False, f"Failed to stage weights: {error}. The old weights are kept."
            self._staged = (body.weight_version, body.model_path, weights)
            return True, f"Weights are staged as version {body.weight_version}."

    async def switch(self, body: SwitchBody) -> dict[str, Any] | str:
        """Change to what was staged: one assignment between two tokens, whatever the size of the model.

        Answers what serves now, and `paused_s`; or why nothing has changed. What was staged by another controller, or
        isn't what this one made, is refused: a request that was held up on its way does no harm. So is a switch of an
        engine that is paused: whoever takes a switch for done believes that it generates.
        """
        async with self._updating:
            if self._staged is None or self._staged[0] != body.weight_version:
                found = "nothing" if self._staged is None else f"version {self._staged[0]}"
                return f"Version {body.weight_version} isn't staged; {found} is."
            version, path, weights = self._staged
            if overall(weights.checksums()) != body.checksum:
                return f"What is staged as version {version} isn't what was published: its checksums differ."
            live = self._scheduler.weights
            paused_s = await self._call(lambda scheduler: scheduler.switch(weights, version=version, mode=body.mode))
            if paused_s is None:
                return "The engine is paused."
            self._staged, self._retired = None, live
            self.weight_version, self.model_path = version, path
            self._release()
            return {**await self.check_weights(None), "paused_s": paused_s}

    async def update_version(self, version: str, *, abort_all: bool) -> None:
        if abort_all:
            await self.abort(None, abort_all=True)
        await self._call(lambda scheduler: scheduler.install(None, version=version, flush=False))
        self.weight_version = version

    async def check_weights(self, skip: list[str] | None) -> dict[str, Any]:
        """SGLang's answer of action `checksum`, and the version of these very weights."""
        weights, version = self._scheduler.weights, self.weight_version
        values = await anyio.to_thread.run_sync(weights.checksums)
        kept = {name: value for name, value in values.items() if not any(part in name for part in skip or ())}
        total = overall(kept)
        place = {f"{kind}_{what}": int(what == "size") for kind in ("tp", "dp", "pp") for what in ("rank", "size")}
        info = {"role": "target", **place, "rank": 0, "size": 1}
        rank = {"checksums": kept, "per_gpu_checksum": total, "parallelism_info": [info]}
        engine = hashlib.sha256(total.encode()).hexdigest()
        answer = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": engine}
        return {**answer, "weight_version": version}

    # --- information

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "served_model_name": self.model_path,
            "tokenizer_path": self.settings.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": "auto",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.config.model_type,
            "architectures": [self.config.architecture],
        }

    async def server_info(self) -> dict[str, Any]:
        loads = await self.loads()
        state = {"num_running_reqs": loads.running, "num_waiting_reqs": loads.waiting, "engine_paused": self.paused}
        return {
            **asdict(self.settings),
            "skip_tokenizer_init": True,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "status": "ready" if self.thread.alive else "unhealthy",
            "max_total_num_tokens": self.settings.max_total_tokens,
            "internal_states": [state],
            "startup_time": self._started,
            "pid": os.getpid(),
            "torch_version": torch.__version__,
            "version": SGLANG_VERSION,
            "frontend": "hybridasync",
        }

    def _release(self) -> None:
        """Begin to give back the set that was live before the last switch.

        On a thread, and once the engine decodes again: to unmap a set takes far longer than to switch to another.
        """
        if self._retired is not None:
            held, self._retired = [self._retired], None
            self._releasing = asyncio.get_running_loop().run_in_executor(None, held.clear)

    async def _release_all(self) -> None:
        """Before another set is made: only the live one is left, so that there are never three."""
        self._staged = None
        self._release()
        if self._releasing is not None:
            await self._releasing
            self._releasing = None

    def _prepare(self, body: StageWeightsBody, live: Weights) -> Weights:
        base, version = body.base_version, body.weight_version
        if base is None:
            weights = self._store.load(read_tensors(body.model_path))
        else:
            weights = self._store.patched(live, body.model_path, version=version, base_version=base)
        weights.checksums()
        return weights

    def _read(self, path: str) -> Weights:
        return self._store.load(read_tensors(path))

    async def _update_part(
        self, operation: str, body: UpdateFromTensorBody | UpdateFromDistributedBody, read: Callable[[], Named]
    ) -> Outcome:
        def updated() -> Weights:
            return self._store.updated(self._scheduler.weights, read())

        async with self._updating:
            if not self._session_open:
                return False, f"{operation} must run between begin_weight_update() and end_weight_update()"
            if body.abort_all_requests:
                await self.abort(None, abort_all=True)
            try:
                weights = await anyio.to_thread.run_sync(updated)
            except (ValueError, RuntimeError) as error:
                return False, f"Failed to update weights: {error}. The old weights are kept."
            return await self._install(weights, version=body.weight_version, flush=body.flush_cache)

    async def _install(self, weights: Weights, *, version: str | None, flush: bool) -> Outcome:
        """When the switch happened but the cache couldn't be flushed, `/model_info` keeps the old version (SGLang's
        behaviour): the engine is torn, and says so with 400."""
        success, message = await self._call_exclusive(
            lambda scheduler: scheduler.install(weights, version=version, flush=flush)
        )
        if success and version is not None:
            self.weight_version = version
            message += f" Weight version updated to {version}."
        return success, message

    async def _call(self, function: Callable[[Scheduler], T]) -> T:
        return await asyncio.wrap_future(self.thread.call(function))

    async def _call_exclusive(self, function: Callable[[Scheduler], T]) -> T:
        return await asyncio.wrap_future(self.thread.call_exclusive(function))
