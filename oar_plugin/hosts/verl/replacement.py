"""Which token stands in for a masked one (`algorithm.oar.perturbation.replacement`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from oar_plugin.config import OarConfig, OarConfigError

_KEY = "algorithm.oar.perturbation.replacement"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")


def replacement_token(config: OarConfig, tokenizer: Any, model_path: str | Path) -> int | None:
    """The token that masks; None when each place draws its own.

    Args:
        config: OAR's settings, with an importance from copies.
        tokenizer: the model's.
        model_path: a local folder with the model's weights; read for `mean` only, which is that of the weights as they
            are at the start of the run, the same for every worker.

    Raises:
        OarConfigError: there is no padding token, or no embedding to take the mean of.
    """
    kind = config.perturbation.replacement
    if kind == "sampled":
        return None
    if kind == "mean":
        return nearest_to_mean(_embedding(Path(model_path)))
    if tokenizer.pad_token_id is None:
        raise OarConfigError(f"{_KEY}=pad: the tokenizer has no padding token; allowed here: mean, sampled")
    return int(tokenizer.pad_token_id)


def nearest_to_mean(embedding_VH: Tensor) -> int:
    """The token whose embedding has the smallest distance to the mean of all of them."""
    wide_VH = embedding_VH.float()
    return int((wide_VH - wide_VH.mean(0)).square().sum(-1).argmin())


def _embedding(folder: Path) -> Tensor:
    """The input embeddings, `[V, H]`, read from a safetensors checkpoint without loading the rest."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    else:
        files = set(folder.glob("*.safetensors"))
    for file in sorted(files):
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 - not a dictionary
                if name.endswith(_EMBEDDINGS):
                    embedding: Tensor = checkpoint.get_tensor(name)
                    return embedding
    raise OarConfigError(
        f"{_KEY}=mean: no input embeddings ({', '.join(_EMBEDDINGS)}) in the safetensors files of {folder}; "
        "allowed here: pad, sampled"
    )
