"""Slow, cut and foreign requests, by real sockets."""

import asyncio
import contextlib
import socket
import threading
import time
import types

import pytest

uvicorn = pytest.importorskip('uvicorn')

from paxlite.core.errors import UserError  # noqa: E402
from paxlite.serving import api  # noqa: E402
from paxlite.serving import application as applications  # noqa: E402
from paxlite.serving.connections import protocol  # noqa: E402
from paxlite.serving.gate import LOOPBACK, allowed_host  # noqa: E402

MOST, SECONDS = 8, 0.5


@contextlib.contextmanager
def served(application, limits=(MOST, SECONDS, SECONDS)):
  """Serves an application; yields the port."""
  place = socket.create_server(('127.0.0.1', 0))
  config = uvicorn.Config(application, log_level='critical', lifespan='off', http=protocol(*limits))
  server = uvicorn.Server(config)
  thread = threading.Thread(target=lambda: asyncio.run(server.serve([place])), daemon=True)
  thread.start()
  yield place.getsockname()[1]
  server.should_exit = True
  thread.join(10)


def application(hosts=LOOPBACK, has_page=True):
  """The application of a server that has no model."""
  worker = types.SimpleNamespace(count=0, engine=types.SimpleNamespace(num_active=0))
  bodies = types.SimpleNamespace(chat=None)
  return api.Api(worker, bodies, None, 'm', 9.0, 'kéy', hosts, has_page).application


@pytest.fixture
def port(monkeypatch):
  monkeypatch.setattr(applications, '_BODY_SECONDS', SECONDS)
  with served(application()) as found:
    yield found


def opened(port: int, sent: bytes) -> socket.socket:
  found = socket.create_connection(('127.0.0.1', port), 10)
  found.sendall(sent)
  return found


def answer(connection: socket.socket) -> bytes:
  """Returns all that a server sends until it closes the connection."""
  parts = []
  with contextlib.suppress(ConnectionResetError):
    while part := connection.recv(1 << 16):
      parts.append(part)
  return b''.join(parts)


def get(port: int, *headers: str) -> bytes:
  lines = ['GET /health HTTP/1.1', *(headers or ['Host: localhost']), 'Connection: close', '', '']
  return answer(opened(port, '\r\n'.join(lines).encode()))


POST = b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n'
KEY = 'Authorization: Bearer kéy\r\n'.encode()


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('sent', [b'', b'POST /v1', POST, b'GET /health HTTP/1.1\r\nHost: localho'])
def test_a_head_that_is_not_sent_ends(port, sent):
  connection, start = opened(port, sent), time.monotonic()
  for _ in range(2):  # single bytes do not help
    time.sleep(SECONDS / 4)
    connection.sendall(b'x')
  assert answer(connection).startswith(b'HTTP/1.1 408 ' if sent else b'HTTP/1.1 4')
  assert time.monotonic() - start < 9


@pytest.mark.slow
def test_a_body_that_is_not_sent_ends(port):
  found = answer(opened(port, POST + KEY + b'\r\n{"model"'))
  assert found.startswith(b'HTTP/1.1 408 ')
  assert b'The body was not complete after 0.5 seconds' in found
  assert answer(opened(port, POST + b'\r\n' + b' ' * 99)).startswith(b'HTTP/1.1 401 ')


@pytest.mark.parametrize('sent', [b'', b'GET /', POST + KEY + b'\r\n{'])
def test_slow_clients_do_not_hold_all_connections(port, sent):
  held = [opened(port, sent) for _ in range(5 * MOST)]
  start = time.monotonic()
  assert all(b'"ok"' in get(port) for _ in range(MOST))
  assert time.monotonic() - start < 2
  for connection in held:
    connection.close()


async def large(scope, receive, send):
  """Answers /health, and other paths with more than a socket holds."""
  body = b'"ok"' if scope['path'] == '/health' else bytes(1 << 25)
  await send(dict(type='http.response.start', status=200, headers=[]))
  for start in range(0, len(body), 1 << 16):
    part = body[start : start + (1 << 16)]
    await send(dict(type='http.response.body', body=part, more_body=True))
  await send(dict(type='http.response.body', body=b''))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize('count', [1, 9, 5000])
def test_clients_that_do_not_read_do_not_hold_all_connections(count):
  with served(large) as port:
    held = [opened(port, b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n') for _ in range(MOST)]
    for connection in held:
      with contextlib.suppress(OSError):
        connection.sendall(b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n' * (count - 1))
    time.sleep(3 * SECONDS)
    assert all(b'"ok"' in get(port) for _ in range(MOST))
    for connection in held:
      connection.close()
  with served(large) as port:  # who reads slowly gets all
    connection = opened(port, b'GET / HTTP/1.1\r\nConnection: close\r\n\r\n')
    time.sleep(SECONDS / 2)
    assert len(answer(connection)) > 1 << 25


@pytest.mark.parametrize(
  ('headers', 'status'),
  [
    (['Host: localhost:8000'], 200),
    (['Host: [::1]:8000', 'Origin: http://127.0.0.1:3000'], 200),
    (['Host: LOCALHOST'], 200),
    (['Host: localhost.evil.example'], 403),
    (['Host: evil.example:8000'], 403),
    (['Host: localhost@evil.example'], 403),
    (['Host: localhost', 'Origin: https://evil.example'], 403),
    (['Host: localhost', 'Origin: null'], 403),
    (['Host: [::1'], 403),
  ],
)
def test_requests_of_foreign_sites_are_refused(port, headers, status):
  found = get(port, *headers)
  assert found.startswith(f'HTTP/1.1 {status} '.encode())
  assert (b'--allowed_hosts' in found) == (status == 403)


@pytest.mark.parametrize(
  ('hosts', 'headers', 'status'),
  [
    ((), ['Host: any.example:8000'], 200),
    ((), ['Host: any.example:8000', 'Origin: https://Any.example'], 200),
    ((), ['Host: any.example', 'Origin: https://evil.example'], 403),
    ((), ['Host: any.example', 'Origin: null'], 403),
    ((), ['Host: [::1', 'Origin: null'], 403),
    (['example.com:8443'], ['Host: example.com:8443', 'Origin: https://example.com:8443'], 200),
    (['https://Example.com/'], ['Host: example.com'], 200),
    (['fe80::1', '[fe80::2]:80'], ['Host: [fe80::1]:8000', 'Origin: http://[fe80::2]'], 200),
    (['example.com:8443'], ['Host: example.com', 'Origin: https://evil.example'], 403),
  ],
)
def test_open_servers_and_allowed_hosts(hosts, headers, status):
  with served(application([allowed_host(host) for host in hosts])) as port:
    assert get(port, *headers).startswith(f'HTTP/1.1 {status} '.encode())


@pytest.mark.parametrize('host', ['a:b', '[::1', ':80', 'http://'])
def test_allowed_hosts_that_are_no_names(host):
  with pytest.raises(UserError, match='is not the name of a host'):
    allowed_host(host)
