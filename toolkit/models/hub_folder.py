"""Find the folder of ``model.pretrained``; a hub id is downloaded to Hugging Face's cache first."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import InputError, Problem


def hub_folder(name: str) -> Path:
    """Return the folder of ``name``, which is a folder or a hub id.

    Raises:
        InputError: it cannot be downloaded.
    """
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json"],
                ignore_patterns=["*/*"],  # optimizer state, other formats
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            Problem(
                "model.pretrained",
                f"model.pretrained={name}: no such folder, and the hub reports: {why}",
                "model.pretrained is a folder in Hugging Face's format with safetensors, or a hub id",
                "write model.pretrained=./folder or model.pretrained=organisation/model",
            )
        ) from error
