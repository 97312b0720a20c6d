"""Folders that are URLs: which may be written, and what may be shown of one.

Credentials come from the environment or the instance, never from a URL: what a user writes is kept in the
run's folder, printed and logged. So a URL with a user, a password or a query (a signature) is refused, and no
text that shows one shows these parts.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from toolkit.errors import Problem

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the instance's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the instance's account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or the "
    "instance's identity",
}


def is_url(path: str | Path) -> bool:
    return isinstance(path, str) and "://" in path


def credentials_remedy(url: str) -> str:
    """Where credentials for ``url`` come from."""
    known = _CREDENTIALS.get(url.partition("://")[0])
    if known is None:
        return "serve the folder without a login, or copy it to a store that has one"
    return f"give credentials in the environment: {known}"


def shown(url: str) -> str:
    """``url`` without what may be secret in it."""
    scheme, _, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    # A password may hold a slash: everything before the last @ goes.
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}://{rest}"


def url_problem(key: str, path: str) -> Problem | None:
    """What is wrong with ``path``, the value of ``key``, as a URL. A path of this machine is always right
    here.
    """
    if not is_url(path):
        return None
    seen, scheme = f"{key}={shown(path)}", path.partition("://")[0]
    if "@" in path:
        rule = "a URL has no user and no password (and no @ elsewhere): it is kept and printed with the run's configuration"
        return Problem(key, seen, rule, credentials_remedy(path))
    if "?" in path or "#" in path:
        rule = "the URL of a folder has no query and no fragment: a signature in it would be kept and printed"
        return Problem(key, f"{seen}?***", rule, credentials_remedy(path))
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        return Problem(key, seen, "a folder is a path, or a URL of a known store", f"write one of: {known}")
    parts = urlsplit(path)
    if (not parts.netloc) != (scheme == "file") or (scheme == "file" and parts.path in ("", "/")):
        return Problem(
            key,
            seen,
            "a URL names the place and the folder in it",
            "write s3://BUCKET/FOLDER or file:///FOLDER",
        )
    return None
