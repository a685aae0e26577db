"""Reading a model's `config.json`, with errors that name the file, the field and the fix."""

import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from chunk_planner.errors import PlannerError

#: where multimodal checkpoints keep the language model's own config
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
_REQUIRED = object()


@dataclass(frozen=True)
class ModelConfig:
    """A parsed `config.json`.

    Attributes:
        name: how messages call the model.
        source: the file it came from, for messages.
        root: the whole file.
        text: the language model's part: `root`, or the sub-config of a multimodal wrapper.
        folder: the model folder, where there is one (weights are looked up there).
    """

    name: str
    source: str
    root: dict[str, Any]
    text: dict[str, Any] = field(repr=False)
    folder: Path | None = None

    @property
    def architecture(self) -> str:
        """The name vLLM resolves the model class by: `architectures[0]`."""
        for config in (self.root, self.text):
            names = config.get("architectures")
            if isinstance(names, list) and names and isinstance(names[0], str):
                return names[0]
        raise self.error("architectures", "is missing, so the model family is unknown")

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the language model's config; null counts as absent."""
        value = self.text.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int:
        """A whole number >= `minimum`; `default` where absent, an error without one."""
        value = self.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.error(name, "is missing; this model family needs it")
            return default
        if value == default and value is not False:
            return default
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise self.error(name, f"= {value!r} is not a whole number")
        if value < minimum:
            raise self.error(name, f"= {value!r} must be at least {minimum}")
        return int(value)

    def first(self, *names: str, default: Any = _REQUIRED, minimum: int = 1) -> int:
        """The first of several names for a whole number that is there."""
        for name in names:
            if self.get(name) is not None:
                return self.integer(name, minimum=minimum)
        return self.integer(names[0], default)

    def sequence(self, name: str, kind: type) -> list[Any] | None:
        """A list of `kind`; None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(one) is kind for one in value):
            raise self.error(name, f"must be a list of {kind.__name__}")
        return value

    def text_of(self, name: str) -> str | None:
        """A string; None where absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"= {value!r} is not a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object within the language model's config; empty where absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"= {value!r} is not an object")
        return value

    def part(self, name: str) -> "ModelConfig":
        """The object `name` as a config of its own, for its fields' checks."""
        source = f"{self.source}: {name}"
        return ModelConfig(self.name, source, self.root, self.mapping(name), self.folder)

    def error(self, name: str, problem: str) -> PlannerError:
        return PlannerError(f"{self.source}: field {name!r} {problem}")


def load_config(model: str | Path | dict[str, Any]) -> ModelConfig:
    """Read a model: a folder with `config.json`, the file itself, or a well-known name.

    A dict is taken as the parsed file. Well-known names are those of `known_models()`; a
    `publisher/` before the name is ignored.

    Raises:
        PlannerError: nothing there, not JSON, not an object, or an unknown name.
    """
    if isinstance(model, dict):
        return _config(model, name=str(model.get("_name_or_path") or "config"), source="config")
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~somebody without a home here
        raise _missing(model) from None
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise PlannerError(f"{path}: no config.json in this folder")
        return _config(_read(file), name=path.resolve().name, source=str(file), folder=path)
    if path.is_file():
        folder = path.resolve().parent
        return _config(_read(path), name=folder.name, source=str(path), folder=folder)
    return _well_known(str(model))


def known_models() -> dict[str, str]:
    """Name -> fact file, for every model this package ships facts of, aliases included."""
    names = {}
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            facts = json.loads(file.read_text(encoding="utf-8"))
            for name in (file.name.removesuffix(".json"), *facts.get("aliases", ())):
                names[name] = file.name
    return names


def _missing(model: object) -> PlannerError:
    return PlannerError(
        f"{model}: no such file or folder; give a folder with config.json, that file, or the name "
        "of a well-known model"
    )


def _well_known(model: str) -> ModelConfig:
    wanted = model.rstrip("/").rsplit("/", 1)[-1].casefold()
    for name, file in known_models().items():
        if name.casefold() == wanted:
            text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
            return _config(json.loads(text)["config"], name=name, source=f"facts of {name}")
    if model.startswith((".", "/", "~")) or model.endswith(".json"):
        raise _missing(model)
    raise PlannerError(
        f"model {model!r} is neither a folder with config.json, nor a config.json, nor one of "
        f"the well-known models: {', '.join(sorted(known_models(), key=str.casefold))}"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerError(f"{file}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise PlannerError(
            f"{file}: not valid JSON ({error.msg} at line {error.lineno}, column {error.colno}); "
            "the file looks truncated or damaged"
        ) from None
    if not isinstance(value, dict):
        raise PlannerError(f"{file}: holds a {type(value).__name__}, not a JSON object")
    # ModelOpt checkpoints may keep their quantization in a file of its own, which vLLM reads
    # where config.json has none.
    quant = file.parent / "hf_quant_config.json"
    if value.get("quantization_config") is None and quant.is_file() and quant != file:
        value = {**value, "quantization_config": _read(quant)}
    return value


def _config(
    root: dict[str, Any], *, name: str, source: str, folder: Path | None = None
) -> ModelConfig:
    text = root
    while nested := next((text[k] for k in _TEXT_KEYS if isinstance(text.get(k), dict)), None):
        text = nested
    return ModelConfig(name=name, source=source, root=root, text=text, folder=folder)
