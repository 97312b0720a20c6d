"""Translation of obstore's exceptions without quoting them, since their texts may contain secrets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache

from toolkit.config.urls import credentials_remedy
from toolkit.errors import InputError, Problem
from toolkit.remote.fetch import RequestTimeout, TransientError

_INSTANCE = ("169.254.169.254", "metadata.google.internal", "MissingAccount", "MissingCredentials")


@dataclass(frozen=True, slots=True)
class Subject:
    """The description of a store's folder in the texts of errors.

    Attributes:
        key: The configuration key that names the folder.
        folder: The kind of folder.
        content: What the folder holds, in a sentence.
        restore_remedy: What to do if a file is damaged.
    """

    key: str
    folder: str
    content: str
    restore_remedy: str

    @property
    def unchanged_rule(self) -> str:
        return f"the files of a {self.folder} do not change"

    def error(self, seen: str, rule: str, remedy: str) -> InputError:
        """Return an InputError about ``key``."""
        return InputError(Problem(self.key, seen, rule, remedy))


DATA = Subject(
    "data.path",
    "data folder",
    "the store holds the data folder with every file of its manifest",
    "restore the file, or put new data into another folder",
)


def names_missing_bucket(text: str) -> bool:
    """Return whether the text of an exception of obstore says that the bucket or container is absent."""
    return any(code in text for code in ("NoSuchBucket", "NoSuchContainer", "ContainerNotFound"))


def translate_error(error: Exception, location: str, subject: Subject) -> InputError | TransientError:
    """Translate an exception of obstore without quoting it.

    obstore has one exception class for most failures and distinguishes them only in its text, which is
    searched here.
    """
    from obstore import exceptions

    text = str(error)
    match = re.search(r"status code: (\d{3})", text)
    status = int(match[1]) if match else None
    if any(word in text for word in _INSTANCE):
        return TransientError("no credentials in the environment, and this machine's instance provides none")
    if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text:
        return _another_region(text, location)
    if isinstance(error, FileNotFoundError) or status == 404:  # listings do not raise FileNotFoundError
        what = "no such bucket" if names_missing_bucket(text) else "absent"
        return subject.error(
            f"{location}: {what}", subject.content, f"check {subject.key}, or copy the missing files there"
        )
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        rule = "the store gives this machine access (some answer 403 for a file that is absent, too)"
        return subject.error(
            f"{location}: refused with status {status or 403}", rule, credentials_remedy(location)
        )
    if isinstance(error, exceptions.NotSupportedError) or "non-partial response" in text:
        return subject.error(
            f"{location}: the whole file came where a range was asked for",
            "the server answers requests for ranges",
            "serve the folder with a server that does, or copy it to this machine",
        )
    if status == 416 or "Wanted range starting at" in text:  # some answer with nothing instead of 416
        return subject.error(
            f"{location}: ends before the requested bytes",
            "the file is as long as its manifest says",
            subject.restore_remedy,
        )
    if status is not None and 300 <= status < 500 and status not in (408, 429):
        remedy = f"check the address, the region (AWS_REGION) and the clock; {credentials_remedy(location)}"
        return subject.error(
            f"{location}: refused with status {status}", "the store answers with the file", remedy
        )
    if status is not None:
        return TransientError(f"status {status}")
    if "kind: Timeout" in text or "TimedOut" in text:
        return RequestTimeout("silent for too long")
    return TransientError("the connection failed or broke off")


def _another_region(text: str, location: str) -> InputError:
    """Return the error for a bucket in another region than requests are signed for (status 301 or 400).

    The body of a 400 names the region. A 301 names it in a header, which obstore hides; an unsigned request
    shows it.
    """
    region_match, address = (
        re.search(r"<Region>([a-z0-9-]{1,40})</Region>", text),
        re.search(r"Error performing \w+ (https?://[^\s?]+)", text),
    )
    region = region_match[1] if region_match else _bucket_region(address[1]) if address else None
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    seen = (
        f"{location}: the bucket is in the region {region}"
        if region
        else f"{location}: the bucket is in another region"
    )
    seen += f", AWS_REGION={environment}" if environment else ", and AWS_REGION is not set"
    remedy = f"write AWS_REGION={region or 'THE_REGION'} before the command"
    return InputError(Problem("AWS_REGION", seen, "requests are signed for the region of the bucket", remedy))


@lru_cache(maxsize=32)
def _bucket_region(address: str) -> str | None:
    """Return the region that S3 names for the bucket of ``address``, or None."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(address, method="HEAD"), timeout=5) as answer:
            headers = answer.headers
    except HTTPError as error:
        headers = error.headers
    except OSError:
        return None
    region = headers.get("x-amz-bucket-region", "")
    return region if re.fullmatch("[a-z0-9-]{1,40}", region) else None
