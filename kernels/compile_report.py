"""What Triton's compiler makes of every kernel variant, on a machine without a GPU.

    python -m chunk_planner.kernels.compile_report [--json] [--kernel copy ...] [--arch sm_90 ...]

Triton's wheel carries ptxas, cuobjdump and nvdisasm, and builds for any architecture it knows. Each
variant (`chunk_planner.kernels.variants.Variant`, listed in a kernel module's `VARIANTS`) is built
for each architecture and reported as

    {"kernel", "arch", "registers", "spills", "local_bytes", "shared_bytes", "widest_access_bytes"}

`spills` is the bytes of spill stores and loads from the log of the ptxas run that made the binary,
`local_bytes` the thread's stack and local memory, `widest_access_bytes` the widest global load or
store in the machine code. null stands for what could not be read, and is a failure, like
everything that misses a bar: no spills, no local memory, no more shared memory than a program may
have there, 16-byte accesses where the variant is declared `wide`. The exit code is 1 then, and the
reasons are on stderr.
"""

import argparse
import contextlib
import importlib
import io
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunk_planner import kernels
from chunk_planner.kernels.variants import Variant

NVIDIA_ARCHS = ("sm_80", "sm_90", "sm_100")
AMD_ARCHS = ("gfx942", "gfx950")
MAX_ACCESS_BYTES = 16
# of one program; what needs more does not launch
MAX_SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
GLOBAL_SASS = r"\b(?:LDG|STG|LDGSTS)((?:\.\w+)*)"  # LDG.E.128, STG.E.EF.64


def main(argv: list[str] | None = None) -> int:
    """Builds and reports; returns 0, or 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="compile_report", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--kernel", nargs="+", help="only variants whose names begin so")
    parser.add_argument(
        "--arch",
        nargs="+",
        type=_arch,
        help=f"default: {' '.join(NVIDIA_ARCHS)}, and {' '.join(AMD_ARCHS)}"
        " where this Triton has the AMD back end",
    )
    args = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and interpreted kernels are not compiled: unset it")
    wanted = [v for v in variants() if v.name.startswith(tuple(args.kernel or ("",)))]
    if not wanted:
        names = ", ".join(dict.fromkeys(v.name for v in variants()))
        parser.error(f"no kernel begins with {' or '.join(args.kernel)}; there are {names}")
    rows, problems = [], []
    for variant in wanted:
        for arch in args.arch or default_archs():
            if variant.backend not in (None, _backend(arch)):
                continue
            if sys.stderr.isatty():
                print(f"\r\x1b[K{variant.name} {arch}", end="\r", file=sys.stderr, flush=True)
            row = report(variant, arch)
            rows.append(row)
            problems += missed_bars(variant, row)
    if args.json:
        print(json.dumps({"variants": rows}, indent=1))
    else:
        print_table(rows)
    for problem in problems:
        print(f"compile_report: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _arch(name: str) -> str:
    if not re.fullmatch(r"sm_\d+|gfx\w+", name):
        raise argparse.ArgumentTypeError(f"{name!r} is neither like sm_90 nor like gfx942")
    return name


def _backend(arch: str) -> str:
    return "hip" if arch.startswith("gfx") else "cuda"


def variants() -> Iterator[Variant]:
    """Every variant of every module in `chunk_planner.kernels`, in module order."""
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.name != __spec__.name.rpartition(".")[2]:
            loaded = importlib.import_module(f"{kernels.__name__}.{module.name}")
            yield from getattr(loaded, "VARIANTS", ())


def default_archs() -> tuple[str, ...]:
    """The NVIDIA architectures served, and AMD's where the installed Triton can build them."""
    return NVIDIA_ARCHS + (AMD_ARCHS if "amd" in triton.backends.backends else ())


def report(variant: Variant, arch: str) -> dict[str, object]:
    """Builds `variant` for `arch` ("sm_90", "gfx942") and reads what became of it."""
    amd = _backend(arch) == "hip"
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch[3:]), 32)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,  # as a launch does; unsaid, Triton 3.9 warns about its default
    }
    log = io.StringIO()
    with _fresh_build(), contextlib.redirect_stdout(log):
        built = triton.compile(_source(variant), target=target, options=options)
    read = _read_amd(built) if amd else _read_nvidia(built, log.getvalue())
    return {"kernel": variant.name, "arch": arch, **read}


