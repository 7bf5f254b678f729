# SPDX-License-Identifier: Apache-2.0
"""A trial conversation with a model's chat template: held before Ray starts, and printed by ``verl-ext template``.

Rules of the system, a question, an answer that is cut and one that is whole, a call of a tool and what the tool says, a
further question. What an agent loop needs and the template does not take is refused in the template's own words.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.integration.compat import registrations, verl_api
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, select
from verl_ext.rollout.shared.probes import MARK, TOOL, CallForm, Refusal, called, heard
from verl_ext.rollout.shared.template import TOOLS_REMEDY, Chat, builder_of, chat_of

logger = logging.getLogger(__name__)

RULES = {"role": "system", "content": "Answer with a number."}
FIRST = {"role": "user", "content": "What is 3 + 9?"}
AGAIN = {"role": "user", "content": "That is not right. Try again."}
ANSWER, CUT = "It is 11.", "It is 11, because"
REMEDY = "Set actor_rollout_ref.model.custom_chat_template to one that does, or use another model."
#: Loops of ours in which a conversation goes on after an answer.
GOING_ON = ("verl_ext_multi_turn", "verl_ext_kernels", "verl_ext_orchestra", "verl_ext_gateway")
WITH_TOOLS = ("verl_ext_multi_turn", "verl_ext_orchestra", "verl_ext_gateway")


@dataclass(frozen=True)
class Scene:
    """One step of the trial.

    Attributes:
        title: what happens.
        text: the prompt, or what is added to it, with control tokens as they are.
        problem: why there is none.
    """

    title: str
    text: str
    problem: str = ""


def scenes(chat: Chat) -> list[Scene]:
    """The trial, step by step."""
    made = [_scene(chat, "the first prompt", lambda: chat.prompt([RULES, FIRST]))]
    for title, text in (("an answer that was cut", CUT), ("a whole answer", ANSWER + ends(chat))):
        told = f"{title}, {text!r}, and a further question: what is added to its tokens"
        said = {"role": "assistant", "content": text}
        made.append(_scene(chat, told, functools.partial(_after, chat, text, said, AGAIN)))
    if not chat.schemas:
        made.append(_scene(chat, "a prompt with a tool", lambda: chat.prompt([FIRST], [TOOL])))
    if chat.calls is not None and not chat.tools:
        call, asked, said = _call(chat, chat.calls), called(chat.calls, {"word": "twelve"}), heard(content="a number")
        told = f"a call of a tool, {call!r}, and what it says: what is added to its tokens"
        made.append(_scene(chat, told, functools.partial(_after, chat, call, asked, said)))
    return made


def _scene(chat: Chat, title: str, make: Callable[[], list[int]]) -> Scene:
    try:
        return Scene(title, str(chat.tokenizer.decode(make(), skip_special_tokens=False)))
    except Refusal as error:
        return Scene(title, "", str(error))


def _after(chat: Chat, text: str, said: Mapping[str, Any], *new: Mapping[str, Any]) -> list[int]:
    """What follows the tokens of an answer in the next prompt. Raises Refusal."""
    ids = [*chat.prompt([RULES, FIRST]), *chat.tokenizer.encode(text, add_special_tokens=False)]
    return chat.follow([RULES, FIRST, said], new, ids)[len(ids) :]


def ends(chat: Chat) -> str:
    """What a model is taken to write at the end of an answer: the control token that closes its turn."""
    found = ""
    try:
        text = chat.text([FIRST, {"role": "assistant", "content": MARK}, AGAIN])
    except Refusal:
        return found
    for token in chat._ids(text.rpartition(MARK)[2]):
        word = str(chat.tokenizer.decode([token], skip_special_tokens=False))
        if not word.strip() and not found:
            continue  # Llama 2 has a blank before it, DeepSeek Coder a line
        if token not in chat.special or found:
            break
        found += word
    return found


def _call(chat: Chat, form: CallForm) -> str:
    """A call as the template writes it, for an answer of the model."""
    try:
        opened = chat.text([FIRST])
        text = chat.text([FIRST, called(form, {"word": "twelve"})], ask=False)
    except Refusal:
        return ""
    same = 0
    while same < min(len(opened), len(text)) and opened[same] == text[same]:
        same += 1
    return text[same:].rstrip()


def traits(chat: Chat) -> dict[str, str]:
    """What the template makes of messages, in a few words each."""
    late = {"place": "shown where it stands", "front": "shown at the front", "": "becomes the user's"}
    form = chat.calls
    calls = "not shown; they become words of the answer"
    if form is not None:
        calls = f"arguments as {'JSON' if form.as_json else 'an object'}" + (", ids of nine signs" if chat.nine else "")
        calls += "" if chat.parallel else ", one in a message"
        calls += "" if chat.beside else "; words beside them are left out" if chat.calls_beside else ", without words"
    return {
        "system message": "shown" if chat.system else "becomes the user's",
        "late system message": late[chat.late_system],
        "role developer": "shown as such" if chat.developer else "becomes system",
        "users in a row": "joined" if chat.alternates else "taken",
        "tools": "not shown" if chat.schemas else "shown",
        "calls": calls,
        "what tools say": "becomes the user's" if chat.tools else "shown",
        "thinking": "opened by the prompt" if chat.opens_thinking else "up to the model",
    }


def refusals(chat: Chat, loop: str, tools: bool = False) -> list[str]:
    """Why a loop of ours can't play with this template; empty if it can.

    Args:
        chat: of the model.
        loop: its name.
        tools: whether it shows the model tools.
    """
    if not chat.own:
        try:
            chat.builder.build_initial_tokens([FIRST])
        except Exception as error:
            return [f"the tokenizer has no chat template ({type(error).__name__}). {REMEDY}"]
        return []
    found = []
    try:
        chat.prompt([RULES, FIRST])
        if _left_out(chat, [RULES, FIRST]):
            found.append(f"it leaves out a question or the system's rules. {REMEDY}")
    except Refusal as error:
        found.append(f"it does not take rules of the system and a question: {error}. {REMEDY}")
    if chat.unopened:
        found.append(f"it opens no answer: add_generation_prompt adds nothing, and {chat.unopened!r} is due. {REMEDY}")
    if loop in GOING_ON and not found:
        found += [
            f"it does not take a further question after {said}: {problem}. {REMEDY}"
            for said, text in (("an answer that was cut", CUT), ("an answer", ANSWER + ends(chat)))
            if (problem := _goes_on(chat, text))
        ]
    if tools and chat.schemas:
        found.append(f"it does not show the model its tools: {chat.schemas}. {TOOLS_REMEDY}")
    return found


def _goes_on(chat: Chat, text: str) -> str:
    """Why there is no next prompt after an answer."""
    said = {"role": "assistant", "content": text}
    try:
        _after(chat, text, said, AGAIN)
        return "it leaves it out" if _left_out(chat, [FIRST, {**said, "content": ANSWER}, AGAIN]) else ""
    except Refusal as error:
        return str(error)


def _left_out(chat: Chat, messages: list[dict[str, Any]]) -> bool:
    """Whether the template's text lacks the first or the last of these messages. Tokens would not tell: a small
    tokenizer may lack the words. Raises Refusal."""
    text = chat.text(chat.fit(messages))
    return any(one["content"] not in text for one in (messages[0], messages[-1]))


# ---- at launch ----


def check(config: Any) -> None:
    """Hold the trial for the loops of ours that the run names, with each model whose files are on this machine.

    Raises OptionError: a chat template does not take what a loop needs.
    """
    named = verl_api.loops_named(config)
    if named is None:
        named = {str((config.actor_rollout_ref.rollout.get("agent") or {}).get("default_agent_loop"))}
    loops = sorted(named & set(registrations.AGENT_LOOPS))
    if not loops:
        return
    wholes = [config, *(model.config(config) for model in model_options.of(config))]
    for whole in wholes:
        model = whole.actor_rollout_ref.model
        try:
            chat = load(
                str(model.get("tokenizer_path") or model.path),
                str(model.get("hf_config_path") or model.path),
                custom=model.get("custom_chat_template"),
                kwargs=config.data.get("apply_chat_template_kwargs") or {},
                trust=bool(model.get("trust_remote_code")),
            )
        except Exception as error:  # verl says what is wrong with a model
            logger.warning("no trial conversation with %s: %s: %s", model.path, type(error).__name__, error)
            continue
        for loop in loops if chat is not None else ():
            assert chat is not None
            if problems := refusals(chat, loop, with_tools(config, loop)):
                raise OptionError(
                    f"the chat template of {model.path} does not go with the agent loop {loop}: "
                    f"{' '.join(problems)} `verl-ext template {model.path}` shows what it makes of a conversation."
                )


def with_tools(config: Any, loop: str) -> bool:
    """Whether the loop is known to show the model tools."""
    if loop == "verl_ext_multi_turn":
        node: Any = select(select(config.actor_rollout_ref.rollout, "custom"), "multi_turn")
        named = select(node, "tools")
    elif loop == "verl_ext_orchestra":
        node = select(select(config, "verl_ext"), "orchestra")
        named = [one for each in (select(node, "agents") or {}).values() for one in select(each, "tools") or ()]
    else:
        return False
    return bool(named) and not select(node, "tools_in_prompt")


def load(
    path: str, config_path: str, *, custom: Any = None, kwargs: Any = None, trust: bool = False, fetch: bool = False
) -> Chat | None:
    """The `Chat` of a model.

    Args:
        path: of its tokenizer: a folder, or a name of the Hugging Face Hub.
        config_path: of its ``config.json``, likewise.
        custom: a chat template in place of its own.
        kwargs: of the chat template.
        trust: run code of the model's.
        fetch: a name may be looked up on the network; otherwise what is not on this machine is left out, as None.
    """
    from huggingface_hub import snapshot_download
    from omegaconf import OmegaConf
    from verl.utils import hf_tokenizer

    folders = []
    for one in (path, config_path):
        folder = Path(one).expanduser()
        if not folder.is_dir():
            if "://" in one or one.count("/") != 1:
                return None
            try:
                patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
                folder = Path(snapshot_download(one, local_files_only=not fetch, allow_patterns=patterns))
            except Exception as error:
                if fetch:
                    raise
                logger.debug("no trial conversation with %s: %s", one, error)
                return None
        folders.append(folder)
    if not (folders[0] / "tokenizer_config.json").is_file():
        return None
    tokenizer = hf_tokenizer(str(folders[0]), trust_remote_code=trust)
    if custom is not None:
        tokenizer.chat_template = custom
    file = folders[1] / "config.json"
    kind = json.loads(file.read_text(encoding="utf-8")).get("model_type") if file.is_file() else None
    given = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else dict(kwargs or {})
    return chat_of(tokenizer, builder_of(tokenizer, kind, chat_template_kwargs=given))


def told(chat: Chat, loops: Sequence[str]) -> list[str]:
    """The trial as a person would read it, in lines."""
    lines = []
    for scene in scenes(chat):
        lines += ["", f"--- {scene.title} ---", scene.text or f"refused: {scene.problem}"]
    lines += ["", "--- what it makes of messages ---"]
    lines += [f"{name:22}{value}" for name, value in traits(chat).items()]
    lines += ["", "--- agent loops ---"]
    for loop in loops:
        for tools in (False, True) if loop in WITH_TOOLS else (False,):
            problems = refusals(chat, loop, tools)
            lines.append(f"{loop + (' with tools' if tools else ''):34}{' '.join(problems) or 'works'}")
    return lines
