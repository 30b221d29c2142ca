"""The picture of `layout --png`: the matrix of scale bytes on the left, its memory on the right, same colours.

Colour says where in a 16-byte line a byte lies: the hue is its 32-bit word, the shade its byte in the word. One scale
is followed from the matrix into memory by an arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")  # files only, no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

if TYPE_CHECKING:
    from vllm_megaattn.cli.layout import Layout

LINE_BYTES = 16
NUM_LINES = 32  # of memory, 512 bytes: one F8_128x4 tile
MAX_ROWS = 36  # drawn of the matrix; more are abridged
MAX_BLOCKS = 8

HUES = ("#2c6fb0", "#2a8a55", "#c9781c", "#9a3b7a")  # word 0..3 of a line
SHADES = (0.0, 0.22, 0.42, 0.60)  # byte 0..3 of a word: how far towards white
PADDING = (0.90, 0.90, 0.90)
INK = "#1a1a1a"


def draw(layout: Layout, query: tuple[int, int] | None, file: str) -> None:
    """Write the picture of `layout` to `file`; the format follows the file's suffix."""
    row, block = query or (min(33, layout.rows - 1), min(1, layout.blocks - 1))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14.5, 10.2), width_ratios=(1.0, 1.75), gridspec_kw={"wspace": 0.16}
    )
    source = _draw_matrix(left, layout, row, block)
    target = _draw_memory(right, layout, row, block)
    figure.add_artist(
        ConnectionPatch(
            xyA=source,
            coordsA=left.transData,
            xyB=target,
            coordsB=right.transData,
            arrowstyle="-|>,head_width=0.4,head_length=0.8",
            connectionstyle="arc3,rad=-0.12",
            color=INK,
            linewidth=1.6,
            alpha=0.8,
            shrinkA=0,
            shrinkB=0,
            zorder=10,
        )
    )
    figure.suptitle(
        f"{layout.name}: where the scale byte of (row, block) lives", x=0.06, ha="left", fontsize=17, weight="bold"
    )
    figure.text(
        0.06,
        0.928,
        f"byte(row, block) = {layout.formula}     {layout.rows} rows x {layout.blocks} blocks, {layout.size} bytes",
        fontsize=10.5,
        family="monospace",
        color=INK,
    )
    figure.text(0.06, 0.035, layout.explain(row, block), fontsize=11.5, color=INK)
    handles = [Patch(facecolor=hue, label=f"word {index}") for index, hue in enumerate(HUES)]
    handles.append(Patch(facecolor=PADDING, label="padding, 0x00"))
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.985, 0.995),
        ncols=5,
        frameon=False,
        fontsize=10,
        title="colour: 32-bit word of a 16-byte line; lighter: higher byte of the word",
        title_fontsize=10,
        alignment="right",
    )
    figure.subplots_adjust(left=0.06, right=0.985, top=0.842, bottom=0.075)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _colour(byte: int) -> tuple[float, float, float]:
    shade = SHADES[byte % 4]
    return tuple(channel + (1.0 - channel) * shade for channel in to_rgb(HUES[byte % LINE_BYTES // 4]))


def _cell(axes: Axes, x: float, y: float, colour: tuple[float, float, float], text: str, size: float) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
    luminance = 0.30 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]
    ink = "white" if luminance < 0.62 else INK
    axes.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=size, color=ink)


def _mark(axes: Axes, x: float, y: float) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=INK, linewidth=2.6, zorder=5))


