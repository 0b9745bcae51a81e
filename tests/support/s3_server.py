"""SeaweedFS as an S3 server on loopback: it checks signatures and preconditions."""

import contextlib
import hashlib
import hmac
import json
import pathlib
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

KEY, SECRET = 'paxlite-tests', 'a-secret-of-the-tests'


def free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for s in sockets:
      s.bind(('127.0.0.1', 0))
    return [s.getsockname()[1] for s in sockets]


@contextlib.contextmanager
def s3_server(folder: pathlib.Path) -> Iterator['Server']:
  """Starts the server, with its files in `folder`, for as long as the context lasts."""
  identity = {
    'name': 'tests',
    'credentials': [{'accessKey': KEY, 'secretKey': SECRET}],
    'actions': ['Admin', 'Read', 'Write', 'List'],
  }
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 's3.json').write_text(json.dumps({'identities': [identity]}))
  (folder / 'data').mkdir(exist_ok=True)
  master, volume, filer, s3, *grpc = free_ports(8)
  command = [
    pathlib.Path(sysconfig.get_path('scripts'), 'weed'), '-logtostderr=true', 'server',
    f'-dir={folder}/data', '-ip=127.0.0.1', '-ip.bind=127.0.0.1', '-volume.max=20',
    '-master.volumeSizeLimitMB=128', '-master.telemetry=false',
    f'-master.port={master}', f'-volume.port={volume}', f'-filer.port={filer}', f'-s3.port={s3}',
    f'-master.port.grpc={grpc[0]}', f'-volume.port.grpc={grpc[1]}',
    f'-filer.port.grpc={grpc[2]}', f'-s3.port.grpc={grpc[3]}',
    f'-filer.localSocket={folder}/filer.sock', '-s3', f'-s3.config={folder}/s3.json',
    f'-s3.localSocket={folder}/s3.sock', '-iam=false', '-s3.iam=false', '-s3.port.iceberg=0',
    '-s3.port.lance=0',
  ]  # fmt: skip
  with open(folder / 'log', 'wb') as log:
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
  server = Server(f'http://127.0.0.1:{s3}', f'http://127.0.0.1:{filer}', folder / 'log')
  try:
    server.create_bucket('ready')
    yield server
  finally:
    process.kill()  # what it has is not needed any more, and it takes half a minute to leave
    process.wait()


class Server:
  """A running server.

  Attributes:
    endpoint: Its address for S3 clients.
  """

  def __init__(self, endpoint: str, filer: str, log: pathlib.Path):
    self.endpoint = endpoint
    self._filer = filer
    self._log = log

  def create_bucket(self, name: str, patience: float = 60) -> str:
    """Makes a bucket, and waits until objects can be written to it."""
    from paxlite.stores.object_store import ObjectStore

    end = time.monotonic() + patience
    while True:
      try:
        request = urllib.request.Request(f'{self._filer}/buckets/{name}/', method='POST')
        urllib.request.urlopen(request, timeout=5).close()
        store = ObjectStore(f's3://{name}', environment=self.environment())
        store.write('probe', b'x')
        store.delete(['probe'])
        return name
      except (OSError, urllib.error.URLError):
        assert time.monotonic() < end, self._log.read_text()[-2000:]
        time.sleep(0.1)

  def put(self, path: str, body: bytes = b'') -> None:
    """Writes an object whose name obstore cannot write, such as /bucket/folder/."""
    host, now = self.endpoint.removeprefix('http://'), time.gmtime()
    time_stamp, day = time.strftime('%Y%m%dT%H%M%SZ', now), time.strftime('%Y%m%d', now)
    digest = hashlib.sha256(body).hexdigest()
    headers = {'host': host, 'x-amz-content-sha256': digest, 'x-amz-date': time_stamp}
    names = ';'.join(headers)
    url = urllib.parse.quote(path, safe='/~')
    lines = [f'{name}:{value}' for name, value in headers.items()]
    request = '\n'.join(['PUT', url, '', *lines, '', names, digest])
    scope = f'{day}/us-east-1/s3/aws4_request'
    hashed = hashlib.sha256(request.encode()).hexdigest()
    key = f'AWS4{SECRET}'.encode()
    for part in (*scope.split('/'), f'AWS4-HMAC-SHA256\n{time_stamp}\n{scope}\n{hashed}'):
      signature = hmac.new(key, part.encode(), hashlib.sha256)
      key = signature.digest()
    headers['Authorization'] = (
      f'AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, '
      f'Signature={signature.hexdigest()}'
    )
    sent = urllib.request.Request(f'{self.endpoint}{url}', body, headers, method='PUT')
    urllib.request.urlopen(sent, timeout=10).close()

  def environment(self, endpoint: str | None = None) -> dict[str, str]:
    """Returns the variables by which clients find the server (or a proxy before it)."""
    return {
      'AWS_ENDPOINT_URL': endpoint or self.endpoint, 'AWS_ACCESS_KEY_ID': KEY,
      'AWS_SECRET_ACCESS_KEY': SECRET, 'AWS_REGION': 'us-east-1',
    }  # fmt: skip
