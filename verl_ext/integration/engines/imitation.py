# SPDX-License-Identifier: Apache-2.0
"""The teacher of ``hybrid_imitation`` in verl's FSDP engines: its top tokens, or all of its logits, and the divergence.

verl's V1 trainer knows two teachers. Its distillation teacher (``distillation.enabled``, vLLM or SGLang servers on GPUs
of their own) sends with every rollout the columns ``teacher_ids`` and ``teacher_logprobs``, [tokens, K] at each
position of prompt and response. Of the frozen reference the mixin makes the same two columns in the pass that verl
makes over the batch anyway. The whole vocabulary does not travel: for it the actor's engine asks the engine of the
reference, which lives in the same process, for the logits of each micro-batch.

In an update the divergence joins the model's outputs under the names of verl's own distillation loss, and the policy
loss, whose arguments have no place for it, finds it with `current`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from verl_ext.integration.engines.micro_batch import ONE_PASS, full, response_positions, said
from verl_ext.methods.hybrid_imitation import teacher_kl

TOP_K = "verl_ext_teacher_topk"
"""Told to the engine with the reference's batch: how many of its most probable tokens to return at each position."""

DIRECTION = "verl_ext_imitation"
"""Told to the engine with an update: the direction of the divergence."""

FULL = "verl_ext_imitation_full"
"""Beside it: over the whole vocabulary, from the reference in this process, instead of the teacher's columns."""

BLOCK_ROWS = 1024
"""Positions whose logits are copied at once where no gradient needs them."""

OUTPUTS = ("distillation_losses", "student_mass", "teacher_mass")

_current: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("verl_ext_imitation", default=None)
_reference: weakref.ref[Any] | None = None


def current() -> dict[str, torch.Tensor] | None:
    """`OUTPUTS` of the micro-batch whose loss is computed, [B, T] each; None outside of one that imitates."""
    return _current.get()


class ImitationMixin:
    """Mixin over verl's `FSDPEngineWithLMHead` and its subclasses. See the module's text."""

    def initialize(self) -> Any:
        """verl's own; the engine of the reference is remembered by its process."""
        made = super().initialize()  # type: ignore[misc]
        if self.engine_config.forward_only:  # type: ignore[attr-defined]
            global _reference
            _reference = weakref.ref(self)
        return made

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """verl's, and what the batch asks for of a teacher; jagged, [B, prompt + response] or [..., K]. Raises
        RuntimeError: there are no logits, or the teacher's columns or its engine are missing."""
        from verl.utils import tensordict_utils as tu

        top_k, direction = int(said(micro_batch, TOP_K, 0)), said(micro_batch, DIRECTION, "")
        if direction:
            # Not verl's ways to the log-probabilities: one overwrites the logits, one makes a loss of the teacher.
            tu.assign_non_tensor(micro_batch, distillation_use_topk=False, **{ONE_PASS: "on"})
        made = super().prepare_model_outputs(  # type: ignore[misc]
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        if top_k:
            made.update(teacher_columns(Positions(output, micro_batch), top_k))
        if direction:
            made.update(self._divergence(Positions(output, micro_batch), made["log_probs"], direction))
        return made

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """verl's own; the policy loss finds the divergence."""
        if loss_function is not None and said(micro_batch, DIRECTION, ""):
            loss_function = _imitating(loss_function)
        return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]

    def _divergence(self, at: Positions, log_probs: torch.Tensor, direction: str) -> dict[str, torch.Tensor]:
        micro_batch = at.micro_batch
        if said(micro_batch, FULL, False):
            student, teacher = at.logits(), _reference_logits(micro_batch)
            mass = torch.ones(len(at.rows), device=student.device)
            return at.spread(teacher_kl(student, teacher, direction), mass, mass)
        if "teacher_ids" not in micro_batch.keys():
            raise RuntimeError(
                "hybrid_imitation: the batch has no teacher_ids. The engine of the reference is not one of verl's FSDP "
                "language-model engines, or was registered after they were extended; or a trajectory has several "
                "sequences, of which verl asks its distillation teacher for the last alone: use a loop that makes one."
            )
        ids = micro_batch["teacher_ids"].values()[at.chosen].long()
        known = micro_batch["teacher_logprobs"].values()[at.chosen].float()
        student = at.logits(ids)
        label = at.logits(at.labels[:, None]).squeeze(-1)
        normaliser = label - log_probs.values()[at.chosen]
        student_mass = (student.logsumexp(-1) - normaliser).exp().detach()
        return at.spread(teacher_kl(student, known, direction), student_mass, known.exp().sum(-1))


