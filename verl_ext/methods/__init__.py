# SPDX-License-Identifier: Apache-2.0
"""The mathematics of the methods: pure functions of torch tensors and numpy columns.

Nothing here knows verl, Ray or a config object, so every function can be called from a notebook or a test. Each
method has a module of its own over the shared parts `groups` (group keys and float64 segment statistics), `returns`
(discounted turn returns, token reward-to-go), `rows` (input checks, row scores, broadcasting) and `options` (what a
signature says of a method's options). What needs the whole vocabulary (`dvp`, `vocabulary`) stands on `logits_pass`,
which computes by plain torch (`logits_torch`) or by kernels for CUDA tensors (`logits_triton`).
"""
