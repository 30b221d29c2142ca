"""`vllm_megaattn.checkpoint`: the synthetic writer, every accepted form of a checkpoint, every refusal.

Files are read back here with the safetensors library alone, and small ones are written by it, so that the writer and
the reader are not each other's only witness.
"""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import safetensors.torch
import torch

from vllm_megaattn import checkpoint, layouts
from vllm_megaattn.checkpoint import Dims, load_o_proj, write_synthetic_checkpoint

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SMALL = Dims(groups=4, rank=64, group_cols=512, hidden=96)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_synthetic_checkpoint(tmp_path_factory.mktemp("tiny") / "model.safetensors", tiny=True)


def header(path):
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def small_tensors(stem="layers.0.attn", scale="scale", dims=SMALL, block=32):
    """Tensors of one layer with codes that count up, scales that all differ from their neighbours."""
    rows = dims.groups * dims.rank
    tensors = {}
    for name, shape in (("wo_a", (rows, dims.group_cols)), ("wo_b", (dims.hidden, rows))):
        codes = torch.arange(shape[0] * shape[1], dtype=torch.int32).remainder(0x7F).to(torch.uint8).view(shape)
        blocks = layouts.block_scale_shape(*shape, (block, block))
        scales = (100 + torch.arange(blocks[0] * blocks[1], dtype=torch.int32).remainder(53)).to(torch.uint8)
        tensors[f"{stem}.{name}.weight"] = codes.view(E4M3)
        tensors[f"{stem}.{name}.{scale}"] = scales.view(blocks).view(E8M0)
    return tensors


def save(path, tensors, **metadata):
    safetensors.torch.save_file(tensors, path, metadata=metadata or {"o_groups": str(SMALL.groups)})
    return path


def codes(tensor):
    return tensor.contiguous().view(torch.uint8)


# ---- the synthetic checkpoint ---------------------------------------------------------------------------------


def test_full_size_names_dtypes_and_shapes(tmp_path):
    path = write_synthetic_checkpoint(tmp_path / "model.safetensors")
    head = header(path)
    assert {key: (value["dtype"], value["shape"]) for key, value in head.items() if key != "__metadata__"} == {
        "layers.0.attn.wo_a.weight": ("F8_E4M3", [8192, 4096]),
        "layers.0.attn.wo_a.scale": ("F8_E8M0", [256, 128]),
        "layers.0.attn.wo_b.weight": ("F8_E4M3", [5120, 8192]),
        "layers.0.attn.wo_b.scale": ("F8_E8M0", [160, 256]),
    }
    weights = load_o_proj(path, 0, tp_rank=1, tp_size=4)
    assert (list(weights.wo_a.shape), list(weights.wo_b.shape)) == ([2, 1024, 4096], [5120, 2048])
    assert (list(weights.wo_a_scale.shape), list(weights.wo_b_scale.shape)) == ([2, 32, 128], [160, 64])
    assert (weights.groups, weights.rank, weights.heads_per_group, weights.total_groups) == (2, 1024, 8, 8)


@pytest.mark.parametrize(
    ("options", "keys", "scale_shapes"),
    [
        ({"version": "v4"}, ("layers.5.attn.wo_a.scale", "layers.5.attn.wo_b.scale"), ([8, 8], [2, 8])),
        (
            {"names": "hf"},
            ("model.layers.5.self_attn.wo_a.weight_scale_inv", "model.layers.5.self_attn.wo_b.weight_scale_inv"),
            ([32, 32], [8, 32]),
        ),
    ],
)
def test_variants_of_the_writer(tmp_path, options, keys, scale_shapes):
    path = write_synthetic_checkpoint(tmp_path / "m.safetensors", tiny=True, layers=[5, 7], **options)
    tensors = safetensors.torch.load_file(path)
    assert len(tensors) == 8
    assert [list(tensors[key].shape) for key in keys] == list(scale_shapes)
    assert tensors[keys[0]].dtype == (torch.float32 if options.get("names") else E8M0)
    weights = load_o_proj(path, 5)
    assert weights.wo_a_block == ((128, 128) if options.get("version") else (32, 32))
    assert weights.wo_a_scale.dtype == torch.uint8
    stem = keys[0].rpartition(".")[0]
    assert torch.equal(codes(weights.wo_a).view(1024, 1024), codes(tensors[f"{stem}.weight"]))


