"""Compare weights in formats with weights in bfloat16: single matmuls, and whole decode steps.

    python -m benchmarks.formats matmuls                           tries divisions of every matmul and prints the best
    python -m benchmarks.formats matmuls --groups mxfp4 --rows 1 128
    python -m benchmarks.formats models nemotron-nano-9b-v2 qwen3.5-9b:quantize=fp8,quantize_head=true
    python -m benchmarks.formats matmuls models --limit 150 --models-limit 120
    python -m benchmarks.formats matmuls --groups fp8-rows experts-fp8-rows --rows 1 32 512 8192
    python -m benchmarks.formats models qwen3.5-9b qwen3.5-9b:quantize=fp8,activations=fp8,exact=false --prompt 8192
    python -m benchmarks.formats models qwen3.5-9b qwen3.5-9b:quantize=fp8 --step-rows 1 --kernels
    python -m benchmarks.formats models qwen3.5-9b qwen3.5-9b:kv_dtype=fp8 --step-rows 32 --context 32768 --memory 40GiB

Every group of matmuls has a process, which first compiles its kernels in parallel. A kernel whose result is not that of
the decoded matrix is reported and not timed. Times are those of recorded graphs over several layers, with the caches
flushed before each run; the floor is the bytes of codes and scales over the bandwidth of a copy. Models have random
weights; with `quantize=fp8`, or of a configuration that states a format, they are compared with bfloat16.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.columns import options_of
from benchmarks.floors import copy_bandwidth, one_after_another, recorded, seconds_of
from weft.kernels.cuda.formats.lines import prepared
from weft.kernels.cuda.launch.ahead import compiling_ahead
from weft.kernels.cuda.linear.decoded import multiply_decoded
from weft.kernels.cuda.linear.packed import Division, cut, cut_lines, multiply_packed
from weft.kernels.cuda.linear.rounding import held_rows
from weft.kernels.cuda.linear.scaled import is_faster, multiply_scaled
from weft.kernels.cuda.linear.stored import multiply_stored
from weft.kernels.cuda.moe import experts, prepare_experts
from weft.kernels.cuda.moe.packed import PairTiles, pair_results, tiles_of
from weft.kernels.cuda.moe.sums import weighted_sum
from weft.kernels.experts import ExpertWeights, clamped, gated
from weft.kernels.formats.block_types import BLOCK_TYPES
from weft.kernels.formats.blocks import BlockFormat
from weft.kernels.formats.fp8 import CODES, LARGEST, Fp8
from weft.kernels.formats.groups import Grouped
from weft.kernels.formats.mxfp4 import BLOCK, Mxfp4
from weft.kernels.formats.nvfp4 import Nvfp4
from weft.kernels.formats.rounded import FP8, in_fp8
from weft.kernels.formats.stored import Format, Stored, as_dense
from weft.kernels.weight import Weight

DEVICE, DTYPE = "cuda", torch.bfloat16
ROWS = (1, 8, 32, 128, 512)
MODELS = ("nemotron-nano-9b-v2:quantize=fp8", "gpt-oss-20b", "nemotron-nano-9b-v2")
STEP_ROWS = (1, 32)
REPEATS, SHOWN = 5, 3
# Bytes of the layers of a graph, several times the cache.
LAYERS_BYTES = 400 << 20
# Relative error, as lengths of vectors, beyond which a kernel is wrong.
MOST_ERROR = 1e-2
# The same of experts whose rows are rounded to FP8, compared with those whose rows are not.
MOST_ROUNDED = 0.1


# matmuls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    outputs: int
    inputs: int
    format: Format
    rows: str | None = None  # what rows are rounded to

    def random(self) -> Stored:
        """Return a random matrix in the layout that kernels read."""
        return prepared(random_matrix(self.format, self.outputs, self.inputs), {self.rows} if self.rows else set())


BLOCKS, INT4 = Fp8(128, 128), Grouped(4, 128)
LINEARS = {
    "fp8": (
        Layer("Nemotron in", 22656, 4480, BLOCKS), Layer("Nemotron out", 4480, 10240, BLOCKS),
        Layer("Nemotron down", 4480, 15680, BLOCKS), Layer("Qwen3.5 gates", 24576, 4096, BLOCKS),
        Layer("Qwen3.5 out", 4096, 4096, BLOCKS), Layer("35B in", 12288, 2048, BLOCKS),
    ),
    "channels": (Layer("Nemotron up", 15680, 4480, Fp8(1, 4480)),),
    "fp8-rows": (
        Layer("Nemotron in", 22656, 4480, BLOCKS, FP8), Layer("Nemotron down", 4480, 15680, BLOCKS, FP8),
        Layer("Qwen3.5 gates", 24576, 4096, BLOCKS, FP8), Layer("Qwen3.5 out", 4096, 4096, BLOCKS, FP8),
        Layer("Nemotron up", 15680, 4480, Fp8(1, 4480), FP8),
    ),
    "mxfp4": (Layer("gpt-oss o", 2880, 4096, Mxfp4()),),
    "four-bits": tuple(
        Layer(f"{name} {shape}", *sizes, form)
        for shape, sizes in (("Nemotron in", (22656, 4480)), ("Nemotron down", (4480, 15680)))
        for name, form in (("int4", INT4), ("AWQ", Grouped(4, 128, True)), ("int4 of 32", Grouped(4, 32)),
                           ("NVFP4", Nvfp4()), ("MXFP4", Mxfp4()))
    ),
    "eight-bits": tuple(
        Layer(f"{name} Nemotron down", 4480, 15680, form)
        for name, form in (("int8", Grouped(8, 15680)), ("MXFP8", Fp8(1, BLOCK)), ("FP8", BLOCKS))
    ),
    "gguf": tuple(Layer(f"{kind} Nemotron out", 4480, 10240, BLOCK_TYPES[kind]) for kind in ("Q4_K", "Q6_K", "Q8_0")),
}  # fmt: skip
# Experts: number, chosen ones, hidden, inner.
EXPERTS = {
    "experts-mxfp4": ("gpt-oss-20b", 32, 4, 2880, 2880, Mxfp4()),
    "experts-fp8": ("Qwen3.5-35B-A3B", 256, 8, 2048, 512, BLOCKS),
    "experts-fp8-rows": ("Qwen3.5-35B-A3B", 256, 8, 2048, 512, BLOCKS),
    "experts-int4": ("Qwen3.5-35B-A3B", 256, 8, 2048, 512, INT4),
}
# Groups, and their shares of the time; those that are measured unless others are asked for.
SHARES = dict.fromkeys([*LINEARS, *EXPERTS], 1.0) | {"fp8": 2.0, "four-bits": 3.0, "eight-bits": 1.5}
USUAL = ("fp8", "experts-mxfp4", "experts-fp8")


def cuts(rows: int) -> Iterator[tuple[Division, bool]]:
    """Yield divisions to try, and whether weights are rounded to bfloat16 before they are multiplied.

    >>> any(by.rows == 8 for by, _ in cuts(4)), len(list(cuts(8))) < 60
    (True, True)
    """
    if rows <= 8:
        choices = product([(8, 32, 2), (8, 64, 2), (8, 64, 4), (8, 128, 4)], (3, 4, 5), (1, 2, 4))
    elif rows <= 32:
        height = 16 if rows <= 16 else 32
        choices = product([(height, 64, 4), (height, 128, 4), (height, 128, 8)], (3, 4), (1, 2, 4))
    elif rows <= 64:
        choices = product([(64, 64, 4), (64, 128, 8)], (2, 3, 4), (1, 2, 4))
    elif rows <= 128:
        choices = product([(64, 128, 8), (128, 64, 4), (128, 128, 8)], (2, 3), (1, 2, 3))
    else:
        choices = product([(128, 64, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8), (256, 64, 4)], (2, 3), (1,))
    for (height, width, warps), stages, shares in choices:
        # One sum has to fit into registers, or two.
        fold = height * width > 128 * 64 * warps // 4
        yield Division(height, width, shares, warps, stages, False), fold
        if rows > 64 and not fold:
            yield Division(height, width, shares, warps, stages, False), True


def random_matrix(form: Format, outputs: int, inputs: int, *experts: int) -> Stored:
    """Return random codes and scales, so that the matrix times a unit vector has about unit size."""
    if isinstance(form, Mxfp4):
        codes = torch.randint(0, 256, (*experts, outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(118, 122, (*experts, outputs, inputs // 32), dtype=torch.uint8, device=DEVICE)
        return Stored(form, (codes, scales), outputs, inputs)
    if not isinstance(form, Fp8) or form.block_columns == BLOCK:
        return of_numbers(form, outputs, inputs, *experts)
    codes = torch.randint(0, 127, (*experts, outputs, inputs), dtype=torch.uint8, device=DEVICE)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=DEVICE) << 7
    shape = (*experts, -(-outputs // form.block_rows), -(-inputs // form.block_columns))
    scales = torch.rand(shape, device=DEVICE).add_(0.5).mul_(inputs**-0.5 / 100)
    return Stored(form, (codes.view(CODES), scales), outputs, inputs)


def of_numbers(form: Format, outputs: int, inputs: int, *experts: int) -> Stored:
    """Return a matrix of encoded random numbers, 256 of whose outputs repeat."""
    plain = torch.randn(*experts, 256, inputs) * inputs**-0.5
    if isinstance(form, Fp8):
        # MXFP8: scales are powers of two.
        blocks = plain.unflatten(-1, (-1, form.block_columns))
        scales = (blocks.abs().amax(-1) / LARGEST).log2().ceil().exp2()
        found = Stored(form, ((blocks / scales.unsqueeze(-1)).to(CODES).flatten(-2), scales), 256, inputs)
    else:
        found = form.encode(plain)
    return found.format.rows(found, torch.arange(outputs) % 256).to(DEVICE)


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error, as lengths of vectors; NaN counts as infinite."""
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return error if error == error else float("inf")


