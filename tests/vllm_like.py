"""A server that answers as vLLM does, from a real model on the CPU, in a thread of this process.

What it does was looked up in, and compared with, vLLM 0.32: `tests/rollout/test_real_server.py`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Answer = tuple[int, Any]


class VllmLike:
    """A model, what the server tells of itself, and what it was asked.

    Attributes:
        settings: what it tells of its model.
        ends_after: completions of prompts after which it is gone, as if it had crashed; with
            `comes_back` it is started anew at once, with the model of its own files, and is not
            ready to tell its settings when it is first asked.
        device: the kind that it says it computes on.
        logprobs_off: what it adds to log-probabilities, as an unlike model would.
        loads: the folders that weights were loaded from; `bodies`: what completions were asked for.
    """

    def __init__(self, model: Path, /, **settings: Any) -> None:
        self.folder = model
        self.settings = {
            "model": str(model),
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "dtype": "torch.float32",
            "max_model_len": 64,
            **settings,
        }
        self.ends_after: int | None = None
        self.comes_back = False
        self.unready = 0
        self.device = "cuda"
        self.logprobs_off = 0.0
        self.loads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Starts with the model of its own files."""
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.version = "default"
        self.first_logits: dict[tuple[Any, ...], Tensor] = {}

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """The status and the body that a request is answered with."""
        with self.lock:
            if path == "/server_info?config_format=json":
                if self.unready:
                    self.unready -= 1
                    return 503, {"error": {"message": "not ready"}}
                own = {"model_config": self.settings, "device_config": {"device": self.device}}
                return 200, {"vllm_config": own}
            if path == "/weight_info":
                return 200, {"weight_version": self.version}
            if path == "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True, "new_version": self.version}
            if path == "/collective_rpc" and body["method"] == "reload_weights":
                return self.reload(body["kwargs"]["weights_path"])
            if path == "/reset_prefix_cache":
                self.first_logits.clear()
                return 200, {"success": True}
            if path == "/v1/completions":
                return self.complete(body)
        return 404, {"detail": "Not Found"}

    def reload(self, folder: str) -> Answer:
        """Takes the tensors that are in a folder, and keeps its own of the others, as vLLM does."""
        try:
            found = load_file(Path(folder, "model.safetensors"))
        except OSError as error:
            return 500, {"error": {"message": str(error)}}
        self.loads.append(folder)
        self.model.load_state_dict(found, strict=False)
        return 200, {"results": [None]}

    def complete(self, body: dict[str, Any]) -> Answer:
        """Draws as many completions as are asked for, each by a seed of its own."""
        self.bodies.append(body)
        if self.ends_after is not None and len(self.bodies) > self.ends_after:
            raise ConnectionAbortedError
        prompt = body["prompt"]
        if max(prompt) >= self.model.config.vocab_size:
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        limit = min(body["max_tokens"], self.settings["max_model_len"] - len(prompt))
        choices = []
        for number in range(body["n"]):
            tokens, logprobs = self.draw(body, limit, number)
            ended = tokens[-1] in body["stop_token_ids"]
            choice = {"index": number, "token_ids": tokens, "text": "unused"}
            choice["logprobs"] = {"token_logprobs": logprobs}
            choices.append(choice | {"finish_reason": "stop" if ended else "length"})
        return 200, {"choices": choices[::-1]}  # nothing says in which order they come

    @torch.no_grad()
    def draw(self, body: dict[str, Any], limit: int, number: int) -> tuple[list[int], list[float]]:
        """The tokens of a completion, and their log-probabilities."""
        assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] == 0
        assert (body["top_p"], body["top_k"], body["min_p"]) == (1, 0, 0)
        generator = torch.Generator().manual_seed(body["seed"] + number)
        tokens: list[int] = []
        logprobs: list[float] = []
        # What follows a prompt is kept, as its keys and values are: also beyond other weights.
        key = (body.get("cache_salt"), *body["prompt"])
        while len(tokens) < limit and (not tokens or tokens[-1] not in body["stop_token_ids"]):
            logits = self.first_logits.get(key) if not tokens else None
            if logits is None:
                ids = torch.tensor([body["prompt"] + tokens])
                logits = self.model(ids, use_cache=False).logits[0, -1]
            if not tokens:
                self.first_logits[key] = logits
            distribution = (logits / max(body["temperature"], 0.01)).log_softmax(-1)
            token = int(distribution.exp().multinomial(1, generator=generator))
            if body["temperature"] == 0:
                token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(distribution[token].item() + self.logprobs_off)
        return tokens, logprobs


@contextmanager
def serving(server: VllmLike, port: int = 0) -> Iterator[str]:
    """Within it the server answers at the address that this gives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond({})

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body: dict[str, Any]) -> None:
            try:
                status, said = server.answer(self.path, body)
            except ConnectionAbortedError:
                if server.comes_back:
                    server.ends_after = None
                    server.unready = 1
                    server.begin()
                else:
                    threading.Thread(target=listener.shutdown).start()
                    listener.socket.close()
                return
            text = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that has gone, or a server that has crashed

    listener = Listener(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
