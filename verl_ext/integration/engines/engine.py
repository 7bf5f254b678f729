# SPDX-License-Identifier: Apache-2.0
"""One pass over the logits in verl's FSDP engines: log-probabilities, entropy and sum of squares, pruned or plain.

`extend_registry` puts a mixin in front of verl's FSDP language-model engines, in processes of a run of ours. The mixin
replaces what verl computes from the logits by one call of `verl_ext.methods.logits.logits_pass.token_statistics`, with
the temperature inside: the logits are read once, and no scaled, narrowed or log-softmaxed copy of them is made.

What a batch asks for travels with the batch, as non-tensor data beside verl's own ``calculate_entropy`` (`engine_info`
makes it): the old-log-prob pass, the reference pass and the update may then ask for different things of one engine,
every worker on every node sees the same, and a batch that does not ask goes to verl's own code, untouched. A second
mixin, of `agent_gradients`, separates the agents of an update if the batch asks for that.

Only response positions are computed: nothing in verl reads the log-probabilities of a prompt, which are 0 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_ext.integration.compat import verl_api, wraps
from verl_ext.integration.engines.agent_gradients import AgentGradientsMixin
from verl_ext.integration.engines.imitation import ImitationMixin
from verl_ext.integration.engines.loss_turns import LossTurnsMixin
from verl_ext.integration.engines.micro_batch import ONE_PASS, full, positions, response_positions, said
from verl_ext.integration.engines.token_kl import TokenKLMixin
from verl_ext.integration.engines.update_step import UpdateStepMixin

RHO = "verl_ext_rho"
SET_COLUMNS = "verl_ext_set_columns"

IN_SET = "dvp_in_set"
KEPT_MASS = "dvp_kept_mass"
SET_SIZE = "dvp_set_size"
OUT_OF_SET_METRIC = "actor/dvp/out_of_set_fraction"

MEASURED_FASTER = ("cpu",)
"""Devices on which ``verl_ext.one_pass: auto`` uses the pass without pruning, because it was measured to be faster."""


def engine_info(one_pass: str, rho: float | None, set_columns: bool = False) -> dict[str, Any]:
    """What the trainer tells the engine with a batch.

    Args:
        one_pass: ``auto``, ``on`` or ``off``.
        rho: prune the policy to the tokens with at least this fraction of the largest probability; None: do not.
        set_columns: return membership, kept mass and size of the safe set with the model's outputs.
    """
    return {ONE_PASS: one_pass, RHO: float(rho or 0.0), SET_COLUMNS: bool(set_columns)}


class OnePassMixin:
    """Mixin over verl's `FSDPEngineWithLMHead` and its subclasses. See the module's text."""

    _out_of_set: torch.Tensor | None = None

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """verl's ``log_probs``, ``entropy`` and ``sum_pi_squared`` (jagged, [B, prompt + response]) from one pass.

        With pruning they are those of the renormalised policy on its safe set; in an update the tokens outside of it
        are taken out of the micro-batch's ``response_mask``, so that no loss term trains on them. The denominators of
        verl's loss (``batch_num_tokens``) stay.

        Raises:
            RuntimeError: pruning is asked for on a path that forms no full logits.
        """
        one_pass, rho = said(micro_batch, ONE_PASS, "off"), float(said(micro_batch, RHO, 0.0))
        why_not = _unsupported(output, micro_batch)
        if rho > 0 and why_not:
            raise RuntimeError(f"dvp.rho={rho:g} cannot prune here: {why_not}")
        if rho <= 0 and (why_not or not _wanted(one_pass, output)):
            squares = not why_not and bool(said(micro_batch, "calculate_sum_pi_squared", False))
            with wraps.must_be_called(wraps.SUM_PI_SQUARED, squares):
                return super().prepare_model_outputs(  # type: ignore[misc]
                    output=output,
                    output_args=output_args,
                    micro_batch=micro_batch,
                    logits_processor_func=logits_processor_func,
                )
        rmpad = said(micro_batch, "use_remove_padding", True)
        wanted = {
            "entropy": bool(said(micro_batch, "calculate_entropy", False)),
            "sum_pi_squared": bool(said(micro_batch, "calculate_sum_pi_squared", False)),
        }
        compute = self._packed if rmpad else self._padded
        flat = compute(output.logits, output_args, micro_batch, rho=rho, **wanted)
        offsets = micro_batch["input_ids"].offsets()
        if rho > 0 and logits_processor_func is not None:
            self._mask_out_of_set(micro_batch, flat[IN_SET])
        columns = ["log_probs", *(name for name, on in wanted.items() if on)]
        if rho > 0 and said(micro_batch, SET_COLUMNS, False):
            columns += [IN_SET, KEPT_MASS, SET_SIZE]
        return {name: torch.nested.nested_tensor_from_jagged(flat[name], offsets) for name in columns}

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """verl's own, with the share of tokens that pruning kept out of the loss among the metrics."""
        self._out_of_set = None
        if loss_function is not None and float(said(micro_batch, RHO, 0.0)) > 0:
            loss_function = _unless_empty(loss_function)
        loss, result = super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        if self._out_of_set is not None:
            from verl.utils.metric import AggregationType, Metric

            share = self._out_of_set / max(float(said(micro_batch, "batch_num_tokens", 1)), 1.0)
            share = share * float(said(micro_batch, "dp_size", 1))  # verl sums over micro-batches, averages over ranks
            result["metrics"][OUT_OF_SET_METRIC] = Metric(value=share, aggregation=AggregationType.SUM)
            self._out_of_set = None
        return loss, result

    def _packed(self, logits: Any, args: Any, micro_batch: Any, **wanted: Any) -> dict[str, torch.Tensor]:
        """Sequences packed into one row; with Ulysses this rank's slice of it."""
        from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size

        logits = full(logits).squeeze(0)  # [tokens / sp, V]
        labels = args["input_ids_rmpad_rolled"]
        temperature = _temperature(micro_batch, args.get("temperature_rmpad"))
        chosen = response_positions(micro_batch)
        if chosen is not None:
            sharded = getattr(self, "use_ulysses_sp", False)
            parts = get_ulysses_sequence_parallel_world_size() if sharded else 1
            part = get_ulysses_sequence_parallel_rank() if sharded else 0
            size = labels.shape[0]
            chosen = torch.nn.functional.pad(chosen, (0, parts * size - chosen.shape[0]))
            chosen = chosen[part * size : (part + 1) * size]
        flat = _statistics(logits, labels, temperature, chosen, **wanted)
        gather, pad = self._gather_and_unpad_packed, args["pad_size"]  # type: ignore[attr-defined]
        out: dict[str, torch.Tensor] = {n: gather(flat[n], pad) for n in ("log_probs", "entropy") if n in flat}
        constant = [name for name in flat if name not in out]
        if constant:  # without gradient: one exchange for all
            gathered = gather(torch.stack([flat[name] for name in constant], dim=-1), pad)
            out.update(zip(constant, gathered.unbind(-1), strict=True))
        return out

    def _padded(self, logits: Any, args: Any, micro_batch: Any, **wanted: Any) -> dict[str, torch.Tensor]:
        """Sequences padded to the longest one, [B, S, V]; read in place, without narrowing or concatenating them."""
        logits = full(logits)
        lengths = micro_batch["input_ids"].offsets().diff()
        present = torch.arange(logits.shape[1], device=logits.device) < lengths[:, None]
        labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        labels[present] = args["input_ids_rmpad_rolled"]
        temperature = _temperature(micro_batch, args.get("temperature"))
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[:, None].expand(labels.shape)
        chosen = response_positions(micro_batch)
        if chosen is None:
            return _statistics(logits, labels, temperature, present, into=None, **wanted)
        select = torch.zeros_like(present)
        select[present] = chosen
        return _statistics(logits, labels, temperature, select, into=chosen, **wanted)

    def _mask_out_of_set(self, micro_batch: Any, in_set: torch.Tensor) -> None:
        """Take the response tokens outside the safe set out of ``response_mask`` of this micro-batch.

        Args:
            micro_batch: verl's; the entry is replaced, the batch that it was cut from keeps its own.
            in_set: [tokens] 0/1, at the position before each token.
        """
        mask = micro_batch["response_mask"]
        if not mask.is_nested:
            raise RuntimeError(
                "dvp needs the batch of verl's V1 trainer; response_mask is a padded tensor. Set trainer.use_v1=true."
            )
        before, lengths = mask.values(), mask.offsets().diff()
        kept = before * in_set[positions(micro_batch["input_ids"].offsets(), lengths)].to(before.dtype)
        micro_batch["response_mask"] = torch.nested.nested_tensor_from_jagged(
            # Without the length of the longest, padding would make sequences as long as all of them together.
            kept,
            mask.offsets(),
            max_seqlen=int(lengths.max()),
        )
        self._out_of_set = (before.sum() - kept.sum()).detach().float()