def measure_linears(layers: tuple[Layer, ...], rows_of: list[int], deadline: float, tries: bool) -> None:
    print(f"compiling for {len(layers)} layers", flush=True)
    weights = {layer: [layer.random()] for layer in layers}
    with compiling_ahead():
        for layer, rows in product(layers, rows_of):
            x = torch.zeros(rows, layer.inputs, dtype=DTYPE, device=DEVICE)
            for way in ways_of(layer, x, tries).values():
                # What fails here is reported where it is measured.
                with suppress(Exception):
                    way(weights[layer][0])
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    for layer in layers:
        measure_linear(layer, weights.pop(layer)[0], rows_of, deadline, tries)


def ways_of(layer: Layer, x: Tensor, tries: bool) -> dict[str, Callable[[Stored], Tensor]]:
    """Return ways to multiply; the first is the one in use, up to where the library is faster. `tries`: others too."""
    ways: dict[str, Callable[[Stored], Tensor]] = {}
    if isinstance(layer.format, BlockFormat):
        ways["simple"] = partial(by_simple_kernel, x)
    elif layer.rows is not None:
        if is_faster(len(x), layer.outputs):
            ways["torch"] = partial(by_torch, x)
        own = cut_lines(len(x), layer.outputs, layer.inputs)
        for by in dict.fromkeys([own, *(cuts_of_lines(len(x)) if tries else ())]):
            ways[str(tuple(by))] = partial(by_cut, x, by, False)
        ways.setdefault("torch", partial(by_torch, x))
        return ways
    else:
        own = cut(len(x), layer.outputs, layer.inputs)
        for by, fold in {(own, False): None, **dict.fromkeys(cuts(len(x)) if tries else ())}:
            ways[f"{tuple(by)}{' fold' if fold else ''}"] = partial(by_cut, x, by, fold)
    ways["library"] = partial(by_library, x)
    return ways


