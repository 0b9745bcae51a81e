"""Endpoints and credentials of object stores, from the places where obstore does not look."""

import configparser
import pathlib
from collections.abc import Mapping

from paxlite.core.errors import UserError


def s3_settings(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the settings in the profiles of ~/.aws, which obstore does not read itself."""
  names = {
    'endpoint': ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT'),
    'access_key_id': ('AWS_ACCESS_KEY_ID',),
    'secret_access_key': ('AWS_SECRET_ACCESS_KEY',),
    'session_token': ('AWS_SESSION_TOKEN',),
    'region': ('AWS_REGION', 'AWS_DEFAULT_REGION'),
  }
  config = {
    name: next(environment[v] for v in variables if environment.get(v))
    for name, variables in names.items()
    if any(environment.get(v) for v in variables)
  }
  profile = environment.get('AWS_PROFILE', 'default')
  home = pathlib.Path('~/.aws').expanduser()
  credentials = environment.get('AWS_SHARED_CREDENTIALS_FILE', str(home / 'credentials'))
  settings = environment.get('AWS_CONFIG_FILE', str(home / 'config'))
  section = _section(credentials, profile)
  if 'access_key_id' not in config and 'aws_access_key_id' in section:
    keys = {'access_key_id', 'secret_access_key', 'session_token'}
    config |= {k: section[f'aws_{k}'] for k in keys if f'aws_{k}' in section}
  section = _section(settings, profile if profile == 'default' else f'profile {profile}')
  for name, setting in (('region', 'region'), ('endpoint', 'endpoint_url')):
    if name not in config and setting in section:
      config[name] = section[setting]
  return config


def _section(path: str, name: str) -> Mapping[str, str]:
  """Returns a section of a file of settings; it is empty if there is none."""
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
