"""Argument types and flag groups that several commands share. Flags are named as vLLM's."""

import argparse
import json
import re

# vLLM's own suffixes for counts: lower case decimal, upper case binary (`2k` = 2000, `2K` = 2048).
_COUNT = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

# Positions and token counts are int32 on the device.
_MOST = 2**31 - 1


def count(text: str) -> int:
    """Whole number, also as vLLM writes it: `2048`, `2k` (2000), `2K` (2048), `1M`."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2048 or 8k")
    number = float(match[1]) * _COUNT.get(match[2], 1)
    if abs(number) > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is above {_MOST}, the most vLLM can count")
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def json_object(text: str) -> dict[str, object]:
    """A JSON object, as vLLM's JSON flags take it."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"key": 1}}')
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
