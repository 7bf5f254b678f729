# SPDX-License-Identifier: Apache-2.0
"""Inner products of the gradients of single tokens, for the last block of a Llama.

The gradient of a group of samples is a weighted sum of its tokens' gradients,

    g = 1/N sum_i sum_t A_it grad log pi(y_it),        <g, g'> = sum over tokens a, b of c_a c'_b <grad_a, grad_b>

so that the matrix of inner products of all tokens of a prompt gives lengths and variances of every estimator's gradient
exactly, without a projection. It is cheap: a token's gradient of a linear layer that only its own position reaches is
an outer product, and <d x a, e x b> = <d, e> <a, b>. Only keys and values, fed by earlier positions too, have matrices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Answers(NamedTuple):
    """n answers to one prompt of P tokens, of at most T tokens each."""

    ids: Tensor  # [n, T]
    mask: Tensor  # [n, T] bool, the end's token included
    hidden: Tensor  # [n, P + T - 1, d] input of the last block


class Products(NamedTuple):
    """Of the M model tokens of all answers, in the order of `mask.nonzero()`."""

    log_prob: Tensor  # [M]
    sum_pi_squared: Tensor  # [M]
    block: Tensor  # [M, M] inner products over the last block and the final norm
    head: Tensor  # [M, M] over the output head's matrix, as if it were not the input embedding as well


@torch.no_grad()
def sample(model: Any, prompt: Tensor, number: int, length: int, end: int, generator: torch.Generator) -> Answers:
    """Draw answers at temperature 1 from the whole vocabulary."""
    out = model(prompt[None], use_cache=True, output_hidden_states=True, logits_to_keep=1)
    cache, logits = out.past_key_values, out.logits[:, -1].expand(number, -1)
    cache.batch_repeat_interleave(number)
    hidden, ids, mask = [out.hidden_states[-2].expand(number, -1, -1)], [], []
    alive = torch.ones(number, dtype=torch.bool)
    while True:
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        ids.append(drawn.where(alive, torch.tensor(end)))
        mask.append(alive)
        alive = alive & (drawn != end)
        if len(ids) == length or not alive.any():
            return Answers(torch.stack(ids, 1), torch.stack(mask, 1), torch.cat(hidden, 1))
        out = model(ids[-1][:, None], past_key_values=cache, use_cache=True, output_hidden_states=True)
        hidden.append(out.hidden_states[-2])
        logits = out.logits[:, -1]


def products(model: Any, answers: Answers) -> Products:
    """The inner products; one backward pass gives the gradients of all tokens, since each has inputs of its own."""
    layer, norm, head = model.model.layers[-1], model.model.norm, model.lm_head.weight.detach()
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads, width = model.config.num_attention_heads, model.config.num_key_value_heads, attention.head_dim
    weight = {name: one.detach() for name, one in layer.named_parameters()}
    assert not any(name.endswith("bias") for name in weight)
    epsilon = model.config.rms_norm_eps
    owner, place = answers.mask.nonzero(as_tuple=True)
    length = answers.hidden.shape[1]
    place = place + length - answers.ids.shape[1]  # the position whose output says the token
    number, every = len(owner), torch.arange(length)

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    cos, sin = model.model.rotary_emb(answers.hidden, every[None])

    def rotated(x: Tensor, at: Tensor) -> Tensor:
        """Of x [..., heads, width], whose positions `at` broadcast against its dimensions before the heads."""
        first, second = x.chunk(2, -1)
        return x * cos[0, at][..., None, :] + torch.cat([-second, first], -1) * sin[0, at][..., None, :]

    start = unit(answers.hidden)  # [n, S, d]
    own_start = start[owner, place]
    normed = start * weight["input_layernorm.weight"]
    own = normed[owner, place]
    q = (own @ weight["self_attn.q_proj.weight"].T).requires_grad_()
    k = (normed @ weight["self_attn.k_proj.weight"].T)[owner].requires_grad_()  # [M, S, kv]: a copy for each token
    v = (normed @ weight["self_attn.v_proj.weight"].T)[owner].requires_grad_()
    query = rotated(q.view(number, kv_heads, heads // kv_heads, width).transpose(1, 2), place[:, None]).transpose(1, 2)
    key = rotated(k.view(number, length, kv_heads, width), every)
    scores = torch.einsum("mgrw,msgw->mgrs", query, key) * attention.scaling
    scores = scores.masked_fill((every > place[:, None])[:, None, None], float("-inf"))
    mixed = torch.einsum("mgrs,msgw->mgrw", scores.softmax(-1), v.view(number, length, kv_heads, width)).flatten(1)
    o = mixed @ weight["self_attn.o_proj.weight"].T
    middle = answers.hidden[owner, place] + o
    middle_unit = unit(middle)
    into = middle_unit * weight["post_attention_layernorm.weight"]
    gate, up = into @ weight["mlp.gate_proj.weight"].T, into @ weight["mlp.up_proj.weight"].T
    active = mlp.act_fn(gate) * up
    down = active @ weight["mlp.down_proj.weight"].T
    end_unit = unit(middle + down)
    end = end_unit * norm.weight.detach()
    log_pi = (end @ head.T).log_softmax(-1)
    chosen = answers.ids[answers.mask]
    log_prob = log_pi.gather(-1, chosen[:, None])[:, 0]
    dq, dk, dv, do, dinto, dgate, dup, ddown, dend = torch.autograd.grad(
        log_prob.sum(), [q, k, v, o, into, gate, up, down, end]
    )
    with torch.no_grad():
        first_norm = own_start * (dq @ weight["self_attn.q_proj.weight"])
        block = torch.zeros(number, number)
        for name, delta in (("k", dk), ("v", dv)):
            matrix = torch.bmm(delta.transpose(1, 2), start[owner])  # [M, kv, d], but for the norm's weight
            first_norm = first_norm + (matrix * weight[f"self_attn.{name}_proj.weight"]).sum(1)
            matrix = (matrix * weight["input_layernorm.weight"]).flatten(1)
            block += matrix @ matrix.T
        for delta, a in ((dq, own), (do, mixed), (dgate, into), (dup, into), (ddown, active)):
            block += (delta @ delta.T) * (a @ a.T)
        for gradient in (first_norm, dinto * middle_unit, dend * end_unit):
            block += gradient @ gradient.T
        pi = log_pi.exp()
        error = -pi
        error[torch.arange(number), chosen] += 1.0
        return Products(log_prob.detach(), pi.pow(2).sum(-1), block, (error @ error.T) * (end @ end.T))
