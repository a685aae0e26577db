"""One step over arrays against the same step request by request."""

import random
from dataclasses import replace

import numpy as np
import pytest

from chunk_planner.batch import plan_step
from chunk_planner.errors import PlannerError
from chunk_planner.rule import SUPPORTED_VERSIONS, ChunkRule


def scalar_step(rule, requests, num_running, max_num_seqs=None):
    """The loops of `Scheduler.schedule`, one request at a time; sizes in scheduler order."""
    token_budget, input_budget = rule.scheduled_budget, rule.max_num_batched_tokens
    threshold = rule.threshold(len(requests))
    sizes = [0] * len(requests)
    prefill_runs = False
    for index, (start, tokens, prompt, drafts, junction) in enumerate(requests[:num_running]):
        if token_budget <= 0 or input_budget <= rule.draft_slots:
            return sizes
        wanted = tokens + drafts - start
        if 0 < threshold < wanted:
            wanted = threshold
        wanted = min(wanted, token_budget, input_budget - rule.draft_slots)
        size = rule.split(start, wanted, prompt, tokens, junction)
        size = rule.reserve(tokens - start, size)
        if size <= 0:
            continue
        sizes[index] = size
        prefill_runs |= start < max(prompt, tokens - 1)
        token_budget -= size
        input_budget -= size + rule.draft_slots
    running_scheduled = any(sizes)
    seated = num_running
    for index in range(num_running, len(requests)):
        start, tokens, prompt, drafts, junction = requests[index]
        if token_budget <= 0 or input_budget <= rule.draft_slots:
            break
        if max_num_seqs is not None and seated >= max_num_seqs:
            break
        wanted, padded = tokens - start, False
        room = min(token_budget, input_budget - rule.draft_slots)
        if drafts and wanted == 1 and not prefill_runs and (running_scheduled or start > 0):
            if 1 + drafts > room:
                break
            wanted, padded = 1 + drafts, True
        if 0 < threshold < wanted:
            wanted = threshold
        size = rule.split(start, min(wanted, room), prompt, tokens, junction)
        if size == 0:
            break
        if padded and size != 1 + drafts:
            size = 1
        size = rule.reserve(tokens - start, size)
        if size == 0:
            if rule.release.reserve_skips_waiting:
                continue
            break
        sizes[index] = size
        seated += 1
        token_budget -= size
        input_budget -= size + rule.draft_slots
    return sizes


def random_rule(rng: random.Random) -> ChunkRule:
    block = rng.choice([16, 128, 784, 1152, 2096])
    budget = rng.choice([block, block + rng.randrange(64), rng.randrange(1, 8 * block), 8192])
    version = rng.choice(SUPPORTED_VERSIONS)
    partial = rng.random() < 0.3
    drop = rng.random() < 0.3
    return ChunkRule(
        block_size=block,
        max_num_batched_tokens=budget,
        vllm_version=version,
        max_num_scheduled_tokens=rng.choice([None, None, rng.randrange(1, budget + 1)]),
        long_prefill_token_threshold=rng.choice([0, 0, rng.randrange(1, 2 * block)]),
        long_prefill_token_threshold_adaptive=version != "0.30" and rng.random() < 0.3,
        draft_slots=rng.choice([0, 0, 1, 3]),
        hash_block_size=16 if partial and block > 16 else None,
        partial_hits=partial and block > 16,
        shared_prefix_checkpoint=partial and block > 16 and rng.random() < 0.5,
        eagle_block_drop=drop,
        hash_lookahead_tokens=1 if version == "0.33" and not drop and rng.random() < 0.5 else 0,
        checkpoint_alignment=rng.choice([None, 1, 16]),
        prefill_lookahead_tokens=rng.choice([0, 1, 3]),
    )


