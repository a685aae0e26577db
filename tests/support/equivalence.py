"""Random comparisons of the rule and the schedule with the engine that is importable.

A mismatch is one line that names the input and both answers.
"""

import random
from types import SimpleNamespace

from real_scheduler import DRAFTERS, build_scheduler, chunk_rule, run_schedule

from chunk_planner.rule import find_release
from chunk_planner.schedule import Request, plan_schedule

#: How requests come together in a schedule.
MIXES = ("one request", "decodes ahead", "many at once", "mixed arrivals")


def random_options(rng: random.Random, vllm_version: str, blocks: tuple[int, ...]) -> dict:
    """Arguments of `build_scheduler`: every option of the rule, near its edges as often as not."""
    release = find_release(vllm_version)
    block = rng.choice(blocks)
    unit = rng.choice([None, None, block // 4, block // 2])
    scheduler_block = block * rng.choice([1, 1, 1, 2, 3])
    edges = [block - 1, block, block + 1, 2 * block, 8 * block]
    budget = rng.choice([*edges, rng.randint(block // 2, 6 * block), rng.randint(block, 4 * block)])
    drafter = rng.choice(list(DRAFTERS))
    partial_hits = bool(unit) and rng.random() < 0.6
    max_num_seqs = rng.choice([1, 2, 3, 16])
    options = {
        "block_size": block,
        "max_num_batched_tokens": budget,
        "max_num_scheduled_tokens": rng.choice([None, None, rng.randint(budget // 2, budget)]),
        "max_num_seqs": max_num_seqs,
        "long_prefill_token_threshold": rng.choice(
            [0, 0, block // 2, block, rng.randint(1, 3 * block)]
        ),
        "drafter": drafter,
        "num_speculative_tokens": 0 if drafter == "none" else rng.choice([1, 2, 3]),
        "scheduler_block_size": scheduler_block,
        "hash_block_size": unit,
        "checkpoint_alignment": rng.choice([None, None, 1, 4, block]),
        "partial_hits": partial_hits,
        "shared_prefix_checkpoint": partial_hits and rng.random() < 0.5,
    }
    if release.has_adaptive_threshold:
        options["long_prefill_token_threshold_adaptive"] = rng.random() < 0.3
    if release.has_active_seqs:
        options["max_num_active_seqs"] = rng.choice([None, rng.randint(1, max_num_seqs)])
    return options


def compare_splits(vllm_version: str, calls: int, seed: int) -> list[str]:
    """`ChunkRule.split` against `Scheduler._mamba_block_aligned_split`; returns the mismatches."""
    rng = random.Random(seed)
    mismatches = []
    done = 0
    while done < calls:
        options = random_options(rng, vllm_version, (16, 64, 128, 528, 784, 1152, 2096))
        scheduler = build_scheduler(num_blocks=8, **options)
        rule = chunk_rule(scheduler, vllm_version)
        block, unit = rule.block_size, rule.hash_block_size
        for _ in range(min(25, calls - done)):
            whole = block * rng.randint(1, 8)
            prompt = max(
                1, rng.choice([rng.randint(1, 8 * block), whole, whole + rng.randint(-3, 3)])
            )
            total = prompt + rng.choice([0, 0, rng.randint(0, 2 * block)])
            start = rng.randint(0, total)
            start = rng.choice([0, start, start // block * block, start // unit * unit])
            most = rng.randint(1, 6 * block)
            wanted = rng.choice([total - start, most, rng.randint(0, max(1, total - start))])
            boundary = rng.randint(0, total + block)
            boundary = rng.choice([0, boundary, boundary // unit * unit])
            # The engine adds up what it computed, what the cache hit and what a transfer brought.
            cached = rng.choice([0, start, rng.randint(0, start)])
            external = rng.choice([0, rng.randint(0, start - cached)])
            request = SimpleNamespace(
                num_computed_tokens=start - cached - external,
                num_prompt_tokens=prompt,
                num_tokens=total,
                shared_prefix_boundary=boundary,
            )
            engine = scheduler._mamba_block_aligned_split(request, wanted, cached, external)
            ours = rule.split(start, wanted, prompt, total, boundary)
            done += 1
            if ours != engine:
                mismatches.append(
                    f"vLLM {vllm_version} answers {engine}, the rule {ours}: {rule} .split("
                    f"start={start}, num_new_tokens={wanted}, num_prompt_tokens={prompt}, "
                    f"num_tokens={total}, shared_prefix_boundary={boundary})"
                )
    return mismatches


def random_requests(rng: random.Random, block: int, mix: str) -> list[Request]:
    """A few requests around the block grid; those with a prefix hit begin inside the prompt."""

    def one(arrival: int, longest: int = 9) -> Request:
        whole = block * rng.randint(1, longest)
        prompt = rng.choice(
            [
                rng.randint(1, block),
                rng.randint(1, longest * block),
                whole,
                whole + rng.randint(1, 3),
            ]
        )
        hit = rng.randint(0, prompt - 1)
        hit = rng.choice([0, 0, 0, hit // block * block, hit, prompt - 1])
        boundary = rng.choice([0, 0, rng.randint(0, prompt)])
        return Request(arrival, prompt, rng.choice([1, 2, rng.randint(1, 30)]), hit, boundary)

    if mix == "one request":
        return [one(0, 20)]
    if mix == "decodes ahead":
        ahead = [Request(0, rng.randint(1, block), rng.randint(5, 60)) for _ in range(5)]
        return [*ahead, *(one(rng.randint(0, 4)) for _ in range(3))]
    count = rng.choice([3, 8, 20])
    return [one(0 if mix == "many at once" else rng.randint(0, 12)) for _ in range(count)]


def compare_schedules(vllm_version: str, schedules: int, seed: int) -> tuple[int, list[str]]:
    """`plan_schedule` against `Scheduler.schedule` and `update_from_output`, step by step.

    Returns:
        Steps compared, and for each schedule that is not the same its first other step.
    """
    rng = random.Random(seed)
    mismatches = []
    steps = 0
    for done in range(schedules):
        options = random_options(rng, vllm_version, (16, 48, 64, 100))
        requests = random_requests(rng, options["block_size"], MIXES[(seed + done) % len(MIXES)])
        accepted = rng.randint(0, 3)
        scheduler = build_scheduler(num_blocks=2000, **options)
        rule = chunk_rule(scheduler, vllm_version)
        engine = run_schedule(scheduler, requests, accepted, max_steps=400)
        limits = {
            name: options.get(name)
            for name in ("max_num_seqs", "max_num_active_seqs", "num_speculative_tokens")
        }
        ours = plan_schedule(rule, requests, accepted_tokens=accepted, max_steps=400, **limits)
        steps += len(engine)
        if ours.steps != engine:
            same = 0
            while engine[same : same + 1] == ours.steps[same : same + 1] != []:
                same += 1
            mismatches.append(
                f"vLLM {vllm_version} schedules {engine[same : same + 1]} in step {same}, "
                f"plan_schedule {ours.steps[same : same + 1]}: {rule}, {requests}, "
                f"accepted_tokens={accepted}, {limits}"
            )
    return steps, mismatches
