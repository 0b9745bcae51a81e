"""Endpoints and credentials of object stores, from the places where obstore does not look."""

import configparser
import pathlib
from collections.abc import Mapping

from paxlite.core.errors import UserError

_KEYS = 'access_key_id', 'secret_access_key', 'session_token'


def s3_settings(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the settings in the profiles of ~/.aws, which obstore does not read itself."""
  names = {
    'endpoint': ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT'),
    'access_key_id': ('AWS_ACCESS_KEY_ID',), 'secret_access_key': ('AWS_SECRET_ACCESS_KEY',),
    'session_token': ('AWS_SESSION_TOKEN',), 'region': ('AWS_REGION', 'AWS_DEFAULT_REGION'),
  }  # fmt: skip
  stated = ((name, next(filter(None, map(environment.get, names[name])), '')) for name in names)
  config = {name: value for name, value in stated if value}
  profile = environment.get('AWS_PROFILE', 'default')
  in_config = profile if profile == 'default' else f'profile {profile}'
  keys = _section(environment, 'AWS_SHARED_CREDENTIALS_FILE', 'credentials', profile)
  settings = _section(environment, 'AWS_CONFIG_FILE', 'config', in_config)
  found = {'region': settings.get('region'), 'endpoint': settings.get('endpoint_url')}
  if 'access_key_id' not in config and 'aws_access_key_id' in keys:
    config |= {name: keys[f'aws_{name}'] for name in _KEYS if f'aws_{name}' in keys}
  return {**{name: value for name, value in found.items() if value}, **config}


def _section(
  environment: Mapping[str, str], variable: str, file: str, name: str
) -> Mapping[str, str]:
  """Returns a section of a file of settings; it is empty if there is none."""
  path = environment.get(variable, str(pathlib.Path('~/.aws').expanduser() / file))
  parser = configparser.ConfigParser(interpolation=None)
  try:
    parser.read(path)
    return parser[name] if parser.has_section(name) else {}
  except (configparser.Error, UnicodeDecodeError) as e:
    raise UserError(f'{path} is damaged ({str(e).splitlines()[0]})') from None


def gs_settings(environment: Mapping[str, str]) -> dict[str, str | bool]:
  """Returns the settings for an emulator's endpoint, which obstore does not read itself."""
  token = environment.get('GOOGLE_BEARER_TOKEN')
  config: dict[str, str | bool] = {'bearer_token': token} if token else {}
  if base := environment.get('GOOGLE_BASE_URL'):
    return {**config, 'base_url': base}
  emulator = environment.get('STORAGE_EMULATOR_HOST')
  if not emulator:
    return config
  url = emulator if '://' in emulator else f'http://{emulator}'
  return {**config, 'base_url': url.rstrip('/'), 'skip_signature': not token}
