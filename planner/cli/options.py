"""Argument types and flag groups that several commands share. Flags are named as vLLM's."""

import argparse
import re

# vLLM's own suffixes for counts: lower case decimal, upper case binary (`2k` = 2000, `2K` = 2048).
_COUNT = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def count(text: str) -> int:
    """Whole number, also as vLLM writes it: `2048`, `2k` (2000), `2K` (2048), `1M`."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2048 or 8k")
    number = float(match[1]) * _COUNT.get(match[2], 1)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(match[1]) if not match[2] and "." not in match[1] else int(number)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