def test_synthetic_weights_are_repeatable_and_plausible(tmp_path, tiny):
    again = write_synthetic_checkpoint(tmp_path / "a.safetensors", tiny=True)
    other = write_synthetic_checkpoint(tmp_path / "b.safetensors", tiny=True, seed=1)
    assert again.read_bytes() == tiny.read_bytes()
    assert other.read_bytes() != tiny.read_bytes()
    weights = load_o_proj(tiny, 0)
    element = layouts.e4m3_to_float32(weights.wo_b)
    top = element.abs().view(8, 32, 32, 32).amax(dim=(1, 3))
    assert bool(((top > 224.0 - 16.0) & (top <= 448.0)).all())  # each block uses the range of e4m3
    linear = layouts.expand_blocks(weights.wo_b_scale, 256, 1024, (32, 32))
    values = layouts.dequantize(weights.wo_b, linear)
    assert 0.01 < values.std() < 0.3
    assert abs(values.mean()) < 0.002
    different = weights.wo_b_scale[:, 1:] != weights.wo_b_scale[:, :-1]
    assert different.double().mean() > 0.7  # so that a scale read from the wrong place shows


def test_sharded_writer_spreads_wo_a_and_wo_b(tmp_path, tiny):
    directory = write_synthetic_checkpoint(tmp_path / "sharded", tiny=True, shards=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {key.split(".")[3]: name for key, name in index["weight_map"].items()}
    assert files == {"wo_a": "model-00001-of-00002.safetensors", "wo_b": "model-00002-of-00002.safetensors"}
    whole = load_o_proj(tiny, 0, tp_rank=3, tp_size=8)
    # a directory, its index, or one of its shards: the missing part is found through the index
    for path in (directory, directory / "model.safetensors.index.json", directory / files["wo_a"]):
        weights = load_o_proj(path, 0, tp_rank=3, tp_size=8)
        for name in ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale"):
            assert torch.equal(codes(getattr(weights, name)), codes(getattr(whole, name)))
        assert {key: file.rpartition("/")[2] for key, file in weights.files.items()} == index["weight_map"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": "v3"}, "version must be 'v4.1' or 'v4', got 'v3'"),
        ({"names": "gguf"}, "names must be 'deepseek' or 'hf', got 'gguf'"),
        ({"shards": 0}, "shards must be positive, got 0"),
    ],
)
def test_writer_refuses(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_synthetic_checkpoint(tmp_path / "m.safetensors", tiny=True, **arguments)


# ---- shards of tensor parallelism -------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_tp_shards_partition_the_file(tiny, tp_size):
    tensors = {key: codes(value) for key, value in safetensors.torch.load_file(tiny).items()}
    shards = [load_o_proj(tiny, 0, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    stem = "layers.0.attn"
    whole_a = torch.cat([codes(shard.wo_a) for shard in shards]).view(1024, 1024)
    assert torch.equal(whole_a, tensors[f"{stem}.wo_a.weight"])
    whole_a_scale = torch.cat([shard.wo_a_scale for shard in shards]).view(32, 32)
    assert torch.equal(whole_a_scale, tensors[f"{stem}.wo_a.scale"])
    assert torch.equal(torch.cat([codes(shard.wo_b) for shard in shards], 1), tensors[f"{stem}.wo_b.weight"])
    assert torch.equal(torch.cat([shard.wo_b_scale for shard in shards], 1), tensors[f"{stem}.wo_b.scale"])
    assert all(tensor.is_contiguous() for shard in shards for tensor in (shard.wo_a, shard.wo_b, shard.wo_b_scale))


def test_only_the_slices_of_the_shard_are_read(tiny, monkeypatch):
    read = {}

    class Slice:
        def __init__(self, key, part):
            self.key, self.part = key, part

        def __getattr__(self, name):
            return getattr(self.part, name)

        def __getitem__(self, where):
            tensor = self.part[where]
            read[self.key] = tensor.numel()
            return tensor

    class Handle:
        def __init__(self, *args, **kwargs):
            self.handle = safetensors.safe_open(*args, **kwargs)

        def __enter__(self):
            self.handle.__enter__()
            return self

        def __exit__(self, *args):
            return self.handle.__exit__(*args)

        def keys(self):
            return self.handle.keys()

        def metadata(self):
            return self.handle.metadata()

        def get_slice(self, key):
            return Slice(key, self.handle.get_slice(key))

    monkeypatch.setattr(checkpoint, "safe_open", Handle)
    load_o_proj(tiny, 0, tp_rank=5, tp_size=8)
    stem = "layers.0.attn"
    assert read == {
        f"{stem}.wo_a.weight": 128 * 1024,
        f"{stem}.wo_a.scale": 4 * 32,
        f"{stem}.wo_b.weight": 256 * 128,
        f"{stem}.wo_b.scale": 8 * 4,
    }


@pytest.mark.parametrize("tp_size", [1, 4])
def test_weights_are_copies(tmp_path, tp_size):
    """A view of the mapping would change with the file, and die of SIGBUS once it is shorter."""
    path = write_synthetic_checkpoint(tmp_path / "m.safetensors", tiny=True)
    weights = load_o_proj(path, 0, tp_size=tp_size)
    kept = [weights.wo_a, weights.wo_a_scale, weights.wo_b, weights.wo_b_scale]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert str(path) not in maps.read()
    before = [codes(tensor).clone() for tensor in kept]
    with open(path, "r+b") as file:
        file.write(b"\x55" * os.path.getsize(path))
    for tensor, wanted in zip(kept, before, strict=True):
        assert torch.equal(codes(tensor), wanted)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("name", ["wo_a", "wo_b"])
def test_empty_weights_are_refused(tmp_path, name, rows):
    tensors = small_tensors()
    for suffix in ("weight", "scale"):
        key = f"layers.0.attn.{name}.{suffix}"
        tensors[key] = tensors[key][:0] if rows else tensors[key][:, :0].contiguous()
    with pytest.raises(ValueError, match=rf"{name}.weight must be a 2-D matrix with at least one row and column"):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 3}, "tp_size must divide the 8 groups of the model, got 3"),
        ({"tp_size": 16}, "tp_size must divide the 8 groups of the model, got 16"),
        ({"tp_size": 0}, r"tp_rank must be in \[0, tp_size\), got tp_rank=0 tp_size=0"),
        ({"tp_size": 4, "tp_rank": 4}, r"tp_rank must be in \[0, tp_size\), got tp_rank=4 tp_size=4"),
        ({"tp_size": 4, "tp_rank": -1}, r"tp_rank must be in \[0, tp_size\), got tp_rank=-1 tp_size=4"),
    ],
)
def test_wrong_tensor_parallel_shards(tiny, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_o_proj(tiny, 0, **arguments)


def test_blocks_that_straddle_a_boundary_are_refused(tmp_path):
    dims = Dims(groups=4, rank=64, group_cols=512, hidden=128)
    path = save(tmp_path / "m.safetensors", small_tensors(dims=dims, block=128))
    with pytest.raises(ValueError, match=r"wo_a.scale: blocks of 128 rows straddle groups of 64 rows \(groups=4\)"):
        load_o_proj(path, 0)
    assert load_o_proj(path, 0, groups=2).wo_a_block == (128, 128)
    tensors = small_tensors(dims=dims)
    tensors["layers.0.attn.wo_b.scale"] = small_tensors(dims=dims, block=128)["layers.0.attn.wo_b.scale"]
    mixed = save(tmp_path / "mixed.safetensors", tensors)
    with pytest.raises(ValueError, match=r"wo_b.scale: blocks of 128 columns straddle the shards of 64 columns"):
        load_o_proj(mixed, 0, tp_size=4)
    assert load_o_proj(mixed, 0, tp_size=2).wo_b_block == (128, 128)


# ---- key names, scale dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["", "model.", "language_model.", "language_model.model.", "model.language_model."]
)
@pytest.mark.parametrize("attention", ["attn", "self_attn"])
@pytest.mark.parametrize("scale", ["scale", "weight_scale", "weight_scale_inv"])
def test_key_names(tmp_path, prefix, attention, scale):
    tensors = small_tensors(f"{prefix}layers.3.{attention}", scale)
    tensors["mtp.0.attn.wo_a.weight"] = torch.zeros(2)  # another module's projection is not taken for a layer's
    weights = load_o_proj(save(tmp_path / "m.safetensors", tensors), 3)
    assert torch.equal(codes(weights.wo_b), codes(tensors[f"{prefix}layers.3.{attention}.wo_b.weight"]))
    assert torch.equal(weights.wo_b_scale, codes(tensors[f"{prefix}layers.3.{attention}.wo_b.{scale}"]))


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0, torch.float32])
def test_scale_dtypes(tmp_path, dtype):
    tensors = small_tensors()
    expected = codes(tensors["layers.0.attn.wo_a.scale"])
    converted = {torch.uint8: expected, E8M0: expected.view(E8M0), torch.float32: layouts.scale_to_float32(expected)}
    tensors["layers.0.attn.wo_a.scale"] = converted[dtype].contiguous()
    weights = load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)
    assert torch.equal(weights.wo_a_scale.view(8, 16), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, E4M3])
