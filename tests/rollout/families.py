# SPDX-License-Identifier: Apache-2.0
"""Chat templates of models that people train, with their tokenizers (``make tokenizers``).

Where a family's tokenizer is not to be had, another one carries its control tokens: what a template writes around
messages does not depend on how words are split.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tokenizers"
OWN = "own"


@dataclass(frozen=True)
class Family:
    """A template and how it is read.

    Attributes:
        title: for people.
        tokenizer: folder of it.
        template: file of trl; `OWN`: of the tokenizer's own configuration.
        model_type: as ``config.json`` says it, by which verl picks its token builder.
        ends: the token at which the model ends a turn.
        calls_end: the same after a call of a tool.
        before_end: what it writes before that.
        more: control tokens that the tokenizer lacks.
        kwargs: ``data.apply_chat_template_kwargs``.
    """

    title: str
    tokenizer: str
    template: str
    model_type: str
    ends: str
    more: tuple[str, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls_end: str = ""
    before_end: str = ""


QWEN, LLAMA, GEMMA, COHERE = "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"
DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_CALL = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
GEMMA_4 = (
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    '<|"|>',
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
)
LFM = ("<|startoftext|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
LFM_TOOL = ("<|tool_response_start|>", "<|tool_response_end|>")
FAMILIES = {
    "qwen2_5": Family("Qwen2.5", "qwen2_5", "qwen2_5", "qwen2", QWEN),
    "qwen3": Family("Qwen3, thinking", "qwen3", "qwen3", "qwen3", QWEN),
    "qwen3_off": Family(
        "Qwen3, `enable_thinking=false`", "qwen3", "qwen3", "qwen3", QWEN, (), {"enable_thinking": False}
    ),
    "qwen3_2507": Family("Qwen3-Instruct-2507", "qwen3", "qwen3_instruct_2507", "qwen3", QWEN),
    "qwen3_5": Family("Qwen3.5, thinking", "qwen3", "qwen3_5_think", "qwen3_5", QWEN),
    "qwen3_8": Family("Qwen3.8", "qwen3", "qwen3_8", "qwen3_8", QWEN),
    "llama3": Family("Llama 3", "llama3_1", "llama3", "llama", LLAMA),
    "llama3_1": Family("Llama 3.1", "llama3_1", "llama3_1", "llama", LLAMA),
    "llama3_2": Family("Llama 3.2", "llama3_1", "llama3_2", "llama", LLAMA),
    "gptoss": Family("gpt-oss", "gptoss", "gptoss", "gpt_oss", "<|return|>", calls_end="<|call|>"),
    "deepseekv3": Family("DeepSeek-V3", "deepseek_v3", "deepseekv3", "deepseek_v3", DEEPSEEK),
    "deepseek_r1": Family("DeepSeek-R1-Distill-Qwen", "deepseek_v3", "deepseek_r1_distill", "qwen2", DEEPSEEK),
    "gemma2": Family("Gemma, Gemma 2", "gemma3", "gemma", "gemma2", GEMMA),
    "gemma3": Family("Gemma 3", "gemma3", "gemma3", "gemma3_text", GEMMA),
    "gemma4": Family("Gemma 4", "gemma3", "gemma4_v5", "gemma4", "<turn|>", GEMMA_4, {}, "<|tool_response>"),
    "cohere": Family("Cohere Command, Aya", "command_r_plus", "cohere", "cohere", COHERE),
    "cohere2": Family(
        "Cohere 2",
        "command_r_plus",
        "cohere2",
        "cohere2",
        COHERE,
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        before_end="<|END_RESPONSE|>",
    ),
    "mistral": Family("Mistral Nemo", "mistral_nemo", OWN, "mistral", "</s>"),
    "phi3": Family("Phi-3", "llama2", "phi3", "phi3", "<|end|>", PHI),
    "glm4": Family("GLM-4.5", "qwen3", "glm4moe", "glm4_moe", "<|user|>", (*GLM, *GLM_CALL), {}, "<|observation|>"),
    "lfm2": Family("LFM2", "qwen3", "lfm2_v2", "lfm2", QWEN, (*LFM, *LFM_TOOL)),
    "smollm2": Family("SmolLM2", "smollm2", OWN, "llama", QWEN),
    "nemotron": Family("Nemotron 3 Nano", "qwen3", "nemotron_3_nano", "nemotron_h", QWEN),
}


@functools.cache
def _loaded(folder: str) -> tuple[Any, dict[str, Any]]:
    """A tokenizer with the control tokens of all families that read with it, and its configuration."""
    from transformers import AddedToken, PreTrainedTokenizerFast

    file = FOLDER / folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: run `make tokenizers`")
    config = json.loads(file.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
    kept = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {one: _text(config[one]) for one in kept if config.get(one)}
    logging.getLogger("transformers").setLevel(logging.ERROR)
    made = PreTrainedTokenizerFast(tokenizer_file=str(file), **special)
    more = [token for family in FAMILIES.values() if family.tokenizer == folder for token in family.more]
    made.add_special_tokens({"additional_special_tokens": [AddedToken(one, special=True) for one in more]})
    return made, config


@functools.cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer of a family, with its template."""
    family = FAMILIES[name]
    loaded, config = _loaded(family.tokenizer)
    made = copy.copy(loaded)  # they take seconds to load
    made._special_tokens_map = dict(loaded._special_tokens_map)
    made.eos_token = family.ends
    made.chat_template = config.get("chat_template")
    if family.template != OWN:
        file = FOLDER / "trl/trl/chat_templates" / f"{family.template}.jinja"
        made.chat_template = file.read_text(encoding="utf-8")
    return made


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def chat_of_family(name: str) -> Any:
    """Its `Chat`."""
    from verl_ext.rollout.shared.template import builder_of, chat_of

    family = FAMILIES[name]
    tokenizer = tokenizer_of(name)
    return chat_of(tokenizer, builder_of(tokenizer, family.model_type, chat_template_kwargs=family.kwargs))


COLUMNS = ("family", "an answer ends with", "system", "late system", "thinking", "calls of tools")
LOOPS = ("multi-turn, kernels", "step-wise", "teams", "with tools")


def table() -> str:
    """What the trial says of each family, for `docs/templates.md`."""
    from verl_ext.rollout.shared import trial

    lines = [f"| {' | '.join((*COLUMNS, *LOOPS))} |", "|---" * len((*COLUMNS, *LOOPS)) + "|"]
    for name, family in FAMILIES.items():
        chat = chat_of_family(name)
        traits = trial.traits(chat)

        def verdict(loop: str, tools: bool = False, chat: Any = chat) -> str:
            return "refused" if trial.refusals(chat, loop, tools) else "works"

        cells = [
            family.title,
            f"`{end}`" if (end := trial.ends(chat)) else "what opens the next turn",
            *(traits[one] for one in ("system message", "late system message", "thinking", "calls")),
            verdict("verl_ext_multi_turn"),
            verdict("verl_ext_step_wise"),
            verdict("verl_ext_orchestra"),
            verdict("verl_ext_multi_turn", True),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
