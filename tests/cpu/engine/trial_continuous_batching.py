# SPDX-License-Identifier: Apache-2.0
"""transformers' own continuous batching (paged cache) beside the embedded engine, on the CPU; a script, not a test.

Prints the figures of docs/measured.md: the time of both on equal prompts and lengths, and how far the log-probabilities
of what they sampled at temperature 1 are from a float32 forward over prompt and response; once more after new weights.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from collections.abc import Callable

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from verl_ext.cpu.engine.engine import GenerationEngine, Request
from verl_ext.cpu.engine.sampling import SamplingParams

VOCAB, LONGEST, BLOCK = 512, 48, 32
Prompts = list[list[int]]
#: Sampled ids and their log-probabilities, a row each.
Rows = list[tuple[list[int], list[float]]]


def make_model(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=hidden**-0.5)
    return LlamaForCausalLM(config).eval()


def make_prompts(rows: int) -> Prompts:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(LONGEST // 3, LONGEST + 1, (rows,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def ours(model: LlamaForCausalLM, tokens: int, prompts: Prompts) -> Rows:
    engine = GenerationEngine(model, max_model_len=LONGEST + tokens)
    requests = [engine.submit(Request(prompt, SamplingParams(max_tokens=tokens))) for prompt in prompts]
    while engine.has_work():
        engine.step()
    return [(request.token_ids, request.logprobs) for request in requests]


class Theirs:
    """A manager that lives through several batches, as that of a server would."""

    def __init__(self, model: LlamaForCausalLM, tokens: int, rows: int, sharing: bool) -> None:
        blocks = rows * (-(-(LONGEST + tokens) // BLOCK) + 1)
        cache = {"block_size": BLOCK, "num_blocks": blocks, "max_batch_tokens": 8192, "allow_block_sharing": sharing}
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens}
        self.manager = model.init_continuous_batching(
            GenerationConfig(**sampling, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(**cache, return_logprobs=True),
        )
        self.manager.start()

    def __call__(self, prompts: Prompts) -> Rows:
        names = self.manager.add_requests(prompts)
        found: dict[str, tuple[list[int], list[float]]] = {}
        while len(found) < len(names):
            if (result := self.manager.get_result(timeout=1)) is not None:
                found[result.request_id] = (result.generated_tokens, result.logprobs)
            elif not self.manager.is_running():
                raise RuntimeError(f"the generation loop has ended: {self.manager.fatal_error!r}")
        return [found[name] for name in names]


@torch.no_grad()
def difference(model: LlamaForCausalLM, prompts: Prompts, rows: Rows) -> float:
    """Largest difference in log-probability from a forward pass over prompt and response."""
    worst = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, rows, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, (truth - torch.tensor(logprobs)).abs().max().item())
    return worst


def measure(sample: Callable[[Prompts], Rows], prompts: Prompts, truth: LlamaForCausalLM) -> tuple[float, float]:
    """Seconds of the best of three, and the difference of the last."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        rows = sample(prompts)
        seconds.append(time.perf_counter() - start)
    return min(seconds), difference(truth, prompts, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--tokens", type=int, default=32, help="of each response")
    parser.add_argument("--hidden", type=int, default=64, help="units of the model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    for count in given.rows:
        prompts, truth = make_prompts(count), make_model(given.hidden)
        mine, error = measure(functools.partial(ours, truth, given.tokens), prompts, truth)
        print(f"{count} rows: the embedded engine {mine:.2f} s, difference {error:.1e}")
        for sharing in (True, False):
            truth, model = make_model(given.hidden), make_model(given.hidden)
            theirs = Theirs(model, given.tokens, count, sharing)
            took, error = measure(theirs, prompts, truth)
            with torch.no_grad():
                for old, new in zip(model.parameters(), truth.parameters(), strict=True):
                    old.copy_(new.mul_(1.1))
            after = difference(truth, prompts, theirs(prompts))
            theirs.manager.stop(hard_stop=True)
            named = f"transformers, blocks {'shared' if sharing else 'not shared'}"
            print(f"  {named}: {took / mine:.2f} times that, difference {error:.1e}, {after:.1e} after new weights")


if __name__ == "__main__":
    main()
