"""Read the output projection of one layer from a DeepSeek-V4 / V4.1 checkpoint, and write a synthetic one.

What a checkpoint holds for layer L (TP1 sizes of DeepSeek-V4.1-Flash):

    layers.L.attn.wo_a.weight   F8_E4M3 [8192, 4096]   rows = groups * rank, columns = K of one group
    layers.L.attn.wo_a.scale    F8_E8M0 [256, 128]     one byte per 32x32 block (V4: 128x128)
    layers.L.attn.wo_b.weight   F8_E4M3 [5120, 8192]   rows = hidden size, columns = groups * rank
    layers.L.attn.wo_b.scale    F8_E8M0 [160, 256]

Accepted variants: any chain of `model.` / `language_model.` in front, `self_attn` for `attn`, `.weight_scale` or
`.weight_scale_inv` for `.scale` (all three multiply the element, the last one too), and scales as F8_E8M0, U8 or
F32 powers of two. Nothing about a model is tabulated: shapes and block sizes come from the tensors. The tensors leave
one thing open, how wo_a's rows split into groups; it is taken from, in this order,

    1. the argument `groups`,
    2. `o_groups` in the config.json beside the weights (also inside `text_config`),
    3. `o_groups` in the file's own safetensors metadata,
    4. the same layer's wq_b.weight: its rows are heads * 512, and the groups' columns together are as many,
    5. a rank of 1024, which all released DeepSeek-V4 and V4.1 models have.

Tensor parallelism shards by whole groups: rows of wo_a, the same groups' columns of wo_b, scales likewise. Only the
slices of the shard are read. Files are memory-mapped by the `safetensors` library (0.6.1 or newer, for F8_E8M0).
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from vllm_megaattn import layouts

HEAD_DIM = 512  # of one attention head, 448 + 64 rotary
DEFAULT_RANK = 1024

_PREFIX = r"(?:(?:model|language_model)\.)*"
_SCALE_SUFFIXES = ("scale", "weight_scale", "weight_scale_inv")
_SCALE_DTYPES = ("F8_E8M0", "U8", "F32")


@dataclass(frozen=True)
class OProjWeights:
    """One tensor-parallel shard of a layer's output projection, in the forms that the ops take.

    wo_a       float8_e4m3fn [G, rank, K]     G = groups of this shard
    wo_a_scale uint8 [G, rank / b0, K / b1]   UE8M0, blocks of `wo_a_block` = (b0, b1)
    wo_b       float8_e4m3fn [hidden, G * rank]
    wo_b_scale uint8 [ceil(hidden / b0), G * rank / b1]
    """

    wo_a: torch.Tensor
    wo_a_scale: torch.Tensor
    wo_b: torch.Tensor
    wo_b_scale: torch.Tensor
    wo_a_block: tuple[int, int]
    wo_b_block: tuple[int, int]
    layer: int
    tp_rank: int
    tp_size: int
    total_groups: int
    files: dict[str, str]  # key in the checkpoint -> file it was read from

    @property
    def groups(self) -> int:
        return self.wo_a.shape[0]

    @property
    def rank(self) -> int:
        return self.wo_a.shape[1]

    @property
    def heads_per_group(self) -> int:
        return self.wo_a.shape[2] // HEAD_DIM


# ---- reading ---------------------------------------------------------------------------------------------------


class Checkpoint:
    """The keys of a checkpoint and lazy access to their tensors: a single .safetensors file, a directory (with or
    without an index), or the index file itself. A context manager; what `read` returned is a copy and outlives it, and the
    files may be changed or removed once it is left.

    A single file of a sharded checkpoint is enough when it holds what is asked for; what it lacks is looked up in the
    index beside it, if there is one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stack = contextlib.ExitStack()
        self._handles: dict[Path, safe_open] = {}
        self._files: dict[str, Path] = {}
        if not self.path.exists():
            raise FileNotFoundError(f"checkpoint {self.path} does not exist")
        try:
            self._find_files()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._stack.close()

    @property
    def keys(self) -> list[str]:
        return list(self._files)

    def file_of(self, key: str) -> Path:
        return self._files[key]

    def metadata(self, key: str) -> dict[str, str]:
        """The free-form metadata of the file that holds `key`."""
        return self._open(self._files[key]).metadata() or {}

    def spec(self, key: str) -> tuple[str, list[int]]:
        """safetensors dtype name and shape of a tensor, from the header alone."""
        part = self._slice(key)
        return part.get_dtype(), list(part.get_shape())

    def read(self, key: str, rows: slice = slice(None), cols: slice = slice(None)) -> torch.Tensor:
        """`tensor[rows, cols]` of a 2-D tensor, a contiguous copy; other parts of the file are not touched.

        A slice of whole rows is a view of the mapping: kept, it would change with the file, and a file that gets
        shorter would kill the process (SIGBUS).
        """
        part = self._slice(key)
        try:
            with torch.device("cpu"):  # safetensors reads into torch's default device
                return part[rows, cols].clone(memory_format=torch.contiguous_format)
        except SafetensorError as error:
            raise ValueError(f"{self._files[key]}: cannot read {key}: {error}") from error

    def _find_files(self) -> None:
        if self.path.is_dir():
            index = self._find_index(self.path)
            if index is not None:
                self._files = self._read_index(index)
                return
            shards = sorted(self.path.glob("*.safetensors"))
            if not shards:
                raise FileNotFoundError(f"checkpoint {self.path} holds neither an index nor a .safetensors file")
            for shard in shards:
                self._files.update(dict.fromkeys(self._open(shard).keys(), shard))
            return
        if self.path.suffix == ".json":
            self._files = self._read_index(self.path)
            return
        index = self._find_index(self.path.parent)
        if index is not None:
            listed = self._read_index(index)
            if self.path.name in {file.name for file in listed.values()}:  # an index of this very checkpoint
                self._files = listed
        self._files.update(dict.fromkeys(self._open(self.path).keys(), self.path))

    @staticmethod
    def _find_index(directory: Path) -> Path | None:
        usual = directory / "model.safetensors.index.json"
        if usual.is_file():
            return usual
        others = sorted(directory.glob("*.safetensors.index.json"))
        return others[0] if others else None

    @staticmethod
    def _read_index(index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = dict(weight_map.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index with a 'weight_map' object: {error!r}") from error
        for name in names.values():
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"{index}: shard names must be plain file names, got {name!r}")
        return {key: index.parent / name for key, name in names.items()}

    def _open(self, file: Path) -> safe_open:
        handle = self._handles.get(file)
        if handle is None:
            try:
                handle = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"checkpoint {self.path}: shard {file} is missing") from error
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file} is not a readable safetensors file: {error} "
                    "(F8_E8M0 scales need safetensors 0.6.1 or newer)"
                ) from error
            self._handles[file] = handle
        return handle

    def _slice(self, key: str):
        file = self._files[key]
        try:
            return self._open(file).get_slice(key)
        except SafetensorError as error:
            raise ValueError(f"{file} does not hold {key}, although the index says so: {error}") from error