def test_other_scale_dtypes_are_refused(tmp_path, dtype):  # B16
    tensors = small_tensors()
    tensors["layers.0.attn.wo_b.scale"] = torch.ones(3, 8).to(dtype)
    with pytest.raises(
        ValueError, match=r"layers.0.attn.wo_b.scale must be one of F8_E8M0, U8, F32, got .* \[3, 8\]"
    ):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)


@pytest.mark.parametrize("bad", [0.3, 0.75, 0.0, -1.0, math.inf])
def test_float_scales_that_are_not_powers_of_two_are_refused(tmp_path, bad):  # B13, B14
    tensors = small_tensors()
    tensors["layers.0.attn.wo_a.scale"] = torch.full((8, 16), bad)
    with pytest.raises(ValueError, match=r"layers.0.attn.wo_a.scale must hold positive powers of two"):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(
    ("name", "places", "message"),
    [
        (
            "wo_a.weight",
            [(130, 5), (255, 511)],
            r"wo_a.weight holds NaN elements .*: 2 of .*, the first at \[130, 5\]",
        ),
        (
            "wo_b.weight",
            [(95, 200)],
            r"wo_b.weight holds NaN elements \(0x7F or 0xFF\): 1 of .*, the first at \[95, 200\]",
        ),
        ("wo_a.scale", [(4, 3)], r"wo_a.scale holds NaN scales \(0xFF\): 1 of .*, the first at \[4, 3\]"),
        ("wo_b.scale", [(2, 5), (2, 6)], r"wo_b.scale holds NaN scales \(0xFF\): 2 of .*, the first at \[2, 5\]"),
    ],
)
def test_nan_in_a_file_is_refused(tmp_path, name, places, message, code):
    """Of the shard that is read; places are those in the file's tensor. A scale byte of 0x7F is 1.0."""
    tensors = small_tensors()
    for place in places:
        codes(tensors[f"layers.0.attn.{name}"])[place] = code
    path = save(tmp_path / "m.safetensors", tensors)
    load_o_proj(path, 0, tp_rank=0, tp_size=2)
    for shard in ({}, {"tp_rank": 1, "tp_size": 2}):
        if name.endswith("scale") and code == 0x7F:
            load_o_proj(path, 0, **shard)
            continue
        with pytest.raises(ValueError, match=rf"layers.0.attn.{message}"):
            load_o_proj(path, 0, **shard)


