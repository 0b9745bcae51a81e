"""A metadata server of Compute Engine, on loopback, for one TPU machine."""

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping

_PATH = '/computeMetadata/v1/instance/attributes/'


@contextlib.contextmanager
def serving(attributes: Mapping[str, str]) -> Iterator[str]:
  """Serves the attributes of a machine in a thread; yields the value of GCE_METADATA_IP."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked = self.headers['Metadata-Flavor'] == 'Google' and self.path.removeprefix(_PATH)
      self.send_response(200 if asked in attributes else 404)
      self.end_headers()
      self.wfile.write(attributes.get(asked, '').encode())

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
      yield f'127.0.0.1:{server.server_port}'
    finally:
      server.shutdown()
