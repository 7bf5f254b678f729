# SPDX-License-Identifier: Apache-2.0
"""Every agent loop with the tokenizers and chat templates of models that people train (``make tokenizers``).

What a loop makes of a conversation is held to the template's own rendering, in tokens: a next prompt is the tokens so
far and what the template writes after the answer, whether that was whole or cut.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import shares
from families import FAMILIES, chat_of_family, table, tokenizer_of
from loops import config_of, make_loop
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import register
from verl.tools.function_tool import function_tool
from verl.utils.tokenizer.continuous_token_wiring import _MODEL_TYPE_TO_FAMILY
from verl.workers.rollout.replica import TokenOutput

from verl_ext.cli import main
from verl_ext.integration.settings.options import OptionError
from verl_ext.rollout import multi_turn, step_wise
from verl_ext.rollout.environments import runner
from verl_ext.rollout.kernels.judge import Verdict
from verl_ext.rollout.kernels.loop import Judged, KernelLoop
from verl_ext.rollout.orchestra import agent, loop, orchestra
from verl_ext.rollout.shared import trial
from verl_ext.rollout.shared.probes import Refusal

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("fresh_fates")]

RULES, QUESTION = "Answer with a number.", "What is three and nine?"
ENTRY = {"question": QUESTION, "answer": "12", "metadata": {}}
TASK = {
    "dataset": "chain_sum",
    "config_json": json.dumps({"seed": 0, "size": 1}),
    "entry_json": json.dumps(ENTRY),
    "parser": "strict",
}
SYSTEM, USER = {"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}
CUT, WHOLE = "eleven because I think", "thirteen"


@function_tool("test_real_chats_add")
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


class Engine:
    """Answers with the tokens of the given texts in turn, and keeps the prompts."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.prompts: list[list[int]] = []

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> Any:
        ids = encode(self.tokenizer, self.texts[min(len(self.prompts), len(self.texts) - 1)])
        self.prompts.append(prompt_ids)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"global_steps": 1})


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered(name: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    """The template's own text; what it can't take is written as it should reach it."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    if name == "gemma2" and messages[0]["role"] == "system":
        first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        messages = [first, *messages[2:]]
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **family.kwargs
    )


def follows(name: str, before: list[int], answer: str, after: list[int], messages: Any, tools: Any = None) -> None:
    """Hold a next prompt to the rendering of `messages`, which are the conversation with `answer` and what followed."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    ids = before + encode(tokenizer, answer)
    assert after[: len(ids)] == ids
    tail = rendered(name, messages, tools).rpartition(answer.partition("<")[0])[2]
    closes = next((one for one in (f"{family.before_end}{family.ends}",) if answer.endswith(one)), "")
    if closes == "<|return|>":
        assert tail.startswith("<|end|>")
        tail = closes + tail.removeprefix("<|end|>")
    assert tail.startswith(closes)
    wanted = encode(tokenizer, tail.removeprefix(closes))
    if closes:  # where a text begins some tokenizers put a blank
        end = encode(tokenizer, closes)
        wanted = encode(tokenizer, tail)[len(end) :]
    assert after[len(ids) :] == wanted, (tokenizer.decode(after[len(ids) :]), tail)


def multi(name: str, texts: Sequence[str], row: Any = None, model_type: str | None = None, **options: Any) -> Any:
    tokenizer = tokenizer_of(name)
    lengths = {"prompt_length": 4096, "response_length": 256, "custom": {"multi_turn": {"max_turns": 4, **options}}}
    config = config_of(lengths, None, {})
    config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs
    engine = Engine(tokenizer, texts)

    async def run() -> Any:
        kind = model_type or FAMILIES[name].model_type
        made = make_loop(multi_turn.AGENT_NAME, config, engine, tokenizer, hf_model_type=kind)
        return await made.run({}, raw_prompt=row or [SYSTEM, USER], extra_info=TASK)

    return asyncio.run(run()), engine.prompts


def said(name: str, text: str, whole: bool) -> str:
    return text + (FAMILIES[name].before_end + FAMILIES[name].ends if whole else "")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_multi_turn_loop(name: str) -> None:
    """A cut answer, a whole one, an empty one and again a cut one."""
    texts = [CUT, said(name, WHOLE, True), said(name, "", True), "and"]
    texts = [f"</think>{text}" if chat_of_family(name).opens_thinking else text for text in texts]
    rows, prompts = multi(name, texts)
    assert len(rows) == 4 and rows[-1].extra_fields["failure"] == ""
    assert prompts[0] == encode(tokenizer_of(name), rendered(name, [SYSTEM, USER]))
    begins_turns = name == "smollm2"  # with the token that begins a text
    assert begins_turns or prompts[0].count(tokenizer_of(name).bos_token_id) <= 1
    task = multi_turn.ReasoningGymTask.from_extra_info(TASK, success_threshold=1.0)
    feedback = [task.judge(text).feedback for text in (CUT, WHOLE)]
    conversation = [SYSTEM, USER]
    for place in range(2):
        text = texts[place].removeprefix("</think>")
        plain = text.partition("<")[0]
        conversation += [{"role": "assistant", "content": plain}, {"role": "user", "content": feedback[place]}]
        before = prompts[place] + (encode(tokenizer_of(name), "</think>") if texts[place] != text else [])
        follows(name, before, text, prompts[place + 1], conversation)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_cut_behind_a_line_or_is_nothing_ends_its_turn(name: str) -> None:
    chat, tokenizer = chat_of_family(name), tokenizer_of(name)
    first, tails = chat.prompt([USER]), []
    for text in (CUT, f"{CUT}\n", f"{CUT}\n\n", f"{CUT} ", ""):
        ids = [*first, *encode(tokenizer, text)]
        after = chat.follow([USER, {"role": "assistant", "content": text}], [{"role": "user", "content": "No."}], ids)
        assert after[: len(ids)] == ids
        tails.append(tokenizer.decode(after[len(ids) :], skip_special_tokens=False).strip())
    assert tails == [tails[0]] * len(tails)


def calling(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "test_real_chats_add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


WITHOUT_TOOLS = ("llama3", "deepseekv3", "deepseek_r1", "gemma2", "gemma3", "cohere", "cohere2", "phi3", "smollm2")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_TOOLS])
def test_a_tool_in_the_multi_turn_loop(name: str) -> None:
    """What the tool says follows a whole answer and one that was cut behind its call."""
    chat, tokenizer, family = chat_of_family(name), tokenizer_of(name), FAMILIES[name]
    end = family.calls_end or family.ends
    opening = "</think>" if chat.opens_thinking else ""
    texts = [opening + calling(3, 9) + end, opening + calling(4, 9), opening + "twelve"]
    rows, prompts = multi(name, texts, tools=["test_real_chats_add"], max_turns=1)
    assert len(rows) == 3 and rows[-1].extra_fields["failure"] == ""
    schema = {"type": "function", "function": json.loads(json.dumps(add_schema()))}
    assert prompts[0] == encode(tokenizer, rendered(name, [SYSTEM, USER], [schema]))
    conversation: list[dict[str, Any]] = [SYSTEM, USER]
    for place, (b, result) in enumerate(((3, "12"), (4, "13"))):
        form = chat.calls
        function = {"name": "test_real_chats_add", "arguments": form.arguments({"a": b, "b": 979})}
        called = {"role": "assistant", "content": form.content}
        called["tool_calls"] = [{"type": "function", "id": f"call{place:05d}", "function": function}]
        conversation += [called, {"role": "tool", "content": result, "tool_call_id": f"call{place:05d}"}]
        ids = prompts[place] + encode(tokenizer, texts[place])
        assert prompts[place + 1][: len(ids)] == ids
        tail = rendered(name, conversation, [schema]).rpartition("979")[2]
        assert tail.count(end) >= 1, tail
        at = tail.index(end)
        wanted = encode(tokenizer, tail[at:])
        if place == 0:
            wanted = wanted[1:]
        elif "</tool_call>" in tail and "</tool_call>" in tokenizer.get_added_vocab():
            wanted = encode(tokenizer, "</tool_call>" + tail.partition("</tool_call>")[2])[1:]
        assert prompts[place + 1][len(ids) :] == wanted, (tokenizer.decode(prompts[place + 1][len(ids) :]), tail)


