# SPDX-License-Identifier: Apache-2.0
"""The gradient itself, at the policy of a checkpoint: g = sum_t A_t grad log pi(y_t), summed over a trajectory.

Where a row has one advantage for all its tokens, as with most methods, its gradient is that advantage times the row's
score function, so that all of these methods share one backward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from verl_ext.methods.groups import value_ids
from verl_ext.overrides import Failure
from verl_ext.whatif.compare import Comparison


def exact(comparison: Comparison, checkpoint: Path) -> dict[str, dict[str, float | None]]:
    """The gradients of the recorded rows at the policy of a checkpoint.

    Args:
        comparison: of `verl_ext.whatif.compare.compare`.
        checkpoint: folder of a Hugging Face causal language model; it is run on the CPU in float32.

    Returns:
        For each estimator, with G its mean over the N trajectories and L that of the reference: ``norm`` |G|,
        ``variance`` sum |g - G|^2 / (N (N - 1)), the trace of the covariance of G if the trajectories were independent
        (None for N = 1), ``scale`` <G, L> / |L|^2, ``noise`` variance / scale^2 over the reference's, ``bias``
        |G - L| / |L| and ``cosine`` of G with L. None without any signal.

    Raises:
        Failure: there is no such model, it is too large for the free memory, or a token is not in its vocabulary.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (checkpoint / "config.json").is_file():
        raise Failure(f"--checkpoint {checkpoint}: there is no config.json; give the folder of a Hugging Face model")
    settings = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        size = sum(one.numel() for one in AutoModelForCausalLM.from_config(settings).parameters())
    names = list(comparison.advantages)
    longest = max(
        len(p) + len(r) for one in comparison.records for p, r in zip(one.prompts, one.responses, strict=True)
    )
    need = 4 * (size * (2 * (len(names) + 1) + 3) + 4 * longest * settings.get_text_config().vocab_size)
    if need > (free := psutil.virtual_memory().available):
        raise Failure(
            f"--checkpoint {checkpoint}: {len(names)} estimators of {size / 1e6:.0f} million parameters take about "
            f"{need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; name fewer with --estimators"
        )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    whole, squares, number = _sums(comparison, names, model)
    norms = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float64) / number
    loo = float(norms[-1])
    variances = (squares / number - norms**2) / max(number - 1, 1)
    out: dict[str, dict[str, float | None]] = {}
    reference = float(variances[-1])
    for k, name in enumerate(names):
        norm, variance = float(norms[k]), float(variances[k]) if number > 1 else None
        inner = float((whole[k].double() @ whole[-1].double()) / number**2)
        scale = inner / loo**2 if loo else None
        distance = float(torch.linalg.vector_norm(whole[k] - whole[-1], dtype=torch.float64)) / number
        comparable = variance is not None and scale is not None and scale > 1e-9 and reference > 0
        out[name] = {
            "norm": norm,
            "variance": variance,
            "scale": scale,
            "noise": variance / scale**2 / reference if comparable else None,  # type: ignore[operator]
            "bias": distance / loo if loo else None,
            "cosine": inner / (norm * loo) if norm and loo else None,
        }
    return out


def _sums(comparison: Comparison, names: list[str], model: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sum [K+1, P] and sum of squares [K+1] of the N trajectories' gradients, the reference's last, and N."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    size = sum(one.numel() for one in parameters)
    whole, own = torch.zeros(len(names) + 1, size), torch.zeros(len(names) + 1, size)
    squares, number = torch.zeros(len(names) + 1, dtype=torch.float64), 0
    vocabulary = model.get_input_embeddings().num_embeddings

    def gradient(of: torch.Tensor, keep: bool) -> torch.Tensor:
        found = torch.autograd.grad(of, parameters, retain_graph=keep, allow_unused=True, materialize_grads=True)
        return torch.cat([one.flatten() for one in found])

    everything = [*comparison.advantages.values(), comparison.leave_one_out]
    for n, record in enumerate(comparison.records):
        each = torch.stack([one[n] for one in everything], 1).float()
        trajectories = value_ids(record.columns["traj_uid"])
        for trajectory in range(trajectories.max() + 1):
            for row in (trajectories == trajectory).nonzero()[0]:
                answer = record.responses[row].long()
                mask = record.tokens["response_mask"][row, : len(answer)].bool()
                a = each[row][:, : len(answer)][:, mask]
                if not bool(a.any()):
                    continue
                ids = torch.cat([record.prompts[row].long(), answer])
                if int(ids.max()) >= vocabulary:
                    raise Failure(f"{record.path}: token {int(ids.max())} is not in the checkpoint's vocabulary")
                logits = model(ids[None]).logits[0, -len(answer) - 1 : -1] / record.temperature
                log_probs = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0][mask]
                varies = (a != a[:, :1]).any(1)
                own.addr_(torch.where(varies, 0.0, a[:, 0]), gradient(log_probs.sum(), bool(varies.any())))
                for k in varies.nonzero()[:, 0].tolist():
                    own[k] += gradient(log_probs @ a[k], True)
            squares += torch.linalg.vector_norm(own, dim=1, dtype=torch.float64) ** 2
            whole += own
            own.zero_()
            number += 1
    return whole, squares, number