def missed_bars(variant: Variant, row: dict[str, object]) -> list[str]:
    """What in a row keeps the variant from passing, in words."""
    where = f"{row['kernel']} on {row['arch']}"
    missed = [f"{where}: {key} could not be read" for key, value in row.items() if value is None]
    missed += [
        f"{where}: {row[key]} bytes of {what}"
        for key, what in (("spills", "spills"), ("local_bytes", "local memory"))
        if row[key]
    ]
    shared, most = row["shared_bytes"], MAX_SHARED_BYTES.get(row["arch"])
    if most is not None and shared is not None and shared > most:
        missed.append(f"{where}: {shared} bytes of shared memory, and a program has {most}")
    widest = row["widest_access_bytes"]
    if variant.wide and widest is not None and widest < MAX_ACCESS_BYTES:
        missed.append(f"{where}: widest global access {widest} bytes, not {MAX_ACCESS_BYTES}")
    return missed


def print_table(rows: list[dict[str, object]]) -> None:
    """The rows as aligned columns (standard library only: bare GPU machines have no rich)."""
    columns = (
        "kernel",
        "arch",
        "registers",
        "spills",
        "local_bytes",
        "shared_bytes",
        "widest_access_bytes",
    )
    cells = [columns, *([str(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _source(variant: Variant) -> ASTSource:
    """`Variant` in the compiler's own terms, arguments in the order the kernel declares them."""
    names = variant.kernel.arg_names
    given = {**variant.signature, **dict.fromkeys(variant.constexprs, "constexpr")}
    if set(given) != set(names):
        raise ValueError(
            f"variant {variant.name!r} describes {sorted(given)}, its kernel takes {sorted(names)}"
        )
    signature = {name: given[name].partition(":")[0] for name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if given[name].endswith(":16")
    }
    return ASTSource(variant.kernel, signature, constexprs=variant.constexprs, attrs=attrs)


@contextlib.contextmanager
def _fresh_build() -> Iterator[None]:
    """Compiles anew and prints ptxas' log: a cached binary has none."""
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope():
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        yield


def _read_nvidia(built: object, ptxas_log: str) -> dict[str, int | None]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name)
        sass = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", cubin.name)
    stores, loads = (
        _number(r"(\d+) bytes spill stores", ptxas_log),
        _number(r"(\d+) bytes spill loads", ptxas_log),
    )
    stack, local = _number(r"STACK:(\d+)", usage), _number(r"LOCAL:(\d+)", usage)
    return {
        "registers": _number(r"Used (\d+) registers", ptxas_log),
        "spills": None if stores is None or loads is None else stores + loads,
        "local_bytes": None if stack is None or local is None else stack + local,
        "shared_bytes": built.metadata.shared,
        "widest_access_bytes": max(
            map(_sass_access_bytes, re.findall(GLOBAL_SASS, sass)), default=None
        ),
    }


def _sass_access_bytes(modifiers: str) -> int:
    """Width from the modifiers of a SASS memory instruction, where none written means 32 bits."""
    return (_number(r"\.[US]?(8|16|32|64|128|256)\b", modifiers) or 32) // 8


def _read_amd(built: object) -> dict[str, int | None]:
    text = built.asm["amdgcn"]
    # scalar registers spill into vector registers there, not into memory
    spills = _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    words = {
        "b32": 4,
        "b64": 8,
        "b96": 12,
        "b128": 16,
        "dword": 4,
        "dwordx2": 8,
        "dwordx3": 12,
        "dwordx4": 16,
    }
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "spills": None if spills is None else 4 * spills,
        "local_bytes": _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        "shared_bytes": built.metadata.shared,
        "widest_access_bytes": max(
            (
                words.get(width, 2)
                for width in re.findall(r"\b(?:global|buffer)_(?:load|store)_(\w+)", text)
            ),
            default=None,
        ),
    }


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


if __name__ == "__main__":
    sys.exit(main())
