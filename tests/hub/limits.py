"""Rate limits as the Hub has them: fixed windows for each address, one for API calls and one for resolver requests.

Every answer carries the headers of the IETF draft that `huggingface_hub.utils.parse_ratelimit_headers` reads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .access import Refusal


@dataclass
class Limit:
    """At most `quota` requests in `window` seconds for each client. `retry_after`: say that header too."""

    quota: int
    window: float
    retry_after: bool = False
    _since: dict[str, tuple[float, int]] = field(default_factory=dict)

    def headers(self, name: str, client: str) -> dict[str, str]:
        """Counts one request.

        Raises:
            Refusal: one too many.
        """
        now = time.monotonic()
        start, used = self._since.get(client, (now, 0))
        if now - start >= self.window:
            start, used = now, 0
        self._since[client] = (start, used + 1)
        left = max(0, self.quota - used - 1)
        reset = max(0, round(start + self.window - now))
        headers = {
            "RateLimit": f'"{name}";r={left};t={reset}',
            "RateLimit-Policy": f'"fixed window";"{name}";q={self.quota};w={self.window:g}',
        }
        if used + 1 > self.quota:
            if self.retry_after:
                headers["Retry-After"] = str(reset)
            raise Refusal(429, f"You have reached your '{name}' rate limit.", headers=headers)
        return headers
