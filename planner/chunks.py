"""A prompt's chunks, held as runs: a million tokens at block 1152 are two runs, not 911 numbers."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import eq
from typing import overload


class Chunks(Sequence[int]):
    """Chunk sizes in tokens, in order; equal to any sequence with the same numbers.

    Args:
        runs: `(pattern, times)`: the chunks of `pattern`, one after the other, `times` times over.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: Sequence[tuple[tuple[int, ...], int]]) -> None:
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return sum(len(pattern) * times for pattern, times in self.runs)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(pattern * times for pattern, times in self.runs)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        for pattern, times in self.runs:
            if position < len(pattern) * times:
                return pattern[position % len(pattern)]
            position -= len(pattern) * times
        raise AssertionError("the runs are shorter than their length")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        shown = (
            "+".join(map(str, pattern)) + (f" x {times}" if times > 1 else "")
            for pattern, times in islice(self.runs, 8)
        )
        more = f", ... {len(self)} chunks" if len(self.runs) > 8 else ""
        return f"Chunks({', '.join(shown)}{more})"

    @property
    def num_tokens(self) -> int:
        """Sum of all chunks."""
        return sum(sum(pattern) * times for pattern, times in self.runs)