def random_requests(rng: random.Random, rule: ChunkRule, num_requests: int):
    """(computed, tokens, prompt, drafts, junction) of each request, and how many are running."""
    block = rule.block_size
    share_of_prefills = rng.choice([0, 0.02, 0.3, 1])
    requests = []
    for _ in range(num_requests):
        prompt = rng.choice([rng.randrange(1, 6 * block), block * rng.randrange(1, 5)])
        outputs = rng.randrange(0, 50)
        drafts = rng.choice([0, 0, 1, 3])
        junction = rng.choice([0, 0, rng.randrange(0, prompt + 1)])
        tokens = prompt + outputs
        if rng.random() < share_of_prefills:
            start = rng.choice(
                [0, rng.randrange(tokens), block * rng.randrange(1 + tokens // block)]
            )
            start = min(start, tokens - 1)
        else:
            start = tokens - 1
        requests.append((start, tokens, prompt, drafts, junction))
    return requests, rng.randrange(num_requests + 1)


def plan(rule, requests, num_running, **options):
    columns = np.array(requests, np.int32).reshape(-1, 5).T
    waiting = np.arange(len(requests)) >= num_running
    return plan_step(rule, *columns[:4], waiting, shared_prefix_boundary=columns[4], **options)


@pytest.mark.parametrize("num_requests", [1, 2, 7, 40, 1024, 4096])
def test_equals_the_scalar_step(num_requests: int) -> None:
    rng = random.Random(num_requests)
    for _ in range(400 if num_requests <= 40 else 12):
        rule = random_rule(rng)
        requests, num_running = random_requests(rng, rule, num_requests)
        slots = rng.choice([None, num_running, num_running + 1])
        step = plan(rule, requests, num_running, max_num_seqs=slots)
        expected = scalar_step(rule, requests, num_running, slots)
        assert step.num_scheduled_tokens.tolist() == expected, (rule, requests, num_running, slots)
        starts = np.array([request[0] for request in requests])
        assert step.chunk_end.tolist() == (starts + expected).tolist()
        assert step.query_start_loc.tolist() == [0, *np.cumsum(expected).tolist()]
        checkpoints = [
            size > 0
            and start < max(prompt, tokens - 1)
            and (
                rule.caches_state(start + size, prompt, junction)
                or bool(
                    start + size >= max(prompt, tokens - 1)
                    and rule.exported_checkpoint(start, start + size, max(prompt, tokens - 1))
                )
            )
            for size, (start, tokens, prompt, _, junction) in zip(expected, requests, strict=True)
        ]
        assert step.is_checkpoint.tolist() == checkpoints


def test_random_batches_reach_every_branch() -> None:
    """The comparison above is worth its cases: budgets end in decodes, prefills, the queue."""
    rng = random.Random(7)
    seen = set()
    for _ in range(600):
        rule = random_rule(rng)
        requests, num_running = random_requests(rng, rule, 40)
        sizes = scalar_step(rule, requests, num_running)
        decodes = [
            (size, tokens + drafts - start)
            for size, (start, tokens, prompt, drafts, _) in zip(sizes, requests, strict=True)
            if start >= max(prompt, tokens - 1)
        ]
        seen.add("decode cut" if any(0 < size < wanted for size, wanted in decodes) else "whole")
        if num_running < 40 and sizes[num_running]:
            seen.add("admitted")
        if 0 in sizes[:num_running] and any(sizes[sizes.index(0) : num_running]):
            seen.add("running skipped")
        if rule.draft_slots and sum(sizes) + 40 * rule.draft_slots > rule.max_num_batched_tokens:
            seen.add("slots end the step")
    assert seen == {"decode cut", "whole", "admitted", "running skipped", "slots end the step"}


def test_one_long_prompt_behind_decodes() -> None:
    rule = ChunkRule(block_size=1152, max_num_batched_tokens=2048)
    requests = [(100, 101, 50, 0, 0)] * 6 + [(1152, 20_000, 20_000, 0, 0), (0, 800, 800, 0, 0)]
    step = plan(rule, requests, num_running=7)
    assert step.num_scheduled_tokens.tolist() == [1] * 6 + [1152, 800]
    assert step.chunk_end.tolist() == [101] * 6 + [2304, 800]
    assert step.is_checkpoint.tolist() == [False] * 6 + [True, False]
    assert step.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 6, 1158, 1958]


def test_a_waiting_last_token_is_padded_beside_decodes() -> None:
    rule = ChunkRule(block_size=1152, max_num_batched_tokens=2048)
    requests = [(100, 101, 50, 3, 0), (200, 201, 150, 3, 0)]
    assert plan(rule, requests, 1).num_scheduled_tokens.tolist() == [4, 4]
    # Too little room for all of it: it waits rather than run unpadded.
    tight = replace(rule, max_num_batched_tokens=7)
    assert plan(tight, requests, 1).num_scheduled_tokens.tolist() == [4, 0]


def test_padding_that_the_split_cuts_is_dropped() -> None:
    # One token before the prompt's end at 1150; its three placeholders would cross 1152.
    rule = ChunkRule(block_size=1152, max_num_batched_tokens=2048)
    requests = [(100, 101, 50, 3, 0), (1149, 1150, 1150, 3, 0)]
    assert plan(rule, requests, 1).num_scheduled_tokens.tolist() == [4, 1]


@pytest.mark.parametrize(("version", "behind"), [("0.32", 0), ("0.33", 500)])
def test_a_waiting_request_without_its_lookahead(version: str, behind: int) -> None:
    # Two tokens short of the prompt's end the reserve of three leaves nothing of the last one
    # before the boundary. That blocked the queue before 0.33.
    rule = ChunkRule(1152, 2048, version, prefill_lookahead_tokens=3)
    requests = [(1151, 1154, 1154, 0, 0), (0, 500, 500, 0, 0)]
    assert plan(rule, requests, 0).num_scheduled_tokens.tolist() == [0, behind]


def test_no_requests() -> None:
    step = plan(ChunkRule(block_size=16, max_num_batched_tokens=64), [], 0)
    assert step.query_start_loc.tolist() == [0]
    assert step.num_scheduled_tokens.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_draft_tokens": [0]}, "shapes"),
        ({"is_waiting": [True, False]}, "is_waiting: running requests come first"),
        ({"num_tokens": [1.5, 2.0]}, "not float64"),
        (
            {"num_computed_tokens": [9, 10]},
            r"num_computed_tokens\[1\] = 10 must be at most num_tokens\[1\] = 9",
        ),
        ({"shared_prefix_boundary": [0, 0, 0]}, "shapes"),
    ],
)
def test_bad_arrays_are_named(change: dict, message: str) -> None:
    arrays = {
        "num_computed_tokens": [0, 0],
        "num_tokens": [9, 9],
        "num_prompt_tokens": [9, 9],
        "num_draft_tokens": [0, 0],
        "is_waiting": [False, True],
    }
    rule = ChunkRule(block_size=16, max_num_batched_tokens=64)
    with pytest.raises(PlannerError, match=message):
        plan_step(rule, **{**arrays, **change})


