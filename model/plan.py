"""What a KV budget holds of a model, for every format: from the configuration alone. No torch here.

Bytes per token: 2 x layers x KV heads x head size x bytes per value, and the scales (`kvpool.formats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from kvpool.budget import Budget, PoolPlan, format_bytes, plan_pool
from kvpool.formats import FORMATS, KVLayout
from model.config import ModelConfig

BASE = "bfloat16"
"""The format that the others are compared with."""
LENGTHS = (1024, 4096)
"""Users of so many tokens, where nothing else is asked; and of the whole context."""
BAR, ROW, LEFT, RIGHT = 420, 30, 90, 250
"""Of the picture, in pixels: the longest bar, a row's height, room for names and for figures."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """One pool a format, all of one budget."""

    config: ModelConfig
    pools: tuple[PoolPlan, ...]
    lengths: tuple[int, ...]
    """Tokens of a user."""

    @property
    def title(self) -> str:
        config, pool = self.config, self.pools[0]
        groups = pool.layout.groups
        paged = f" in {groups.size} layers, {len(groups.windows)} for all" if len(groups.windows) > 1 else ""
        return (
            f"{config.num_layers} layers x {config.num_kv_heads} KV heads x {config.head_dim}, a context of "
            f"{config.max_position_embeddings:,} tokens; {format_bytes(pool.budget.bytes)} of keys and values, "
            f"blocks of {pool.layout.block_size} tokens{paged}"
        )

    def users(self, pool: PoolPlan) -> list[int]:
        """How many sequences of each length fit at once."""
        return [(pool.num_blocks - 1) // pool.layout.blocks_for(length) for length in self.lengths]

    def gain(self, pool: PoolPlan) -> float:
        """How many times the tokens of BASE it holds, by bytes per token."""
        base = next(other for other in self.pools if other.layout.format.name == BASE)
        return base.layout.bytes_per_token / pool.layout.bytes_per_token

    def table(self) -> list[str]:
        """Lines of text, columns aligned."""
        heads = ["format", "bytes/token", "block", "blocks", "tokens", f"x {BASE}"]
        rows = [[*heads, *(f"users of {length:,}" for length in self.lengths)]]
        for pool in self.pools:
            layout = pool.layout
            rows.append(
                [
                    layout.format.name,
                    f"{layout.bytes_per_token:,}",
                    format_bytes(layout.block_bytes),
                    f"{pool.num_blocks - 1:,}",
                    f"{pool.num_tokens:,}",
                    f"{self.gain(pool):.2f}",
                    *(f"{users:,}" for users in self.users(pool)),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]

    def picture(self, name: str) -> str:
        """SVG: one bar a format, as long as the tokens it holds."""
        most = max(pool.num_tokens for pool in self.pools)
        height = ROW * len(self.pools) + 60
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + BAR + RIGHT}" height="{height}" '
            'font-family="sans-serif" font-size="13">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="10" y="20" font-weight="bold">{escape(name)}: tokens that fit, by --kv-cache-dtype</text>',
            f'<text x="10" y="38" fill="#555555" font-size="11">{escape(self.title)}</text>',
        ]
        for number, pool in enumerate(self.pools):
            y, width = 50 + number * ROW, BAR * pool.num_tokens / most
            users = f"{self.users(pool)[0]:,} users of {self.lengths[0]:,}"
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{pool.layout.format.name}</text>',
                f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{ROW - 9}" fill="#3f7fd9"/>',
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 17}">{pool.num_tokens:,} tokens, {users}</text>',
            ]
        return "\n".join([*parts, "</svg>\n"])


def plan_capacity(
    config: ModelConfig, budget: Budget, block_size: int = 16, lengths: Sequence[int] = ()
) -> CapacityPlan:
    """The plan of every format. `lengths`: tokens of a user; without them LENGTHS and the context.

    Raises ValueError for a length that the model cannot have, BudgetError where a format gets no block.
    """
    context = config.max_position_embeddings
    for length in lengths:
        if not 1 <= length <= context:
            raise ValueError(f"{length} tokens: must be between 1 and the model's {context}")
    chosen = lengths or sorted({min(length, context) for length in (*LENGTHS, context)})
    layouts = (
        KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, form, block_size, config.outgrown(context))
        for form in sorted(FORMATS.values(), key=lambda form: -form.vector_bytes(config.head_dim))
    )
    return CapacityPlan(config, tuple(plan_pool(layout, budget, context) for layout in layouts), tuple(chosen))
