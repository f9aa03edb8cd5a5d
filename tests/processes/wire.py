"""A bare connection to a server: pyzmq and cbor2, none of the product's code."""

from __future__ import annotations

import collections
import time
from typing import Any

import cbor2
import zmq


class Wire:
    """One DEALER that behaves as well or as badly as it is told."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.inbox: collections.deque[dict[str, Any]] = collections.deque()

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def send(self, *messages: dict[str, Any]) -> None:
        self.raw(*map(cbor2.dumps, messages))

    def raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def receive(self, secs: float = 5) -> dict[str, Any] | None:
        """The next message that is no `Ping`; those are answered."""
        deadline = time.monotonic() + secs
        while True:
            while self.inbox:
                message = self.inbox.popleft()
                if message["type"] != "Ping":
                    return message
                self.send({"type": "Pong", "nonce": message["nonce"]})
            left = deadline - time.monotonic()
            if left <= 0 or not self.socket.poll(int(left * 1000) + 1):
                return None
            self.inbox.extend(cbor2.loads(f) for f in self.socket.recv_multipart())

    def until(self, kind: str, secs: float = 10) -> dict[str, Any]:
        """The next message of a type; others are dropped."""
        deadline = time.monotonic() + secs
        while (message := self.receive(deadline - time.monotonic())) is not None:
            if message["type"] == kind:
                return message
        raise AssertionError(f"no {kind} within {secs} s")

    def hello(self, name: str, *, slots: int = 1, **more: Any) -> dict[str, Any]:
        can = {"fetch": False, "eval": False, "build": True}
        self.send({"type": "InitConnection", "versions": [1, 1], "id": name,
                   "capabilities": can, **more})  # fmt: skip
        ack = self.until("InitAck")
        self.send({"type": "WorkerCapabilities", "architectures": ["x86_64-linux"],
                   "system_features": [], "max_concurrent_builds": slots})  # fmt: skip
        return ack

    def job_list(self) -> list[list[dict[str, Any]]]:
        """The pages of the full list."""
        self.send({"type": "RequestJobList"})
        pages = []
        while True:
            page = self.until("JobListChunk")
            pages.append(page["candidates"])
            if page["is_final"]:
                return pages

    def score(self, candidates: list[dict[str, Any]]) -> None:
        scores = [{"job_id": c["job_id"], "missing_count": 0, "missing_nar_size": 0,
                   "outputs_present": False} for c in candidates]  # fmt: skip
        self.send({"type": "RequestJobChunk", "scores": scores})

    def request(self) -> dict[str, Any]:
        self.send({"type": "RequestJob", "kind": "build"})
        given = self.until("AssignJob")
        self.report("AssignJobResponse", given, accepted=True)
        return given

    def report(self, kind: str, given: dict[str, Any], **fields: Any) -> None:
        ids = {"job_id": given["job_id"], "assignment_id": given["assignment_id"]}
        self.send({"type": kind, **ids, **fields})
