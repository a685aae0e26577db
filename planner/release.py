"""The vLLM releases whose scheduling is known, and what differs between them."""

from dataclasses import dataclass, replace

from chunk_planner.errors import PlannerError


@dataclass(frozen=True, slots=True)
class Release:
    """What differs between the supported vLLM releases in how they schedule a prefill."""

    version: str
    #: `long_prefill_token_threshold` does not hold back a request that is alone in the engine
    lone_request_ignores_threshold: bool = True
    has_adaptive_threshold: bool = True
    has_active_seqs: bool = True
    #: the last cacheable boundary leaves a token to recompute, also for a prompt of whole blocks
    boundary_leaves_a_token: bool = True
    #: block hashes may cover tokens after the block (`num_hash_lookahead_tokens`)
    has_hash_lookahead: bool = True
    #: a waiting request that the lookahead reserve leaves nothing steps aside, it used to block
    reserve_skips_waiting: bool = True


_0_32 = Release("0.32", has_hash_lookahead=False, reserve_skips_waiting=False)
_0_31 = replace(_0_32, version="0.31", boundary_leaves_a_token=False)
_0_30 = replace(
    _0_31,
    version="0.30",
    lone_request_ignores_threshold=False,
    has_adaptive_threshold=False,
    has_active_seqs=False,
)
RELEASES = {release.version: release for release in (_0_30, _0_31, _0_32, Release("0.33"))}
SUPPORTED_VERSIONS = tuple(RELEASES)


def find_release(vllm_version: str) -> Release:
    """The release that `vllm_version` ("0.33", "0.33.1", "v0.33.0+cpu") is a patch of.

    Raises:
        PlannerError: the version is not supported; its rule is not guessed.
    """
    release = RELEASES.get(".".join(str(vllm_version).removeprefix("v").split(".")[:2]))
    if release is None:
        raise PlannerError(
            f"vllm_version = {vllm_version!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_VERSIONS)} and their patch releases"
        )
    return release
