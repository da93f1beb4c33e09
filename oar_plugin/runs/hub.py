"""Whether a model of the HuggingFace hub can be loaded here: one request in place of the minutes of retries of a run."""

import os
from pathlib import Path

from oar_plugin.output import cause

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
LIMIT_S = 5.0  # for a connection, and for an answer


class NotOnHub(ValueError):
    """The model cannot be loaded. The message says why."""


class HubUnreachable(NotOnHub):
    """The model is not in the cache, and the hub did not answer."""


def cached(name: str) -> str | None:
    """Return the cache's folder if the model is in it, or None if it is on the hub. Raise NotOnHub if it is in neither.

    Also None if a run would ask ModelScope, or if the hub is busy, which a run waits for.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    if any(os.getenv(name, "").lower() in ("1", "true") for name in ("VERL_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")):
        return None
    try:
        config = try_to_load_from_cache(name, "config.json")
        if isinstance(config, str) and any(any(Path(config).parent.glob(weights)) for weights in WEIGHTS):
            return constants.HF_HUB_CACHE
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=LIMIT_S)
    except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError) as error:
        said = "it must exist, and a private or gated model needs HF_TOKEN"
        raise NotOnHub(f"not on {constants.ENDPOINT} ({type(error).__name__}): {said}") from error
    except Exception as error:  # which types depends on the HTTP library of this version of huggingface_hub
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status == 429 or status >= 500:
            return None
        place, fault = f"not in {constants.HF_HUB_CACHE}", f"{constants.ENDPOINT}: {cause(error)}"
        if constants.HF_HUB_OFFLINE:
            raise NotOnHub(f"{place}, and HF_HUB_OFFLINE is set") from error
        raise HubUnreachable(f"{place}, and the hub does not answer ({fault})") from error
    return None
