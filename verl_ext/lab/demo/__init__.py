# SPDX-License-Identifier: Apache-2.0
"""Models and tasks that :mod:`verl_ext.lab.demo.prepare` makes on this machine: nothing is downloaded.

``prepare_demo`` makes a small transformer, warms it up and writes its task, ``prepare_lake`` does so for an
environment, ``prepare_team`` for two agents, ``prepare_search_team`` for three and ``prepare_chain`` for long answers;
``prepare_smollm2`` turns a pretrained model that comes in a PyPI package into a model folder. All cache their result.
"""