def add_schema() -> dict[str, Any]:
    number = {"type": "integer", "description": ""}
    return {
        "name": "test_real_chats_add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {**number, "description": "one number."},
                "b": {**number, "description": "the other."},
            },
            "required": ["a", "b"],
        },
    }


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_tools_that_the_template_does_not_show(name: str) -> None:
    """They are refused by name, or the prompt describes them; then what they say is carried."""
    with pytest.raises(Refusal, match="does not show the model its tools: it leaves out .*tools_in_prompt=true"):
        multi(name, [calling(3, 9)], tools=["test_real_chats_add"])
    opening = "</think>" if chat_of_family(name).opens_thinking else ""
    texts = [opening + calling(3, 979), opening + "twelve"]
    rows, prompts = multi(name, texts, tools=["test_real_chats_add"], max_turns=1, tools_in_prompt=True)
    assert len(rows) == 2 and rows[-1].extra_fields["failure"] == ""
    said = tokenizer_of(name).decode(prompts[1][len(prompts[0]) :])
    assert said.count("982") == 1


@pytest.mark.parametrize("model_type", sorted(_MODEL_TYPE_TO_FAMILY))
def test_each_of_verls_token_builders(model_type: str) -> None:
    """Which builder verl picks makes no difference to what follows a whole or a cut answer; one that wants tokens which
    the tokenizer lacks, or a processor, is not needed."""
    texts = [CUT, said("qwen2_5", WHOLE, True), "and", "and"]
    _, prompts = multi("qwen2_5", texts, model_type=model_type)
    _, plain = multi("qwen2_5", texts, model_type="llama")
    assert prompts == plain and len(prompts) == 4