# ---- groups ---------------------------------------------------------------------------------------------------


def test_many_groups(tmp_path):
    """The ratios of a larger model: 16 groups, TP16."""
    dims = Dims(groups=16, rank=64, group_cols=1024, hidden=224)
    path = write_synthetic_checkpoint(tmp_path / "m.safetensors", dims=dims)
    weights = load_o_proj(path, 0, tp_rank=15, tp_size=16)
    assert (list(weights.wo_a.shape), list(weights.wo_b.shape)) == ([1, 64, 1024], [224, 64])
    assert (weights.total_groups, weights.heads_per_group) == (16, 2)


def test_where_the_number_of_groups_comes_from(tmp_path):
    """Each source in turn, weakest first; a stronger one overrides it."""
    tensors = small_tensors()
    path = tmp_path / "m.safetensors"
    save(path, tensors, format="pt")
    with pytest.raises(ValueError, match="has 256 rows, not a multiple of rank 1024: give groups="):
        load_o_proj(path, 0)
    tensors["layers.0.attn.wq_b.weight"] = torch.zeros(2 * 512, 32)  # 2 heads of 512 = 2 groups of 512 columns
    save(path, tensors, format="pt")
    assert load_o_proj(path, 0).total_groups == 2
    save(path, tensors, o_groups="4")
    assert load_o_proj(path, 0).total_groups == 4
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 96}))
    assert load_o_proj(path, 0).total_groups == 4
    config.write_text(json.dumps({"text_config": {"o_groups": 8}}))
    assert load_o_proj(path, 0).total_groups == 8
    config.write_text(json.dumps({"o_groups": 1, "text_config": {"o_groups": 8}}))
    assert load_o_proj(path, 0).total_groups == 1
    assert load_o_proj(path, 0, groups=2).total_groups == 2


