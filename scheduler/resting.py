"""Who sits a step out, so that the prompt of a tenant that had less is computed sooner.

streams of the one        step ██████  rest ······  step ██████  rest ······
prompt of the other             ▪           ██████       ▪           ██████      such a step may take almost as long
                                                                                 as one with them (`Budget.purse`)
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.cost import CostModel
from scheduler.fairness import Tenants
from scheduler.sequence import Sequence


def who_rests(
    tenants: Tenants, running: Iterable[Sequence], waiting: Iterable[Sequence], cost: CostModel | None
) -> frozenset[str]:
    """Tenants with more than their share of the streams, where the step takes less than half as long without them.

    Never two steps in a row: the caller sees to that. Without a cost model, nobody.
    """
    if cost is None:
        return frozenset()
    prompting = {sequence.request.tenant for sequence in waiting}
    rows: dict[str, int] = {}
    read: dict[str, int] = {}
    for sequence in running:
        tenant = sequence.request.tenant
        if len(sequence.tokens) - sequence.num_computed > 1:
            prompting.add(tenant)
        else:
            rows[tenant] = rows.get(tenant, 0) + 1
            read[tenant] = read.get(tenant, 0) + sequence.num_computed
    if not prompting or not rows:
        return frozenset()
    least = min(map(tenants.service, prompting))
    favoured = {tenant for tenant in prompting if tenants.service(tenant) == least}
    count, context = sum(rows.values()), sum(read.values())
    resting = frozenset(
        tenant
        for tenant, own in rows.items()
        if own > tenants.share(tenant) * count and tenants.service(tenant) >= least and favoured != {tenant}
    )
    left = cost.decode_seconds(count - sum(rows[t] for t in resting), context - sum(read[t] for t in resting))
    return resting if cost.decode_seconds(count, context) > 2 * left else frozenset()
