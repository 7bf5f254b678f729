# SPDX-License-Identifier: Apache-2.0
"""An agent that knows nothing of verl: three tries at a question, with OpenAI's client. docs/gateway.md trains it."""

import json
import os

from openai import OpenAI


def solve(task, *, base_url, api_key, model):
    client, messages = OpenAI(base_url=base_url, api_key=api_key), list(task["messages"])
    for _ in range(3):
        reply = client.chat.completions.create(model=model, messages=messages)
        answer = reply.choices[0].message.content or ""
        if answer.strip() == task["ground_truth"]:
            return 1.0
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Wrong."}]
    return 0.0


if __name__ == "__main__":  # against any server: a task as a line of JSON on standard input
    server = {key: os.environ[f"OPENAI_{key.upper()}"] for key in ("base_url", "api_key", "model")}
    print(solve(json.loads(input()), **server))
