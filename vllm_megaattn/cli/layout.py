"""Show where the scale byte of (row, block) lives in memory.

A block is 32 elements along K; a matrix of `rows` x `k` elements has rows x k/32 scale bytes. Layouts:

    f8_128x4  tiles of 128 rows x 4 blocks, what cuBLASLt, FlashInfer and this package's z use
    f8_8x4    tiles of 8 rows x 4 blocks, TensorRT-LLM for few tokens
    packed    int32 words of 4 blocks, stride 1 over the rows, DeepGEMM and vLLM's attention output

Prints a grid of byte offsets, or draws the matrix and its memory side by side with --png FILE.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_megaattn import layouts
from vllm_megaattn.cli.common import format_table

HELP = "print or draw where the scale byte of (row, block) lives"

LINE_BYTES = 16  # memory is shown in lines of 16 bytes: what one 128-bit access moves


@dataclass(frozen=True)
class Layout:
    """One layout of a [rows, blocks] matrix of scale bytes."""

    name: str
    rows: int
    blocks: int
    tile_rows: int
    formula: str
    size: int
    offset: Callable  # (row, block) -> byte, ints or tensors

    @staticmethod
    def make(name: str, rows: int, blocks: int) -> Layout:
        if name == "f8_128x4":
            tiles = layouts.ceil_div(blocks, 4)
            formula = f"(row / 128 * {tiles} + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4"
            size = layouts.f8_128x4_bytes(rows, blocks)
            return Layout(name, rows, blocks, 128, formula, size, lambda r, b: layouts.f8_128x4_offset(r, b, blocks))
        if name == "f8_8x4":
            tiles = layouts.ceil_div(blocks, 4)
            formula = f"(row / 8 * {tiles} + block / 4) * 32 + row % 8 * 4 + block % 4"
            size = layouts.f8_8x4_bytes(rows, blocks)
            return Layout(name, rows, blocks, 8, formula, size, lambda r, b: layouts.f8_8x4_offset(r, b, blocks))
        pitch = layouts.round_up(rows, 4)
        formula = f"(block / 4 * {pitch} + row) * 4 + block % 4"
        size = pitch * layouts.round_up(blocks, 4)
        return Layout(name, rows, blocks, pitch, formula, size, lambda r, b: layouts.packed_offset(r, b, pitch))

    def owners(self) -> torch.Tensor:
        """int64 [size, 2]: (row, block) of each byte of the buffer, (-1, -1) for padding."""
        index = torch.arange(self.rows, device="cpu"), torch.arange(self.blocks, device="cpu")
        rows, blocks = torch.meshgrid(*index, indexing="ij")
        owners = torch.full((self.size, 2), -1, device="cpu")
        owners[self.offset(rows, blocks).flatten()] = torch.stack([rows.flatten(), blocks.flatten()], dim=1)
        return owners

    def explain(self, row: int, block: int) -> str:
        byte = self.offset(row, block)
        if self.name == "packed":
            where = f"word {byte // 4} (word column {block // 4}, row {row}), byte {byte % 4}"
        else:
            tile_bytes = self.tile_rows * 4
            inside = byte % tile_bytes
            where = (
                f"tile {byte // tile_bytes}, in it line {inside // LINE_BYTES}, word {inside % LINE_BYTES // 4}, "
                f"byte {inside % 4}"
            )
        return f"row {row}, block {block} (elements {32 * block}..{32 * block + 31}): byte {byte} = {where}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", nargs="?", choices=("f8_128x4", "f8_8x4", "packed"), default="f8_128x4")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--k", type=int, default=256, help="elements a row, a multiple of 32")
    parser.add_argument("--row", type=int, help="show this row's byte ...")
    parser.add_argument("--block", type=int, help="... of this block of 32 elements")
    parser.add_argument("--png", metavar="FILE", help="draw instead (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="sizes, and the offset of (row, block), as JSON")


def run(args: argparse.Namespace) -> int:
    if args.rows < 1 or args.k < 32 or args.k % 32:
        args.parser.error(f"--rows must be positive and --k a positive multiple of 32, got {args.rows} and {args.k}")
    if (args.row is None) != (args.block is None):
        args.parser.error("--row and --block go together")
    layout = Layout.make(args.layout, args.rows, args.k // 32)
    query = None if args.row is None else (args.row, args.block)
    if query and not (0 <= args.row < layout.rows and 0 <= args.block < layout.blocks):
        args.parser.error(
            f"--row must be in [0, {layout.rows}) and --block in [0, {layout.blocks}), got {query[0]} and {query[1]}"
        )
    if args.png:
        _draw(layout, query, args.png)
        print(f"drew {args.png}")
        return 0
    if args.json:
        result = {"layout": layout.name, "rows": layout.rows, "blocks": layout.blocks, "bytes": layout.size}
        if query:
            result.update(row=args.row, block=args.block, offset=layout.offset(*query))
        print(json.dumps(result))
        return 0
    print(_text(layout, query))
    return 0


# ---- text ------------------------------------------------------------------------------------------------------


def _text(layout: Layout, query: tuple[int, int] | None) -> str:
    padding = layout.size - layout.rows * layout.blocks
    lines = [
        f"{layout.name}: scale bytes of {layout.rows} rows x {layout.blocks * 32} elements = {layout.blocks} blocks "
        f"a row; {layout.size} bytes, {padding} of them padding (0x00)",
        f"byte(row, block) = {layout.formula}      (integer division)",
        "",
        _offset_grid(layout, query),
        "",
        f"Memory from {'that byte' if query else 'the start'}, cells are row,block:",
        _memory_lines(layout, query),
    ]
    if query:
        lines += ["", layout.explain(*query)]
    return "\n".join(lines)


def _interesting(count: int, wanted: Sequence[int], limit: int) -> list[int]:
    if count <= limit:
        return list(range(count))
    return sorted({number for number in wanted if 0 <= number < count})


def _offset_grid(layout: Layout, query: tuple[int, int] | None) -> str:
    """Offsets by row and block, large matrices abridged to the rows and columns where the pattern turns."""
    near = [query[0] - 1, query[0], query[0] + 1] if query else []
    step = layout.tile_rows if layout.name != "packed" else layout.rows
    turns = [0, 1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, step - 1, step, layout.rows - 1]
    rows = _interesting(layout.rows, turns + near, 20)
    near = [query[1] - 1, query[1], query[1] + 1] if query else []
    blocks = _interesting(layout.blocks, [*range(8), layout.blocks - 2, layout.blocks - 1, *near], 12)

    table: list[list[str]] = []
    for before, row in zip([-1, *rows], rows, strict=False):
        if row != before + 1:
            table.append(["..."])
        cells = [str(row)]
        for previous, block in zip([-1, *blocks], blocks, strict=False):
            separator = "| " if block % 4 == 0 or block != previous + 1 else ""
            mark = "*" if (row, block) == query else ""
            cells.append(f"{separator}{layout.offset(row, block)}{mark}")
        table.append(cells)
    header = ["row", *(f"| b{block}" if block % 4 == 0 else f"b{block}" for block in blocks)]
    return format_table(header, [cells + [""] * (len(header) - len(cells)) for cells in table])


def _memory_lines(layout: Layout, query: tuple[int, int] | None, count: int = 6) -> str:
    owners = layout.owners()
    begin = layout.offset(*query) // LINE_BYTES * LINE_BYTES if query else 0
    rows = []
    for line in range(begin, min(begin + count * LINE_BYTES, layout.size), LINE_BYTES):
        words = []
        for word in range(line, min(line + LINE_BYTES, layout.size), 4):
            cells = owners[word : word + 4].tolist()
            words.append(" ".join(f"{row},{block}" if row >= 0 else "pad" for row, block in cells))
        rows.append([f"{line}", *(f"| {word}" for word in words)])
    width = max(map(len, rows))
    header = ["byte", *(f"| word {index}" for index in range(width - 1))]
    return format_table(header, [row + [""] * (width - len(row)) for row in rows])


# ---- picture ---------------------------------------------------------------------------------------------------


def _draw(layout: Layout, query: tuple[int, int] | None, file: str) -> None:
    try:
        from vllm_megaattn.cli.layout_picture import draw
    except ImportError as error:
        raise ImportError(f"--png needs matplotlib: pip install 'vllm-megaattn[plot]' ({error})") from None
    draw(layout, query, file)
