"""Chat templates as transformers renders them, with a bound on what a rendering may cost.

A template is a program written by whoever made the weights. Jinja's sandbox denies it access to the
machine, but does not limit its time and memory: `'x' * 5_000_000_000` is one operation. So each
rendering has a budget, in characters and steps. A step of a loop, a macro or a block costs the
length of its body. An operation that reads or makes more than a few bytes pays for them before it
is done. An operation with an output that can be much larger than its input (`*`, `%`, replace,
join, indent …) pays for its output. Functions of unknown cost cannot be called. An honest
conversation takes a thousandth of the budget.

The limit is kept within the process, not by a child process with kernel limits, because a rendering
takes some ten microseconds and asking another process costs more. It counts operations instead of
measuring time, so that a template works on every machine or on none.
"""

import datetime
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from paxlite.chats import budget as costs
from paxlite.chats.budget import Budget

MAX_TEMPLATE_CHARS = 1 << 18


# What a rendering writes around the body of {% generation %}: characters that no text has, because
# Unicode keeps them for the inner use of programs.
GENERATION = '\ufdd0\ufdd1', '\ufdd1\ufdd0'


def environment(budget: Budget, now: Callable[[], datetime.datetime]) -> Any:
  """Returns Jinja's sandbox with the additions of transformers; every operation in it pays.

  Args:
    budget: What a rendering may cost.
    now: The clock that templates read.
  """
  import jinja2.ext
  from jinja2 import nodes, runtime, sandbox, utils
  from jinja2.compiler import CodeGenerator
  from jinja2.exceptions import SecurityError, TemplateError

  class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: writes its body, which is learned, between marks."""

    tags = {'generation'}

    def parse(self, parser: Any) -> nodes.Node:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in GENERATION)
      return nodes.Scope([begin, *body, end]).set_lineno(line)

  class Code(CodeGenerator):
    """Generates Jinja's code, and adds a call that pays where an operation has no call itself."""

    def paid(self, how: str, node: nodes.Node, frame: Any, visit: Callable[..., None]) -> None:
      self.write(f'environment.budget.{how}(')
      visit(node, frame)
      self.write(')')

    def blockvisit(self, statements: Any, frame: Any) -> None:
      if not frame.soft_frame:  # the branch of a condition is paid for with the code around it
        self.writeline(f'environment.pay({costs.NODE * (4 + _nodes(statements))})')
      super().blockvisit(statements, frame)

    def visit_For(self, node: Any, frame: Any) -> None:
      if node.test is not None:
        cost = nodes.Const(costs.NODE * _nodes([node.test]))
        pays = nodes.Call(nodes.EnvironmentAttribute('pay'), [cost], [], None, None)
        node.test = nodes.And(pays.set_environment(self.environment), node.test)
      super().visit_For(node, frame)

    def visit_Call(self, node: Any, frame: Any, forward_caller: bool = False) -> None:
      if isinstance(node.node, nodes.EnvironmentAttribute):  # made by visit_For
        self.write(f'environment.pay({node.args[0].value})')
      else:
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Compare(self, node: Any, frame: Any) -> None:
      operands = [node.expr, *(operand.expr for operand in node.ops)]
      searches = any(operand.op in ('in', 'notin') for operand in node.ops)
      if not searches and len(operands) == 2 and nodes.Const in map(type, operands):
        self.plain_compare(node, frame)  # its cost is bounded by the constant's length
        return
      if searches and len(operands) == 2:
        self.search(node, frame)
        return
      self.write('(')
      self.paid('whole', node.expr, frame, self.visit)
      for operand in node.ops:
        self.visit(operand, frame)
      self.write(')')

    def visit_Operand(self, node: Any, frame: Any) -> None:
      how = 'searched' if node.op in ('in', 'notin') else 'whole'
      self.write(f' {_OPERATORS[node.op]} ')
      self.paid(how, node.expr, frame, self.visit)

    def visit_Add(self, node: Any, frame: Any) -> None:
      parts = [node.right]
      while isinstance(node.left, nodes.Add):
        node = node.left
        parts.append(node.right)
      self.write('environment.added(')
      for part in (node.left, *reversed(parts)):
        self.visit(part, frame)
        self.write(', ')
      self.write(')')

    def plain_compare(self, node: Any, frame: Any) -> None:
      (operand,) = node.ops
      self.write('(')
      self.visit(node.expr, frame)
      self.write(f' {_OPERATORS[operand.op]} ')
      self.visit(operand.expr, frame)
      self.write(')')

    def search(self, node: Any, frame: Any) -> None:
      (operand,) = node.ops
      self.write('(not ' if operand.op == 'notin' else '(')
      self.write('environment.budget.contains(')
      self.visit(node.expr, frame)
      self.write(', ')
      self.visit(operand.expr, frame)
      self.write('))')

    def visit_Concat(self, node: Any, frame: Any) -> None:
      self.write('environment.joined((')
      for part in node.nodes:
        self.visit(part, frame)
        self.write(', ')
      self.write('))')

    def visit_Getitem(self, node: Any, frame: Any) -> None:
      if isinstance(node.arg, nodes.Slice):
        self.paid('outer', node, frame, super().visit_Getitem)
      else:
        super().visit_Getitem(node, frame)

    def visit_Tuple(self, node: Any, frame: Any) -> None:
      if node.ctx == 'load':  # its hash, too, reads all of it
        self.paid('whole', node, frame, super().visit_Tuple)
      else:
        super().visit_Tuple(node, frame)

    def visit_ScopedEvalContextModifier(self, node: Any, frame: Any) -> None:
      self.fail('{% autoescape %} is not supported: a chat is not HTML', node.lineno)

  class Environment(sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = Code
    intercepted_binops = frozenset(('-', '*', '%', '**'))

    def concat(self, pieces: Iterable[str]) -> str:
      pieces = list(pieces)
      budget.pay(sum(map(len, pieces)))
      return ''.join(pieces)

    def joined(self, values: Iterable[object]) -> str:
      return ''.join([str(budget.whole(value)) for value in values])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
      budget.operator(operator, left, right)
      return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
      given = {k: v for k, v in kwargs.items() if k not in ('_loop_vars', '_block_vars')}
      name = getattr(called, '__name__', type(called).__name__)
      owner = getattr(getattr(called, '__wrapped__', called), '__self__', None)
      for kind, names in costs.METHODS.items():
        if isinstance(owner, kind) and name in names:
          if name == 'join' and args and not isinstance(args[0], Collection):
            args = (list(args[0]), *args[1:])
          budget.method(owner, name, args, given)
          return called(*args, **given)
      if isinstance(owner, runtime.LoopContext | utils.Cycler) or called in known:
        budget.whole([args, given])
      elif not isinstance(called, by_reference):
        raise SecurityError(f'{name} cannot be called in a chat template')
      budget.pay(costs.BODY)
      return super().call(context, called, *args, **kwargs)

  def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)

  def strftime_now(form: str) -> str:
    budget.pay(256 * len(form))
    return now().strftime(form)

  def dictionary(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)

  made = Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, 'jinja2.ext.loopcontrols']
  )
  made.budget = budget
  made.pay = budget.pay
  made.added = functools.partial(costs.added, budget)
  made.finalize = budget.whole
  made.globals |= {
    'raise_exception': raise_exception,
    'strftime_now': strftime_now,
    'dict': dictionary,
  }
  del made.globals['lipsum']
  known = frozenset(made.globals.values())
  by_reference = (
    runtime.Macro, runtime.BlockReference, runtime.LoopContext, runtime.Undefined, utils.Joiner,
  )  # fmt: skip
  made.filters = costs.filters(budget, made.filters)
  made.tests = costs.tests(budget, made.tests)
  return made


_OPERATORS = {
  'eq': '==', 'ne': '!=', 'gt': '>', 'gteq': '>=', 'lt': '<', 'lteq': '<=', 'in': 'in',
  'notin': 'not in',
}  # fmt: skip


def _nodes(statements: Iterable[Any]) -> int:
  """Returns the number of nodes in the syntax trees of these statements."""
  return sum(1 + _nodes(statement.iter_child_nodes()) for statement in statements)