def step_by_step(name: str, row: Any, template: str = "compact") -> list[list[int]]:
    """Prompts of two steps in an environment."""
    tokenizer = tokenizer_of(name)
    rollout = {"prompt_length": 4096, "response_length": 64}
    node = {
        "environment": {"name": "environment_zoo:Corridor", "template": template, "history_length": 2, "max_steps": 3}
    }
    config = config_of(rollout, None, node)
    config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs
    opening = "</think>" if chat_of_family(name).opens_thinking else ""
    engine = Engine(tokenizer, [opening + said(name, "<action>forward</action>", True), opening + CUT])

    async def run() -> Any:
        kind = FAMILIES[name].model_type
        made = make_loop(step_wise.AGENT_NAME, config, engine, tokenizer, hf_model_type=kind)
        return await made.run({}, raw_prompt=row, session_id=0, index=0)

    try:
        asyncio.run(run())
    finally:
        runner.end_all()
    return engine.prompts


@pytest.mark.parametrize("name", FAMILIES)
def test_the_step_wise_loop(name: str, tmp_path: Path) -> None:
    """Two system messages, the template's own and the data's, in parts, are one; where there is none, the user's."""
    file = tmp_path / "own.txt"
    file.write_text(
        "=== system\nWalk to the end.\n=== first\n{observation}\n=== later\n{history}\n{observation}\n"
        "=== pair\n{observation}: {action}\n"
    )
    parts = [{"type": "text", "text": RULES}]
    row = [{"role": "developer", "content": parts}, {"role": "user", "content": [{"type": "text", "text": "Play."}]}]
    prompts = step_by_step(name, row, str(file))
    assert len(prompts) >= 2
    for prompt, text in zip(prompts, ("place 0", "place 0: forward\nplace 1"), strict=False):
        asked = [{"role": "system", "content": f"{RULES}\n\nWalk to the end."}, {"role": "user", "content": text}]
        assert prompt == encode(tokenizer_of(name), rendered(name, asked)), tokenizer_of(name).decode(prompt)


@agent("thinker", role="You think.", tools=("test_real_chats_add",))
def thinker(text: str) -> str:
    """Think."""
    return text


@agent("teller", role="You tell.")
def teller(text: str) -> str:
    """Tell."""
    return text


