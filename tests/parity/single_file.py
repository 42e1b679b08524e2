# SPDX-License-Identifier: MIT
"""Writes a Stable Diffusion pipeline as one file, in the key names that `from_single_file` converts from.

Only for small pipelines with one layer a block, which is all that the tests need. Used inside the programs.
"""

from __future__ import annotations

import re
from typing import Any

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_TOP = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_VAE_TOP = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
    "mid_block.attentions.0.to_q": "mid.attn_1.q",
    "mid_block.attentions.0.to_k": "mid.attn_1.k",
    "mid_block.attentions.0.to_v": "mid.attn_1.v",
    "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d)\.(resnets|attentions|downsamplers|upsamplers)\.(\d)\.(.+)")
_A_BLOCK = 2  # modules of one block: a resnet and a sampler going down, two resnets going up


def write(folder: str, path: str, blocks: int = 2) -> None:
    """`folder` holds a diffusers pipeline; `path` becomes its single file."""
    from safetensors.torch import load_file, save_file

    unet = load_file(f"{folder}/unet/diffusion_pytorch_model.safetensors")
    vae = load_file(f"{folder}/vae/diffusion_pytorch_model.safetensors")
    text = load_file(f"{folder}/text_encoder/model.safetensors")
    whole: dict[str, Any] = {}
    for key, tensor in unet.items():
        whole[f"model.diffusion_model.{_unet(key, unet)}"] = tensor
    for key, tensor in vae.items():
        whole[f"first_stage_model.{_vae(key, blocks)}"] = tensor
    for key, tensor in text.items():
        whole[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = tensor
    assert len(whole) == len(unet) + len(vae) + len(text), "two tensors have one name"
    save_file(whole, path)


def _replaced(key: str, names: dict[str, str]) -> str:
    for name, other in names.items():
        key = re.sub(rf"(^|\.){re.escape(name)}(?=\.)", rf"\g<1>{other}", key)
    return key


def _unet(key: str, all_keys: Any) -> str:
    middle = re.match(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", key)
    if middle is not None:
        rest = middle[3]
        return (
            f"middle_block.{2 * int(middle[2])}.{_replaced(rest, _RESNET)}"
            if middle[1] == "resnets"
            else f"middle_block.1.{rest}"
        )
    found = _BLOCK.match(key)
    if found is None:
        return _replaced(key, _UNET_TOP)
    way, block, kind, index, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if kind == "downsamplers":
        return f"input_blocks.{(block + 1) * _A_BLOCK}.0.{rest.replace('conv', 'op')}"
    if kind == "upsamplers":
        place = 2 if any(k.startswith(f"up_blocks.{block}.attentions") for k in all_keys) else 1
        return f"output_blocks.{block * _A_BLOCK + 1}.{place}.{rest}"
    number = block * _A_BLOCK + index
    stem = f"input_blocks.{number + 1}" if way == "down" else f"output_blocks.{number}"
    return f"{stem}.0.{_replaced(rest, _RESNET)}" if kind == "resnets" else f"{stem}.1.{rest}"


def _vae(key: str, blocks: int) -> str:
    half, _, rest = key.partition(".")
    found = _BLOCK.match(rest)
    if found is None:
        return f"{half}.{_replaced(rest, _VAE_TOP)}" if rest.count(".") > 1 or "norm" in rest else key
    way, block, kind, index, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    number = block if way == "down" else blocks - 1 - block
    if kind == "resnets":
        return f"{half}.{way}.{number}.block.{index}.{_replaced(rest, _VAE_TOP)}"
    return f"{half}.{way}.{number}.{way}sample.{rest}"
