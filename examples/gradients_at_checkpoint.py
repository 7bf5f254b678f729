# SPDX-License-Identifier: Apache-2.0
"""The gradients of recorded batches at the policy of a checkpoint: g = sum_t A_t grad log pi(y_t), over a trajectory.

    python examples/gradients_at_checkpoint.py RUN --checkpoint MODEL [--estimators trloo,otb]

`verl-ext whatif` compares estimators on the same records without a model. This takes a backward pass a turn, on the
CPU.

Where a turn has one advantage for all its tokens, as with most methods, its gradient is that advantage times the turn's
score function, so that all of these methods share one backward pass. The scale is taken as in
`verl_ext.lab.whatif.scale`, with the length of the turn's score function for its energy: the inner product of two mean
gradients of few samples would be that of their noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import psutil
import torch

from verl_ext.common.overrides import Failure
from verl_ext.integration.columns import split_key
from verl_ext.lab.whatif.compare import Comparison, at_scale, compare
from verl_ext.lab.whatif.records import find, read
from verl_ext.lab.whatif.scale import signal
from verl_ext.methods.groups import value_ids


def exact(comparison: Comparison, checkpoint: Path) -> dict[str, dict[str, float | None]]:
    """The gradients of the recorded turns at the policy of a checkpoint.

    Args:
        comparison: of `verl_ext.lab.whatif.compare.compare`.
        checkpoint: folder of a Hugging Face causal language model; it is run on the CPU in float32.

    Returns:
        For each estimator, and for the reference as "", with G its mean over the N trajectories and L that of the
        reference: ``norm`` |G|, ``variance`` sum |g - G|^2 / (N (N - 1)), the trace of the covariance of G if the
        trajectories were independent (None for N = 1), ``scale``, ``noise`` variance / scale^2 over the reference's,
        ``bias`` |G / scale - L| / |L|, ``bias_error`` what ``bias`` is on average without any bias, by the spread of
        the difference over prompts (None for one prompt), and ``cosine`` of G with L. None without any signal.

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
    need = 4 * (size * (3 * (len(names) + 1) + 4) + 4 * longest * settings.get_text_config().vocab_size)
    if need > (free := psutil.virtual_memory().available):
        raise Failure(
            f"--checkpoint {checkpoint}: {len(names)} estimators of {size / 1e6:.0f} million parameters take about "
            f"{need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; name fewer with --estimators"
        )
    sums = _sums(comparison, names, _model(checkpoint, AutoModelForCausalLM))
    number, prompts = sums.trajectories, sums.prompts
    norms = torch.linalg.vector_norm(sums.whole, dim=1, dtype=torch.float64).numpy() / number
    variances = (sums.squares.numpy() / number - norms**2) / max(number - 1, 1)
    loo, reference = float(norms[-1]), float(variances[-1])
    unit = sums.signal(comparison, len(names), "")
    out: dict[str, dict[str, float | None]] = {}
    for k, name in enumerate([*names, ""]):
        norm, variance = float(norms[k]), float(variances[k]) if number > 1 else None
        scale = sums.signal(comparison, k, name) / unit if unit > 0 else 0.0
        inner = float((sums.whole[k].double() @ sums.whole[-1].double()) / number**2)
        bias = error = None
        if loo and scale > 1e-9:
            difference = sums.whole[k].double() / scale - sums.whole[-1].double()
            square = float(difference @ difference)
            bias = square**0.5 / number / loo
            # of the difference a prompt, about its mean
            own, other, shared = sums.of_prompts[:, k].tolist()
            spread = own / scale**2 - 2 * shared / scale + other - square / prompts
            spread = spread if spread > 1e-12 * other else 0.0  # of the reference itself: rounding
            error = (spread * prompts / (prompts - 1)) ** 0.5 / number / loo if prompts > 1 else None
        out[name] = {
            "norm": norm,
            "variance": variance,
            "scale": scale if unit > 0 else None,
            "noise": at_scale(variance, scale, reference) if variance is not None else None,
            "bias": bias,
            "bias_error": error,
            "cosine": inner / (norm * loo) if norm and loo else None,
        }
    return out