def load_o_proj(
    path: str | os.PathLike[str],
    layer: int,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    groups: int | None = None,
    device: torch.device | str = "cpu",
) -> OProjWeights:
    """Read wo_a and wo_b of `layer`, the shard of `tp_rank` out of `tp_size`.

    path: a .safetensors file, a checkpoint directory or its index file. groups: groups of the whole model, where the
    checkpoint does not tell (see the module's text).

    Raises FileNotFoundError for missing files, KeyError for missing tensors (with the nearest names) and ValueError
    for a wrong dtype, shape, scale or tp_size and for NaN elements or scales (a damaged file: how many of the shard, and
    the place of the first in the file's tensor), each naming the tensor and what was expected.
    """
    for name, value in (("layer", layer), ("tp_rank", tp_rank), ("tp_size", tp_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int)):
        raise TypeError(f"groups must be an int or None, got {groups!r}")
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank must be in [0, tp_size), got tp_rank={tp_rank} tp_size={tp_size}")
    with Checkpoint(path) as checkpoint:
        names = {name: _find_weight(checkpoint, layer, name) for name in ("wo_a", "wo_b")}
        scale_names = {name: _find_scale(checkpoint, key) for name, key in names.items()}
        for key in names.values():
            dtype, shape = checkpoint.spec(key)
            if dtype != "F8_E4M3":
                raise ValueError(f"{key} must be F8_E4M3 (quantised), got {dtype} {shape}")
            if len(shape) != 2 or 0 in shape:
                raise ValueError(f"{key} must be a 2-D matrix with at least one row and column, got shape {shape}")
        rows, group_cols = checkpoint.spec(names["wo_a"])[1]
        hidden, cols = checkpoint.spec(names["wo_b"])[1]
        if cols != rows:
            raise ValueError(
                f"{names['wo_b']} must have as many columns as {names['wo_a']} has rows (groups * rank), got "
                f"{[hidden, cols]} and {[rows, group_cols]}"
            )
        if group_cols % layouts.BLOCK:
            raise ValueError(f"{names['wo_a']} must have a multiple of 32 columns, got {[rows, group_cols]}")
        blocks = {}
        for name, key in scale_names.items():
            dtype, shape = checkpoint.spec(key)
            if dtype not in _SCALE_DTYPES:
                raise ValueError(f"{key} must be one of {', '.join(_SCALE_DTYPES)}, got {dtype} {shape}")
            weight_rows, weight_cols = checkpoint.spec(names[name])[1]
            blocks[name] = layouts.find_block_shape(weight_rows, weight_cols, shape, name=key)

        total_groups = _find_num_groups(checkpoint, names["wo_a"], rows, group_cols, groups)
        rank = rows // total_groups
        if total_groups % tp_size:
            raise ValueError(f"tp_size must divide the {total_groups} groups of the model, got {tp_size}")
        local_groups = total_groups // tp_size
        begin, end = tp_rank * local_groups * rank, (tp_rank + 1) * local_groups * rank
        if total_groups > 1 and rank % blocks["wo_a"][0]:
            raise ValueError(
                f"{scale_names['wo_a']}: blocks of {blocks['wo_a'][0]} rows straddle groups of {rank} rows (groups="
                f"{total_groups})"
            )
        if tp_size > 1 and (local_groups * rank) % blocks["wo_b"][1]:
            raise ValueError(
                f"{scale_names['wo_b']}: blocks of {blocks['wo_b'][1]} columns straddle the shards of "
                f"{local_groups * rank} columns (tp_size={tp_size})"
            )

        mine = slice(begin, end)
        wo_a = checkpoint.read(names["wo_a"], rows=mine)
        wo_b = checkpoint.read(names["wo_b"], cols=mine)
        layouts.refuse_nan(wo_a, name=names["wo_a"], offset=(begin, 0))
        layouts.refuse_nan(wo_b, name=names["wo_b"], offset=(0, begin))
        wo_a_scale = _read_scale(checkpoint, scale_names["wo_a"], rows=_shrink(mine, blocks["wo_a"][0]))
        wo_b_scale = _read_scale(checkpoint, scale_names["wo_b"], cols=_shrink(mine, blocks["wo_b"][1]))
        return OProjWeights(
            wo_a=wo_a.view(local_groups, rank, group_cols).to(device),
            wo_a_scale=wo_a_scale.view(local_groups, -1, wo_a_scale.shape[-1]).to(device),
            wo_b=wo_b.to(device),
            wo_b_scale=wo_b_scale.to(device),
            wo_a_block=blocks["wo_a"],
            wo_b_block=blocks["wo_b"],
            layer=layer,
            tp_rank=tp_rank,
            tp_size=tp_size,
            total_groups=total_groups,
            files={key: str(checkpoint.file_of(key)) for key in (*names.values(), *scale_names.values())},
        )


