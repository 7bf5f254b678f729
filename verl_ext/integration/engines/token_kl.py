# SPDX-License-Identifier: Apache-2.0
"""KL(sampler || trainer) at every token, in the engine's pass for the old log-probabilities: the column ``token_kl``.

The embedded rollout engine sends its log-probabilities at each position with a sequence's ``extra_fields``: of the
whole vocabulary (`LOG_PROBS` [n, V], the divergence is exact) or of its K most likely tokens (and `IDS` [n, K], a lower
bound). verl's store hands them to the ranks with the sequences, so that each compares its own with logits that it has
anyway, and only one number a token goes back. They leave the sequences after the pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_ext.integration import dvp
from verl_ext.integration.engines.imitation import BLOCK_ROWS, Positions
from verl_ext.integration.engines.micro_batch import ONE_PASS, said
from verl_ext.integration.settings.options import OptionError, select
from verl_ext.methods.rejection import exact_token_kl, top_k_token_kl

WANTED = "verl_ext_token_kl"
"""Told to the engine with the old-log-prob pass."""

COLUMN = "token_kl"
LOG_PROBS, IDS = "sampler_log_probs", "sampler_ids"
"""Names among a sequence's ``extra_fields``: float32 [n, V or K] and int32 [n, K] of its n sampled tokens."""

KEY = "algorithm.trm.divergence"
TOLERANCE = 1e-3
"""Log-probability of the sampled token in nats: what came with the distribution against ``rollout_log_probs``."""


