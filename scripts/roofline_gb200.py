"""Predicts the projection's time on a GB200: a roofline and a tile model, for our plans and for DeepGEMM's tiles.

    python scripts/roofline_gb200.py                 prints the tables (Markdown)
    python scripts/roofline_gb200.py --write         puts them into docs/blackwell.md
    python scripts/roofline_gb200.py --check         exit status 1 if docs/blackwell.md holds other tables

Nothing here was measured on a Blackwell GPU: every time is a PREDICTION by the model of csrc/cuda/sm100_plan.h, whose
constants are read from that header and whose plans come from the package's own planner (compiled for the occasion, so a
C compiler is needed). DeepGEMM's tiles are what its released heuristic picks for T up to 8192; where its choice was not
looked up, the tile this model likes best among those it supports stands in, marked with *.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc/cuda/sm100_plan.h"
DOC = ROOT / "docs/blackwell.md"
BEGIN, END = "<!-- roofline: begin -->", "<!-- roofline: end -->"

NUM_SMS = 152  # GB200; a B200 has 148
SMEM_BYTES = 232448  # shared memory a block may ask for
CLOCK_GHZ = 1.92
HBM_TB_S = 8.0
PEAK_PFLOPS = NUM_SMS * 2 * 8192 * CLOCK_GHZ / 1e6  # dense FP8: 8192 multiply-adds a clock and SM
RANK, K_A, HIDDEN = 1024, 4096, 5120  # DeepSeek-V4.1-Flash: wo_a [G, 1024, 4096], wo_b [5120, 1024 G]
GROUPS = {1: 8, 2: 4, 4: 2, 8: 1}  # tensor parallel size -> groups per GPU
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 24576, 32768)

# DeepGEMM's tile, rows of its A side fixed at 128 per SM (256 per pair): (N of the instruction, tokens on N?).
# wo_a, by groups, then for wo_b (any K). 152 SMs where the heuristic distinguishes.
DEEPGEMM_A = {
    8: {16: (16, 1), 32: (16, 1), 64: (32, 1), 128: (64, 1), 256: (128, 0), 512: (256, 0), 1024: (256, 0),
        2048: (240, 1), 4096: (256, 0), 8192: (256, 0)},
    4: {16: (16, 1), 32: (16, 1), 64: (16, 1), 128: (32, 1), 256: (64, 0), 512: (128, 0), 1024: (256, 0),
        2048: (240, 1), 4096: (224, 1), 8192: (256, 0)},
    2: {16: (16, 1), 32: (16, 1), 64: (16, 1), 128: (16, 1), 256: (32, 0), 512: (64, 0), 1024: (128, 0),
        2048: (240, 1), 4096: (224, 1), 8192: (224, 1)},
    1: {16: (16, 1), 32: (16, 1), 64: (16, 1), 128: (16, 1), 256: (16, 1), 512: (32, 0), 1024: (64, 0),
        2048: (112, 1), 4096: (224, 1), 8192: (224, 1)},
}  # fmt: skip
DEEPGEMM_B = {16: (16, 1), 32: (16, 1), 64: (32, 1), 128: (48, 1), 256: (96, 1), 512: (160, 0), 1024: (160, 1),
              2048: (192, 1), 4096: (224, 1), 8192: (256, 0)}  # fmt: skip


class Cut(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("first_row", "num_rows", "num_t", "width", "num_tiles")]


class Tiling(ctypes.Structure):
    _fields_ = [("rows_per_group", ctypes.c_int32), ("band", ctypes.c_int32), ("cut", Cut * 2)]


class Plan(ctypes.Structure):
    """struct mx_sm100_plan."""

    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("form", "ctas", "split", "num_stages", "x_bytes", "x_tiles")],
        *[(name, ctypes.c_int32) for name in ("acc_count", "tmem_columns", "scale_column")],
        *[(name, ctypes.c_uint32) for name in ("grid", "cluster", "smem_bytes")],
        ("tiling", Tiling),
        ("cycles", ctypes.c_int64),
    ]


class Problem(ctypes.Structure):
    """struct mx_sm100_problem."""

    _fields_ = [(name, ctypes.c_int64) for name in ("num_tokens", "num_groups", "num_rows", "k")]


def model_constants() -> dict[str, int]:
    """The MX_SM100_MODEL_* numbers of the header."""
    return {name: int(value) for name, value in re.findall(r"MX_SM100_MODEL_(\w+) = (\d+)", HEADER.read_text())}


class Planner:
    """The package's planner, compiled into a temporary library."""

    def __init__(self, folder: Path):
        compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
        if compiler is None:
            raise SystemExit("no C compiler (cc, gcc or clang) on PATH")
        library = folder / "plan.so"
        source = HEADER.with_suffix(".c")
        subprocess.run([compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-o", library, source], check=True)
        self.lib = ctypes.CDLL(str(library))
        self.lib.mx_sm100_stage_cycles.restype = ctypes.c_int64

    def plan(self, tokens: int, groups: int, rows: int, k: int) -> Plan:
        plan, error = Plan(), ctypes.create_string_buffer(256)
        problem = Problem(tokens, groups, rows, k)
        code = self.lib.mx_sm100_make_plan(
            ctypes.byref(problem), NUM_SMS, SMEM_BYTES, 0, ctypes.byref(plan), error, ctypes.c_size_t(256)
        )
        if code:
            raise SystemExit(error.value.decode())
        return plan

    def stage_cycles(self, width: int) -> int:
        return self.lib.mx_sm100_stage_cycles(2, width)


class Product(NamedTuple):
    """One matrix product: its size and what it must move and multiply at least."""

    tokens: int
    groups: int
    rows: int
    k: int
    out_bytes: float  # per result element

    @property
    def bytes(self) -> float:
        weights, x = self.groups * self.rows * self.k, self.tokens * self.groups * self.k
        return (weights + x) * 33 / 32 + self.tokens * self.groups * self.rows * self.out_bytes

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.groups * self.rows * self.k

    @property
    def floor_us(self) -> float:
        """The roofline: bytes at full HBM speed or products at full tensor core speed, whichever takes longer."""
        return max(self.bytes / HBM_TB_S / 1e6, self.flops / PEAK_PFLOPS / 1e9)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def deepgemm_us(planner: Planner, model: dict[str, int], p: Product, tile: tuple[int, int]) -> tuple[float, int]:
    """Time and waves of DeepGEMM's static schedule: pairs of SMs, one tile each per wave, no split of K."""
    width, tokens_on_n = tile
    on_m, on_n = (p.rows, p.tokens) if tokens_on_n else (p.tokens, p.rows)
    tiles = p.groups * ceil_div(on_m, 256) * 2 * ceil_div(on_n, width)  # per SM, in pairs
    waves = ceil_div(tiles, NUM_SMS)
    stage = planner.stage_cycles(width) * ceil_div(p.k, 128)
    busy = model["START"] + waves * (stage + model["TILE_GAP"]) + model["FINISH"]
    memory = model["START"] + model["FINISH"] + p.bytes / model["HBM_BYTES"]
    return max(busy, memory) / CLOCK_GHZ / 1e3, waves


def deepgemm_best(planner: Planner, model: dict[str, int], p: Product, table: dict) -> tuple[str, float, int]:
    """DeepGEMM's tile (its own pick, or the model's with a star), its time and waves."""
    known = table.get(max(p.tokens, 16)) if p.tokens >= 16 or 16 in table else None
    if known is not None:
        us, waves = deepgemm_us(planner, model, p, known)
        return f"{known[0]}{'t' if known[1] else 'f'}", us, waves
    tiles = [(n, 1) for n in range(16, 257, 16)] + [(n, 0) for n in range(32, 257, 32)]
    us, waves, tile = min((*deepgemm_us(planner, model, p, tile), tile) for tile in tiles)
    return f"{tile[0]}{'t' if tile[1] else 'f'}*", us, waves


def describe(plan: Plan) -> str:
    """E.g. "s2 16": K split over 2 blocks, 16 tokens a tile; "p 256+208": pairs, two widths."""
    cuts = [cut for cut in plan.tiling.cut if cut.num_tiles]
    widths = "+".join(str(cut.width) for cut in cuts)
    return (f"s{plan.split} " if plan.form == 0 else "p ") + widths


def waves_of(plan: Plan) -> float:
    tiles = sum(cut.num_tiles for cut in plan.tiling.cut)
    return tiles * plan.split * plan.ctas / NUM_SMS


def table_for(planner: Planner, model: dict[str, int], tp: int) -> list[str]:
    groups = GROUPS[tp]
    lines = [
        f"**TP{tp}** (G = {groups}: wo_a [{groups}, {RANK}, {K_A}], wo_b [{HIDDEN}, {RANK * groups}])",
        "",
        "| T | MB | GFLOP | floor a + b | our a | tiles/SM | our b | tiles/SM | us a | us b | us a+b "
        "| DG a | waves | DG b | waves | us a | us b | us a+b | DG / ours |",
        "|" + "---|" * 19,
    ]
    start = model["START"] / CLOCK_GHZ / 1e3
    for tokens in TOKENS:
        a = Product(tokens, groups, RANK, K_A, 33 / 32)
        b = Product(tokens, 1, HIDDEN, RANK * groups, 2.0)
        plans = [planner.plan(*p[:4]) for p in (a, b)]
        ours = [plan.cycles / CLOCK_GHZ / 1e3 for plan in plans]
        theirs = [deepgemm_best(planner, model, p, table) for p, table in ((a, DEEPGEMM_A[groups]), (b, DEEPGEMM_B))]
        total, their_total = sum(ours) - start, sum(t[1] for t in theirs)
        lines.append(
            f"| {tokens} | {(a.bytes + b.bytes) / 1e6:.1f} | {(a.flops + b.flops) / 1e9:.2f} "
            f"| {a.floor_us + b.floor_us:.1f} "
            f"| {describe(plans[0])} | {waves_of(plans[0]):.2f} | {describe(plans[1])} | {waves_of(plans[1]):.2f} "
            f"| {ours[0]:.1f} | {ours[1]:.1f} | **{total:.1f}** "
            f"| {theirs[0][0]} | {theirs[0][2]} | {theirs[1][0]} | {theirs[1][2]} "
            f"| {theirs[0][1]:.1f} | {theirs[1][1]:.1f} | {their_total:.1f} | {their_total / total:.2f} |"
        )
    return [*lines, ""]


def render() -> str:
    model = model_constants()
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(Path(folder))
        lines = [
            f"Model: {NUM_SMS} SMs at {CLOCK_GHZ} GHz, {PEAK_PFLOPS:.2f} PFLOP/s dense FP8, HBM {HBM_TB_S:g} TB/s "
            f"(floor) and {model['HBM_BYTES'] * CLOCK_GHZ / 1e3:.1f} TB/s (times), {model['SM_BYTES']} bytes a clock into "
            f"an SM, {model['START'] / CLOCK_GHZ / 1e3:.1f} us to the first product, "
            f"{model['FINISH'] / CLOCK_GHZ / 1e3:.1f} us from the last.",
            "",
        ]
        for tp in GROUPS:
            lines += table_for(planner, model, tp)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="put the tables into docs/blackwell.md")
    group.add_argument("--check", action="store_true", help="compare them with docs/blackwell.md")
    options = parser.parse_args()
    text = render()
    if not options.write and not options.check:
        print(text, end="")
        return 0
    old = DOC.read_text()
    head, tail = old.split(BEGIN)[0], old.split(END)[1]
    new = f"{head}{BEGIN}\n\n{text}\n{END}{tail}"
    if options.write:
        DOC.write_text(new)
    elif new != old:
        print("docs/blackwell.md holds other tables; run scripts/roofline_gb200.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
