"""The dtypes of a state, after "auto" is resolved.

Follows `MambaStateDtypeCalculator` (vllm/model_executor/layers/mamba/mamba_utils.py) and the
models' hooks (`MODELS_CONFIG_MAP`, vllm/model_executor/models/config.py).
"""

from chunk_planner.errors import PlannerError
from chunk_planner.geometry.families import Family
from chunk_planner.geometry.settings import STATE_DTYPES, EngineSettings
from chunk_planner.geometry.state import StateDtypes
from chunk_planner.models.config import ModelConfig


def state_dtypes(
    config: ModelConfig, settings: EngineSettings, family: Family, dtype: str
) -> tuple[StateDtypes, tuple[str, ...]]:
    """Resolve "auto" as vLLM does: flag, the checkpoint's field, the class, the window's dtype."""
    conv = dtype if settings.mamba_cache_dtype == "auto" else settings.mamba_cache_dtype
    asked, notes = settings.mamba_ssm_cache_dtype, ()
    field = family.ssm_dtype_field
    selectable = family.ssm_dtypes
    if config.architecture.startswith("Glm5Next") and settings.release < (0, 32):
        selectable = ()
    if asked == "auto" and field and config.get(field):
        asked = str(config.get(field)).removeprefix("torch.")
        if asked not in STATE_DTYPES:
            raise config.error(field, f"= {asked!r} is not one of {', '.join(STATE_DTYPES)}")
        if settings.mamba_ssm_cache_dtype == "auto" and asked != "auto":
            notes = (f"recurrent state in {asked}, from the config's {field}",)
    elif asked != "auto" and not selectable:
        notes = (f"--mamba-ssm-cache-dtype has no effect on {config.architecture}",)
        asked = "auto"
    if asked != "auto" and selectable and asked not in selectable:
        raise PlannerError(
            f"mamba_ssm_cache_dtype = {asked!r}: the {family.name} state of {config.name} takes "
            f"only {' or '.join(selectable)}"
        )
    if asked == "auto" and family.ssm_dtype_default:
        asked = family.ssm_dtype_default
    if asked == "auto" and settings.device.platform == "cpu":
        asked = "float32"
        notes = ("recurrent state in float32, as on a CPU with AVX512-BF16",)
    return StateDtypes(conv, conv if asked == "auto" else asked), notes
