"""What clients ask for: single requests, conversations, images, grammars, refusals to be, and clients that leave."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

from orchestrator.simulate.toy.model import VOCAB
from orchestrator.simulate.toy.reference import Reference
from orchestrator.simulate.toy.text import embedding, salt_of


@dataclass(frozen=True)
class Asked:
    """One request of a client.

    Attributes:
        at: seconds. request, tenant: names. prompt: tokens. images: (height, width) of each, in pixels.
        seed: of sampling. grammar: name, "" for none. most: tokens of the answer at most.
        stop_after: the model ends the answer behind so many tokens; None for never.
        leaves: seconds after `at` when the client goes away; None if it stays to the end.
        asks_twice: the client sends the same request again after this many seconds, as after a lost connection.
        can_run: whether an engine could ever hold it; one that cannot must be refused at once.
    """

    at: float
    request: str
    tenant: str
    prompt: tuple[int, ...]
    images: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    grammar: str = ""
    most: int = 16
    stop_after: int | None = None
    leaves: float | None = None
    asks_twice: float | None = None
    can_run: bool = True


@dataclass(frozen=True)
class Mix:
    """Shares and sizes of a workload.

    Attributes:
        rate: requests a second, conversations' later turns among them. calm: seconds at the end without arrivals.
        tenants: their number. shared: tokens of a beginning that a tenant's requests have in common.
        prompt: fewest and most tokens of a prompt's own part. answer: the same for answers.
        turns: most turns of a conversation.
        image, grammar, leave, twice, huge, bursts: chances, a request each.
        largest: tokens that an engine holds at most; a huge request asks for more.
    """

    rate: float = 0.5
    calm: float = 0.0
    tenants: int = 3
    shared: int = 160
    prompt: tuple[int, int] = (1, 420)
    answer: tuple[int, int] = (1, 28)
    turns: int = 4
    image: float = 0.12
    grammar: float = 0.25
    leave: float = 0.12
    twice: float = 0.06
    huge: float = 0.02
    burst: float = 0.05
    largest: int = 4096

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate: got {self.rate}, allowed are requests a second above 0")
        for name in ("prompt", "answer"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name}: got {least} to {most}, allowed are 1 or more, ascending")


@dataclass
class _Maker:
    mix: Mix
    random: Random
    made: list[Asked] = field(default_factory=list)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(2 + number % (VOCAB - 2) for number in array("I", self.random.randbytes(4 * count)))

    def one(self, at: float, tenant: str, prompt: tuple[int, ...]) -> Asked:
        mix, random = self.mix, self.random
        huge = random.random() < mix.huge
        most = random.randint(*mix.answer)
        asked = Asked(
            at=at,
            request=f"r{len(self.made)}",
            tenant=tenant,
            prompt=prompt + self.tokens(mix.largest) if huge else prompt,
            images=self.images(),
            seed=random.getrandbits(32),
            grammar=random.choice(("json", "regex")) if random.random() < mix.grammar else "",
            most=most,
            stop_after=random.randrange(most) if random.random() < 0.4 else None,
            leaves=random.random() ** 2 * 6 if random.random() < mix.leave else None,
            asks_twice=random.random() * 3 if random.random() < mix.twice else None,
            can_run=not huge,
        )
        self.made.append(asked)
        return asked

    def images(self) -> tuple[tuple[int, int], ...]:
        random = self.random
        if random.random() >= self.mix.image:
            return ()
        return tuple((random.randint(20, 900), random.randint(20, 900)) for _ in range(random.randint(1, 3)))


def make(mix: Mix, seconds: float, random: Random) -> list[Asked]:
    """The workload of a run, in the order of time."""
    maker = _Maker(mix, random)
    starts = {f"tenant{n}": maker.tokens(mix.shared) for n in range(mix.tenants)}
    end, now = seconds - mix.calm, 0.0
    mean_turns = (1 + mix.turns) / 2
    while True:
        burst = random.random() < mix.burst
        now += 0.0 if burst and maker.made else random.expovariate(mix.rate / mean_turns)
        if now >= end:
            break
        tenant = f"tenant{random.randrange(mix.tenants)}"
        _conversation(maker, now, tenant, starts[tenant] if random.random() < 0.7 else (), end)
    return sorted(maker.made, key=lambda asked: (asked.at, asked.request))


def _conversation(maker: _Maker, at: float, tenant: str, start: tuple[int, ...], end: float) -> None:
    """Turns that each begin with all of the turns before, the right answers among them."""
    text = start
    for _ in range(maker.random.randint(1, maker.mix.turns)):
        text += maker.tokens(maker.random.randint(*maker.mix.prompt))
        asked = maker.one(at, tenant, text)
        if not asked.can_run or len(text) > maker.mix.largest // 2:
            return
        answer = reference_of(asked)
        text += tuple(answer.token(n) for n in range(answer.length))
        at += 1.0 + maker.random.expovariate(1 / 8.0)
        if at >= end:
            return


def digests_of(asked: Asked) -> tuple[str, ...]:
    """Names of a request's images; the same pixels have the same name."""
    return tuple(f"{height}x{width}" for height, width in asked.images)


def reference_of(asked: Asked) -> Reference:
    """The right answer of a request."""
    return Reference(
        asked.prompt,
        seed=asked.seed,
        salt=salt_of(asked.tenant, map(embedding, digests_of(asked))),
        grammar=asked.grammar,
        most=asked.most,
        stop_after=asked.stop_after,
    )
