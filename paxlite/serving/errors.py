"""Errors in the format of OpenAI's API."""

from paxlite.core.json_text import JsonObject


class ApiError(Exception):
  """An error response to a client.

  Args:
    message: What is wrong.
    param: The argument that is wrong.
    code: A word for it.
    status: The status of HTTP.
    type: The kind of the error.
  """

  def __init__(
    self,
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
    type: str = 'invalid_request_error',
  ):
    super().__init__(message)
    self.status = status
    self._message, self._param, self._code, self._type = message, param, code, type

  @property
  def body(self) -> JsonObject:
    """The body of the response."""
    error = dict(message=self._message, type=self._type, param=self._param, code=self._code)
    return {'error': error}


def unknown_model(name: str, known: str) -> ApiError:
  """Returns the error for an unknown model."""
  message = f'The model {name!r} does not exist; this server has {known!r}'
  return ApiError(message, 'model', 'model_not_found', 404)


def wrong_key(form: str) -> ApiError:
  """Returns the error that the API key is missing or wrong; clients send it in the form `form`."""
  return ApiError(
    f'The API key is missing or wrong: send it as "{form}"',
    code='invalid_api_key', status=401, type='authentication_error',
  )  # fmt: skip


def foreign_host(kind: str, value: str) -> ApiError:
  """Returns the error for a request to another server, or from another site's page."""
  message = (
    f'{kind} is {value[:200]!r}: this server answers only requests to and from its own names; '
    '`paxlite serve --allowed_hosts` adds names'
  )
  return ApiError(message, code='host_not_allowed', status=403, type='permission_error')


def too_slow_body(seconds: float) -> ApiError:
  """Returns the error for a request that arrives too slowly."""
  message = f'The body was not complete after {seconds:g} seconds'
  return ApiError(message, code='timeout', status=408, type='timeout_error')


def busy() -> ApiError:
  """Returns the error for too many waiting requests."""
  return ApiError(
    'Too many requests are queued; try again later',
    code='rate_limit_exceeded', status=429, type='rate_limit_error',
  )  # fmt: skip


def too_slow(seconds: float) -> ApiError:
  """Returns the error for an answer that takes too long."""
  message = f'The answer was not complete after {seconds:g} seconds'
  return ApiError(message, code='timeout', status=504, type='timeout_error')


def failed() -> ApiError:
  """Returns the error for a failure of the server, whose log says why."""
  message = 'The server has failed to answer; its log says why'
  return ApiError(message, code='internal_error', status=500, type='server_error')
