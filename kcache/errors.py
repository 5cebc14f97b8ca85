"""What can go wrong, and what to tell the person who has to mend it.

A miss is never an error: it is a value with a reason (`kcache.match.Decision`). An error is a failure, and each one carries
three sentences: what happened, why, and what to do. `exit_code` is what the command line ends with (see
`kcache/cli/exit_codes.py` for the table).
"""

from __future__ import annotations


class KcacheError(Exception):
    """Base of all failures that kcache reports.

    Args:
        what: what happened, one line, without a trailing full stop.
        why: the cause as far as it is known; may be empty.
        remedy: what the reader can do next; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy

    def diagnostics(self) -> dict[str, str]:
        """The error as a JSON-ready object: `error` (class), `what`, `why`, `remedy`."""
        return {"error": type(self).__name__, "what": self.what, "why": self.why, "remedy": self.remedy}

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.remedy:
            text += f". {self.remedy}"
        return text


class UsageError(KcacheError):
    """The command line, or a file that it names, asks for something that cannot be done."""

    exit_code = 2


class ProbeError(KcacheError):
    """A fact about this host that a decision needs could not be found out."""


class CollectError(KcacheError):
    """A build did not produce what an entry needs (compiler error, wrong arch, unknown key value)."""


class WarmupError(KcacheError):
    """An in-process or child build of missing kernels failed."""


class TrustError(KcacheError):
    """A file, directory or signature is not of a kind that this host may load native code from."""

    exit_code = 12


class RefusedError(TrustError):
    """An entry that the policy does not let in: whoever chooses among entries takes it for a miss with this reason."""


class ManifestError(KcacheError):
    """A manifest, index or environment document cannot be used.

    Args:
        what: which document.
        problems: every problem found, each with its path, such as `artifacts[3].sha256: not a digest`.
    """

    exit_code = 12

    def __init__(self, what: str, *, problems: tuple[str, ...] = (), why: str = "", remedy: str = "") -> None:
        super().__init__(what, why=why or "; ".join(problems), remedy=remedy)
        self.problems = problems


class IntegrityError(KcacheError):
    """Bytes are not what their manifest says (digest, size, unsafe path, limit)."""

    exit_code = 12


class StoreError(KcacheError):
    """A store did not do what it was asked. Never reported as a miss."""


class NotFoundError(StoreError):
    """The store works and has no object of this name. Permanent: not retried."""


class AccessDeniedError(StoreError):
    """The store refuses this caller. Permanent: not retried."""


class ConflictError(StoreError):
    """The object exists with other content, or another writer was first."""


class UnavailableError(StoreError):
    """The store cannot be reached now. May be retried."""


class InstallError(KcacheError):
    """Verified bytes could not be put in place."""


class LockTimeoutError(InstallError):
    """Another process holds the cache's lock for longer than we may wait."""

    exit_code = 11


class NoSpaceError(InstallError):
    """The target file system has too little room. Found before anything is written."""


class NotAcceptedError(InstallError):
    """Installed, but by the library's own rules it would not be used."""