def _bare(axes: Axes, title: str, width: float, height: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_title(title, fontsize=11.5, loc="left", y=1.0, pad=32)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _visible_rows(layout: Layout, row: int) -> list[int]:
    """All rows of a small matrix. Of a large one the 128-row tile of `row` and the start of the next, abridged inside
    each band of 32 rows; layouts without such bands show a run of rows around it."""
    if layout.rows <= MAX_ROWS:
        return list(range(layout.rows))
    if layout.name != "f8_128x4":
        base = max(0, min(row // 8 * 8 - 8, layout.rows - 32))
        return list(range(base, base + 32))
    base = row // 128 * 128
    wanted = {start + step for start in range(base, base + 160, 32) for step in (0, 1, 2, 30, 31)}
    wanted |= {row - 1, row, row + 1}
    return sorted(number for number in wanted if base <= number < layout.rows)


def _draw_matrix(axes: Axes, layout: Layout, row: int, block: int) -> tuple[float, float]:
    """Cells hold byte offsets. Returns where the arrow starts."""
    rows = _visible_rows(layout, row)
    first_block = block // 4 * 4 if layout.blocks > MAX_BLOCKS else 0
    blocks = range(first_block, min(first_block + MAX_BLOCKS, layout.blocks))
    y, before, labels, start = 0.0, rows[0] - 1, [], (0.0, 0.0)
    for number in rows:
        if number != before + 1:
            axes.text(-0.3, y + 0.3, "\u22ee", ha="center", va="center", fontsize=12, color="#777777")
            y += 0.6
        if number % layout.tile_rows == 0 and number != rows[0]:
            axes.plot([-0.25, len(blocks)], [y, y], color=INK, linewidth=1.6, clip_on=False, zorder=4)
        for x, column in enumerate(blocks):
            byte = layout.offset(number, column)
            _cell(axes, x, y, _colour(byte), str(byte), 8.5)
            if (number, column) == (row, block):
                _mark(axes, x, y)
                start = (x + 1.0, y + 0.5)
        labels.append((y + 0.5, str(number)))
        y += 1.0
        before = number
    for x, column in enumerate(blocks):
        if column % 4 == 0 and x:
            axes.plot([x, x], [-0.4, y], color=INK, linewidth=1.6, clip_on=False, zorder=4)
    _bare(axes, "the matrix: cells hold the byte's offset", len(blocks), y)
    axes.set_xticks([x + 0.5 for x in range(len(blocks))], [f"block\n{column}" for column in blocks])
    axes.set_yticks([position for position, _ in labels], [text for _, text in labels])
    axes.set_ylabel("row", fontsize=11, color=INK)
    return start


def _draw_memory(axes: Axes, layout: Layout, row: int, block: int) -> tuple[float, float]:
    """512 bytes in lines of 16; cells hold (row, block). Returns where the arrow ends."""
    owners = layout.owners().tolist()
    byte = layout.offset(row, block)
    begin = byte // (LINE_BYTES * NUM_LINES) * LINE_BYTES * NUM_LINES
    lines = range(begin, min(begin + LINE_BYTES * NUM_LINES, layout.size), LINE_BYTES)
    for y, line in enumerate(lines):
        for x in range(min(LINE_BYTES, layout.size - line)):
            owner_row, owner_block = owners[line + x]
            padding = owner_row < 0
            text = "" if padding else f"{owner_row},{owner_block}"
            _cell(axes, x, y, PADDING if padding else _colour(line + x), text, 8.0)
    end_x, end_y = byte % LINE_BYTES, (byte - begin) // LINE_BYTES
    _mark(axes, end_x, end_y)
    tile_lines = layout.tile_rows * 4 // LINE_BYTES
    if layout.name != "packed":
        for y in range(tile_lines, len(lines), tile_lines):
            axes.plot([-0.25, LINE_BYTES], [y, y], color=INK, linewidth=1.2, clip_on=False, zorder=4)
    for word in range(1, 4):
        axes.plot([4 * word, 4 * word], [-0.4, len(lines)], color=INK, linewidth=1.6, clip_on=False, zorder=4)
    _bare(axes, f"memory, bytes {begin}..{lines[-1] + LINE_BYTES - 1}: cells hold row,block", LINE_BYTES, len(lines))
    axes.set_xticks([x + 0.5 for x in range(LINE_BYTES)], [f"+{x}" for x in range(LINE_BYTES)])
    axes.set_yticks([y + 0.5 for y in range(len(lines))], [str(line) for line in lines])
    axes.set_ylabel("byte", fontsize=11, color=INK)
    return end_x, end_y + 0.5
