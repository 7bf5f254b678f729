# SPDX-License-Identifier: Apache-2.0
"""The embedded rollout server: the class behind the Ray actor that verl's clients, replicas and weight sync talk to.

`generate` calls wait for the engine's thread; everything else has a concurrency group of its own in Ray, so that it is
taken up and answered whatever number of `generate` calls waits (see :mod:`verl_ext.cpu.engine.engine_thread`).
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_ext.cpu.engine.engine import GenerationEngine, Request
from verl_ext.cpu.engine.engine_thread import EngineThread
from verl_ext.cpu.engine.options import EmbeddedOptions
from verl_ext.cpu.engine.sampling import SamplingParams
from verl_ext.cpu.engine.weights import Piece, WeightStore, resolve_dtype

__all__ = ["CONTROL", "EmbeddedOptions", "EmbeddedServer"]

T = TypeVar("T")

#: Ray's concurrency group of all methods but `generate`, and how many of their calls run at once.
CONTROL = {"control": 64}


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


def _top_logprobs(request: Request) -> dict[str, np.ndarray]:
    if not request.top_logprobs:
        return {}
    log_probs, ids = zip(*request.top_logprobs, strict=True)
    named = {"sampler_log_probs": log_probs} if ids[0] is None else {"sampler_log_probs": log_probs, "sampler_ids": ids}
    return {name: np.stack(rows) for name, rows in named.items()}


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
        self._weights_error: str | None = None
        self._profiler: Any = None
        self._build()
        self._thread = EngineThread(self.engine, self._admit, self.options.num_threads)

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
            logits_noise_below=options.logits_noise_below,
            top_logprobs=options.top_logprobs,
            vocab_limit=vocab_limit,
        )
        row = min(config.prompt_length + config.response_length, self.engine.max_model_len)
        self.engine.check_fits(row, "actor_rollout_ref.rollout.prompt_length and response_length together")

    # ---- start and address -----------------------------------------------------------------------------------------
    async def launch_server(self) -> None:
        """Finish starting. A colocated server owns its weights and loads them now; others are sent theirs."""
        if self.rollout_mode == RolloutMode.COLOCATED:
            await self._call(self._ensure_weights)

    def get_server_address(self) -> str:
        """A name unique among the run's replicas. There is no HTTP endpoint behind it."""
        return f"embedded://{os.uname().nodename}/{os.getpid()}"

    async def health(self) -> dict[str, Any]:
        """Requests ``running``, ``waiting`` for room and ``parked`` by a closed gate, the reasons ``closed``, the
        bytes of the key-value cache, the version of the weights and what is wrong with them, if anything."""
        return {
            **self._thread.state(),
            "kv_cache_bytes": self.engine.kv_nbytes,
            "global_steps": self.global_steps,
            "weights_error": self._weights_error,
        }

    async def _call(self, action: Callable[..., T], *args: Any) -> T:
        """Run on the engine's thread, before its next step."""
        return await asyncio.wrap_future(self._thread.call(action, *args))

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
            sampling_params: see :class:`~verl_ext.cpu.engine.sampling.SamplingParams`. Without ``max_tokens`` the
                response takes what is left of ``response_length`` (and of prompt and response length together).
            request_id: names the request for :meth:`abort_request`.
            image_data, video_data, kwargs: must be empty; the engine serves text.

        Returns:
            Token ids (stop token included), their log-probabilities if asked for, ``stop_reason`` ``"completed"`` or
            ``"aborted"``, and in ``extra_fields`` the weight versions ``global_steps`` (at the end),
            ``min_global_steps`` and ``max_global_steps``, and ``finish_reason`` (``stop``, ``length`` or ``abort``);
            with `EmbeddedOptions.top_logprobs` also ``sampler_log_probs`` [n, K] and, unless they are those of the
            whole vocabulary, ``sampler_ids`` [n, K].

        Raises:
            ValueError: bad parameters, a prompt without room for a response, or multi-modal data.
            RuntimeError: no weights yet, a failed weight synchronisation, or an exception inside the model.
        """
        kwargs.pop("priority", None)
        extra = {"image_data": image_data, "video_data": video_data, **kwargs}
        used = sorted(n for n, v in extra.items() if v is not None and not (hasattr(v, "__len__") and len(v) == 0))
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
        try:
            await asyncio.wrap_future(self._thread.submit(request))
        except asyncio.CancelledError:
            self._thread.abort([request])
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
                **_top_logprobs(request),
            },
        )

    def _admit(self, request: Request) -> None:
        self._ensure_weights()
        self.engine.submit(request)

    # ---- aborting --------------------------------------------------------------------------------------------------
    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have and admit none until :meth:`resume_generation`.

        Args:
            reset_prefix_cache: accepted for verl; there is no prefix cache.
            reject_request: return later requests as aborted at once instead of holding them.

        Returns:
            ``{"aborted_count": int, "request_ids": list}``.
        """
        self._thread.close("paused", rejecting=reject_request)
        aborted = await asyncio.wrap_future(self._thread.abort())
        return {"aborted_count": len(aborted), "request_ids": [r.request_id for r in aborted]}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End one request with what it has."""
        if await asyncio.wrap_future(self._thread.abort([str(request_id)])):
            return {"aborted": True, "request_id": request_id}
        return {"aborted": False, "request_id": request_id, "error": f"Request {request_id} not found"}

    async def resume_generation(self) -> None:
        """Admit requests again after :meth:`abort_all_requests`."""
        self._thread.open("paused")

    async def wait_for_requests_to_drain(self) -> None:
        """Return when no admitted request is unfinished. Requests behind a gate do not count."""
        await asyncio.wrap_future(self._thread.call(lambda: None, when_idle=True))

    # ---- sleeping --------------------------------------------------------------------------------------------------
    def _sleeps(self) -> bool:
        return self.config.free_cache_engine and self.rollout_mode != RolloutMode.STANDALONE

    async def sleep(self) -> None:
        """Hold new requests and let the running ones end; the last one frees the key-value cache.

        The weights stay as they are. Without ``rollout.free_cache_engine``, and in standalone mode, nothing happens.
        """
        if self._sleeps():
            self._thread.close("weights", "kv_cache")
            await self.wait_for_requests_to_drain()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo :meth:`sleep` for ``tags`` (``weights``, ``kv_cache``; default all). They run when both are awake."""
        if self._sleeps():
            self._thread.open(*(tags or ("weights", "kv_cache")))

    async def release_kv_cache(self) -> None:
        """Hold new requests and let the running ones end, which frees the cache; :meth:`resume_kv_cache` undoes it."""
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            self._thread.close("kv_cache")
            await self.wait_for_requests_to_drain()

    async def resume_kv_cache(self) -> None:
        self._thread.open("kv_cache")

    async def clear_kv_cache(self) -> None:
        """There is no prefix cache to clear; keys and values of running requests stay."""

    # ---- weights ---------------------------------------------------------------------------------------------------
    async def set_global_steps(self, global_steps: int | None) -> None:
        """Record the version of the weights."""
        self.global_steps = global_steps
        await self._call(self.engine.set_version, global_steps)

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
            pieces, data: what :class:`~verl_ext.cpu.engine.weights.BucketWriter` produced.
            first, last: whether this is the first and the last bucket.
            kind: ``"base"`` or ``"adapter"``; see :meth:`~verl_ext.cpu.engine.weights.WeightStore.begin`.
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
                self._weights_error = None
                if global_steps is not None:
                    self.global_steps = global_steps
                    self.engine.set_version(global_steps)

        if first:
            self._thread.close("updating")
        try:
            await self._call(apply)
        except Exception as error:
            await self._fail_update(f"the last weight synchronisation failed: {error}")
            raise
        if last:
            self._thread.open("updating")

    async def abort_weight_update(self, reason: str) -> None:
        """The sender cannot complete its synchronisation."""
        await self._fail_update(f"the last weight synchronisation was broken off: {reason}")

    async def _fail_update(self, reason: str) -> None:
        self._weights_error = reason
        await asyncio.wrap_future(self._thread.fail_all(RuntimeError(reason)))
        self._thread.open("updating")

    def _ensure_weights(self) -> None:
        """Load the weights from disk where nobody sent them. On the engine's thread.

        Raises:
            RuntimeError: there are none to load, or the last synchronisation failed.
        """
        if self._weights_error is not None:
            raise RuntimeError(f"embedded rollout: no usable weights: {self._weights_error}")
        if self.weights.ready:
            return
        if self.config.load_format == "dummy":
            raise RuntimeError(
                "embedded rollout: no weights yet: none were synchronised and "
                "actor_rollout_ref.rollout.load_format=dummy does not load them from disk (auto does)"
            )
        self._load_from_disk()

    def _load_from_disk(self) -> None:
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
            await self._call(start)

    async def stop_profile(self) -> None:
        """Write ``embedded_replica<rank>_<time>.json`` (Chrome trace) to ``rollout.profiler.save_path``."""

        def stop() -> None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            os.makedirs(self.config.profiler.save_path, exist_ok=True)
            name = f"embedded_replica{self.replica_rank}_{time.time_ns() // 1_000_000}.json"
            profiler.export_chrome_trace(os.path.join(self.config.profiler.save_path, name))

        if self._profiler is not None:
            await self._call(stop)

    async def shutdown(self) -> None:
        """End all requests and the engine's thread; the server takes no calls afterwards."""
        self._thread.stop()


for _name, _method in list(vars(EmbeddedServer).items()):
    if not _name.startswith("_") and _name != "generate":
        ray.method(concurrency_group="control")(_method)
