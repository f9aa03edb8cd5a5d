"""The least that a request and its answer can cost: a ROUTER that sends back what it receives.

    python -m benchmarks.echo READY_FILE [--blocking]

Method. One process, one task, on a free port of loopback; the ready file is the server's. Under
Trio through the adapter that the server uses, or, with `--blocking`, plain pyzmq without a loop.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import trio
import zmq

from transport.adapter import Context
from transport.zmq_sockets import ZmqRouter

ENDPOINT = "tcp://127.0.0.1:0"


def announce(ready: Path, endpoint: str) -> None:
    ready.write_text(json.dumps({"endpoint": endpoint}))


async def echo_under_trio(ready: Path) -> None:
    async with Context() as context:
        router = ZmqRouter(context, ENDPOINT)
        announce(ready, router.endpoint)
        while True:
            for message in await router.receive():
                router.send(message.peer, message.frames)


def echo_blocking(ready: Path) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(ENDPOINT)
    announce(ready, router.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        router.send_multipart(router.recv_multipart())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ready", type=Path)
    parser.add_argument("--blocking", action="store_true", help="without Trio")
    args = parser.parse_args()
    if args.blocking:
        echo_blocking(args.ready)
    else:
        trio.run(echo_under_trio, args.ready)


if __name__ == "__main__":
    main()
