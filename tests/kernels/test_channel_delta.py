"""What only the delta rule with decays by channel has. Its laws are in test_recurrent.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.kernels.channel_delta import naive_delta, random_inputs
from tests.support.kernels.operations import CPU, PLAIN
from tests.support.kernels.plans import Known, Rig
from weft.kernels.plain.channel_delta import decays_and_rates
from weft.kernels.recurrent import ChannelDeltaInputs, ChannelDeltaShape


@pytest.mark.parametrize("operations", [PLAIN, CPU], ids=["plain", "cpu"])
def test_decays_and_rates_may_be_projections(operations):
    torch.manual_seed(0)
    q, k, v, g, beta = random_inputs(20, (2, 6, 5))
    rates, bias = -torch.rand(2), torch.randn(2, 6)
    given = (q, k, v, rates[:, None] * torch.nn.functional.softplus(g + bias), beta.sigmoid())
    known = Known((q, k, v, g, beta), (naive_delta(*given)[0],), {"channel_delta": naive_delta(*given)[1]})

    def call(inputs, batch, view):
        return (batch.operations.channel_delta(ChannelDeltaInputs(*inputs, rates, bias), batch, view),)

    memory = operations.channel_delta_memory(ChannelDeltaShape(2, 6, 5, 3, 4), "float32")
    Rig(memory, [known], call, operations=operations).run([1, 5, 9])


def test_the_loop_and_the_decays_are_those_of_kimi_linear():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(0)
    q, k, v, _, strength = random_inputs(20, (2, 6, 5))
    gate = kimi.KimiLinearForgetGate(SimpleNamespace(linear_head_dim=6, linear_num_heads=2, hidden_size=7))
    gate.dt_bias.data.normal_()
    gate.A_log.data.normal_()
    hidden = torch.randn(1, 20, 7)
    with torch.no_grad():
        step = gate.f_b_proj(gate.f_a_proj(hidden))[0].view(20, 2, 6)
        rates, bias = -gate.A_log.exp().flatten(), gate.dt_bias.view(2, 6)
        g, beta = decays_and_rates(ChannelDeltaInputs(q, k, v, step, strength, rates, bias))
        torch.testing.assert_close(g, gate(hidden)[0])
    y, states = naive_delta(q, k, v, g, beta)
    batched = {"query": q, "key": k, "value": v, "g": g, "beta": beta}
    theirs, last = kimi.recurrent_kimi_delta_attention(
        **{name: value[None] for name, value in batched.items()},
        initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(y, theirs[0])
    torch.testing.assert_close(states[-1], last[0])