@orchestra("test_real_chats")
async def team(task: Any, teller: Any, *, late: bool = False) -> str:
    """Two turns, with an answer between them."""
    first = await teller(task.messages)
    again = {"role": "system" if late else "user", "content": "Once more."}
    messages = [*task.messages, {"role": "assistant", "content": first.text}, again]
    return (await teller([*messages, *([{"role": "user", "content": "Now."}] if late else [])])).text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("late", [False, True])
def test_a_team(name: str, late: bool, tmp_path: Path) -> None:
    """Role and rules are one system message; a late one stands where it was said, or is the user's."""
    tokenizer, chat = tokenizer_of(name), chat_of_family(name)
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs):\n    return 1.0\n")
    rollout = {"prompt_length": 4096, "response_length": 64}
    config = config_of(rollout, str(reward), {"orchestra": {"name": "test_real_chats", "options": {"late": late}}})
    config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs
    opening = "</think>" if chat.opens_thinking else ""
    engine = Engine(tokenizer, [opening + said(name, WHOLE, True), opening + CUT])

    async def run() -> Any:
        kind = FAMILIES[name].model_type
        made = make_loop(loop.AGENT_NAME, config, engine, tokenizer, hf_model_type=kind)
        return await made.run({}, raw_prompt=[SYSTEM, USER], reward_model={"ground_truth": "12"}, data_source="toy")

    rows = asyncio.run(run())
    assert rows[-1].extra_fields["failure"] == "", rows[-1].extra_fields["failure_detail"]
    system = {"role": "system", "content": f"You tell.\n\n{RULES}"}
    assert engine.prompts[0] == encode(tokenizer, rendered(name, [system, USER]))
    again = [{"role": "user", "content": "Once more."}]
    if late:
        again = [{"role": "system" if chat.late_system else "user", "content": "Once more."}]
        again += [{"role": "user", "content": "Now."}]
        if chat.alternates and not chat.late_system:
            again = [{"role": "user", "content": "Once more.\n\nNow."}]
    conversation = [system, USER, {"role": "assistant", "content": WHOLE}, *again]
    assert engine.prompts[1] == encode(tokenizer, rendered(name, conversation)), tokenizer.decode(engine.prompts[1])


@register("test_real_chats_kernels")
class Kernels(KernelLoop):
    """The loop of kernels with a judge that says the same of each."""

    async def judge(self, task: Any, text: str) -> Any:
        self._prompt_index = task.index
        return Judged(Verdict("wrong"), 0.0, f"Not right: {len(text)}.", False)


@pytest.mark.parametrize("name", ["qwen2_5", "gptoss", "deepseekv3", "gemma2"])
def test_the_loop_of_kernels(name: str) -> None:
    """A cut answer and a whole one."""
    tokenizer = tokenizer_of(name)
    config = config_of({"prompt_length": 4096, "response_length": 64}, None, {"kernels": {"max_turns": 3}})
    opening = "</think>" if chat_of_family(name).opens_thinking else ""
    engine = Engine(tokenizer, [opening + CUT, opening + said(name, WHOLE, True), opening + CUT])

    async def run() -> Any:
        made = make_loop("test_real_chats_kernels", config, engine, tokenizer, hf_model_type=FAMILIES[name].model_type)
        return await made.run({}, raw_prompt=[SYSTEM, USER], extra_info={"task": "mul add relu", "index": 0})

    assert len(asyncio.run(run())) == 3
    conversation = [SYSTEM, USER]
    for place, text in enumerate((CUT, said(name, WHOLE, True))):
        plain = text.partition("<")[0]
        # The judge reads what comes after the thinking.
        conversation += [
            {"role": "assistant", "content": plain},
            {"role": "user", "content": f"Not right: {len(plain)}."},
        ]
        before = engine.prompts[place] + encode(tokenizer, opening)
        follows(name, before, text, engine.prompts[place + 1], conversation)


