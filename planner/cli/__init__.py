"""`chunk-planner`: one module per command, imported only when that command runs.

A command module offers `add_arguments(parser)` and `run(args) -> int | None`. Loading just one
keeps the cold start of `chunk-planner plan` within a small multiple of importing NumPy.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

from chunk_planner.errors import PlannerError

#: command -> what it answers, shown by `chunk-planner --help`; the module is cli/<command>.py.
COMMANDS = {
    "plan": "the chunks, steps and idle tokens of one prompt",
    "recommend": "the budget to set instead, and what it costs",
    "block-size": "block size and state bytes, from a model's config.json",
    "memory": "KV cache left at each budget, from a model's config.json",
    "calibrate": "measure step costs on a real engine and write a tuning table",
    "tables": "list, show, check and compare tuning tables",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are one sentence on stderr, exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def _top_level() -> argparse.ArgumentParser:
    parser = Parser(
        prog="chunk-planner",
        description="Plans, measures and explains vLLM's prefill chunks for hybrid models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 (the answer is no), 2 (bad input), 130 (^C)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = _top_level().parse_args(argv[:1]).command
    command = importlib.import_module(f"chunk_planner.cli.{name.replace('-', '_')}")
    parser = Parser(prog=f"chunk-planner {name}", description=COMMANDS[name].capitalize() + ".")
    command.add_arguments(parser)
    args = parser.parse_args(_as_dashes(argv[1:]))
    try:
        return command.run(args) or 0
    except PlannerError as error:
        print(f"chunk-planner {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`); nothing is wrong with the answer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _as_dashes(argv: list[str]) -> list[str]:
    """`--max_num_seqs=4` -> `--max-num-seqs=4`, as vLLM's own parser allows.

    What follows a dot is a key (`--compilation-config.cudagraph_mode=NONE`) and stays.
    """

    def one(arg: str) -> str:
        flag = re.match(r"--[^.=]*", arg)
        return flag[0].replace("_", "-") + arg[flag.end() :] if flag else arg

    return [one(arg) for arg in argv]
