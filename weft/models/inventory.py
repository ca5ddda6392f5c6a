"""What a model's weights take in memory, format by format, and what decoding one token reads of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from weft.kernels.formats.stored import DENSE, Format, Stored
from weft.models.held import WeightFacts
from weft.models.layers.embedding import Embedding
from weft.models.layers.moe import ExpertLayer
from weft.models.model import CausalModel, MatrixLayer, Source, sources
from weft.models.storing import declared_matrices, fewest_sources, storage_of

FormatOf = Callable[[str, int, int], Format]


def weight_facts(model: CausalModel, config: Mapping[str, Any]) -> WeightFacts:
    """Return the facts of a filled model, before a backend puts its matrices into layouts of its own."""

    def held() -> Iterator[tuple[nn.Module, str, int]]:
        for module in model.modules():
            parts = [*module.stored_parts()] if isinstance(module, MatrixLayer) else []
            stored = {storage_of(tensor) for part in parts for tensor in part.tensors}
            for part in parts:
                yield module, label(part), part.bytes
            for tensor in module.parameters(recurse=False):
                if storage_of(tensor) not in stored:
                    yield module, dtype_name(tensor), bytes_of(tensor)

    return counted(held(), config)


def planned_facts(model: CausalModel, config: Mapping[str, Any], format_of: FormatOf | None) -> WeightFacts:
    """Return the facts of a model that is only declared, by the formats that its matrices would have."""
    matrices = declared_matrices(model)
    wanted: dict[int, list[Source]] = defaultdict(list)
    for source in sources(model) if format_of is not None else ():
        wanted[storage_of(source.target)].append(source)

    def held() -> Iterator[tuple[nn.Module, str, int]]:
        for module in model.modules():
            for tensor in module.parameters(recurse=False):
                matrix = matrices.get(storage_of(tensor))
                if matrix is None or format_of is None:
                    yield module, dtype_name(tensor), bytes_of(tensor)
                    continue
                for source in fewest_sources(matrix, wanted[storage_of(tensor)]):
                    *many, outputs, inputs = source.target.shape
                    format = format_of(source.name.removesuffix(".weight"), outputs, inputs)
                    if format is DENSE:
                        yield module, dtype_name(source.target), bytes_of(source.target)
                    else:
                        yield module, name_of(format), (many[0] if many else 1) * format.bytes_of(outputs, inputs)

    return counted(held(), config)


def counted(held: Iterator[tuple[nn.Module, str, int]], config: Mapping[str, Any]) -> WeightFacts:
    """Add up the bytes of modules by format."""
    share, by_format, read = share_of_experts(config), Counter[str](), 0.0
    for module, name, size in held:
        by_format[name] += size
        if isinstance(module, Embedding) and not module.tied:
            continue
        read += size * (share if isinstance(module, ExpertLayer) else 1.0)
    return WeightFacts(dict(by_format), round(read))


def share_of_experts(config: Mapping[str, Any]) -> float:
    """Return the share of all experts that a token goes to. The family has checked these numbers."""
    chosen = _first(config, "num_experts_per_tok", "experts_per_token", "num_experts_per_token")
    among = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    return min(1.0, chosen / among)


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 1)


def label(part: Stored) -> str:
    """Return the name of a matrix's format: of plain numbers, that of their dtype."""
    return name_of(part.format) if part.dense is None else dtype_name(part.tensors[0])


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def name_of(format: Format) -> str:
    # Without the number of its revision.
    return format.name.rpartition(" ")[0] or format.name


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