def test_default_rank(tmp_path):
    tensors = small_tensors(dims=Dims(groups=2, rank=1024, group_cols=32, hidden=32))
    weights = load_o_proj(save(tmp_path / "m.safetensors", tensors, format="pt"), 0)
    assert (weights.groups, weights.rank) == (2, 1024)


def test_impossible_numbers_of_groups_are_refused(tmp_path):
    path = save(tmp_path / "m.safetensors", small_tensors(), o_groups="many")
    with pytest.raises(ValueError, match=r"256 rows, which do not split into 3 groups \(argument groups\)"):
        load_o_proj(path, 0, groups=3)
    with pytest.raises(ValueError, match="metadata o_groups must be a number, got 'many'"):
        load_o_proj(path, 0)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"o_groups": 5}))
    with pytest.raises(ValueError, match=r"do not split into 5 groups \(o_groups of .*config.json\)"):
        load_o_proj(path, 0)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load_o_proj(path, 0)
    config.write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object, got list"):
        load_o_proj(path, 0)


# ---- missing, wrong or damaged tensors ---------------------------------------------------------------------------


def test_missing_layer_lists_what_is_there(tiny):
    with pytest.raises(KeyError) as caught:
        load_o_proj(tiny, 3)
    message = caught.value.args[0]
    assert "no [language_model.][model.]layers.3.{attn,self_attn}.wo_a.weight" in message
    assert "layers with wo_a here: 0;" in message
    assert "nearest names: layers.0.attn.wo_a.weight" in message


def test_many_layers_are_abridged(tmp_path):
    tensors = {f"layers.{layer}.attn.wo_a.weight": torch.zeros(1) for layer in range(10)}
    with pytest.raises(KeyError, match=r"layers with wo_a here: 0\.\.9 \(10 of them\)"):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 12)


def test_file_without_any_projection(tmp_path):
    path = save(tmp_path / "m.safetensors", {"embedding": torch.zeros(1)})
    with pytest.raises(KeyError, match=r"no layer has wo_a here; it holds 1 tensors, e.g. embedding"):
        load_o_proj(path, 0)


def test_missing_wo_b_and_missing_scale(tmp_path):
    tensors = small_tensors()
    del tensors["layers.0.attn.wo_b.weight"]
    with pytest.raises(KeyError, match=r"wo_b.weight; no layer has wo_b here; nearest names: .*wo_a.weight"):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)
    tensors = small_tensors()
    del tensors["layers.0.attn.wo_a.scale"]
    with pytest.raises(
        KeyError, match=r"has no scale, looked for .*\{scale,weight_scale,weight_scale_inv\}; nearest"
    ):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)


