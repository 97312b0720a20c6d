"""File names that a manifest, index, pickle or listing must not contain."""

from __future__ import annotations

HOSTILE = {
    "absolute": "/etc/passwd",
    "parent": "../outside",
    "parent inside": "a/../../outside",
    "parent at the end": "a/..",
    "drive letter": "C:/outside",
    "drive letter alone": "C:outside",
    "backslash": "..\\outside",
    "NUL": "a\0b",
    "long name": "a" * 300,
    "long path": "/".join(["a" * 200] * 25),
    "not normal": "a//b",
    "current folder": "./a",
    "empty": "",
    "half a surrogate pair": "a\ud800b",
}
