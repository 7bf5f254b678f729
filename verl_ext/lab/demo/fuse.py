# SPDX-License-Identifier: Apache-2.0
"""The demo's kernels: the task `fuse`, and a small model that writes its language and knows nothing of speed.

It is warmed up on made-up conversations about random chains, whatever the feedback said: most answers are lazy, in some
a kernel does half of the chain or each stage has one of its own, and stages in kernels are often the wrong ones.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.model import Codec, make_model, save_model, seeded
from verl_ext.lab.demo.recipes import FuseRecipe
from verl_ext.lab.demo.words import imitate, word_tokenizer
from verl_ext.lab.kernels import command
from verl_ext.rollout.kernels.judge import STATUSES
from verl_ext.rollout.kernels.loop import AGENT_NAME
from verl_ext.rollout.kernels.tasks import STAGES, training

#: The first is the fastest.
KINDS = [f"k{order}{width}{exact}" for order in "rc" for width in "vs" for exact in "ef"]
CHEAP = ("mul", "add", "relu", "sq")
#: Tokens of the longest answer, a part a stage, and its end.
RESPONSE_LENGTH = 22


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word of chains, programs and feedback; numbers of the feedback by their digits."""
    words = [*STAGES, "t", ";", *KINDS, *STATUSES, "right", "decoy", "cov", "x", ".", *"0123456789"]
    blanks = pre_tokenizers.WhitespaceSplit()
    numbers = pre_tokenizers.Split(Regex(r"^x(?=\d)|[\d.;]"), "isolated")
    return word_tokenizer(words, pre_tokenizers.Sequence([blanks, numbers]))


def program(chain: tuple[str, ...], recipe: FuseRecipe, rng: random.Random) -> str:
    """An answer to imitate: mostly a lazy one, where a kernel does one cheap stage and torch the rest."""
    stages, end = list(chain), len(chain)
    style = rng.choices(list(recipe.styles), weights=list(recipe.styles.values()))[0]
    if style == "lazy":
        cheap = [place for place, stage in enumerate(chain) if stage in CHEAP] or [0]
        begin = rng.choice(cheap)
        kernels = [(begin, begin + 1)]
    elif style == "half":
        middle = rng.choice([end // 2, end - end // 2])
        kernels = [rng.choice([(0, middle), (middle, end)])]
    else:
        kernels = {"torch": [], "stages": [(place, place + 1) for place in range(end)]}[style]
    parts, done = [], 0
    for begin, stop in [*kernels, (end, end)]:
        if begin > done:
            parts.append(["t", *stages[done:begin]])
        if stop > begin:
            kind = KINDS[0] if rng.random() < recipe.best_kind else rng.choice(KINDS)
            said = [rng.choice(list(STAGES)) if rng.random() < recipe.mistakes else s for s in stages[begin:stop]]
            parts.append([kind, *said])
        done = stop
    return " ; ".join(" ".join(part) for part in parts)


def conversation(codec: Codec, recipe: FuseRecipe, rng: random.Random) -> tuple[list[int], list[int]]:
    """Three answers to one chain, with feedback that has nothing to do with them; token ids, and 1 for what is learned.

    Every other chain is one of the 24 for training, so that answers to these are surer.
    """
    chain = tuple(rng.choices(list(STAGES), k=rng.randint(5, 7)))
    if rng.random() < 0.5:
        chain = rng.choice(training()).stages
    ids: list[int] = []
    mask: list[int] = []
    said = codec.user(" ".join(chain))
    for _ in range(recipe.max_turns):
        answer = codec.answer(program(chain, recipe, rng))
        ids, mask = [*ids, *said, *answer], [*mask, *[0] * len(said), *[1] * len(answer)]
        speed = f"x{rng.uniform(0, 4):.1f} cov {rng.random():.1f}"
        said = codec.feedback(rng.choice(["wrong", f"decoy {speed}", f"right {speed}", f"right {speed}"]))
    return ids, mask


def build_fuse(folder: Path, recipe: FuseRecipe, seed: int, tell: Progress) -> dict[str, Any]:
    """Make the task `fuse` and its model in a folder (``data/``, ``model/``).

    Args:
        folder: exists and is empty.
        recipe: sizes and lengths.
        seed: of weights and warm-up.
        tell: called with lines of progress.

    Returns:
        ``task``, ``agent_loop``, ``prompt_length``, ``response_length``, ``measured``.
    """
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    command.run(parser.parse_args(["data", "--out", str(folder / "data")]))
    rng = random.Random(seed)
    with seeded(seed):
        codec = Codec(train_tokenizer())
        model = make_model(codec, recipe.hidden_size, recipe.layers, recipe.heads, recipe.init_std)
        tell(f"fuse: warming up a Llama of {sum(p.numel() for p in model.parameters()):,} parameters")
        loss = imitate(model, codec, lambda: conversation(codec, recipe, rng), recipe, tell)
        longest = max(len(conversation(codec, recipe, rng)[0]) for _ in range(256))
    save_model(model, codec, folder / "model")
    return {
        "task": "fuse",
        "agent_loop": AGENT_NAME,
        "prompt_length": longest + recipe.max_turns * RESPONSE_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "measured": {"loss": round(loss, 4), "steps": recipe.warm_up_steps},
    }
