"""Fairness among tenants: what each has had of the engine, by weight. Whoever had least goes first.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024):

    service += (prompt tokens computed, each · (1 + its position / EVEN) + OUTPUT_TOKEN · tokens generated) / weight

Idling saves nothing up. A tenant that begins to wait after it had nobody waiting is lifted to a floor: the least of
those that wait, or, where that is more, what a share of every step came to, less a head start. Without the second, a
stream of tenants that each come once, all at the same floor, would starve one that has had more. Where nobody waits,
nobody is kept from anything, and the past does not count: then the floor is the most that anybody active has.

A token counts once. Neither cached prefixes nor what is computed again after a preemption is charged: a tenant is
preempted for the sake of others, and would pay for it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose

OUTPUT_TOKEN = 2.0
"""What a generated token counts in prompt tokens, as in the paper: it is one row of a step, and holds its seat."""
EVEN = 4000.0
"""The position at which a prompt token's attention costs as much as all else about it, as `CostModel` guesses first.
Without it somebody with short prompts would get half the tokens of a step, but a third of the time."""
HEAD_START = 256.0
"""Tokens of weight 1 by which a newcomer may stay below the level. The level is a mean, a newcomer asks for little as a
rule, and those that had least go first."""
LINGER_SECONDS = 30.0
"""How long a tenant without requests is remembered: leaving for a moment pays no debts."""
MOST_IDLE = 1024
"""Tenants that are remembered so; the first to have left is forgotten first."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


@dataclass(slots=True)
class Tenant:
    """One key, or one `user`."""

    weight: float
    service: float = 0.0
    requests: int = 0
    """That have not ended."""
    waiting: int = 0
    """Sequences that wait."""


class Tenants:
    """Their counters. Owned by the engine; plan() reads them. Bounded: active ones, and at most MOST_IDLE others."""

    __slots__ = ("_active", "_arrived", "_idle", "_level", "_now", "_weights")

    def __init__(self) -> None:
        self._active: dict[str, Tenant] = {}
        """With requests."""
        self._idle: dict[str, tuple[float, Tenant]] = {}
        """Without, and since when; in that order."""
        self._arrived: set[str] = set()
        """Began to wait since the last step."""
        self._weights = 0.0
        self._level = 0.0
        """Service by weight of all that were active, as if each had got its share of every step."""
        self._now = 0.0

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._active) + len(self._idle)

    @property
    def contended(self) -> bool:
        """Whether more than one has requests. Where not, fairness changes nothing."""
        return len(self._active) > 1

    def service(self, name: str) -> float:
        tenant = self._active.get(name)
        return tenant.service if tenant is not None else 0.0

    def weight(self, name: str) -> float:
        tenant = self._active.get(name)
        return tenant.weight if tenant is not None else 1.0

    def share(self, name: str) -> float:
        """Its part of the weights of all that have requests, 0 … 1."""
        return self.weight(name) / self._weights if self._weights > 0 else 1.0

    # ---- what the engine reports ----

    def join(self, name: str, weight: float) -> None:
        """A request of it arrived, which says the weight from now on."""
        weight = min(max(LEAST_WEIGHT, weight), MOST_WEIGHT)
        tenant = self._active.get(name)
        if tenant is None:
            _, tenant = self._idle.pop(name, (0.0, Tenant(weight)))
            self._active[name] = tenant
        else:
            self._weights -= tenant.weight
        tenant.weight = weight
        tenant.requests += 1
        self._weights += weight

    def leave(self, name: str) -> None:
        """A request of it ended."""
        tenant = self._active[name]
        tenant.requests -= 1
        if tenant.requests == 0:
            del self._active[name]
            self._weights = self._weights - tenant.weight if self._active else 0.0
            self._idle[name] = self._now, tenant

    def wait(self, name: str, count: int) -> None:
        """So many sequences of it more wait than before, or fewer."""
        tenant = self._active.get(name)
        if tenant is not None:
            if tenant.waiting == 0:
                self._arrived.add(name)
            tenant.waiting += count

    def charge(self, name: str, prompt: int, generated: int, position: float = 0.0) -> None:
        """Tokens that a step computed, at `position` in the mean, and drew for it."""
        tenant = self._active[name]
        tokens = prompt * (1.0 + position / EVEN) + OUTPUT_TOKEN * generated
        tenant.service += tokens / tenant.weight
        self._level += tokens / self._weights

    def settle(self, now: float) -> None:
        """Before a plan: lift who began to wait, forget who is long gone. O(tenants) where somebody began to wait."""
        self._now = now
        while self._idle:
            name, (since, _) = next(iter(self._idle.items()))
            if now - since < LINGER_SECONDS and len(self._idle) <= MOST_IDLE:
                break
            del self._idle[name]
        arrived, self._arrived = self._arrived, set()
        if arrived:
            others = [tenant for name, tenant in self._active.items() if name not in arrived]
            waiting = [tenant.service for tenant in others if tenant.waiting]
            if waiting:
                floor = max(min(waiting), self._level - HEAD_START)
            else:
                self._level = floor = max((t.service for t in others or self._known()), default=0.0)
            for name in arrived & self._active.keys():
                tenant = self._active[name]
                tenant.service = max(tenant.service, floor)

    def check(self, owners: Iterable[str]) -> bool:
        """Whether the active ones are those that have requests. `owners`: the tenant of every request."""
        weights = sum(tenant.weight for tenant in self._active.values())
        return (
            dict(Counter(owners)) == {name: tenant.requests for name, tenant in self._active.items()}
            and isclose(weights, self._weights, abs_tol=1e-6)
            and not self._active.keys() & self._idle.keys()
            and not any(tenant.waiting for _, tenant in self._idle.values())
        )

    def _known(self) -> list[Tenant]:
        return [*self._active.values(), *(tenant for _, tenant in self._idle.values())]
