"""A stand-in for the Hugging Face hub: what its client asks for to push a model and to load it."""

import base64
import contextlib
import hashlib
import json
import re
from types import SimpleNamespace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.listening import listening

DROP = "drop"


class HubServer:
    """Repositories in memory, and the requests that came, like `PUT /lfs/0123`.

    Weights are sent as Git LFS objects, all other files within the commit, as the hub has it for
    clients without its storage `xet`.
    """

    def __init__(self):
        self.repositories, self.objects, self.address = {}, {}, ""
        self.requests, self.unknown, self._failures = [], [], []

    @contextlib.contextmanager
    def running(self):
        with listening(self) as self.address:
            yield self

    def fail(self, pattern, *how):
        """Answer the next requests of a kind by a status, or drop their connections."""
        self._failures.append((pattern, [*how]))

    def asked(self, pattern):
        return sum(bool(re.fullmatch(pattern, request)) for request in self.requests)

    async def __call__(self, scope, receive, send):
        assert scope["type"] == "http"
        http, request = Request(scope, receive), f"{scope['method']} {scope['path']}"
        self.requests.append(request)
        kinds = (left for pattern, left in self._failures if re.fullmatch(pattern, request))
        how = next((left.pop(0) for left in kinds if left), None)
        if how == DROP:  # a response that breaks off
            headers = [(b"content-length", b"99")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            return
        response = JSONResponse({"error": "as the test wants it"}, how or 404)
        if how is None:
            matches = ((re.fullmatch(pattern, request), name) for pattern, name in ROUTES)
            match, name = next((found for found in matches if found[0]), (None, None))
            if match:
                response = getattr(self, name)(await http.body(), **match.groupdict())
            else:
                self.unknown.append(request)
        await response(scope, receive, send)

    def nothing(self, body):
        return JSONResponse({}, 404)

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.address}/{name}"
        if name in self.repositories:
            return JSONResponse({"error": "You already created this model repo", "url": url}, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        files, commits = {".gitattributes": b"# lfs\n"}, ["0" * 40]
        made = SimpleNamespace(private=bool(private), files=files, commits=commits)
        self.repositories[name] = made
        return JSONResponse({"url": url, "name": name})

    def validate(self, body):
        return JSONResponse({"errors": [], "warnings": []})

    def info(self, body, repo, revision="main"):
        if (found := self.repositories.get(repo)) is None:
            return JSONResponse({}, 404, {"X-Error-Code": "RepoNotFound"})
        names = [{"rfilename": name} for name in sorted(found.files)]
        more = {"sha": found.commits[-1], "private": found.private}
        return JSONResponse({"id": repo, "modelId": repo, "siblings": names, "tags": [], **more})

    def tree(self, body, repo, revision, folder=None):
        if folder is not None:
            return JSONResponse({}, 404, {"X-Error-Code": "EntryNotFound"})
        files = sorted(self.repositories[repo].files.items())
        listed = [{"path": p, "size": len(data), "oid": _oid(p, data)} for p, data in files]
        return JSONResponse([{"type": "file", **one} for one in listed])

    def preupload(self, body, repo, revision):
        there, files = self.repositories[repo].files, []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            oid = _oid(path, there[path]) if path in there else None
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return JSONResponse({"files": files})

    def batch(self, body, repo):
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.objects:
                href = f"{self.address}/lfs/{one['oid']}"
                one["actions"] = {"upload": {"href": href, "header": {}}}
        return JSONResponse({"transfer": "basic", "objects": objects})

    def put(self, body, oid):
        is_whole = hashlib.sha256(body).hexdigest() == oid
        if is_whole:
            self.objects[oid] = body
        return JSONResponse({}, 200 if is_whole else 400)

    def commit(self, body, repo, revision):
        found = self.repositories[repo]
        for change in map(json.loads, body.splitlines()):
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
        return JSONResponse({"success": True, "commitOid": oid, "commitUrl": url})

    def file(self, body, repo, revision, path):
        found = self.repositories[repo]
        commit = {"X-Repo-Commit": found.commits[-1]}
        if path not in found.files:
            return Response(b"", 404, {"X-Error-Code": "EntryNotFound", **commit})
        data = found.files[path]
        return Response(data, 200, {"ETag": f'"{_oid(path, data)}"', **commit})


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