def test_an_answer_that_ends_by_another_token_of_the_model() -> None:
    """It stays, as all tokens of the model do, and the template's own end follows."""
    texts = ["eleven<|endoftext|>", "and", "and", "and"]
    _, prompts = multi("qwen2_5", texts)
    tokenizer = tokenizer_of("qwen2_5")
    assert tokenizer.decode(prompts[1]).partition("eleven")[2].startswith("<|endoftext|><|im_end|>\n<|im_start|>user\n")


# ---- the trial at launch ----


def saved(tokenizer: Any, folder: Path, template: str) -> Path:
    """A model's folder with a small tokenizer and this template, as far as the launcher reads it."""
    before, tokenizer.chat_template = tokenizer.chat_template, template
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = before
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


def launched(folder: Path, agent_loop: str, **options: Any) -> None:
    """What the launcher checks of a run."""
    own = {"multi_turn": options} if options else {}
    rollout = {"agent": {"default_agent_loop": agent_loop}, "custom": own}
    actor = {"model": {"path": str(folder)}, "rollout": rollout}
    trial.check(OmegaConf.create({"actor_rollout_ref": actor, "data": {}, "verl_ext": {}}))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_QUESTION = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 1 %}"
    "{{ raise_exception('Only one question, please.') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "agent_loop", "options", "said"),
    [
        (CHATML, "verl_ext_multi_turn", {}, ""),
        (ONE_QUESTION + CHATML, "verl_ext_step_wise", {}, ""),
        (ONE_QUESTION + CHATML, "verl_ext_multi_turn", {}, "further question after .* Only one question, please"),
        (ONE_QUESTION + CHATML, "verl_ext_kernels", {}, "further question after .* Only one question, please"),
        (CHATML.partition("{% if add")[0], "verl_ext_step_wise", {}, "opens no answer: .*im_start.*assistant"),
        (
            CHATML,
            "verl_ext_multi_turn",
            {"tools": ["add"]},
            "does not show the model its tools: .*tools_in_prompt=true",
        ),
        (CHATML, "verl_ext_multi_turn", {"tools": ["add"], "tools_in_prompt": True}, ""),
        ("{{ messages[0].missing.field }}", "verl_ext_orchestra", {}, "a question: 'dict object' has no attribute"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "verl_ext_gateway", {}, "leaves out a question or"),
        ("{{ messages[0].content }}", "single_turn_agent", {}, ""),
    ],
)
def test_a_template_that_a_loop_cannot_play_with_is_refused_before_ray(
    tokenizer: Any, tmp_path: Path, capsys: Any, template: str, agent_loop: str, options: Any, said: str
) -> None:
    """In its own words, with the remedy; `verl-ext template` says the same."""
    folder = saved(tokenizer, tmp_path, template)
    if not said:
        launched(folder, agent_loop, **options)
        return
    with pytest.raises(OptionError, match=f"the chat template of .* {agent_loop}: .*{said}"):
        launched(folder, agent_loop, **options)
    tools = ["--tools"] if options else []
    assert main(["template", str(folder), "--loop", agent_loop, *tools]) == 1
    assert re.search(said, capsys.readouterr().out.replace("\n", " "))


