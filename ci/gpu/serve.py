"""A small serving loop on a real GPU: greedy and sampled requests at a fixed rate, and when each of them was answered.

`python serve.py OUT --mode cold|warmup|restored`: the process starts as a server does (imports, weights, perhaps a warm-up), says
that it is ready, and serves one queue with continuous batching: a step computes the logits of every sequence in the batch, and
takes the next token greedily or by FlashInfer's sampling. There is no capture pass, so nothing but a warm-up or the first
request that samples reaches FlashInfer's sampling. For the first seconds all requests are greedy, then every second one samples.

Requests arrive by the clock, whether or not the server answers (latency counts from the moment that the schedule names), and the
loop ends a few seconds after the first sampled answer. It is no model of an engine's throughput: it shows who waits for what.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GREEDY_SECONDS = 3.0
"""After ready: only greedy requests."""
AFTER_SECONDS = 5.0
"""After the first sampled answer: the loop goes on so long."""
LONGEST = 300.0
TOKENS = 4
"""A request's answer."""
BATCH, HIDDEN, VOCABULARY = 64, 2048, 128256


@dataclass
class Request:
    """One sequence. Times are seconds since the launch of the process."""

    at: float
    sampled: bool
    state: Any
    tokens: list[int] = field(default_factory=list)
    done: float = 0.0


class Server:
    """The model's last layer and the sampler."""

    def __init__(self, launched: float) -> None:
        import torch
        from flashinfer import sampling

        self.torch, self.sampling, self.launched = torch, sampling, launched
        torch.manual_seed(0)
        self.weights = torch.randn(HIDDEN, VOCABULARY, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
        self.embedding = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.waiting: queue.Queue[Request] = queue.Queue()
        self.finished: list[Request] = []

    def now(self) -> float:
        return time.time() - self.launched

    def step(self, batch: list[Request]) -> None:
        """One token for every sequence."""
        torch = self.torch
        states = torch.stack([request.state for request in batch])
        logits = (states @ self.weights).float() * 4
        rows = torch.tensor([request.sampled for request in batch], device="cuda")
        tokens = logits.argmax(dim=-1)
        if any(request.sampled for request in batch):
            probabilities = self.sampling.softmax(logits[rows].contiguous())
            drawn = self.sampling.top_k_top_p_sampling_from_probs(probabilities, 50, 0.9, filter_apply_order="joint")
            tokens[rows] = drawn.to(tokens.dtype)
        for request, token in zip(batch, tokens.tolist(), strict=True):
            request.tokens.append(token)
            request.state = self.embedding[token]

    def serve(self, until: threading.Event) -> None:
        """Steps until `until` is set and nobody waits."""
        batch: list[Request] = []
        while True:
            while len(batch) < BATCH:
                try:
                    batch.append(self.waiting.get(timeout=0.0 if batch else 0.01) if not batch else self.waiting.get_nowait())
                except queue.Empty:
                    break
            if not batch:
                if until.is_set():
                    return
                continue
            self.step(batch)
            now = self.now()
            for request in batch:
                if len(request.tokens) >= TOKENS:
                    request.done = now
                    self.finished.append(request)
            batch = [request for request in batch if not request.done]


def arrive(server: Server, rate: float, until: threading.Event) -> None:
    """Puts requests into the queue by the clock, until the loop may end."""
    ready, number = server.now(), 0
    while True:
        at = ready + number / rate
        time.sleep(max(0.0, at - server.now()))
        sampled = at - ready >= GREEDY_SECONDS and number % 2 == 1
        server.waiting.put(Request(at=at, sampled=sampled, state=server.embedding[number % VOCABULARY]))
        number += 1
        answered = [request.done for request in list(server.finished) if request.sampled]
        if (answered and server.now() > min(answered) + AFTER_SECONDS) or server.now() - ready > LONGEST:
            until.set()
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mode", choices=("cold", "warmup", "restored"), required=True)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    arguments = parser.parse_args()
    launched = float(os.environ.get("SERVE_LAUNCHED", time.time()))
    moments: dict[str, float] = {"python": time.time() - launched}
    server = Server(launched)
    for _ in range(3):  # cuBLAS and the greedy way are warm in every mode
        server.step([Request(at=0.0, sampled=False, state=server.embedding[0])])
    moments["loaded"] = server.now()
    told: dict[str, Any] | None = None
    if arguments.mode == "warmup":
        from kcache.warmup import warmup

        told = warmup(kinds=(), modules=("sampling",), deadline=280).to_json()
    moments["ready"] = server.now()
    until = threading.Event()
    clients = threading.Thread(target=arrive, args=(server, arguments.rate, until), daemon=True)
    clients.start()
    server.serve(until)
    moments["end"] = server.now()
    requests = sorted(server.finished, key=lambda request: request.at)
    document = {
        "mode": arguments.mode,
        "rate": arguments.rate,
        "moments": {name: round(value, 4) for name, value in moments.items()},
        "warmup": told,
        "requests": [[round(r.at, 4), "sampled" if r.sampled else "greedy", round(r.done - r.at, 4)] for r in requests],
        "device": server.torch.cuda.get_device_name(0),
        "torch": server.torch.__version__,
        "flashinfer": sys.modules["flashinfer"].__version__,
    }
    arguments.out.write_text(json.dumps(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
