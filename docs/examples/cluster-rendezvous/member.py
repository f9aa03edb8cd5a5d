"""A member of a small distributed job: add up the numbers below COUNT on several machines.

Each process listens on a port that the system chose, tells it to the others by a signal, and waits
for theirs: the rendezvous. Then every process adds up its share; the others send theirs to the
primary over TCP, which writes the sum as its output. Standard library only.
"""

import json
import os
import pathlib
import socket

COUNT = 1_000_000

cluster = json.loads(os.environ["HEADRACE_CLUSTER"])
me = (cluster["role"], cluster["index"])
members = sorted((m["role"], m["index"]) for m in cluster["roster"])
machines = {(m["role"], m["index"]): m.get("endpoint") or "127.0.0.1" for m in cluster["roster"]}
primary = next((m["role"], m["index"]) for m in cluster["roster"] if m["primary"])

listener = socket.create_server(("", 0))
listener.settimeout(60)

# The rendezvous: say where I listen, hear where the others do.
signals = socket.socket(socket.AF_UNIX)
signals.connect(os.environ["HEADRACE_SIGNAL_SOCKET"])
lines = signals.makefile("rw")
print(json.dumps({"payload": str(listener.getsockname()[1])}), file=lines, flush=True)
ports = {}
while len(ports) < len(members) - 1:
    signal = json.loads(lines.readline())
    if "error" in signal:
        raise SystemExit(signal["error"])
    ports[signal["from"]["role"], signal["from"]["index"]] = int(signal["payload"])
print(f"{me} met {sorted(ports)}")

share = sum(range(members.index(me), COUNT, len(members)))
if me == primary:
    for _ in ports:
        with listener.accept()[0] as connection, connection.makefile() as received:
            share += int(received.read())
else:
    with socket.create_connection((machines[primary], ports[primary]), timeout=60) as connection:
        connection.sendall(str(share).encode())

pathlib.Path(os.environ["out"]).write_text(f"{share}\n")  # noqa: SIM112 - Nix names it so
