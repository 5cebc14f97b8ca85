"""What `kcache doctor` looks at, and what it finds: the types that its checks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kcache.key import Environment, Fact
from kcache.probe.caches import CacheRoot
from kcache.probe.host import Host

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason, for people and for machines. `code` never changes its meaning."""

    code: str
    severity: str
    what: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "severity": self.severity, "what": self.what, "remedy": self.remedy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What the checks look at: the host, where its cache is, and the server's variables."""

    host: Host
    cache: CacheRoot
    environ: Mapping[str, str]

    @property
    def environment(self) -> Environment:
        return self.host.environment

    def fact(self, name: str) -> Fact:
        return self.host.environment.fact(name)
