# SPDX-License-Identifier: Apache-2.0
"""The demo's model: a tokenizer trained on the task's own words and a small Llama, warmed up by supervised learning.

The warm-up has phases, which end by a measurement. First right answers, in the first turn and after feedback, until the
model has most of the skill. Then some of the turns give up (`GIVE_UP`) instead of answering: the model takes up a bad
habit, which leaves reinforcement learning one to drop. A third phase, of the demo's own task, spreads it evenly.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.data import dataset_config, generate, write_task
from verl_ext.lab.demo.recipes import WarmupRecipe
from verl_ext.rollout.reasoning_gym_task import FEEDBACK, ReasoningGymTask

PAD = "<|endoftext|>"
#: What the model says when it gives up: a number to the verifier, and nearly always the wrong one. A token of its own,
#: so that the habit costs no skill and reinforcement learning can drop it.
GIVE_UP = "+0"
START = "<|im_start|>"
END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: Threads of the warm-up, whatever the caller's setting. The matrices are too small for more to help, and on a busy
#: machine threads that wait for one another make it many times slower.
THREADS = 1
#: Tokens that one answer may take: a sign, digits and the end token, with room for a model that rambles.
RESPONSE_LENGTH = 8
#: Questions of a dataset from which the tokenizer learns its words.
_VOCABULARY_SAMPLE = 512


def train_tokenizer(questions: Sequence[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on a task's text.

    Digits, signs, blanks before numbers and line breaks are tokens of their own; everything between them may merge, so
    the words that all questions share become one token or two.

    Args:
        questions: the task's questions.
        vocab_size: upper bound; short text gives fewer tokens.

    Returns:
        The tokenizer, with ChatML as its chat template, ``<|im_end|>`` as its end and ``<|endoftext|>`` as its pad.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n|[+\-*/=,.]| (?=[\d+\-*/=])"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    roles = ["system", "user", "assistant"]
    core.train_from_iterator(
        [*questions, *[text for text in (*FEEDBACK, *roles) for _ in range(32)]],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=8,
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.add_tokens([GIVE_UP])
    return tokenizer


class Codec:
    """Tokens of a conversation, piece by piece; the same tokens as the chat template's."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.end_id = int(tokenizer.convert_tokens_to_ids(END))
        self.pad_id = int(tokenizer.pad_token_id)
        self.encode = functools.lru_cache(maxsize=1 << 16)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def user(self, text: str) -> list[int]:
        """A user's message and the opening of the answer."""
        opening, closing = self.encode(f"{START}user\n"), self.encode(f"{END}\n{START}assistant\n")
        return [*opening, *self.encode(text), *closing]

    def answer(self, text: str) -> list[int]:
        """The model's own tokens of an answer."""
        return [*self.encode(text), self.end_id]

    def feedback(self, text: str) -> list[int]:
        """What follows the end token of an answer: the feedback and the opening of the next answer."""
        return [*self.encode("\n"), *self.user(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True)
class Success:
    """A measurement of the model on questions."""

    first_turn: float  # share of questions answered right at once
    any_turn: float  # within the turns allowed
    valid: float  # share of answers that could be parsed


@torch.no_grad()
def sample(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    codec: Codec,
    *,
    generator: torch.Generator | None,
    max_new_tokens: int = RESPONSE_LENGTH,
) -> list[list[int]]:
    """Generate one response a prompt at temperature 1, or greedily without a generator.

    Args:
        prompts: token ids, of any lengths.
        generator: of the sampling.
        max_new_tokens: longest response.

    Returns:
        Token ids of each response, its end token included if it was written.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[codec.pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, done = None, torch.zeros(len(prompts), dtype=torch.bool)
    columns: list[torch.Tensor] = []
    for _ in range(max_new_tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1]
        if generator is None:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        columns.append(torch.where(done, torch.full_like(token, -1), token))
        done = done | (token == codec.end_id)
        if bool(done.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], dim=1)
    return [[t for t in row if t >= 0] for row in torch.stack(columns, dim=1).tolist()]


def measure(
    model: LlamaForCausalLM, codec: Codec, tasks: Sequence[ReasoningGymTask], max_turns: int, seed: int | None
) -> Success:
    """Play one conversation a task and count.

    Args:
        tasks: the questions with their verifiers.
        max_turns: answers a conversation.
        seed: of the sampling at temperature 1; None: greedy.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    talks = [codec.user(task.question) for task in tasks]
    alive = list(range(len(tasks)))
    first = solved = valid = answers = 0
    for turn in range(max_turns):
        responses = sample(model, [talks[i] for i in alive], codec, generator=generator)
        rest = []
        for i, response in zip(alive, responses, strict=True):
            verdict = tasks[i].judge(codec.decode(response))
            answers += 1
            valid += verdict.parsed is not None
            if verdict.solved:
                solved += 1
                first += turn == 0
                continue
            closed = response if response[-1] == codec.end_id else [*response, codec.end_id]
            talks[i] = [*talks[i], *closed, *codec.feedback(verdict.feedback)]
            rest.append(i)
        alive = rest
        if not alive:
            break
    return Success(first / len(tasks), solved / len(tasks), valid / answers)


def conversation(task: ReasoningGymTask, codec: Codec, given_up: int, text: str) -> tuple[list[int], list[int]]:
    """One answer to imitate, after some turns that gave up and heard the verifier's feedback.

    Args:
        task: a question with a whole number as its answer.
        given_up: turns before this one; none if giving up happens to be right.
        text: of the answer.

    Returns:
        Token ids, and 1 for the tokens of the answer and for the end of one that gives up, 0 elsewhere.
    """
    ids, verdict = codec.user(task.question), task.judge(GIVE_UP)
    mask = [0] * len(ids)
    for _ in range(0 if verdict.solved else given_up):
        feedback = codec.feedback(verdict.feedback)
        ids, mask = [*ids, *codec.answer(GIVE_UP), *feedback], [*mask, 0, 1, *[0] * len(feedback)]
    answer = codec.answer(text)
    return [*ids, *answer], [*mask, *[1] * len(answer)]


def sequence_loss(model: LlamaForCausalLM, batch: Sequence[tuple[list[int], list[int]]], pad_id: int) -> torch.Tensor:
    """Mean negative log-likelihood of the marked tokens."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row, _ in batch])
    mask = torch.tensor([row + [0] * (width - len(row)) for _, row in batch], dtype=torch.bool)
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    chosen = mask[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[chosen]), ids[:, 1:][chosen])


class _Lessons:
    """The two lessons of a warm-up: right answers, then the habit of giving up."""

    def __init__(
        self, model: LlamaForCausalLM, codec: Codec, entries: Sequence[dict[str, Any]], recipe: WarmupRecipe, seed: int
    ) -> None:
        self.model, self.codec, self.recipe = model, codec, recipe
        self.rng = random.Random(seed)
        config_json = dataset_config(recipe.config, seed, 1)
        self.tasks = [ReasoningGymTask(recipe.dataset, config_json, entry) for entry in entries]
        self.probe = self.rng.sample(self.tasks, min(recipe.eval_size, len(self.tasks)))
        self.parameters = list(model.parameters())
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.parameters if not any(p is matrix for matrix in matrices)]
        self.muon = torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=0.0)
        self.adam = torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        # Muon learns the skill in about half of AdamW's steps. The habit is the row of one token: the skill stays.
        self.embedding, self.habit_row = model.get_input_embeddings().weight, codec.encode(GIVE_UP)[0]
        self.habit_only = torch.optim.AdamW(
            [self.embedding], lr=recipe.habit_learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.even = torch.optim.AdamW(
            self.parameters, lr=recipe.even_learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    def step(self, rates: dict[torch.optim.Optimizer, float], give_up_share: float = 0.0) -> float:
        """One update of the mean loss over giving up and answering, without the noise of drawing one of them."""
        model, codec, turns = self.model, self.codec, self.recipe.max_turns
        tasks = self.rng.choices(self.tasks, k=self.recipe.batch_size)
        talks = [(task, self.rng.randrange(turns)) for task in tasks]
        answers = [conversation(task, codec, turn, str(task.entry["answer"])) for task, turn in talks]
        loss = (1 - give_up_share) * sequence_loss(model, answers, codec.pad_id)
        if give_up_share:
            habit = [conversation(task, codec, turn, GIVE_UP) for task, turn in talks]
            loss = loss + give_up_share * sequence_loss(model, habit, codec.pad_id)
        model.zero_grad()
        loss.backward()
        if self.habit_only in rates:
            self.embedding.grad[torch.arange(len(self.embedding)) != self.habit_row] = 0.0
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, rate in rates.items():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        return float(loss.detach())

    def greedy_success(self) -> float:
        return measure(self.model, self.codec, self.probe, 1, None).first_turn

    def teach_answers(self, tell: Progress) -> int:
        """Right answers, until enough are; the number of steps."""
        recipe, steps = self.recipe, 0
        for steps in range(1, recipe.skill_steps + 1):
            decay = 0.1 + 0.45 * (1 + math.cos(math.pi * steps / recipe.skill_steps))
            scale = min(1.0, steps / 10) * decay
            loss = self.step({self.muon: recipe.matrix_learning_rate * scale, self.adam: recipe.learning_rate * scale})
            if steps % recipe.eval_every == 0:
                greedy = self.greedy_success()
                tell(f"  warm-up, right answers: step {steps}, loss {loss:.3f}, greedy success {greedy:.2f}")
                if recipe.skill_target is not None and greedy >= recipe.skill_target:
                    break
        return steps

    def even_out(self) -> float:
        """A few steps with all parameters, after which the habit is the same in each turn; the last loss."""
        recipe, loss = self.recipe, math.nan
        for steps in range(1, recipe.even_steps + 1):
            scale = min(1.0, steps / 5) * (1 - steps / (recipe.even_steps + 1))
            loss = self.step({self.even: recipe.even_learning_rate * scale}, recipe.give_up_share)
        return loss


def warm_up(
    model: LlamaForCausalLM,
    codec: Codec,
    entries: Sequence[dict[str, Any]],
    recipe: WarmupRecipe,
    seed: int,
    tell: Progress,
) -> dict[str, float | int]:
    """Supervised warm-up to a measured first-turn success within ``recipe.success_range``.

    Args:
        model: trained in place.
        entries: training questions of the task.
        tell: called with a line at each measurement.

    Returns:
        What was measured at its end: first-turn and any-turn success, share of valid answers, greedy success, steps.

    Raises:
        RuntimeError: the range was not reached within the recipe's steps.
    """
    lessons = _Lessons(model, codec, entries, recipe, seed)
    skill_steps = lessons.teach_answers(tell)
    low, high = recipe.success_range
    success = Success(0.0, 0.0, 0.0)
    for steps in range(1, recipe.max_habit_steps + 1):
        scale = min(1.0, steps / 5) * max(0.2, 1 - steps / (recipe.habit_steps + 1))
        loss = lessons.step({lessons.habit_only: recipe.habit_learning_rate * scale}, recipe.give_up_share)
        if steps < recipe.habit_steps or steps % recipe.eval_every:
            continue
        loss = lessons.even_out() if recipe.even_steps else loss
        success = measure(model, codec, lessons.probe, recipe.max_turns, seed)
        tell(
            f"  warm-up, giving up: step {steps}, loss {loss:.3f}, "
            f"success {success.first_turn:.2f} in the first turn, {success.any_turn:.2f} within "
            f"{recipe.max_turns}, valid answers {success.valid:.2f}"
        )
        if low <= success.first_turn <= high and success.valid >= recipe.valid_target:
            return {
                "first_turn_success": round(success.first_turn, 4),
                "success": round(success.any_turn, 4),
                "valid_answers": round(success.valid, 4),
                "greedy_first_turn_success": round(lessons.greedy_success(), 4),
                "steps": skill_steps + steps,
            }
    raise RuntimeError(
        f"the warm-up ended with a first-turn success of {success.first_turn:.2f} and {success.valid:.2f} valid "
        f"answers after {recipe.max_habit_steps} steps of giving up; wanted {low} to {high} and at least "
        f"{recipe.valid_target}. Another seed, or more skill_steps in the recipe, may reach it."
    )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Numbers that depend on the seed alone: torch's generator begins with it, with a fixed number of threads.

    Both are as before afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def make_model(
    codec: Codec, hidden_size: int, layers: int, heads: int, init_std: float, max_tokens: int = 512
) -> LlamaForCausalLM:
    """An untrained Llama for a tokenizer, its weights drawn from torch's global generator."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(codec.tokenizer),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=max_tokens,
            initializer_range=init_std,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=codec.end_id,
            pad_token_id=codec.pad_id,
            attn_implementation="sdpa",
        )
    )


