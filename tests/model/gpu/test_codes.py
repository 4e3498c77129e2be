"""The assembly that looks levels up, which no interpreter runs: by a machine of our own with its few instructions."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from kvpool.codes import LEVELS
from model.gpu.codes import LOOK_UP

WORD = 0xFFFFFFFF


def execute(text: str, operand: int) -> list[int]:
    """Registers $0 … $3 after the instructions; $4 is the operand. PTX ISA: mov, and, shr, shl, prmt, lop3."""
    registers = {"$4": operand}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"([a-z0-9]+)\.b32 ([^;]*);|([a-z0-9]+)\.u32 ([^;]*);", text):
        name, arguments = line[0] or line[2], (line[1] or line[3]).replace(" ", "").split(",")
        if name == "reg" or not name:
            continue
        to, *rest = arguments
        a, *more = (value(argument) for argument in rest)
        match name:
            case "mov":
                registers[to] = a
            case "and":
                registers[to] = a & more[0]
            case "shr":
                registers[to] = a >> more[0]
            case "shl":
                registers[to] = a << more[0] & WORD
            case "prmt":
                pool = (a | more[0] << 32).to_bytes(8, "little")
                picked = [more[1] >> 4 * place & 15 for place in range(4)]
                assert max(picked) < 8, "the eighth bit would spread a byte's sign"
                registers[to] = int.from_bytes(bytes(pool[number] for number in picked), "little")
            case "lop3":
                b, c, table = more
                registers[to] = sum(
                    (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit
                    for bit in range(32)
                )
            case _:
                raise AssertionError(f"no instruction of ours: {name}")
    return [registers[f"${number}"] for number in range(4)]


def test_the_assembly_knows_every_level() -> None:
    values = [*LEVELS, *(-level for level in LEVELS)]
    generator = torch.Generator().manual_seed(0)
    words = [number * 0x11111111 for number in range(16)]
    words += torch.randint(0, 1 << 32, (200,), generator=generator).tolist()
    for word in words:
        out = execute(LOOK_UP.value, word)
        bits = [register >> 16 * place & 0xFFFF for register in out for place in range(2)]
        found = torch.tensor([b << 16 for b in bits], dtype=torch.int64).to(torch.int32).view(torch.float32).tolist()
        codes = list(word.to_bytes(4, "little"))
        assert found == [*(values[code & 15] for code in codes), *(values[code >> 4] for code in codes)]
