# SPDX-License-Identifier: Apache-2.0
"""Continuous-batching generation over a transformers causal language model, without Ray and without asyncio.

:class:`GenerationEngine` is driven by calling :meth:`GenerationEngine.step`: each step admits waiting requests (one
batched, left-padded prefill in which equal prompts are computed once) and then decodes one token for every running row.
Finished rows leave at once. One thread steps the engine; :meth:`GenerationEngine.submit` may be called from another.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from verl_ext.cpu.engine.kv_cache import SlotCache, kv_bytes_per_token, kv_widths
from verl_ext.cpu.engine.request import DefaultSeeds, Request, seed_from
from verl_ext.cpu.engine.sampling import LOGPROBS_MODES, BatchSampling, LogitsNoise, sample

__all__ = ["GenerationEngine", "Request", "kv_bytes_per_token"]


class GenerationEngine:
    """Batched generation with a transformers causal language model.

    Args:
        model: a causal language model in eval mode. Layers must be full or sliding-window attention.
        eos_token_ids: ids that end a response unless ``ignore_eos``.
        max_model_len: prompt and response tokens of one row at most.
        max_batch_size: rows decoded at once at most.
        max_prefill_tokens: padded prompt tokens of one prefill forward at most (a longer single prompt still runs
            alone).
        kv_cache_bytes: bound on the key-value cache as it is allocated, at any time. A row is admitted when all rows
            fit at the full possible length of the longest; a request that can never fit is refused.
        seed: base of the default request seeds.
        logprobs_mode: see :mod:`verl_ext.cpu.engine.sampling`.
        vocab_limit: ids at and beyond it are never sampled (padded vocabulary); ``None`` samples all.
        logits_noise: standard deviation of normal noise added to every logit of every step, as a stand-in for an
            engine whose arithmetic differs from the trainer's; 0, none, but for studies of that difference.
        logits_noise_below: only tokens whose probability is below it have the noise; 1: all tokens.
        top_logprobs: so many largest log-probabilities at each position are kept with a request; -1: of all ids.

    Raises:
        ValueError: an unsupported model or argument.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: Iterable[int] = (),
        max_model_len: int = 2048,
        max_batch_size: int = 256,
        max_prefill_tokens: int = 8192,
        kv_cache_bytes: int = 2 << 30,
        seed: int = 0,
        logprobs_mode: str = "processed_logprobs",
        vocab_limit: int | None = None,
        logits_noise: float = 0.0,
        logits_noise_below: float = 1.0,
        top_logprobs: int = 0,
    ) -> None:
        self._noise = LogitsNoise(logits_noise, logits_noise_below, seed_from(seed))
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode={logprobs_mode!r} is not one of {list(LOGPROBS_MODES)}")
        for name, value in (
            ("max_model_len", max_model_len),
            ("max_batch_size", max_batch_size),
            ("max_prefill_tokens", max_prefill_tokens),
            ("kv_cache_bytes", kv_cache_bytes),
        ):
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
        arguments = inspect.signature(model.forward).parameters
        if (
            getattr(config, "is_encoder_decoder", False)
            or getattr(model, "_is_stateful", False)
            or "position_ids" not in arguments
            or not layer_types <= {"full_attention", "sliding_attention"}
        ):
            raise ValueError(
                f"model_type={config.model_type!r} with layers {sorted(layer_types)} is not supported by the embedded "
                "rollout engine: it decodes decoder-only models that take position_ids and have full or "
                "sliding-window attention"
            )
        # A ready 4-D mask is handed to every layer as it is, which a sliding window must not get.
        self._plain_attention = layer_types == {"full_attention"} and not (
            getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        )
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.vocab_size = int(text.vocab_size)
        self.vocab_limit = vocab_limit if vocab_limit is not None and vocab_limit < self.vocab_size else None
        self.eos_token_ids = frozenset(int(i) for i in eos_token_ids)
        self.max_model_len = max_model_len
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        # one layer's keys or values are held twice while the cache changes its layout
        self._slot_bytes = kv_bytes_per_token(config, self.dtype) + max(kv_widths(text)) * self.dtype.itemsize
        self.kv_cache_tokens = kv_cache_bytes // self._slot_bytes
        self._seeds = DefaultSeeds(seed)
        self.logprobs_mode = logprobs_mode
        self.top_logprobs = top_logprobs
        self._accepts_logits_to_keep = "logits_to_keep" in arguments
        self._cache = SlotCache(self.device, self.dtype, max_batch_size, self.kv_cache_tokens)
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._batch: BatchSampling | None = None
        self._tokens = torch.zeros(max_batch_size, 1, dtype=torch.long, device=self.device)
        self._positions = torch.zeros(max_batch_size, 1, dtype=torch.long, device=self.device)

    # ---- requests --------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> Request:
        """Queue a request; :class:`~.request.DefaultSeeds` gives it a seed if it has none.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, or a prompt and response longer than the context
                or the key-value cache.
        """
        ids = request.prompt_ids
        if not ids:
            raise ValueError("prompt_ids is empty: the embedded rollout engine needs at least one prompt token")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(
                f"prompt_ids holds ids in [{min(ids)}, {max(ids)}], "
                f"outside the model's vocabulary [0, {self.vocab_size})"
            )
        what = f"{len(ids)} prompt tokens and max_tokens={request.params.max_tokens}"
        if request.slots > self.max_model_len:
            raise ValueError(f"{what} exceed max_model_len={self.max_model_len}")
        self.check_fits(request.slots, what)
        seed = request.params.seed
        request.seed = self._seeds.next(ids) if seed is None else seed_from(seed)
        request._stop = request.params.stop_token_ids
        if not request.params.ignore_eos:
            request._stop |= self.eos_token_ids
        self._waiting.append(request)
        return request

    def check_fits(self, tokens: int, what: str) -> None:
        """Refuse a row that can never be admitted.

        Raises:
            ValueError: ``tokens`` of one row are more than the key-value cache holds; names the key to raise.
        """
        if tokens > self.kv_cache_tokens:
            raise ValueError(
                f"{what} need {tokens} tokens of key-value cache, whose bound is {self.kv_cache_tokens}: raise "
                "actor_rollout_ref.rollout.engine_kwargs.embedded.kv_cache_mb "
                f"to {math.ceil(tokens * self._slot_bytes / 2**20)} at least, or allow fewer tokens"
            )

    @property
    def version(self) -> int | None:
        """Version of the weights; recorded in each request."""
        return self._seeds.version

    def set_version(self, version: int | None) -> None:
        """Record a new weight version and restart the occurrence counts of default seeds."""
        self._seeds.set_version(version)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_nbytes(self) -> int:
        """Bytes of key-value buffers held now."""
        return self._cache.nbytes

    @torch.inference_mode()
    def abort(self, requests: Iterable[str | Request] | None = None) -> list[Request]:
        """End waiting and running requests with what they have; returns them.

        Args:
            requests: request ids or request objects; ``None`` ends all.
        """
        wanted = None if requests is None else set(requests)

        def chosen(request: Request) -> bool:
            return wanted is None or request in wanted or request.request_id in wanted

        aborted = [request for request in self._waiting if chosen(request)]
        self._waiting = deque(request for request in self._waiting if not chosen(request))
        rows = [row for row, request in enumerate(self._running) if chosen(request)]
        aborted += self._drop_rows(rows)
        for request in aborted:
            self._finish(request, "abort")
        return aborted

    def fail_all(self, error: Exception) -> list[Request]:
        """End all requests, waiting and running, with ``error``."""
        failed = [*self._fail_running(error), *self._waiting]
        self._waiting.clear()
        for request in failed:
            request.error = error
        return failed

    # ---- stepping --------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit waiting requests and decode one token a running row; returns the requests that ended.

        An exception of the model does not escape: the requests that it touched are returned with ``error`` set and the
        engine goes on with the others.
        """
        finished: list[Request] = []
        if self._waiting and len(self._running) < self.max_batch_size:
            admitted = self._admit()
            if admitted:
                first = len(self._running)
                try:
                    finished += self._prefill(admitted)
                except Exception as error:  # reported to each request
                    for request in admitted:
                        request.error = error
                    finished += admitted
                    del self._running[first:]
                    self._batch = None
                    if self._cache.consistent:
                        self._cache.cut(first)
                    else:
                        finished += self._fail_running(error)
                # a further group of waiting prompts joins before the next token is decoded
                if self._waiting and len(self._running) < self.max_batch_size:
                    return finished
        if self._running:
            try:
                finished += self._decode()
            except Exception as error:  # reported to each request
                finished += self._fail_running(error)
        return finished

    def _admit(self) -> list[Request]:
        """Take waiting requests in order, as many as batch, prefill and cache bounds allow."""
        admitted: list[Request] = []
        rows = len(self._running)
        longest = max((r.slots for r in self._running), default=0)
        width = 0
        prompts: set[tuple[int, ...]] = set()
        while self._waiting and rows + len(admitted) < self.max_batch_size:
            request = self._waiting[0]
            length = len(request.prompt_ids)
            key = tuple(request.prompt_ids)
            new_width = max(width, length)
            new_prompts = len(prompts) + (key not in prompts)
            new_longest = max(longest, request.slots)
            total = rows + len(admitted) + 1
            # with columns to spare, or rows that come and go would have the cache laid out anew at every step
            if total > 1 and total * (new_longest + new_longest // 4) > self.kv_cache_tokens:
                break
            if admitted and new_width * new_prompts > self.max_prefill_tokens:
                break
            prompts.add(key)
            width, longest = new_width, new_longest
            admitted.append(self._waiting.popleft())
        return admitted

    def _forward(self, **kwargs: Any) -> torch.Tensor:
        if self._accepts_logits_to_keep:
            kwargs["logits_to_keep"] = 1
        return self.model(use_cache=True, **kwargs).logits[:, -1].float()

    def _prefill(self, admitted: list[Request]) -> list[Request]:
        prompts: dict[tuple[int, ...], int] = {}
        source = [prompts.setdefault(tuple(r.prompt_ids), len(prompts)) for r in admitted]
        width = max(len(p) for p in prompts)
        # padded with the prompt's own first token: no row reads weights that are not its own (one may hold NaN)
        ids = torch.tensor([[p[0]] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        pads = torch.tensor([width - len(p) for p in prompts], device=self.device)
        columns = torch.arange(width, device=self.device)
        positions = (columns[None, :] - pads[:, None]).clamp_(min=0)
        mask: torch.Tensor | None = None
        if min(len(p) for p in prompts) < width:
            mask = self._prefill_mask(columns, pads)
        for request in admitted:
            request.min_version = self.version
        self._cache.begin_prefill(source, width)
        logits = self._forward(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache)
        self._cache.end_prefill([len(r.prompt_ids) for r in admitted])
        if len(admitted) > len(prompts):
            logits = logits[torch.tensor(source, device=self.device)]
        first = len(self._running)
        self._positions[first : first + len(admitted), 0] = torch.tensor(
            [len(r.prompt_ids) for r in admitted], device=self.device
        )
        batch = BatchSampling([r.params for r in admitted], logits.shape[-1], self.device)
        tokens = self._sample(logits, admitted, batch)
        self._tokens[first : first + len(admitted), 0] = tokens
        self._running += admitted
        self._batch = None
        return self._collect(first)

    def _prefill_mask(self, columns: torch.Tensor, pads: torch.Tensor) -> torch.Tensor:
        if not self._plain_attention:
            return (columns[None, :] >= pads[:, None]).long()
        real_key = columns[None, None, :] >= pads[:, None, None]
        causal = columns[:, None] >= columns[None, :]
        # A padding query may look anywhere: a row without any key would turn its hidden state into NaN.
        allowed = (real_key & causal) | (columns[None, :, None] < pads[:, None, None])
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)[:, None]

    def _decode(self) -> list[Request]:
        cache, rows = self._cache, len(self._running)
        cache.prepare_step()
        mask: torch.Tensor | None = None
        if cache.padded:
            mask = cache.mask()
            if not self._plain_attention:
                mask = (mask[:, 0, 0] == 0).long()
        positions = self._positions[:rows]
        ids = self._tokens[:rows]
        logits = self._forward(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache.advance()
        positions += 1
        if self._batch is None:
            params = [r.params for r in self._running]
            self._batch = BatchSampling(params, logits.shape[-1], self.device)
        self._tokens[:rows, 0] = self._sample(logits, self._running, self._batch)
        return self._collect(0)

    def _sample(self, logits: torch.Tensor, requests: list[Request], batch: BatchSampling) -> torch.Tensor:
        """Sample one token a request and append it, or its ``error``; returns the tokens ``(rows,)``."""
        logits = self._noise(logits)
        edited = logits.clone() if batch.edited_rows or self.vocab_limit is not None else logits
        if self.vocab_limit is not None:
            edited[:, self.vocab_limit :] = -torch.inf
        for row in batch.edited_rows:
            self._edit_row(edited[row], requests[row])
        uniforms = [r._next_uniform() for r in requests]
        tokens, all_logprobs = sample(logits, edited, batch, uniforms, self.logprobs_mode)
        logprobs = all_logprobs.gather(-1, tokens[:, None]).squeeze(-1)
        if self.top_logprobs:
            self._keep_top(all_logprobs, requests)
        broken = FloatingPointError("the model's logits hold NaN or +inf")
        if bool(logprobs.isnan().all()):
            raise broken
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if math.isnan(logprob):
                request.error = broken
            else:
                request.token_ids.append(token)
                request.logprobs.append(logprob)
        return tokens

    def _keep_top(self, logprobs: torch.Tensor, requests: list[Request]) -> None:
        """Keep the largest of the `logprobs` [rows, vocab] with each request that samples."""
        ids = None
        if self.top_logprobs > 0:
            logprobs, found = logprobs.topk(min(self.top_logprobs, self.vocab_size), dim=-1)
            ids = found.to(torch.int32).cpu().numpy()
        values = logprobs.cpu().numpy()
        for row, request in enumerate(requests):
            if request.params.logprobs and not request.params.greedy:
                request.top_logprobs.append((values[row].copy(), None if ids is None else ids[row].copy()))

    def _edit_row(self, logits: torch.Tensor, request: Request) -> None:
        """Apply penalties and ``min_tokens`` to one row of logits in place."""
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*request.prompt_ids, *request.token_ids}), device=logits.device)
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (params.frequency_penalty or params.presence_penalty) and request.token_ids:
            generated = torch.tensor(request.token_ids, device=logits.device)
            counts = torch.bincount(generated, minlength=logits.shape[-1]).to(logits.dtype)
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if len(request.token_ids) < params.min_tokens and request._stop:
            stop = [token for token in request._stop if 0 <= token < logits.shape[-1]]
            logits[torch.tensor(stop, dtype=torch.long, device=logits.device)] = -torch.inf

    def _collect(self, first: int) -> list[Request]:
        """End the rows from ``first`` on that failed or whose last token stops them."""
        done = []
        for row in range(first, len(self._running)):
            request = self._running[row]
            if request.error is not None:
                done.append(row)
            elif request.token_ids[-1] in request._stop:
                self._finish(request, "stop")
                done.append(row)
            elif len(request.token_ids) >= request.params.max_tokens:
                self._finish(request, "length")
                done.append(row)
        return self._drop_rows(done)

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        request.max_version = self.version
        if request.min_version is None:
            request.min_version = self.version
        request._generator = None

    def _drop_rows(self, rows: list[int]) -> list[Request]:
        """Take rows (ascending) out of the batch; the last row moves into each gap."""
        dropped = []
        for row in reversed(rows):
            last = len(self._running) - 1
            dropped.append(self._running[row])
            if row != last:
                self._running[row] = self._running[last]
                self._tokens[row] = self._tokens[last]
                self._positions[row] = self._positions[last]
            self._running.pop()
            self._cache.remove(row, wipe=dropped[-1].error is not None)
        if rows:
            self._batch = None
        dropped.reverse()
        return dropped

    def _fail_running(self, error: Exception) -> list[Request]:
        failed = self._running
        self._running = []
        self._batch = None
        self._cache.release()
        for request in failed:
            request.error = error
        return failed
