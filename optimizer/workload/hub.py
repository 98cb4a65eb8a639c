"""Configurations from the Hugging Face Hub: ``org/name`` or ``org/name@revision``, config.json alone.

huggingface_hub keeps what it downloads (HF_HOME, https://huggingface.co/docs/huggingface_hub/package_reference/
environment_variables), sends the user's token where one is set, and reads the copy where the network is away.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from optimizer.contract.errors import DataMissingError, InvalidInputError

# Seconds to wait for the Hub's answer: a configuration has a few KB.
TIMEOUT_S = 10.0
# https://huggingface.co/docs/huggingface_hub/package_reference/utilities (validate_repo_id)
_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,255}))?")


def is_hub_id(text: str) -> bool:
    """Return True for the form ``org/name`` or ``org/name@revision``."""
    return _ID.fullmatch(text) is not None


def read_hub_config(text: str) -> tuple[str, str, Any]:
    """Read the config.json of ``org/name[@revision]``, from the Hub or the user's cache: repository, commit, content.

    InvalidInputError for an id or revision that the Hub does not know, DataMissingError where it cannot be asked.
    """
    matched = _ID.fullmatch(text)
    assert matched is not None  # is_hub_id
    repository, revision = matched[1], matched[2]
    try:
        from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise DataMissingError(
            f"model {text!r} is an id of the Hugging Face Hub, and huggingface_hub cannot be imported ({error})",
            why="it downloads the model's config.json",
            next_step=f"pip install 'gpufleet[hub]', or {_by_hand(repository)}",
        ) from error

    refusals: dict[type[Exception], tuple[str, str]] = {
        errors.GatedRepoError: (
            "is a gated repository of the Hugging Face Hub",
            f"accept its licence at https://huggingface.co/{repository}, then hf auth login; or {_by_hand(repository)}",
        ),
        errors.RevisionNotFoundError: (
            f"has no revision {revision}",
            f"https://huggingface.co/{repository}/commits/main lists them",
        ),
        errors.RepositoryNotFoundError: (
            "is no such repository of the Hugging Face Hub, or a private one",
            f"look at https://huggingface.co/models?search={repository.split('/')[1]}, or run hf auth login",
        ),
        errors.EntryNotFoundError: ("has no config.json", "name the repository that it was made from, or a preset"),
        ValueError: ("has a config.json that is not JSON", f"mend it: {_by_hand(repository)}"),
    }
    disable_progress_bars()
    try:
        try:
            # hf_hub_download alone would ask an absent Hub six times, for 24 s.
            url = hf_hub_url(repository, "config.json", revision=revision)
            commit = get_hf_file_metadata(url, timeout=TIMEOUT_S).commit_hash
            path = Path(hf_hub_download(repository, "config.json", revision=commit or revision))
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError):
            raise
        except Exception as error:  # httpx.HTTPError, whose package has another name in other versions
            kept = try_to_load_from_cache(repository, "config.json", revision=revision)
            if not isinstance(kept, str):
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise DataMissingError(
                    f"model {text!r}: its config.json is not in the cache, and the Hugging Face Hub cannot be asked "
                    f"({reason})",
                    limit=f"an answer within {TIMEOUT_S:.0f} s",
                    next_step=f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or {_by_hand(repository)}",
                ) from error
            path = Path(kept)
        return repository, path.parent.name, json.loads(path.read_text(encoding="utf-8"))
    except tuple(refusals) as error:
        problem, next_step = next(words for kind, words in refusals.items() if isinstance(error, kind))
        raise InvalidInputError(
            f"model {text!r} {problem}", limit="org/name of a model of transformers", next_step=next_step
        ) from error


def _by_hand(repository: str) -> str:
    return (
        f"download https://huggingface.co/{repository}/resolve/main/config.json and give the file: --model "
        "path/config.json"
    )
