# SPDX-License-Identifier: Apache-2.0
"""An agent that knows nothing of verl: three tries at a question, with OpenAI's client. docs/gateway.md trains it."""

from openai import OpenAI


def solve(task, *, base_url, api_key, model):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    for _ in range(3):
        reply = client.chat.completions.create(model=model, messages=messages)
        answer = reply.choices[0].message.content or ""
        if answer.strip() == task["ground_truth"]:
            return 1.0
        feedback = {"role": "user", "content": "Wrong."}
        messages += [{"role": "assistant", "content": answer}, feedback]
    return 0.0


if (
    __name__ == "__main__"
):  # the same against any server: echo '{"messages": ..., "ground_truth": ...}' | python agent.py
    import json
    import os
    import sys

    key, model = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"]
    print(json.dumps(solve(json.load(sys.stdin), base_url=os.environ["OPENAI_BASE_URL"], api_key=key, model=model)))
