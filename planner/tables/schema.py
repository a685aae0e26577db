"""The shape of a table file, as a JSON schema. Units are in the key names."""

SCHEMA_VERSION = 1

#: Larger files are refused unread; a full calibration is about 100 KB.
MAX_BYTES = 16 * 2**20

_COUNT = {"type": "integer", "minimum": 0, "maximum": 10**9}
_SIZE = _COUNT | {"minimum": 1}
# the maximum also keeps infinity out, which JSON can spell as 1e999
_US = {"type": "number", "minimum": 0, "maximum": 1e12}
_TIME = _US | {"exclusiveMinimum": 0}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1000}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 2000}
_FLAG = {"type": "boolean"}


def _object(required: dict, optional: dict | None = None, extra: bool = False) -> dict:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": extra,
    }


def _list(item: dict, least: int = 0) -> dict:
    return {"type": "array", "items": item, "minItems": least, "maxItems": 100_000}


_QUANTILES = {"p20_us": _TIME, "p50_us": _TIME, "p80_us": _TIME, "repeats": _SIZE}

_POINT = _object(
    {
        # one prefill a row: [scheduled tokens, tokens computed before]
        "prefill_tokens": _list(
            {"type": "array", "prefixItems": [_SIZE, _COUNT], "items": False, "minItems": 2}
        ),
        # tokens computed before the step, one decode an entry
        "decode_kv_tokens": _list(_COUNT),
        **_QUANTILES,
    }
)

_FIT = _object(
    {
        "knots_tokens": _list(_SIZE, 2),
        "knots_us": _list(_US, 2),
        "prefill_pair_us": _US,
        "decode_kv_us": _US,
        "prefill_request_us": _US,
        "decode_request_us": _US,
        "max_context_tokens": _SIZE,
        "noise": _SHARE,
        "error_median": _SHARE,
        "error_p90": _SHARE,
    }
)

#: Fields of a fingerprint. An engine table has all of them, a kernel table those of its device.
FINGERPRINT = {
    "device_name": _TEXT,
    "device_count": _SIZE,
    "host_threads": _SIZE,
    "tensor_parallel_size": _SIZE,
    "pipeline_parallel_size": _SIZE,
    "expert_parallel": _FLAG,
    "model": _TEXT,
    "geometry_hash": _TEXT,
    "weight_dtype": _TEXT,
    "kv_cache_dtype": _TEXT,
    "state_dtype": _TEXT,
    "block_size": _SIZE,
    "attention_backend": _TEXT,
    "linear_attention_backend": _TEXT,
    "enforce_eager": _FLAG,
    "speculative_decoding": _TEXT,
    "vllm_version": _TEXT,
    "torch_version": _TEXT,
    "triton_version": _TEXT,
    "cuda_version": _TEXT,
}

_PROVENANCE = _object(
    {"measured_at": _TEXT, "command": _TEXT, "complete": _FLAG},
    {"rounds": _COUNT, "seconds": _US, "notes": _list(_TEXT)},
)

_MEMORY = _object(
    {
        "points": _list(
            _object({"step_tokens": _SIZE, "peak_bytes": {"type": "integer", "minimum": 0}})
        ),
        "activation_bytes_per_token": {"type": "number", "minimum": 0, "maximum": 1e12},
    }
)

_CHECKPOINT = _object(
    {"state_bytes": {"type": "integer", "minimum": 1, "maximum": 10**13}, **_QUANTILES}
)

_HEAD = {"schema_version": {"const": SCHEMA_VERSION}, "provenance": _PROVENANCE}

ENGINE = _object(
    {
        **_HEAD,
        "evidence": {"const": "measured-engine"},
        "fingerprint": _object(FINGERPRINT),
        "points": _list(_POINT, 2),
        "fit": _FIT,
    },
    {"memory": _MEMORY},
)

_KERNEL_FIELDS = ("device_name", "torch_version", "triton_version", "cuda_version")

#: `checkpoint`: one copy of a request's state over all its layers, by bytes of state.
KERNEL = _object(
    {
        **_HEAD,
        "evidence": {"const": "measured-kernel"},
        "fingerprint": _object({name: FINGERPRINT[name] for name in _KERNEL_FIELDS}),
        "checkpoint": _list(_CHECKPOINT, 1),
    }
)

SCHEMAS = {"measured-engine": ENGINE, "measured-kernel": KERNEL}
