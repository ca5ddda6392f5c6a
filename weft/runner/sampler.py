"""Sampling of the next token, for all sampled rows of a step at once.

Order: masks, penalties, bias and bans, then greedy rows take the most likely token; the others go through temperature,
min-p, top-k, top-p and draw with the row's own random number. A row's result depends only on its logits and its
parameters, not on other rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.base.plan import BANNED
from weft.kernels.interface import Operations
from weft.runner.step_sampling import Bans, Biases, Masks, Penalties, StepSampling


def sample(
    logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"], operations: Operations
) -> Int[Tensor, " rows"]:
    """Return one token per row. `inputs` are the tokens of the step. The logits are not modified."""
    logits = adjust(logits, sampling, inputs, operations)
    draws = sampling.draws
    if draws is None:
        return operations.likeliest(logits)
    if len(draws.row) == len(logits):
        return operations.draw(logits, draws)
    # Rows that draw overwrite their greedy token.
    chosen = operations.draw(logits[draws.row], draws)
    return operations.likeliest(logits).index_copy_(0, draws.row, chosen)


def adjust(
    logits: Float[Tensor, "rows vocab"], sampling: StepSampling, inputs: Int[Tensor, " tokens"], operations: Operations
) -> Float[Tensor, "rows vocab"]:
    """Return the logits after masks, penalties, biases and bans."""
    if sampling.masks or sampling.penalties or sampling.biases or sampling.bans:
        logits = logits.float()
    if sampling.masks is not None:
        logits = ban(logits, sampling.masks, operations)
    if sampling.penalties is not None:
        logits = penalise(logits, sampling.penalties, inputs)
    if sampling.biases is not None:
        logits = add_biases(logits, sampling.biases)
    if sampling.bans is not None:
        logits = ban_after(logits, sampling.bans, inputs)
    return logits


def ban(logits: Float[Tensor, "rows vocab"], masks: Masks, operations: Operations) -> Float[Tensor, "rows vocab"]:
    """Return logits with minus infinity for every token that a row's mask does not allow."""
    if len(masks.row) == len(logits):
        return operations.restrict(logits, masks.allowed)
    row = masks.row.long()
    return logits.index_copy(0, row, operations.restrict(logits[row], masks.allowed))


def penalise(
    logits: Float[Tensor, "rows vocab"], penalties: Penalties, inputs: Int[Tensor, " tokens"]
) -> Float[Tensor, "rows vocab"]:
    """Apply penalties. Repetition counts prompt and generated tokens; presence and frequency only generated ones."""
    line, token, generated = penalties.line, penalties.token, penalties.generated
    if len(penalties.input_line):
        line = torch.cat([line, penalties.input_line])
        token = torch.cat([token, inputs[penalties.input_index].to(token.dtype)])
        generated = torch.cat([generated, generated.new_ones(len(penalties.input_line))])
    times = logits.new_zeros(len(penalties.row), logits.shape[-1])
    times.index_put_((line, token), generated, accumulate=True)
    # Only tokens seen before change; those seen twice are written twice, with the same value.
    place = (penalties.row[line], token)
    own, count, factor = logits[place], times[line, token], penalties.repetition[line]
    own = torch.where(own > 0, own / factor, own * factor)
    own = own - penalties.frequency[line] * count - penalties.presence[line] * (count > 0)
    return logits.index_put(place, own)


def add_biases(logits: Float[Tensor, "rows vocab"], biases: Biases) -> Float[Tensor, "rows vocab"]:
    return logits.index_put((biases.row, biases.token), biases.value, accumulate=True)


def ban_after(
    logits: Float[Tensor, "rows vocab"], bans: Bans, inputs: Int[Tensor, " tokens"]
) -> Float[Tensor, "rows vocab"]:
    """Ban tokens that would complete a bad word, where the row's input is the word's last token but one."""
    value = torch.where(inputs[bans.input_index] == bans.input, BANNED, 0.0).to(logits.dtype)
    return logits.index_put((bans.row, bans.token), value, accumulate=True)
