# SPDX-License-Identifier: Apache-2.0
"""A ReAct agent of LangGraph with a tool, as one writes it for any server: `pip install langgraph langchain-openai`.

Train it with `verl_ext.gateway.command=[python,langgraph_agent.py]`: the server and the key are in the environment,
the task is JSON on the standard input, and the last line of the output is the reward.
"""

import json
import os
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


task = json.load(sys.stdin)
model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools([add])

graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")

question = HumanMessage(task["messages"][-1]["content"])
answer = graph.compile().invoke({"messages": [question]}, {"recursion_limit": 8})["messages"][-1].content
print(json.dumps(float(task["ground_truth"] in answer)))