def _unless_empty(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function, but 0 for a micro-batch without tokens, as where all have left the safe set: some losses of
    verl refuse it. Its means and sums are 0 as well, since verl's ranks have to report the same metrics equally often;
    plain numbers, as ``kl_coef``, are settings and stay."""

    def loss(*, model_output: Any, data: Any, **more: Any) -> Any:
        from verl.utils.metric import Metric

        mask = data["response_mask"]
        if bool((mask.values() > 0).any()):
            return loss_function(model_output=model_output, data=data, **more)
        longest = int(mask.offsets().diff().max())
        every = data.clone(recurse=False)
        every["response_mask"] = torch.nested.nested_tensor_from_jagged(
            torch.ones_like(mask.values()), mask.offsets(), max_seqlen=longest
        )
        with torch.no_grad():  # for the names
            _, metrics = loss_function(model_output=model_output, data=every, **more)
        none = {
            name: Metric(value=0.0, aggregation=value.aggregation) if isinstance(value, Metric) else value
            for name, value in metrics.items()
        }
        return model_output["log_probs"].values().sum() * 0.0, none

    return loss


def _unsupported(output: Any, micro_batch: Any) -> str | None:
    """Why this batch is not for the pass, with what to set; None if it is."""
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    if said(micro_batch, "use_fused_kernels", False):
        return "fused kernels never form the logits. Set actor_rollout_ref.model.use_fused_kernels=false."
    if said(micro_batch, "distillation_use_topk", False) or said(micro_batch, "distillation_only", False):
        return "distillation reads the whole vocabulary. Set distillation.enabled=false."
    if said(micro_batch, "pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        return "the sequences are padded by the data set; verl's V1 trainer does not pad them. Set trainer.use_v1=true."
    if getattr(output, "logits", None) is None:
        return "the model returned no logits. Use a causal language model of transformers without fused outputs."
    return None


def _wanted(one_pass: str, output: Any) -> bool:
    return one_pass == "on" or (one_pass == "auto" and output.logits.device.type in MEASURED_FASTER)


def _temperature(micro_batch: Any, of_tokens: torch.Tensor | None) -> Any:
    """One number for all sequences, or verl's tensor for a temperature of each."""
    given = micro_batch["temperature"]
    if not isinstance(given, torch.Tensor):
        return max(float(given), 1e-8)
    assert of_tokens is not None
    return of_tokens.clamp(min=1e-8)


def _statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: Any,
    select: torch.Tensor | None,
    *,
    rho: float,
    entropy: bool,
    sum_pi_squared: bool,
    into: torch.Tensor | None | str = "select",
) -> dict[str, torch.Tensor]:
    """`token_statistics` at the selected positions, spread over all positions with zeros in between.

    Args:
        logits: [..., V].
        labels: [...] int64.
        temperature: float, or [...] float.
        select: [...] bool, or None for all.
        into: [tokens] bool, where the selected positions lie in the result; None if the result is just them; by
            default `select` itself.

    Returns:
        By name [tokens] float32 each; those of the set only with ``rho`` above 0.
    """
    from verl_ext.methods.logits.logits_pass import token_statistics

    found = token_statistics(
        logits,
        labels,
        temperature=temperature,
        rho=rho,
        entropy=entropy,
        sum_pi_squared=sum_pi_squared,
        select=select,
    )
    named = {
        "log_probs": found.log_probs,
        "entropy": found.entropy,
        "sum_pi_squared": found.sum_pi_squared,
        IN_SET: found.in_set,
        KEPT_MASS: found.kept_mass,
        SET_SIZE: found.set_size,
    }
    target = select if isinstance(into, str) else into
    place = None if target is None else target.reshape(-1).nonzero().squeeze(-1)
    out = {}
    for name, value in named.items():
        if value is None:
            continue
        value = value.to(found.log_probs.dtype)
        if place is not None and target is not None:
            value = value.new_zeros(target.numel()).index_put((place,), value)
        out[name] = value
    return out


MIXINS: dict[str, tuple[type, ...]] = {
    "language_model": (
        UpdateStepMixin,
        AgentGradientsMixin,
        LossTurnsMixin,
        ImitationMixin,
        TokenKLMixin,
        OnePassMixin,
    ),
    "value_model": (UpdateStepMixin,),
}
"""The parts of the workers' side in order, the outermost first: agents are separated of what the one pass has made."""


def extend_registry() -> None:
    """Put the mixins in front of every registered FSDP engine of a language model or critic. Idempotent."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    for model_type, mixins in MIXINS.items():
        for backend in ("fsdp", "fsdp2"):
            registered = EngineRegistry._engines.get(model_type, {}).get(backend, {})
            for key, engine in list(registered.items()):
                if issubclass(engine, FSDPEngineWithLMHead) and not issubclass(engine, UpdateStepMixin):
                    for mixin in mixins:
                        verl_api.check_overrides(mixin, engine)
                    registered[key] = type(
                        engine.__name__, (*mixins, engine), {"__doc__": engine.__doc__, "__module__": __name__}
                    )
