"""Records what a Hopper GPU computes, for test_emulated_recorded.py: run once on the device, commit the file.

    python tests/emulator/record_hopper.py            # writes tests/emulator/data/hopper.npz, well below 1 MB

Every case goes through the package's own ops (vllm_megaattn), so it covers the kernels with their plans, and holds the
inputs as well as the outputs. The inputs are chosen so that BF16 results still show the accumulator's last bits: many
products cancel, so that what a tensor core cuts off is not small beside the sum.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
FILE = HERE / "data" / "hopper.npz"

# name: (T, G, N, K, x_span, weights, scale_span or 0 for BF16)
CASES = {
    "decode_bf16": (5, 1, 64, 1024, 256, "prepared", 0),
    "decode_mx32": (9, 2, 64, 512, 256, "prepared", 32),
    "wide_bf16": (70, 1, 96, 512, 256, "prepared", 0),
    "wide_mx32": (66, 1, 256, 512, 256, "prepared", 32),
    "wide_mx256": (66, 1, 256, 512, 256, "prepared", 256),
    "per32_bf16": (33, 2, 64, 384, 32, "32x32", 0),
    "per32_mx32": (66, 1, 64, 384, 32, "32x32", 32),
    "rows_bf16": (17, 1, 96, 256, 32, "rows", 0),
}


def cancelling_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any finite codes; half of the columns repeat their neighbour with the other sign, a little changed."""
    codes = (rng.integers(0, 0x7F, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)
    opposite = (codes[..., 0::2] ^ 0x80) + rng.integers(0, 2, codes[..., 0::2].shape).astype(np.uint8)
    opposite = np.where((opposite & 0x7F) == 0x7F, codes[..., 0::2] ^ 0x80, opposite)
    codes[..., 1::2] = np.where(rng.random(opposite.shape) < 0.5, opposite, codes[..., 1::2])
    return codes


def inputs(name: str) -> dict[str, np.ndarray]:
    """x, x_scale [T, G, K / 32], w, w_scale [G, N, K / 32] of a case, as codes."""
    tokens, groups, rows, k, x_span, weights, _ = CASES[name]
    rng = np.random.default_rng(list(name.encode()))
    x = cancelling_e4m3(rng, (tokens, groups, k))
    w = (rng.integers(0x30, 0x40, (groups, rows, k)) | rng.integers(0, 2, (groups, rows, 1)) << 7).astype(np.uint8)
    x_scale = rng.integers(118, 132, (tokens, groups, k // x_span)).astype(np.uint8).repeat(x_span // 32, axis=2)
    shared_rows, cols = 1 if weights == "rows" else 32, 1 if weights == "prepared" else k // 32
    w_scale = rng.integers(118, 132, (groups, -(-rows // shared_rows), cols)).astype(np.uint8)
    w_scale = w_scale.repeat(shared_rows, axis=1)[:, :rows].repeat(k // 32 // cols, axis=2)
    return {"x": x, "x_scale": x_scale, "w": w, "w_scale": np.ascontiguousarray(w_scale)}


def run_on_device(name: str, data: dict[str, np.ndarray], device: str) -> dict[str, np.ndarray]:
    """out and out_scale of the package's einsum."""
    import torch

    import vllm_megaattn

    _, _, _, _, x_span, weights, scale_span = CASES[name]
    e4m3 = torch.float8_e4m3fn
    x, w = (torch.from_numpy(data[key]).view(e4m3).to(device) for key in ("x", "w"))
    words = torch.from_numpy(np.ascontiguousarray(data["x_scale"]).view(np.int32)).to(device)
    if weights == "rows":
        w_scale = torch.from_numpy(data["w_scale"].view(np.int32)).to(device)
    else:
        blocks = data["w_scale"][:, ::32, : 1 if weights == "prepared" else None]
        w_scale = torch.from_numpy(np.ascontiguousarray(blocks)).to(device)
    if scale_span == 0:
        z = vllm_megaattn.einsum_fp8_bf16(x, words, w, w_scale, x_span=x_span)
        return {"out": z.cpu().view(torch.int16).numpy().view(np.uint16)}
    z, z_scale = vllm_megaattn.einsum_fp8_sfd128x4(x, words, w, w_scale, x_span=x_span, scale_span=scale_span)
    return {"out": z.cpu().view(torch.uint8).numpy(), "out_scale": z_scale.cpu().view(torch.uint8).numpy().ravel()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--device", default="cuda", help='"cpu" tries the script out; its file is no recording')
    args = parser.parse_args()
    arrays = {}
    for name in CASES:
        data = inputs(name)
        for key, value in {**data, **run_on_device(name, data, args.device)}.items():
            arrays[f"{name}.{key}"] = value
    if args.device.startswith("cuda"):
        import torch

        arrays["device"] = np.array(torch.cuda.get_device_name())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {len(CASES)} cases, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
