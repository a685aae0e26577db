"""Options of the plugin, from the environment and from vLLM's `--additional-config`.

`--additional-config '{"chunk_planner": {"expected_decodes": 8}}'` enters vLLM's compile hash, so
setting it costs one recompile; the environment does not. The environment wins.
"""

import os
from dataclasses import dataclass

from chunk_planner.errors import PlannerError

#: option -> environment variable
_ENVIRONMENT = {
    "expected_decodes": "CHUNK_PLANNER_EXPECTED_DECODES",
    "short_prompt_tokens": "CHUNK_PLANNER_SHORT_PROMPT_TOKENS",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator told the plugin; None where nothing was said."""

    enabled: bool = True
    expected_decodes: int | None = None
    short_prompt_tokens: int | None = None

    @classmethod
    def read(cls, additional_config: object) -> "Settings":
        """Raises PlannerError for an unknown option or one that is no whole number >= 0."""
        given = {}
        if isinstance(additional_config, dict):
            given = dict(additional_config.get("chunk_planner") or {})
        enabled = given.pop("enabled", True)
        unknown = set(given) - set(_ENVIRONMENT)
        if unknown:
            raise PlannerError(
                f"additional_config['chunk_planner'] has no option {sorted(unknown)[0]!r}; "
                f"known: enabled, {', '.join(_ENVIRONMENT)}"
            )
        for option, variable in _ENVIRONMENT.items():
            if variable in os.environ:
                given[option] = os.environ[variable]
        return cls(bool(enabled), **{name: _whole(name, value) for name, value in given.items()})


def _whole(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise PlannerError(f"{name} = {value!r} is not a whole number of at least 0")
    return number
