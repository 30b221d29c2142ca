"""Which path the output projection takes, and why: one table for the ops, for `OProj` and for `info`.

Three paths lead from the attention output to y:

    fused        wo_a's epilogue quantises its accumulators and writes z as MXFP8; no BF16 z exists in memory
    unfused      wo_a writes BF16 z, a separate quantiser turns it into MXFP8
    dequantised  weights and activations as BF16, by torch (`dequantised`): where there is no kernel yet, or by request

The first two give the same bytes of z. The choice depends on the device, on how the weights are scaled, on the rank of the
projection (rows of wo_a per group) and on what the consumer of z reads. A caller may force a path by argument, a user
by VLLM_MEGAATTN_PATH; whatever cannot be honoured is refused with a ValueError that says why. Nothing falls back
silently, and a device that the table does not know is refused, not guessed.

Nothing here initialises CUDA except `device_key` of a CUDA device, and torch is imported only there.

    >>> select_path("cpu", rank=1024, requested="auto").path
    'fused'
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ENV_PATH = "VLLM_MEGAATTN_PATH"
PATHS = ("auto", "fused", "unfused", "dequantised")

# Which kernel runs wo_b on datacenter Blackwell, where there are two.
ENV_WO_B = "VLLM_MEGAATTN_WO_B"
WO_B_ROUTES = ("auto", "own", "cublaslt")
TWO_ROUTES = ("sm100", "sm103")  # devices that have both

# How the weights are scaled: rows x columns that share one UE8M0 byte. "prepared" is what `prepare_weight` returns
# for Hopper: one byte for 32 rows and all of K. Activations are always 1x32 (or wider spans of equal bytes).
RECIPES = ("1x32", "32x32", "128x128", "prepared")

# What the reader of z takes: MXFP8 with the scale layouts of `layouts`, or BF16 that it quantises itself.
CONSUMERS = ("f8_128x4", "8x4", "packed", "bf16")


class Choice(NamedTuple):
    """What was chosen: `path` "fused", "unfused" or "dequantised", `backend` the kernels' name ("torch" for the last),
    `reason` one sentence for people."""

    path: str
    backend: str
    reason: str


class Row(NamedTuple):
    """One row of the table. `backend` None: no kernel, `note` says why and what would help. `dequantises`: "auto" takes
    the dequantised path there. `unproven`: what a user must know of kernels that have not run on the hardware."""

    devices: tuple[str, ...]
    backend: str | None
    recipes: tuple[str, ...]
    fused_rank_multiple: int
    unfused_rank_multiple: int
    fused_consumers: tuple[str, ...]
    note: str
    dequantises: bool = False
    unproven: str = ""


# A rank that is a multiple of 32 keeps every 1x32 scale block inside one group. The Hopper epilogue stores scales a
# 32-bit word (four blocks, 128 columns) at a time, so there a group must also start on a word; Blackwell's stores bytes
# where words straddle groups.
TABLE = (
    Row(("cpu",), "cpu", RECIPES, 32, 32, ("f8_128x4",), "C kernels on the CPU"),
    Row(("meta",), "meta", RECIPES, 32, 32, ("f8_128x4",), "shapes only"),
    Row(("sm90",), "sm90", RECIPES, 128, 32, ("f8_128x4",), "Hopper kernels"),
    Row(
        ("sm100", "sm103"),
        "sm100",
        RECIPES,
        32,
        32,
        ("f8_128x4",),
        "Blackwell kernels, which have run in an emulator but not on hardware",
        unproven="have run in an emulator (tests/emulator), never on this hardware; every result and speed is unproven",
    ),
    Row(
        ("sm120", "sm121"),
        None,
        (),
        0,
        0,
        (),
        "no kernel yet for SM12x",
        dequantises=True,
    ),
    Row(("sm89",), None, (), 0, 0, (), "no kernel yet for Ada"),
    Row(("sm80", "sm86", "sm87"), None, (), 0, 0, (), "no kernel yet for Ampere, which has no FP8 conversion"),
)

DEQUANTISES = "o_proj dequantises and runs torch's BF16 products instead"

_KNOWN = ", ".join(key for row in TABLE if row.backend and row.backend != "meta" for key in row.devices)


def _find_row(device_key: str) -> Row | None:
    for row in TABLE:
        if device_key in row.devices:
            return row
    return None


def _build_gap(row: Row) -> str:
    """Why the loaded build cannot run this row, or ""."""
    if row.backend in (None, "cpu", "meta"):
        return ""
    try:
        from vllm_megaattn import _C
    except ImportError as error:
        return f"the C core cannot be imported ({error})"
    images = _C.build_info()["images"]
    if not any(image.startswith(row.backend) for image in images):
        built = f"it holds {', '.join(images)}" if images else "VLLM_MEGAATTN_CUDA=1 makes a missing nvcc an error"
        return f"this build has no {row.backend} kernels; rebuild with nvcc on PATH ({built})"
    return ""


def _decide(device_key: str, rank: int, requested: str, recipe: str, consumer: str) -> tuple[Choice | None, str]:
    """The choice and "", or None and the reason for the refusal."""
    row = _find_row(device_key)
    if row is None:
        return None, f"unknown device {device_key!r}; there are kernels for {_KNOWN}"
    if requested == "dequantised" and (row.backend or row.dequantises):
        return Choice("dequantised", "torch", "requested; torch's BF16 products on dequantised operands"), ""
    if requested == "auto" and row.dequantises:
        return Choice("dequantised", "torch", f"{row.note}; {DEQUANTISES}"), ""
    if row.backend is None:
        return None, f"{row.note} ({device_key}); there are kernels for {_KNOWN}"
    gap = _build_gap(row)
    if gap:
        return None, gap
    if recipe not in row.recipes:
        return None, f"weight scales of {recipe} are not supported there; supported: {', '.join(row.recipes)}"

    fused_gap = ""
    if consumer not in row.fused_consumers:
        written = " or ".join(row.fused_consumers)
        fused_gap = f"the consumer of z takes {consumer}, the fused epilogue writes {written}"
    elif rank % row.fused_rank_multiple:
        fused_gap = f"rank must be a multiple of {row.fused_rank_multiple} for the fused epilogue, got {rank}"
    unfused_gap = ""
    if rank % row.unfused_rank_multiple:
        unfused_gap = f"rank must be a multiple of {row.unfused_rank_multiple} (one scale block), got {rank}"

    if requested == "fused":
        if fused_gap:
            return None, fused_gap
        return Choice("fused", row.backend, f"requested; {row.note}"), ""
    if requested == "unfused":
        if unfused_gap:
            return None, unfused_gap
        return Choice("unfused", row.backend, f"requested; {row.note}"), ""
    if not fused_gap:
        return Choice("fused", row.backend, f"wo_a writes MXFP8 z itself; {row.note}"), ""
    if not unfused_gap:
        return Choice("unfused", row.backend, f"{fused_gap}; {row.note}"), ""
    return None, unfused_gap


# A plain dict, not functools.lru_cache: torch.compile traces through the first and warns about the second.
_cache: dict[tuple[str, int, str, str, str], tuple[Choice | None, str]] = {}


def _resolve_request(requested: str, op: str) -> tuple[str, str]:
    """The effective request and who made it. The environment counts only where the argument leaves it open."""
    origin = "path"
    if requested == "auto":
        forced = os.environ.get(ENV_PATH)
        if forced:
            requested, origin = forced, ENV_PATH
    if requested not in PATHS:
        raise ValueError(f"{op}: {origin} must be one of {', '.join(PATHS)}, got {requested!r}")
    return requested, origin


def select_path(
    device_key: str,
    *,
    rank: int,
    requested: str = "auto",
    recipe: str = "32x32",
    consumer: str = "f8_128x4",
    op: str = "o_proj",
) -> Choice:
    """Choose the path of one output projection.

    device_key: what `device_key` returned, e.g. "cpu" or "sm90".
    rank:       rows of wo_a per group (N of the einsum; 1024 in DeepSeek-V4 and V4.1).
    requested:  one of PATHS; VLLM_MEGAATTN_PATH is read only for "auto".
    recipe:     rows x columns per weight scale, one of RECIPES.
    consumer:   what reads z, one of CONSUMERS.
    op:         what the messages call the caller.

    Raises ValueError naming the argument (or the variable) and the reason when the request cannot be honoured, when
    the device has no kernel, or when an argument is not one of its values. A repeated call costs one dict look-up.
    """
    requested, origin = _resolve_request(requested, op)
    key = (device_key, rank, requested, recipe, consumer)
    found = _cache.get(key)
    if found is None:
        if recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
        if consumer not in CONSUMERS:
            raise ValueError(f"consumer must be one of {', '.join(CONSUMERS)}, got {consumer!r}")
        if rank <= 0:
            raise ValueError(f"rank must be positive, got {rank}")
        found = _decide(device_key, rank, requested, recipe, consumer)
        _cache[key] = found
    choice, refusal = found
    if choice is None:
        raise ValueError(f"{op}: {origin}={requested!r} refused on {device_key}: {refusal}")
    return choice


def backend_gap(device_key: str) -> str:
    """Why this device cannot be used at all, or "" when it can: the same table and build check as `select_path`."""
    row = _find_row(device_key)
    if row is None:
        return f"unknown device {device_key!r}; there are kernels for {_KNOWN}"
    if row.backend is None:
        return row.note
    return _build_gap(row)


def explain_wo_b(device_key: str) -> dict[str, str | None]:
    """{"route" (None: refused), "requested", "reason"}: what `select_wo_b` answers now, for `info`."""
    requested = os.environ.get(ENV_WO_B) or "auto"
    try:
        route, reason = select_wo_b(device_key)
    except ValueError as error:
        return {"route": None, "requested": requested, "reason": str(error)}
    return {"route": route, "requested": requested, "reason": reason}


def explain(device_key: str, *, ranks: tuple[int, ...] = (1024, 96)) -> list[dict[str, object]]:
    """What `select_path` answers on this device for every request, rank and consumer: the rows that `info` prints.

    Each row is {"rank", "consumer", "requested", "path" (None: refused), "backend", "reason"}. The environment
    variable is not applied.
    """
    rows: list[dict[str, object]] = []
    for rank in ranks:
        for consumer in ("f8_128x4", "bf16"):
            for requested in PATHS:
                choice, refusal = _decide(device_key, rank, requested, "32x32", consumer)
                rows.append(
                    {
                        "rank": rank,
                        "consumer": consumer,
                        "requested": requested,
                        "path": choice.path if choice else None,
                        "backend": choice.backend if choice else None,
                        "reason": choice.reason if choice else refusal,
                    }
                )
    return rows


def dequantises(device_key: str) -> bool:
    """Whether "auto" takes the dequantised path on this device, for want of kernels."""
    row = _find_row(device_key)
    return row is not None and row.dequantises


def unproven(device_key: str) -> str:
    """What has not been shown of this device's kernels, or "": a phrase that goes on from "the kernels for ..."."""
    row = _find_row(device_key)
    return row.unproven if row is not None and not backend_gap(device_key) else ""


