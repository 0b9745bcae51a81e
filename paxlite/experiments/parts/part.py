"""A part of an experiment: the attributes on one subject, and what is made of them."""

from paxlite.config.attributes import Attributes, attribute_types


class Part(Attributes):
  """The attributes on one subject, the checks of their values, and the configs made of them.

  An experiment is a class that lists its parts as bases: the names of their attributes are its own.
  A part that reads attributes of another part has it as a base. `validate` and `warnings` add to
  those of `super()`.

      class Batches(Parallelism, subject='Batches'):
        MAX_SEQ_LEN: Training[Count] = 1024  # tokens of a sequence

  A comment at a declaration is the meaning of the attribute: a phrase that can be read alone.
  """

  _subject = ''

  def __init_subclass__(cls, subject: str = '', **kwargs: object) -> None:
    """Takes the heading below which `paxlite show` and docs/attributes.md list the attributes."""
    super().__init_subclass__(**kwargs)
    if subject:
      cls._subject = subject

  @classmethod
  def subject_of(cls, name: str) -> str:
    """Returns the heading of an attribute: that of the part that declares it.

    Experiments of paxlite declare attributes of the subject that they inherit. Those that a user's
    own class declares have a heading of their own, unless the class names a subject.
    """
    owner = next(base for base in reversed(cls.__mro__) if name in vars(base))
    inherits = owner.__module__.partition('.')[0] == 'paxlite'
    subject = getattr(owner, '_subject', '') if inherits else vars(owner).get('_subject', '')
    return subject or f'Attributes of {owner.__name__}'

  @classmethod
  def subjects(cls) -> list[str]:
    """Returns the headings of all attributes, those of the most derived part first."""
    order = [getattr(base, '_subject', '') for base in cls.__mro__]
    used = {cls.subject_of(name) for name in attribute_types(cls)}
    return sorted(used, key=lambda s: order.index(s) if s in order else -1)

  def validate(self) -> None:
    """Checks everything that can be checked without a device; raises UserError."""
    self.check_bounds()

  @property
  def warnings(self) -> list[str]:
    """Sentences to print at the start about values that are valid but unusual."""
    return []
