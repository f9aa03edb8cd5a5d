"""A binary cache over HTTP: GET, HEAD and PUT on a folder, which is all that Nix needs."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class WebCache:
    """Serves `folder` at `url` inside a `with` block; nothing listens there afterwards."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.requests: list[tuple[str, str]] = []
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __init__(self, *args) -> None:
                super().__init__(*args, directory=str(folder))

            def do_PUT(self) -> None:
                target = Path(self.translate_path(self.path))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(201)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_request(self, code="-", size="-") -> None:
                outer.requests.append((self.command, self.path))

            def log_message(self, *args) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