@pytest.mark.engine
def test_equals_every_step_of_the_engines_scheduler() -> None:
    """Budgets, drafters, thresholds and sequence limits at random, on vLLM's own `schedule`."""
    vllm = pytest.importorskip("vllm")
    from equivalence import MIXES, random_options, random_requests
    from real_scheduler import build_scheduler, chunk_rule, run_schedule

    version = ".".join(vllm.__version__.split(".")[:2])
    rng = random.Random(9)
    compared = 0
    for case in range(40):
        options = random_options(rng, version, (16, 48, 100))
        scheduler = build_scheduler(num_blocks=2000, **options)
        rule, schedule = chunk_rule(scheduler, version), scheduler.schedule
        slots = min(options["max_num_seqs"], options.get("max_num_active_seqs") or 16)

        def both(scheduler=scheduler, rule=rule, schedule=schedule, slots=slots) -> object:
            nonlocal compared
            running, waiting = list(scheduler.running), list(scheduler.waiting)
            drafts = [len(request.spec_token_ids) for request in running]
            drafts += [scheduler.num_spec_tokens] * len(waiting)
            step = plan_step(
                rule,
                *(
                    [getattr(request, name) for request in running + waiting]
                    for name in ("num_computed_tokens", "num_tokens", "num_prompt_tokens")
                ),
                drafts,
                np.arange(len(drafts)) >= len(running),
                max_num_seqs=slots,
            )
            names = [request.request_id for request in running + waiting]
            sizes = dict(zip(names, step.num_scheduled_tokens.tolist(), strict=True))
            output = schedule()
            planned = {name: size for name, size in sizes.items() if size}
            assert planned == output.num_scheduled_tokens, rule
            compared += 1
            return output

        scheduler.schedule = both
        # What a prefix lookup would find is not in a waiting request yet, so there is none to find.
        requests = [
            replace(request, num_computed_tokens=0, shared_prefix_boundary=0)
            for request in random_requests(rng, rule.block_size, MIXES[case % len(MIXES)])
        ]
        run_schedule(scheduler, requests, accepted_tokens=1, max_steps=150)
    assert compared > 700
