"""A small, strict server of Google Cloud Storage's XML API, in memory.

It checks the token, enforces x-goog-if-generation-match, gives every write a new generation, and
answers ranges, lists in pages and multipart uploads. No emulator in the package registries enforces
generations (see docs/storage.md). It does not model permissions of single objects, rates, versions,
retention or encryption.
"""

import contextlib
import http.server
import re
import threading
import urllib.parse
from collections.abc import Iterator
from xml.sax.saxutils import escape

TOKEN = 'a-token-of-the-tests'
_PAGE = 5  # small, so that lists have several pages


class Gcs:
  """The buckets and objects of a server.

  Attributes:
    objects: (generation, content) by bucket and name.
    requests: (method, path) of every request so far.
  """

  def __init__(self) -> None:
    self.objects: dict[str, dict[str, tuple[int, bytes]]] = {}
    self.requests: list[tuple[str, str]] = []
    self.lock = threading.Lock()
    self.uploads: dict[str, dict[int, bytes]] = {}
    self.upload_count = 0
    self.generation = 1000
    self.endpoint = ''

  def put(self, path: str, body: bytes = b'') -> None:
    """Writes an object whose name obstore cannot write, such as /bucket/folder/."""
    _, bucket, name = path.split('/', 2)
    with self.lock:
      self.generation += 1
      self.objects[bucket][name] = self.generation, body

  def environment(self, endpoint: str | None = None) -> dict[str, str]:
    return {'GOOGLE_BASE_URL': endpoint or self.endpoint, 'GOOGLE_BEARER_TOKEN': TOKEN}


@contextlib.contextmanager
def gcs_server(*buckets: str) -> Iterator[Gcs]:
  """Starts the server for as long as the context lasts."""
  gcs = Gcs()
  for bucket in buckets:
    gcs.objects[bucket] = {}
  handler = type('Handler', (_Handler,), {'gcs': gcs})
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
  server.daemon_threads = True
  gcs.endpoint = f'http://127.0.0.1:{server.server_address[1]}'
  thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.05})
  thread.start()
  try:
    yield gcs
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
  gcs: Gcs
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True

  def log_message(self, *args) -> None:
    pass

  def _handle(self) -> None:
    length = int(self.headers.get('Content-Length', 0))
    body = self.rfile.read(length)
    if len(body) < length:  # The client gave the request up, as an aborted upload does.
      self.close_connection = True
      return
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    bucket, _, name = urllib.parse.unquote(url.path).lstrip('/').partition('/')
    with self.gcs.lock:
      self.gcs.requests.append((self.command, urllib.parse.unquote(self.path)))
      if self.headers.get('Authorization') != f'Bearer {TOKEN}':
        self._error(401, 'AuthenticationRequired')
      elif bucket not in self.gcs.objects:
        self._error(404, 'NoSuchBucket')
      elif not name:
        self._list(bucket, query)
      elif 'uploads' in query or 'uploadId' in query:
        self._multipart(bucket, name, query, body)
      else:
        {'GET': self._get, 'HEAD': self._get, 'PUT': self._put, 'DELETE': self._delete}[
          self.command
        ](bucket, name, query, body)

  do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _handle

  def _get(self, bucket: str, name: str, query: dict[str, str], _: bytes) -> None:
    generation, content = self.gcs.objects[bucket].get(name, (0, b''))
    if not generation or query.get('generation', str(generation)) != str(generation):
      self._error(404, 'NoSuchKey')
      return
    headers = self._about(generation)
    asked = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
    if asked is None:
      self._answer(200, content, headers)
      return
    first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
    if first > last:
      self._error(416, 'InvalidRange')
      return
    headers['Content-Range'] = f'bytes {first}-{last}/{len(content)}'
    self._answer(206, content[first : last + 1], headers)

  def _put(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
    now = self.gcs.objects[bucket].get(name, (0, b''))[0]
    condition = self.headers.get('x-goog-if-generation-match')
    if condition is not None and int(condition) != now:
      self._error(412, 'PreconditionFailed')
      return
    self._answer(200, b'', self._about(self._write(bucket, name, body)))

  def _delete(self, bucket: str, name: str, query: dict[str, str], _: bytes) -> None:
    if self.gcs.objects[bucket].pop(name, None) is None:
      self._error(404, 'NoSuchKey')
    else:
      self._answer(204, b'', {})

  def _multipart(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
    if 'uploads' in query:
      self.gcs.upload_count += 1  # Never given twice: parts of an aborted upload may come late.
      upload = f'upload-{self.gcs.upload_count}'
      self.gcs.uploads[upload] = {}
      xml = f'<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>'
      self._xml('InitiateMultipartUploadResult', xml)
      return
    parts = self.gcs.uploads.get(query['uploadId'])
    if parts is None:
      self._error(404, 'NoSuchUpload')
    elif self.command == 'PUT':
      parts[int(query['partNumber'])] = body
      self._answer(200, b'', {'ETag': f'"part-{query["partNumber"]}"'})
    elif self.command == 'POST':
      generation = self._write(bucket, name, b''.join(v for _, v in sorted(parts.items())))
      del self.gcs.uploads[query['uploadId']]
      xml = f'<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><ETag>"{generation}"</ETag>'
      self._xml('CompleteMultipartUploadResult', xml, self._about(generation))
    else:
      del self.gcs.uploads[query['uploadId']]
      self._answer(204, b'', {})

  def _list(self, bucket: str, query: dict[str, str]) -> None:
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
    after = query.get('continuation-token', '')
    entries: dict[str, str] = {}
    for name, (generation, content) in sorted(self.gcs.objects[bucket].items()):
      if not name.startswith(prefix):
        continue
      head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ('', '', '')
      if found:
        folder = f'{prefix}{head}{delimiter}'
        entries[folder] = f'<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>'
      else:
        entries[name] = (
          f'<Contents><Key>{escape(name)}</Key><Generation>{generation}</Generation>'
          f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{generation}"</ETag>'
          f'<Size>{len(content)}</Size></Contents>'
        )
    page = sorted(key for key in entries if key > after)
    more = ''
    if len(page) > _PAGE:
      token = f'<NextContinuationToken>{escape(page[_PAGE - 1])}</NextContinuationToken>'
      more = f'<IsTruncated>true</IsTruncated>{token}'
    self._xml('ListBucketResult', ''.join(entries[key] for key in page[:_PAGE]) + more)

  def _write(self, bucket: str, name: str, content: bytes) -> int:
    self.gcs.generation += 1
    self.gcs.objects[bucket][name] = self.gcs.generation, content
    return self.gcs.generation

  def _about(self, generation: int) -> dict[str, str]:
    return {
      'ETag': f'"{generation}"',
      'x-goog-generation': str(generation),
      'Last-Modified': 'Thu, 01 Jan 2026 00:00:00 GMT',
    }

  def _xml(self, name: str, inside: str, headers: dict[str, str] | None = None) -> None:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'
    self._answer(200, text.encode(), {'Content-Type': 'application/xml', **(headers or {})})

  def _error(self, status: int, code: str) -> None:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    self._answer(status, text.encode(), {'Content-Type': 'application/xml'})

  def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
    self.send_response(status)
    for key, value in {'Content-Length': str(len(content)), **headers}.items():
      if status != 204 or key != 'Content-Length':
        self.send_header(key, value)
    self.end_headers()
    if self.command != 'HEAD':
      with contextlib.suppress(BrokenPipeError):  # A client may give a request up.
        self.wfile.write(content)
