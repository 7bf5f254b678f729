# SPDX-License-Identifier: Apache-2.0
"""``verl-ext environments`` and ``verl-ext play``: what can be played here, and one episode as the model sees it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from verl_ext.common.overrides import Failure, UsageError
from verl_ext.rollout.environments.action import parse_action
from verl_ext.rollout.environments.options import DEFAULT_HISTORY, EnvironmentOptions
from verl_ext.rollout.environments.protocol import EnvironmentFault, EnvironmentUnavailable, Step
from verl_ext.rollout.environments.registry import BUILT_IN, load
from verl_ext.rollout.environments.runner import open_session
from verl_ext.rollout.environments.templates import TemplateError, load_template


def list_environments(args: argparse.Namespace) -> int:
    """List the shipped environments: here, or what is missing and the command that brings it."""
    print(f"{'name':<12}{'here':<6}")
    for name in BUILT_IN:
        try:
            module = sys.modules[load(name).__module__]
            print(f"{name:<12}{'yes':<6}{str(module.__doc__).strip().splitlines()[0]}")
        except EnvironmentUnavailable as error:
            print(f"{name:<12}{'no':<6}{str(error).partition(': ')[2] or error}")
    print("\nOne of your own: module:Class. Play one: verl-ext play NAME [--kwargs JSON] [--seed N]")
    return 0


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``play``."""
    parser.add_argument("name", help="name or import path module:Class")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment's class, a JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of the episode (default: %(default)s)")
    parser.add_argument("--template", default="default", help="prompt template (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=50, help="steps at most (default: %(default)s)")
    parser.add_argument("--history", type=int, default=DEFAULT_HISTORY, help="past steps shown (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Play an episode in the terminal. Each line typed is the model's whole answer; without tags it is the action."""
    try:
        kwargs = json.loads(args.kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"--kwargs is {args.kwargs}; give a JSON object")
        options = EnvironmentOptions(
            name=args.name,
            kwargs=kwargs,
            template=args.template,
            max_steps=args.max_steps,
            history_length=args.history,
        )
        load_template(options.template)
    except (ValueError, TemplateError) as error:
        raise UsageError(str(error)) from error
    try:
        _episode(options, args.seed)
    except (EnvironmentFault, EnvironmentUnavailable) as error:
        raise Failure(str(error)) from error
    except (EOFError, KeyboardInterrupt):
        print("\n(left)")
    return 0


def _episode(options: EnvironmentOptions, seed: int) -> None:
    template = load_template(options.template)
    session = open_session(
        str(options.name),
        options.kwargs,
        reset_timeout_s=options.reset_timeout_s,
        step_timeout_s=options.step_timeout_s,
        processes=1,
    )
    rule = options.invalid_action or getattr(load(str(options.name)), "invalid_action", "pass")
    total = 0.0
    past: list[tuple[int, str, str]] = []
    loop = asyncio.new_event_loop()  # runs between two answers only, so that Ctrl-C ends the question
    try:
        seen = loop.run_until_complete(session.reset(seed))
        task = seen.task
        for number in range(1, options.max_steps + 1):
            messages = template.messages(
                task=task,
                prompt="Play the game.",
                observation=seen.text,
                actions=seen.actions,
                history=past[max(0, len(past) - (options.history_length or 0)) :],
                step=number,
                max_steps=options.max_steps,
            )
            _show(messages)
            answer = input("your answer> ")
            tagged = f"<{options.action_tag}>{answer}</{options.action_tag}>" if "<" not in answer else answer
            action = parse_action(tagged, seen.actions, options)
            wasted = not action.valid and rule == "noop"
            spent = Step(seen, seen.noop_reward, False, {})
            step = spent if wasted else loop.run_until_complete(session.step(action.text))
            total += step.reward
            print(f"action {action.text!r}{'' if action.valid else ' (not valid)'}  reward {step.reward:g}")
            past.append((number, seen.text, action.text))
            seen = step.observation
            if step.done:
                print(f"\n{seen.text}")
                break
        won = f", success {step.info['success']}" if past and "success" in step.info else ""
        print(f"the episode is over: {number} steps, reward {total:g}{won}")
    finally:
        loop.run_until_complete(session.close())
        for ending in asyncio.all_tasks(loop):  # its process, which may have a server to take leave of
            loop.run_until_complete(ending)
        loop.close()


def _show(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        print(f"\n--- {message['role']}\n{message['content']}")
