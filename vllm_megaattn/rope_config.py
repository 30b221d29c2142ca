"""The rotary embedding of one layer: what a checkpoint's config.json says about it, and how YaRN is described.

DeepSeek-V4 and V4.1 have two kinds of layers. Those with a compressed cache (`compress_ratios[layer]` above 0, or a
`layer_types[layer]` other than "sliding_attention") use `compress_rope_theta` and YaRN with the parameters of
`rope_scaling`; the others use `rope_theta` and no scaling. `rope_parameters` may hold the same in the form of newer
transformers: flat, or one object each for "main" and "compress". A model without such layers, whose config names none of
these three, has one `rope_theta` and one `rope_scaling`. The magnitude factor of YaRN is off in all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_megaattn import checkpoint

# Without a config.json: a layer without compression, and a cache of 2 MB.
DEFAULT_THETA = 10000.0
DEFAULT_MAX_POSITIONS = 8192

_YARN_TYPES = ("yarn", "deepseek_yarn")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN for contexts longer than the model was trained on: frequencies of wavelengths beyond the trained context
    are divided by `factor`, short ones stay, those between are blended. No magnitude factor, as in DeepSeek-V4."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
            _require_positive(f"{name} of YarnScaling", getattr(self, name))


@dataclass(frozen=True)
class RopeSettings:
    theta: float
    yarn: YarnScaling | None
    max_positions: int


def rope_settings(
    path: str | os.PathLike[str],
    layer: int,
    *,
    theta: float | None = None,
    yarn: YarnScaling | Literal[False] | None = None,
    max_positions: int | None = None,
) -> RopeSettings:
    """Settings for `layer` of the checkpoint at `path`. What is given holds; None asks the config.json, where there is
    one, and DEFAULT_THETA, no YaRN and DEFAULT_MAX_POSITIONS otherwise. yarn False: none, whatever the config says.

    ValueError for a config that does not tell which kind of layer it is, and for a kind of scaling that is not YaRN.
    """
    if yarn is not None and yarn is not False and not isinstance(yarn, YarnScaling):
        raise TypeError(f"yarn must be a YarnScaling, False or None, got {yarn!r}")
    config = checkpoint.config_of(path)
    merged: dict[str, object] = {}
    if config.is_file() and None in (theta, yarn, max_positions):
        for part in reversed(checkpoint.config_parts(config)):  # the outermost wins
            merged.update({key: value for key, value in part.items() if value is not None})
    if theta is None or yarn is None:
        told_theta, told_yarn = _layer_rope(merged, layer, config)
        theta = told_theta if theta is None else theta
        yarn = told_yarn if yarn is None else yarn
    if max_positions is None:
        max_positions = merged.get("max_position_embeddings", DEFAULT_MAX_POSITIONS)
        if isinstance(max_positions, bool) or not isinstance(max_positions, int) or max_positions < 1:
            raise ValueError(f"max_position_embeddings in {config} must be a positive integer, got {max_positions!r}")
    return RopeSettings(theta, yarn or None, max_positions)


def _layer_rope(config: dict[str, object], layer: int, origin: Path) -> tuple[float, YarnScaling | None]:
    compressed = _is_compressed(config, layer, origin)
    parameters = _object(config, "rope_parameters", origin)
    nested = isinstance(parameters.get("main"), dict) and isinstance(parameters.get("compress"), dict)
    if nested:
        parameters = parameters["compress" if compressed else "main"]
    name = "compress_rope_theta" if compressed else "rope_theta"
    theta = config.get(name)
    if theta is None and (nested or not compressed):
        theta = parameters.get("rope_theta")
    if theta is None:
        if compressed:
            raise ValueError(f"{origin} compresses layer {layer} but has no compress_rope_theta: give rope_theta")
        theta = DEFAULT_THETA
    _require_positive(f"{name} in {origin}", theta)
    if compressed is False:
        return float(theta), None
    return float(theta), _yarn({**parameters, **_object(config, "rope_scaling", origin)}, origin)


def _is_compressed(config: dict[str, object], layer: int, origin: Path) -> bool | None:
    """None: a model that has no compressed layers, and so one rotary embedding for all."""
    for name in ("compress_ratios", "layer_types"):
        listed = config.get(name)
        if listed is None:
            continue
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not 0 <= layer < len(listed):
            raise ValueError(
                f"{name} in {origin} must be a list with an entry for layer {layer} (or give rope_theta and yarn), got "
                f"{len(listed) if isinstance(listed, list) else listed!r}"
            )
        entry = listed[layer]
        if name == "layer_types":
            return entry != "sliding_attention"
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise ValueError(f"{name}[{layer}] in {origin} must be an integer from 0 on, got {entry!r}")
        return entry > 0
    if config.get("compress_rope_theta") is not None:
        raise ValueError(
            f"{origin} has a compress_rope_theta but neither compress_ratios nor layer_types, so it does not tell which of "
            f"the two layer {layer} uses: give rope_theta and yarn (yarn=False for none)"
        )
    return None


def _yarn(scaling: dict[str, object], origin: Path) -> YarnScaling | None:
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None or kind == "default":
        return None
    if kind not in _YARN_TYPES:
        raise ValueError(
            f"rope_scaling in {origin} is of type {kind!r}; only {' and '.join(_YARN_TYPES)} are implemented: give "
            "cos_sin, or rope_theta and yarn"
        )
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    }
    for name in ("factor", "original_max_position_embeddings"):
        if scaling.get(name) is None:
            raise ValueError(f"rope_scaling in {origin} is of type {kind!r} and must have {name}")
    for name in names:
        if scaling.get(name) is not None:
            _require_positive(f"{name} of rope_scaling in {origin}", scaling[name])
    return YarnScaling(**{ours: scaling[name] for name, ours in names.items() if scaling.get(name) is not None})


def _object(config: dict[str, object], name: str, origin: Path) -> dict[str, object]:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} in {origin} must be an object, got {value!r}")
    return value or {}


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
