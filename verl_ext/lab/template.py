# SPDX-License-Identifier: Apache-2.0
"""``verl-ext template MODEL``: a trial conversation with the model's chat template, as a person would read it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from verl_ext.common.overrides import Failure, UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("model", help="a folder with the tokenizer and config.json, or a name of the Hugging Face Hub")
    parser.add_argument("--loop", help="an agent loop, such as verl_ext_multi_turn; exit code 1 if it is refused")
    parser.add_argument("--tools", action="store_true", help="the loop of --loop shows the model tools")
    parser.add_argument("--template", type=Path, help="a file with a chat template in place of the model's own")
    parser.add_argument(
        "--kwargs",
        default="{}",
        help="JSON, as data.apply_chat_template_kwargs, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the model brings")


def run(args: argparse.Namespace) -> int:
    """Print the trial; 1 if the loop of ``--loop`` can't play with the template."""
    from verl_ext.integration.compat import registrations
    from verl_ext.rollout.shared import trial

    loops = sorted(registrations.AGENT_LOOPS)
    if args.loop is not None and args.loop not in loops:
        raise UsageError(f"there is no agent loop {args.loop!r} of verl_ext; there are: {', '.join(loops)}")
    try:
        given = json.loads(args.kwargs)
    except ValueError as error:
        raise UsageError(f"--kwargs is {args.kwargs!r}, which is no JSON: {error}") from None
    custom = None if args.template is None else args.template.read_text(encoding="utf-8")
    try:
        chat = trial.load(args.model, args.model, custom=custom, kwargs=given, trust=args.trust_remote_code, fetch=True)
    except Exception as error:
        raise Failure(f"the tokenizer of {args.model!r} cannot be loaded: {error}") from error
    if chat is None:
        raise Failure(f"{args.model!r} is neither a folder with a tokenizer_config.json nor a name of the Hub")
    builder = type(chat.builder).__name__
    print(f"{args.model}: {type(chat.tokenizer).__name__}, verl's {builder}")
    print("\n".join(trial.told(chat, loops if args.loop is None else [args.loop])))
    return int(args.loop is not None and bool(trial.refusals(chat, args.loop, args.tools)))