def test_ambiguous_names_are_refused(tmp_path):
    both = {**small_tensors(), **small_tensors("model.layers.0.self_attn")}
    with pytest.raises(ValueError, match=r"wo_a of layer 0 is ambiguous: layers.0.attn.wo_a.weight, model.layers.0"):
        load_o_proj(save(tmp_path / "m.safetensors", both), 0)
    twice = {**small_tensors(), **small_tensors(scale="weight_scale_inv")}
    with pytest.raises(ValueError, match=r"has several scales: .*wo_a.scale, .*wo_a.weight_scale_inv"):
        load_o_proj(save(tmp_path / "m.safetensors", twice), 0)


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("wo_a.weight", torch.zeros(256, 512, dtype=torch.bfloat16), r"wo_a.weight must be F8_E4M3 .*got BF16 \[256"),
        (
            "wo_b.weight",
            torch.zeros(96, 256, dtype=torch.int8),
            r"wo_b.weight must be F8_E4M3 .*, got I8 \[96, 256\]",
        ),
        (
            "wo_a.weight",
            torch.zeros(4, 64, 512).to(E4M3),
            r"wo_a.weight must be a 2-D matrix with at least one row and column, got shape \[4, 64, 512",
        ),
        ("wo_b.weight", torch.zeros(96, 128).to(E4M3), r"wo_b.weight must have as many columns as .*wo_a.* has rows"),
        ("wo_a.weight", torch.zeros(256, 500).to(E4M3), r"wo_a.weight must have a multiple of 32 columns, got \[256"),
        ("wo_a.scale", torch.zeros(8, 15, dtype=torch.uint8), r"wo_a.scale has shape \[8, 15\], which fits no block"),
        ("wo_b.scale", torch.zeros(24, dtype=torch.uint8), r"wo_b.scale has shape \[24\], which fits no block"),
    ],
)
def test_wrong_dtype_or_shape(tmp_path, key, tensor, message):
    tensors = {**small_tensors(), f"layers.0.attn.{key}": tensor}
    with pytest.raises(ValueError, match=message):
        load_o_proj(save(tmp_path / "m.safetensors", tensors), 0)


def test_unreadable_files(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*nowhere does not exist"):
        load_o_proj(tmp_path / "nowhere", 0)
    with pytest.raises(FileNotFoundError, match=r"holds neither an index nor a \.safetensors file"):
        load_o_proj(tmp_path, 0)
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(b"not a checkpoint" * 100)
    with pytest.raises(ValueError, match=r"noise.safetensors is not a readable safetensors file"):
        load_o_proj(noise, 0)
    noise.write_bytes(tiny.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"noise.safetensors is not a readable safetensors file"):
        load_o_proj(noise, 0)


def test_directory_without_an_index(tmp_path, tiny):
    tensors = safetensors.torch.load_file(tiny)
    for name in ("wo_a", "wo_b"):
        part = {key: value for key, value in tensors.items() if name in key}
        save(tmp_path / f"{name}.safetensors", part, o_groups="8")
    weights = load_o_proj(tmp_path, 0, tp_rank=2, tp_size=4)
    assert torch.equal(codes(weights.wo_b), codes(tensors["layers.0.attn.wo_b.weight"])[:, 512:768])


def test_damaged_index(tmp_path):
    directory = write_synthetic_checkpoint(tmp_path / "sharded", dims=SMALL, shards=2)
    index = directory / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    first, second = sorted(directory.glob("*.safetensors"))
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"shard .*model-00002-of-00002.safetensors is missing"):
        load_o_proj(directory, 0)
    (tmp_path / "elsewhere").rename(second)

    wrong = {**good["weight_map"], "layers.0.attn.wo_b.weight": first.name}
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(
        ValueError, match=r"model-00001.* does not hold layers.0.attn.wo_b.weight, although the index"
    ):
        load_o_proj(directory, 0)
    index.write_text(json.dumps({"weight_map": {"layers.0.attn.wo_a.weight": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match=r"shard names must be plain file names, got '\.\./secret.safetensors'"):
        load_o_proj(directory, 0)
    for name in ("", ".", "..", None, ["a"]):
        index.write_text(json.dumps({"weight_map": {"layers.0.attn.wo_a.weight": name}}))
        with pytest.raises(ValueError, match=f"shard names must be plain file names, got {re.escape(repr(name))}"):
            load_o_proj(directory, 0)
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="is not a safetensors index with a 'weight_map' object"):
            load_o_proj(directory, 0)


def test_other_index_names_and_shards_of_another_checkpoint(tmp_path):
    directory = write_synthetic_checkpoint(tmp_path / "sharded", dims=SMALL, shards=2)
    (directory / "model.safetensors.index.json").rename(directory / "other.safetensors.index.json")
    assert load_o_proj(directory, 0).groups == SMALL.groups
    stranger = save(directory / "stranger.safetensors", small_tensors())  # not in the index: read by itself
    assert set(load_o_proj(stranger, 0).files.values()) == {str(stranger)}


def test_load_moves_to_the_device(tiny):
    weights = load_o_proj(tiny, 0, device="meta")
    assert {tensor.device.type for tensor in (weights.wo_a, weights.wo_a_scale, weights.wo_b)} == {"meta"}