# ---- the route of wo_b ---------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Which kernel runs wo_b: `route` "own" or "cublaslt", `reason` one sentence for people."""

    route: str
    reason: str


_routes: dict[tuple[str, str], tuple[Route | None, str]] = {}


def requested_wo_b() -> str:
    """What VLLM_MEGAATTN_WO_B asks for, "auto" where it is not set; ValueError when that is not one of WO_B_ROUTES."""
    requested = os.environ.get(ENV_WO_B) or "auto"
    if requested not in WO_B_ROUTES:
        raise ValueError(f"{ENV_WO_B} must be one of {', '.join(WO_B_ROUTES)}, got {requested!r}")
    return requested


def select_wo_b(device_key: str) -> Route:
    """The route of wo_b, as VLLM_MEGAATTN_WO_B and the device have it; the C core is told (csrc/cuda/sm100.h).

    "auto" prefers cuBLASLt where it can be opened, for operands that it takes (weights with F8_128x4 scales, as
    `prepare_weight` gives them); others go to the package's own kernel. Raises ValueError when the variable holds
    something else than WO_B_ROUTES, or what cannot be had on this device. A repeated call costs two look-ups.
    """
    requested = requested_wo_b()
    key = (device_key, requested)
    found = _routes.get(key)
    if found is None:
        found = _routes[key] = _decide_wo_b(device_key, requested)
    route, refusal = found
    if route is None:
        raise ValueError(f"wo_b: {ENV_WO_B}={requested!r} refused on {device_key}: {refusal}")
    return route


