"""`--quantize fp8`: a 16-bit checkpoint is quantised while it loads, as a public tool would have written it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.quantised import FP8, Written, by_block, by_channel, quantise
from weft import LLM
from weft.base.errors import InvalidOption
from weft.kernels.formats.fp8 import Fp8
from weft.kernels.formats.quantising import AS_STORED, Quantising
from weft.kernels.formats.stored import DENSE
from weft.models.model import CausalModel, MatrixLayer
from weft.models.sharding import Shard
from weft.models.weights import load_model

BLOCKS = Quantising("fp8")
PROMPT = 90


def as_tools_do(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write blocks of 128 x 128, or a scale for each output where outputs are no multiple of it."""
    return by_channel(matrix) if matrix.shape[0] % 128 else by_block(128, 128)(matrix)


TOOL = Written({"quant_method": "fp8", "weight_block_size": [128, 128]}, as_tools_do)
WIDER = {"intermediate_size": 384, "hidden_size": 192}
MODELS = {
    "dense, with blocks": FAMILIES["qwen3_5"].variant(**WIDER),
    "experts": FAMILIES["qwen3_5_moe"],
    "projections of several layers": FAMILIES["qwen3_next"],
    "mamba": FAMILIES["nemotron_h"],
    "a short convolution": FAMILIES["lfm2"],
    "routers after the embedding": FAMILIES["lfm2_moe"],
    "decays by channel": FAMILIES["kimi_linear"],
    "factors folded into weights": FAMILIES["falcon_h1"],
    "plain attention": FAMILIES["llama"].variant(**WIDER),
}


def load(folder: Path, quantising: Quantising = AS_STORED, **more) -> CausalModel:
    more = {"operations": PLAIN, "progress": False} | more
    return load_model(folder, more.pop("dtype", torch.float32), quantising=quantising, **more)[0]


def answer(model: CausalModel, operations=PLAIN) -> Tensor:
    runner = DirectRunner(model, operations=operations)
    [logits] = runner.step([(runner.open(random_tokens(PROMPT, seed=1)), PROMPT)])
    return logits


def formats_of(model: CausalModel) -> dict[str, set[str]]:
    """Return the formats of all matrices, by the path of their layer."""
    layers = {path: each for path, each in model.named_modules() if isinstance(each, MatrixLayer)}
    return {
        path: {type(part.format).__name__ for name in each.matrix_names() for part in each.parts_of(name)}
        for path, each in layers.items()
    }


def keep(folder: Path, target: Path, part: str) -> None:
    """Put tensors of a checkpoint back into another one."""
    given, tensors = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    save_file({name: given[name] if part in name else each for name, each in tensors.items()},
              target / "model.safetensors")  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_what_a_quantised_checkpoint_of_it_says(kind, tmp_path):
    folder = Oracle(MODELS[kind]).save(tmp_path / "given")
    _, wide = quantise(folder, tmp_path, TOOL)
    # What expands latents computes with plain numbers.
    keep(folder, wide, "kv_b_proj")
    wanted = answer(load(wide))
    found = load(folder, BLOCKS)
    torch.testing.assert_close(answer(found), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer(load(folder, BLOCKS, operations=CPU), CPU), wanted, rtol=1e-4, atol=1e-4)
    # The numbers did change: the comparison above cannot pass without quantising.
    assert float((answer(load(folder)) - wanted).abs().max()) > 1e-3
    kinds = formats_of(found)
    assert {"Fp8"} in kinds.values()
    assert kinds["model.embed_tokens"] == {"Dense"}
    assert all("Fp8" not in own for path, own in kinds.items() if path.endswith((".gate", "lm_head")))