def measure_linear(layer: Layer, first: Stored, rows_of: list[int], deadline: float, tries: bool) -> None:
    count = max(2, LAYERS_BYTES // first.bytes)
    matrices = [first, *(layer.random() for _ in range(count - 1))]
    plain = [torch.randn(layer.outputs, layer.inputs, dtype=DTYPE, device=DEVICE) for _ in range(count)]
    for rows in rows_of:
        if time.monotonic() > deadline:
            print("no time is left", flush=True)
            return
        x = torch.randn(rows, layer.inputs, dtype=DTYPE, device=DEVICE)
        wanted = F.linear(x.float() if layer.rows is None else in_fp8(x), first.decode())
        bf16 = timed([partial(F.linear, x, each) for each in plain])
        found = compare(
            ways_of(layer, x, tries), matrices, wanted, deadline, tiny=lambda way, x=x, f=first: way_error(way, x, f)
        )
        floor = first.bytes / copy_bandwidth()
        show(f"{layer.name} {layer.outputs}x{layer.inputs} {rows:>3} rows", floor, bf16, found)


def cuts_of_lines(rows: int) -> Iterator[Division]:
    """Yield divisions to try with rows in FP8."""
    if rows <= 64:
        height = next(size for size in (8, 16, 32, 64) if rows <= size)
        choices = product([(height, 64, 4), (height, 128, 4), (height, 128, 8)], (3, 4, 5), (1, 2, 4))
    else:
        heights = [(64, 128, 8), (128, 64, 4), (128, 128, 8), (256, 64, 8), (128, 256, 8)]
        choices = product(heights, (3, 4), (1,))
    for (height, width, warps), stages, shares in choices:
        yield Division(height, width, shares, warps, stages, False)


def by_torch(x: Tensor, matrix: Stored) -> Tensor:
    out = torch.empty(held_rows(len(x)), matrix.outputs, dtype=x.dtype, device=x.device)
    multiply_scaled(x, matrix, None, out)
    return out[: len(x)]


def by_cut(x: Tensor, by: Division, fold: bool, matrix: Stored) -> Tensor:
    return multiply_packed(x, matrix, by=by, fold=fold)


def by_simple_kernel(x: Tensor, matrix: Stored) -> Tensor:
    return multiply_stored(x, Weight((matrix,)))


def by_library(x: Tensor, matrix: Stored) -> Tensor:
    return multiply_decoded(x, matrix, None, torch.empty(len(x), matrix.outputs, dtype=x.dtype, device=x.device))


def way_error(way: Callable[[Stored], Tensor], x: Tensor, matrix: Stored) -> float:
    """Return the error with tiny rows, whose products are subnormal numbers before they are scaled."""
    kept = x.clone()
    x *= 2.0**-20
    try:
        rows = x.float() if matrix.format.rows_in is None else in_fp8(x)
        return error_of(way(matrix), F.linear(rows, matrix.decode()))
    finally:
        x.copy_(kept)


def compare(
    ways: dict[str, Callable[[Stored], Tensor]],
    matrices: list[Any],
    wanted: Tensor,
    deadline: float,
    tiny: Callable[[Callable[[Stored], Tensor]], float] | None = None,
    most: float = MOST_ERROR,
) -> dict[str, float]:
    """Return the seconds of every way that is right, per layer. The first is the one in use."""
    found: dict[str, float] = {}
    for number, (name, way) in enumerate(ways.items()):
        if time.monotonic() > deadline:
            break
        try:
            error = error_of(way(matrices[0]), wanted)
            small = tiny(way) if tiny is not None and number == 0 else 0.0
            if max(error, small) > most:
                print(f"  WRONG {name}: relative error {error:.2e}, with tiny rows {small:.2e}", flush=True)
                continue
            calls = [partial(way, matrix) for matrix in matrices]
            if not number:
                timed(calls)  # the first of all is slow
            found[name] = timed(calls)
        except Exception as error:  # a tile may need too much shared memory
            print(f"  {name}: {str(error).strip().splitlines()[-1][-90:]}", flush=True)
            torch.cuda.synchronize()
    return found


def timed(calls: list[Callable[[], Any]]) -> float:
    return seconds_of(recorded(one_after_another(calls)), repeats=REPEATS) / len(calls)


def show(name: str, floor: float, bf16: float, found: dict[str, float]) -> None:
    """Print one line: the floor, bfloat16, the way in use, and the best; in microseconds."""
    used = next(iter(found.items()), None)
    best = sorted(found.items(), key=lambda item: item[1])[:SHOWN]
    own = "none in use" if used is None else f"in use {used[1] * 1e6:.1f} {used[0]}"
    listed = ", ".join(f"{seconds * 1e6:.1f} {way}" for way, seconds in best)
    ratio = f"{bf16 / best[0][1]:.2f}x bf16" if best else ""
    library = f" | library {found['library'] * 1e6:.1f}" if "library" in found else ""
    print(
        f"{name}: floor {floor * 1e6:.1f} | bf16 {bf16 * 1e6:.1f} | {own} | best {ratio} {listed}{library}", flush=True
    )


# experts -------------------------------------------------------------------------------------------------------------


def tiles_to_try(tokens: int) -> Iterator[tuple[PairTiles, PairTiles]]:
    """Yield tiles of both matmuls to try.

    >>> {own.pairs for own, _ in tiles_to_try(1)}
    {8}
    """
    if tokens <= 8:
        for (outputs, warps), stages in product([(32, 2), (64, 2), (64, 4), (128, 4)], (3, 4, 5)):
            yield (PairTiles(8, outputs, warps, stages, False),) * 2
    if tokens >= 8:
        for (pairs, outputs, warps), stages in product(
            [
                (16, 64, 2),
                (16, 64, 4),
                (16, 128, 4),
                (32, 64, 4),
                (32, 128, 8),
                (64, 64, 4),
                (64, 128, 8),
                (128, 128, 8),
            ],
            (3, 4),
        ):
            if pairs <= 32 or tokens > 32:
                yield (PairTiles(pairs, outputs, warps, stages, False),) * 2


def measure_experts(group: str, tokens_of: list[int], deadline: float, tries: bool) -> None:
    name, count, k, hidden, inner, form = EXPERTS[group]
    is_clamped = isinstance(form, Mxfp4)

    def layer(by: Callable[[Stored], Stored] = lambda each: each) -> ExpertWeights:
        first, second = random_matrix(form, 2 * inner, hidden, count), random_matrix(form, hidden, inner, count)
        biases = (torch.randn(count, 2 * inner).to(x), torch.randn(count, hidden).to(x)) if is_clamped else (None, None)
        return ExpertWeights(by(first), by(second), clamped() if is_clamped else gated(F.silu), *biases)

    x = torch.zeros(1, dtype=DTYPE, device=DEVICE)
    stored = layer()
    dense = ExpertWeights(
        as_dense(stored.first, DTYPE), as_dense(stored.second, DTYPE), stored.activation, stored.first_bias,
        stored.second_bias,
    )  # fmt: skip
    rounds = {FP8} if group.endswith("-rows") else set()
    packed = prepare_experts(stored, False, rounds)
    assert packed is not stored
    others = [packed, *(prepare_experts(layer(), False, rounds) for _ in range(2))]
    torch.cuda.empty_cache()
    with compiling_ahead():
        for tokens in tokens_of:
            rows, routing = inputs_of(tokens, hidden, count, k)
            for by in dict.fromkeys([tiles_of(tokens, k, packed), *(tiles_to_try(tokens) if tries else ())]):
                mixture(rows, routing, by, packed)
            experts(rows, routing, dense)
    print(f"{name}: compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    for tokens in tokens_of:
        if time.monotonic() > deadline:
            print("no time is left", flush=True)
            return
        rows, routing = inputs_of(tokens, hidden, count, k)
        wanted = experts(rows, routing, dense)
        ways = {
            str([tuple(each) for each in by]): partial(mixture, rows, routing, by)
            for by in dict.fromkeys([tiles_of(tokens, k, packed), *(tiles_to_try(tokens) if tries else ())])
        }
        bf16 = timed([partial(experts, rows, routing, dense)] * 3)
        found = compare(ways, others, wanted, deadline, most=MOST_ROUNDED if rounds else MOST_ERROR)
        chosen = len(routing[1].unique())
        floor = chosen * (packed.first.bytes + packed.second.bytes) / count / copy_bandwidth()
        show(f"{name} {tokens:>3} tokens, {chosen} experts", floor, bf16, found)


def inputs_of(tokens: int, hidden: int, count: int, k: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    chosen = torch.rand(tokens, count, device=DEVICE).topk(k, -1).indices.int()
    return torch.randn(tokens, hidden, dtype=DTYPE, device=DEVICE), (torch.rand(tokens, k, device=DEVICE), chosen)


def mixture(x: Tensor, routing: tuple[Tensor, Tensor], by: tuple[PairTiles, PairTiles], layer: ExpertWeights) -> Tensor:
    return weighted_sum(pair_results(x, routing[1], layer, by=by), routing[0])


# models --------------------------------------------------------------------------------------------------------------


def measure_model(model: str, options: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the time of decode steps of a model with random weights, each row with a context of its own."""
    from benchmarks.gpu import start, warm_up, without_flashinfer
    from benchmarks.trees import time_per_token

    begun, rows_of, context = time.monotonic(), arguments.step_rows, arguments.context
    with without_flashinfer():
        given = argparse.Namespace(device=DEVICE, dtype="bfloat16", memory=arguments.memory)
        llm = start(
            model,
            given,
            draft="off",
            max_sequences=max(rows_of),
            max_length=max(context + 924, 64 + max(arguments.prompt, default=0)),
            **options,
        )
        loaded, held = time.monotonic() - begun, llm.engine._device.placed.model.held
        floor = held.decode_bytes / copy_bandwidth()
        sizes = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in held.bytes.items())
        print(f"{model} {options}: {sizes}, floor of weights {floor * 1e3:.3f} ms, {loaded:.0f} s to start", flush=True)
        warm_up(llm, rows_of, (100,))
        for rows in rows_of:
            seconds = time_per_token(llm, rows, 96, 0.0, context)
            print(
                f"  {rows} rows after {context} tokens: {seconds * 1e3:.3f} ms a step, {rows / seconds:.0f} tokens/s",
                flush=True,
            )
        if arguments.kernels:
            show_kernels(llm, rows_of[0])
        for tokens in arguments.prompt:
            seconds = time_per_prompt(llm, tokens)
            print(f"  a prompt of {tokens} tokens: {seconds * 1e3:.1f} ms to its first token", flush=True)
        if arguments.prompt:
            show_kernels_of_prompt(llm, max(arguments.prompt))


def show_kernels(llm: Any, rows: int, steps: int = 16) -> None:
    """Print the kernels of a decode step by their share, from the profiler's timeline."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.decode import decoding, finish

    engine = decoding(llm, rows, steps + 64, seed=78_000)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
    finish(engine)
    list_kernels(f"a step of {rows} rows", profiler, steps, 24)


def show_kernels_of_prompt(llm: Any, tokens: int) -> None:
    """Print the kernels that take longest of a prompt."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu import fresh, random_prompt
    from benchmarks.prefill import first_token

    engine, prompt = fresh(llm, cache=False), random_prompt(llm, tokens, 32, 0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        first_token(engine, prompt)
    list_kernels(f"a prompt of {tokens} tokens", profiler, 1, 12)


def list_kernels(title: str, profiler: Any, repeats: int, most: int) -> None:
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            found.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    total = sum(map(sum, found.values()))
    print(f"  kernels of {title}, {total / repeats:.0f} µs in all:", flush=True)
    for name, times in sorted(found.items(), key=lambda each: -sum(each[1]))[:most]:
        count, micro = len(times) / repeats, sum(times) / repeats
        print(f"    {micro:8.1f} µs, {count:6.1f} of {micro / count:6.2f}: {name[:90]}", flush=True)


def time_per_prompt(llm: Any, tokens: int) -> float:
    """Return the median seconds from an uncached prompt to its first token."""
    from benchmarks.gpu import fresh, random_prompt
    from benchmarks.prefill import first_token

    engine = fresh(llm, cache=False)
    found = [first_token(engine, random_prompt(llm, tokens, 31, number)) for number in range(REPEATS + 1)]
    return statistics.median(found[1:])


# the program ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="matmuls, or models and then their names, with options after a colon")
    parser.add_argument("--groups", nargs="+", default=list(USUAL), choices=list(SHARES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--in-use", action="store_true", help="measure the divisions in use, and try no others")
    parser.add_argument("--step-rows", type=int, nargs="+", default=list(STEP_ROWS), help="rows of decode steps")
    parser.add_argument("--context", type=int, default=100, help="tokens before those that a step decodes, in each row")
    parser.add_argument("--prompt", type=int, nargs="*", default=[], help="lengths of prompts to time")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step of the first rows")
    parser.add_argument("--memory", default="24GiB", help="memory of a model for pages and states")
    parser.add_argument("--limit", type=int, default=150, help="seconds for all matmuls")
    parser.add_argument("--models-limit", type=int, default=120, help="seconds for all models")
    parser.add_argument("--here", choices=("group", "model"), help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.here == "group":
        return measure_group(arguments.what[0], arguments)
    if arguments.here == "model":
        name, _, column = arguments.what[0].partition(":")
        measure_model(name, options_of(column or "default"), arguments)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    failed = 0
    if "matmuls" in arguments.what:
        end = time.monotonic() + arguments.limit
        for place, group in enumerate(arguments.groups):
            # What is left is shared by the groups that are left.
            share = SHARES[group] / sum(SHARES[each] for each in arguments.groups[place:])
            failed += separately("group", group, share * (end - time.monotonic()), arguments)
    if "models" in arguments.what:
        end = time.monotonic() + arguments.models_limit
        given = [each for each in arguments.what if each not in ("matmuls", "models")] or list(MODELS)
        for name in given:
            failed += separately("model", name, end - time.monotonic(), arguments)
    return failed


def measure_group(group: str, arguments: argparse.Namespace) -> int:
    # A few seconds before the process would be killed.
    deadline = time.monotonic() + arguments.limit - 12
    if group in EXPERTS:
        measure_experts(group, arguments.rows, deadline, not arguments.in_use)
    else:
        measure_linears(LINEARS[group], arguments.rows, deadline, not arguments.in_use)
    return 0


def separately(kind: str, name: str, seconds: float, arguments: argparse.Namespace) -> int:
    """Measure a group or a model in a process of its own, which prints what it finds; return 1 if it failed."""
    print(f"\n== {name} ({seconds:.0f} s)", flush=True)
    if seconds < 10:
        print("no time is left", flush=True)
        return 1
    command = [sys.executable, "-m", "benchmarks.formats", name, "--here", kind, "--limit", str(int(seconds))]
    command += ["--rows", *map(str, arguments.rows), "--step-rows", *map(str, arguments.step_rows)]
    command += ["--context", str(arguments.context), "--memory", arguments.memory]
    command += ["--prompt", *map(str, arguments.prompt)]
    command += ["--in-use"] if arguments.in_use else []
    command += ["--kernels"] if arguments.kernels else []
    process = subprocess.Popen(command)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:.0f} s", flush=True)
        return 1
    finally:
        process.kill()
        process.wait()
    if code:
        print(f"ended with code {code}", flush=True)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