def _shrink(part: slice, block: int) -> slice:
    return slice(part.start // block, layouts.ceil_div(part.stop, block))


def _find_weight(checkpoint: Checkpoint, layer: int, name: str) -> str:
    wanted = re.compile(rf"{_PREFIX}layers\.{layer}\.(?:self_attn|attn)\.{name}\.weight")
    found = [key for key in checkpoint.keys if wanted.fullmatch(key)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(sorted(found))
        raise ValueError(f"checkpoint {checkpoint.path}: {name} of layer {layer} is ambiguous: {listed}")
    any_layer = re.compile(rf"{_PREFIX}layers\.(\d+)\.(?:self_attn|attn)\.{name}\.weight")
    layers = sorted({int(match[1]) for key in checkpoint.keys if (match := any_layer.fullmatch(key))})
    raise KeyError(
        f"checkpoint {checkpoint.path}: no [language_model.][model.]layers.{layer}.{{attn,self_attn}}.{name}.weight; "
        + (f"layers with {name} here: {_abridge(layers)}; " if layers else f"no layer has {name} here; ")
        + _near(checkpoint, f"layers.{layer}.attn.{name}.weight")
    )


def _find_scale(checkpoint: Checkpoint, weight_key: str) -> str:
    stem = weight_key.removesuffix("weight")
    found = [stem + suffix for suffix in _SCALE_SUFFIXES if stem + suffix in checkpoint.keys]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"checkpoint {checkpoint.path}: {weight_key} has several scales: {', '.join(found)}")
    raise KeyError(
        f"checkpoint {checkpoint.path}: {weight_key} has no scale, looked for {stem}{{{','.join(_SCALE_SUFFIXES)}}}; "
        + _near(checkpoint, stem + "scale")
    )


def _near(checkpoint: Checkpoint, key: str) -> str:
    near = difflib.get_close_matches(key, checkpoint.keys, n=4, cutoff=0.6)
    if near:
        return f"nearest names: {', '.join(near)}"
    return f"it holds {len(checkpoint.keys)} tensors, e.g. {', '.join(checkpoint.keys[:3]) or 'none'}"


def _abridge(numbers: Sequence[int]) -> str:
    if len(numbers) > 8:
        return f"{numbers[0]}..{numbers[-1]} ({len(numbers)} of them)"
    return ", ".join(map(str, numbers))


def _read_scale(checkpoint: Checkpoint, key: str, **part: slice) -> torch.Tensor:
    scale = layouts.scale_bytes(checkpoint.read(key, **part), name=key)
    layouts.refuse_nan(scale, name=key, offset=[part[axis].start if axis in part else 0 for axis in ("rows", "cols")])
    return scale


def _find_num_groups(checkpoint: Checkpoint, weight_key: str, rows: int, group_cols: int, groups: int | None) -> int:
    """Groups of the whole model; the order of the sources is the one in the module's text."""

    def accept(value: int, origin: str) -> int:
        if value < 1 or rows % value:
            raise ValueError(f"{weight_key} has {rows} rows, which do not split into {value} groups ({origin})")
        return value

    if groups is not None:
        return accept(groups, "argument groups")
    config = config_of(checkpoint.path)
    if config.is_file():
        found = _read_config(config)
        if found is not None:
            return accept(found, f"o_groups of {config}")
    stated = checkpoint.metadata(weight_key).get("o_groups")
    if stated is not None:
        if not stated.isdecimal():
            raise ValueError(f"{checkpoint.file_of(weight_key)}: metadata o_groups must be a number, got {stated!r}")
        return accept(int(stated), "o_groups of the file's metadata")
    query_key = weight_key.replace(".wo_a.", ".wq_b.")
    if query_key in checkpoint.keys:
        query_rows = checkpoint.spec(query_key)[1][0]
        if query_rows % group_cols == 0 and query_rows:
            return accept(query_rows // group_cols, f"{query_rows} rows of {query_key}")
    if rows % DEFAULT_RANK:
        raise ValueError(f"{weight_key} has {rows} rows, not a multiple of rank {DEFAULT_RANK}: give groups=")
    return rows // DEFAULT_RANK


def _read_config(config: Path) -> int | None:
    for part in config_parts(config):
        if part.get("o_groups") is not None:
            groups = part["o_groups"]
            if isinstance(groups, bool) or not isinstance(groups, int):
                raise ValueError(f"o_groups in {config} must be an integer, got {groups!r}")
            return groups
    return None


def config_of(path: str | os.PathLike[str]) -> Path:
    """Where the config.json of a checkpoint lies if it has one: in the directory, or beside the file."""
    path = Path(path)
    return (path if path.is_dir() else path.parent) / "config.json"


def config_parts(config: Path) -> list[dict[str, object]]:
    """The objects of a config.json that may describe the language model, the outermost first."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{config} must hold a JSON object, got {type(content).__name__}")
    return [
        part
        for part in (content, content.get("text_config"), content.get("language_config"))
        if isinstance(part, dict)
    ]


# ---- a synthetic checkpoint ------------------------------------------------------------------------------------

_ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "F32": 4}


@dataclass(frozen=True)
class Dims:
    """Sizes of one layer's output projection over all tensor-parallel ranks."""

    groups: int
    rank: int
    group_cols: int
    hidden: int


FULL_DIMS = Dims(groups=8, rank=1024, group_cols=4096, hidden=5120)  # DeepSeek-V4.1-Flash
TINY_DIMS = Dims(groups=8, rank=128, group_cols=1024, hidden=256)


def write_synthetic_checkpoint(
    path: str | os.PathLike[str],
    *,
    tiny: bool = False,
    version: str = "v4.1",
    seed: int = 0,
    layers: int | Sequence[int] = 1,
    names: str = "deepseek",
    shards: int = 1,
    dims: Dims | None = None,
) -> Path:
    """Write a checkpoint with the real names, dtypes and shapes and plausible random weights; returns its path.

    tiny:    TINY_DIMS instead of FULL_DIMS (1.3 MB instead of 75 MB a layer); `dims` overrides both.
    version: "v4.1" (32x32 scale blocks) or "v4" (128x128).
    layers:  how many layers, or which.
    names:   "deepseek": layers.L.attn.wo_a.scale in F8_E8M0; "hf": model.layers.L.self_attn.wo_a.weight_scale_inv in
             F32, as re-exported checkpoints have them.
    shards:  1 writes one file at `path`; more make `path` a directory with model-0000i-of-0000n.safetensors and an
             index, tensors dealt out in turn, so that wo_a and wo_b lie in different files.

    The same arguments give the same bytes. Weights are Gaussian, each scale block with a gain of its own between 1/8
    and 8, so that a scale read from the wrong place shows. The number of groups goes into the files' metadata.
    Memory: 256 rows of a matrix at a time.
    """
    blocks = {"v4.1": 32, "v4": 128}
    if version not in blocks:
        raise ValueError(f"version must be 'v4.1' or 'v4', got {version!r}")
    if names not in ("deepseek", "hf"):
        raise ValueError(f"names must be 'deepseek' or 'hf', got {names!r}")
    if shards < 1:
        raise ValueError(f"shards must be positive, got {shards}")
    block = blocks[version]
    dims = dims or (TINY_DIMS if tiny else FULL_DIMS)
    numbers = range(layers) if isinstance(layers, int) else layers

    weights: list[_Matrix] = []
    for layer in numbers:
        stem = f"layers.{layer}.attn" if names == "deepseek" else f"model.layers.{layer}.self_attn"
        all_rows = dims.groups * dims.rank
        for which, (name, rows, cols) in enumerate(
            (("wo_a", all_rows, dims.group_cols), ("wo_b", dims.hidden, all_rows))
        ):
            draw_seed = (seed * 1_000_003 + layer) * 2 + which
            weights.append(_Matrix(f"{stem}.{name}", rows, cols, block, draw_seed, names == "hf"))

    metadata = {"format": "pt", "o_groups": str(dims.groups), "generator": "vllm_megaattn synthetic"}
    path = Path(path)
    if shards == 1:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_file(path, weights, metadata)
        return path
    path.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = weights[shard::shards]
        file = path / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        _write_file(file, part, metadata)
        weight_map.update({key: file.name for matrix in part for key in matrix.headers()})
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return path


@dataclass(frozen=True)
class _Matrix:
    """A random weight matrix and its block scales, drawn a few block rows at a time."""

    stem: str
    rows: int
    cols: int
    block: int
    seed: int
    float_scales: bool

    def headers(self) -> dict[str, tuple[str, list[int]]]:
        scale_shape = list(layouts.block_scale_shape(self.rows, self.cols, (self.block, self.block)))
        scale = (".weight_scale_inv", "F32") if self.float_scales else (".scale", "F8_E8M0")
        return {
            self.stem + ".weight": ("F8_E4M3", [self.rows, self.cols]),
            self.stem + scale[0]: (scale[1], scale_shape),
        }

    def draw(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(e4m3 [rows, cols], scale bytes uint8 [block rows, cols / block]) of a few block rows at a time."""
        generator = torch.Generator().manual_seed(self.seed)
        block, num_blocks = self.block, layouts.ceil_div(self.cols, self.block)
        at_once = max(1, 256 // block)  # block rows: 8 MB of FP32 for 8192 columns
        for begin in range(0, self.rows, at_once * block):
            rows = min(at_once * block, self.rows - begin)
            block_rows = layouts.ceil_div(rows, block)
            values = torch.randn(block_rows, block, num_blocks, block, generator=generator, device="cpu")
            gain = torch.randint(-3, 4, (block_rows, num_blocks), generator=generator, device="cpu")
            amax = values.abs().amax(dim=(1, 3))
            # Smallest exponent e with amax <= 448 * 2^e, on the FP32 bits: 448 = 1.75 * 2^8. The gain and the 2^-6
            # (weights of about 1/64) only move the exponent, so they go straight into the scale byte.
            byte = ((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8
            values.mul_(layouts.scale_to_float32((254 - byte).to(torch.uint8))[:, None, :, None])
            data = values.clamp_(-layouts.E4M3_MAX, layouts.E4M3_MAX).to(torch.float8_e4m3fn)
            data = data.view(block_rows * block, num_blocks * block)[:rows, : self.cols].contiguous()
            yield data, (byte + gain - 6).to(torch.uint8)


def _write_file(file: Path, matrices: Sequence[_Matrix], metadata: dict[str, str]) -> None:
    """Stream matrices into a safetensors file: 8 bytes header length, JSON header, tensors without gaps.

    Written here, not by the safetensors library, because that needs every tensor in memory, and numpy.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for matrix in matrices:
        for key, (dtype, shape) in matrix.headers().items():
            size = shape[0] * shape[1] * _ITEM_BYTES[dtype]
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for matrix in matrices:
            scales = []
            for data, byte in matrix.draw():
                _write_tensor(out, data)
                scales.append(byte)
            scale = torch.cat(scales)
            _write_tensor(out, layouts.scale_to_float32(scale) if matrix.float_scales else scale)


def _write_tensor(out: BinaryIO, tensor: torch.Tensor) -> None:
    """The bytes of a contiguous CPU tensor, without a copy and without numpy."""
    out.write((ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr()))