def grouped(bits: int, group: int | None):
    """Return how public tools round to symmetric integers, each group cut off where its error is least."""

    def write(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        half, size = 2 ** (bits - 1), group or matrix.shape[1]
        decoded = torch.empty(matrix.shape)
        for first in range(0, matrix.shape[1], size):
            own, best = matrix[:, first : first + size], torch.full(matrix.shape[:1], torch.inf)
            for step in range(8):
                range_of = 2 * own.abs().amax(1) * ((1 - 0.05 * step) / (2 * half - 1))
                scale = range_of.bfloat16().float()[:, None]
                numbers = (own / scale).round().clamp(-half, half - 1) * scale
                error = (numbers - own).square().sum(1)
                better = error < best
                decoded[better, first : first + size], best = numbers[better], torch.minimum(best, error)
        return {}, decoded

    return write


def mxfp4(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    if matrix.shape[1] % 32:
        return {}, matrix
    blocks = matrix.unflatten(-1, (-1, 32))
    decoded, best = torch.empty(blocks.shape), torch.full(blocks.shape[:-1], torch.inf)
    for less in (0, 1):
        power = ((blocks.abs().amax(-1) / 6).log2().ceil() - less).exp2()[..., None]
        numbers = NUMBERS[((blocks / power)[..., None] - NUMBERS).abs().argmin(-1)] * power
        error = (numbers - blocks).square().sum(-1)
        better = error < best
        decoded[better], best = numbers[better], torch.minimum(best, error)
    return {}, decoded.flatten(-2)


NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
ROUNDED = {"int8": grouped(8, None), "int4": grouped(4, 128), "mxfp4": mxfp4}


@pytest.mark.parametrize("kind", ["dense, with blocks", "experts", "mamba", "a short convolution"])
@pytest.mark.parametrize("to", ROUNDED)
def test_few_bits_are_what_rounding_with_a_search_for_the_range_gives(to, kind, tmp_path):
    folder = Oracle(MODELS[kind]).save(tmp_path / "given")
    _, wide = quantise(folder, tmp_path, Written({}, ROUNDED[to]))
    wanted, plain = answer(load(wide)), answer(load(folder))
    for operations in (PLAIN, CPU):
        torch.testing.assert_close(
            answer(load(folder, Quantising(to), operations=operations), operations), wanted, rtol=1e-3, atol=1e-3
        )
    # Four bits are further from the given numbers than eight, and all are near them.
    assert (1e-4 if to == "int8" else 1e-2) < float((wanted - plain).norm() / plain.norm()) < 0.7


def test_fused_experts_are_quantised_one_by_one(tmp_path):
    """gpt-oss stores all experts as one tensor [experts, inputs, outputs], gates and gated values in turns."""
    folder = Oracle(FAMILIES["gpt_oss"]).save(tmp_path / "given")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 3:
            tensors[name] = torch.stack([as_tools_do(each.T.contiguous())[1].T for each in tensor]).contiguous()
        elif name.endswith("_proj.weight"):
            tensors[name] = as_tools_do(tensor)[1]
    wide = tmp_path / "wide"
    wide.mkdir()
    save_file(tensors, wide / "model.safetensors")
    (wide / "config.json").write_text((folder / "config.json").read_text())
    found = load(folder, BLOCKS)
    torch.testing.assert_close(answer(found), answer(load(wide)), rtol=1e-4, atol=1e-4)
    experts = found.get_submodule("model.layers.0.mlp.experts")
    assert all(type(part.format) is Fp8 for name in ("first", "second") for part in experts.parts_of(name))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantised_on_request(tied, tmp_path):
    folder = Oracle(FAMILIES["llama"].variant(tie_word_embeddings=tied)).save(tmp_path)
    kept, quantised = (formats_of(load(folder, Quantising("fp8", head))) for head in (False, True))
    path = "model.embed_tokens" if tied else "lm_head"
    assert kept[path] == {"Dense"}
    assert quantised[path] == {"Fp8"}
    if not tied:
        assert quantised["model.embed_tokens"] == {"Dense"}


@pytest.mark.parametrize("name", [
    "mlp.gate", "mlp.router", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_ba", "mtp.fc",
    "self_attn.f_a_proj", "self_attn.b_proj", "mtp.layers.0.eh_proj", "mixer.fc1_latent_proj", "lm_head",
    "model.embed_tokens",
])  # fmt: skip
def test_what_recipes_keep_wide_stays_wide(name):
    assert BLOCKS.format_of(f"model.layers.0.{name}.weight", 256, 256) is DENSE
    assert AS_STORED.format_of("model.layers.0.mlp.up_proj.weight", 256, 256) is DENSE
    for other in ("mlp.gate_proj", "linear_attn.in_proj_z", "self_attn.g_proj", "mtp.layers.0.mlp.up_proj"):
        assert BLOCKS.format_of(f"{other}.weight", 256, 256) == Fp8(128, 128)
    assert BLOCKS.format_of("mlp.up_proj.weight", 250, 200) == Fp8(1, 200)


def test_two_ranks_hold_the_numbers_of_the_whole(tmp_path):
    """A rank quantises before it cuts, so its blocks are those of the whole matrix."""
    folder = Oracle(MODELS["dense, with blocks"]).save(tmp_path / "given")
    _, wide = quantise(folder, tmp_path, TOOL)
    for rank in (0, 1):
        models = [load(folder, BLOCKS, shard=Shard(rank, 2)), load(wide, shard=Shard(rank, 2))]
        layers = [[each for each in model.modules() if isinstance(each, MatrixLayer)] for model in models]
        for own, plain in zip(*layers, strict=True):
            for name in plain.matrix_names():
                found = torch.cat([part.decode() for part in own.parts_of(name)], -2)
                torch.testing.assert_close(found, plain.parts_of(name)[0].decode(), msg=f"{type(own)} {name}")


def test_a_quantised_model_has_a_digest_of_its_own(tmp_path):
    folder = Oracle(FAMILIES["llama"]).save(tmp_path)
    digests = [load(folder, each, identify=True).weights_digest for each in (AS_STORED, BLOCKS, BLOCKS)]
    assert digests[0] != digests[1] == digests[2]


def test_random_weights_are_quantised_too(tmp_path):
    file = Oracle(FAMILIES["qwen3_5_moe"]).save(tmp_path) / "config.json"
    kinds = [formats_of(load(file, each, weights="dummy")) for each in (AS_STORED, BLOCKS)]
    assert {"Fp8"} not in kinds[0].values()
    assert kinds[1] == formats_of(load(tmp_path, BLOCKS))


def test_what_is_quantised_already_stays_as_it_is(tmp_path, caplog):
    folder = Oracle(FAMILIES["llama"]).save(tmp_path / "given")
    small, wide = quantise(folder, tmp_path, FP8["blocks"])
    with caplog.at_level("INFO", "weft"):
        torch.testing.assert_close(answer(load(small, BLOCKS)), answer(load(wide)), rtol=1e-4, atol=1e-4)
    assert "quantize: off: the weights are stored as fp8 already" in caplog.messages
    stated = FAMILIES["gpt_oss"].variant(published={"quantization_config": {"quant_method": "mxfp4"}})
    file = Oracle(stated).save(tmp_path / "four bits") / "config.json"
    with pytest.raises(InvalidOption, match="is fp8, but the weights are stored as mxfp4; leave it out"):
        load(file, BLOCKS, weights="dummy")


def test_matrices_are_never_whole_in_float32(tmp_path):
    """A matrix is quantised a few megabytes at a time."""
    matrix, largest = torch.randn(512, 4096).bfloat16(), 0
    encoded, original = [], Tensor.float

    def widened(self: Tensor) -> Tensor:
        encoded.append(self.numel())
        return original(self)

    whole = Fp8(128, 128).encode(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", widened)
        patch.setattr("weft.kernels.formats.fp8.ENCODED_AT_ONCE", 1 << 19)
        pieces = Fp8(128, 128).encode(matrix)
    largest = max(encoded)
    assert largest == 128 * 4096
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in
               zip(whole.tensors, pieces.tensors, strict=True))  # fmt: skip


@pytest.mark.thorough
def test_the_option_reaches_the_model(tmp_path):
    config = json.dumps({**json.loads((Oracle(FAMILIES["qwen3_5"]).save(tmp_path) / "config.json").read_text())})
    (tmp_path / "config.json").write_text(config)
    options = {"memory": "8MiB", "draft": "off", "dtype": "float32", "exact": False}
    answers = {}
    for name in ("off", "fp8"):
        with LLM(str(tmp_path), progress=False, quantize=name, **options) as llm:
            # The panels of a stored format, into which a CPU puts it.
            assert ("StoredPanels" in set().union(*formats_of(llm.model).values())) == (name == "fp8")
            answers[name] = llm.generate([random_tokens(70, seed=2)], use_tqdm=False)[0].token_ids
    assert all(answers.values())
    with pytest.raises(
        InvalidOption, match="quantize_head needs --quantize fp8 or int8 or int4 or mxfp4 or q8_0 or q4_k"
    ):
        LLM(str(tmp_path), quantize_head=True)
    with pytest.raises(
        InvalidOption, match="quantize must be one of off, fp8, int8, int4, mxfp4, q8_0, q4_k, got 'int3'"
    ):
        LLM(str(tmp_path), quantize="int3")
