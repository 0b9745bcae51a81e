"""The parts of the Hugging Face Hub's API that models, datasets and uploads need, on loopback.

Answers, headers and redirects are as those of the Hub: large files have an address of their own, at
which their name is their SHA-256. Faults are drawn by tests, for one request each.
"""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator

LARGE = 4096  # bytes from which a file is one of git-lfs
_REPO = r'(?P<kind>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)'
_BLOCK = 1 << 14


@dataclasses.dataclass
class Repo:
  """A model or dataset: the files of each commit, the oldest first."""

  commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
  card: dict = dataclasses.field(default_factory=dict)
  gated: bool = False
  private: bool = False
  claimed: dict[str, int] = dataclasses.field(default_factory=dict)  # sizes that are not true

  def commit(self, files: dict[str, bytes]) -> str:
    name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
    self.commits[name] = files
    return name

  def claim(self, path: str) -> dict[str, int]:
    return {'size': self.claimed[path]} if path in self.claimed else {}

  def at(self, revision: str) -> str | None:
    if revision == 'main':
      return next(reversed(self.commits), None)
    return revision if revision in self.commits else None


@dataclasses.dataclass
class Fault:
  """What is wrong with the next request, or the next `times`, whose method and path match."""

  pattern: str
  status: int = 0
  headers: dict[str, str] = dataclasses.field(default_factory=dict)
  cut: int | None = None  # bytes after which the connection ends
  wrong: bool = False  # other bytes are sent
  pause: float = 0.0  # seconds before each 16 KiB
  times: int = 1


class Hub:
  """The state of the server, which tests fill and read."""

  def __init__(self) -> None:
    self.repos: dict[tuple[str, str], Repo] = {}
    self.blobs: dict[str, bytes] = {}
    self.tokens: dict[str, dict] = {}  # what whoami answers
    self.faults: list[Fault] = []
    self.requests: list[str] = []  # method, path, and range
    self.sent: dict[str, int] = {}  # bytes of each path
    self.address = ''

  def add(self, repo: str, files: dict[str, bytes], kind: str = 'model', **more) -> str:
    """Adds a commit of files, and returns its name."""
    found = self.repos.setdefault((kind, repo), Repo(**more))
    self.blobs |= {hashlib.sha256(x).hexdigest(): x for x in files.values()}
    return found.commit(files)

  def asked(self, pattern: str) -> list[str]:
    return [request for request in self.requests if re.search(pattern, request)]

  def fault(self, request: str) -> Fault:
    for fault in self.faults:
      if re.search(fault.pattern, request) and fault.times:
        fault.times -= 1
        return fault
    return Fault('')


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
  hub = Hub()
  handler = type('Handler', (_Handler,), {'hub': hub})
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
  hub.address = f'http://127.0.0.1:{server.server_address[1]}'
  threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
  try:
    yield hub
  finally:
    server.shutdown()
    server.server_close()


