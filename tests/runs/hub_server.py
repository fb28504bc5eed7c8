"""A stand-in for the Hugging Face hub: what its client asks for to push a model and to load it."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

TOKENS = {"hf_ours": "ours", "hf_other": "other"}
"""Who may write where: the namespace of each token."""

DROP, DROP_HALF = "drop", "drop after half of what is sent"


class Handler(BaseHTTPRequestHandler):
    """One request: a failure that the test wants, or the endpoint's answer."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request, hub = f"{self.command} {unquote(urlsplit(self.path).path)}", self.server.hub
        hub.requests.append(request)
        how = hub.failure(request)
        if how == DROP_HALF:
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
        if how in (DROP, DROP_HALF):
            self.close_connection = True
            self.connection.close()
            return
        body = self._body()
        matches = ((re.fullmatch(pattern, request), name) for pattern, name in ROUTES)
        found = next(((match, name) for match, name in matches if match), None)
        if how is not None:
            self.answer(how, {"error": "as the test wants it"})
        elif found:
            getattr(hub, found[1])(self, body, **found[0].groupdict())
        else:
            hub.unknown.append(request)
            self.answer(404, {"error": "no such endpoint"})

    do_GET = do_HEAD = do_PUT = do_POST

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    @property
    def namespace(self):
        """What the request's token may write to."""
        return TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def answer(self, status, content, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        """Say nothing of the requests."""


class HubServer:
    """Repositories in memory, and the requests that came.

    Weights are sent as Git LFS objects, all other files within the commit, as the hub has it for
    clients without its storage `xet`.
    """

    def __init__(self):
        self.repositories, self.objects = {}, {}
        self.requests, self.unknown, self._failures = [], [], []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.hub = self
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, pattern, *how):
        """Answer the next requests like `PUT /lfs/.*` by a status, or drop their connections."""
        self._failures.append((re.compile(pattern), [*how]))

    def asked(self, pattern):
        return sum(bool(re.fullmatch(pattern, request)) for request in self.requests)

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def failure(self, request):
        for pattern, left in self._failures:
            if pattern.fullmatch(request) and left:
                return left.pop(0)
        return None

    def nothing(self, http, _):
        http.answer(404, {})

    def create(self, http, body):
        asked = json.loads(body)
        owner, name = asked["organization"], f"{asked['organization']}/{asked['name']}"
        url = f"{self.address}/{name}"
        if http.namespace is None:
            http.answer(401, {"error": "Invalid username or password."})
        elif name in self.repositories:
            http.answer(409, {"error": "You already created this model repo", "url": url})
        elif http.namespace != owner:
            why = f'You don\'t have the rights to create a model under "{owner}"'
            http.answer(403, {"error": why})
        else:
            private = asked.get("private") or asked.get("visibility") == "private"
            files, commits = {".gitattributes": b"# lfs\n"}, ["0" * 40]
            made = SimpleNamespace(private=bool(private), files=files, commits=commits)
            self.repositories[name] = made
            http.answer(200, {"url": url, "name": name})

    def validate(self, http, body):
        wrong = "license: nonsense" in json.loads(body)["content"]
        errors = [{"message": "no such license"}] if wrong else []
        http.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _seen(self, http, repo, *, to_write=False):
        """Return a repository, or answer that there is none, as for one that is not to be seen."""
        found, is_own = self.repositories.get(repo), http.namespace == repo.partition("/")[0]
        if found is None or (found.private and not is_own):
            status = 401 if http.namespace is None else 404
            why = {"X_Error_Code": "RepoNotFound", "X_Error_Message": "Repository not found"}
            http.answer(status, {"error": "Repository not found"}, **why)
            return None
        if to_write and not is_own:
            http.answer(403, {"error": "you must have write access"})
            return None
        return found

    def info(self, http, _, repo, revision="main"):
        if found := self._seen(http, repo):
            names = [{"rfilename": name} for name in sorted(found.files)]
            more = {"sha": found.commits[-1], "private": found.private}
            http.answer(200, {"id": repo, "modelId": repo, "siblings": names, "tags": [], **more})

    def tree(self, http, _, repo, revision, folder=None):
        if folder is not None:
            http.answer(404, {"error": "no such folder"}, X_Error_Code="EntryNotFound")
        elif found := self._seen(http, repo):
            files = sorted(found.files.items())
            listed = [{"path": p, "size": len(data), "oid": _oid(p, data)} for p, data in files]
            http.answer(200, [{"type": "file", **one} for one in listed])

    def preupload(self, http, body, repo, revision):
        if found := self._seen(http, repo, to_write=True):
            files = []
            for asked in json.loads(body)["files"]:
                path = asked["path"]
                oid = _oid(path, found.files[path]) if path in found.files else None
                mode = "lfs" if path.endswith(".safetensors") else "regular"
                files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            http.answer(200, {"files": files})

    def batch(self, http, body, repo):
        if self._seen(http, repo, to_write=True):
            objects = [dict(asked) for asked in json.loads(body)["objects"]]
            for one in objects:
                if one["oid"] not in self.objects:
                    href = f"{self.address}/lfs/{one['oid']}"
                    one["actions"] = {"upload": {"href": href, "header": {}}}
            http.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, http, body, oid):
        whole = hashlib.sha256(body).hexdigest() == oid
        if whole:
            self.objects[oid] = body
        http.answer(200 if whole else 400, {})

    def commit(self, http, body, repo, revision):
        if found := self._seen(http, repo, to_write=True):
            for line in body.splitlines():
                change = json.loads(line)
                value = change["value"]
                if change["key"] == "file":
                    found.files[value["path"]] = base64.b64decode(value["content"])
                elif change["key"] == "lfsFile":
                    found.files[value["path"]] = self.objects[value["oid"]]
                elif change["key"] == "deletedFile":
                    del found.files[value["path"]]
            oid = hashlib.sha1(body).hexdigest()
            found.commits.append(oid)
            url = f"{self.address}/{repo}/commit/{oid}"
            http.answer(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def file(self, http, _, repo, revision, path):
        if found := self._seen(http, repo):
            commit = {"X_Repo_Commit": found.commits[-1]}
            if path not in found.files:
                http.answer(404, b"", X_Error_Code="EntryNotFound", **commit)
            else:
                data = found.files[path]
                http.answer(200, data, ETag=f'"{_oid(path, data)}"', **commit)


def _oid(path, data):
    if path.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = [
    (r"GET /api/agent-harnesses", "nothing"),  # which the client can do without
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"GET /api/models/{REPO}/tree/(?P<revision>\w+)(/(?P<folder>.+))?", "tree"),
    (rf"GET /api/models/{REPO}(/revision/(?P<revision>\w+))?", "info"),
    (rf"POST /api/models/{REPO}/preupload/(?P<revision>\w+)", "preupload"),
    (rf"POST /{REPO}.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(?P<oid>\w+)", "put"),
    (rf"POST /api/models/{REPO}/commit/(?P<revision>\w+)", "commit"),
    (rf"(GET|HEAD) /{REPO}/resolve/(?P<revision>\w+)/(?P<path>.+)", "file"),
]
