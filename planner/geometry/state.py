"""What one layer's recurrent state is made of, and how ranks share it."""

from dataclasses import dataclass
from math import prod

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.settings import DTYPE_BYTES
from chunk_planner.models.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """One tensor of the state: its shape on a rank, its dtype and how the shape came about."""

    shape: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    words: str = ""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype] if self.shape else 0


@dataclass(frozen=True)
class State:
    """Convolution window and recurrent matrix of one layer; either may be absent."""

    conv: Part = Part()
    recurrent: Part = Part()

    @property
    def bytes(self) -> int:
        return self.conv.bytes + self.recurrent.bytes


@dataclass(frozen=True)
class StateDtypes:
    """dtypes after vLLM's "auto" has been resolved."""

    conv: str
    recurrent: str


def split(config: ModelConfig, what: str, value: int, tp: int) -> int:
    """`value` per rank. Raises PlannerError where the ranks cannot share it evenly."""
    if value % tp:
        raise PlannerError(
            f"tensor_parallel_size = {tp} does not divide {what} = {value} of {config.name}"
        )
    return value // tp
