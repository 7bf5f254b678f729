# SPDX-License-Identifier: Apache-2.0
"""MiniGrid and BabyAI in words: the mission, what is seen as a map, each object in it, and what is carried."""

from __future__ import annotations

from typing import Any

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
TASK = (
    "You walk in a grid world and fulfil a mission. The map shows what is before you: you are ^ and look up; # wall, "
    ". nothing, ? not seen, letters are objects. left and right turn you, forward is one step, pickup and toggle (of "
    "doors, boxes) are about the object right before you, drop puts down what you carry."
)
_PLAIN = {"unseen": "?", "empty": ".", "floor": ".", "wall": "#"}


def describe(env: Any, observation: Any) -> str:
    """The text of an observation, ``{"mission", "image" [V, V, 3]}``: columns, then rows with the agent in the last."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    image = observation["image"]
    width, height = image.shape[:2]
    states = {number: name for name, number in STATE_TO_IDX.items()}
    middle, rows, objects = width // 2, [], []
    for row in range(height):
        line = ""
        for column in range(width):
            kind, colour, state = (int(value) for value in image[column, row])
            name = IDX_TO_OBJECT[kind]
            here = (column, row) == (middle, height - 1)  # the image shows what the agent carries there
            line += "^" if here else _PLAIN.get(name, name[0].upper())
            if not here and name not in _PLAIN:
                said = f"{states[state]} " if name == "door" else ""
                side = f", {abs(column - middle)} {'left' if column < middle else 'right'}" if column != middle else ""
                objects.append(f"{said}{IDX_TO_COLOR[colour]} {name}: {height - 1 - row} ahead{side}")
        rows.append(line)
    carried = env.unwrapped.carrying
    held = f"You carry a {carried.color} {carried.type}." if carried else "You carry nothing."
    return "\n".join([f"Mission: {observation['mission']}", *rows, *objects, held])