def save_model(model: LlamaForCausalLM, codec: Codec, target: Path) -> None:
    """Write a model folder: weights, tokenizer, and sampling at temperature 1 without truncation."""
    model.generation_config = GenerationConfig(
        eos_token_id=codec.end_id, pad_token_id=codec.pad_id, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    model.save_pretrained(target)
    codec.tokenizer.save_pretrained(target)


def build_demo(folder: Path, recipe: WarmupRecipe, seed: int, tell: Progress) -> dict[str, Any]:
    """Make the demo's task and model; a :data:`~verl_ext.lab.demo.assets.Build`."""
    tell(f"demo: writing the task ({recipe.dataset} of reasoning-gym)")
    write_task(
        folder / "data",
        recipe.dataset,
        recipe.config,
        train_size=recipe.train_size,
        val_size=recipe.val_size,
        seed=seed,
        split=recipe.held_out,
    )
    side = False if recipe.held_out else None
    entries = generate(recipe.dataset, recipe.config, 8192, seed=1_000_003 * (2 * seed + 1) + 500_009, held_out=side)

    with seeded(seed):
        tokenizer = train_tokenizer([entry["question"] for entry in entries[:_VOCABULARY_SAMPLE]])
        codec = Codec(tokenizer)
        model = make_model(codec, recipe.hidden_size, recipe.layers, recipe.heads, recipe.init_std)
        tell(f"demo: warming up a Llama of {sum(p.numel() for p in model.parameters()):,} parameters")
        measured = warm_up(model, codec, entries, recipe, seed, tell)

    save_model(model, codec, folder / "model")
    longest = max(len(codec.user(entry["question"])) for entry in entries)
    feedback = max(len(codec.feedback(text)) for text in FEEDBACK)
    return {
        "task": recipe.dataset,
        "prompt_length": longest + (recipe.max_turns - 1) * (RESPONSE_LENGTH + 1 + feedback),
        "response_length": RESPONSE_LENGTH,
        "measured": measured,
    }
