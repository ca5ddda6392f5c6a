"""What a command does with its model before anything large is imported or any process is started."""

from __future__ import annotations

from weft import builtin
from weft.base.options import Options


def prepare(options: Options) -> None:
    """Raise if the model is a local place that holds none, or a name that stands for none; begin to compile kernels."""
    from weft.kernels import early
    from weft.models.finding import local_checkpoint

    local_checkpoint(builtin.place_of(options.model), options.weights != "dummy")
    early.begin(options.device)
