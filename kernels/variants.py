"""How a kernel module tells `compile_report` what to build."""

from typing import NamedTuple

import triton


class Variant(NamedTuple):
    """One compiled form of a kernel, exactly as its launcher asks for it.

    Every kernel module lists its own in a module-level `VARIANTS`; `compile_report` imports all
    modules of this package and builds what it finds there. Two launches that Triton would compile
    separately (other constants, dtypes or alignment) are two variants.

    Args:
        name: Unique in the package, per back end, and what the report calls `kernel`:
            "copy_states".
        kernel: The `@triton.jit` function.
        signature: Every argument that is not a `tl.constexpr`, in Triton's notation: "*fp32",
            "i64". A ":16" behind it says what the launcher guarantees or Triton specialises on
            at run time, an address or value divisible by 16: "*bf16:16", "i32:16".
        constexprs: The `tl.constexpr` arguments.
        num_warps: As launched.
        num_stages: As launched.
        backend: "cuda" or "hip" where its launcher asks for this one there only.
        wide: The variant moves whole vectors, so its widest global access must be 16 bytes.
    """

    name: str
    kernel: triton.JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 1
    backend: str | None = None
    wide: bool = False
