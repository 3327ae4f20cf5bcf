"""A local server that speaks as much of the Hugging Face Hub's HTTP interface as uploads take."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from runs import environment

TOKEN = "hf_OnlyTheHubMayKnowThis"


@dataclass
class FakeHub:
    """What was sent: repositories made, commits as (message, files), tags.

    A `status` other than 200 refuses everything. No commit is answered before there is `until`.
    """

    address: str = ""
    status: int = 200
    until: Path | None = None
    made: list[str] = field(default_factory=list)
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def answer(self, path: str, sent: bytes) -> Any:
        if path == "/api/repos/create":
            about = json.loads(sent)
            self.made.append(f"{about['organization']}/{about['name']}")
            return {"url": f"{self.address}/{self.made[-1]}"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(sent)["files"]]
            return {
                "files": [
                    {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
                ]
            }
        if "/commit/" in path:
            while self.until is not None and not self.until.exists():
                time.sleep(0.02)
            lines = [json.loads(line) for line in sent.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            contents = {file["path"]: base64.b64decode(file["content"]) for file in files}
            self.commits.append((lines[0]["value"]["summary"], contents))
            return {
                "commitUrl": f"{self.address}/org/model/commit/0",
                "commitOid": "0",
                "success": True,
            }
        if "/tag/" in path:
            self.tags.append(json.loads(sent)["tag"])
        return {}

    def environment(self, home: Path, token: bool = True) -> dict[str, str]:
        """The environment of a process that takes this server for the Hub."""
        more = {
            "HF_ENDPOINT": self.address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
        }
        held = environment(**more, **{"HF_TOKEN": TOKEN} if token else {})
        return {
            name: value for name, value in held.items() if token or not name.startswith("HF_TOKEN")
        }


@contextmanager
def fake_hub(**settings: Any) -> Iterator[FakeHub]:
    """Within it, a Hub listens on this machine alone."""
    hub = FakeHub(**settings)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps(
                hub.answer(self.path, sent) if hub.status == 200 else {"error": "no room"}
            ).encode()
            self.send_response(hub.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