class TokenKLMixin:
    """Mixin over verl's `FSDPEngineWithLMHead` and its subclasses. See the module's text."""

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """verl's, with ``token_kl`` (jagged, [B, prompt + response], float32) if the batch asks for it. Raises
        RuntimeError: a sequence lacks the sampler's log-probabilities, or they are not those of its tokens."""
        from verl.utils import tensordict_utils as tu

        wanted = bool(said(micro_batch, WANTED, False))
        if wanted:
            tu.assign_non_tensor(micro_batch, **{ONE_PASS: "on"})  # it leaves the logits as they are
        made = super().prepare_model_outputs(  # type: ignore[misc]
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        if wanted:
            at = Positions(output, micro_batch)
            made[COLUMN] = at.jagged(token_kl(at))
        return made


def token_kl(at: Positions) -> torch.Tensor:
    """[N] float32 at the response tokens of a micro-batch, 0 at those that the model did not write."""
    token = at.micro_batch["response_mask"].values() > 0
    device = at.flat.device
    found = torch.zeros(len(token), device=device)
    sampler, ids = _of_sampler(at.micro_batch, device)
    if not len(sampler):
        return found
    labels = at.labels[token]
    if ids is None:
        if sampler.shape[1] != at.flat.shape[1]:
            raise RuntimeError(
                f"{KEY}=exact: sampler and trainer have {sampler.shape[1]} and {at.flat.shape[1]} tokens"
            )
        pairs = zip(sampler.split(BLOCK_ROWS), at.blocks(token), strict=True)
        kl = torch.cat([exact_token_kl(few[None], x[None])[0] for few, x in pairs])
        sampled, known = sampler.gather(-1, labels[:, None])[:, 0], torch.ones_like(labels, dtype=torch.bool)
    else:
        pairs = zip(ids.split(BLOCK_ROWS), at.blocks(token), strict=True)
        kl = top_k_token_kl(
            sampler,
            torch.cat([x.gather(-1, few).float() - x.float().logsumexp(-1, keepdim=True) for few, x in pairs]),
        )
        here = ids == labels[:, None]
        sampled, known = torch.where(here, sampler, 0.0).sum(-1), here.any(-1)
    said_before = at.micro_batch["rollout_log_probs"].values()[token].to(sampled)
    if bool(((sampled - said_before).abs() > TOLERANCE)[known].any()):
        raise RuntimeError(
            f"{KEY}: the sampler's distributions are not those of the sequence's tokens. An agent loop has to return "
            "the extra_fields of the answer whose tokens make the sequence, one output a call of the model."
        )
    return found.index_put((token.nonzero().squeeze(-1),), kl.float())


def _of_sampler(micro_batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the sampler sent of all model tokens, [M, V or K] float32, and the ids of its K [M, K]; None: all."""
    mask = micro_batch["response_mask"]
    counts = [int(row.sum()) for row in mask.unbind()]
    rows = [getattr(row, "data", row) for row in micro_batch["extra_fields"]]
    parts: dict[str, list[np.ndarray]] = {LOG_PROBS: [], IDS: []}
    for row, count in zip(rows, counts, strict=True):
        if not count:  # padding, or taken out
            continue
        if len(row.get(LOG_PROBS, ())) < count:
            raise RuntimeError(
                f"{KEY}: a sequence of {count} model tokens has {len(row.get(LOG_PROBS, ()))} distributions of the "
                "sampler. An agent loop has to return the extra_fields of the engine's answer, one output a call; "
                "verl's tool_agent puts several calls into a sequence and keeps those of the first. Use the loop "
                "verl_ext_multi_turn, or divergence=sampled."
            )
        for name, found in parts.items():
            if name in row:
                found.append(row[name][:count])
    if not parts[LOG_PROBS]:
        return torch.zeros(0, 1, device=device), None
    log_probs, ids = (torch.from_numpy(np.concatenate(found)) if found else None for found in parts.values())
    assert log_probs is not None
    return log_probs.to(device), None if ids is None else ids.to(device).long()


# ---- launch --------------------------------------------------------------------------------------------------------


def ask(config: Any, count: int) -> None:
    """Have the embedded engine send its `count` largest log-probabilities at each position; -1: all."""
    from omegaconf import OmegaConf

    dvp.ask_one_pass(config)
    if config.actor_rollout_ref.rollout.name == "embedded":
        key = "actor_rollout_ref.rollout.engine_kwargs.embedded.top_logprobs"
        OmegaConf.update(config, key, count, force_add=True)


def check(config: Any, divergence: str, count: int, limit_gib: float) -> list[str]:
    """Refuse what cannot give the divergence, and batches whose distributions (`count` numbers a token; -1: the whole
    vocabulary) take more than `limit_gib`. Returns warnings."""
    dvp.refuse_without_one_pass(config, f"{KEY}={divergence}")
    policy = config.actor_rollout_ref
    mode = select(select(config.trainer, "v1"), "trainer_mode", "sync")
    refused = {
        f"the embedded rollout engine sends it; of actor_rollout_ref.rollout.name={policy.rollout.name} verl brings "
        "back the log-probability of the sampled token alone (verl 0.9.1 asks vLLM for logprobs=0). Set it to "
        "embedded.": (policy.rollout.name != "embedded"),
        f"of a request that an update of the weights cuts in two verl keeps the second part's alone, as with "
        f"trainer.v1.trainer_mode={mode}. Set it to sync.": mode != "sync",
        "fused kernels never form the logits. Set actor_rollout_ref.model.use_fused_kernels=false.": (
            select(policy.model, "use_fused_kernels", False)
        ),
        "the logits of a sequence lie on one rank. Set actor_rollout_ref.actor.ulysses_sequence_parallel_size=1.": (
            select(policy.actor, "ulysses_sequence_parallel_size", 1) > 1
        ),
        "a pruned sampler has tokens that a pruned trainer lacks, and their divergence is infinite. Leave out dvp.rho "
        "or trm.": select(config.get("dvp"), "rho") is not None,
    }
    for why, holds in refused.items():
        if holds:
            raise OptionError(f"{KEY}={divergence} needs the sampler's distribution: {why} Or set {KEY}=sampled.")
    width = 2 * count if count > 0 else _vocabulary(policy.model)
    if width is None:
        return [f"{KEY}={divergence}: no config.json in {policy.model.path}, so the memory was not estimated."]
    data = config.data
    tokens = int(data.train_batch_size) * int(policy.rollout.n) * int(data.max_response_length)
    gib = 4 * tokens * width / 2**30
    if gib > limit_gib:
        raise OptionError(
            f"{KEY}={divergence}: the distributions of a batch of data.train_batch_size={data.train_batch_size} x n="
            f"{policy.rollout.n} x {data.max_response_length} tokens x {width} numbers take {gib:.1f} GiB, in the "
            f"sampler, the driver and the ranks each, and algorithm.trm.memory_gib={limit_gib:g}. Raise it, lower one "
            f"of them, or set {KEY} to {'top_k or ' if divergence == 'exact' else ''}sampled."
        )
    return []


def _vocabulary(model: Any) -> int | None:
    """Number of tokens of the model, of its folder's config.json; None where there is none."""
    from pathlib import Path

    from transformers import AutoConfig

    if not (Path(str(model.path)) / "config.json").is_file():
        return None
    found = AutoConfig.from_pretrained(model.path, trust_remote_code=bool(select(model, "trust_remote_code", False)))
    return int(found.get_text_config(decoder=True).vocab_size)
