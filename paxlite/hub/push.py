"""Uploads an exported model to the Hub, where `paxlite export` is told to."""

import pathlib
import re
from collections.abc import Callable

import paxlite
from paxlite.cli.terminal import say
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.hub.answers import asking, package, patiently
from paxlite.hub.names import HubName, model_named

# Files of the same form that a former upload may have left, and that would be read before new ones.
_STALE = {
  'hf': re.compile(r'[^/]+\.(safetensors|bin)(\.index\.json)?|adapter_config\.json'),
  'peft': re.compile(r'adapter_model\.(safetensors|bin)'),
}
_LIBRARIES = {'hf': 'transformers', 'peft': 'peft', 'gguf': 'gguf'}


def pushing(text: str, private: bool, form: str) -> Callable[[pathlib.Path], None]:
  """Returns what uploads a folder, after a look at whether that can succeed.

  Raises UserError if there is no token, it is not one of the organization, or the model is public
  and is to be private.

  Args:
    text: The model, org/name.
    private: Whether a model that is not there yet becomes private.
    form: The value of --to.
  """
  hub = package()
  name = model_named(f'hf:{text.removeprefix("hf:")}')
  if name is None or name.revision != 'main':
    raise UserError(f'--push={text} must be org/name')
  if not hub.get_token():
    raise UserError(f'--push={text} needs a write token: set HF_TOKEN (hf auth login)')
  api = hub.HfApi(library_name='paxlite')
  who = patiently(name, api.whoami)
  owners = [who.get('name'), *(org.get('name') for org in who.get('orgs') or ())]
  owner = name.repo.partition('/')[0]
  if owner not in owners:
    raise UserError(
      f'--push={text}: the token belongs to {owners[0]}, who is not in {owner}: push to '
      f'{owners[0]}/…, or set HF_TOKEN to another'
    )
  is_there = patiently(name, lambda: api.repo_exists(name.repo))
  if is_there and private and not patiently(name, lambda: api.repo_info(name.repo)).private:
    raise UserError(f'--push={text} --private: {name.page} is public: choose another name')
  return lambda folder: _push(name, folder, is_there, private, form)


def _push(name: HubName, folder: pathlib.Path, is_there: bool, private: bool, form: str) -> None:
  """Uploads a folder in one commit, with a README if the model has none."""
  hub = package()
  api = hub.HfApi(library_name='paxlite')
  add = lambda path, content: hub.CommitOperationAdd(path, content)
  files = [p for p in sorted(folder.rglob('*')) if p.is_file()]
  names = [p.relative_to(folder).as_posix() for p in files]
  operations = [*map(add, names, files)]
  try:
    with asking(name):
      if not is_there:
        api.create_repo(name.repo, private=private or None, exist_ok=True)
        say(f'{name.page} is new{", and private" if private else ""}')
      before = api.repo_info(name.repo)
      there = {file.rfilename for file in before.siblings or ()}
      if 'README.md' not in there:
        operations.append(add('README.md', _card(name, form).encode()))
      stale = sorted(n for n in there - {*names} if form in _STALE and _STALE[form].fullmatch(n))
      operations += [hub.CommitOperationDelete(n) for n in stale]
      message = 'Upload by paxlite export'
      api.create_commit(
        name.repo, operations, commit_message=message,
        parent_commit=before.sha if is_there else None,
      )  # fmt: skip
  except UserError as e:
    way = shell.shlex.join(['hf', 'upload', name.repo, str(folder)])
    raise UserError(f'{folder} was exported but not uploaded: {e}. To try again: {way}') from None
  replaced = f', in place of {", ".join(stale)}' if stale else ''
  say(f'{name.page} has the {len(files)} files of {folder}{replaced}')


def _card(name: HubName, form: str) -> str:
  last = name.repo.partition('/')[2]
  return (
    f'---\nlibrary_name: {_LIBRARIES[form]}\n---\n# {last}\n\nThese weights were written by '
    f'`paxlite export --to={form}`, version {paxlite.__version__}.\n'
  )
