# SPDX-License-Identifier: Apache-2.0
"""Norm of each agent's part of the gradient, in the engine: ``verl_ext.agent_gradients``, a diagnostic.

Every token belongs to a sequence and every sequence to an agent, so the gradient of an update is a sum over agents,
whatever the loss and its normalisers are: an agent's part is what flows back through the model's outputs
(log-probabilities, entropy) at its sequences. The engine goes through a mini-batch once for each agent, with the same
loss over all sequences, and lets the gradient pass at the sequences of that agent only. The parts are added up, so that
the update is the one without the diagnostic, up to the rounding of a sum in another order, and the norm of each is
taken on the way. Terms for entropy and KL are in it with their sequences; the clipping of the gradient comes after.

The price, in the update only: forward and backward once an agent instead of once, and memory for one more copy of the
gradient (this rank's shard of it). verl's ``perf/mfu/actor`` counts the useful work only, so it falls by as much.

Spikes of these norms are what Dr. MAS (arXiv 2602.08847) is made against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from verl_ext.integration.engines.micro_batch import said

KEY = "verl_ext.agent_gradients"

AGENTS = "verl_ext_agents"
"""Number of agents of the batch, told to the engine beside the sequences; without it the engine does as verl does."""

AGENT = "verl_ext_agent"
"""Column: the agent of each sequence by its place among the names, -1 for one that is not trained on. [B] int64."""

METRIC = "agent_gradient"


def metric(number: int, statistic: str) -> str:
    """Name under which the engine logs a statistic of an agent's norms."""
    # verl takes the maximum over updates where a name has "max" in it, so agents go by number: a name may have, too.
    return f"{METRIC}/{number}/{statistic}"


class AgentGradientsMixin:
    """Mixin over verl's `FSDPEngineWithLMHead` and its subclasses. See the module's text."""

    _rows_of: tuple[int, bool] | None = None
    """In a pass: the agent's number, and whether sequences of no agent pass with it."""

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """verl's own, once for each agent with sequences in any rank's mini-batch, if the batch asks for it. Raises
        RuntimeError: the batch says how many agents there are and not whose the sequences are."""
        agents = 0 if forward_only else int(said(data, AGENTS, 0))
        present = self._agents_present(data, agents) if agents else []
        if not present:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        parameters = list(self.module.parameters())  # type: ignore[attr-defined]
        whole: dict[int, torch.Tensor] = {}
        _move(parameters, whole)
        generators = _generators()
        outputs: Any = None
        norms = {}
        for number in present:
            if outputs is not None:
                _restore(generators)  # so that dropout, if there is any, is the same in every pass
            self._rows_of = (number, outputs is None)
            try:
                found = super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
            finally:
                self._rows_of = None
            outputs = found if outputs is None else outputs
            norms[number] = self._gradient_norm(parameters)
            _move(parameters, whole)
        for position, gradient in whole.items():
            parameters[position].grad = gradient
        for number, norm in norms.items():
            for statistic in ("mean", "max"):
                outputs["metrics"][metric(number, statistic)] = [norm]
        return outputs

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """The same values; in a pass for an agent, the gradient goes through its sequences only."""
        made = super().prepare_model_outputs(  # type: ignore[misc]
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        if self._rows_of is None:
            return made
        number, others = self._rows_of
        agent = micro_batch[AGENT]
        keep = (agent == number) | (agent < 0) if others else agent == number
        return {name: through_rows(value, keep, name) for name, value in made.items()}

    def _agents_present(self, data: Any, agents: int) -> list[int]:
        """Numbers of the agents that are in this mini-batch; all ranks agree, so that all make the same passes."""
        if AGENT not in data.keys():
            raise RuntimeError(f"{KEY}: the batch says that there are {agents} agents, but has no column {AGENT!r}.")
        from verl.utils.device import get_device_id

        column = data[AGENT]
        rows = torch.bincount(column[column >= 0], minlength=agents).to(get_device_id())
        torch.distributed.all_reduce(rows, group=self.get_data_parallel_group())  # type: ignore[attr-defined]
        return [number for number, count in enumerate(rows.tolist()) if count]

    def _gradient_norm(self, parameters: Sequence[torch.nn.Parameter]) -> float:
        """Norm of the gradient over all ranks, as verl's `optimizer_step` takes it."""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from verl.utils.device import get_device_id

        module = self.module  # type: ignore[attr-defined]
        if isinstance(module, FSDP):
            norm = module.clip_grad_norm_(math.inf)  # FSDP 1 tells the norm only when it is asked to clip
        else:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).to(get_device_id())
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        scaler = getattr(self, "scaler", None)
        return float(norm) / (1.0 if scaler is None else float(scaler.get_scale()))


def through_rows(value: Any, keep: torch.Tensor, name: str = "the output") -> Any:
    """The same values, of which only those of the sequences `keep` pass a gradient on.

    Args:
        value: jagged [B, tokens of the sequence, ...] or [B, ...]; what carries no gradient is returned as it is.
        keep: [B] bool.
        name: of the value, for the error.

    Raises:
        RuntimeError: a value with a gradient that has no entry for each of B.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    if value.dim() == 0 or value.shape[0] != keep.shape[0]:
        raise RuntimeError(
            f"{KEY} cannot say which agent {name} of shape {tuple(value.shape)} belongs to: it has no entry for each "
            f"of the {keep.shape[0]} sequences of the micro-batch. Set {KEY}=false."
        )
    keep = keep.to(value.device)
    if not value.is_nested:
        return torch.where(keep.view(-1, *[1] * (value.dim() - 1)), value, value.detach())
    flat, offsets = value.values(), value.offsets()
    of_token = torch.repeat_interleave(keep, offsets.diff().to(keep.device))
    of_token = of_token.view(-1, *[1] * (flat.dim() - 1))
    return torch.nested.nested_tensor_from_jagged(torch.where(of_token, flat, flat.detach()), offsets)


def _move(parameters: Sequence[torch.nn.Parameter], whole: dict[int, torch.Tensor]) -> None:
    """Add the gradients to `whole`, by position, and take them off the parameters."""
    for position, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        if position in whole:
            whole[position].add_(gradient)
        else:
            # Not the tensor itself: with offloading, FSDP writes the next gradient into the same memory.
            whole[position] = gradient.detach().clone()
        parameter.grad = None


def _generators() -> list[tuple[Any, torch.Tensor]]:
    """States of torch's generators of random numbers, of the CPU and of the accelerator."""
    from verl.utils.device import get_device_name, get_torch_device

    found: list[tuple[Any, torch.Tensor]] = [(torch, torch.get_rng_state())]
    if get_device_name() != "cpu":
        device = get_torch_device()
        found.append((device, device.get_rng_state()))
    return found


def _restore(states: Sequence[tuple[Any, torch.Tensor]]) -> None:
    for owner, state in states:
        owner.set_rng_state(state)