def _git_sum(content: bytes) -> str:
  return hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
  hub: Hub
  protocol_version = 'HTTP/1.1'

  def log_message(self, *_):
    pass

  def _any(self) -> None:
    length = int(self.headers.get('Content-Length') or 0)
    self.body = self.rfile.read(length)
    path, _, _ = urllib.parse.unquote(self.path).partition('?')
    self.request_line = ' '.join(filter(None, (self.command, path, self.headers.get('Range'))))
    self.hub.requests.append(self.request_line)
    self.fault = self.hub.fault(self.request_line)
    with contextlib.suppress(ConnectionError):
      if self.fault.status:
        self._answer(self.fault.status, b'{"error": "a fault"}', self.fault.headers)
      else:
        self._route(path)

  do_GET = do_HEAD = do_POST = do_PUT = _any

  def _route(self, path: str) -> None:
    routes = (
      (r'/api/(?P<kind>model|dataset)s/(?P<repo>[\w.-]+/[\w.-]+)(/revision/(?P<revision>.+))?',
       self._info),
      (rf'/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)', self._file),
      (r'/lfs/(?P<sum>[0-9a-f]+)', self._blob),
      (r'/api/whoami-v2', self._whoami),
      (r'/api/validate-yaml', lambda: self._json({'errors': [], 'warnings': []})),
      (r'/api/repos/create', self._create),
      (r'/api/models/(?P<repo>[\w.-]+/[\w.-]+)/preupload/.+', self._preupload),
      (r'/(?P<repo>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch', self._batch),
      (r'/api/models/(?P<repo>[\w.-]+/[\w.-]+)/commit/.+', self._commit),
    )  # fmt: skip
    for pattern, act in routes:
      if found := re.fullmatch(pattern, path):
        act(**found.groupdict())
        return
    self._refuse(404, 'NoSuchRoute')

  def _info(self, kind: str, repo: str, revision: str | None) -> None:
    found = self._readable(kind, repo)
    if found is None:
      return
    commit = found.at(revision or 'main')
    if commit is None and (revision or found.commits):
      self._refuse(404, 'RevisionNotFound')
      return
    files = found.commits.get(commit or '', {})
    about = [self._about(name, x) | found.claim(name) for name, x in files.items()]
    self._json(
      {
        'id': repo, 'sha': commit, 'private': found.private, 'gated': found.gated,
        'cardData': found.card, 'siblings': about,
      }
    )  # fmt: skip

  def _about(self, name: str, content: bytes) -> dict:
    about = {'rfilename': name, 'size': len(content), 'blobId': _git_sum(content)}
    if len(content) >= LARGE:
      oid = hashlib.sha256(content).hexdigest()
      about['lfs'] = {'sha256': oid, 'size': len(content), 'pointerSize': 134}
    return about

  def _file(self, kind: str | None, repo: str, revision: str, path: str) -> None:
    found = self._readable('dataset' if kind else 'model', repo)
    if found is None:
      return
    commit = found.at(revision)
    if commit is None or path not in found.commits[commit]:
      self._refuse(404, 'EntryNotFound' if commit else 'RevisionNotFound')
      return
    content = found.commits[commit][path]
    headers = {'X-Repo-Commit': commit, 'Accept-Ranges': 'bytes'}
    if len(content) < LARGE:
      self._send(content, {**headers, 'ETag': f'"{_git_sum(content)}"'})
      return
    oid = hashlib.sha256(content).hexdigest()
    headers |= {'X-Linked-Etag': f'"{oid}"', 'X-Linked-Size': str(len(content))}
    self._answer(302, b'', {**headers, 'Location': f'http://localhost:{self._port}/lfs/{oid}'})

  @property
  def _port(self) -> int:
    return self.server.server_address[1]

  def _blob(self, sum: str) -> None:
    if self.command == 'PUT':
      right = hashlib.sha256(self.body).hexdigest() == sum
      if right:
        self.hub.blobs[sum] = self.body
      self._answer(200 if right else 400, b'')
      return
    assert 'Authorization' not in self.headers  # of another host
    self._send(self.hub.blobs[sum], {'ETag': f'"{sum}"'})

  def _send(self, content: bytes, headers: dict[str, str]) -> None:
    start = 0
    if found := re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range') or ''):
      start = int(found[1])
      headers = {**headers, 'Content-Range': f'bytes {start}-{len(content) - 1}/{len(content)}'}
    self._answer(206 if start else 200, content[start:], headers)

  def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
    fault = self.fault
    self.send_response(status)
    for name, value in (headers or {}).items():
      self.send_header(name, value)
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    if self.command == 'HEAD':
      return
    if fault.wrong:
      content = bytes(x ^ 1 for x in content)
    for begin in range(0, len(content), _BLOCK):
      time.sleep(fault.pause)
      block = content[begin : begin + _BLOCK]
      if fault.cut is not None:
        block = block[: max(0, fault.cut - begin)]
      self.wfile.write(block)
      self.wfile.flush()
      path = self.path.partition('?')[0]
      self.hub.sent[path] = self.hub.sent.get(path, 0) + len(block)
      if fault.cut is not None and begin + _BLOCK >= fault.cut:
        self.close_connection = True
        return

  def _json(self, value: object, status: int = 200) -> None:
    self._answer(status, json.dumps(value).encode(), {'Content-Type': 'application/json'})

  def _refuse(self, status: int, code: str) -> None:
    headers = {'X-Error-Code': code, 'X-Error-Message': code}
    self._answer(status, json.dumps({'error': code}).encode(), headers)

  def _who(self) -> dict | None:
    return self.hub.tokens.get((self.headers.get('Authorization') or '').removeprefix('Bearer '))

  def _readable(self, kind: str, repo: str) -> Repo | None:
    """Returns a repository, or refuses it as the Hub does, which does not tell what is private."""
    found = self.hub.repos.get((kind, repo))
    is_file = '/resolve/' in self.path
    if found is None or (found.private and self._who() is None):
      self._refuse(404 if self._who() else 401, 'RepoNotFound')
    elif found.gated and is_file and self._who() is None:
      self._refuse(403 if 'Authorization' in self.headers else 401, 'GatedRepo')
    else:
      return found
    return None

  def _whoami(self) -> None:
    who = self._who()
    self._json(who) if who else self._refuse(401, 'Unauthorized')

  def _create(self) -> None:
    told = json.loads(self.body)
    repo = f'{told.get("organization") or self._who()["name"]}/{told["name"]}'
    private = told.get('private') or told.get('visibility') == 'private'
    self.hub.repos.setdefault(('model', repo), Repo(private=private))
    self._json({'url': f'{self.hub.address}/{repo}', 'name': repo, 'id': repo})

  def _preupload(self, repo: str) -> None:
    mode = lambda f: 'lfs' if f['size'] >= LARGE else 'regular'
    files = [
      {'path': f['path'], 'uploadMode': mode(f), 'shouldIgnore': False}
      for f in json.loads(self.body)['files']
    ]
    self._json({'files': files})

  def _batch(self, repo: str) -> None:
    action = lambda o: {'upload': {'href': f'{self.hub.address}/lfs/{o["oid"]}'}}
    asked = json.loads(self.body)['objects']
    objects = [
      {**o, **({} if o['oid'] in self.hub.blobs else {'actions': action(o)})} for o in asked
    ]
    self._json({'transfer': 'basic', 'objects': objects})

  def _commit(self, repo: str) -> None:
    found = self.hub.repos['model', repo]
    head = found.at('main')
    files = dict(found.commits[head]) if head else {}
    for line in self.body.splitlines():
      entry = json.loads(line)
      value = entry['value']
      if entry['key'] == 'file':
        files[value['path']] = base64.b64decode(value['content'])
      elif entry['key'] == 'lfsFile':
        files[value['path']] = self.hub.blobs[value['oid']]
      elif entry['key'] == 'deletedFile':
        del files[value['path']]
      elif entry['key'] == 'header':
        assert value.get('parentCommit') in (None, head)
    commit = found.commit(files)
    self._json({'commitUrl': f'{self.hub.address}/{repo}/commit/{commit}', 'commitOid': commit})
