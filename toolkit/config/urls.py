"""Check URLs of folders, and hide their secret parts.

Credentials come from the environment or the instance, never from a URL, because configurations are stored,
printed and logged. URLs with a user, a password or a query (a signature) are refused, and these parts are
never shown.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from toolkit.errors import Problem

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
WRITABLE = ("s3", "gs", "az")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the instance's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the instance's account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or the "
    "instance's identity",
}


def is_url(path: str | Path) -> bool:
    return isinstance(path, str) and "://" in path


def credentials_remedy(url: str) -> str:
    """Return a remedy that names the environment variables with the credentials for ``url``."""
    known = _CREDENTIALS.get(url.partition("://")[0])
    if known is None:
        return "serve the folder without a login, or copy it to an object store with credentials"
    return f"give credentials in the environment: {known}"


def shown(url: str) -> str:
    """``url`` without its possibly secret parts."""
    scheme, _, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    # A password may contain a slash, so everything before the last @ is removed.
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}://{rest}"


def url_problem(key: str, path: str) -> Problem | None:
    """Return the problem of ``path``, the value of ``key``, as a URL. Local paths have none."""
    if not is_url(path):
        return None
    seen, scheme = f"{key}={shown(path)}", path.partition("://")[0]
    if "@" in path:
        rule = (
            "a URL has no user, no password and no @: it is stored and printed with the run's configuration"
        )
        return Problem(key, seen, rule, credentials_remedy(path))
    if "?" in path or "#" in path:
        rule = (
            "the URL of a folder has no query and no fragment: a signature in it would be stored and printed"
        )
        return Problem(key, f"{seen}?***", rule, credentials_remedy(path))
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        return Problem(
            key, seen, "a folder is a path, or a URL of a supported store", f"write one of: {known}"
        )
    parts = urlsplit(path)
    if (not parts.netloc) != (scheme == "file") or (scheme == "file" and parts.path in ("", "/")):
        return Problem(
            key, seen, "a URL has a bucket and a folder", "write s3://BUCKET/FOLDER or file:///FOLDER"
        )
    return None