def wo_b_flags() -> dict[str, int]:
    """The switch of the C core that forces each route."""
    from vllm_megaattn import _C

    return {"own": _C.FLAG_WO_B_OWN, "cublaslt": _C.FLAG_WO_B_CUBLASLT}


def request_wo_b(device_key: str) -> None:
    """Hands the route to the C core, for this and all later calls; ValueError as in `select_wo_b`."""
    requested = os.environ.get(ENV_WO_B)
    if not requested and device_key not in TWO_ROUTES:
        return
    from vllm_megaattn import _C

    route = select_wo_b(device_key).route
    open_choice = (requested or "auto") == "auto" and not _disabled_routes
    switches = wo_b_flags()
    wanted, both = 0 if open_choice else switches.get(route, 0), sum(switches.values())
    flags = _C.get_flags()
    if flags & both != wanted:
        _C.set_flags((flags & ~both) | wanted)


def disable_wo_b(route: str, reason: str) -> None:
    """From now on "auto" takes the other route of wo_b, and asking for this one is refused with `reason`."""
    _disabled_routes[route] = reason
    _routes.clear()


_disabled_routes: dict[str, str] = {}


def _decide_wo_b(device_key: str, requested: str) -> tuple[Route | None, str]:
    row = _find_row(device_key)
    if row is None or device_key not in TWO_ROUTES:
        if requested == "cublaslt":
            return None, "only datacenter Blackwell has that route"
        if row is not None and row.backend is None:
            return Route("torch", f"{row.note}; {DEQUANTISES}" if row.dequantises else row.note), ""
        return Route("own", "the package's own kernel, the only route there"), ""
    if requested in _disabled_routes:
        return None, _disabled_routes[requested]
    if requested == "own":
        return Route("own", "requested"), ""
    from vllm_megaattn import _C

    usable, text = _C.cublaslt_status()
    if requested == "auto" and _disabled_routes:
        other = "cublaslt" if "own" in _disabled_routes else "own"
        if other in _disabled_routes or (other == "cublaslt" and not usable):
            return None, "; ".join([*_disabled_routes.values(), *([] if usable else [text])])
        return Route(other, next(iter(_disabled_routes.values()))), ""
    if requested == "cublaslt":
        return (Route("cublaslt", f"requested; {text}"), "") if usable else (None, text)
    if usable:
        return Route("cublaslt", f"{text}, until the package's own kernel has been checked on this hardware"), ""
    return Route("own", text), ""


_cuda_keys: dict[int, str] = {}


def device_key(device: torch.device) -> str:
    """The table's name of a torch device: "cpu", "meta", "sm90", ..., and the bare type for devices that are none of
    these (refused by `select_path`).

    The capability of a CUDA device is asked once per index, which initialises CUDA. A ROCm build of torch reports
    CUDA devices too, with capabilities that look like NVIDIA's; its devices are named "rocm".
    """
    if device.type != "cuda":
        return device.type
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    key = _cuda_keys.get(index)
    if key is None:
        if torch.version.hip is not None:
            key = "rocm"
        else:
            major, minor = torch.cuda.get_device_capability(index)
            key = f"sm{major}{minor}"
        _cuda_keys[index] = key
    return key
