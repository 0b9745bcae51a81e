"""A part of an experiment: the attributes on one subject, and what is made of them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from paxlite.config.attribute_kinds import kind_of
from paxlite.config.attributes import Attributes, attribute_types, derived


class Part(Attributes):
  """The attributes on one subject, the checks of their values, and the configs made of them.

  An experiment is a class that lists its parts as bases: the names of their attributes are its own.
  A part that reads attributes of another part has it as a base. `validate` and `warnings` add to
  those of `super()`.

      class TrainingLoop(Parallelism, subject='Training loop'):
        MAX_SEQ_LEN: Training[Count] = 1024  # tokens of a sequence

  A comment at a declaration is the meaning of the attribute: a phrase that can be read alone.
  """

  _subject = ''
  _fields: ClassVar[tuple[Any, ...]] = ()
  _beside: ClassVar[Mapping[str, str]] = {}

  def __init_subclass__(
    cls,
    subject: str = '',
    fields: Iterable[type] = (),
    beside: Mapping[str, str] = _beside,
    **kwargs: object,
  ) -> None:
    """Records the further properties of a part.

    Args:
      subject: The heading below which `paxlite show` and docs/attributes.md list the attributes.
      fields: Dataclasses whose fields with a kind are attributes, by their names in capitals.
      beside: Names of attributes that do nothing unless one of others is set, by the names of
        these; names are separated by blanks.
      **kwargs: For other base classes.
    """
    cls._fields, cls._beside = tuple(fields), beside
    for field in (field for owner in cls._fields for field in dataclasses.fields(owner)):
      if kind_of(field.type) is not None:
        setattr(cls, field.name.upper(), field.default)
        cls.__annotations__[field.name.upper()] = field.type
    super().__init_subclass__(**kwargs)
    if subject:
      cls._subject = subject

  @classmethod
  def subject_of(cls, name: str) -> str:
    """Returns the heading of an attribute, from the part that declares it.

    Experiments of paxlite declare attributes of the subject that they inherit. Those that a user's
    own class declares have a heading of their own, unless the class names a subject.
    """
    owner = next(base for base in reversed(cls.__mro__) if name in vars(base))
    inherits = owner.__module__.partition('.')[0] == 'paxlite'
    subject = getattr(owner, '_subject', '') if inherits else vars(owner).get('_subject', '')
    return subject or f'Attributes of {owner.__name__}'

  @classmethod
  def declaring(cls) -> list[type]:
    """Returns the classes in which attributes are declared: parts, and dataclasses of `fields`."""
    fields = (owner for part in cls.__mro__ for owner in vars(part).get('_fields', ()))
    return [*cls.__mro__, *(base for owner in fields for base in owner.__mro__)]

  @classmethod
  def subjects(cls) -> list[str]:
    """Returns the headings of all attributes, the most derived part's first."""
    order = [getattr(base, '_subject', '') for base in cls.__mro__]
    used = {cls.subject_of(name) for name in attribute_types(cls)}
    return sorted(used, key=lambda s: order.index(s) if s in order else -1)

  @property
  def _idle(self) -> set[str]:
    """Attributes that do nothing, because others are not set."""
    beside = [pair for part in type(self).__mro__ for pair in vars(part).get('_beside', {}).items()]
    is_off = lambda switches: not any(getattr(self, name) for name in switches.split())
    return {name for switches, names in beside if is_off(switches) for name in names.split()}

  def shown_values(self) -> dict[str, object]:
    """Every attribute and its value, sorted by name, but for idle ones that are as declared.

    What a reader of an experiment sees. Its records have all `values`.
    """
    idle = set(filter(self._is_as_declared, self._idle))
    return {name: value for name, value in self.values().items() if name not in idle}

  def _is_as_declared(self, name: str) -> bool:
    stated = [vars(base)[name] for base in type(self).__mro__ if name in vars(base)]
    if isinstance(stated[-1], derived):
      return name not in vars(self) and stated[0] is stated[-1]
    return bool(getattr(self, name) == stated[0] == stated[-1])

  def validate(self) -> None:
    """Checks everything that can be checked without a device; raises UserError."""
    self.check_bounds()

  @property
  def warnings(self) -> list[str]:
    """Sentences to print at the start about values that are valid but unusual."""
    return []