def test_words_that_a_tokenizer_lacks_are_not_words_that_a_template_leaves_out(tmp_path: Path) -> None:
    """A tokenizer of whole words knows neither the trial's rules nor its questions; what the template leaves out of
    those that it knows is refused all the same."""
    known = [w for one in (trial.RULES, trial.FIRST, trial.AGAIN) for w in re.findall(r"\w+|[^\w\s]+", one["content"])]

    def folder(name: str, words: list[str], template: str) -> Path:
        plain = Tokenizer(models.WordLevel({w: at for at, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="[UNK]", pad_token="[UNK]")
        return saved(made, tmp_path / name, template)

    none = ["one", "two"]
    for agent_loop in ("verl_ext_multi_turn", "verl_ext_kernels", "verl_ext_orchestra"):
        launched(folder("none", none, CHATML), agent_loop)
        launched(folder("all", list(dict.fromkeys([*none, *known])), CHATML), agent_loop)
    with pytest.raises(OptionError, match="leaves out a question or the system's rules"):
        no_rules = CHATML.replace("in messages %", "in messages if m.role == 'assistant' %")
        launched(folder("bare", list(dict.fromkeys([*none, *known])), no_rules), "verl_ext_multi_turn")


def test_the_trial_as_a_person_reads_it(tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    assert main(["template", str(saved(tokenizer, tmp_path, CHATML)), "--loop", "verl_ext_multi_turn"]) == 0
    told = capsys.readouterr().out
    cut = "What is 3 + 9?<|im_end|>\n<|im_start|>assistant\n"
    again = "<|im_end|>\n<|im_start|>user\nThat is not right. Try again.<|im_end|>\n<|im_start|>assistant\n"
    assert cut in told and again in told and "verl's QwenContinuousTokenBuilder" in told
    assert re.search(r"verl_ext_multi_turn +works", told) and "late system message   shown where it stands" in told
    assert main(["template", str(tmp_path), "--loop", "verl_ext_multiturn"]) == 2
    assert "there is no agent loop 'verl_ext_multiturn'" in capsys.readouterr().err


def test_the_table_in_the_docs() -> None:
    """Made by ``python tests/rollout/families.py``."""
    page = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
    assert table() in page.read_text(encoding="utf-8")


def test_the_table_of_what_merges() -> None:
    """Made by ``python -c "import shares; print(shares.table())"`` in this folder."""
    page = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
    assert shares.table() in page.read_text(encoding="utf-8")


def function_call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_that_a_client_sends_is_left_out(name: str) -> None:
    """A developer's rules, content in parts and none, two calls at once with arguments as JSON, a late system message,
    a user twice: all words are there, the arguments are no JSON in JSON, and BOS is there once."""
    chat, tokenizer = chat_of_family(name), tokenizer_of(name)
    calls = [
        function_call("look", json.dumps({"word": "aardvark"}), id="call_0123456789abcdef"),
        function_call("look", json.dumps({"word": "badger"}), id="call_fedcba9876543210"),
    ]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief, dear wombat."}]},
        {"role": "system", "content": "Mind the quokka."},
        {"role": "user", "content": "Which animals are there?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "It digs tunnels.", "tool_call_id": "call_0123456789abcdef"},
        {"role": "tool", "content": "It has stripes.", "tool_call_id": "call_fedcba9876543210"},
        {"role": "assistant", "content": "Two of them."},
        {"role": "system", "content": "Now mind the echidna."},
        {"role": "user", "content": "And then?"},
        {"role": "user", "content": [{"type": "text", "text": "Say it."}], "tool_calls": None},
    ]
    before = json.loads(json.dumps(messages))
    ids = chat.prompt(messages)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    words = ("dear wombat.", "quokka", "Which animals", "aardvark", "badger", "tunnels", "stripes", "Two of them.")
    for word in (*words, "echidna", "And then?", "Say it."):
        assert text.count(word) == 1, (word, text)
    assert '\\"' not in text and "None" not in text, text
    assert name == "smollm2" or tokenizer.bos_token_id is None or ids.count(tokenizer.bos_token_id) <= 1
    assert ids == chat.prompt(messages) and before == messages
    with pytest.raises(Refusal, match="block of the type 'image_url'"):
        chat.prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize("name", FAMILIES)
def test_two_calls_at_once_are_followed_by_what_both_tools_say(name: str) -> None:
    chat, tokenizer = chat_of_family(name), tokenizer_of(name)
    calls = [function_call("look", {"word": word}, id=f"call0000{n}") for n, word in enumerate(("aardvark", "badger"))]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    heard = [
        {"role": "tool", "content": "It digs tunnels.", "tool_call_id": "call00000"},
        {"role": "tool", "content": "It has stripes.", "tool_call_id": "call00001"},
    ]
    ids = chat.prompt([USER]) + encode(tokenizer, "aardvark, badger")
    after = chat.follow([USER, said], heard, ids)
    text = tokenizer.decode(after[len(ids) :], skip_special_tokens=False)
    assert after[: len(ids)] == ids and text.index("It digs tunnels.") < text.index("It has stripes.")
    assert "aardvark" not in text and "badger" not in text
