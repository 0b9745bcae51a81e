"""A server with the API of OpenAI on this machine, as far as `paxlite prove` asks it."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
  """A context that yields the address of a server.

  Args:
    answer: Returns the answer to the body of a request for a completion.
  """

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      self._send({'data': [{'id': 'm'}]} if self.path == '/v1/models' else {})

    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      assert (self.path, body['model'], body['temperature']) == ('/v1/completions', 'm', 0)
      self._send(answer(body))

    def _send(self, contents):
      data = json.dumps(contents, default=float).encode()  # of numpy
      self.send_response(200)
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      self.wfile.write(data)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_port}'
  finally:
    server.shutdown()
    thread.join()
    server.server_close()
