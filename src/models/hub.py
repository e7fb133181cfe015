"""Models from the Hugging Face hub."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from src.models.location import INDEX


@cache  # the same all the time of a process
def download(repo: str, revision: str | None = None) -> Path:
    """The newest snapshot of a model, or the one of a revision; what is in the local cache is not fetched again.

    Only the folders that the model's index names are taken, and of them safetensors in full precision.

    Raises:
        ValueError: the model is gated or unknown, or the hub cannot be reached and no copy is at hand.
    """
    try:
        index = Path(huggingface_hub.hf_hub_download(repo, INDEX, revision=revision))
        parts = [name for name in json.loads(index.read_text(encoding="utf-8")) if not name.startswith("_")]
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[INDEX, *(f"{part}/*" for part in parts)],
            ignore_patterns=["*.bin", "*.fp16*", "*.msgpack", "*.onnx*"],
        )
    except GatedRepoError:
        raise ValueError(
            f"model {repo} is gated: accept its licence at https://huggingface.co/{repo}, then `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"model {repo} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"model {repo} is neither a folder here nor public on the hub (a private one needs `hf auth login`)"
        ) from None
    except (HfHubHTTPError, OSError) as error:  # also the hub's own words for: no connection, and no copy at hand
        raise ValueError(f"model {repo} cannot be downloaded: {str(error).splitlines()[0]}") from error
    return Path(folder)