def _model(checkpoint: Path, kind: Any) -> Any:
    """The model. Raises Failure: there are no weights, or they cannot be read."""
    try:
        return kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        actor = checkpoint.parent
        if checkpoint.name == "huggingface" and any(actor.glob("model_world_size_*.pt")):
            merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {shlex.quote(str(actor))}"
            said = f"verl keeps them in {actor}: merge them with `{merge} --target_dir MERGED` and give MERGED"
            raise Failure(f"--checkpoint {checkpoint}: there are no weights; {said}") from error
        said = str(error).splitlines()[0][:200]
        raise Failure(f"--checkpoint {checkpoint}: no model can be loaded ({said}); give its folder") from error


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Of K estimators and the reference, which is the last."""

    whole: torch.Tensor  # [K+1, P] sum of the trajectories' gradients
    squares: torch.Tensor  # [K+1] sum of their squared lengths
    of_prompts: torch.Tensor  # [3, K+1] sum over prompts of |a|^2, |l|^2 and <a, l>: its own, the reference's, both
    inner: list[np.ndarray]  # of each record, [K+1, B], inner product of a turn's gradient and its score function
    power: list[np.ndarray]  # of each record, [B], squared length of the score function
    trajectories: int
    prompts: int

    def signal(self, comparison: Comparison, k: int, name: str) -> float:
        each = zip(comparison.rows, self.power, self.inner, comparison.swaps, comparison.alphas[name], strict=True)
        return sum(
            signal(rows, power, inner[k], at, batch, alpha) for rows, power, inner, (at, batch, _), alpha in each
        )


def _sums(comparison: Comparison, names: list[str], model: Any) -> _Gradients:
    """A backward pass a turn, and one more for each estimator whose advantages differ between the turn's tokens. Turns
    whose like have no advantage in any estimator take none.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    count, size = len(names) + 1, sum(one.numel() for one in parameters)
    whole, of_prompt, own = (torch.zeros(count, size) for _ in range(3))
    squares, of_prompts = torch.zeros(count, dtype=torch.float64), torch.zeros(3, count, dtype=torch.float64)
    trajectories = prompts = 0
    inner, power = [], []
    vocabulary = model.get_input_embeddings().num_embeddings

    def gradient(of: torch.Tensor, keep: bool) -> torch.Tensor:
        found = torch.autograd.grad(of, parameters, retain_graph=keep, allow_unused=True, materialize_grads=True)
        return torch.cat([one.flatten() for one in found])

    everything = [*comparison.advantages.values(), comparison.leave_one_out]
    for n, record in enumerate(comparison.records):
        each = torch.stack([one[n] for one in everything], 1).float()
        inner.append(np.zeros((count, len(each))))
        power.append(np.zeros(len(each)))
        group = comparison.rows[n].group
        moved = np.bincount(group, weights=each.abs().amax((1, 2)).numpy())[group] > 0
        trajectory = value_ids(record.columns["traj_uid"])
        prompt = value_ids([split_key(key)[0] for key in record.keys])
        for p in range(prompt.max() + 1):
            for t in np.unique(trajectory[prompt == p]):
                for row in ((prompt == p) & (trajectory == t) & moved).nonzero()[0]:
                    answer = record.responses[row].long()
                    mask = record.tokens["response_mask"][row, : len(answer)].bool()
                    a = each[row][:, : len(answer)][:, mask]
                    if not bool(mask.any()):
                        continue
                    ids = torch.cat([record.prompts[row].long(), answer])
                    if int(ids.max()) >= vocabulary:
                        raise Failure(f"{record.path}: token {int(ids.max())} is not in the checkpoint's vocabulary")
                    logits = model(ids[None]).logits[0, -len(answer) - 1 : -1] / record.temperature
                    log_probs = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0][mask]
                    varies = (a != a[:, :1]).any(1)
                    score = gradient(log_probs.sum(), bool(varies.any()))
                    flat = torch.where(varies, 0.0, a[:, 0])
                    own.addr_(flat, score)
                    power[n][row] = float(score.double() @ score.double())
                    inner[n][:, row] = flat.numpy() * power[n][row]
                    for k in varies.nonzero()[:, 0].tolist():
                        found = gradient(log_probs @ a[k], True)
                        own[k] += found
                        inner[n][k, row] = float(found.double() @ score.double())
                squares += torch.linalg.vector_norm(own, dim=1, dtype=torch.float64) ** 2
                of_prompt += own
                own.zero_()
                trajectories += 1
            lengths = torch.linalg.vector_norm(of_prompt, dim=1, dtype=torch.float64) ** 2
            loo = of_prompt[-1].double()
            of_prompts += torch.stack(
                [lengths, lengths[-1].expand(count), torch.stack([one.double() @ loo for one in of_prompt])]
            )
            whole += of_prompt
            of_prompt.zero_()
            prompts += 1
    return _Gradients(whole, squares, of_prompts, inner, power, trajectories, prompts)


def text(found: dict[str, dict[str, float | None]]) -> str:
    """The numbers of `exact` for a terminal, and how much of the reference's gradient is noise."""
    reference = found[""]
    length, variance = (reference["norm"] or 0.0) ** 2, reference["variance"]
    lines = []
    if variance is not None:
        lines.append(f"leave-one-out gradient of squared length {length:.3g}, of variance {variance:.3g}")
        if length - variance <= variance:
            lines.append("there is more noise than gradient in it: bias and cosine say nothing; give more records")
    table = pandas.DataFrame.from_dict({name: one for name, one in found.items() if name}, orient="index", dtype=float)
    lines += ["", table.to_string(na_rep="-", float_format="{:.3g}".format, line_width=10_000)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 with a line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="of a run with verl_ext.record_dir")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--estimators", default="", metavar="NAME[,NAME]", help="registered names (default: all)")
    parser.add_argument("--json", action="store_true", help="the last line is the numbers, as JSON")
    args = parser.parse_args(argv)
    try:
        records = [read(path, []) for path in find(args.runs)]
        names = [name.strip() for name in args.estimators.split(",") if name.strip()]
        found = exact(compare(records, names, draws=0), args.checkpoint)
    except Failure as error:
        print(error, file=sys.stderr)
        return 1
    print(text(found))
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
