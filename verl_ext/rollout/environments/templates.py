# SPDX-License-Identifier: Apache-2.0
"""Prompt templates: text files with sections, which a user may copy, change and name in the configuration.

A section begins with a line ``=== name``::

    === system
    You play a game.
    === first
    {task}
    You see: {observation}
    === later
    {task}
    Before:
    {history}
    You see: {observation}
    You may say: {actions}
    === pair
    You saw: {observation}
    You said: {action}

``first`` is the user's message of a step without history, ``later`` of one with history (``first`` if it is left out),
``pair`` one past step of ``{history}``, joined by line breaks; ``next`` is the user's message after an answer in a
conversation that goes on (``history: continue``). ``system`` is optional and goes before; a system message
of the data goes before it. Names in braces are filled in; a brace of the text itself is doubled (``{{``).

``first``, ``later``, ``next`` and ``system`` may use ``{task}`` (the episode's task as the environment says it, else
the prompt's text), ``{prompt}`` (the text of the prompt in the data), ``{observation}``, ``{actions}`` (the admissible
actions joined by ", ", or "any text"), ``{history}``, ``{shown}`` (pairs in the history), ``{step}`` (from 1),
``{steps_before}`` and ``{max_steps}``; ``pair`` may use ``{observation}``, ``{action}`` and ``{number}`` (its step).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

FOLDER = Path(__file__).resolve().parent.parent / "prompts"
MESSAGE_FIELDS = tuple("task prompt observation actions history shown step steps_before max_steps".split())
PAIR_FIELDS = ("observation", "action", "number")
SECTIONS = {**dict.fromkeys(("system", "first", "later", "next"), MESSAGE_FIELDS), "pair": PAIR_FIELDS}

ANY_TEXT = "any text"


class TemplateError(ValueError):
    """A template cannot be found or used; the message names the file, the section and the name."""


@dataclass(frozen=True)
class Template:
    """A prompt template; see the module's text for its sections."""

    first: str
    later: str
    pair: str
    next: str
    system: str = ""

    def messages(
        self,
        *,
        task: str,
        prompt: str,
        observation: str,
        actions: Sequence[str] | None,
        history: Sequence[tuple[int, str, str]],
        step: int,
        max_steps: int,
        goes_on: bool = False,
    ) -> list[dict[str, str]]:
        """The chat messages of one step.

        Args:
            task: of the episode; empty: the prompt's text stands for it.
            prompt: text of the prompt in the data.
            observation: current raw observation.
            actions: admissible actions or None.
            history: past steps to show, in order: (number of the step, observation, action).
            step: number of the current step, from 1.
            max_steps: steps after which the episode ends.
            goes_on: the step's message alone, after an answer.
        """
        values = {
            "task": task or prompt,
            "prompt": prompt,
            "observation": observation,
            "actions": ANY_TEXT if actions is None else ", ".join(actions),
            "history": "\n".join(
                self.pair.format(number=number, observation=seen, action=action) for number, seen, action in history
            ),
            "shown": len(history),
            "step": step,
            "steps_before": step - 1,
            "max_steps": max_steps,
        }
        if goes_on:
            return [{"role": "user", "content": self.next.format(**values)}]
        user = (self.later if history else self.first).format(**values)
        system = [{"role": "system", "content": self.system.format(**values)}] if self.system else []
        return [*system, {"role": "user", "content": user}]


@functools.lru_cache(maxsize=16)
def load_template(name: str) -> Template:
    """Read a template.

    Args:
        name: a shipped template (a file of ``verl_ext/rollout/prompts`` without its suffix) or the path of a file.

    Raises:
        TemplateError: no such file, a section or a name in braces that is not known, or no ``first``.
    """
    shipped = {path.stem: path for path in FOLDER.glob("*.txt")}
    path = shipped.get(name, Path(name).expanduser())
    if not path.is_file():
        raise TemplateError(f"no prompt template {name!r}: give the path of a file, or one of {sorted(shipped)}")
    return parse_template(path.read_text(encoding="utf-8"), str(path))


def parse_template(text: str, where: str) -> Template:
    """A template from its text; `where` names it in errors. Raises as :func:`load_template`."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("==="):
            name = line[3:].strip()
            if name not in SECTIONS:
                raise TemplateError(f"{where}, line {number}: unknown section {name!r}; known: {', '.join(SECTIONS)}")
            if name in sections:
                raise TemplateError(f"{where}, line {number}: a second section {name!r}")
            current = sections[name] = []
        elif current is not None:
            current.append(line)
        elif line.strip():
            raise TemplateError(f"{where}, line {number}: text before the first section line (=== first)")
    bodies = {name: "\n".join(lines).strip("\n") for name, lines in sections.items()}
    for name, body in bodies.items():
        try:
            used = [field for _, field, _, _ in Formatter().parse(body) if field is not None]
        except ValueError as error:
            raise TemplateError(f"{where}, section {name}: {error}; double a brace that is meant as text") from error
        for field in used:
            if field not in SECTIONS[name]:
                known = ", ".join(SECTIONS[name])
                raise TemplateError(f"{where}, section {name}: {{{field}}} is not known there; known: {known}")
    if not bodies.get("first"):
        raise TemplateError(f"{where} has no section 'first'")
    return Template(
        first=bodies["first"],
        later=bodies.get("later") or bodies["first"],
        pair=bodies.get("pair") or "Observation {number}: {observation}\nAction {number}: {action}",
        next=bodies.get("next") or "Observation {step}: {observation}\nAdmissible actions: {actions}",
        system=bodies.get("system", ""),
    )