class Positions:
    """The positions of a micro-batch whose output belongs to a response token, and the model's logits there.

    Attributes:
        chosen: [tokens] bool, of all tokens of the micro-batch.
        rows: [N] int64, where they lie among the logits.
        labels: [N] int64, the token after each.
    """

    def __init__(self, output: Any, micro_batch: Any) -> None:
        if getattr(output, "logits", None) is None:
            raise RuntimeError("hybrid_imitation needs logits. Set actor_rollout_ref.model.use_fused_kernels=false.")
        chosen = response_positions(micro_batch)
        if chosen is None:
            raise RuntimeError("hybrid_imitation needs the batch of verl's V1 trainer. Set trainer.use_v1=true.")
        self.micro_batch, self.chosen = micro_batch, chosen
        logits = full(output.logits)
        self.flat = logits.reshape(-1, logits.shape[-1])
        ids = micro_batch["input_ids"]
        self.offsets = ids.offsets()
        lengths = self.offsets.diff()
        place = torch.arange(len(chosen), device=chosen.device)
        if not said(micro_batch, "use_remove_padding", True):  # sequences padded to the longest
            number = torch.arange(len(lengths), device=chosen.device)
            place = place + torch.repeat_interleave(number * logits.shape[1] - self.offsets[:-1], lengths)
        self.rows = place[chosen]
        self.labels = ids.values().roll(-1)[chosen]
        temperature = micro_batch["temperature"]
        if isinstance(temperature, torch.Tensor):
            temperature = torch.repeat_interleave(temperature.to(chosen.device), lengths)[chosen][:, None]
        self.temperature: Any = temperature

    def logits(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """[N, V], or those of the tokens `ids` [N, K] in float32, after the temperature."""
        if ids is not None:
            return self.flat[self.rows[:, None], ids].float() / self.temperature
        return self._after_temperature(self.rows, self.temperature)

    def blocks(self, token: torch.Tensor) -> Iterator[torch.Tensor]:
        """`logits` at the positions where `token` [N] bool, [<= BLOCK_ROWS, V] at a time."""
        degree, rows = self.temperature, self.rows[token].split(BLOCK_ROWS)
        degrees = degree[token].split(BLOCK_ROWS) if isinstance(degree, torch.Tensor) else [degree] * len(rows)
        yield from map(self._after_temperature, rows, degrees)

    def _after_temperature(self, rows: torch.Tensor, temperature: Any) -> torch.Tensor:
        """Divided in float32, as the sampler does: quotients in bfloat16 would be another policy's."""
        found = self.flat.index_select(0, rows)
        plain = not isinstance(temperature, torch.Tensor) and float(temperature) == 1.0
        return found if plain else found.float().div_(temperature)

    def spread(self, *columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """`OUTPUTS` of [N] values each, jagged over all tokens with 0 between."""
        return dict(zip(OUTPUTS, (self.jagged(column) for column in columns), strict=True))

    def jagged(self, column: torch.Tensor) -> torch.Tensor:
        whole = column.new_zeros((len(self.chosen), *column.shape[1:]))
        whole = whole.index_put((self.chosen.nonzero().squeeze(-1),), column)
        return torch.nested.nested_tensor_from_jagged(whole, self.offsets)


def teacher_columns(at: Positions, top_k: int) -> dict[str, torch.Tensor]:
    """The most probable tokens and their log-probabilities as verl's distillation teacher sends them, jagged [.., K].
    Raises ValueError: there are fewer tokens than that."""
    if top_k > at.flat.shape[-1]:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.teacher_topk={top_k} is more than the vocabulary of "
            f"{at.flat.shape[-1]}. Lower it, or set it to null for the whole vocabulary."
        )
    found = [(*rows.topk(top_k, dim=-1), rows.float().logsumexp(-1, True)) for rows in at.blocks(at.rows >= 0)]
    values, ids, normaliser = (torch.cat(part) for part in zip(*found, strict=True))
    log_probs = values.float() - normaliser
    return {"teacher_ids": at.jagged(ids.to(torch.int32)), "teacher_logprobs": at.jagged(log_probs)}


def _reference_logits(micro_batch: Any) -> torch.Tensor:
    """The reference's logits at the response positions, [N, V], after the temperature."""
    reference = None if _reference is None else _reference()
    if reference is None:
        raise RuntimeError(
            "hybrid_imitation over the whole vocabulary needs the reference in the actor's process, and it is not "
            "there. Set actor_rollout_ref.actor.policy_loss.teacher_topk to a number."
        )
    with torch.no_grad(), reference.eval_mode():
        inputs, _ = reference.prepare_model_inputs(micro_batch=micro_batch)
        return Positions(reference.module(**inputs, use_cache=False), micro_batch).logits()


def _imitating(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function, which finds `OUTPUTS` with `current`."""

    def loss(*, model_output: Any, data: Any, **more: Any) -> Any:
        from verl.workers.utils.padding import no_padding_2_padding

        outputs = {name: no_padding_2_padding(model_output[name], data) for name in OUTPUTS}
        token = _current.set(outputs)
        try:
            return loss_function(model_output=model_output, data=data, **more)
        finally:
            _current.reset(token)

    return loss
