# SPDX-License-Identifier: Apache-2.0
"""The embedded rollout server: the class behind the Ray actor that verl's clients, replicas and weight sync talk to.

The asyncio side keeps the gates (aborted, asleep, receiving weights) and the callers' futures; every touch of the
engine runs on one worker thread, in short quanta while there is work, so remote calls stay responsive and never race
with a step.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_ext.rollout.embedded.engine import GenerationEngine, Request
from verl_ext.rollout.embedded.sampling import LOGPROBS_MODES, SamplingParams
from verl_ext.rollout.embedded.weights import Piece, WeightStore, resolve_dtype

__all__ = ["EmbeddedOptions", "EmbeddedServer"]

T = TypeVar("T")

#: The worker thread hands control back this often while it decodes (seconds).
_QUANTUM_S = 0.004


@dataclass(frozen=True)
class EmbeddedOptions:
    """``actor_rollout_ref.rollout.engine_kwargs.embedded``.

    Args:
        num_threads: torch threads of the server process.
        num_cpus: logical CPUs that Ray reserves for the server actor.
        max_batch_size: rows decoded at once; ``None`` takes ``rollout.max_num_seqs``.
        kv_cache_mb: bound on the key-value cache in MiB.
        weight_bucket_mb: size of one weight transfer in MiB; the smaller of this and
            ``rollout.checkpoint_engine.update_weights_bucket_megabytes`` holds.
        attn_implementation: ``sdpa`` or ``eager``.
        logprobs_mode: overrides ``rollout.logprobs_mode``; see :mod:`verl_ext.rollout.embedded.sampling`.
        mask_padded_vocab: never sample ids that the tokenizer does not have (verl's vLLM server does the same).
        logits_noise: standard deviation of noise on every logit, for studies of samplers that disagree with the
            trainer; 0, none, else.

    Raises:
        ValueError: an unknown key or a value out of range.
    """

    num_threads: int = 1
    num_cpus: float = 0.1
    max_batch_size: int | None = None
    kv_cache_mb: int = 2048
    weight_bucket_mb: int = 64
    attn_implementation: str = "sdpa"
    logprobs_mode: str | None = None
    mask_padded_vocab: bool = True
    logits_noise: float = 0.0

    @classmethod
    def from_config(cls, config: RolloutConfig) -> EmbeddedOptions:
        """Read and check the options of a rollout config."""
        where = "actor_rollout_ref.rollout.engine_kwargs.embedded"
        raw: Any = (config.engine_kwargs or {}).get("embedded") or {}
        if isinstance(raw, DictConfig):
            raw = OmegaConf.to_container(raw, resolve=True)
        allowed = [f.name for f in fields(cls)]
        unknown = sorted(set(raw) - set(allowed))
        if unknown:
            raise ValueError(f"{where} has unknown key(s) {unknown}; allowed: {allowed}")
        given = {k: v for k, v in raw.items() if v is not None}
        for name in ("num_threads", "max_batch_size", "kv_cache_mb", "weight_bucket_mb"):
            value = given.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{where}.{name}={value!r} must be an integer of at least 1")
        noise = given.get("logits_noise", 0.0)
        if not isinstance(noise, int | float) or not 0 <= noise < math.inf:
            raise ValueError(f"{where}.logits_noise={noise!r} must be a finite number of at least 0")
        if not isinstance(given.get("num_cpus", 0), int | float) or given.get("num_cpus", 0) < 0:
            raise ValueError(f"{where}.num_cpus={given['num_cpus']!r} must be a number >= 0")
        if given.get("attn_implementation", "sdpa") not in ("sdpa", "eager"):
            raise ValueError(f"{where}.attn_implementation={given['attn_implementation']!r} is neither sdpa nor eager")
        options = cls(**given)
        mode = options.logprobs_mode or config.logprobs_mode or "processed_logprobs"
        if mode not in LOGPROBS_MODES:
            name = f"{where}.logprobs_mode" if options.logprobs_mode else "actor_rollout_ref.rollout.logprobs_mode"
            raise ValueError(f"{name}={mode!r} is not one of {list(LOGPROBS_MODES)}")
        return options


def _eos_token_ids(model_config: HFModelConfig) -> set[int]:
    """End-of-sequence ids of the tokenizer, the generation config and the model config together."""
    ids: set[int] = set()
    for source in (model_config.tokenizer, model_config.generation_config, model_config.hf_config):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(int(v) for v in value)
    return ids


class EmbeddedServer:
    """Generation server of one rollout replica. Runs as an asyncio Ray actor, or inside any event loop.

    Args:
        config: rollout config (dataclass or its ``DictConfig``).
        model_config: model config (dataclass or its ``DictConfig``).
        rollout_mode: who owns the weights; see :class:`verl.workers.rollout.replica.RolloutMode`.
        replica_rank: index of the replica; part of the default seeds, so that replicas draw different samples.
    """

    def __init__(
        self,
        config: RolloutConfig | DictConfig,
        model_config: HFModelConfig | DictConfig,
        rollout_mode: RolloutMode = RolloutMode.HYBRID,
        replica_rank: int = 0,
    ) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.options = EmbeddedOptions.from_config(self.config)
        torch.set_num_threads(self.options.num_threads)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.rollout_mode = rollout_mode
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="embedded-engine",
            initializer=torch.set_num_threads,
            initargs=(self.options.num_threads,),
        )
        self._futures: dict[Request, asyncio.Future[None]] = {}
        self._driver: asyncio.Task[None] | None = None
        # The three gates; a request waits in front of them unless one rejects.
        self._paused = False
        self._rejecting = False
        self._asleep: set[str] = set()
        self._updating = False
        self._gate_changed = asyncio.Event()
        self._weights_error: str | None = None
        self._profiler: Any = None
        self._build()

    def _build(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config, options = self.config, self.options
        hf_config = copy.deepcopy(self.model_config.hf_config)
        limit = get_max_position_embeddings(hf_config)
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len={config.max_model_len} exceeds the model's "
                f"max_position_embeddings={limit}"
            )
        dtype = resolve_dtype(config.dtype)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=dtype,
                attn_implementation=options.attn_implementation,
                trust_remote_code=self.model_config.trust_remote_code,
            )
        model.tie_weights()
        model.eval().requires_grad_(False)
        vocab_limit = None
        if options.mask_padded_vocab and self.model_config.tokenizer is not None:
            vocab_limit = len(self.model_config.tokenizer)
        self._dtype = dtype
        self.weights = WeightStore(model)
        self.engine = GenerationEngine(
            model,
            eos_token_ids=_eos_token_ids(self.model_config),
            max_model_len=config.max_model_len or limit,
            max_batch_size=options.max_batch_size or config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            kv_cache_bytes=options.kv_cache_mb << 20,
            # replicas must not draw the same samples for the same prompt
            seed=config.seed + 1_000_003 * self.replica_rank,
            logprobs_mode=options.logprobs_mode or config.logprobs_mode or "processed_logprobs",
            logits_noise=options.logits_noise,
            vocab_limit=vocab_limit,
        )

    # ---- start and address -----------------------------------------------------------------------------------------
    async def launch_server(self) -> None:
        """Finish starting. A colocated server owns its weights and loads them now; others are sent theirs."""
        if self.rollout_mode == RolloutMode.COLOCATED:
            await self._ensure_weights()

    def get_server_address(self) -> str:
        """A name unique among the run's replicas. There is no HTTP endpoint behind it."""
        return f"embedded://{os.uname().nodename}/{os.getpid()}"

    def get_rollout_config(self) -> RolloutConfig:
        return self.config

    async def _in_engine_thread(self, action: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, action, *args)

    # ---- generation ------------------------------------------------------------------------------------------------
    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue ``prompt_ids``.

        Args:
            prompt_ids: token ids of the prompt.
            sampling_params: see :class:`~verl_ext.rollout.embedded.sampling.SamplingParams`. Without ``max_tokens`` the
                response takes what is left of ``response_length`` (and of prompt and response length together).
            request_id: names the request for :meth:`abort_request`.
            image_data, video_data, kwargs: must be empty; the engine serves text.

        Returns:
            Token ids (stop token included), their log-probabilities if asked for, ``stop_reason`` ``"completed"`` or
            ``"aborted"``, and in ``extra_fields`` the weight versions ``global_steps`` (at the end),
            ``min_global_steps`` and ``max_global_steps``, and ``finish_reason`` (``stop``, ``length`` or ``abort``).

        Raises:
            ValueError: bad parameters, a prompt without room for a response, or multi-modal data.
            RuntimeError: no weights yet, a failed weight synchronisation, or an exception inside the model.
        """
        kwargs.pop("priority", None)
        extra = {"image_data": image_data, "video_data": video_data, **kwargs}
        used = sorted(name for name, value in extra.items() if value is not None and (not _is_empty(value)))
        if used:
            raise ValueError(f"the embedded rollout engine serves text only and cannot use {used}")
        prompt_ids = normalize_token_ids(prompt_ids)
        room = self.engine.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room to generate within the maximum context length "
                f"{self.engine.max_model_len} (actor_rollout_ref.rollout.max_model_len)"
            )
        config = self.config
        params = SamplingParams.from_dict(
            sampling_params,
            default_max_tokens=min(
                config.response_length, config.prompt_length + config.response_length - len(prompt_ids)
            ),
            max_tokens_limit=room,
            repetition_penalty=config.repetition_penalty,
            ignore_eos=config.ignore_eos,
        )
        request = Request(prompt_ids, params, request_id=str(request_id))
        while True:
            if not await self._pass_gates():
                request.finish_reason = "abort"
                return self._output(request)
            if self.weights.ready and self._weights_error is None:
                break
            # a gate may close while the weights are loaded
            await self._ensure_weights()
        self.engine.submit(request)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        self._drive()
        try:
            await future
        except asyncio.CancelledError:
            self._futures.pop(request, None)
            self._executor.submit(self.engine.abort, [request])
            raise
        if request.error is not None:
            error = request.error
            raise RuntimeError(f"embedded rollout: the model failed: {type(error).__name__}: {error}") from error
        return self._output(request)

    def _output(self, request: Request) -> TokenOutput:
        last = request.max_version if request.max_version is not None else self.global_steps
        first = request.min_version if request.min_version is not None else last
        return TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.logprobs if request.params.logprobs else None,
            stop_reason="aborted" if request.finish_reason == "abort" else "completed",
            extra_fields={
                "global_steps": last,
                "min_global_steps": first,
                "max_global_steps": last,
                "finish_reason": request.finish_reason,
            },
        )

    def _gates_changed(self) -> None:
        """Wake those who wait for a gate, and the stepping."""
        self._gate_changed.set()
        self._gate_changed = asyncio.Event()
        self._drive()

    async def _pass_gates(self) -> bool:
        """Wait until requests are admitted; ``False`` if they are rejected meanwhile."""
        while self._paused or self._asleep or self._updating:
            if self._paused and self._rejecting:
                return False
            await self._gate_changed.wait()
        return True

    def _drive(self) -> None:
        """Have the engine stepped while it has work."""
        if self._driver is None and not self._updating and self.engine.has_work():
            self._driver = asyncio.get_running_loop().create_task(self._step_while_busy())

    async def _step_while_busy(self) -> None:
        try:
            while self.engine.has_work() and not self._updating:
                self._resolve(await self._in_engine_thread(self._quantum))
        except Exception as error:  # a defect of the engine itself: nobody may wait for ever
            self._resolve(await self._in_engine_thread(self.engine.fail_all, error))
        finally:
            self._driver = None
        self._drive()

    def _quantum(self) -> list[Request]:
        finished: list[Request] = []
        deadline = time.perf_counter() + _QUANTUM_S
        while self.engine.has_work():
            finished += self.engine.step()
            if self._updating or time.perf_counter() >= deadline:
                break
        return finished

    def _resolve(self, finished: list[Request]) -> None:
        for request in finished:
            future = self._futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result(None)

    # ---- aborting --------------------------------------------------------------------------------------------------
    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have and admit none until :meth:`resume_generation`.

        Args:
            reset_prefix_cache: accepted for verl; there is no prefix cache.
            reject_request: return later requests as aborted at once instead of holding them.

        Returns:
            ``{"aborted_count": int, "request_ids": list}``.
        """
        self._paused = True
        self._rejecting = reject_request
        self._gates_changed()
        aborted = await self._in_engine_thread(self.engine.abort)
        self._resolve(aborted)
        return {"aborted_count": len(aborted), "request_ids": [r.request_id for r in aborted]}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End one request with what it has."""
        aborted = await self._in_engine_thread(self.engine.abort, [str(request_id)])
        self._resolve(aborted)
        if not aborted:
            return {"aborted": False, "request_id": request_id, "error": f"Request {request_id} not found"}
        return {"aborted": True, "request_id": request_id}

    async def resume_generation(self) -> None:
        """Admit requests again after :meth:`abort_all_requests`."""
        self._paused = False
        self._rejecting = False
        self._gates_changed()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when no admitted request is unfinished. Requests behind a gate do not count."""
        while self._futures:
            await asyncio.wait(list(self._futures.values()))

    # ---- sleeping --------------------------------------------------------------------------------------------------
    def _sleeps(self) -> bool:
        return self.config.free_cache_engine and self.rollout_mode != RolloutMode.STANDALONE

    async def sleep(self) -> None:
        """Hold new requests, let the running ones end, free the key-value cache.

        The weights stay as they are. Without ``rollout.free_cache_engine``, and in standalone mode, nothing happens.
        """
        if self._sleeps():
            self._asleep = {"weights", "kv_cache"}
            await self._free_cache()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep` for ``tags`` (``weights``, ``kv_cache``; default all). They run when both are awake."""
        if self._sleeps():
            self._asleep -= set(tags) if tags else {"weights", "kv_cache"}
            self._gates_changed()

    async def release_kv_cache(self) -> None:
        """Hold new requests, let the running ones end, free the key-value cache; :meth:`resume_kv_cache` undoes it."""
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            self._asleep.add("kv_cache")
            await self._free_cache()

    async def resume_kv_cache(self) -> None:
        self._asleep.discard("kv_cache")
        self._gates_changed()

    async def _free_cache(self) -> None:
        await self.wait_for_requests_to_drain()
        await self._in_engine_thread(self.engine.release_cache)

    async def clear_kv_cache(self) -> None:
        """There is no prefix cache to clear; keys and values of running requests stay."""

    # ---- weights ---------------------------------------------------------------------------------------------------
    async def set_global_steps(self, global_steps: int | None) -> None:
        """Record the version of the weights."""
        self.global_steps = global_steps
        await self._in_engine_thread(self.engine.set_version, global_steps)

    async def update_weights_bucket(
        self,
        pieces: list[Piece],
        data: np.ndarray,
        *,
        first: bool,
        last: bool,
        kind: str = "base",
        peft_config: Mapping[str, Any] | None = None,
        global_steps: int | None = None,
    ) -> None:
        """Receive one bucket of a weight synchronisation.

        Requests in flight pause from the first bucket to the last and then go on with the new weights.

        Args:
            pieces, data: what :class:`~verl_ext.rollout.embedded.weights.BucketWriter` produced.
            first, last: whether this is the first and the last bucket.
            kind: ``"base"`` or ``"adapter"``; see :meth:`~verl_ext.rollout.embedded.weights.WeightStore.begin`.
            peft_config: of the adapter.
            global_steps: version of the weights, recorded with the last bucket.

        Raises:
            ValueError: names, shapes or completeness are wrong; generation is refused until a complete synchronisation.
        """

        config = self.config

        def apply() -> None:
            if first:
                if kind == "adapter" and not self.weights.ready and config.load_format != "dummy":
                    # verl sends no base weights when load_format says that they are on disk
                    self._load_from_disk()
                self.weights.begin(kind, peft_config)
            self.weights.load_bucket(pieces, data)
            if last:
                self.weights.finish()
                if global_steps is not None:
                    self.engine.set_version(global_steps)

        if first:
            self._updating = True
        try:
            await self._in_engine_thread(apply)
        except Exception as error:
            self._weights_error = f"the last weight synchronisation failed: {error}"
            await self._end_update()
            raise
        if last:
            self._weights_error = None
            if global_steps is not None:
                self.global_steps = global_steps
            await self._end_update()

    async def abort_weight_update(self, reason: str) -> None:
        """The sender cannot complete its synchronisation."""
        self._weights_error = f"the last weight synchronisation was broken off: {reason}"
        await self._end_update()

    async def _end_update(self) -> None:
        self._updating = False
        if self._weights_error is not None:
            error = RuntimeError(self._weights_error)
            self._resolve(await self._in_engine_thread(self.engine.fail_all, error))
        self._gates_changed()

    async def _ensure_weights(self) -> None:
        """Load the weights from disk where nobody sent them.

        Raises:
            RuntimeError: there are none to load, or the last synchronisation failed.
        """
        if self._weights_error is not None:
            raise RuntimeError(f"embedded rollout: no usable weights: {self._weights_error}")
        if self.config.load_format == "dummy":
            raise RuntimeError(
                "embedded rollout: no weights yet: none were synchronised and "
                "actor_rollout_ref.rollout.load_format=dummy does not load them from disk (auto does)"
            )
        await self._in_engine_thread(self._load_from_disk)

    def _load_from_disk(self) -> None:
        if self.weights.ready:
            return
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.model_config.local_path,
            dtype=self._dtype,
            trust_remote_code=self.model_config.trust_remote_code,
        )
        self.weights.begin("base")
        self.weights.load(model.state_dict().items())
        self.weights.finish()

    # ---- profiling -------------------------------------------------------------------------------------------------
    def _profiles(self) -> bool:
        profiler = self.config.profiler
        if profiler is None or not profiler.enable or not profiler.save_path:
            return False
        return bool(profiler.all_ranks) or self.replica_rank in (profiler.ranks or [])

    async def start_profile(self, **kwargs: Any) -> None:
        """Profile the engine's thread with torch, if ``rollout.profiler`` asks for this replica."""

        def start() -> None:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()

        if self._profiles() and self._profiler is None:
            await self._in_engine_thread(start)

    async def stop_profile(self) -> None:
        """Write ``embedded_replica<rank>_<time>.json`` (Chrome trace) to ``rollout.profiler.save_path``."""

        def stop() -> None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            os.makedirs(self.config.profiler.save_path, exist_ok=True)
            name = f"embedded_replica{self.replica_rank}_{time.time_ns() // 1_000_000}.json"
            profiler.export_chrome_trace(os.path.join(self.config.profiler.save_path, name))

        if self._profiler is not None:
            await self._in_engine_thread(stop)

    async def shutdown(self) -> None:
        """End the worker thread; the server takes no calls afterwards."""
        self._resolve(await self._in_engine_thread(self.engine.abort))
        self._executor.shutdown(wait=True)


def _is_empty(value: Any) -> bool:
    return hasattr(value, "__len__") and len(value) == 0
