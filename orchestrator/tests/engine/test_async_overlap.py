"""Many readers of an engine whose steps overlap: what each gets is what it gets alone, and nothing is left behind."""

from __future__ import annotations

import asyncio

from orchestrator.engine.async_engine import AsyncEngine
from orchestrator.engine.request import Finished, SamplingParams, TokenOutput


def test_readers_come_and_go(kit, nano):
    requests = {
        str(i): (kit.prompt_of(5 + i, i), SamplingParams(seed=i, max_tokens=6 + i, ignore_eos=True)) for i in range(10)
    }
    expected = kit.run(kit.engine_of(nano, speculation="off"), requests)
    engine = AsyncEngine(kit.engine_of(nano, max_num_seqs=3, mode="worker"))

    async def read(name: str) -> tuple[list[int], str]:
        tokens, reason = [], ""
        async for event in engine.generate(name, *requests[name]):
            if isinstance(event, TokenOutput):
                tokens.append(event.token_id)
            elif isinstance(event, Finished):
                reason = event.reason
        return tokens, reason

    async def leave(name: str) -> None:
        long = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)
        async for event in engine.generate(name, [3, 4], long):
            if isinstance(event, TokenOutput):
                return

    async def main() -> None:
        leavers = [asyncio.create_task(leave(f"leaves {i}")) for i in range(4)]
        found = dict(zip(requests, await asyncio.gather(*(read(name) for name in requests)), strict=True))
        await asyncio.gather(*leavers)
        assert found == {name: (expected[name][0], "length") for name in requests}
        async with asyncio.timeout(20):
            while engine.progress.has_work:
                await asyncio.sleep(0.002)

    try:
        asyncio.run(main())
        scheduler = engine.engine.scheduler
        assert scheduler.blocks.used == scheduler.slots.used == 0 and engine.progress.failed is None
    finally:
        engine.close()
