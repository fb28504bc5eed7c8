"""A server that stands in for a judge's, and for all that can go wrong with one."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer:
    """Replies as the first word of an answer says, and counts what it is asked.

    An answer "7" or "slow 7" is rated 7; "vary" another way each time. Words that begin with "once"
    are true of the first request about an answer only. Of two answers the first one decides.
    """

    def __init__(self, behaviour: Callable[[str, str], str] = lambda answer, content: answer):
        """Begin to listen; of an answer and the whole message `behaviour` makes other words."""
        self.behaviour = behaviour
        self.asked = Counter()
        self.times = {}
        self.bodies = []
        self.headers = []
        self.most_at_once = self._at_once = 0
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._server, self.port = None, 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                judge._serve(self)

            def log_message(self, *words):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

            def handle_error(self, request, client_address):
                pass  # the other side has hung up

        self._ending.clear()
        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        """Die: no connection is taken any more, and those that are open end."""
        if self._server is not None:
            self._ending.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def _serve(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        content = body["messages"][0]["content"]
        answers = re.findall(r"<(text-[0-9a-f]+)>\n(.*?)\n</\1>", content, re.DOTALL)
        answer = " | ".join(text for _, text in answers)
        with self._lock:
            self.asked[answer] += 1
            self.times.setdefault(answer, []).append(time.monotonic())
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._reply(handler, self.behaviour(answers[0][1], content), self.asked[answer])
        finally:
            with self._lock:
                self._at_once -= 1

    def _reply(self, handler, answer, times):
        word, _, rest = answer.partition(" ")
        if word.startswith("once"):
            word = word.removeprefix("once") if times == 1 else "fine"
        if word == "slow":
            self._ending.wait(0.3)
        if word == "silent":
            self._ending.wait(60)
        if word in ("silent", "closes") or self._ending.is_set():
            handler.close_connection = True
            return
        if word == "midway":
            handler.send_response(200)
            handler.send_header("content-length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [{"mess')
            handler.close_connection = True
            return
        if word in ("400", "401", "429", "500", "503"):
            self._send(handler, int(word), b'{"error": "as asked"}', {"retry-after": "1"})
            return
        said = f"I would say so. Score: {(rest or word) if word != 'vary' else times}"
        said = {"mute": "I would rather not say."}.get(word, said)
        finish = "length" if word == "cut" else "stop"
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": finish}
        text = b"<html>" if word == "garbage" else json.dumps({"choices": [choice]}).encode()
        self._send(handler, 200, text, {})

    def _send(self, handler, status, text, headers):
        handler.send_response(status)
        for name, value in {"content-length": str(len(text)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text)
